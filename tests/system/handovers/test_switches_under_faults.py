"""Tier 2 of switches of layout: embedded engines change between EP, EXPERTS_TP, TP and what is between while
they answer, and a rank or the coordinator is killed at a random byte or moment of that. No request is lost and
no token is another, the engine serves what is on record, and the next switch is made."""

import asyncio
import os
import signal
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from fleet.facts.migrations import MigrationAborted, MigrationCommitted
from fleet.layout import AttentionKind, Layout
from fleet.placement import Placement, with_attention
from tests.faults.fleet_fixture import until
from tests.faults.landed_bytes import LandedBytes
from tests.faults.records import Ended, Records
from tests.system.fleets import Fleet, leave_nothing, new_home
from tests.system.load_clients import Crowd, Outcomes, Prompt, Tide, documents
from tests.system.migration_clients import Movers, clients_and_movers

ENGINES = ("engine-0", "engine-1")
RANKS, LAYERS, EXPERTS = 2, 4, 32
PART_BYTES = 3 * 64 * 192 * 4 // RANKS
LAYER_BYTES = EXPERTS * PART_BYTES
"""that come into a rank's free cells when a layer turns over, into either form"""
BYTES_PER_SECOND = 1_200_000
"""a layer takes a second: a rank reads half of it from the other"""
LAYOUTS = ((), (0, 1, 2, 3), (1, 3), (0,), (0, 1, 2))
EVERY = tuple(range(LAYERS))
CHANGE_SECONDS = 0.05
"""of a change of attention, roughly"""
CHANGES = 2
"""of each engine's attention that are hit"""
PROMPTS, TOKENS = 8, 64
PER_SECOND = 1.5
TRIES = 4
"""switches of which one is hit while it is under way"""
END_SECONDS = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def slow() -> Iterator[Fleet]:
    """Two engines of two ranks each, which read each other slowly."""
    home = new_home(
        ROOST_ENGINE_KV_BLOCKS="512",
        ROOST_ENGINE_SLOTS_PER_RANK="18",
        ROOST_TRANSFER_BYTES_PER_SECOND=str(BYTES_PER_SECOND),
        ROOST_TRANSFER_PIECE_BYTES="32768",
        ROOST_TRANSFER_MIN_SECONDS="20.0",  # a busy machine ends no read
        ROOST_PLANNER_AUTOMATIC="false",  # layers turn over when they are asked to, and otherwise stay
        ROOST_PLANNER_LEASE_SECONDS="1.0",
        ROOST_PLANNER_REPEAT_SECONDS="0.2",
        ROOST_PLANNER_STAGE_SECONDS="60.0",
        ROOST_ROUTER_DEAD_AFTER_SECONDS="15.0",  # a busy machine is not dead
        ROOST_ROUTER_NO_ENGINE_WAIT_SECONDS="60.0",
    )
    fleet = Fleet(home, "--ranks", str(RANKS), "--engines", str(len(ENGINES)))
    yield fleet
    fleet.http.close()
    leave_nothing(fleet)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def movers(slow: Fleet) -> AsyncIterator[Movers]:
    async with clients_and_movers(slow) as (_, movers):
        yield movers


class FewPrompts:
    """So few that the same is asked in each form."""

    domains = ("all",)

    def __init__(self) -> None:
        texts = [text for several in documents().values() for text in several][:PROMPTS]
        self._prompts = [Prompt(at, 0, ids[:96], TOKENS) for at, ids in enumerate(texts)]

    def any_of(self, domain: int, dice: np.random.Generator) -> Prompt:
        return self._prompts[int(dice.integers(len(self._prompts)))]

    def expected(self, prompt: Prompt) -> list[int] | None:
        return None


