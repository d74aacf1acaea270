"""Effect of epoch changes on running requests: four ranks under closed load, with and without migrations.

Real parts on one machine: NATS, the planner (as coordinator), four rank processes with agent, transfer and
the embedded engine. In every second window an expert is repeatedly swapped with one of another rank;
everything else runs all the time. Both kinds of windows alternate in one run.

    python -m benchmarks.flip --quick
"""

import asyncio
import secrets
import statistics
import time
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.rig.engine_ranks import (
    Diaries,
    Requester,
    Seconds,
    Window,
    gaps_of,
    ranks_of,
    requester,
)
from benchmarks.rig.flip_rank import Job
from benchmarks.rig.processes import ROOST, nats, process
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from fleet.placement import EMPTY, Placement
from fleet.requests.plans import MigrateExpert

RANKS, SLOTS, SEQUENCES = 4, 9, 2
MIB = 1 << 20
ENGINE = "flip"
WARM_SECONDS = 3.0
SETTLE_SECONDS = 0.5
"""between two windows"""
_NEIGHBOURS = 10
"""steps on each side that a step is compared with"""


class Swapper:
    """Swap experts of two ranks, one migration after the other."""

    def __init__(self, asking: Requester) -> None:
        self._asking = asking
        self._dice = np.random.default_rng(4)

    async def swap(self) -> float:
        """Swap two experts of two ranks; return the seconds."""
        placement = self._asking.placement
        layer, rank = int(self._dice.integers(placement.layers)), int(self._dice.integers(RANKS))
        mine, others = held(placement, layer, rank), held(placement, layer, (rank + 1) % RANKS)
        wanted, given = (
            self._dice.choice(np.setdiff1d(others, mine)),
            self._dice.choice(np.setdiff1d(mine, others)),
        )
        carried = await self._asking.carry_out(
            MigrateExpert(
                engine=ENGINE,
                layer=layer,
                expert=int(wanted),
                rank=rank,
                source=(rank + 1) % RANKS,
                move=True,
                swap=int(given),
            )
        )
        return carried.seconds


def held(placement: Placement, layer: int, rank: int) -> NDArray[np.int16]:
    """Return the experts of a layer that a rank holds."""
    here = placement.on_rank(rank)[layer]
    return np.asarray(here[here != EMPTY])


async def run(
    pairs: int, seconds: float, every: float, ballast_bytes: int, transfer: dict[str, Any]
) -> tuple[Diaries, list[Window]]:
    """Run alternating windows, with a migration `every` seconds and without; return the ranks' diaries."""
    windows: list[Window] = []
    async with nats() as url, process([*ROOST, "planner", "--nats", url], None):
        job = Job(url, ENGINE, secrets.randbits(63), RANKS, SLOTS, ballast_bytes, SEQUENCES, transfer)
        async with ranks_of(job) as ranks:
            await asyncio.sleep(WARM_SECONDS)
            async with requester(url, ENGINE) as asking:
                swapper = Swapper(asking)
                await swapper.swap()  # warm-up: every rank connects to every other
                for number in range(2 * pairs):
                    await asyncio.sleep(SETTLE_SECONDS)
                    windows.append(await _window(swapper, number % 2 == number // 2 % 2, seconds, every))
            return await ranks.diaries(), windows


async def _window(swapper: Swapper, migrating: bool, seconds: float, every: float) -> Window:
    began = time.monotonic()
    window = Window(began, began + seconds, migrating)
    due = began
    while migrating and due < window.end - every / 2:
        await asyncio.sleep(due - time.monotonic())
        window.handover_seconds.append(await swapper.swap())
        due = max(due + every, time.monotonic())
    await asyncio.sleep(window.end - time.monotonic())
    window.end = time.monotonic()
    return window


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


def collectives(diaries: Diaries, flipping: bool) -> set[int]:
    """Return the numbers of collectives per step, in steps with flips or in the others."""
    found: set[int] = set()
    for diary in diaries:
        found.update(np.diff(diary["collectives"])[(np.diff(diary["epoch"]) > 0) == flipping].tolist())
    return found


def judge(report: Report, name: str, diaries: Diaries, windows: list[Window]) -> None:
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
