"""From the shift of popularity to the placement that answers it, and the verdict on it, everything is one
trace: tracker, planner and ranks say so together.

In one process and in virtual time. The spans are the product's; the tracker's noticing, the traffic and the
engine's steps are stand-ins.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, format_span_id

from bus.memory import MemoryBroker, MemoryBus
from engine_adapter.tracing import HandoverTracing
from fleet.facts.demand import PopularityShifted
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, PlanEvaluated
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement
from tests.engine_adapter.rank_fixture import WORKER, Group, standing
from tests.migration.builders import leading
from tests.migration.control_loop_fixture import CONFIG, EVEN, FIRST, SKEWED, SUBJECTS, Flight, loop
from tracker.tracing import ShiftTracing

pytestmark = pytest.mark.looptime


class Served:
    """What traffic must know of the engine."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def placement(self) -> Placement:
        return self._group.placement

    @property
    def served(self) -> tuple[int]:
        return (self._group.placement.epoch,)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Of everything that begins from here on."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@asynccontextmanager
async def world_of(group: Group) -> AsyncIterator[Flight]:
    """What surrounds these ranks; it has joined."""
    world = Flight(group.broker, "a", WORKER)
    world.ranks = Served(group)  # type: ignore[assignment]
    await world.join()
    following = asyncio.create_task(world.follow(), name="follows what is recorded of plans")
    try:
        yield world
    finally:
        following.cancel()


async def say_shift(broker: MemoryBroker) -> None:
    """As the tracker does."""
    shift = PopularityShifted(
        model="m", version=1, settled=False, divergence=0.3, threshold=0.01, layers=(0, 1)
    )
    with ShiftTracing().saying(shift) as shift_message:
        await MemoryBus(broker).publisher(SUBJECTS.shifts).publish(shift_message)


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


async def test_from_the_shift_to_the_verdict_everything_is_one_trace(spans: InMemorySpanExporter) -> None:
    async with (
        standing(FIRST, tracing=HandoverTracing(engine="a", rank=0)) as group,
        world_of(group) as world,
    ):
        world.rates = EVEN
        async with leading(MemoryBus(group.broker), CONFIG):
            await world.last(30)
            assert not (await loop(world.bus)).engines[0].plans
            world.rates = SKEWED
            await say_shift(group.broker)
            planned = await world.until(MigrationPlanned)
            world.balance = 0.9
            evaluated = await world.until(PlanEvaluated)
            committed = [
                one.message async for one in world.bus.replay(SUBJECTS.placements("a"), follow=False)
            ]
            await asyncio.sleep(1)
    assert evaluated.plan == planned.plan
    assert {one.plan for one in committed if isinstance(one, PlacementCommitted) and one.placement.epoch} == {
        planned.plan
    }
    named: dict[str, list[ReadableSpan]] = {}
    for span in spans.get_finished_spans():
        named.setdefault(span.name, []).append(span)
    (shift,), (plan,), (verdict,) = (
        named["roost.popularity.shift"],
        named["roost.plan"],
        named["roost.plan.evaluated"],
    )
    handovers = named["roost.handover"]
    assert {context_of(span).trace_id for these in named.values() for span in these} == {
        context_of(shift).trace_id
    }
    assert shift.parent is None
    assert planned.traceparent.split("-")[2] == format_span_id(context_of(plan).span_id)
    assert (
        len(handovers)
        == planned.handovers
        == max(one.placement.epoch for one in committed if isinstance(one, PlacementCommitted))
    )
    for below, above in (
        ([plan], [shift]),
        ([*handovers, verdict], [plan]),
        ([*named["roost.handover.pull"], *named["roost.handover.prepare"]], handovers),
    ):
        assert {span.parent.span_id for span in below if span.parent is not None} == {
            context_of(span).span_id for span in above
        }
    assert dict(verdict.attributes or {})["roost.verdict"] == evaluated.verdict


async def test_a_plan_of_the_cycle_is_a_trace_of_its_own(spans: InMemorySpanExporter) -> None:
    async with (
        standing(FIRST, tracing=HandoverTracing(engine="a", rank=0)) as group,
        world_of(group) as world,
    ):
        async with leading(MemoryBus(group.broker), CONFIG):
            await world.until(MigrationCommitted)
            await asyncio.sleep(1)
    (plan,) = (span for span in spans.get_finished_spans() if span.name == "roost.plan")
    assert plan.parent is None
