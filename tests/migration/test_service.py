"""The migration service on the memory bus, in virtual time, and once over NATS with outages."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from bus import Bus, BusError, Message
from bus.claims import Holder
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.facts.activity import TokensSampled
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.facts.placements import PlacementCommitted
from fleet.layout import DP_ATTENTION, EP
from fleet.placement import Placement
from fleet.requests.engines import DescribeEngine
from fleet.routings import SAMPLED_TOKENS
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry
from migration.engine_state.unknown_engines import UnknownEngines
from migration.service import MigrationService
from tests.migration.builders import FIRST, SHAPE, joined
from tests.migration.engine_state.test_demand_windows import wanted
from tests.name_claims import claim_name

SUBJECTS = Subjects()


async def join(bus: Bus, worker_id: int = 1, engine: str = "a", **fields: Any) -> None:
    await bus.record(SUBJECTS.membership(engine), joined(worker_id, engine, **fields))


async def recorded(bus: Bus) -> list[tuple[str, int, int]]:
    """Return (engine, worker_id, epoch) of every entry in the log of placements."""
    return [
        (received.message.engine, received.message.worker_id, received.message.placement.epoch)
        async for received in bus.replay(SUBJECTS.placements(), follow=False)
        if isinstance(received.message, PlacementCommitted)
    ]


@asynccontextmanager
async def serving(bus: Bus) -> AsyncIterator[MigrationService]:
    service = MigrationService(bus, SUBJECTS, MigrationConfig(), clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(service.run())
    try:
        async with asyncio.timeout(20):
            await service.ready.wait()
        yield service
    finally:
        assert not running.done(), running
        running.cancel()
        await asyncio.wait([running], timeout=5)
        assert running.cancelled()


@pytest.mark.looptime
async def test_the_placement_of_an_engine_that_joined_is_recorded_and_can_be_read_back() -> None:
    bus = MemoryBus()
    await join(bus, 1, "before")
    async with serving(bus) as service:
        assert await recorded(bus) == [("before", 1, 0)], "ready means recorded"
        await join(bus, 2, "after")
        await asyncio.sleep(0.1)
        assert await recorded(bus) == [("before", 1, 0), ("after", 2, 0)]
        assert {engine: entry.epoch for engine, entry in service.placements.engines().items()} == {
            "before": 0,
            "after": 0,
        }
        assert b'roost_migration_epoch{engine="after"} 0.0' in service.metrics.exposition()
    (message,) = [
        received.message async for received in bus.replay(SUBJECTS.placements("after"), follow=False)
    ]
    assert isinstance(message, PlacementCommitted)
    assert Placement.from_record(message.placement) == FIRST
    assert message.layout == EP


@pytest.mark.looptime
async def test_an_incarnation_is_recorded_once_however_often_it_joins_and_the_service_restarts() -> None:
    bus = MemoryBus()
    for _ in range(3):
        async with serving(bus):
            for _ in range(3):
                await join(bus, 1)
            await asyncio.sleep(0.1)
    assert await recorded(bus) == [("a", 1, 0)]
    async with serving(bus):
        await join(bus, 2)
        await asyncio.sleep(0.1)
    assert await recorded(bus) == [("a", 1, 0), ("a", 2, 0)]


@pytest.mark.looptime
async def test_later_epochs_in_the_log_are_read_back_at_start_and_followed() -> None:
    bus = MemoryBus()
    async with serving(bus):
        await join(bus)
        await asyncio.sleep(0.1)
    moved = Placement(FIRST.expert_of_slot[:, ::-1].copy(), experts=8, ranks=2, epoch=1)
    await bus.record(
        SUBJECTS.placements("a"),
        PlacementCommitted(engine="a", worker_id=1, attention=DP_ATTENTION, placement=moved.record()),
    )
    async with serving(bus) as service:
        assert service.placements.engines()["a"].placement == moved
        third = Placement(FIRST.expert_of_slot, experts=8, ranks=2, epoch=2)
        await bus.record(
            SUBJECTS.placements("a"),
            PlacementCommitted(engine="a", worker_id=1, attention=DP_ATTENTION, placement=third.record()),
        )
        await asyncio.sleep(0.1)
        assert service.placements.engines()["a"].epoch == 2
        assert b'roost_migration_epoch{engine="a"} 2.0' in service.metrics.exposition()


@pytest.mark.looptime
async def test_engines_without_experts_and_engines_that_left_have_no_placement() -> None:
    bus = MemoryBus()
    async with serving(bus) as service:
        await join(bus, 1, "plain", shape=None, layout=None, placement=None)
        await join(bus, 2, "gone")
        await asyncio.sleep(0.1)
        await bus.record(SUBJECTS.membership("gone"), EngineLeft(engine="gone", worker_id=2, reason="test"))
        await asyncio.sleep(0.1)
        assert service.placements.engines() == {}
        assert await recorded(bus) == [("gone", 2, 0)]
        assert b"roost_migration_epoch{" not in service.metrics.exposition()


def pushed_out(broker: MemoryBroker, subject: str) -> None:
    """Drop the messages of a subject, as a full log does with old ones."""
    broker._log = [entry for entry in broker._log if entry.subject != subject]


class Introducing:
    """Engines that are alive and identify themselves on request."""

    def __init__(self, bus: MemoryBus, *engines: EngineJoined) -> None:
        self.asked: list[float] = []
        self._bus = bus
        self._engines = {engine.worker_id: engine for engine in engines}

    @asynccontextmanager
    async def living(self, *worker_ids: int) -> AsyncIterator[None]:
        """Serve identification requests for these worker_ids. One without an engine refuses to identify
        itself."""
        async with AsyncExitStack() as stack:
            for worker_id in worker_ids:
                name = self._engines[worker_id].engine if worker_id in self._engines else "a"
                await stack.enter_async_context(
                    self._bus.serve(SUBJECTS.describe_engine(name, worker_id), self._answer)
                )
            yield

    async def _answer(self, request: Message) -> Message:
        assert isinstance(request, DescribeEngine)
        self.asked.append(asyncio.get_running_loop().time())
        return self._engines[request.worker_id]

    async def beat(self, engine: str, worker_id: int, seconds: int) -> None:
        heart = self._bus.publisher(SUBJECTS.heartbeats(engine))
        for _ in range(seconds):
            await heart.publish(EngineHeartbeat(engine=engine, worker_id=worker_id, epoch=0))
            await asyncio.sleep(1)


@pytest.mark.looptime
async def test_an_engine_whose_join_was_pushed_out_of_the_log_is_known_before_anything_of_it_is_ended_and_a_dead_one_is_not() -> (
    None
):
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with serving(bus):
        for worker_id, name in ((1, "alive"), (2, "dead"), (3, "left"), (4, "older"), (5, "older")):
            await join(bus, worker_id, name)
        await bus.record(SUBJECTS.membership("left"), EngineLeft(engine="left", worker_id=3, reason="test"))
        await asyncio.sleep(0.1)
    for name in ("alive", "dead", "older"):
        pushed_out(broker, SUBJECTS.membership(name))
    engines = Introducing(bus, joined(1, "alive"), joined(3, "left"), joined(4, "older"))
    async with engines.living(1, 3, 4), serving(bus) as service:
        assert {name: entry.worker_id for name, entry in service.placements.engines().items()} == {"alive": 1}
        assert service.demand.machines(1) is not None
        assert (await recorded(bus)).count(("alive", 1, 0)) == 1


@pytest.mark.looptime
async def test_an_engine_that_beats_though_nothing_is_stored_of_it_is_asked_who_it_is_and_recorded_once() -> (
    None
):
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    served = Placement(FIRST.expert_of_slot, experts=8, ranks=2, epoch=7)
    engines = Introducing(bus, joined(1, "a", served), joined(2, "b"))

    async def somebody_else(_: Message) -> Message:
        return joined(3, "c")

    for engine in (joined(1, "a", served), joined(3, "c")):
        await claim_name(bus, engine)
    async with (
        engines.living(1, 2),
        bus.serve(SUBJECTS.describe_engine("c", 2), somebody_else),
        serving(bus) as service,
    ):
        await engines.beat("a", 1, 4)
        assert service.placements.engines()["a"].placement == served
        assert await recorded(bus) == [("a", 1, 7)]
        assert len(engines.asked) == 1
        await join(bus, 1, "a", placement=served)
        await engines.beat("a", 2, 4)
        assert service.placements.engines()["a"].worker_id == 1, "the log knows who engine a is"
        await engines.beat("c", 2, 3)
        assert set(service.placements.engines()) == {"a"}, "it says that it is somebody else"
        assert b'rejected_total{reason="contradiction"} 1.0' in service.metrics.exposition()
        assert await recorded(bus) == [("a", 1, 7)]


@pytest.mark.looptime
async def test_whoever_beats_and_does_not_say_who_it_is_is_asked_ever_more_seldom() -> None:
    bus = MemoryBus()
    nobody = Introducing(bus)
    async with nobody.living(1), serving(bus) as service:
        await nobody.beat("a", 1, 1000)
        pauses = np.diff(nobody.asked)
        assert 6 <= len(nobody.asked) <= 10
        assert (pauses[1:] > 1.5 * pauses[:-1]).all()
        assert service.placements.engines() == {}


def test_of_more_strangers_than_are_remembered_the_one_heard_first_is_forgotten() -> None:
    strangers = UnknownEngines(limit=2)
    assert not any(strangers.due(worker_id, 0.0) for worker_id in (1, 2, 3))
    assert [strangers.due(worker_id, 5.0) for worker_id in (3, 2, 1)] == [True, True, False]


@pytest.mark.looptime
async def test_a_placement_in_the_log_that_cannot_be_is_left_out_and_the_service_starts() -> None:
    bus = MemoryBus()
    async with serving(bus):
        await join(bus)
        await asyncio.sleep(0.1)
    moved = Placement(FIRST.expert_of_slot[:, ::-1].copy(), experts=8, ranks=2, epoch=1)
    broken = msgspec.structs.replace(moved.record(), slots=b"short")
    for record in (broken, msgspec.structs.replace(broken, epoch=2), moved.record()):
        await bus.record(
            SUBJECTS.placements("a"),
            PlacementCommitted(engine="a", worker_id=1, attention=DP_ATTENTION, placement=record, plan="p"),
        )
    async with serving(bus) as service:
        assert service.placements.engines()["a"].placement == moved
        history = service.demand._engines[1].history
        assert (history.epoch, history.plan) == (1, "p")
        assert b'rejected_total{reason="placement"} 2.0' in service.metrics.exposition()


@pytest.mark.looptime
async def test_impossible_joins_and_garbage_are_counted_and_the_service_lives_on() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with serving(bus) as service:
        for subject in (
            SUBJECTS.membership("a"),
            SUBJECTS.placements("a"),
            SUBJECTS.membership("x")[:-1] + "ä",
        ):
            for raw in (b"", b"\xc1", b"\xff" * 300):
                broker.deliver(subject, raw)
        await join(bus, 1, "a", urls=("http://x",))
        await join(bus, 2, "b", placement=msgspec.structs.replace(FIRST.record(), slots=b"short"))
        await join(bus, 3, "c", placement=msgspec.structs.replace(FIRST.record(), experts=1 << 50))
        await bus.record(SUBJECTS.membership("d"), joined(4, "another name"))
        await bus.record(SUBJECTS.membership("e"), joined(5, "f"))
        await bus.record(
            SUBJECTS.membership("g"),
            PlacementCommitted(engine="g", worker_id=6, attention=DP_ATTENTION, placement=FIRST.record()),
        )
        await bus.record(SUBJECTS.placements("g"), EngineLeft(engine="g", worker_id=6, reason="test"))
        await bus.publisher(SUBJECTS.membership("h")).publish(
            EngineHeartbeat(engine="h", worker_id=7, epoch=0)
        )
        await join(bus, 8, "good")
        await asyncio.sleep(0.1)
        assert await recorded(bus) == [("good", 8, 0)]
        assert bus.rejected["speaker"] >= 2, "whose name is not in the subject"
        exposed = service.metrics.exposition()
        for reason, count in (("shape", 1), ("placement", 2), ("kind", 3)):
            assert f'rejected_total{{reason="{reason}"}} {count}.0'.encode() in exposed, exposed.decode()


class Forgetful(MemoryBus):
    """Bus that stores and then reports an unknown result, or does not store and reports the same."""

    def __init__(self, broker: MemoryBroker, fates: list[bool]) -> None:
        super().__init__(broker)
        self.fates = fates

    async def record(self, subject: str, message: Message) -> None:
        if self.fates:
            if self.fates.pop(0):
                await super().record(subject, message)
            raise BusError("no answer")
        await super().record(subject, message)


@pytest.mark.looptime
@pytest.mark.parametrize("fates", [[True], [False], [False, False, True], [False, False, False]])
async def test_a_write_whose_answer_is_lost_is_not_repeated_when_it_arrived_and_is_when_it_did_not(
    fates: list[bool],
) -> None:
    broker = MemoryBroker()
    bus = Forgetful(broker, fates)
    await join(MemoryBus(broker))
    async with serving(bus):
        assert await recorded(bus) == [("a", 1, 0)]


@pytest.mark.looptime
async def test_a_service_that_loses_the_lead_amid_an_outage_leads_again_after_it() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with serving(MemoryBus(broker)) as service:
        await join(bus)
        claim = await bus.read_claim(SUBJECTS.coordinator)
        assert claim is not None
        # Another service takes the lead, and is never heard of again.
        other = msgspec.json.encode(Holder(worker_id=99, node="elsewhere", beat=1))
        await bus.claim(SUBJECTS.coordinator, other, claim.revision)
        async with asyncio.timeout(30):
            while service.controller is not None:  # noqa: ASYNC110 there is no event for it
                await asyncio.sleep(0.05)
        broker.reachable = False
        await asyncio.sleep(120)
        assert service.controller is None
        broker.reachable = True
        async with asyncio.timeout(60):
            while service.controller is None:  # noqa: ASYNC110 as above
                await asyncio.sleep(0.05)
        await join(bus, worker_id=2, engine="b")
        await asyncio.sleep(10)
        assert ("b", 2, 0) in await recorded(bus)


@pytest.mark.looptime
async def test_an_outage_delays_the_record_and_nothing_else() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with serving(bus) as service:
        raw: list[tuple[str, bytes]] = []
        keep, broker.deliver = broker.deliver, lambda subject, sealed: raw.append((subject, sealed))  # type: ignore[method-assign]
        await join(MemoryBus(broker))
        broker.deliver = keep  # type: ignore[method-assign]
        keep(*raw[0])
        broker.reachable = False
        await asyncio.sleep(60)
        assert not service.placements.engines()
        broker.reachable = True
        await asyncio.sleep(10)
        assert await recorded(bus) == [("a", 1, 0)]


async def test_over_nats_every_incarnation_is_recorded_once_though_the_server_is_killed(
    nats_server: Any,
) -> None:
    config = BusConfig(record_seconds=1.0, request_seconds=0.5, reconnect_max_seconds=0.2)
    bus = await NatsBus.connect(nats_server.url, SUBJECTS, config)
    try:
        async with serving(bus) as service:
            await join(bus, 1, "a")
            nats_server.stop(signal.SIGKILL)
            await asyncio.to_thread(nats_server.start)
            await join(bus, 2, "b")
            async with asyncio.timeout(20):
                while set(service.placements.engines()) != {  # noqa: ASYNC110 the registry is pure and has no event
                    "a",
                    "b",
                }:
                    await asyncio.sleep(0.02)
        async with serving(bus):
            assert sorted(await recorded(bus)) == [("a", 1, 0), ("b", 2, 0)]
    finally:
        await bus.close()


@pytest.mark.looptime
async def test_sampled_tokens_reach_the_planner_from_the_engine_that_they_name_and_else_are_refused() -> None:
    bus = MemoryBus()
    tokens = np.ones((SAMPLED_TOKENS, SHAPE.layers, SHAPE.top_k), "<u2").tobytes()
    async with serving(bus) as service:
        await join(bus)
        await asyncio.sleep(0.1)
        for rank in (0, 1):
            await bus.publisher(SUBJECTS.demand).publish(wanted(rank, 1.0, 1))
        publisher = bus.publisher(SUBJECTS.tokens_sampled("a"))
        said = {"worker_id": 1, "rank": 0, "model": "m"}
        await publisher.publish(TokensSampled(engine="a", requests=(tokens, tokens), **said))
        await publisher.publish(TokensSampled(engine="a", requests=(tokens[:-1],), **said))
        await bus.publisher(SUBJECTS.tokens_sampled("b")).publish(
            TokensSampled(engine="b", requests=(tokens,), **said)
        )
        await asyncio.sleep(0.1)
        found = service.demand.view(EngineEntry("a", 1, FIRST), asyncio.get_running_loop().time()).tokens
        exposed = service.metrics.exposition()
    assert found is not None
    assert found.shape == (2, SAMPLED_TOKENS, SHAPE.layers, SHAPE.top_k)
    assert b'rejected_total{reason="shape"} 1.0' in exposed
    assert b'rejected_total{reason="contradiction"} 1.0' in exposed
