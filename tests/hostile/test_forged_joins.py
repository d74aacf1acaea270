"""Strangers on the bus who say that they are an engine of the fleet, or speak of another one: they get no
request, and take nobody's place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest

from bus import Received
from bus.joins import CLAIM_SECONDS, verified_members
from bus.memory import MemoryBroker, MemoryBus
from fleet.event import PROTOCOL
from fleet.facts.activity import ExpertsActivated
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.popularity import ExpertCounts
from fleet.requests.engines import DescribeEngine
from migration.config import MigrationConfig
from migration.service import MigrationService
from router.config import RouterConfig
from router.service import RouterService
from tests.name_claims import claim_name
from tests.router.router_fixture import engine_joined
from tracker.config import TrackerConfig
from tracker.service import TrackerService

pytestmark = [pytest.mark.forged, pytest.mark.looptime]


def engine(name: str, worker_id: int, url: str = "http://honest:1") -> EngineJoined:
    return engine_joined(name, [url], None, worker_id=worker_id)


class Fleet:
    """A bus, and a router that listens."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.subjects = self.broker.subjects
        self.router = RouterService(
            MemoryBus(self.broker), self.subjects, RouterConfig(), asyncio.get_running_loop().time
        )

    async def says(self, joined: EngineJoined) -> None:
        """It records a join, and beats once it may have been read."""
        await self.bus.record(self.subjects.membership(joined.engine), joined)
        await asyncio.sleep(0.01)
        await self.beats(joined)

    async def beats(self, joined: EngineJoined) -> None:
        beat = EngineHeartbeat(engine=joined.engine, worker_id=joined.worker_id, epoch=0)
        await self.bus.publisher(self.subjects.heartbeats(joined.engine)).publish(beat)
        await asyncio.sleep(0.01)

    def known(self) -> dict[str, int]:
        """worker_id by engine."""
        return {state.joined.engine: state.joined.worker_id for state in self.router.view.engines()}


@asynccontextmanager
async def listening() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    running = asyncio.create_task(fleet.router.run())
    try:
        await asyncio.sleep(0.1)
        yield fleet
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_join_without_the_claim_of_its_name_does_not_supersede_the_engine_that_holds_it() -> None:
    async with listening() as fleet:
        honest, forged = engine("a", 1), engine("a", 2, "http://evil:1")
        await claim_name(fleet.bus, honest)
        await fleet.says(honest)
        assert fleet.known() == {"a": 1}
        await fleet.says(forged)
        await asyncio.sleep(CLAIM_SECONDS + 1)
        assert fleet.known() == {"a": 1}
        await fleet.says(engine("unclaimed", 3, "http://evil:1"))
        await asyncio.sleep(CLAIM_SECONDS + 1)
        assert fleet.known() == {"a": 1}


@pytest.mark.parametrize(
    ("after", "counts"), [(0.0, True), (CLAIM_SECONDS - 0.5, True), (CLAIM_SECONDS + 0.5, False)]
)
async def test_a_claim_that_is_seen_after_the_join_is_waited_for(after: float, counts: bool) -> None:
    async with listening() as fleet:
        late = engine("a", 1)
        await fleet.bus.record(fleet.subjects.membership("a"), late)
        await asyncio.sleep(after)
        await claim_name(fleet.bus, late)
        await asyncio.sleep(0.5)
        assert fleet.known() == ({"a": 1} if counts else {})


