"""The whole loop with an engine that moves its experts itself: its rows are sent by the row hash of the map in
force, its workers vote, and the planner sees what such an engine reports. In virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bus.memory import MemoryBroker, MemoryBus
from fleet.dispatch import row_copies
from fleet.facts.activity import DispatchMeasured, ExpertsActivated
from fleet.facts.demand import DemandPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.migrations import MigrationPlanned, PlanEvaluated
from fleet.facts.placements import HomesPublished
from fleet.placement import EMPTY, Placement
from fleet.popularity import ExpertCounts, ExpertTable
from migration.config import MigrationConfig
from router.fleet_state.cluster_homes import homes_of
from tests.migration.builders import SHAPE, leading
from tests.migration.control_loop_fixture import SUBJECTS, engine_of, own, recorded, steer
from tests.migration.execution.test_rearranging_engines import FIRST, Deployment, deployment

CONFIG = MigrationConfig(
    cycle_seconds=5.0,
    window_seconds=20.0,
    stale_seconds=10.0,
    evaluation_seconds=15.0,
    settle_seconds=2.0,
    cooldown_seconds=10.0,
    min_pairs=4.0,
)
ROWS, STEPS, REPORTS = 8, 10, 2
"""Rows of a step, steps of a report, reports of a second."""
Text = tuple[int, ...]
"""The experts that a text asks for mostly."""


class Traffic:
    """Steps of a few texts at a time, and the reports that an agent sends about them."""

    def __init__(self, broker: MemoryBroker, engine: Deployment, texts: list[Text]) -> None:
        self._engine = engine
        self.texts = texts
        self.balance: list[float] = []
        """of every step and layer"""
        bus = MemoryBus(broker)
        self._dice = np.random.default_rng(3)
        self._activated, self._dispatched, self._demand, self._load = (
            bus.publisher(subject)
            for subject in (
                SUBJECTS.experts("a"),
                SUBJECTS.dispatched("a"),
                SUBJECTS.demand,
                SUBJECTS.kv_metrics,
            )
        )
        self._version = 0
        self._rates = np.zeros((SHAPE.layers, SHAPE.experts))

    @property
    def served(self) -> Placement:
        return self._engine.voters.maps[-1]

    async def run(self) -> None:
        """Send requests and reports until cancelled."""
        while True:
            balances = np.zeros(SHAPE.layers)
            epoch = self.served.epoch
            for _ in range(REPORTS):
                counts = self._interval(balances)
                self._rates = 0.9 * self._rates + 0.1 * REPORTS * counts
                await self._activated.publish(
                    ExpertsActivated(
                        **self._about,
                        epoch=epoch,
                        seconds=1.0 / REPORTS,
                        tokens=ROWS * STEPS,
                        cached_tokens=0,
                        counts=ExpertCounts.of(counts.astype(np.int64)),
                    )
                )
                await asyncio.sleep(1.0 / REPORTS)
            await self._report(balances, epoch)

    @property
    def _about(self) -> dict[str, Any]:
        return {"engine": "a", "worker_id": 1, "model": "m", "rank": 0}

    def _interval(self, balances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Make the steps of one report with two texts; return the pairs, [layers, experts]."""
        chosen = [self.texts[at] for at in self._dice.integers(len(self.texts), size=2)]
        profile = np.full(SHAPE.experts, 0.05)
        for text in chosen:
            profile[list(text)] += 1.0
        profile /= profile.sum()
        counts = np.zeros((SHAPE.layers, SHAPE.experts))
        for _ in range(STEPS):
            for layer in range(SHAPE.layers):
                routed = np.stack(
                    [
                        self._dice.choice(SHAPE.experts, SHAPE.top_k, replace=False, p=profile)
                        for _ in range(ROWS)
                    ]
                )
                counts[layer] += np.bincount(routed.ravel(), minlength=SHAPE.experts)
                load = self._loads(layer, routed)
                self.balance.append(load.mean() / load.max())
                balances[layer] += self.balance[-1]
        return counts

    def _loads(self, layer: int, routed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send each pair [rows, k] to its slot by the row hash; return the pairs of each rank."""
        row = self.served.expert_of_slot[layer]
        copies = np.bincount(row, minlength=SHAPE.experts)[routed]
        nth = row_copies(np.arange(len(routed))[:, None], copies)
        slots = [
            np.flatnonzero(row == expert)[at] for expert, at in zip(routed.ravel(), nth.ravel(), strict=True)
        ]
        return np.bincount(np.array(slots) // self.served.slots_per_rank, minlength=self.served.ranks)

    async def _report(self, balances: NDArray[np.float64], epoch: int) -> None:
        steps, tokens = REPORTS * STEPS, REPORTS * STEPS * ROWS
        pairs = SHAPE.top_k * tokens
        slowest = steps / float(balances.mean())
        self._version += 1
        await self._dispatched.publish(
            DispatchMeasured(
                **self._about,
                epoch=epoch,
                seconds=1.0,
                steps=steps,
                step_seconds=steps * (0.01 + 0.01 * slowest),
                tokens=tokens,
                pairs=pairs,
                remote_ranks=(0.0,) * SHAPE.layers,
                local=(0.0,) * SHAPE.layers,
                served=(float(pairs),) * SHAPE.layers,
                balance=tuple(balances.tolist()),
            )
        )
        await self._demand.publish(
            DemandPublished(
                **self._about,
                version=self._version,
                tokens_per_second=float(tokens),
                demand=ExpertTable.of(self._rates),
                pairs=10.0 * pairs,
            )
        )
        await self._load.publish(
            KvMetrics(
                worker_id=1,
                dp_rank=0,
                running=ROWS,
                waiting=0,
                active_prefill_tokens=0,
                active_decode_blocks=4,
                step_seconds=0.025,
            )
        )

    def mean_balance(self, seconds: int) -> float:
        """Mean over the steps of the last seconds."""
        return float(np.mean(self.balance[-seconds * REPORTS * STEPS * SHAPE.layers :]))


@asynccontextmanager
async def looping(
    texts: list[Text], config: MigrationConfig = CONFIG
) -> AsyncIterator[tuple[MemoryBus, Traffic]]:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with deployment(broker) as engine, leading(bus, config):
        traffic = Traffic(broker, engine, texts)
        running = asyncio.create_task(traffic.run(), name="traffic")
        try:
            yield bus, traffic
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.wait([running])


async def until(bus: MemoryBus, kind: type[Any], count: int, seconds: int = 240) -> list[Any]:
    """Wait until so many entries of a kind are recorded."""
    for _ in range(seconds):
        if len(found := await recorded(bus, kind)) >= count:
            return found
        await asyncio.sleep(1)
    raise AssertionError(f"no {kind.__name__} number {count}; {(await engine_of(bus)).decided}")


TOGETHER: list[Text] = [(5, 6), (2, 3)]
"""FIRST has 5 and 6 on rank 1, and 2 and 3 on rank 0: even over time, uneven in most steps."""


@pytest.mark.looptime
async def test_the_loop_parts_what_is_in_demand_together_and_keeps_the_plan() -> None:
    async with looping(TOGETHER) as (bus, traffic):
        await asyncio.sleep(20)
        before = traffic.mean_balance(15)
        (planned,) = await until(bus, MigrationPlanned, 1)
        assert (planned.origin, planned.handovers) == ("planner", 1)
        (verdict,) = await until(bus, PlanEvaluated, 1)
        assert verdict.verdict == "kept", verdict.reason
        assert verdict.realised is not None
        assert verdict.realised > 0
        assert traffic.mean_balance(10) > before + 0.03
        moved = traffic.served.replicas_on_rank > FIRST.replicas_on_rank
        assert planned.copies == moved.sum() <= 8
        assert planned.bytes == planned.copies * SHAPE.expert_bytes
        assert (traffic.served.expert_of_slot != EMPTY).all()
        assert not traffic.served.duplicates
        assert (await engine_of(bus)).homes == 0
        calm = len(await own(bus))
        await asyncio.sleep(60)
        assert len(await own(bus)) <= calm + 1, "noise moves next to nothing"


@pytest.mark.looptime
async def test_other_texts_lead_to_another_map() -> None:
    async with looping(TOGETHER) as (bus, traffic):
        await until(bus, PlanEvaluated, 1)
        served = traffic.served
        traffic.texts = together_on(served)
        await asyncio.sleep(15)
        worse = traffic.mean_balance(10)
        await asyncio.sleep(90)
        assert traffic.served.epoch > served.epoch
        assert traffic.mean_balance(15) > worse + 0.03
        assert not traffic.served.duplicates


def together_on(placement: Placement) -> list[Text]:
    """Texts of two experts that one rank alone holds, one text for each rank."""
    alone = placement.replicas_on_rank[0] * (placement.replicas_on_rank[0].sum(axis=0) == 1)
    return [tuple(np.flatnonzero(rank)[:2].tolist()) for rank in alone]


@pytest.mark.looptime
async def test_a_paused_loop_moves_nothing_until_it_is_resumed() -> None:
    async with looping(TOGETHER) as (bus, traffic):
        await steer(bus, paused=True, reason="test")
        await asyncio.sleep(70)
        assert traffic.served == FIRST
        assert "it is paused" in (await engine_of(bus)).decided
        await steer(bus, paused=False)
        await until(bus, MigrationPlanned, 1)


@pytest.mark.looptime
async def test_without_budget_nothing_is_moved() -> None:

    async with looping(TOGETHER, replace(CONFIG, budget_bytes=SHAPE.expert_bytes)) as (bus, traffic):
        await asyncio.sleep(70)
        assert traffic.served == FIRST
        assert await own(bus) == []


@pytest.mark.looptime
async def test_a_plan_that_does_harm_is_undone_by_one_handover_to_the_map_before_it() -> None:
    async with looping(TOGETHER) as (bus, traffic):
        await until(bus, MigrationPlanned, 1)
        await asyncio.sleep(2)
        assert traffic.served.epoch == 2
        traffic.texts = better_before(traffic.served)
        (verdict, *_) = await until(bus, PlanEvaluated, 1)
        assert verdict.verdict == "harmful", verdict.reason
        plans = await until(bus, MigrationPlanned, 2)
        assert (plans[1].origin, plans[1].handovers) == ("rollback", 1)
        await asyncio.sleep(3)
        assert (traffic.served.replicas_on_rank == FIRST.replicas_on_rank).all()


def better_before(now: Placement) -> list[Text]:
    """Texts whose experts are together on a rank now, and were on different ranks before."""
    found = []
    for one in range(SHAPE.experts):
        for other in range(one + 1, SHAPE.experts):
            held = [placement.replicas_on_rank[0][:, [one, other]] for placement in (FIRST, now)]
            alone = all((part.sum(axis=0) == 1).all() for part in held)
            before, after = ((part[:, 0] == part[:, 1]).all() for part in held)
            if alone and after and not before:
                found.append((one, other))
    assert found
    return found[:1]


@pytest.mark.looptime
async def test_an_engine_of_one_target_has_no_homes_and_routers_can_read_that() -> None:
    async with looping(TOGETHER) as (bus, _):
        async with bus.subscribe(SUBJECTS.homes) as messages:
            received = await anext(aiter(messages))
        assert isinstance(published := received.message, HomesPublished)
        assert homes_of(published, 1).lift is None
