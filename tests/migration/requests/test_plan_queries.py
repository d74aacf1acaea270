"""Planner on the bus: reports, answers and published homes, in virtual time."""

import asyncio
from concurrent.futures import Executor, Future
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import BusError
from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.demand import ClustersPublished, DemandPublished
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineLeft
from fleet.facts.placements import HomesPublished, PlacementCommitted
from fleet.layout import DP_ATTENTION, tp
from fleet.placement import Placement
from fleet.popularity import ExpertTable
from fleet.requests.demand import DescribeClusters, DescribeProfile
from fleet.requests.plans import ApplyPlan, DescribePlan, MigrationAccepted, PlanDescribed
from fleet.signatures import ClusterModel
from migration.config import MigrationConfig
from migration.model.plan_record import PlanRecord
from migration.planning.planner_decision import PlannerDecision
from migration.planning.problem import PlanningQuestion
from migration.service import MigrationService
from tests.migration.builders import leading
from tests.migration.control_loop_fixture import FIRST, SHAPE, SKEWED, SUBJECTS, of_four
from tests.migration.fake_ranks import Ranks

CONFIG = MigrationConfig(cycle_seconds=10.0, window_seconds=20.0, stale_seconds=6.0, automatic=False)


async def join(bus: MemoryBus, worker_id: int = 1, engine: str = "a", **fields: Any) -> None:
    await bus.record(SUBJECTS.membership(engine), of_four(worker_id, engine, kv_block_bytes=4096, **fields))


class Traffic:
    """Publisher of the messages of a tracker and of the ranks of an engine."""

    def __init__(self, bus: MemoryBus, engine: str = "a", worker_id: int = 1) -> None:
        self._demand, self._load = bus.publisher(SUBJECTS.demand), bus.publisher(SUBJECTS.kv_metrics)
        self._about = {"engine": engine, "worker_id": worker_id, "model": "m"}
        self._version = 0

    async def report(self, rates: np.ndarray[Any, Any], ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """Publish these rates [experts] for every rank and layer, and that every rank is decoding."""
        for rank in ranks:
            self._version += 1
            table = ExpertTable.of(np.tile(500.0 * rates, (2, 1)))
            said = DemandPublished(
                rank=rank,
                version=self._version,
                tokens_per_second=1.0,
                demand=table,
                pairs=2e5,
                **self._about,
            )  # type: ignore[arg-type]
            await self._demand.publish(said)
            await self._load.publish(
                KvMetrics(
                    worker_id=1,
                    dp_rank=rank,
                    running=64,
                    waiting=0,
                    active_prefill_tokens=0,
                    active_decode_blocks=20,
                )
            )

    async def last(self, seconds: int, rates: np.ndarray[Any, Any]) -> None:
        for _ in range(seconds // 2):
            await self.report(rates)
            await asyncio.sleep(2)


def serving(
    bus: MemoryBus, config: MigrationConfig = CONFIG, planning_executor: Executor | None = None
) -> AbstractAsyncContextManager[MigrationService]:
    return leading(bus, config, planning_executor)


async def ask(bus: MemoryBus, engine: str = "a", **question: Any) -> PlanRecord:
    answer = await bus.request(SUBJECTS.describe_plan, DescribePlan(engine=engine, **question), seconds=30)
    assert isinstance(answer, PlanDescribed)
    return msgspec.json.decode(answer.record, type=PlanRecord)


@pytest.mark.looptime
async def test_a_plan_that_is_told_can_be_carried_out_and_one_that_is_refused_is_none() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    await join(bus)
    ranks = Ranks(MemoryBus(broker), SUBJECTS, FIRST)
    async with ranks.serving(), serving(bus):
        await Traffic(bus).last(50, SKEWED)
        answer = await bus.request(SUBJECTS.describe_plan, DescribePlan(engine="a"), seconds=30)
        assert isinstance(answer, PlanDescribed)
        record = msgspec.json.decode(answer.record, type=PlanRecord)
        accepted = await bus.request(SUBJECTS.migrate, ApplyPlan(engine="a", plan=answer.plan), seconds=10)
        assert isinstance(accepted, MigrationAccepted)
        assert (accepted.plan, accepted.handovers, accepted.bytes) == (
            record.id,
            record.handovers,
            record.copied_bytes,
        )
        await asyncio.sleep(2 * record.handovers)
        assert ranks.served == list(range(record.handovers + 1))
        refused = await bus.request(
            SUBJECTS.describe_plan, DescribePlan(engine="a", budget_bytes=0, policy="full"), seconds=30
        )
        assert isinstance(refused, PlanDescribed)
        assert not refused.plan


THOUGHT = 0.75


class Thoughtful(Executor):
    """Executor that takes THOUGHT seconds of the loop's time for each request."""

    def submit(self, fn: Any, /, *args: Any, **named: Any) -> Future[Any]:
        found: Future[Any] = Future()
        asyncio.get_running_loop().call_later(THOUGHT, lambda: found.set_result(fn(*args, **named)))
        return found


@pytest.mark.looptime
async def test_a_plan_is_told_to_whoever_asks_and_nothing_is_moved() -> None:
    bus = MemoryBus()
    await join(bus)
    async with serving(bus, planning_executor=Thoughtful()) as service:
        await Traffic(bus).last(50, SKEWED)
        record = await ask(bus, memory=True)
        assert (record.engine, record.epoch, record.next_window, record.refused) == ("a", 0, True, None)
        assert record.before is not None
        assert record.after is not None
        assert record.after.balance_mean > record.before.balance_mean + 0.2
        assert record.copies > 0
        assert record.plan_seconds == pytest.approx(THOUGHT)
        assert record.memory
        tight = await ask(bus, budget_bytes=2 * SHAPE.expert_bytes, policy="uniform", layers=(1,))
        assert tight.copied_bytes <= 2 * SHAPE.expert_bytes
        assert {step.layer for step in tight.steps} <= {1}
        assert (await ask(bus, dead=(2,))).lost
        assert service.placements.engines()["a"].epoch == 0
        exposed = service.metrics.exposition()
        for told in (
            b'roost_planner_plans_total{outcome="plan"}',
            b"roost_planner_plan_seconds_count",
            b'roost_planner_gain_seconds{engine="a"}',
        ):
            assert told in exposed


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"engine": "b"}, "no engine 'b' with experts is present; there are: a"),
        ({"policy": "best"}, "no policy 'best'; there are: roost"),
        ({"budget_bytes": -1}, "-1 bytes"),
        ({"dead": (4,)}, "has no rank 4; they run from 0 to 3"),
        ({"dead": (0, 1, 2, 3)}, "nothing would be left"),
        ({"layers": (2,)}, "has no layer 2"),
        ({}, "the demand of ranks 0, 1, 2, 3 of engine 'a' was never reported"),
    ],
)
async def test_what_cannot_be_answered_is_refused_in_words(question: dict[str, Any], said: str) -> None:
    bus = MemoryBus()
    await join(bus)
    async with serving(bus):
        with pytest.raises(BusError) as refusal:
            await ask(bus, **question)
        assert said in str(refusal.value)
        with pytest.raises(BusError, match="send a DescribePlan"):
            await bus.request(SUBJECTS.describe_plan, DescribeProfile(model="m"))


