"""Coordinators, ranks and their reads together, as the product has them, in one process and in virtual time:
experts are asked for and layers turned over at random while everything that can fail fails at random, and
then stops failing.

Only the bus, the wire between the ranks and the engine's steps are stand-ins. Memory is real, so what is
served can be compared with what it should be.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest

from bus import BusError, BusTimeout
from bus.memory import MemoryBus
from engine_adapter.config import TransferConfig
from engine_adapter.transfer.in_process import PullFault
from fleet.experts import ModelShape
from fleet.facts.engines import EngineHeartbeat
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned
from fleet.handover import CoordinatorState, RankState
from fleet.placement import linear
from fleet.requests.handovers import DescribeHandover, HandoverDescribed
from fleet.requests.plans import MigrateExpert, SetLayout
from migration.config import MigrationConfig
from migration.service import MigrationService
from tests.engine_adapter.rank_fixture import SCALE, SUBJECTS, WORKER, Group, standing
from tests.migration.builders import joined
from tests.migration.executor_fixture import ask, key, leading, log

pytestmark = pytest.mark.looptime
FIRST = linear(layers=2, experts=8, ranks=3, slots_per_rank=4)
READING = TransferConfig(lease_seconds=1.5, retries=1, quarantine_cells=2)
CONDUCTING = MigrationConfig(stage_seconds=4.0, cycle_seconds=1e6)
SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=16, expert_intermediate=12)
LAPS = 12
"""troubles, with requests between them"""


class Trial:
    """One engine, one coordinator or two, and a die."""

    def __init__(self, group: Group, seed: int) -> None:
        self.group = group
        self.dice = random.Random(seed)
        self.services: list[MigrationService] = []
        self.requests: list[asyncio.Task[str]] = []
        self._stacks: list[AsyncExitStack] = []

    # the house

    async def beat(self) -> None:
        heart = self.group.bus.publisher(SUBJECTS.heartbeats("a"))
        while True:
            await heart.publish(
                EngineHeartbeat(engine="a", worker_id=WORKER, epoch=self.group.placement.epoch)
            )
            await asyncio.sleep(1.0)

    async def begin_service(self) -> None:
        stack = AsyncExitStack()
        self._stacks.append(stack)
        self.services.append(
            await stack.enter_async_context(leading(MemoryBus(self.group.broker), CONDUCTING))
        )

    async def end_service(self) -> None:
        self.services.pop(0)
        await self._stacks.pop(0).aclose()

    async def close(self) -> None:
        while self._stacks:
            await self.end_service()

    def request(self) -> None:
        """Somebody wants an expert somewhere, or a layer in another form; what becomes of that is not waited
        for."""
        request: MigrateExpert | SetLayout
        if self.dice.random() < 0.4:
            request = SetLayout(engine="a", sharded=self.dice.choice(((), (0,), (1,), (0, 1))), now=True)
        else:
            request = MigrateExpert(
                engine="a", layer=self.dice.randrange(2), expert=self.dice.randrange(8), rank=self.dice.randrange(3), move=self.dice.random() < 0.5
            )  # fmt: skip
        self.requests.append(asyncio.create_task(self.wish(request)))

    async def wish(self, request: MigrateExpert | SetLayout) -> str:
        try:
            return (await ask(MemoryBus(self.group.broker), request)).plan
        except BusError:
            return ""

    async def insist(self, request: MigrateExpert | SetLayout) -> None:
        """Ask until somebody leads and answers."""
        async with asyncio.timeout(30):
            while True:
                try:
                    await ask(self.group.bus, request)
                except BusTimeout:
                    await asyncio.sleep(0.5)
                else:
                    return

    # troubles

    async def stopped_rank(self) -> None:
        way = self.dice.choice(self.group.transfers)
        self.group.fabric.stop(way)
        await asyncio.sleep(self.dice.uniform(0.1, 4.0))
        self.group.fabric.resume(way)

    async def bad_reads(self) -> None:
        kinds = (
            PullFault(corrupt=SCALE),
            PullFault(broken=True),
            PullFault(delay_seconds=self.dice.uniform(0.1, 3.0)),
        )
        for way in self.group.transfers:
            way.faults.append(self.dice.choice(kinds))

    async def bus_away(self) -> None:
        self.group.broker.reachable = False
        await asyncio.sleep(self.dice.uniform(0.05, 4.0))
        self.group.broker.reachable = True

    async def new_coordinator(self) -> None:
        await self.end_service()
        await self.begin_service()

    async def second_coordinator(self) -> None:
        """One more, or one less: the one that leads goes."""
        await (self.begin_service() if len(self.services) == 1 else self.end_service())

    @property
    def troubles(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return (
            self.stopped_rank,
            self.bad_reads,
            self.bus_away,
            self.new_coordinator,
            self.second_coordinator,
        )

    # the end

    async def rest(self) -> None:
        """Return once nothing is open any more, durably or on a rank."""
        for way in self.group.transfers:
            way.faults.clear()
        await asyncio.gather(*self.requests)
        async with asyncio.timeout(120):
            while True:
                if await self._rests():
                    return
                await asyncio.sleep(0.1)

    async def _rests(self) -> bool:
        left = key(self.group.broker)
        if left is not None and left.state is not CoordinatorState.IDLE:
            return False
        entries = await log(self.group.bus)
        planned = {entry.plan for entry in entries if isinstance(entry, MigrationPlanned)}
        ended = {
            entry.plan
            for entry in entries
            if isinstance(entry, MigrationAborted) or (isinstance(entry, MigrationCommitted) and entry.last)
        }
        described = [
            await self.group.tell(rank, DescribeHandover(worker_id=WORKER, rank=rank)) for rank in range(3)
        ]
        return planned == ended and all(_rests(one) for one in described)


def _rests(described: HandoverDescribed) -> bool:
    return described.state == RankState.SERVING and described.free == FIRST.slots_per_rank


async def _run(seed: int) -> int:
    """The epoch that was reached."""
    async with standing(FIRST, READING) as group, AsyncExitStack() as stack:
        trial = Trial(group, seed)
        await group.bus.record(
            SUBJECTS.membership("a"),
            joined(
                WORKER, "a", FIRST, urls=("http://x", "http://y", "http://z"), shape=SHAPE, unshardable=""
            ),
        )
        beating = asyncio.create_task(trial.beat(), name="heartbeats")
        stack.callback(beating.cancel)
        stack.push_async_callback(trial.close)
        await trial.begin_service()
        for _ in range(LAPS):
            trial.request()
            await asyncio.sleep(trial.dice.uniform(0.0, 0.5))
            await trial.dice.choice(trial.troubles)()
            group.check()
        await trial.rest()
        await _is_whole(group, trial)
        return group.placement.epoch


async def _is_whole(group: Group, trial: Trial) -> None:
    """Everything that is served is there, the books of all agree, and handovers go on."""
    group.check()
    assert {handovers.protocol.protocol_state.served for handovers in group.agents} == {group.placement.epoch}
    assert all(
        handovers.protocol.at_rest and handovers.protocol.cell_table.leases == 0 for handovers in group.agents
    )
    other = (1,) if group.placement.sharded == (0,) else (0,)
    await trial.insist(SetLayout(engine="a", sharded=other, now=True))
    await trial.rest()
    group.check()
    assert group.placement.sharded == other
    await trial.insist(SetLayout(engine="a", sharded=(), now=True))
    await trial.rest()
    group.check()
    placement = group.placement
    assert placement.sharded == ()
    layer, rank, expert = np.argwhere(placement.replicas_on_rank == 0)[0].tolist()
    await trial.insist(MigrateExpert(engine="a", layer=layer, expert=expert, rank=rank))
    await trial.rest()
    group.check()
    assert expert in group.placement.on_rank(rank)[layer]
    (known,) = {
        entry.placement for service in trial.services for entry in service.placements.engines().values()
    }
    assert known == group.placement


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_fails_the_engine_serves_what_it_says_and_handovers_go_on_afterwards(
    seed: int,
) -> None:
    assert await _run(seed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
async def test_whatever_fails_in_many_trials(seed: int) -> None:
    assert await _run(seed) > 0
