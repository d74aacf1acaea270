"""Automatic choice of layouts, in virtual time: the policy asks, the loop switches, evaluates and undoes."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from bus import Declined
from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.activity import DispatchMeasured
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, PlanEvaluated
from fleet.layout_times import LayoutName, LayoutTimes
from fleet.requests.layouts import DescribeLayouts, EngineLayout, LayoutsDescribed, SetLayoutChoice
from migration.service import MigrationService
from tests.migration.builders import leading
from tests.migration.control_loop_fixture import (
    CONFIG,
    EVEN,
    SHAPE,
    SUBJECTS,
    Flight,
    loop,
    own,
    recorded,
    steer,
)

pytestmark = pytest.mark.looptime
BATCHES = (1, 4, 16, 64, 256)
CONFIGURED = replace(CONFIG, rank_bytes_per_second=1e9, layout_policy="regret")


def ep_step(batch: float) -> float:
    """Step of whole experts: they are read once, and it grows slowly."""
    return 8e-3 + 2e-5 * batch


def sharded_step(batch: float) -> float:
    """Step of sharded experts: cheap for few sequences, dear for many. It meets `ep_step` at 50."""
    return 4e-3 + 1e-4 * batch


def times(**steps: Callable[[float], float]) -> tuple[LayoutTimes, ...]:
    """State measured times, by layout (experts_tp for experts-tp)."""
    names: dict[str, LayoutName] = {"ep": "ep", "experts_tp": "experts-tp", "tp": "tp"}
    return tuple(
        LayoutTimes(
            layout=names[name],
            sequences=BATCHES,
            contexts=(16,),
            seconds=(tuple(step(batch) for batch in BATCHES),),
            noise=0.01,
            prefill_token=1e-5,
        )
        for name, step in steps.items()
    )


class Switchable(Flight):
    """An engine whose steps follow its layout and its load."""

    def __init__(self, broker: MemoryBroker, **true: Callable[[float], float]) -> None:
        super().__init__(broker, unshardable="")
        self.rates = EVEN
        self.balance = 1.0
        self.batch = 8
        self.blocks: int | None = None
        """KV blocks that requests hold on each rank; None: one per sequence"""
        self.true = {"ep": ep_step, "experts_tp": sharded_step, **true}

    @property
    def sharded(self) -> bool:
        return len(self.ranks.placement.sharded) == SHAPE.layers

    def measured(self, rank: int, **fields: Any) -> DispatchMeasured:
        return super().measured(rank, **{"step_seconds": 0.9, **fields})

    async def speak(self) -> None:
        self.running = self.batch // 4
        self.decode_blocks = self.running if self.blocks is None else self.blocks
        self.step_seconds = self.true["experts_tp" if self.sharded else "ep"](self.batch)
        await super().speak()
        for rank in range(4):
            await self._load.publish(
                KvMetrics(
                    worker_id=self.worker_id,
                    dp_rank=rank,
                    running=self.batch // 4,
                    waiting=0,
                    active_prefill_tokens=0,
                    active_decode_blocks=self.decode_blocks,
                    kv_used_blocks=self.decode_blocks,
                    step_seconds=self.step_seconds * (1.0 + 0.01 * float(self.noise.standard_normal())),
                )
            )


@asynccontextmanager
async def switchable(
    broker: MemoryBroker, stated: tuple[LayoutTimes, ...], **true: Callable[[float], float]
) -> AsyncIterator[Switchable]:
    world = Switchable(broker, **true)
    async with world.ranks.serving():
        await world.join(layout_times=stated, hardware="here", tp_refusal="")
        yield world


def serving(broker: MemoryBroker, **changes: Any) -> AbstractAsyncContextManager[MigrationService]:
    return leading(MemoryBus(broker), replace(CONFIGURED, **changes))


async def choice(world: Flight) -> EngineLayout:
    answer = await world.bus.request(SUBJECTS.loop, DescribeLayouts(engine="a"), 20)
    assert isinstance(answer, LayoutsDescribed)
    (one,) = answer.engines
    return one


async def until_sharded(world: Switchable, wanted: bool, seconds: int = 60) -> int:
    """Return the seconds until the layout is the wanted one."""
    for second in range(seconds):
        if world.sharded == wanted:
            return second
        await world.last(1)
    raise AssertionError(f"not within {seconds} s: {await choice(world)}, {await loop(world.bus)}")


CROSSING = times(ep=ep_step, experts_tp=sharded_step)


async def test_the_engine_follows_its_load_to_and_fro_and_every_switch_is_kept() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world, serving(broker):
        await until_sharded(world, True)
        await world.last(30)
        world.batch = 200
        await until_sharded(world, False)
        await world.last(30)
        plans = await own(world.bus)
        assert [bool(planned.to_sharded) for planned in plans] == [True, False]
        assert {planned.policy for planned in plans} == {"layout: regret"}
        verdicts = await recorded(world.bus, PlanEvaluated)
        assert [one.verdict for one in verdicts] == ["kept", "kept"]
        assert all(one.realised is not None and 0.8 < one.realised < 1.2 for one in verdicts)


@pytest.mark.parametrize("batch", [4, 40, 200])
async def test_without_a_crossing_it_never_switches(batch: int) -> None:
    broker = MemoryBroker()

    def always_slower(sequences: float) -> float:
        return 1.2 * ep_step(sequences)

    stated = times(ep=ep_step, experts_tp=always_slower)
    async with switchable(broker, stated, experts_tp=always_slower) as world, serving(broker):
        world.batch = batch
        await world.last(90)
        assert not await own(world.bus)
        assert "stays" in (await choice(world)).decided


async def test_a_promise_that_is_not_kept_is_undone_and_layouts_rest() -> None:
    broker = MemoryBroker()

    def slower_than_stated(sequences: float) -> float:
        return 1.5 * ep_step(sequences)

    async with (
        switchable(broker, CROSSING, experts_tp=slower_than_stated) as world,
        serving(broker, cooldown_seconds=100.0),
    ):
        await until_sharded(world, True)
        await until_sharded(world, False, 120)
        (verdict,) = await recorded(world.bus, PlanEvaluated)
        assert verdict.verdict == "harmful"
        assert "gained" in verdict.reason
        await world.last(100)
        assert not world.sharded
        assert len(await own(world.bus)) == 1


async def test_by_hand_it_stays_and_automatically_it_goes() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world, serving(broker):
        await world.bus.request(SUBJECTS.loop, SetLayoutChoice(engine="a", automatic=False), 20)
        await world.last(30)
        assert not await own(world.bus)
        assert not (await choice(world)).automatic
        assert "roost layout a --auto on" in (await choice(world)).decided
        await world.bus.request(SUBJECTS.loop, SetLayoutChoice(engine="", automatic=True), 20)
        await until_sharded(world, True)
        assert (await choice(world)).automatic


async def test_without_a_configured_policy_it_chooses_once_it_is_asked_to() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world, serving(broker, layout_policy="static"):
        await world.last(30)
        assert not await own(world.bus)
        assert not (await choice(world)).automatic
        await world.bus.request(SUBJECTS.loop, SetLayoutChoice(engine="a", automatic=True), 20)
        assert (await choice(world)).policy == "regret"
        await until_sharded(world, True)


async def test_the_hand_outlives_the_planner() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world:
        async with serving(broker):
            await world.bus.request(SUBJECTS.loop, SetLayoutChoice(engine="a", automatic=False), 20)
            await world.last(3)
        async with serving(broker):
            await world.last(30)
            assert not (await choice(world)).automatic
            assert not await own(world.bus)


async def test_a_pause_and_a_small_budget_keep_the_layout() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world, serving(broker, budget_bytes=100):
        await world.last(20)
        assert not await own(world.bus)
        assert "planner.budget_bytes" in (await choice(world)).decided
        await steer(world.bus, paused=True, reason="night")
        await world.last(5)
        assert "night" in (await choice(world)).decided


async def test_curves_crossings_and_regret_are_described() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world, serving(broker, layout_policy="static"):
        await world.last(5)
        shown = await choice(world)
        assert (shown.layout, shown.policy, shown.running) == ("dp, experts whole", "static", 8)
        assert shown.context == 16.0
        (crossing,) = shown.crossings
        assert crossing.sequences == pytest.approx(50, rel=0.1)
        assert (crossing.below, crossing.above) == ("experts-tp", "ep")
        ep, sharded = shown.options
        assert ep.step_seconds == pytest.approx(ep_step(8), rel=0.1)
        assert sharded.step_seconds == pytest.approx(sharded_step(8), rel=0.1)
        assert ep.cost_seconds == 0.0
        assert sharded.cost_seconds is not None
        assert sharded.cost_seconds > 0
        assert {curve.layout for curve in shown.curves} == {"ep", "experts-tp"}


async def test_the_regret_of_a_switch_that_is_held_up_is_shown() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world, serving(broker, budget_bytes=0):
        await world.last(10)
        ep, sharded = (await choice(world)).options
        # Steps of 8.2 ms could take 4.8 ms, so four tenths of the time are lost.
        assert 2.0 < sharded.regret_seconds < 5.0
        assert ep.regret_seconds == 0.0


async def test_attention_is_not_to_change_while_requests_hold_more_kv_than_fits_both_ways() -> None:
    broker = MemoryBroker()
    stated = times(ep=ep_step, tp=lambda batch: 0.5 * ep_step(batch))
    async with switchable(broker, stated) as world, serving(broker):
        world.blocks = 40
        await world.last(20)
        assert not await own(world.bus)
        assert (await choice(world)).options[1].refusal == "requests hold 62% of the KV, and 25% is the limit"
        world.blocks = 10
        await world.last(3)
        assert not (await choice(world)).options[1].refusal


async def test_corrected_curves_survive_a_restart_of_the_planner() -> None:
    broker = MemoryBroker()

    def slower(sequences: float) -> float:
        return 1.3 * ep_step(sequences)

    async with switchable(broker, CROSSING, ep=slower) as world:
        async with serving(broker, layout_policy="static"):
            await world.last(45)
            before = (await choice(world)).options[0].step_seconds
        async with serving(broker, layout_policy="static"):
            await world.last(2)
            after = (await choice(world)).options[0].step_seconds
        assert before == pytest.approx(slower(8), rel=0.05)
        assert after == pytest.approx(before, rel=0.05)


async def test_an_engine_that_measured_no_layouts_is_described_and_an_unknown_one_refused() -> None:
    broker = MemoryBroker()
    async with switchable(broker, ()) as world, serving(broker):
        await world.last(3)
        assert "no measured steps" in (await choice(world)).decided
        with pytest.raises(Declined, match="there are: a"):
            await world.bus.request(SUBJECTS.loop, DescribeLayouts(engine="b"), 20)


async def test_a_switch_waits_for_the_plan_under_way() -> None:
    broker = MemoryBroker()
    async with switchable(broker, CROSSING) as world, serving(broker):
        await until_sharded(world, True)
        planned = await recorded(world.bus, MigrationPlanned)
        committed = await recorded(world.bus, MigrationCommitted)
        assert len(planned) == 1
        assert committed[-1].last
