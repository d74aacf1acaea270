"""Plans under combined faults: coordinators that end, outages, silent and failing ranks. In virtual time, by
seed."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, suppress
from itertools import pairwise

import pytest

from bus import BusError
from bus.memory import MemoryBroker, MemoryBus
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement
from fleet.requests.plans import MigrateExpert, RollBack, SetLayout
from tests.migration.execution.test_executor import Stoppable
from tests.migration.executor_fixture import SUBJECTS, at_rest, engine, in_words, leading, log
from tests.migration.fake_ranks import Ranks

SECONDS = 40.0


class _Trouble:
    """Random faults, one after another. All of them end, except that some coordinators never come back."""

    def __init__(
        self, chance: random.Random, broker: MemoryBroker, ranks: Ranks, stack: AsyncExitStack
    ) -> None:
        self.chance, self.broker, self.ranks, self.stack = chance, broker, ranks, stack
        self.leaders: list[Stoppable] = []

    async def another_leads(self) -> None:
        for leader in self.leaders:
            leader.running.clear()
        self.leaders.append(Stoppable(self.broker))
        await self.stack.enter_async_context(leading(self.leaders[-1]))

    async def it_stops_for_a_while(self) -> None:
        self.leaders[-1].running.clear()
        await asyncio.sleep(self.chance.uniform(0.1, 5))
        self.leaders[-1].running.set()

    async def outage(self) -> None:
        self.broker.reachable = False
        await asyncio.sleep(self.chance.uniform(0.1, 6))
        self.broker.reachable = True

    async def silence(self) -> None:
        self.ranks.silent.add(rank := self.chance.randrange(2))
        await asyncio.sleep(self.chance.uniform(0.1, 5))
        self.ranks.silent.discard(rank)

    async def failure(self) -> None:
        self.ranks.fails[self.chance.randrange(2)] = "it fails", "test"
        await asyncio.sleep(self.chance.uniform(0.1, 2))
        self.ranks.fails.clear()

    async def run(self) -> None:
        kinds = [self.another_leads, self.it_stops_for_a_while, self.outage, self.silence, self.failure]
        while True:
            await asyncio.sleep(self.chance.expovariate(0.7))
            await self.chance.choice(kinds)()


async def _wanting(chance: random.Random, bus: MemoryBus, broker: MemoryBroker) -> None:
    """Operator who keeps requesting further moves."""
    while True:
        await asyncio.sleep(chance.expovariate(1.5))
        wish = MigrateExpert(
            engine="a",
            layer=chance.randrange(2),
            expert=chance.randrange(8),
            rank=chance.randrange(2),
            move=chance.random() < 0.7,
        )
        sharded = tuple(layer for layer in range(2) if chance.random() < 0.5)
        turn = SetLayout(engine="a", sharded=sharded, now=chance.random() < 0.5)
        (order,) = chance.choices([wish, turn, RollBack(engine="a")], [0.5, 0.3, 0.2])
        with suppress(BusError):
            await bus.request(SUBJECTS.migrate, order, 3)


async def _run(seed: int) -> Counter[str]:
    chance, broker = random.Random(seed), MemoryBroker()
    bus = MemoryBus(broker)
    async with AsyncExitStack() as stack:
        ranks = await stack.enter_async_context(engine(broker, unshardable=""))
        ranks.stage_seconds = chance.uniform(0.01, 0.5)
        ranks.mute = chance.random() < 0.2
        trouble = _Trouble(chance, broker, ranks, stack)
        await trouble.another_leads()
        tasks = [asyncio.create_task(trouble.run()), asyncio.create_task(_wanting(chance, bus, broker))]
        await asyncio.sleep(SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        broker.reachable = True
        ranks.silent.clear()
        ranks.fails.clear()
        for leader in trouble.leaders:
            leader.running.set()
        await asyncio.sleep(40)
        entries = await log(bus)
        words = in_words(entries)
        assert at_rest(broker, ranks), words
        assert [
            entry.placement.epoch for entry in entries if isinstance(entry, PlacementCommitted)
        ] == ranks.served, words
        for plan in [entry for entry in entries if isinstance(entry, MigrationPlanned)]:
            ends = [
                e
                for e in entries
                if ((isinstance(e, MigrationCommitted) and e.last) or isinstance(e, MigrationAborted))
                and e.plan == plan.plan
            ]
            assert len(ends) == 1, (plan, words)
            if isinstance(ends[0], MigrationCommitted):
                done = [e for e in entries if isinstance(e, MigrationCommitted) and e.plan == plan.plan]
                assert sum(e.bytes for e in done) == plan.bytes, "bytes as planned"
        committed = [entry.placement for entry in entries if isinstance(entry, PlacementCommitted)]
        assert Placement.from_record(committed[-1]) == ranks.placement
        turned = sum(a.sharded != b.sharded for a, b in pairwise(committed))
        decided = {entry.handover for entry in entries if isinstance(entry, MigrationCommitted)}
        assert not decided & {entry.handover for entry in entries if isinstance(entry, MigrationAborted)}
        assert decided <= {entry.handover for entry in entries if isinstance(entry, MigrationStaged)}
        numbers = [entry.handover for entry in entries if isinstance(entry, MigrationCommitted)]
        assert numbers == sorted(set(numbers))
        return Counter(report for report in words if not report.startswith("1@")) + Counter(turned=turned)


@pytest.mark.slow
@pytest.mark.looptime
async def test_whatever_happens_everything_comes_to_rest_and_the_log_says_what_ranks_serve() -> None:
    seen = Counter[str]()
    for seed in range(50):
        seen += await _run(seed)
    assert min(seen["Committed"], seen["Aborted"], seen["turned"]) > 40, seen
