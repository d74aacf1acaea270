"""Switches of layout as they are asked for, on a simulated engine that serves meanwhile."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.client.migrations import NotAccepted, PlanProgress, carried_out, preview
from deploy.client.placements import placements
from deploy.parts.simulated import SimulatedHost
from deploy.process import alongside
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.simulated.engine import SimulatedEngine
from fleet.facts.migrations import MigrationCommitted, MigrationPlanned
from fleet.requests.plans import MigrateExpert, RollBack, SetLayout
from migration.config import MigrationConfig
from migration.service import MigrationService
from tests.simulated_engines import simulated_engine

pytestmark = pytest.mark.usefixtures("elsewhere")
SUBJECTS = Subjects()


async def test_an_engine_changes_its_layout_and_back_while_it_serves_with_a_migration_between() -> None:
    bus, said = MemoryBus(), list[str]()
    service = MigrationService(bus, SUBJECTS, MigrationConfig(cycle_seconds=3600.0))

    async def do(order: Any) -> PlanProgress:
        return await carried_out(bus, SUBJECTS, order, wait=True, began=lambda _: None, say=said.append)

    async with (
        simulated_engine(bus, SUBJECTS, "sim-0", ranks=2, slots_per_rank=17) as host,
        alongside(service.run(), "the planner"),
        asyncio.timeout(50),
    ):
        await service.ready.wait()
        layers = host.engine.placement.layers
        request = GenerationRequest(prompt=list(range(1, 20)), max_tokens=600, ignore_eos=True)
        alone = await (await host.engine.ranks[0].submit(request)).rest()
        meanwhile = await host.engine.ranks[0].submit(request)
        await anext(meanwhile)
        every = SetLayout(engine="sim-0", sharded=tuple(range(layers)), now=True)
        expected = await preview(bus, SUBJECTS, every, said.append)
        there = await do(every)
        assert there.aborted is None, there.aborted
        assert (there.copied_bytes, there.copies) == (expected.bytes, expected.copies)
        assert host.engine.placement.sharded == tuple(range(layers))
        assert (await placements(bus, SUBJECTS))["sim-0"].now == host.engine.placement
        with pytest.raises(NotAccepted, match="all layers of engine 'sim-0' are sharded"):
            await do(MigrateExpert(engine="sim-0", layer=2, expert=3, rank=1))
        part = await do(SetLayout(engine="sim-0", sharded=(0, 3), now=True))
        assert part.aborted is None, part.aborted
        assert host.engine.placement.sharded == (0, 3)
        moved = await do(MigrateExpert(engine="sim-0", layer=2, expert=3, rank=1))
        assert moved.aborted is None
        assert 3 in host.engine.placement.on_rank(1)[2]
        back = await do(RollBack(engine="sim-0", plan=there.accepted.plan))
        assert back.aborted is None, back.aborted
        assert host.engine.placement.sharded == ()
        rest = (await meanwhile.rest()).token_ids
        assert rest == alone.token_ids[-len(rest) :]
        entries = [one.message async for one in bus.replay(SUBJECTS.migrations("sim-0"), follow=False)]
        for plan in [entry for entry in entries if isinstance(entry, MigrationPlanned)]:
            done = [
                entry
                for entry in entries
                if isinstance(entry, MigrationCommitted) and entry.plan == plan.plan
            ]
            assert sum(entry.bytes for entry in done) == plan.bytes, "bytes as planned"
    first, now = SimulatedEngine(host.engine.config).placement, host.engine.placement
    assert np.array_equal(first.replicas_on_rank, now.replicas_on_rank)
    await bus.close()


async def _coordinators(broker: MemoryBroker, chance: random.Random, deaths: list[int]) -> None:
    """Run one migration service after another; each ends at a random moment. deaths: one entry for each."""
    while True:
        service = MigrationService(MemoryBus(broker), SUBJECTS, MigrationConfig(cycle_seconds=3600.0))
        async with alongside(service.run(), "the planner"):
            await asyncio.sleep(chance.uniform(2.0, 12.0))
        deaths.append(1)


async def _stream(host: SimulatedHost, rank: int, completed: list[int]) -> None:
    """Send one request after another to a rank; every answer must be that of an engine left alone."""
    request = GenerationRequest(prompt=list(range(rank + 1, rank + 20)), max_tokens=100, ignore_eos=True)
    expected = (await (await host.engine.ranks[rank].submit(request)).rest()).token_ids
    while True:
        assert (await (await host.engine.ranks[rank].submit(request)).rest()).token_ids == expected
        completed.append(rank)
