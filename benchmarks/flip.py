"""Effect of epoch changes on running requests: four ranks under closed load, with and without migrations.

Real parts on one machine: NATS, the planner (as coordinator), four rank processes with agent, transfer and
the embedded engine. In every second window an expert is repeatedly swapped with one of another rank;
everything else runs all the time. Both kinds of windows alternate in one run.

    python -m benchmarks.flip --quick
"""

import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.rig.flip_rank import Job
from benchmarks.rig.processes import ROOST, ROOT, nats, process
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from bus import Bus, Subscription
from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from fleet.facts.migrations import MigrationAborted, MigrationCommitted
from fleet.facts.placements import PlacementCommitted
from fleet.placement import EMPTY, Placement
from fleet.requests.plans import MigrateExpert, MigrationAccepted

RANKS, SLOTS, SEQUENCES = 4, 9, 2
MIB = 1 << 20
ENGINE = "flip"
START_SECONDS = 120.0
WARM_SECONDS = 3.0
SETTLE_SECONDS = 0.5
"""between two windows"""
_NEIGHBOURS = 10
"""steps on each side that a step is compared with"""
Seconds = NDArray[np.float64]


@dataclass
class Window:
    migrating: bool
    begin: float
    end: float
    handover_seconds: list[float] = field(default_factory=list)
    """of each migration, from the request to the last rank's flip"""


