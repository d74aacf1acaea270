"""Tier 1: everything that a handover needs of ranks, coordinators and NATS, in processes of their own, and
each fault at twenty random moments.

After every fault: processes that were not killed live on; what was given up is quarantined, and then settles;
all ranks serve one epoch, the one on record, and flipped to it at the same step; every expert lies with each
of its holders to the last bit; and nothing is left over: cells, shared memory, transfers, tasks, threads,
descriptors.
"""

import asyncio
import contextlib
import signal
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
import pytest_asyncio

from bus import Declined
from fleet.facts.migrations import MigrationAborted, MigrationCommitted
from fleet.placement import Placement
from fleet.requests.handovers import AbortHandover, CommitHandover, ProposeHandover
from migration.model.plan import Plan
from tests.faults.expert_contents import RANKS, SLOTS, TENSORS, memory_of
from tests.faults.fleet_fixture import Engine
from tests.faults.invariants import FREE, judge
from tests.faults.plans import Impossible, copies, series
from tests.faults.rounds import LANES, TIMES, Fleet, fleet_of, outcome, reborn, serves_on, survive

SPAN_SECONDS = 0.5
"""a fault comes so long after a plan was ordered, at most: a plan of two handovers takes about as long"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with fleet_of(tmp_path_factory.mktemp("faults"), LANES) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(whole: Fleet) -> Fleet:
    await whole.ready()
    return whole


async def together(fleet: Fleet, name: str, fault: Callable[[np.random.Generator], Awaitable[None]]) -> None:
    """Let it happen half of TIMES times, each while all engines have a plan under way: each of them is hit so
    often."""
    for time in range(TIMES // 2):
        random = np.random.default_rng((zlib.crc32(name.encode()), time))
        plans = {engine.name: series(await judge(engine), random, 3) for engine in fleet.engines}
        await asyncio.gather(*(engine.order(plans[engine.name]) for engine in fleet.engines))
        await asyncio.sleep(float(random.uniform(0, SPAN_SECONDS)))
        await fault(random)
        for engine in fleet.engines:
            await outcome(engine, plans[engine.name].id)
            await judge(engine)
            await fleet.belongings.check(engine)


def between(engine: Engine, random: np.random.Generator, handovers: int) -> tuple[Plan, dict[str, int]]:
    """A plan, and what the ranks are in it: source, target, bystander."""
    while True:
        ranks = {
            role: int(rank)
            for role, rank in zip(("source", "target", "bystander"), random.permutation(RANKS), strict=True)
        }
        with contextlib.suppress(Impossible):
            return (
                series(
                    engine.history.latest, random, handovers, source=ranks["source"], target=ranks["target"]
                ),
                ranks,
            )


# ranks


@pytest.mark.parametrize("role", ["source", "target", "bystander"])
async def test_a_rank_is_killed(fleet: Fleet, role: str) -> None:
    async def fault(engine: Engine, random: np.random.Generator) -> None:
        plan, ranks = between(engine, random, 2)
        await engine.order(plan)
        await asyncio.sleep(float(random.uniform(0, SPAN_SECONDS)))
        await engine.ranks[ranks[role]].kill()
        await survive(engine, [rank for name, rank in ranks.items() if name != role])
        await reborn(engine)
        await outcome(engine, plan.id)

    await fleet.each(f"kill {role}", fault)


async def test_a_source_is_stopped_for_longer_than_it_may_take(fleet: Fleet) -> None:
    """It goes on after three seconds; reads were given one."""
    ends: Counter[str] = Counter()

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        plan, ranks = between(engine, random, 2)
        source, target = ranks["source"], ranks["target"]
        await engine.order(plan)
        await asyncio.sleep(float(random.uniform(0, SPAN_SECONDS / 2)))
        engine.ranks[source].send(signal.SIGSTOP)
        try:
            await asyncio.sleep(2.5)
            messages = await engine.described(target)
            ends["quarantined"] += messages is not None and messages.quarantined > 0
            await asyncio.sleep(0.5)
        finally:
            engine.ranks[source].send(signal.SIGCONT)
        ends[type(await outcome(engine, plan.id)).__name__] += 1

    await fleet.each("stop", fault)
    assert ends["quarantined"] > 0, ends
    assert ends["MigrationAborted"] > 0, ends


@pytest.mark.parametrize("tensor", ["scales", "gate_up"])
async def test_bytes_of_a_source_are_spoilt(fleet: Fleet, tensor: str) -> None:
    """One byte of what is read. Every second time before anything is read; else at any moment, when it may be
    too late to matter."""
    faults: Counter[str] = Counter()
    about = next(one for one in TENSORS if one.name == tensor)

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        plan, ranks = between(engine, random, 1)
        source = ranks["source"]
        copy, layer = plan.copies[0], plan.steps[0].layer
        first = bool(random.integers(2))
        standing = await engine.ranks[source].ask()
        assert copy.source is not None
        cell = standing["cells"][layer][copy.source - source * SLOTS]
        at = about.offset + int(random.integers(about.bytes))
        with memory_of(engine.ranks[source].pid, standing["descriptor"], standing["cell_bytes"]) as memory:
            if first:
                memory[cell, at] ^= 0xFF
            await engine.order(plan)
            if not first:
                await asyncio.sleep(float(random.uniform(0, SPAN_SECONDS / 3)))
                memory[cell, at] ^= 0xFF
            end = await outcome(engine, plan.id)
            faults[end.fault if isinstance(end, MigrationAborted) else "committed"] += 1
            memory[cell, at] ^= 0xFF

    await fleet.each(f"spoil {tensor}", fault)
    assert faults["checksum"] > 0, faults
    assert set(faults) <= {"checksum", "committed"}, faults


async def test_there_is_no_room_for_what_comes(fleet: Fleet) -> None:
    """One more than there are free cells, while another plan may still be under way."""
    ends: Counter[str] = Counter()

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        tried = [copies(engine.history.latest, int(target), FREE + 1) for target in random.permutation(RANKS)]
        plan = next(one for one in tried if one is not None)
        try:
            await engine.order(plan, patiently=False)
        except Declined as refusal:
            ends["declined" if "free" in str(refusal) else str(refusal)] += 1
            return
        end = await outcome(engine, plan.id)
        ends[end.fault if isinstance(end, MigrationAborted) else "committed"] += 1

    await fleet.each("room", fault)
    assert set(ends) <= {"room", "declined"}, ends


# coordinators


async def test_the_coordinator_is_killed(fleet: Fleet) -> None:
    await fleet.stand_by(2)

    async def fault(random: np.random.Generator) -> None:
        await fleet.replace_the_coordinator()

    await together(fleet, "coordinator", fault)


async def test_of_two_coordinators_the_leader_is_stopped_and_comes_back(fleet: Fleet) -> None:
    await fleet.stand_by(2)

    async def fault(random: np.random.Generator) -> None:
        await fleet.stop_the_coordinator(float(random.uniform(0, SPAN_SECONDS)))

    await together(fleet, "two", fault)


# the bus


async def test_nats_is_killed(fleet: Fleet) -> None:
    async def fault(random: np.random.Generator) -> None:
        await fleet.restart_nats(float(random.uniform(0, 1)))

    await together(fleet, "nats", fault)


# what is over


async def test_a_plan_for_a_past_epoch_comes_while_another_is_carried_out(fleet: Fleet) -> None:
    """To the coordinator; and straight to the ranks, as from a coordinator that missed everything. Nothing of
    it is heeded, and the other plan is done."""
    verdicts: Counter[str] = Counter()

    async def fault(engine: Engine, random: np.random.Generator) -> None:
        if engine.history.latest.epoch == 0:
            await serves_on(engine, random)  # so that there is a past
        placement = engine.history.latest
        past = Placement(
            placement.expert_of_slot,
            experts=placement.experts,
            ranks=RANKS,
            epoch=max(placement.epoch - int(random.integers(1, 4)), 0),
        )
        late, plan = series(past, random, 1), series(placement, random, 2)
        await engine.order(plan)
        await asyncio.sleep(float(random.uniform(0, SPAN_SECONDS)))
        with pytest.raises(Declined):
            await engine.order(late, patiently=False)
        for rank in random.permutation(RANKS):
            verdicts.update(await published_late(engine, int(rank), late, past))
        assert isinstance(await outcome(engine, plan.id), MigrationCommitted)

    await fleet.each("past", fault)
    heeded = {verdict for verdict in verdicts if verdict.endswith("take")}
    assert not heeded, verdicts
    assert verdicts["propose past"] >= TIMES, verdicts


async def published_late(engine: Engine, rank: int, plan: Plan, placement: Placement) -> list[str]:
    """What a rank makes of commands of handovers that are over, and of a new one from an epoch that is
    past."""
    messages = await engine.described(rank)
    assert messages is not None
    who = {"worker_id": engine.worker_id, "rank": rank, "token": messages.token}
    record = Placement(
        placement.expert_of_slot, experts=placement.experts, ranks=RANKS, epoch=placement.epoch + 1
    ).record()
    about = {"engine": engine.name, "plan": plan.id, "placement": record, "deadline_seconds": 1.0}
    proposals = [
        ProposeHandover(**who, **about, handover=number)
        for number in (messages.concluded, messages.concluded + 1000)
    ]
    found = [f"propose {(await engine.command(one)).verdict}" for one in proposals]
    found.append(
        f"commit {(await engine.command(CommitHandover(**who, handover=messages.concluded))).verdict}"
    )
    found.append(
        "abort"
        f" {(await engine.command(AbortHandover(**who, handover=messages.concluded, reason='late'))).verdict}"
    )
    return found