@asynccontextmanager
async def crowd(fleet: Fleet, dice: np.random.Generator) -> AsyncIterator[Outcomes]:
    """Users come, half of them for streams, while the context lasts; the last are answered before it ends."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        fleet.router, timeout=aiohttp.ClientTimeout(total=120), connector=connector
    ) as http:
        all_alike = [Tide("even", 1e6, np.ones(1), np.ones(1))]
        users, coming = Crowd(http, FewPrompts(), all_alike, PER_SECOND, dice), True

        async def come() -> None:
            while coming:
                await users.come(2.0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(come(), name="users come")
            try:
                yield users.outcomes
            finally:
                coming = False


class Switch(NamedTuple):
    """A plan that turns layers over, and what it begins and ends with."""

    engine: str
    plan: str
    before: Placement
    wanted: tuple[int, ...]

    @property
    def layers(self) -> list[int]:
        return sorted(set(self.before.sharded) ^ set(self.wanted))

    def after(self, handovers: int) -> tuple[int, ...]:
        """Layers that are sharded after so many of its handovers, each of which turns over the next layer."""
        return tuple(sorted(set(self.before.sharded) ^ set(self.layers[:handovers])))


async def begin(records: Records, engine: str, dice: np.random.Generator) -> Switch:
    """Request another layout than the present."""
    before = records.history(engine).latest
    others = [one for one in LAYOUTS if one != before.sharded]
    wanted = others[int(dice.integers(len(others)))]
    return Switch(engine, await records.switch(engine, wanted), before, wanted)


async def ended(records: Records, switch: Switch) -> Ended:
    history = records.history(switch.engine)
    return await until(
        lambda: history.end_of(switch.plan),
        lambda: f"an end of {switch.plan} of {switch.engine}: {history.of(switch.plan)}",
        END_SECONDS,
    )


async def killed_amid(
    fleet: Fleet, movers: Movers, engine: str, victim: str, dice: np.random.Generator
) -> Switch:
    """A switch, and a process that is killed at a random byte of it."""
    history = movers.records.history(engine)
    for _ in range(TRIES):
        processes = fleet.processes()
        rank = int(dice.integers(RANKS))
        landed = LandedBytes(expert_memory(processes[f"{engine}/{rank}"]))
        switch = await begin(movers.records, engine, dice)
        byte = int(dice.integers(len(switch.layers) * LAYER_BYTES))
        within = await landed.reach(byte, lambda plan=switch.plan: history.end_of(plan), END_SECONDS)
        if within:
            process = processes[
                "planner" if victim == "the coordinator" else f"{engine}/{dice.integers(RANKS)}"
            ]
            process.send_signal(signal.SIGKILL)
            return switch
        await until(lambda: settled(fleet, movers), lambda: standing(fleet, movers), END_SECONDS)
    raise AssertionError(f"{TRIES} switches of {engine} ended before they were hit")


def expert_memory(process: psutil.Process) -> NDArray[np.uint8]:
    """uint8 [bytes]: a rank's memory for experts itself."""
    found = next(
        number
        for number in os.listdir(f"/proc/{process.pid}/fd")
        if "roost-experts" in os.readlink(f"/proc/{process.pid}/fd/{number}")
    )
    return np.memmap(f"/proc/{process.pid}/fd/{found}", np.uint8, "r")


@pytest.mark.parametrize("victim", ["a rank", "the coordinator"])
async def test_a_kill_at_a_random_byte_of_a_switch_loses_no_request_and_leaves_the_layout_on_record(
    slow: Fleet, movers: Movers, victim: str
) -> None:
    records = movers.records
    dice = np.random.default_rng(zlib.crc32(victim.encode()))
    await until(lambda: settled(slow, movers), lambda: standing(slow, movers), END_SECONDS)
    async with crowd(slow, dice) as outcomes:
        for engine in ENGINES:
            lives = len(records.history(engine).joins)
            switch = await killed_amid(slow, movers, engine, victim, dice)
            end = await ended(records, switch)
            if victim == "a rank":
                await until(
                    lambda name=engine, lives=lives: len(records.history(name).joins) > lives,
                    lambda: f"another life: {standing(slow, movers)}",
                    END_SECONDS,
                )
            await until(lambda: settled(slow, movers), lambda: standing(slow, movers), END_SECONDS)
            latest = records.history(engine).latest
            print(  # noqa: T201
                f"\n{engine}, {victim}: layers {switch.before.sharded} to {switch.wanted}, {type(end).__name__},"
                f" {latest.sharded} on record"
            )
            done = latest.epoch - switch.before.epoch
            assert 0 <= done <= len(switch.layers), f"{latest!r} after {switch}"
            assert latest.sharded == switch.after(done), f"{latest!r} after {switch}"
            assert isinstance(end, MigrationAborted) or done == len(switch.layers), end
            for joined in records.history(engine).joins[lives:]:
                assert joined.placement is not None
                assert Placement.from_record(joined.placement) == latest, "it began with what is on record"
            again = await begin(records, engine, dice)
            assert isinstance(await ended(records, again), MigrationCommitted)
            await until(lambda: settled(slow, movers), lambda: standing(slow, movers), END_SECONDS)
            assert records.history(engine).latest.sharded == again.wanted
        await until(lambda: enough(outcomes), "more answers", END_SECONDS)
    judge_outcomes(outcomes)


