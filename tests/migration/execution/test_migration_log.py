"""The one reader of the log of plans, and the writer of it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.migrations import MigrationPlanned
from fleet.facts.placements import PlacementCommitted
from fleet.layout import DP_ATTENTION
from fleet.placement import Placement
from migration.engine_state.placement_registry import PlacementRegistry
from migration.execution.migration_log import MigrationLog
from migration.model.plan_log import PlanEntry

PLANNED = MigrationPlanned(
    engine="e",
    worker_id=1,
    plan="p",
    origin="operator",
    base_epoch=0,
    handovers=1,
    copies=1,
    bytes=1,
    reason="",
)


async def leading() -> None:
    return


def log_of(
    broker: MemoryBroker, until_leading: Callable[[], Awaitable[None]] = leading
) -> tuple[MigrationLog, PlacementRegistry]:
    """The log as one service has it, and the placements that this service knows."""
    known = PlacementRegistry()

    def committed(entry: PlacementCommitted) -> None:
        known.committed(entry)

    log = MigrationLog(
        MemoryBus(broker),
        broker.subjects,
        known,
        committed=committed,
        retry=0.01,
        until_leading=until_leading,
        clock=time.monotonic,
    )
    return log, known


def placed(epoch: int) -> PlacementCommitted:
    """An epoch of an engine of two ranks, which exchange their experts with each."""
    table = np.roll([[0, 1]], epoch, axis=1)
    return PlacementCommitted(
        engine="e",
        worker_id=1,
        attention=DP_ATTENTION,
        placement=Placement(table, experts=2, ranks=2, epoch=epoch).record(),
    )


async def stored(broker: MemoryBroker) -> list[int]:
    """The epochs on record, in order."""
    return [
        received.message.placement.epoch
        async for received in MemoryBus(broker).replay(broker.subjects.placements("e"), follow=False)
        if isinstance(received.message, PlacementCommitted)
    ]


async def test_an_observer_that_fails_stops_neither_the_writer_nor_the_other_observers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = MemoryBroker()
    log, _ = log_of(broker)
    seen: list[PlanEntry] = []

    def fails(entry: PlanEntry) -> None:
        raise ZeroDivisionError

    log.observers += [fails, seen.append]
    with caplog.at_level(logging.CRITICAL, logger="migration.execution.migration_log"):
        await log.write(PLANNED)
    assert seen == [PLANNED]
    assert log.plans.engines["e"].under_way is not None
    assert not log.plans.apply(PLANNED), "it was applied once"


async def test_a_placement_that_another_service_overtook_while_this_one_waited_for_the_lead_is_not_written() -> (
    None
):
    broker, leads = MemoryBroker(), asyncio.Event()

    async def until_leading() -> None:
        await leads.wait()

    log, known = log_of(broker, until_leading)
    other, _ = log_of(broker)
    async with asyncio.timeout(5):
        late = asyncio.create_task(log.record(placed(1)))
        next_one = asyncio.create_task(log.record(placed(3)))
        await asyncio.sleep(0)
        assert not late.done()
        await other.record(placed(2))
        known.committed(placed(2))  # as it follows what is stored
        leads.set()
        await asyncio.gather(late, next_one)
    assert await stored(broker) == [2, 3], "the newest on record is what the engine serves"
