"""Fixture for tests of plan execution: a migration service, engines that follow the protocol, and the log."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec

from bus import Bus, Message
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CoordinatorState, RankState
from fleet.placement import Placement, linear
from fleet.requests.plans import ApplyPlan, MigrationAccepted
from migration.config import MigrationConfig
from migration.handover.coordinator import OpenHandover
from migration.model.plan import Copy, Handover, Plan, PlanStep, planned, replay
from migration.service import MigrationService
from tests.migration import builders
from tests.migration.builders import joined
from tests.migration.fake_ranks import Ranks

SUBJECTS = Subjects()
FIRST = linear(layers=2, experts=8, ranks=2, slots_per_rank=6)
CONFIG = MigrationConfig(stage_seconds=2.0, cycle_seconds=1e6)


def leading(bus: Bus, config: MigrationConfig = CONFIG) -> AbstractAsyncContextManager[MigrationService]:
    """See `builders.leading`."""
    return builders.leading(bus, config)


@asynccontextmanager
async def engine(
    broker: MemoryBroker, worker_id: int = 1, name: str = "a", placement: Placement = FIRST, **fields: Any
) -> AsyncIterator[Ranks]:
    """Yield an engine that has joined and whose ranks follow the protocol. fields: of its join."""
    bus = MemoryBus(broker)
    ranks = Ranks(bus, SUBJECTS, placement, engine=name, worker_id=worker_id)
    async with ranks.serving():
        await bus.record(SUBJECTS.membership(name), joined(worker_id, name, placement, **fields))
        yield ranks


def replicating(base: Placement = FIRST, handovers: int = 3) -> Plan:
    """Make a plan in which each handover copies one more expert of rank 0 to rank 1."""
    steps = []
    for at in range(handovers):
        slot = 10 + at % 2
        copy = Copy(expert=at, slot=slot, source=at, link="same-node", bytes=384)
        steps.append(
            PlanStep(
                kind="replicate",
                layer=0,
                slot=slot,
                expert=at,
                evicted=None if at < 2 else at - 2,
                copies=(copy,),
                why="so",
            )
        )
    plan = planned(
        base,
        [Handover(epoch=base.epoch + at + 1, steps=(step,)) for at, step in enumerate(steps)],
        reason="test",
    )
    replay(base, plan)
    return plan


async def ask(bus: Bus, request: Message) -> MigrationAccepted:
    answer = await bus.request(SUBJECTS.migrate, request, 20)
    assert isinstance(answer, MigrationAccepted)
    return answer


async def apply(bus: Bus, plan: Plan, name: str = "a") -> MigrationAccepted:
    return await ask(bus, ApplyPlan(engine=name, plan=msgspec.json.encode(plan)))


async def log(bus: Bus, name: str = "a") -> list[Any]:
    """Return the log of an engine's plans and placements, in order."""
    both = SUBJECTS.migrations(name).replace(".handover.", ".*.")
    return [received.message async for received in bus.replay(both, follow=False)]


def in_words(entries: list[Any]) -> list[str]:
    """Describe the log in words; placements with worker and epoch."""
    return [
        (
            f"{entry.worker_id}@{entry.placement.epoch}"
            if isinstance(entry, PlacementCommitted)
            else type(entry).__name__.removeprefix("Migration")
        )
        for entry in entries
    ]


def key(broker: MemoryBroker, name: str = "a") -> OpenHandover | None:
    """Return the value stored under an engine's key."""
    claim = broker.claimed(SUBJECTS.handover_key(name))
    return None if claim is None else msgspec.json.decode(claim.value, type=OpenHandover)


def at_rest(broker: MemoryBroker, ranks: Ranks) -> bool:
    """Return True if no handover is open, neither in the store nor on any rank."""
    standing = key(broker)
    return (standing is None or standing.state is CoordinatorState.IDLE) and all(
        one.state is RankState.SERVING for one in ranks.standing
    )