class Ranks:
    """Rank processes; ended with the context."""

    def __init__(self, folder: Path, children: Sequence[asyncio.subprocess.Process]) -> None:
        self._folder = folder
        self._children = children

    async def diaries(self) -> list[dict[str, NDArray[Any]]]:
        """Stop the ranks and read their diaries."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for child in self._children:
            await asyncio.wait_for(child.wait(), START_SECONDS)
        return [dict(np.load(self._folder / f"{rank}.npz")) for rank in range(RANKS)]


@asynccontextmanager
async def ranks_of(job: Job) -> AsyncIterator[Ranks]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flip-")))
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        children = []
        for rank in range(RANKS):
            command = [sys.executable, "-m", "benchmarks.rig.flip_rank", str(folder / "job.json"), str(rank)]
            child = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            stack.push_async_callback(_end, child)
            children.append(child)
        for rank, child in enumerate(children):
            assert child.stdout is not None
            if b"ready" not in await asyncio.wait_for(child.stdout.readline(), START_SECONDS):
                raise RuntimeError(f"rank {rank} did not start; see its standard error")
        yield Ranks(folder, children)


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
    await child.wait()


class Operator:
    """Request one migration after the other, and follow each to its end."""

    def __init__(self, bus: Bus, subjects: Subjects, heard: Subscription, placement: Placement) -> None:
        self.placement = placement
        self._bus = bus
        self._subjects = subjects
        self._messages = aiter(heard)
        self._dice = np.random.default_rng(4)

    async def swap(self) -> float:
        """Swap two experts of two ranks; return the seconds."""
        began = time.monotonic()
        layer, rank = int(self._dice.integers(self.placement.layers)), int(self._dice.integers(RANKS))
        mine, others = self._held(layer, rank), self._held(layer, (rank + 1) % RANKS)
        wanted, given = (
            self._dice.choice(np.setdiff1d(others, mine)),
            self._dice.choice(np.setdiff1d(mine, others)),
        )
        request = MigrateExpert(
            engine=ENGINE,
            layer=layer,
            expert=int(wanted),
            rank=rank,
            source=(rank + 1) % RANKS,
            move=True,
            swap=int(given),
        )
        answer = await self._bus.request(self._subjects.migrate, request, 10.0)
        if not isinstance(answer, MigrationAccepted):
            raise TypeError(f"the planner answered with {answer!r}")
        async with asyncio.timeout(60):
            while True:
                message = (await anext(self._messages)).message
                if isinstance(message, PlacementCommitted):
                    self.placement = Placement.from_record(message.placement)
                aborted = isinstance(message, MigrationAborted)
                if aborted:
                    raise RuntimeError(f"a migration was given up: {message}")
                if isinstance(message, MigrationCommitted) and message.last:
                    return time.monotonic() - began

    def _held(self, layer: int, rank: int) -> NDArray[np.int16]:
        here = self.placement.on_rank(rank)[layer]
        return np.asarray(here[here != EMPTY])


@asynccontextmanager
async def operator(url: str) -> AsyncIterator[Operator]:
    subjects = Subjects()
    bus = await NatsBus.connect(url, subjects, BusConfig(), name="operator")
    try:
        async with bus.subscribe(subjects.placements(ENGINE), subjects.migrations(ENGINE)) as heard:
            first = [
                one.message
                async for one in bus.replay(subjects.placements(ENGINE), latest=True, follow=False)
            ]
            if not first or not isinstance(first[-1], PlacementCommitted):
                raise RuntimeError("the planner did not record the engine's first placement")
            yield Operator(bus, subjects, heard, Placement.from_record(first[-1].placement))
    finally:
        await bus.close()


async def run(
    pairs: int, seconds: float, every: float, ballast_bytes: int, transfer: dict[str, Any]
) -> tuple[list[dict[str, NDArray[Any]]], list[Window]]:
    """Run alternating windows, with a migration `every` seconds and without; return the ranks' diaries."""
    windows: list[Window] = []
    async with nats() as url, process([*ROOST, "planner", "--nats", url], None):
        job = Job(url, ENGINE, secrets.randbits(63), RANKS, SLOTS, ballast_bytes, SEQUENCES, transfer)
        async with ranks_of(job) as ranks:
            await asyncio.sleep(WARM_SECONDS)
            async with operator(url) as asking:
                await asking.swap()  # warm-up: every rank connects to every other
                for number in range(2 * pairs):
                    await asyncio.sleep(SETTLE_SECONDS)
                    windows.append(await _window(asking, number % 2 == number // 2 % 2, seconds, every))
            return await ranks.diaries(), windows


async def _window(asking: Operator, migrating: bool, seconds: float, every: float) -> Window:
    began = time.monotonic()
    window = Window(migrating, began, began + seconds)
    due = began
    while migrating and due < window.end - every / 2:
        await asyncio.sleep(due - time.monotonic())
        window.handover_seconds.append(await asking.swap())
        due = max(due + every, time.monotonic())
    await asyncio.sleep(window.end - time.monotonic())
    window.end = time.monotonic()
    return window


def within(times: Seconds, window: Window) -> NDArray[np.bool_]:
    return (times >= window.begin) & (times < window.end)


def gaps_of(diaries: list[dict[str, NDArray[Any]]], window: Window) -> Seconds:
    """Return the seconds between tokens that came in a window, on all ranks."""
    return np.concatenate([diary["gap"][within(diary["token"], window)] for diary in diaries])


def flip_steps(diary: dict[str, NDArray[Any]]) -> tuple[Seconds, Seconds]:
    """Return, for every step with a flip, its seconds beyond the median of its neighbours; and that
    median."""
    lengths = np.diff(diary["step"])
    extra, usual = [], []
    for at in np.flatnonzero(np.diff(diary["epoch"])).tolist():
        near = np.concatenate(
            [lengths[max(0, at - _NEIGHBOURS) : at], lengths[at + 1 : at + 1 + _NEIGHBOURS]]
        )
        if len(near):
            usual.append(float(np.median(near)))
            extra.append(float(lengths[at]) - usual[-1])
    return np.array(extra), np.array(usual)


def collectives(diaries: list[dict[str, NDArray[Any]]], flipping: bool) -> set[int]:
    """Return the numbers of collectives per step, in steps with flips or in the others."""
    found: set[int] = set()
    for diary in diaries:
        found.update(np.diff(diary["collectives"])[(np.diff(diary["epoch"]) > 0) == flipping].tolist())
    return found


def judge(report: Report, name: str, diaries: list[dict[str, NDArray[Any]]], windows: list[Window]) -> None:
    with_, without = (
        [gaps_of(diaries, one) for one in windows if one.migrating == migrating]
        for migrating in (True, False)
    )
    usual = float(np.median(np.concatenate(without)))
    p99 = [[float(np.percentile(one, 99)) for one in side] for side in (with_, without)]
    slow = [[float((one > 2 * usual).mean()) for one in side] for side in (with_, without)]
    pooled = [float(np.percentile(np.concatenate(side), 99)) for side in (with_, without)]
    by_pair = statistics.median(one / other for one, other in zip(*p99, strict=True))
    more = [one - other for one, other in zip(*slow, strict=True)]
    error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
    extra, near = (np.concatenate(parts) for parts in zip(*map(flip_steps, diaries), strict=True))
    taken = np.concatenate([diary["flip_seconds"] for diary in diaries])
    step = float(np.median(np.concatenate([np.diff(diary["step"]) for diary in diaries])))
    handovers = [seconds for one in windows for seconds in one.handover_seconds]
    for side, at in (("with", 0), ("without", 1)):
        gaps = (with_, without)[at]
        count, middle = sum(map(len, gaps)), 1e3 * float(np.median(np.concatenate(gaps)))
        report.add(
            f"{name}, {side} migrations",
            len(gaps),
            count,
            middle,
            1e3 * pooled[at],
            100 * float(np.mean(slow[at])),
        )
    report.notes.append(
        f"{name}: {len(handovers)} migrations of two experts each, {1e3 * statistics.median(handovers):.0f}"
        f" ms (median), {1e3 * max(handovers):.0f} ms (longest) from the request to the record; exchanging"
        f" views: {1e6 * float(np.median(taken)):.0f} us (median), {1e6 * float(taken.max()):.0f} us"
        f" (longest) of a step of {1e3 * step:.1f} ms, which ends {100 * float(np.median(extra / near)):+.1f}"
        " % later than its neighbours (median): in it all ranks hear of the decision; collectives per step:"
        f" {sorted(collectives(diaries, False))}, when going over: {sorted(collectives(diaries, True))}; p99"
        f" of a window over that of its neighbour: {by_pair:.2f} (median)"
    )
    report.targets += [
        Target(
            f"{name}: collectives of a step in which all go over, over those of others",
            max(collectives(diaries, True)) / max(collectives(diaries, False)),
            1.0,
            False,
        ),
        Target(
            f"{name}: time on the step thread to go over, over the median step",
            float(np.percentile(taken, 99)) / step,
            0.05,
            False,
        ),
        Target(
            f"{name}: p99 between tokens, with over without ({len(more)} windows of each)",
            pooled[0] / pooled[1],
            1.10,
            False,
        ),
        Target(
            f"{name}: gaps over twice the median, with minus without, less two standard errors",
            100 * (statistics.mean(more) - 2 * error),
            0.0,
            False,
            " %",
        ),
    ]


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    pairs: int = typer.Option(None, help="windows of each kind"),
    seconds: float = typer.Option(None, help="seconds of a window"),
    every: float = typer.Option(1.0, help="seconds between two migrations"),
    rate: int = typer.Option(None, help="transfer.bytes_per_second; default: the setting's default"),
    niceness: int = typer.Option(None, help="transfer.niceness; default: the setting's default"),
    only: str = typer.Option("", help="demo or heavy; empty: both"),
) -> None:
    """Measure gaps between tokens with and without migrations, and the duration of a step with a flip."""
    columns = ["engine", "windows", "gaps", "median ms", "p99 ms", "% over 2x median"]
    report = Report(
        f"Migrations under load: {RANKS} ranks, {SEQUENCES} sequences each, one migration every {every:g} s",
        columns,
    )
    transfer: dict[str, Any] = {} if rate is None else {"bytes_per_second": rate}
    transfer |= {} if niceness is None else {"niceness": niceness}
    for name, ballast in (("demo", 0), ("heavy", 16 * MIB)):
        if only in ("", name):
            found = asyncio.run(
                run(
                    pairs or (2 if quick else 10),
                    seconds or (2.0 if quick else 10.0),
                    every,
                    ballast,
                    transfer,
                )
            )
            judge(report, "demo experts" if not ballast else "16 MiB more per expert", *found)
    report.notes.append(
        f"{SLOTS} slots per rank and layer; a migration exchanges an expert of one rank for one of another:"
        " each rank reads one"
    )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