@pytest.mark.looptime
async def test_more_questions_than_may_wait_are_refused() -> None:
    bus = MemoryBus()
    await join(bus)
    async with serving(bus, MigrationConfig(max_questions=1)) as service:
        await Traffic(bus).report(SKEWED)
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(ask(bus), ask(bus), ask(bus), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BusError)]
        assert 0 < len(refused) < 3
        assert "max_questions" in str(refused[0])
        assert (await ask(bus)).engine == "a"
        assert service.metrics.exposition()


@pytest.mark.looptime
async def test_old_repeated_and_impossible_demand_is_counted_and_changes_nothing() -> None:
    bus = MemoryBus()
    await join(bus)
    async with serving(bus) as service:
        traffic = Traffic(bus)
        await traffic.report(SKEWED)
        publisher = bus.publisher(SUBJECTS.demand)
        table = ExpertTable.of(np.ones((2, 16)))
        plain: dict[str, Any] = {
            "engine": "a",
            "worker_id": 1,
            "model": "m",
            "rank": 0,
            "version": 99,
            "tokens_per_second": 1.0,
            "demand": table,
        }
        for wrong in (
            {"version": 1},
            {"worker_id": 7},
            {"rank": 9},
            {"demand": ExpertTable.of(np.ones((3, 16)))},
            {"pairs": -1.0},
        ):
            await publisher.publish(DemandPublished(**{**plain, **wrong}))
        await asyncio.sleep(0.1)
        exposed = service.metrics.exposition().decode()
        for reason, count in (("stale", 1), ("unknown", 1), ("shape", 2), ("demand", 1)):
            assert f'roost_migration_rejected_total{{reason="{reason}"}} {count}.0' in exposed
        assert (await ask(bus)).refused is None
        publisher.sequence += 3
        await publisher.publish(DemandPublished(**plain))
        await asyncio.sleep(0.1)
        assert b"roost_planner_lost_total 3.0" in service.metrics.exposition()


