"""Plans carried out over the memory bus, in virtual time, by ranks that obey the protocol, and by some that do not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bus import Bus, Message
from bus.memory import MemoryBroker, MemoryBus
from bus.subjects import Subjects
from fleet.events import (
    ApplyPlan,
    MigrationAccepted,
    MigrationCommitted,
    MigrationStaged,
    PlacementCommitted,
)
from fleet.placement import Placement, linear
from migration.config import MigrationConfig
from migration.plan import Copy, Handover, Plan, Step, planned, replay
from migration.service import MigrationService
from tests.migration.joining import joined
from tests.migration.obedient import Ranks

SUBJECTS = Subjects()
FIRST = linear(layers=2, experts=8, ranks=2, slots_per_rank=6)
CONFIG = MigrationConfig(stage_seconds=2.0)


async def join(bus: Bus, worker_id: int = 1, engine: str = "a", placement: Placement = FIRST, **fields: Any) -> None:
    await bus.record(SUBJECTS.membership(engine), joined(worker_id, engine, placement, **fields))


@asynccontextmanager
async def leading(bus: Bus, config: MigrationConfig = CONFIG) -> AsyncIterator[MigrationService]:
    service = MigrationService(bus, SUBJECTS, config, clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(service.run())
    try:
        await asyncio.wait_for(service.ready.wait(), 20)
        yield service
    finally:
        assert not running.done(), running
        running.cancel()
        await asyncio.wait([running], timeout=5)
        assert running.cancelled()


@asynccontextmanager
async def engine(broker: MemoryBroker, worker_id: int = 1, name: str = "a", placement: Placement = FIRST) -> AsyncIterator[Ranks]:
    """An engine that has joined, and whose ranks obey."""
    bus = MemoryBus(broker)
    ranks = Ranks(bus, SUBJECTS, placement, engine=name, worker_id=worker_id)
    async with ranks.serving():
        await join(bus, worker_id, name, placement)
        yield ranks


def replicating(base: Placement = FIRST, handovers: int = 3) -> Plan:
    """Each handover brings one more expert of rank 0 to rank 1."""
    steps = [
        Step(
            kind="replicate",
            layer=0,
            slot=10 + at % 2,
            expert=at,
            evicted=None if at < 2 else at - 2,
            copies=(Copy(expert=at, slot=10 + at % 2, source=at, link="same-node", bytes=384),),
            why="so",
        )
        for at in range(handovers)
    ]
    plan = planned(base, [Handover(epoch=base.epoch + at + 1, steps=(step,)) for at, step in enumerate(steps)], reason="test")
    replay(base, plan)
    return plan


async def ask(bus: Bus, request: Message) -> MigrationAccepted:
    answer = await bus.request(SUBJECTS.migrate, request, 20)
    assert isinstance(answer, MigrationAccepted)
    return answer


async def apply(bus: Bus, plan: Plan, name: str = "a") -> MigrationAccepted:
    return await ask(bus, ApplyPlan(engine=name, plan=msgspec.json.encode(plan)))


async def log(bus: Bus, name: str = "a") -> list[Any]:
    """What is recorded of an engine's plans and placements, in the order of the log."""
    both = SUBJECTS.migrations(name).replace(".handover.", ".*.")
    return [received.message async for received in bus.replay(both, follow=False)]


def told(entries: list[Any]) -> list[str]:
    """Kinds in their order, of plans; without placements."""
    return [type(entry).__name__.removeprefix("Migration") for entry in entries if not isinstance(entry, PlacementCommitted)]


def epochs(entries: list[Any]) -> list[tuple[int, int]]:
    return [(entry.worker_id, entry.placement.epoch) for entry in entries if isinstance(entry, PlacementCommitted)]


@pytest.mark.looptime
async def test_a_plan_of_three_handovers_is_carried_out_and_told_in_order() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    async with engine(broker) as ranks, leading(bus) as service:
        accepted = await apply(bus, replicating())
        assert (accepted.handovers, accepted.copies, accepted.bytes) == (3, 3, 3 * 384)
        assert accepted.what[0] == "expert 0 from rank 0 to rank 1"
        await asyncio.sleep(5)
        assert ranks.served == [0, 1, 2, 3]
        assert ranks.placement == replay(FIRST, replicating())[-1]
        assert service.ledger.engines()["a"].placement == ranks.placement
        entries = await log(bus)
        assert told(entries) == ["Planned", "Staged", "Committed", "Staged", "Committed", "Staged", "Committed"]
        assert epochs(entries) == [(1, 0), (1, 1), (1, 2), (1, 3)]
        assert [entry.last for entry in entries if isinstance(entry, MigrationCommitted)] == [False, False, True]
        assert all(len(entry.pulls) == 2 for entry in entries if isinstance(entry, MigrationStaged))
        exposed = service.metrics.exposition().decode()
        assert 'handovers_total{fault="",outcome="committed"} 3.0' in exposed
        assert 'handovers_pending{engine="a"} 0.0' in exposed
        assert 'cells{engine="a",state="free"} 8.0' in exposed
