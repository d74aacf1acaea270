"""The migration service at work with nobody touching it: over the memory bus, in virtual time, with ranks that obey."""

from contextlib import AbstractAsyncContextManager

import pytest

from bus.memory import MemoryBroker, MemoryBus
from fleet.events import MigrationPlanned, PlanJudged
from migration.config import MigrationConfig
from migration.service import MigrationService
from tests.migration.flying_rig import CONFIG, engine_of, flight
from tests.migration.joining import leading


def serving(broker: MemoryBroker, config: MigrationConfig = CONFIG) -> AbstractAsyncContextManager[MigrationService]:
    return leading(MemoryBus(broker), config)


@pytest.mark.looptime
async def test_a_plan_that_pays_is_carried_out_and_judged_with_nobody_touching_it() -> None:
    broker = MemoryBroker()
    async with flight(broker) as world, serving(broker) as service:
        planned = await world.until(MigrationPlanned)
        assert (planned.origin, planned.policy, planned.base_epoch) == ("planner", "roost", 0)
        assert planned.before.balance < planned.after.balance
        assert planned.before.step_seconds > planned.after.step_seconds
        world.balance = 0.9
        judged = await world.until(PlanJudged)
        assert judged.verdict == "kept", judged
        assert judged.realised > 0.4
        assert judged.epoch == world.ranks.served[-1] == planned.handovers
        told = await engine_of(world.bus)
        assert told.plans[0].outcome == "kept"
        assert told.plans[0].measured_after is not None
        assert told.measured is not None
        assert told.at_start is not None
        assert (told.spent_bytes, told.moved_bytes) == (planned.bytes, planned.bytes)
        assert told.epoch == planned.handovers
        exposed = service.metrics.exposition().decode()
        for line in ('roost_loop_verdicts_total{verdict="kept"} 1.0', f'roost_loop_spent_bytes{{engine="a"}} {float(planned.bytes)}', "roost_loop_paused 0.0"):
            assert line in exposed
