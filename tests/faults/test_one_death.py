"""The quick one of these tests: an expert goes over NIXL between processes, one of which is killed while the
next one goes."""

import asyncio
from pathlib import Path

import numpy as np

from fleet.facts.migrations import MigrationCommitted
from fleet.placement import Placement
from tests.faults.fleet_fixture import Engine, FleetFixture, until
from tests.faults.invariants import Belongings, judge
from tests.faults.plans import series


async def test_experts_move_between_processes_and_the_death_of_one_leaves_a_serving_engine(
    tmp_path: Path,
) -> None:
    random, belongings = np.random.default_rng(1), Belongings()
    async with FleetFixture(tmp_path).open() as deployment:
        engine = Engine(deployment, "one")
        await asyncio.gather(deployment.add_coordinator(), engine.live())
        await judge(engine)
        await belongings.check(engine)
        first = series(await judge(engine), random, 2, source=0, target=1)
        await engine.order(first)
        assert isinstance(
            await until(lambda: engine.history.end_of(first.id), "the plan is carried out", 20),
            MigrationCommitted,
        )
        placement = await judge(engine)
        assert placement.epoch == 2
        await belongings.check(engine)
        second = series(placement, random, 1, source=2, target=0)
        await engine.order(second)
        await asyncio.sleep(0.05)
        await engine.ranks[0].kill()
        await engine.die()
        await engine.live()
        await until(lambda: engine.history.end_of(second.id), "the plan comes to an end", 20)
        assert (await judge(engine)).epoch in (2, 3)
        await engine.leave()
    assert isinstance(placement, Placement)