@pytest.mark.looptime
async def test_an_engine_whose_experts_are_sharded_is_told_so_though_no_demand_is_heard() -> None:
    bus = MemoryBus()
    await join(bus, layout=tp(2), urls=("http://0",) * 4)
    async with serving(bus):
        assert "sharded" in str((await ask(bus)).refused)


@pytest.mark.looptime
async def test_homes_are_said_every_cycle_and_get_a_new_version_when_they_change() -> None:
    bus = MemoryBus()
    await join(bus)
    async with serving(bus) as service, bus.subscribe(SUBJECTS.homes) as heard:
        said: list[HomesPublished] = []

        async def listen() -> None:
            async for received in heard:
                assert isinstance(received.message, HomesPublished)
                said.append(received.message)

        listening = asyncio.create_task(listen())
        traffic = Traffic(bus)
        await traffic.last(45, np.ones(16))
        assert len(said) == 4
        assert {(homes.engine, homes.worker_id, homes.ranks, homes.epoch) for homes in said} == {
            ("a", 1, 4, 0)
        }
        assert said[-1].version == said[-2].version
        moved = Placement(FIRST.expert_of_slot[:, ::-1].copy(), experts=16, ranks=4, epoch=1)
        await bus.record(
            SUBJECTS.placements("a"),
            PlacementCommitted(
                engine="a", worker_id=1, attention=DP_ATTENTION, placement=moved.record(), plan="p"
            ),
        )
        await traffic.last(12, np.ones(16))
        assert said[-1].epoch == 1
        assert said[-1].version > said[0].version
        assert b"roost_planner_homes_changed_total" in service.metrics.exposition()
        await bus.record(SUBJECTS.membership("a"), EngineLeft(engine="a", worker_id=1, reason="test"))
        await asyncio.sleep(1)
        count = len(said)
        await asyncio.sleep(30)
        assert len(said) == count
        assert b'engine="a"' not in service.metrics.exposition()
        listening.cancel()


@pytest.mark.looptime
async def test_the_tracker_is_asked_for_clusters_that_were_not_heard() -> None:
    bus = MemoryBus()
    await join(bus)
    model = ClusterModel(5, np.full((2, 2, 16), 1 / 16, np.float32), np.full(2, 0.5, np.float32), 1.0)

    async def tracker(message: Any) -> Any:
        assert message == DescribeClusters(model="m")
        return ClustersPublished(model="m", record=model.record())

    async with bus.serve(SUBJECTS.describe_profile, tracker), serving(bus) as service:
        assert service.demand.models_without_clusters == {"m"}
        await asyncio.sleep(11)
        assert service.demand.models_without_clusters == set()


@pytest.mark.looptime
async def test_a_defect_of_planning_is_counted_and_the_service_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(view: Any, question: PlanningQuestion, config: MigrationConfig) -> PlannerDecision:
        raise ZeroDivisionError("a defect")

    bus = MemoryBus()
    await join(bus)
    monkeypatch.setattr("migration.requests.plan_queries.decide", broken)
    async with serving(bus) as service:
        await Traffic(bus).last(25, SKEWED)
        assert b'roost_planner_refusals_total{reason="failed"} 2.0' in service.metrics.exposition()
        with pytest.raises(BusError):
            await ask(bus)
        await join(bus, 2, "b")
        await asyncio.sleep(0.1)
        assert set(service.placements.engines()) == {"a", "b"}


@pytest.mark.looptime
async def test_a_service_that_stood_by_says_homes_under_later_versions_than_the_one_that_led() -> None:
    bus = MemoryBus()
    await join(bus)
    said: list[HomesPublished] = []

    async def listen() -> None:
        async with bus.subscribe(SUBJECTS.homes) as heard:
            async for received in heard:
                assert isinstance(received.message, HomesPublished)
                said.append(received.message)

    listening = asyncio.create_task(listen())
    first = MigrationService(bus, SUBJECTS, CONFIG, clock=asyncio.get_running_loop().time)
    leading = asyncio.create_task(first.run())
    await asyncio.wait_for(first.ready.wait(), 20)
    async with serving(MemoryBus(bus.broker)):
        traffic = Traffic(bus)
        await traffic.last(25, np.ones(16))
        before = said[-1].version
        leading.cancel()
        await asyncio.wait([leading])
        await traffic.last(25, np.ones(16))
        assert said[-1].version > before
    listening.cancel()
