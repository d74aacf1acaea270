"""Cost of a switch of layout on real weights, two ranks of one machine: the bytes, the handovers, and what
running requests feel of it.

**Copies.** Two processes turn all layers of a random model over, to and fro. A handover's reads (landed, and
with verification) are compared with a plain loop over the same pieces by as many threads with the same
pinning, and with `all_to_all_single` of gloo with packing and unpacking. All ways alternate in every round,
and each has run before. The slower rank counts.

**Handovers.** A real planner switches the layout of an idle engine, with room for one, two and all layers at
once. Time beside the bytes is time in which no rank copies or compares.

**Streaming.** The same engine answers requests without a pause. Windows in which all layers are whole
(twice), all are sharded, and layers turn over to and fro alternate in one run. A tenth of the measured speed,
with verification, is the limit of the reads, and the threads that copy have the lowest priority (`niceness`).

**KV** (`--kv`). An engine with all layers sharded changes its attention to and fro under load
(`rig.turns.kv_switches`), with 10, 50 and 90 % of its KV pages in use. A *pause* of a stream is its longest
gap over a switch minus its median gap.

    python -m benchmarks.switch --quick
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer

from benchmarks.rig.engine_ranks import Carried, Diaries, Window
from benchmarks.rig.processes import ROOT
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from benchmarks.rig.turns.copying_rank import CopyingJob, Done, Order
from benchmarks.rig.turns.figures import Excess, Gaps, Handed, excess, handed, least_steps
from benchmarks.rig.turns.kv_switches import (
    ARMS,
    FILLINGS,
    FULL_COURSE,
    HEADS,
    QUICK_COURSE,
    judge_kv,
    kv_switches,
)
from benchmarks.rig.turns.random_model import FEW_HEADS, Heads, write_model
from benchmarks.rig.turns.turning_engine import RANKS, turning_engine
from fleet.experts import ModelShape
from fleet.requests.handovers import MemoryAddress

SEQUENCES = 2
MIB = 1 << 20
PIECE = MIB
FULL = ModelShape(layers=4, experts=32, top_k=4, hidden=1024, expert_intermediate=512)
SMALL = ModelShape(layers=2, experts=16, top_k=4, hidden=1024, expert_intermediate=512)
LARGE = ModelShape(layers=2, experts=32, top_k=4, hidden=2048, expert_intermediate=1024)
"""under load: as in large models, a layer takes long enough that its bytes outweigh a handover's messages"""
VERIFIED, GLOO = 1.6, 3.0
"""limits of the ratios to a plain pull, and to gloo"""
BESIDE_SECONDS = 0.06
SHARE = 0.1
"""of the measured speed, at which layers turn under load"""
NICENESS = 19
"""of copying under load: a limited switch is in no hurry"""
P99 = 1.05
PATIENCE = 120.0
SETTLE_SECONDS = 0.5
_DIRECTIONS = {True: "to sharded", False: "to whole"}
Times = dict[bool, dict[str, list[float]]]
"""seconds of the slower rank, by direction (True: to sharded) and way, one per round"""


# Copies


