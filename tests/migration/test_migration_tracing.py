"""One trace per plan, a span per handover; what a successor goes on with links to it."""

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from bus.memory import MemoryBroker, MemoryBus
from fleet.events import MigrationPlanned, ProposeHandover
from migration.tracing import Tracing
from tests.migration.conducting_rig import apply, engine, leading, log, replicating


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Of every service that begins from here on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing.create(provider)
    monkeypatch.setattr(Tracing, "create", lambda: tracing)
    return exporter


def traceparent(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"


@pytest.mark.looptime
async def test_a_plan_is_one_trace_and_its_handovers_are_below_it(spans: InMemorySpanExporter) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        accepted = await apply(bus, replicating(handovers=2))
        await asyncio.sleep(3)
        *handovers, plan = spans.get_finished_spans()
        assert [span.name for span in handovers] == ["roost.handover"] * 2
        assert plan.name == "roost.plan"
        assert plan.context is not None
        assert all(span.parent is not None and span.parent.span_id == plan.context.span_id for span in handovers)
        assert [event.name for event in handovers[0].events] == ["proposed", "staged", "decided", "flipped"]
        about = dict(handovers[1].attributes or {})
        assert {key: about[key] for key in ("roost.plan", "roost.epoch", "roost.bytes", "roost.outcome")} == {
            "roost.plan": accepted.plan,
            "roost.epoch": 2,
            "roost.bytes": 384,
            "roost.outcome": "committed",
        }
        (planned,) = [entry for entry in await log(bus) if isinstance(entry, MigrationPlanned)]
        assert planned.traceparent == traceparent(plan)
        proposed = {command.traceparent for _, command in ranks.commands if isinstance(command, ProposeHandover)}
        assert proposed == {traceparent(span) for span in handovers}


@pytest.mark.looptime
async def test_an_abort_is_an_error_with_its_reason(spans: InMemorySpanExporter) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus):
        ranks.fails[0] = "no room for an expert", "room"
        await apply(bus, replicating())
        await asyncio.sleep(3)
        handover, plan = spans.get_finished_spans()
        assert [event.name for event in handover.events] == ["proposed", "given up", "aborted"]
        for span in (handover, plan):
            assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no room for an expert")


@pytest.mark.looptime
async def test_what_a_successor_goes_on_with_links_to_the_plan(spans: InMemorySpanExporter) -> None:
    broker = MemoryBroker()
    async with engine(broker) as ranks:
        ranks.stage_seconds = 0.4
        async with leading(MemoryBus(broker)):
            await apply(MemoryBus(broker), replicating())
            await asyncio.sleep(0.1)
        async with leading(MemoryBus(broker)):
            await asyncio.sleep(5)
    first, *_, resumed = spans.get_finished_spans()
    assert (first.name, resumed.name) == ("roost.plan", "roost.plan.resumed")
    assert first.context is not None
    assert [link.context.span_id for link in resumed.links] == [first.context.span_id]
