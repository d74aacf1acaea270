"""The one reader of the log of plans."""

import logging
import time

import pytest

from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.migrations import MigrationPlanned
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


async def test_an_observer_that_fails_stops_neither_the_writer_nor_the_other_observers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = MemoryBroker()
    log = MigrationLog(
        MemoryBus(broker),
        broker.subjects,
        PlacementRegistry(),
        committed=lambda _: None,
        retry=0.01,
        until_leading=leading,
        clock=time.monotonic,
    )
    seen: list[PlanEntry] = []

    def fails(entry: PlanEntry) -> None:
        raise ZeroDivisionError

    log.observers += [fails, seen.append]
    with caplog.at_level(logging.CRITICAL, logger="migration.execution.migration_log"):
        await log.write(PLANNED)
    assert seen == [PLANNED]
    assert log.plans.engines["e"].under_way is not None
    assert not log.plans.apply(PLANNED), "it was applied once"
