"""Tier 2: experts move between the ranks of embedded engines under load, and everything fails that can: no
request is lost, and no token is another."""

import asyncio
import contextlib
import os
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import numpy as np
import psutil
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from bus import Declined
from deploy.sections import DEMO_CHECKPOINT
from engine_adapter.embedded.checkpoint import RUN_DTYPES, Checkpoint
from fleet.facts.migrations import MigrationAborted, MigrationCommitted
from fleet.placement import Placement
from migration.model.plan import Plan
from tests.faults.fleet_fixture import until
from tests.faults.plans import series, swaps
from tests.system.fleets import Fleet, Running, leave_nothing, new_home
from tests.system.migration_clients import Clients, Movers, clients_and_movers

ENGINES = ("engine-0", "engine-1")
SLOTS = 18
MOVES = 104
AT_ONCE = 4
SPAN_SECONDS = 0.4
"""a fault comes so long after a plan of six handovers was ordered, at most"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def moving() -> Iterator[Fleet]:
    """Two engines of two ranks each, which read each other over NIXL."""
    home = new_home(
        ROOST_ENGINE_STEP_TIMEOUT_SECONDS="2.0",
        ROOST_ENGINE_KV_BLOCKS="256",
        ROOST_ENGINE_SLOTS_PER_RANK=str(SLOTS),
        ROOST_TRANSFER_BACKEND="nixl",
        ROOST_PLANNER_AUTOMATIC="false",  # experts move when they are asked to, and otherwise stay
        ROOST_PLANNER_LEASE_SECONDS="1.0",
        ROOST_PLANNER_REPEAT_SECONDS="0.2",
        ROOST_PLANNER_STAGE_SECONDS="3.0",
        ROOST_ROUTER_DEAD_AFTER_SECONDS="6.0",  # a busy machine is not dead
        ROOST_ROUTER_NO_ENGINE_WAIT_SECONDS="20.0",
    )
    fleet = Fleet(home, "--ranks", "2", "--engines", "2")
    yield fleet
    fleet.http.close()
    leave_nothing(fleet)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(moving: Fleet) -> AsyncIterator[tuple[Clients, Movers]]:
    async with clients_and_movers(moving) as (clients, movers):
        await clients.learn()
        yield clients, movers


async def test_a_hundred_migrations_under_load_change_no_token(both: tuple[Clients, Movers]) -> None:
    clients, movers = both

    async def keep_moving(engine: str) -> None:
        dice = np.random.default_rng(zlib.crc32(engine.encode()))
        while movers.committed < MOVES:
            assert isinstance(await movers.move(engine, dice, 2), MigrationCommitted), movers.ends[-1]
            await asyncio.sleep(float(dice.uniform(0, 0.5)))

    began = asyncio.get_running_loop().time()
    async with clients.asking(AT_ONCE) as moved:
        await asyncio.gather(*(keep_moving(engine) for engine in ENGINES))
    seconds = asyncio.get_running_loop().time() - began
    async with clients.asking(AT_ONCE) as still:
        await asyncio.sleep(seconds / 2)
    print(f"\n{movers.committed} migrations: {moved}\nnone (A/A): {still}")  # noqa: T201
    for outcomes in (moved, still):
        assert not outcomes.wrong, outcomes.wrong[:5]
        assert not outcomes.gone, outcomes.gone[:5]
        assert outcomes.answers > 10


# what can fail; each takes the plan's engine and what it needs to know, and returns when the fault is over


class Scene:
    """A plan under way on one engine, and a moment at which something fails."""

    def __init__(self, fleet: Fleet, movers: Movers, engine: str, dice: np.random.Generator) -> None:
        self.fleet = fleet
        self.movers = movers
        self.engine = engine
        self.dice = dice
        self.plan: Plan | None = None

    @property
    def latest(self) -> Placement:
        return self.movers.records.history(self.engine).latest

    def rank(self, rank: int, engine: str | None = None) -> psutil.Process:
        return self.fleet.processes()[f"{engine or self.engine}/{rank}"]

    async def order(self, handovers: int = 6) -> Plan:
        """A plan in which rank 0 reads from rank 1 at first."""
        self.plan = await self.movers.begin(self.engine, self.dice, handovers)
        return self.plan

    async def moment(self, span: float = SPAN_SECONDS) -> None:
        await asyncio.sleep(float(self.dice.uniform(0, span)))


async def kill_a_source(scene: Scene) -> None:
    plan = await scene.order()
    source = plan.copies[0].source
    assert source is not None
    await scene.moment()
    scene.rank(source // SLOTS).kill()


async def kill_a_target(scene: Scene) -> None:
    plan = await scene.order()
    await scene.moment()
    scene.rank(plan.copies[0].slot // SLOTS).kill()


async def kill_a_bystander(scene: Scene) -> None:
    """A rank of the other engine."""
    await scene.order()
    await scene.moment()
    scene.rank(int(scene.dice.integers(2)), next(one for one in ENGINES if one != scene.engine)).kill()


async def kill_the_coordinator(scene: Scene) -> None:
    await scene.order()
    await scene.moment()
    scene.fleet.processes()["planner"].kill()


async def kill_nats(scene: Scene) -> None:
    await scene.order()
    await scene.moment()
    scene.fleet.processes()["nats"].kill()


async def stop_a_source(scene: Scene) -> None:
    """For three seconds. Its engine's steps stop with it, so that it fails as a unit after two."""
    plan = await scene.order()
    source = plan.copies[0].source
    assert source is not None
    await scene.moment()
    process = scene.rank(source // SLOTS)
    process.suspend()
    await asyncio.sleep(3)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


async def spoil_a_source(scene: Scene) -> None:
    """The last bit of one weight, which changes no token by itself; it is put right again behind the plan."""
    plan = series(scene.latest, scene.dice, 1)
    copy, layer = plan.copies[0], plan.steps[0].layer
    assert copy.source is not None
    cell = cell_of(scene.rank(copy.source // SLOTS), layer, copy.expert)
    cell[4 * int(scene.dice.integers(1000))] ^= 1
    at = np.flatnonzero(cell != expert_bytes(layer, copy.expert))
    await scene.movers.records.order(scene.engine, plan)
    end = await scene.movers.end(scene.engine, plan)
    cell[at] ^= 1
    assert isinstance(end, MigrationAborted), end
    assert end.fault == "checksum", end


async def ask_for_more_than_there_is_room_for(scene: Scene) -> None:
    plan = swaps(scene.latest, scene.dice, SLOTS + 1)
    with contextlib.suppress(Declined):
        await scene.movers.records.order(scene.engine, plan, patiently=False)
        end = await scene.movers.end(scene.engine, plan)
        assert isinstance(end, MigrationAborted), end
        assert end.fault == "room", end


async def stop_one_coordinator_of_two(scene: Scene) -> None:
    """Until the other leads; then both believe that they do."""
    planners = [scene.fleet.log_of("planner")]
    second: Running = scene.fleet.home.start("planner", "--nats", scene.fleet.nats)
    try:
        await scene.order()
        await scene.moment()
        leader = scene.fleet.processes()["planner"]
        before = lead(planners[0].read_text())
        leader.suspend()
        try:
            await until(
                lambda: lead(second.output) > before, lambda: f"the other leads:\n{second.output}", 20
            )
            await scene.moment()
        finally:
            leader.resume()
        if scene.plan is not None:
            await scene.movers.end(scene.engine, scene.plan)
    finally:
        second.stop()


def lead(log: str) -> int:
    """The token with which a coordinator led last."""
    return max(map(int, re.findall(r"leading, with token (\d+)", log)), default=0)


async def ask_for_what_is_past(scene: Scene) -> None:
    late = series(scene.latest, scene.dice, 1)
    await scene.movers.move(scene.engine, scene.dice, 1)
    await scene.order()
    await scene.moment()
    with pytest.raises(Declined):
        await scene.movers.records.order(scene.engine, late, patiently=False)


FAULTS: tuple[Callable[[Scene], Awaitable[None]], ...] = (
    kill_a_source,
    kill_a_target,
    kill_a_bystander,
    kill_the_coordinator,
    kill_nats,
    stop_a_source,
    spoil_a_source,
    ask_for_more_than_there_is_room_for,
    stop_one_coordinator_of_two,
    ask_for_what_is_past,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.replace("_", " "))
async def test_a_fault_while_experts_move_loses_no_request_and_leaves_one_epoch(
    moving: Fleet, both: tuple[Clients, Movers], fault: Callable[[Scene], Awaitable[None]]
) -> None:
    clients, movers = both
    await until(lambda: moving.serving(2, 2), "both engines serve", 60)
    async with clients.asking(AT_ONCE) as outcomes:
        for time, engine in enumerate(ENGINES):
            scene = Scene(
                moving, movers, engine, np.random.default_rng((zlib.crc32(fault.__name__.encode()), time))
            )
            before = {
                name: (movers.records.history(name).latest.epoch, len(movers.records.history(name).joins))
                for name in ENGINES
            }
            await fault(scene)
            if scene.plan is not None:
                await movers.end(engine, scene.plan)
            await until(lambda: settled(moving, movers), lambda: standing(moving, movers), 60)
            for name, (epoch, lives) in before.items():
                for joined in movers.records.history(name).joins[lives:]:
                    assert joined.placement is not None
                    assert joined.placement.epoch >= epoch, (
                        f"{name} began anew at epoch {joined.placement.epoch}, and had served {epoch}"
                    )
    assert not outcomes.wrong, outcomes.wrong[:5]
    assert not outcomes.gone, outcomes.gone[:5]
    assert outcomes.answers > 0


async def settled(fleet: Fleet, movers: Movers) -> bool:
    """Every rank of the present lives is at rest, and serves the epoch that is on record; and the router uses
    all of them."""
    for engine in ENGINES:
        history = movers.records.history(engine)
        served = await movers.served(engine)
        if not history.known or set(served) != {history.latest.epoch}:
            return False
    return await asyncio.to_thread(fleet.serving, 2, 2)


def standing(fleet: Fleet, movers: Movers) -> str:
    """For whoever has to find out why that is not so."""
    histories = [movers.records.history(engine) for engine in ENGINES]
    on_record = [(one.latest.epoch, one.known, one.migrations[-1:]) for one in histories]
    return (
        f"both engines serve what is on record: {on_record}, {fleet.processes().keys()}; the fleet"
        f" says:\n{fleet.up.output[-2000:]}"
    )


# bytes


def expert_bytes(layer: int, expert: int) -> NDArray[np.uint8]:
    """uint8 [bytes]: an expert as engines of fp32 hold it."""
    with Checkpoint(DEMO_CHECKPOINT) as checkpoint:
        weights = checkpoint.expert(layer, expert, RUN_DTYPES["float32"])
    return np.concatenate(
        [
            part.contiguous().numpy().reshape(-1).view(np.uint8)
            for part in (weights.gate, weights.up, weights.down.t())
        ]
    )


def cell_of(process: psutil.Process, layer: int, expert: int) -> NDArray[np.uint8]:
    """uint8 [bytes]: where a rank has an expert, to be spoilt."""
    known = expert_bytes(layer, expert)
    memory = memory_of(process.pid)
    at = next(
        begin
        for begin in range(0, len(memory) - len(known) + 1, len(known))
        if np.array_equal(memory[begin : begin + len(known)], known)
    )
    return memory[at : at + len(known)]


def memory_of(pid: int) -> NDArray[np.uint8]:
    """uint8 [bytes]: a rank's memory for experts itself."""
    found = next(
        number
        for number in os.listdir(f"/proc/{pid}/fd")
        if "roost-experts" in os.readlink(f"/proc/{pid}/fd/{number}")
    )
    return np.memmap(f"/proc/{pid}/fd/{found}", np.uint8, "r+")
