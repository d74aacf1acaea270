"""One trace per plan: a span per handover and one for the verdict, below its cause, also across
coordinators."""

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.migrations import LoopFigures, MigrationCommitted, MigrationPlanned, PlanEvaluated
from fleet.requests.handovers import ProposeHandover
from fleet.requests.plans import SetLayout
from migration.telemetry.tracing import MigrationTracing
from tests.migration.executor_fixture import apply, ask, engine, leading, log, replicating

SHIFT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collect the spans of every service started from here on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = MigrationTracing.create(provider)
    monkeypatch.setattr(MigrationTracing, "create", lambda: tracing)
    return exporter


def trace_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def traceparent(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return (
        f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"
    )


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
        assert all(
            span.parent is not None and span.parent.span_id == plan.context.span_id for span in handovers
        )
        assert [event.name for event in handovers[0].events] == ["proposed", "staged", "decided", "flipped"]
        about = dict(handovers[1].attributes or {})
        assert about["roost.experts"] == ("0/1: 0 -> 1",)
        committed = [event for event in await log(bus) if isinstance(event, MigrationCommitted)]
        assert [
            [(one.layer, one.expert, one.source, one.rank) for one in event.arrivals] for event in committed
        ] == [[(0, 0, 0, 1)], [(0, 1, 0, 1)]]
        assert {key: about[key] for key in ("roost.plan", "roost.epoch", "roost.bytes", "roost.outcome")} == {
            "roost.plan": accepted.plan,
            "roost.epoch": 2,
            "roost.bytes": 384,
            "roost.outcome": "committed",
        }
        (planned,) = [entry for entry in await log(bus) if isinstance(entry, MigrationPlanned)]
        assert planned.traceparent == traceparent(plan)
        proposed = {
            command.traceparent for _, command in ranks.commands if isinstance(command, ProposeHandover)
        }
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
            assert (span.status.status_code, span.status.description) == (
                StatusCode.ERROR,
                "no room for an expert",
            )


@pytest.mark.looptime
async def test_what_a_successor_goes_on_with_is_of_the_plans_trace_and_links_to_it(
    spans: InMemorySpanExporter,
) -> None:
    broker = MemoryBroker()
    async with engine(broker) as ranks:
        ranks.stage_seconds = 0.4
        async with leading(MemoryBus(broker)):
            await apply(MemoryBus(broker), replicating())
            await asyncio.sleep(0.1)
        async with leading(MemoryBus(broker)):
            await asyncio.sleep(5)
    first, *others, resumed = spans.get_finished_spans()
    assert (first.name, resumed.name) == ("roost.plan", "roost.plan.resumed")
    assert first.context is not None
    assert [link.context.span_id for link in resumed.links] == [first.context.span_id]
    assert {trace_id(span) for span in (*others, resumed)} == {first.context.trace_id}
    assert resumed.parent is not None
    assert resumed.parent.span_id == first.context.span_id


@pytest.mark.parametrize(("parent", "below"), [(SHIFT, True), ("", False), ("00-nonsense-01", False)])
def test_a_plan_that_answers_something_is_in_its_trace_and_any_other_in_its_own(
    spans: InMemorySpanExporter, parent: str, below: bool
) -> None:
    tracing = MigrationTracing.create()
    assert tracing is not None
    tracing.plan("one", replicating(), "planner", parent).end(None)
    (span,) = spans.get_finished_spans()
    assert (trace_id(span) == 0x0AF7651916CD43DD8448EB211C80319C) == below
    assert (span.parent is not None and span.parent.span_id == 0xB7AD6B7169203331) == below


def test_a_verdict_is_a_span_below_its_plan_that_says_what_was_foretold_and_measured(
    spans: InMemorySpanExporter,
) -> None:
    tracing = MigrationTracing.create()
    assert tracing is not None
    plan = tracing.plan("one", replicating(), "planner")
    plan.end(None)
    before, after = (
        LoopFigures(remote_ranks=ranks, local=0.25, balance=0.9, step_seconds=0.01) for ranks in (2.0, 1.5)
    )
    about = {
        "engine": "one",
        "worker_id": 1,
        "plan": "p-1",
        "epoch": 3,
        "plan_discount": 0.8,
        "reason": "it brought half of it",
    }
    tracing.evaluated(
        PlanEvaluated(
            verdict="kept",
            predicted_before=before,
            predicted_after=after,
            measured_after=before,
            realised=0.5,
            **about,
        ),
        plan.traceparent,
    )  # type: ignore[arg-type]
    first, evaluation = spans.get_finished_spans()
    assert evaluation.name == "roost.plan.evaluated"
    assert evaluation.parent is not None
    assert first.context is not None
    assert (trace_id(evaluation), evaluation.parent.span_id) == (
        first.context.trace_id,
        first.context.span_id,
    )
    recorded = dict(evaluation.attributes or {})
    assert (
        recorded["roost.verdict"],
        recorded["roost.epoch"],
        recorded["roost.realised"],
        recorded["roost.plan_discount"],
    ) == (
        "kept",
        3,
        0.5,
        0.8,
    )
    assert (
        recorded["roost.predicted.before.remote_ranks"],
        recorded["roost.measured.after.remote_ranks"],
    ) == (
        2.0,
        2.0,
    )
    assert not any(name.startswith("roost.measured.before") for name in recorded)


@pytest.mark.looptime
async def test_a_switch_of_layout_is_one_trace_that_names_its_layers(spans: InMemorySpanExporter) -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker, unshardable="") as ranks, leading(bus):
        await ask(bus, SetLayout(engine="a", sharded=(0, 1), now=True))
        await ranks.commands_to(ProposeHandover)
        async with leading(MemoryBus(broker)):
            await asyncio.sleep(4)
        found = spans.get_finished_spans()
        plan = next(span for span in found if span.name == "roost.plan")
        handovers = [span for span in found if span.name == "roost.handover"]
        assert {trace_id(span) for span in found} == {trace_id(plan)}
        assert [dict(span.attributes or {})["roost.copies"] for span in handovers] == [8, 8]
        about = dict(plan.attributes or {})
        assert (about["roost.to_sharded"], "roost.to_whole" in about) == ("0-1", False)
