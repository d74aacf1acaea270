"""Single layers in the closed loop, in virtual time: sharded while they are hot, evaluated, undone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from bus.memory import MemoryBroker
from fleet.facts.activity import DispatchMeasured
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned, PlanEvaluated
from fleet.requests.layouts import SetLayoutChoice
from fleet.requests.plans import ApplyPlan, DescribePlan, PlanDescribed
from migration.model.plan_record import PlanRecord
from tests.migration.control_loop.test_layout_choice import (
    Switchable,
    choice,
    ep_step,
    serving,
    times,
)
from tests.migration.control_loop_fixture import SPEED, SUBJECTS, loop, own, recorded

pytestmark = pytest.mark.looptime
HOT = np.array([[130.0, *[1.0] * 15], [145.0 / 16] * 16])
"""Rank 0 has 90 % of the pairs of layer 0, nearly all of them of one expert."""
WARM = np.array([[130.0, *[1.0] * 15], [49.0, *[6.4] * 15]])
"""Layer 1 has become warm too."""
WARM_SECONDS = 5.5e-4
"""What it costs a step then."""
PAIRS = 2 * 64 / 4
"""Mean pairs of a rank in a step and layer."""
EXCESS = 4 * (133.0 / 145.0) - 1.0
"""Pairs of rank 0 above the mean, in layer 0, as a part of the mean."""
SURPLUS_SECONDS = SPEED.expert_pair * PAIRS * EXCESS
"""What the hot layer costs a step as long as it is whole."""


SHARDED_SECONDS = 6e-4
"""What a sharded layer costs a step: less than the hot layer, and twice that more."""


def all_sharded(sequences: float) -> float:
    return ep_step(sequences) + 2 * SHARDED_SECONDS


class Hot(Switchable):
    """An engine of 64 sequences, whose layer 0 may be hot. Replicas cannot help: there may be none."""

    def __init__(self, broker: MemoryBroker, sharded_seconds: float = SHARDED_SECONDS) -> None:
        super().__init__(broker, ep=self._step, experts_tp=all_sharded)
        self.batch, self.rates = 64, HOT
        self._sharded_seconds = sharded_seconds

    def _step(self, batch: float) -> float:
        warm = WARM_SECONDS if self.rates is WARM else 0.0
        if self.layers:
            return ep_step(batch) + self._sharded_seconds + warm
        return ep_step(batch) + (SURPLUS_SECONDS if self.is_hot else 0.0) + warm

    @property
    def is_hot(self) -> bool:
        return self.rates is HOT or self.rates is WARM

    @property
    def layers(self) -> tuple[int, ...]:
        return self.ranks.placement.sharded

    def measured(self, rank: int, **fields: Any) -> DispatchMeasured:
        warm = WARM_SECONDS / (SPEED.expert_pair * PAIRS) if self.rates is WARM else 0.0
        balances = (1.0 / (1.0 + EXCESS) if self.is_hot else 1.0, 1.0 / (1.0 + warm))
        balance = tuple(0.0 if layer in self.layers else 100 * one for layer, one in enumerate(balances))
        return super().measured(rank, **{"balance": balance, **fields})


@asynccontextmanager
async def hot_engine(broker: MemoryBroker, **about: Any) -> AsyncIterator[Hot]:
    world = Hot(broker, **about)
    async with world.ranks.serving():
        stated = times(ep=ep_step, experts_tp=all_sharded)
        await world.join(layout_times=stated, hardware="here", tp_refusal="")
        yield world


async def until_layers(world: Hot, wanted: tuple[int, ...], seconds: int = 90) -> None:
    for _ in range(seconds):
        if world.layers == wanted:
            return
        await world.last(1)
    raise AssertionError(f"not within {seconds} s: {await choice(world)}, {await loop(world.bus)}")


async def in_order(world: Hot) -> list[str]:
    """Return the kinds of entries in the log of plans."""
    kinds = (MigrationPlanned, MigrationCommitted, PlanEvaluated)
    log = [one.message async for one in world.bus.replay(SUBJECTS.migrations("a"), follow=False)]
    return [type(one).__name__ for one in log if isinstance(one, kinds)]


async def test_a_hot_layer_is_sharded_and_becomes_whole_again_once_it_has_cooled() -> None:
    broker = MemoryBroker()
    async with hot_engine(broker) as world, serving(broker, max_replicas=1):
        await until_layers(world, (0,))
        await world.last(45)
        assert world.layers == (0,)
        world.rates = np.full((2, 16), 145.0 / 16)
        await until_layers(world, ())
        await world.last(30)
        plans = await own(world.bus)
        assert [(planned.to_sharded, planned.to_whole) for planned in plans] == [((0,), ()), ((), (0,))]
        assert {planned.policy for planned in plans} == {"layers: regret"}
        first, second = await recorded(world.bus, PlanEvaluated)
        assert (first.verdict, second.verdict) == ("kept", "kept")
        assert "former forms" in first.reason
        assert 0.5 < first.realised < 1.5
        # One trial after another: no plan begins before the last one is evaluated.
        assert await in_order(world) == ["MigrationPlanned", "MigrationCommitted", "PlanEvaluated"] * 2


async def test_a_layer_that_is_slower_once_sharded_is_made_whole_and_rests() -> None:
    broker = MemoryBroker()
    async with (
        hot_engine(broker, sharded_seconds=2.0 * SURPLUS_SECONDS) as world,
        serving(broker, max_replicas=1, cooldown_seconds=100.0),
    ):
        await until_layers(world, (0,))
        await until_layers(world, (), 120)
        (verdict,) = await recorded(world.bus, PlanEvaluated)
        assert verdict.verdict == "harmful"
        await world.last(60)
        assert not world.layers
        assert len(await own(world.bus)) == 1
        assert "layouts rest" in (await choice(world)).single_layers


async def test_a_layer_that_becomes_warm_during_a_trial_is_no_harm_of_the_switch() -> None:
    broker = MemoryBroker()
    async with hot_engine(broker) as world, serving(broker, max_replicas=1):
        await until_layers(world, (0,))
        world.rates = WARM
        for _ in range(30):
            await world.last(1)
            if found := await recorded(world.bus, PlanEvaluated):
                break
        assert found[0].verdict == "kept"
        assert found[0].realised > 0.5


async def test_layers_keep_their_form_where_the_layout_is_chosen_by_hand() -> None:
    broker = MemoryBroker()
    async with hot_engine(broker) as world, serving(broker, max_replicas=1, layout_policy="static"):
        await world.last(30)
        assert not world.layers
        assert "roost layout a --auto on" in (await choice(world)).single_layers
        await world.bus.request(SUBJECTS.loop, SetLayoutChoice(engine="a", automatic=True), 20)
        await until_layers(world, (0,))


async def test_the_decision_is_shown_with_its_figures_or_with_what_holds_it() -> None:
    broker = MemoryBroker()
    async with hot_engine(broker) as world, serving(broker, max_replicas=1, budget_bytes=100):
        await world.last(20)
        assert "planner.budget_bytes" in (await choice(world)).single_layers
        answer = await world.bus.request(
            SUBJECTS.describe_plan, DescribePlan(engine="a", budget_bytes=1 << 30), 20
        )
        assert isinstance(answer, PlanDescribed)
        record = msgspec.json.decode(answer.record, type=PlanRecord)
        assert "layer 0: sharding saves" in record.single_layers
        assert [(step.kind, step.layer) for step in record.steps] == [("shard", 0)]
        assert not world.layers
        # An operator may carry it out beyond the budget.
        await world.bus.request(SUBJECTS.migrate, ApplyPlan(engine="a", plan=answer.plan), 20)
        await until_layers(world, (0,))
