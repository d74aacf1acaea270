"""The migration service on the memory bus, in virtual time; and once over NATS that goes away."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bus import Bus, BusError, Message
from bus.config import BusConfig
from bus.memory import MemoryBroker, MemoryBus
from bus.nats import NatsBus
from bus.subjects import Subjects
from fleet.events import EngineHeartbeat, EngineLeft, PlacementCommitted
from fleet.layout import EP
from fleet.placement import Placement
from migration.config import MigrationConfig
from migration.service import MigrationService
from tests.migration.joining import FIRST, joined

SUBJECTS = Subjects()


async def join(bus: Bus, worker_id: int = 1, engine: str = "a", **fields: Any) -> None:
    await bus.record(SUBJECTS.membership(engine), joined(worker_id, engine, **fields))


async def recorded(bus: Bus) -> list[tuple[str, int, int]]:
    """(engine, worker_id, epoch) of everything in the log of placements."""
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
        assert {engine: entry.epoch for engine, entry in service.ledger.engines().items()} == {"before": 0, "after": 0}
        assert b'roost_migration_epoch{engine="after"} 0.0' in service.metrics.exposition()
    (message,) = [received.message async for received in bus.replay(SUBJECTS.placements("after"), follow=False)]
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
    await bus.record(SUBJECTS.placements("a"), PlacementCommitted(engine="a", worker_id=1, layout=EP, placement=moved.record()))
    async with serving(bus) as service:
        assert service.ledger.engines()["a"].placement == moved
        third = Placement(FIRST.expert_of_slot, experts=8, ranks=2, epoch=2)
        await bus.record(SUBJECTS.placements("a"), PlacementCommitted(engine="a", worker_id=1, layout=EP, placement=third.record()))
        await asyncio.sleep(0.1)
        assert service.ledger.engines()["a"].epoch == 2
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
        assert service.ledger.engines() == {}
        assert await recorded(bus) == [("gone", 2, 0)]
        assert b"roost_migration_epoch{" not in service.metrics.exposition()


@pytest.mark.looptime
async def test_impossible_joins_and_garbage_are_counted_and_the_service_lives_on() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with serving(bus) as service:
        for subject in (SUBJECTS.membership("a"), SUBJECTS.placements("a"), SUBJECTS.membership("x")[:-1] + "ä"):
            for raw in (b"", b"\xc1", b"\xff" * 300):
                broker.deliver(subject, raw)
        await join(bus, 1, "a", urls=("http://x",))
        await join(bus, 2, "b", placement=msgspec.structs.replace(FIRST.record(), slots=b"short"))
        await join(bus, 3, "c", placement=msgspec.structs.replace(FIRST.record(), experts=1 << 50))
        await bus.record(SUBJECTS.membership("d"), joined(4, "another name"))
        await bus.record(SUBJECTS.membership("e"), joined(5, "f"))
        await bus.record(SUBJECTS.membership("g"), PlacementCommitted(engine="g", worker_id=6, layout=EP, placement=FIRST.record()))
        await bus.record(SUBJECTS.placements("g"), EngineLeft(engine="g", worker_id=6, reason="test"))
        await bus.publisher(SUBJECTS.membership("h")).publish(EngineHeartbeat(engine="h", worker_id=7, epoch=0))
        await join(bus, 8, "good")
        await asyncio.sleep(0.1)
        assert await recorded(bus) == [("good", 8, 0)]
        exposed = service.metrics.exposition()
        for reason, count in (("shape", 1), ("placement", 2), ("engine", 2), ("kind", 3)):
            assert f'rejected_total{{reason="{reason}"}} {count}.0'.encode() in exposed, exposed.decode()


class Forgetful(MemoryBus):
    """Stores, and then says that it did not know whether it had; or does not store and says the same."""

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
async def test_a_write_whose_answer_is_lost_is_not_repeated_when_it_arrived_and_is_when_it_did_not(fates: list[bool]) -> None:
    broker = MemoryBroker()
    bus = Forgetful(broker, fates)
    await join(MemoryBus(broker))
    async with serving(bus):
        assert await recorded(bus) == [("a", 1, 0)]


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
        assert not service.ledger.engines()
        broker.reachable = True
        await asyncio.sleep(10)
        assert await recorded(bus) == [("a", 1, 0)]


async def test_over_nats_every_incarnation_is_recorded_once_though_the_server_is_killed(nats_server: Any) -> None:
    config = BusConfig(record_seconds=1.0, request_seconds=0.5, reconnect_most_seconds=0.2)
    bus = await NatsBus.connect(nats_server.url, SUBJECTS, config)
    try:
        async with serving(bus) as service:
            await join(bus, 1, "a")
            nats_server.stop(signal.SIGKILL)
            await asyncio.to_thread(nats_server.start)
            await join(bus, 2, "b")
            async with asyncio.timeout(20):
                while set(service.ledger.engines()) != {"a", "b"}:  # noqa: ASYNC110 the ledger is pure and has no event
                    await asyncio.sleep(0.02)
        async with serving(bus):
            assert sorted(await recorded(bus)) == [("a", 1, 0), ("b", 2, 0)]
    finally:
        await bus.close()