class Copying:
    """Rank processes that turn layers over on orders."""

    def __init__(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        self._children = children

    def run(self, way: str, to_sharded: bool, *, check: bool = False) -> float:
        """Turn all layers over by one way; return the seconds of the slower rank."""
        began = time.monotonic() + 0.01
        self._send(msgspec.json.encode(Order(way, to_sharded, began, check)))
        return max(self._read(child, Done).ended for child in self._children) - began

    def introduce(self) -> None:
        """Pass on all addresses to all ranks, and wait until they are ready."""
        addresses = [self._read(child, MemoryAddress) for child in self._children]
        self._send(msgspec.json.encode(addresses))
        for child in self._children:
            self._read(child, Done)

    def _send(self, line: bytes) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(line + b"\n")
            child.stdin.flush()

    @staticmethod
    def _read(child: subprocess.Popen[bytes], kind: Any) -> Any:
        assert child.stdout is not None
        # Libraries of transfers write there, too.
        while not (line := child.stdout.readline()).startswith(b"{"):
            if not line:
                raise RuntimeError("a rank that copies has ended; see its standard error")
        return msgspec.json.decode(line, type=kind)


@contextlib.contextmanager
def copying(shape: ModelShape, backend: str) -> Iterator[Copying]:
    """Run the processes while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="switch-") as folder, contextlib.ExitStack() as stack:
        job = msgspec.json.encode(CopyingJob(shape, RANKS, PIECE, backend, folder)).decode()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        children = []
        for rank in range(RANKS):
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rig.turns.copying_rank", job, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environment,
            )
            stack.callback(_end, child)
            children.append(child)
        ranks = Copying(children)
        ranks.introduce()
        yield ranks


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        child.communicate(timeout=PATIENCE)  # closes its standard input, at whose end it ends
    child.kill()
    child.wait()


def copy_times(shape: ModelShape, backend: str, ways: Sequence[str], rounds: int) -> Times:
    """Measure all ways in every round, in rotating order, after one round whose bytes are compared."""
    found: Times = {to_sharded: {way: [] for way in ways} for to_sharded in _DIRECTIONS}
    with copying(shape, backend) as ranks:
        for number in range(rounds + 1):
            for to_sharded in _DIRECTIONS:
                turn = number % len(ways)
                for way in (*ways[turn:], *ways[:turn]):
                    if number:
                        found[to_sharded][way].append(ranks.run(way, to_sharded))
                    else:
                        ranks.run("damage", to_sharded)
                        ranks.run(way, to_sharded, check=True)
    return found


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> float:
    """Return the median over rounds of the ratio of two ways' seconds."""
    return median([a / b for a, b in zip(times[one], times[other], strict=True)])


def rank_bytes(shape: ModelShape) -> int:
    """Return the bytes that a rank gets when all layers turn over, its own included."""
    return shape.layers * shape.experts * shape.expert_bytes // RANKS


def judge_copies(report: Report, shape: ModelShape, shared: Times, nixl: Times) -> None:
    """Add rows and targets of the copies."""
    size = rank_bytes(shape)
    for name, times in (("shared memory", shared), ("NIXL", nixl)):
        for to_sharded, ways in times.items():
            for way, seconds in ways.items():
                report.add(
                    f"{_DIRECTIONS[to_sharded]}, {name}: {way}",
                    len(seconds),
                    1e3 * median(seconds),
                    1e3 * max(seconds),
                    size / median(seconds) / 1e9,
                    ratio(ways, way, "plain"),
                )
    again = max(abs(ratio(ways, "plain again", "plain") - 1) for ways in shared.values())
    report.notes.append(
        f"a rank gets {size / MIB:.0f} MiB when all layers turn over, half of it from itself, in pieces of at"
        f" most {PIECE // MIB} MiB; two plain pulls of one round differ by {100 * again:.1f} % (median)"
    )
    worst = max(shared, key=lambda to_sharded: ratio(shared[to_sharded], "verified", "plain"))
    report.targets.append(
        Target(
            f"bytes with verification over a plain pull, the worse direction ({_DIRECTIONS[worst]})",
            ratio(shared[worst], "verified", "plain"),
            VERIFIED,
            False,
        )
    )
    # Checksums are computed as bytes land, so that bytes are landed when most of them are verified.
    faster = min(ratio(ways, "gloo", "verified") for ways in shared.values())
    report.targets.append(Target("gloo over bytes with verification, the worse direction", faster, GLOO))


# Handovers


async def idle_switches(
    shape: ModelShape, checkpoint: Path, spare_layers: int, rounds: int
) -> dict[bool, list[Handed]]:
    """Switch an idle engine to and fro; return each switch by direction. The first pair is not counted."""
    carried: list[tuple[bool, Carried]] = []
    async with turning_engine(shape, checkpoint, {"piece_bytes": PIECE}, spare_layers=spare_layers) as rig:
        for _ in range(rounds + 1):
            for to_sharded in _DIRECTIONS:
                carried.append((to_sharded, await rig.switch(shape.layers, sharded=to_sharded)))
                await asyncio.sleep(SETTLE_SECONDS)
        diaries = await rig.ranks.diaries()
    return {
        direction: [handed(one, diaries) for to_sharded, one in carried[2:] if to_sharded == direction]
        for direction in _DIRECTIONS
    }


def judge_handovers(report: Report, found: Mapping[int, Mapping[bool, list[Handed]]]) -> None:
    """Add rows and the target of handovers."""
    worst = 0.0
    for spare_layers, by_direction in found.items():
        for to_sharded, switches in by_direction.items():
            beside = [one for found in switches for one in found.beside]
            worst = max(worst, median(beside))
            report.add(
                f"{_DIRECTIONS[to_sharded]}, room for {spare_layers} layers:"
                f" {len(switches[0].beside)} handovers",
                len(switches),
                1e3 * median([one.seconds for one in switches]),
                1e3 * max(one.seconds for one in switches),
                "",
                "",
            )
            report.notes.append(
                f"{_DIRECTIONS[to_sharded]}, room for {spare_layers} layers: a handover takes"
                f" {1e3 * median(beside):.1f} ms (median), {1e3 * max(beside):.1f} ms (longest) beside its"
                " bytes, from the record before it, or the request, to its own record"
            )
    report.targets.append(
        Target(
            "a handover beside its bytes, idle engine, worst median over directions and room",
            1e3 * worst,
            1e3 * BESIDE_SECONDS,
            False,
            " ms",
        )
    )


# Streaming


class Streamed(NamedTuple):
    """A run under load."""

    windows: dict[str, list[Window]]
    carried: list[Carried]
    """Switches in windows in which layers turn."""
    diaries: Diaries


async def stream(
    shape: ModelShape, checkpoint: Path, rounds: int, seconds: float, bytes_per_second: int
) -> Streamed:
    """Run windows of all kinds, in turns."""
    kinds = ("whole", "whole again", "turning", "sharded")
    windows: dict[str, list[Window]] = {kind: [] for kind in kinds}
    carried: list[Carried] = []
    transfer = {"bytes_per_second": bytes_per_second, "niceness": NICENESS}
    async with turning_engine(shape, checkpoint, transfer, sequences=SEQUENCES) as rig:
        await rig.switch(shape.layers, sharded=True)
        await rig.switch(shape.layers, sharded=False)
        for number in range(rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                sharded = bool(rig.asking.placement.sharded)
                if kind != "turning" and sharded != (kind == "sharded"):
                    await rig.switch(shape.layers, sharded=not sharded)
                await asyncio.sleep(SETTLE_SECONDS)
                began = time.monotonic()
                if kind == "turning":
                    while time.monotonic() < began + seconds:
                        sharded = bool(rig.asking.placement.sharded)
                        carried.append(await rig.switch(shape.layers, sharded=not sharded))
                else:
                    await asyncio.sleep(seconds)
                windows[kind].append(Window(began, time.monotonic()))
        return Streamed(windows, carried, await rig.ranks.diaries())


def judge_streaming(report: Report, run: Streamed, full: float, limit: int) -> None:
    """Add rows and targets of a run. full: seconds in which all layers' bytes are copied and compared at
    full speed. limit: bytes per second of a rank's reads."""
    gaps = Gaps.of(run.diaries, run.windows)
    for kind, found in gaps.by_kind.items():
        pooled = gaps.pooled(kind)
        report.add(
            f"between tokens, {kind}: {len(pooled)} gaps",
            len(found),
            1e3 * float(median(pooled.tolist())),
            1e3 * float(pooled.max()),
            "",
            gaps.p99(kind) / gaps.p99("whole", "whole again"),
        )
    statics = {"whole": ("whole", "whole again"), "sharded": ("sharded",)}
    slower = max(statics, key=lambda form: gaps.p99(*statics[form]))
    spread = abs(gaps.p99("whole again") / gaps.p99("whole") - 1)
    long = 2 * float(median(gaps.pooled(*statics[slower]).tolist()))
    with_, without = gaps.shares_above(long, "turning"), gaps.shares_above(long, *statics[slower])
    more: Excess = excess(with_, without)
    seconds = sum(one.end - one.begin for one in run.windows["turning"])
    speed = len(run.carried) * full / seconds
    report.notes.append(
        f"turning: {len(run.carried)} switches in {seconds:.0f} s, reads limited to {limit / 1e6:.0f} MB/s a"
        f" rank, {100 * speed:.1f} % of the full speed on average; p99"
        f" {1e3 * gaps.p99('turning'):.2f} ms; whole {1e3 * gaps.p99('whole'):.2f} and"
        f" {1e3 * gaps.p99('whole again'):.2f} ms (A/A: {100 * spread:.1f} %), sharded"
        f" {1e3 * gaps.p99('sharded'):.2f} ms"
    )
    report.notes.append(
        f"gaps over twice the median of {slower}: {100 * sum(with_) / len(with_):.3f} % when turning,"
        f" {100 * sum(without) / len(without):.3f} % without; standard error of the difference"
        f" {100 * more.error:.3f} %"
    )
    report.targets += [
        Target(
            "fewest steps of a rank during a handover under load",
            least_steps(run.diaries, run.carried),
            1,
            unit="",
        ),
        Target(
            f"gaps over twice the median of {slower}, turning minus static, less two standard errors",
            100 * more.beyond_two_errors,
            0.0,
            False,
            " %",
        ),
        Target(
            f"p99 between tokens, turning over {slower} (A/A spread of {100 * spread:.1f} % added)",
            gaps.p99("turning") / gaps.p99(*statics[slower]),
            P99 + spread,
            False,
        ),
    ]


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    only: str = typer.Option("", help="copies, handovers, streaming or kv; empty: all"),
    kv: bool = typer.Option(False, "--kv", help="the same as --only kv: switches of attention alone"),
    rounds: int = typer.Option(None, help="rounds of the copies"),
    stretches: int = typer.Option(None, help="stretches of five switches of attention, per filling"),
    seconds: float = typer.Option(None, help="seconds in which layers turn under load"),
    rate: int = typer.Option(
        None, help="transfer.bytes_per_second under load; default: for a tenth of the measured speed"
    ),
) -> None:
    """Measure switches of layout: bytes beside a plain pull and gloo, handovers, gaps between tokens."""
    report = Report(
        f"Switches of layout, {RANKS} ranks",
        ["what", "runs", "median ms", "longest ms", "GB/s a rank", "ratio"],
    )
    shape, only = SMALL if quick else FULL, "kv" if kv else only
    if only in ("", "copies"):
        ways = ("plain", "plain again", "landed", "verified", "gloo")
        shared = copy_times(shape, "shared", ways, rounds or (4 if quick else 20))
        nixl = copy_times(shape, "nixl", ("plain", "landed", "verified"), 2 if quick else 5)
        judge_copies(report, shape, shared, nixl)
    if only in ("", "handovers"):
        rooms = (1,) if quick else (1, 2, shape.layers)
        with random_model(shape) as checkpoint:
            switches = {
                room: asyncio.run(idle_switches(shape, checkpoint, room, 1 if quick else 4)) for room in rooms
            }
        judge_handovers(report, switches)
    if only in ("", "streaming"):
        shape, windows = (SMALL, 2) if quick else (LARGE, 6)
        times = copy_times(shape, "shared", ("verified",), 3)
        full = max(median(ways["verified"]) for ways in times.values())
        length = (seconds or (3.0 if quick else 60.0)) / windows
        with random_model(shape) as checkpoint:
            limit = rate or paced(shape, full)
            run = asyncio.run(stream(shape, checkpoint, windows, length, limit))
        judge_streaming(report, run, full, limit)
    if only in ("", "kv"):
        shape, course = (SMALL, QUICK_COURSE) if quick else (LARGE, FULL_COURSE)
        if stretches:
            course = course._replace(stretches=stretches)
        with random_model(shape, HEADS) as checkpoint:
            for filling in FILLINGS[-1:] if quick else FILLINGS:
                for arm, settings in ARMS.items():
                    found = asyncio.run(kv_switches(shape, checkpoint, filling, settings, course))
                    judge_kv(report, shape, arm, found)
    report.notes.append(f"load average {os.getloadavg()[0]:.1f}")
    report.finish(as_json=as_json, check=check)


@contextlib.contextmanager
def random_model(shape: ModelShape, heads: Heads = FEW_HEADS) -> Iterator[Path]:
    """Write a checkpoint; it is deleted with the context."""
    with tempfile.TemporaryDirectory(prefix="switch-model-") as folder:
        checkpoint = Path(folder) / "model"
        checkpoint.mkdir()
        yield write_model(checkpoint, shape, heads)


def paced(shape: ModelShape, full: float) -> int:
    """Return the limit of a rank's reads, in bytes per second, at which they and the copies within the rank
    move SHARE of what they move at full speed. full: seconds of a switch's bytes at full speed."""
    return int(SHARE * rank_bytes(shape) * (1 - 1 / RANKS) / full)


if __name__ == "__main__":
    typer.run(main)
