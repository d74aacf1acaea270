"""A popularity shift starts a trace, whose id is published with it; without a provider nothing is traced."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from bus.memory import MemoryBus
from fleet.facts.demand import PopularityShifted
from tests.tracker.test_learning_service import SUBJECTS, joined, serving, shift_told
from tracker import tracing
from tracker.tracing import ShiftTracing


def shift(model: str = "m", settled: bool = False) -> PopularityShifted:
    return PopularityShifted(
        model=model,
        version=7,
        settled=settled,
        divergence=0.25,
        threshold=0.125,
        layers=() if settled else (3, 1),
    )


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider(shutdown_on_exit=False)


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def traceparent(span: ReadableSpan) -> str:
    context = context_of(span)
    return (
        f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"
    )


def say(spans: ShiftTracing, what: PopularityShifted) -> PopularityShifted:
    with spans.saying(what) as said:
        return said


def test_a_shift_is_the_first_span_of_a_trace_and_its_end_is_below_it(
    provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    said = ShiftTracing(provider)
    messages = [
        say(said, shift()),
        say(said, shift("other")),
        say(said, shift(settled=True)),
        say(said, shift()),
    ]
    first, other, settled, again = spans.get_finished_spans()
    assert [span.name.rpartition(".")[2] for span in (first, other, settled, again)] == [
        "shift",
        "shift",
        "settled",
        "shift",
    ]
    assert dict(first.attributes or {}) == {
        "roost.model": "m",
        "roost.version": 7,
        "roost.divergence": 0.25,
        "roost.threshold": 0.125,
        "roost.layers": (3, 1),
    }
    assert [message.traceparent for message in messages] == [
        traceparent(span) for span in (first, other, settled, again)
    ]
    assert [span.parent for span in (first, other, again)] == [None] * 3
    assert settled.parent == context_of(first)
    assert len({context_of(span).trace_id for span in (first, other, settled, again)}) == 3


def test_a_settling_whose_beginning_nobody_remembers_is_a_trace_of_its_own(
    provider: TracerProvider, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_SHIFTS", 1)
    said = ShiftTracing(provider)
    for message in (
        shift("first"),
        shift("second"),
        shift("first", settled=True),
        shift("second", settled=True),
    ):
        say(said, message)
    *_, forgotten, remembered = spans.get_finished_spans()
    assert forgotten.parent is None
    assert remembered.parent is not None


def test_without_a_provider_shifts_are_said_as_they_are() -> None:
    said = ShiftTracing(trace.NoOpTracerProvider())
    assert [say(said, one) for one in (shift(), shift(settled=True))] == [shift(), shift(settled=True)]


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_the_tracker_says_the_span_of_each_shift_it_notices(
    provider: TracerProvider, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    bus = MemoryBus()
    await bus.record(SUBJECTS.membership("a"), joined())
    async with serving(bus):
        told = await shift_told(bus)
    (span,) = spans.get_finished_spans()
    assert dict(span.attributes or {})["roost.divergence"] == told.divergence
    assert told.traceparent == traceparent(span)
