"""Engine spans: three children of the caller's span when somebody records, nothing at all otherwise."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_adapter.embedded.answers import Moments, Outcome
from engine_adapter.embedded.routed import RoutedTrace
from engine_adapter.tracing import EngineTracing, NoTracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = CALLER[:-2] + "00"


def outcome(admitted: int = 20) -> Outcome:
    return Outcome(
        reason="length",
        prompt_tokens=40,
        completion_tokens=7,
        cached_tokens=32,
        preemptions=1,
        moments=Moments(submitted=10, admitted=admitted, first_token=50, finished=90),
        routed=RoutedTrace(1, 4, 1),
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_a_request_has_three_spans_end_to_end_under_its_caller(recorded: InMemorySpanExporter) -> None:
    EngineTracing(engine="one", rank=1, model="demo").record(CALLER, outcome())
    spans = recorded.get_finished_spans()
    assert [(span.name, span.start_time, span.end_time) for span in spans] == [
        ("roost.engine.queue", 10, 20),
        ("roost.engine.prefill", 20, 50),
        ("roost.engine.decode", 50, 90),
    ]
    assert {(span.parent.span_id, span.context.trace_id) for span in spans if span.parent is not None and span.context is not None} == {
        (0xB7AD6B7169203331, 0x0AF7651916CD43DD8448EB211C80319C)
    }
    together: dict[str, object] = {}
    for span in spans:
        together.update(span.attributes or {})
    assert together == {
        "roost.engine": "one",
        "roost.rank": 1,
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 7,
        "roost.cached_tokens": 32,
        "roost.preemptions": 1,
        "roost.finish_reason": "length",
    }


@pytest.mark.parametrize("caller", [None, NOT_SAMPLED])
def test_what_nobody_traces_makes_no_span(recorded: InMemorySpanExporter, caller: str | None) -> None:
    EngineTracing(engine="one", rank=0, model="demo").record(caller, outcome())
    assert recorded.get_finished_spans() == ()


def test_a_request_that_never_ran_makes_no_span(recorded: InMemorySpanExporter) -> None:
    EngineTracing(engine="one", rank=0, model="demo").record(CALLER, outcome(admitted=0))
    assert recorded.get_finished_spans() == ()


def test_without_a_provider_recording_does_nothing() -> None:
    EngineTracing(engine="one", rank=0, model="demo").record(CALLER, outcome())
    NoTracing().record(CALLER, outcome())
