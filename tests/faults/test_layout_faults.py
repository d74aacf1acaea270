"""Tier 1 of switches of layout: layers turn over, and experts move, between ranks in processes of their own,
and each fault comes at twenty random bytes of that.

After every fault the engine serves the placement on record, whose forms of layers are those before the plan
or after one of its handovers; every rank has its part of each expert of a sharded layer, and each of its
experts of a whole one, to the last bit; nothing is left over; and the next switch is made.
"""

import asyncio
import signal
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from engine_adapter.engine import CellTensor
from fleet.facts.migrations import MigrationAborted, MigrationCommitted
from fleet.layout import AttentionKind
from fleet.placement import Placement, with_attention
from migration.model.plan import Plan, replay
from tests.faults.expert_contents import RANKS, SHAPE, TENSORS, memory_of, place_of_part
from tests.faults.fleet_fixture import Engine
from tests.faults.invariants import judge
from tests.faults.landed_bytes import LandedBytes, landing_in
from tests.faults.plans import landing, turns
from tests.faults.rounds import (
    END_SECONDS,
    LANES,
    TIMES,
    Fleet,
    fleet_of,
    outcome,
    reborn,
    survive,
    switched,
    switches_on,
)

SLOWLY = {"bytes_per_second": 300_000}
"""a layer takes half a second"""
HANDOVERS = 2
CHANGE_SECONDS = 0.15
"""of a change of attention, roughly: the ranks have nothing to copy"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    lanes = {
        name: {**about, "transfer": {**SLOWLY, **about.get("transfer", {})}} for name, about in LANES.items()
    }
    async with fleet_of(tmp_path_factory.mktemp("layouts"), lanes, switches_on) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(whole: Fleet) -> Fleet:
    await whole.ready()
    return whole


class Switching(NamedTuple):
    """A plan of one engine that turns layers over, and where it began."""

    engine: Engine
    before: Placement
    plan: Plan
    rank: int
    """whose landed bytes are counted"""
    landed: LandedBytes

    @classmethod
    async def begin(cls, engine: Engine, random: np.random.Generator) -> "Switching":
        before = await judge(engine)
        plan, rank = turns(before, random, HANDOVERS), int(random.integers(RANKS))
        landed = await landing_in(engine, rank)
        await engine.order(plan)
        return cls(engine, before, plan, rank, landed)

    async def reach(self, random: np.random.Generator) -> bool:
        """Wait for a random byte. False: the plan ended before."""
        byte, history = int(random.integers(landing(self.plan, self.rank))), self.engine.history
        return await self.landed.reach(byte, lambda: history.end_of(self.plan.id), END_SECONDS)

    async def end(self) -> str:
        """How the plan ends; what is served is what it was, or what one of its handovers leads to."""
        end = await outcome(self.engine, self.plan.id)
        placement = await judge(self.engine)
        stages = [self.before, *replay(self.before, self.plan)]
        stage = placement.epoch - self.before.epoch
        assert 0 <= stage < len(stages), (
            f"{self.engine.name} serves {placement!r}, and began at {self.before!r}"
        )
        assert placement == stages[stage], f"{placement!r} is not what {self.plan.id} leads to"
        if not isinstance(end, MigrationAborted):
            assert stage == len(stages) - 1, f"{self.plan.id} has ended, and {placement!r} is served"
            return "committed"
        return end.fault or "aborted"


async def together(
    fleet: Fleet, name: str, fault: Callable[[np.random.Generator], Awaitable[None]], times: int
) -> Counter[str]:
    """Let it happen so many times at a random byte of a random engine, each while all engines switch; how the
    plans end."""
    ends: Counter[str] = Counter()
    for time in range(times):
        random = np.random.default_rng((zlib.crc32(name.encode()), time))
        switching = await asyncio.gather(
            *(
                Switching.begin(engine, np.random.default_rng((time, lane)))
                for lane, engine in enumerate(fleet.engines)
            )
        )
        ends["within"] += await switching[int(random.integers(len(switching)))].reach(random)
        await fault(random)
        for one in switching:
            ends[await one.end()] += 1
            await fleet.belongings.check(one.engine)
    for engine in fleet.engines:
        await switches_on(engine, np.random.default_rng(zlib.crc32(name.encode())))
    return ends


# ranks


@pytest.mark.parametrize("role", ["source", "destination"])
async def test_a_rank_is_killed(fleet: Fleet, role: str) -> None:
    """The one to which the byte comes, or another, from which it may have come."""
    ends: Counter[str] = Counter()

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        switching = await Switching.begin(engine, random)
        others = [rank for rank in range(RANKS) if rank != switching.rank]
        victim = switching.rank if role == "destination" else int(random.choice(others))
        within = await switching.reach(random)
        ends["within"] += within
        await engine.ranks[victim].kill()
        await survive(engine, [rank for rank in range(RANKS) if rank != victim])
        await reborn(engine)
        ends[await switching.end()] += 1

    await fleet.each(f"kill {role} of a switch", fault)
    assert ends["within"] > TIMES // 2, ends
    assert ends.total() - ends["within"] - ends["committed"] > 0, f"none was in time: {ends}"


async def test_a_rank_is_stopped_for_longer_than_reads_may_take(fleet: Fleet) -> None:
    """It goes on after three seconds; reads were given one, and staging three."""
    ends: Counter[str] = Counter()

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        switching = await Switching.begin(engine, random)
        victim = int(random.choice([rank for rank in range(RANKS) if rank != switching.rank]))
        within = await switching.reach(random)
        ends["within"] += within
        engine.ranks[victim].send(signal.SIGSTOP)
        try:
            await asyncio.sleep(2.5)
            described = await engine.described(switching.rank)
            ends["quarantined"] += described is not None and described.quarantined > 0
            await asyncio.sleep(0.5)
        finally:
            engine.ranks[victim].send(signal.SIGCONT)
        ends[await switching.end()] += 1

    await fleet.each("stop a rank of a switch", fault)
    assert ends["quarantined"] > 0, ends
    assert ends["within"] > TIMES // 2, ends


@pytest.mark.parametrize("tensor", ["scales", "down"])
async def test_bytes_of_a_source_are_spoilt(fleet: Fleet, tensor: str) -> None:
    """One byte of an expert of a layer that turns over, on a rank from which others read it. Every second
    time before anything is read; else at any moment, when it may be too late to matter."""
    faults: Counter[str] = Counter()
    about = next(one for one in TENSORS if one.name == tensor)

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        before = await judge(engine)
        plan, first = turns(before, random, 1), bool(random.integers(2))
        layer = plan.steps[0].layer
        rank, expert = _read_by_others(before, layer, random)
        standing = await engine.ranks[rank].ask()
        cell, places = _place(before, layer, rank, expert, np.array(standing["cells"]), about)
        at = int(random.choice(places))
        with memory_of(engine.ranks[rank].pid, standing["descriptor"], standing["cell_bytes"]) as memory:
            if first:
                memory[cell, at] ^= 0xFF
            await engine.order(plan)
            if not first:
                await asyncio.sleep(float(random.uniform(0, 0.5)))
                memory[cell, at] ^= 0xFF
            end = await outcome(engine, plan.id)
            faults[end.fault if isinstance(end, MigrationAborted) else "committed"] += 1
            assert not first or isinstance(end, MigrationAborted), f"{engine.name} serves a spoilt byte"
            memory[cell, at] ^= 0xFF

    await fleet.each(f"spoil {tensor} of a switch", fault)
    assert faults["checksum"] > 0, faults
    assert set(faults) <= {"checksum", "committed", "overdue"}, faults  # overdue: on a busy machine


def _read_by_others(placement: Placement, layer: int, random: np.random.Generator) -> tuple[int, int]:
    """A rank and an expert whose bytes of it others read when the layer turns over: any rank of a sharded
    layer, and of a whole one the only holder."""
    if layer in placement.sharded:
        return int(random.integers(RANKS)), int(random.integers(placement.experts))
    alone = np.flatnonzero(placement.replicas_on_rank[layer].sum(axis=0) == 1)
    expert = int(random.choice(alone))
    return int(np.flatnonzero(placement.replicas_on_rank[layer, :, expert])[0]), expert


def _place(
    placement: Placement, layer: int, rank: int, expert: int, cells: NDArray[np.int32], tensor: CellTensor
) -> tuple[int, range]:
    """The cell in which a rank has an expert, and the bytes of what it has of a tensor."""
    if layer in placement.sharded:
        group, begin = place_of_part(expert)
        begin += sum(one.bytes // RANKS for one in TENSORS[: TENSORS.index(tensor)])
        return int(cells[layer, group]), range(begin, begin + tensor.bytes // RANKS)
    slot = int(np.flatnonzero(placement.on_rank(rank)[layer] == expert)[0])
    return int(cells[layer, slot]), range(tensor.offset, tensor.offset + tensor.bytes)


# attention


async def change_of_attention(engine: Engine) -> tuple[Placement, str]:
    """What an engine with all layers sharded serves, and a plan that is to change its attention."""
    records, every = engine.deployment.records, tuple(range(SHAPE.layers))
    before = await judge(engine)
    if before.sharded != every:
        before = await switched(engine, every)
    wanted: AttentionKind = "tp" if before.attention == "dp" else "dp"
    return before, await records.switch(engine.name, every, wanted)


async def judge_attention(engine: Engine, before: Placement, plan: str) -> str:
    """How the plan ends. The attention is that before or that after it, as is on record."""
    end = await outcome(engine, plan)
    placement = await judge(engine)
    changed = placement.attention != before.attention
    assert placement == (with_attention(before, placement.attention, epoch=before.epoch + changed)), placement
    if isinstance(end, MigrationCommitted):
        assert changed, f"{plan} has ended, and {placement!r} is served"
    return f"{type(end).__name__}, {'changed' if changed else 'as before'}"


async def test_a_rank_is_killed_while_the_attention_changes(fleet: Fleet) -> None:
    """Before the first rank prepares, at any moment until the last one serves it, or after."""
    ends: Counter[str] = Counter()

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        before, plan = await change_of_attention(engine)
        victim = int(random.integers(RANKS))
        await asyncio.sleep(float(random.uniform(0, CHANGE_SECONDS)))
        await engine.ranks[victim].kill()
        await survive(engine, [rank for rank in range(RANKS) if rank != victim])
        await reborn(engine)
        ends[await judge_attention(engine, before, plan)] += 1

    await fleet.each("kill amid attention", fault)
    assert ends["MigrationCommitted, changed"] > 0, ends
    assert ends["MigrationAborted, as before"] > 0, ends


async def test_the_coordinator_is_killed_while_the_attention_changes(fleet: Fleet) -> None:
    await fleet.stand_by(2)
    ends: Counter[str] = Counter()
    for time in range(TIMES // 2):
        random = np.random.default_rng((zlib.crc32(b"coordinator amid attention"), time))
        begun = await asyncio.gather(*(change_of_attention(engine) for engine in fleet.engines))
        await asyncio.sleep(float(random.uniform(0, CHANGE_SECONDS)))
        await fleet.replace_the_coordinator()
        for engine, (before, plan) in zip(fleet.engines, begun, strict=True):
            ends[await judge_attention(engine, before, plan)] += 1
            await fleet.belongings.check(engine)
    for engine in fleet.engines:
        await switches_on(engine, np.random.default_rng(len(ends)))
    assert ends["MigrationCommitted, changed"] > 0, ends


# coordinators, and the bus


async def test_the_coordinator_is_killed(fleet: Fleet) -> None:
    await fleet.stand_by(2)

    async def fault(random: np.random.Generator) -> None:
        await fleet.replace_the_coordinator()

    ends = await together(fleet, "coordinator of a switch", fault, TIMES)
    assert ends["within"] > TIMES // 2, ends
    assert ends["committed"] > 0, ends


async def test_of_two_coordinators_the_leader_is_stopped_and_comes_back(fleet: Fleet) -> None:
    await fleet.stand_by(2)

    async def fault(random: np.random.Generator) -> None:
        await fleet.stop_the_coordinator(float(random.uniform(0, 0.5)))

    ends = await together(fleet, "two of a switch", fault, TIMES // 2)
    assert ends["within"] > TIMES // 4, ends


async def test_nats_is_killed(fleet: Fleet) -> None:
    async def fault(random: np.random.Generator) -> None:
        await fleet.restart_nats(float(random.uniform(0, 1)))

    ends = await together(fleet, "nats of a switch", fault, TIMES // 2)
    assert ends["within"] > TIMES // 4, ends