@pytest.mark.parametrize("victim", ["a rank", "the coordinator"])
async def test_a_kill_while_the_attention_changes_loses_no_request_and_leaves_that_on_record(
    slow: Fleet, movers: Movers, victim: str
) -> None:
    """It comes before the first rank is ready, before the last one serves the other, or after."""
    dice = np.random.default_rng(zlib.crc32(b"attention") + zlib.crc32(victim.encode()))
    await until(lambda: settled(slow, movers), lambda: standing(slow, movers), END_SECONDS)
    async with crowd(slow, dice) as outcomes:
        for engine in ENGINES:
            history = movers.records.history(engine)
            if history.latest.sharded != EVERY:
                await undisturbed(slow, movers, engine, Layout("dp", EVERY))
            for _ in range(CHANGES):
                before, lives = history.latest, len(history.joins)
                wanted: AttentionKind = "dp" if before.attention == "tp" else "tp"
                name = "planner" if victim == "the coordinator" else f"{engine}/{dice.integers(RANKS)}"
                process = await until(
                    lambda name=name: slow.processes().get(name), f"{name} is back", END_SECONDS
                )
                plan = await movers.records.switch(engine, EVERY, wanted)
                await asyncio.sleep(float(dice.uniform(0, CHANGE_SECONDS)))
                process.send_signal(signal.SIGKILL)
                end = await ended(movers.records, Switch(engine, plan, before, EVERY))
                if victim == "a rank":
                    await until(
                        lambda history=history, lives=lives: len(history.joins) > lives,
                        lambda: f"another life: {standing(slow, movers)}",
                        END_SECONDS,
                    )
                await until(lambda: settled(slow, movers), lambda: standing(slow, movers), END_SECONDS)
                latest = history.latest
                print(  # noqa: T201
                    f"\n{engine}, {victim}: {before.attention} to {wanted}, {type(end).__name__},"
                    f" {latest.attention} on record"
                )
                changed = latest.attention != before.attention
                assert latest == with_attention(before, latest.attention, epoch=before.epoch + changed)
                assert changed or isinstance(end, MigrationAborted), end
                for joined in history.joins[lives:]:
                    assert joined.placement is not None
                    assert Placement.from_record(joined.placement) == latest, (
                        "it began with what is on record"
                    )
            await undisturbed(slow, movers, engine, Layout("tp", EVERY))
            await undisturbed(slow, movers, engine, Layout("dp", EVERY))
        await until(lambda: enough(outcomes), "more answers", END_SECONDS)
    judge_outcomes(outcomes)


async def undisturbed(fleet: Fleet, movers: Movers, engine: str, wanted: Layout) -> None:
    """Switch to a layout, with nothing to disturb that. An engine that has it stays as it is."""
    history = movers.records.history(engine)
    if history.latest.layout == wanted:
        return
    before = history.latest
    plan = await movers.records.switch(engine, wanted.sharded, wanted.attention)
    end = await ended(movers.records, Switch(engine, plan, before, wanted.sharded))
    assert isinstance(end, MigrationCommitted), end
    await until(lambda: settled(fleet, movers), lambda: standing(fleet, movers), END_SECONDS)
    assert history.latest.layout == wanted


def enough(outcomes: Outcomes) -> bool:
    """There are answers to judge: on a fast machine a test takes but seconds."""
    return outcomes.streamed > 8 and outcomes.answered > 24


def judge_outcomes(outcomes: Outcomes) -> None:
    """Every request was answered, with the right tokens."""
    print(  # noqa: T201
        f"{outcomes.answered} answers, {outcomes.streamed} of them streamed; {outcomes.compared} compared,"
        f" {outcomes.close} of them with a close choice; refused at first {dict(outcomes.refused)}"
    )
    assert not outcomes.wrong, outcomes.wrong[:5]
    assert not outcomes.lost, outcomes.lost[:5]
    assert not outcomes.broken, outcomes.broken[:5]
    assert outcomes.answered == outcomes.came - outcomes.turned_away
    assert outcomes.streamed > 5, outcomes
    assert outcomes.compared > 5, outcomes


async def settled(fleet: Fleet, movers: Movers) -> bool:
    """Every rank of the present lives is at rest, and serves the epoch that is on record; and the router uses
    all of them, an engine with tensor-parallel attention as one target."""
    targets = 0
    for engine in ENGINES:
        history = movers.records.history(engine)
        served = await movers.served(engine) if history.joins else []
        if not history.known or set(served) != {history.latest.epoch}:
            return False
        targets += RANKS if history.latest.layout.targets_are_ranks else 1
    return await asyncio.to_thread(fleet.serving, targets, 1)


def standing(fleet: Fleet, movers: Movers) -> str:
    """For whoever has to find out why that is not so."""
    histories = [movers.records.history(engine) for engine in ENGINES]
    on_record = [(repr(one.latest), one.known, one.migrations[-1:]) for one in histories]
    return (
        f"both engines serve what is on record: {on_record}, {fleet.processes().keys()}; the fleet"
        f" says:\n{fleet.up.output[-2000:]}"
    )
