"""Rounds of one fault: a plan under way, the fault at a random moment, and a judgement of what is left."""

import asyncio
import signal
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fleet.facts.migrations import MigrationAborted, MigrationCommitted
from fleet.handover import RankState
from fleet.layout import Layout
from fleet.placement import Placement
from tests.faults.fleet_fixture import Engine, FleetFixture, until
from tests.faults.invariants import Belongings, judge, judge_memory, settle
from tests.faults.plans import series

TIMES = 20
LANES: dict[str, dict[str, Any]] = {
    "nixl": {},
    "nixl-over-tcp": {"ucx": "tcp,self"},
    "shared": {"transfer": {"backend": "shared"}},
    "nixl-again": {},
}
"""Engines that go through it side by side, each a part of the twenty times"""
LAYOUTS = ((), (0,), (1,), (0, 1))
"""layers that are sharded"""
END_SECONDS = 30.0
UNDISTURBED = 3
"""plans that are given to an engine that nothing disturbs, until one is carried out"""
Fault = Callable[[Engine, np.random.Generator], Awaitable[None]]


async def serves_on(engine: Engine, random: np.random.Generator) -> None:
    """A plan that nothing disturbs is carried out; what a busy machine makes overdue, the next time."""
    for _ in range(UNDISTURBED):
        plan = series(engine.history.latest, random, 1)
        await engine.order(plan)
        end = await outcome(engine, plan.id)
        await judge(engine)
        if isinstance(end, MigrationCommitted):
            return
        assert end.fault == "overdue", end
    raise AssertionError(f"{UNDISTURBED} times overdue: {end}")


async def switches_on(engine: Engine, random: np.random.Generator) -> None:
    """A switch of layout that nothing disturbs is carried out, as an operator requests it."""
    before = engine.history.latest
    others = [one for one in LAYOUTS if one != before.sharded]
    await switched(engine, others[int(random.integers(len(others)))])


async def switched(engine: Engine, wanted: tuple[int, ...]) -> Placement:
    """What an engine serves that has switched to these sharded layers, with nothing to disturb it; what a
    busy machine makes overdue, the next time."""
    for _ in range(UNDISTURBED):
        plan = await engine.deployment.records.switch(engine.name, wanted)
        end = await outcome(engine, plan)
        placement = await judge(engine)
        if isinstance(end, MigrationCommitted):
            assert placement.layout == Layout("dp", wanted), placement
            return placement
        assert end.fault == "overdue", end
    raise AssertionError(f"{UNDISTURBED} times overdue: {end}")


class Fleet:
    """The house, its engines, and what they hold open. after: what each engine has to do after each fault."""

    def __init__(self, deployment: FleetFixture, engines: Sequence[Engine], after: Fault = serves_on) -> None:
        self.deployment = deployment
        self.engines = engines
        self.belongings = Belongings()
        self._after = after

    async def ready(self) -> None:
        """One coordinator and all engines, as after a quiet night."""
        if not any(one.alive for one in self.deployment.coordinators):
            await self.deployment.add_coordinator()
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(self._ready(engine), name=f"{engine.name} is ready")

    async def _ready(self, engine: Engine) -> None:
        if not engine.ranks or not all(process.alive and process.caught_up for process in engine.ranks):
            await reborn(engine)
        await judge(engine)
        await self.belongings.check(engine)

    async def each(self, name: str, fault: Fault) -> None:
        """Let it happen TIMES times, among the engines side by side; each is judged, and serves on, after
        each."""
        async with asyncio.TaskGroup() as tasks:
            for number, engine in enumerate(self.engines):
                tasks.create_task(self._some(engine, name, number, fault), name=f"{name} on {engine.name}")

    async def _some(self, engine: Engine, name: str, lane: int, fault: Fault) -> None:
        for time in range(TIMES // len(self.engines)):
            await fault(engine, np.random.default_rng((zlib.crc32(name.encode()), lane, time)))
            await judge(engine)
            await self._after(engine, np.random.default_rng((lane, time)))
            await self.belongings.check(engine)

    async def stand_by(self, coordinators: int) -> None:
        """Let there be at least so many coordinators."""
        while len([one for one in self.deployment.coordinators if one.alive]) < coordinators:
            await self.deployment.add_coordinator()

    async def replace_the_coordinator(self) -> None:
        """Kill the one that leads. One that stood by takes the lead when the dead one's lease is over;
        meanwhile another begins, and stands by."""
        await self.deployment.leader.kill()
        await self.deployment.add_coordinator()

    async def stop_the_coordinator(self, seconds: float) -> None:
        """Stop the one that leads until another does, and for some seconds. When it goes on, it believes that
        it leads still: its commands are refused by their token."""
        leader = self.deployment.leader
        leader.send(signal.SIGSTOP)
        try:
            await until(lambda: self.deployment.leader is not leader, "another leads", END_SECONDS)
            await asyncio.sleep(seconds)
        finally:
            leader.send(signal.SIGCONT)

    async def restart_nats(self, seconds: float) -> None:
        """Kill it; it comes back on its store after so many seconds."""
        await asyncio.to_thread(self.deployment.nats.stop, signal.SIGKILL)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.deployment.nats.start)


@asynccontextmanager
async def fleet_of(
    folder: Path, lanes: dict[str, dict[str, Any]], after: Fault = serves_on
) -> AsyncIterator[Fleet]:
    """A fleet whose engines leave in good order at the end, if all of their ranks live."""
    async with FleetFixture(folder).open() as deployment:
        fleet = Fleet(deployment, [Engine(deployment, name, **about) for name, about in lanes.items()], after)
        yield fleet
        for engine in fleet.engines:
            if engine.ranks and all(process.alive for process in engine.ranks):
                await engine.leave()
            else:
                await engine.die()


async def outcome(engine: Engine, plan: str) -> MigrationCommitted | MigrationAborted:
    """How a plan ends."""
    return await until(
        lambda: engine.history.end_of(plan),
        lambda: f"{engine.name}: an end of {plan}; so far {engine.history.of(plan)}",
        END_SECONDS,
    )


async def reborn(engine: Engine) -> None:
    """The engine's next life; it begins at the epoch that was decided upon last."""
    if engine.ranks:
        await engine.die()
    await engine.live()
    await settle(engine)


async def survive(engine: Engine, ranks: list[int]) -> None:
    """Ranks whose peer is gone: they live, nothing of theirs is landing any more, and what they serve is as
    it was. What was staged may stay so: without the peer nothing is decided, and the engine fails as a unit.
    """
    waiting = (RankState.SERVING, RankState.STAGED, RankState.READY, RankState.FAILED)
    await settle(engine, ranks, states=waiting)
    for rank in ranks:
        judge_memory(engine.ranks[rank], rank, await engine.ranks[rank].ask())