@pytest.mark.parametrize(("protocol", "counts"), [(0, True), (PROTOCOL + 1, True), (PROTOCOL + 2, False)])
async def test_an_engine_of_a_protocol_one_apart_is_used_and_one_further_apart_is_not(
    protocol: int, counts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as fleet:
        joined = msgspec.structs.replace(engine("a", 1), protocol=protocol)
        await claim_name(fleet.bus, joined)

        async def describe(_: object) -> EngineJoined:
            return joined

        async with fleet.bus.serve(fleet.subjects.describe_engine("a", 1), describe):
            for _ in range(3):
                await fleet.says(joined)
                await asyncio.sleep(CLAIM_SECONDS)
        assert fleet.known() == ({"a": 1} if counts else {})
    assert (f"engine a speaks protocol {protocol}" in caplog.text) == (not counts)


async def test_others_are_heard_while_a_join_waits_and_the_end_of_a_replay_waits_for_nobody() -> None:
    broker = MemoryBroker()
    bus, subjects = MemoryBus(broker), broker.subjects
    await claim_name(bus, engine("b", 2))
    for joined in (engine("a", 1), engine("b", 2)):
        await bus.record(subjects.membership(joined.engine), joined)
    clock = asyncio.get_running_loop().time
    began = clock()
    passed = [
        one.message
        async for one in verified_members(bus, subjects, bus.replay(subjects.membership(), follow=False))
    ]
    assert (passed, clock() - began) == ([engine("b", 2)], 0.0)


async def test_a_newer_word_about_an_engine_ends_the_waiting() -> None:
    broker = MemoryBroker()
    bus, subjects = MemoryBus(broker), broker.subjects
    await bus.record(subjects.membership("a"), engine("a", 1))
    received: list[Received] = []

    async def follow() -> None:
        async for one in verified_members(bus, subjects, bus.replay(subjects.membership())):
            received.append(one)  # noqa: PERF401 it never ends

    following = asyncio.create_task(follow())
    await asyncio.sleep(1)
    await bus.record(subjects.membership("a"), EngineLeft(engine="a", worker_id=1, reason="stopped"))
    await asyncio.sleep(0.1)
    await claim_name(bus, engine("a", 1))
    await asyncio.sleep(CLAIM_SECONDS)
    assert [one.message for one in received] == [EngineLeft(engine="a", worker_id=1, reason="stopped")]
    following.cancel()
    await asyncio.wait([following])


async def test_who_answers_for_an_engine_whose_name_it_does_not_hold_is_not_used() -> None:
    async with listening() as fleet:
        forged = engine("a", 2, "http://evil:1")

        async def describe(request: object) -> EngineJoined:
            assert request == DescribeEngine(worker_id=2)
            return forged

        async with fleet.bus.serve(fleet.subjects.describe_engine("a", 2), describe):
            for _ in range(5):
                await fleet.beats(forged)
                await asyncio.sleep(1)
        assert fleet.known() == {}


async def test_an_engine_with_a_name_of_its_own_can_name_the_worker_of_another_in_nothing_it_says() -> None:
    async with listening() as fleet:
        honest = engine("a", 1)
        impostor = engine("b", 1, "http://evil:1")
        for joined in (honest, impostor):  # everybody may write what they like into their own claim
            await claim_name(fleet.bus, joined)
        await fleet.says(honest)
        await fleet.says(impostor)
        await fleet.bus.record(
            fleet.subjects.membership("b"), EngineLeft(engine="b", worker_id=1, reason="forged")
        )
        await asyncio.sleep(4)
        for _ in range(3):
            await fleet.beats(impostor)
        (state,) = fleet.router.view.engines()
        assert (state.joined, state.status.name) == (
            honest,
            "DEAD",
        ), "the beats of another do not keep it alive, and nothing makes it leave"


async def test_the_tracker_counts_nothing_that_one_engine_reports_for_another() -> None:
    broker = MemoryBroker()
    bus, subjects = MemoryBus(broker), broker.subjects
    service = TrackerService(MemoryBus(broker), subjects, TrackerConfig())
    running = asyncio.create_task(service.run())
    await service.ready.wait()
    await claim_name(bus, engine("a", 1))
    await bus.record(subjects.membership("a"), engine("a", 1))
    await asyncio.sleep(0.1)
    report = ExpertsActivated(
        engine="b",
        worker_id=1,
        rank=0,
        model="demo",
        epoch=0,
        seconds=1.0,
        tokens=1,
        cached_tokens=0,
        counts=ExpertCounts.of(np.ones((1, 1), np.int64)),
    )
    await bus.publisher(subjects.experts("b")).publish(report)
    await bus.record(subjects.membership("b"), EngineLeft(engine="b", worker_id=1, reason="forged"))
    await asyncio.sleep(0.1)
    assert b'rejected_total{reason="speaker"} 2.0' in service.metrics.exposition()
    running.cancel()
    await asyncio.wait([running])


async def test_the_planner_records_nothing_for_who_does_not_hold_the_name() -> None:
    broker = MemoryBroker()
    bus, subjects = MemoryBus(broker), broker.subjects
    service = MigrationService(MemoryBus(broker), subjects, MigrationConfig())
    running = asyncio.create_task(service.run())
    await service.ready.wait()
    await bus.record(subjects.membership("a"), engine("a", 2, "http://evil:1"))
    await asyncio.sleep(CLAIM_SECONDS + 1)
    assert not service.placements.present("a")
    await claim_name(bus, engine("a", 1))
    await bus.record(subjects.membership("a"), engine("a", 1))
    await bus.record(subjects.membership("b"), EngineLeft(engine="b", worker_id=1, reason="forged"))
    await asyncio.sleep(0.5)
    assert service.placements.present("a")
    running.cancel()
    await asyncio.wait([running])
