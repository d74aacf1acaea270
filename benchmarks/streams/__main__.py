"""The cost of a streamed token: the router's processor time (user and system) and memory per stream.

Sources stream a token to every request at each step, so all streams are in step. Clients in another process
count what arrives over plain HTTP/1.1. Two paths: `kv` (ranks that take token ids) and `plain` (another
server's chat streams, passed through). The router's own background work, measured before without streams, is
subtracted. `floor` rows: the smallest relay on the same event loop, which passes bytes on and knows nothing
of HTTP beyond the head.

    python -m benchmarks.streams --quick
    python -m benchmarks.streams --against HEAD~20    # beside another commit's router, in turns
"""

import asyncio
import contextlib
import math
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer
import uvloop

from benchmarks.rig.processes import ROOT, Started, free_port, process
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.revision import Against, router_of, worktree
from benchmarks.streams.clients import Counts
from deploy.demo_model import checkpoint_path

_BEGIN_SECONDS = 1.0
_BEGUN_EACH_SECOND = 300
"""streams that certainly begin in a second"""
_IDLE_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_END_SECONDS = 60.0
_WARM_TOGETHER = 32
_SETTINGS = "[router]\nmax_requests_per_rank = 20000\n"
"""The only rank takes every stream."""
_STREAMS_PER_ROUTER = 6000
"""More need several router processes: a machine's limit of descriptors per process may be 20,000."""
MEMORY_LIMIT = 30.0
"""kB per stream"""
LIMITS = {1: 50.0, 32: 15.0}
"""microseconds per token, by the number of streams in step"""


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    door: str
    streams: int
    step_ms: float

    def tokens(self, seconds: float) -> int:
        """Return the tokens of each stream, so that none ends within a window of `seconds`."""
        begin = _BEGIN_SECONDS + 2 * self.streams / _BEGUN_EACH_SECOND
        return math.ceil(1000 * (begin + 1.2 * seconds) / self.step_ms)


@dataclass(frozen=True)
class Measured:
    """Microseconds of processor time per token beyond the idle router's, its milliseconds per second, kB per
    stream, tokens per second, and streams that did not arrive whole."""

    processor_us: float
    idle_ms: float
    memory_kb: float
    rate: float
    lost: int
    error: str


CELLS = [
    Cell(door, streams, step_ms)
    for door in ("kv", "plain")
    for streams, step_ms in ((1, 20.0), (32, 25.0), (1000, 100.0), (10_000, 1000.0))
]


class Clients:
    """The process of the clients."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    async def counts(self) -> Counts:
        """Return the present counts."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(b"\n")
        return msgspec.json.decode(await self._child.stdout.readline(), type=Counts)

    async def until_begun(self, streams: int) -> None:
        """Wait until every stream has its first token, or is broken."""
        while (found := await self.counts()).begun + found.broken < streams:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)

    async def until_over(self, streams: int, lasting: float = 0.0) -> Counts:
        """Wait until every stream is over, at most a minute longer than they last (seconds)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(lasting + _END_SECONDS):
                while (found := await self.counts()).whole + found.broken < streams:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)
        return await self.counts()


@contextlib.asynccontextmanager
async def clients(streams: int, tokens: int, ports: Sequence[int]) -> AsyncIterator[Clients]:
    """Run the clients in a process of their own."""
    arguments = [sys.executable, "-m", "benchmarks.streams.clients", str(streams), str(tokens)]
    child = await asyncio.create_subprocess_exec(
        *arguments, *map(str, ports), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        yield Clients(child)
    finally:
        child.kill()
        await child.wait()


def resident_kb(pid: int) -> int:
    """Return the memory of a process that no other process shares with it, in kB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


async def measure(routers: Sequence[Started], cell: Cell, seconds: float) -> Measured:
    """Run one cell. processor time: over `seconds`, while all streams are open."""

    def spent() -> float:
        return sum(router.processor_seconds() for router in routers)

    idle, idle_seconds = spent(), max(_IDLE_SECONDS, seconds / 2)
    await asyncio.sleep(idle_seconds)
    idle = (spent() - idle) / idle_seconds
    memory = sum(resident_kb(router.pid) for router in routers)
    ports = [router.port for router in routers]
    async with clients(cell.streams, cell.tokens(seconds), ports) as calls:
        await calls.until_begun(cell.streams)
        before, used = await calls.counts(), spent()
        await asyncio.sleep(seconds)
        after, used = await calls.counts(), spent() - used
        memory = sum(resident_kb(router.pid) for router in routers) - memory
        found = await calls.until_over(cell.streams, cell.tokens(seconds) * cell.step_ms / 1000)
    arrived = max(after.tokens - before.tokens, 1)
    return Measured(
        1e6 * (used - idle * seconds) / arrived,
        1e3 * idle,
        memory / cell.streams,
        arrived / seconds,
        cell.streams - found.whole,
        found.error,
    )


@contextlib.asynccontextmanager
async def source(step_ms: float) -> AsyncIterator[int]:
    """Run a source in a process of its own; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.streams.source", str(port), str(step_ms)]
    async with process(command, f"http://127.0.0.1:{port}/v1/models"):
        yield port


@contextlib.asynccontextmanager
async def floor(upstream: int) -> AsyncIterator[Started]:
    """Run the smallest relay in front of a source."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.streams.bare_relay", str(port), str(upstream)]
    async with process(command, f"http://127.0.0.1:{port}/v1/models") as pid:
        yield Started(port, pid)


async def run_cell(cell: Cell, trees: Sequence[Path], seconds: float, settings: Path) -> list[Measured]:
    """Run one cell through the routers of all trees, one after the other; results by tree. settings: the
    routers' configuration file.
    """
    results = []
    for tree in trees:
        async with contextlib.AsyncExitStack() as stack:
            routers = []
            for _ in range(math.ceil(cell.streams / _STREAMS_PER_ROUTER)):
                mock = await stack.enter_async_context(source(cell.step_ms))
                routers.append(await stack.enter_async_context(_relay(cell.door, tree, mock, settings)))
            for router in () if cell.door == "floor" else routers:
                await _warm(router, cell.streams // len(routers))
            results.append(await measure(routers, cell, seconds))
    return results


def _relay(
    door: str, tree: Path, mock: int, settings: Path
) -> contextlib.AbstractAsyncContextManager[Started]:
    """Return the process in front of a source: a tree's router, or the smallest relay."""
    if door == "floor":
        return floor(mock)
    options = ("--config", str(settings))
    return router_of(tree, door, [mock], checkpoint_path(), *options, token_frames=True)


async def _warm(router: Started, streams: int) -> None:
    """Make as many short requests as there will be streams, few at once: code is imported, connections to
    ranks are open, and what the router keeps of past requests (their decisions) is there.
    """
    for _ in range(max(2, math.ceil(streams / _WARM_TOGETHER))):
        async with clients(_WARM_TOGETHER, 1, [router.port]) as calls:
            await calls.until_over(_WARM_TOGETHER)


async def run(cells: Sequence[Cell], against: str, seconds: float, report: Report) -> dict[Cell, Measured]:
    """Run all cells. Returns the results of the working tree."""
    found: dict[Cell, Measured] = {}
    with contextlib.ExitStack() as stack:
        settings = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "router.toml"
        settings.write_text(_SETTINGS)
        trees = [ROOT, *([stack.enter_context(worktree(against))] if against else [])]
        for cell in cells:
            results = await run_cell(cell, trees[:1] if cell.door == "floor" else trees, seconds, settings)
            for name, one in zip(("now", against), results, strict=False):
                figures = one.processor_us, one.idle_ms, one.memory_kb, int(one.rate), one.lost
                report.add(f"{cell.door}, {name}", cell.streams, *figures)
            found[cell] = results[0]
    return found


def targets(found: dict[Cell, Measured]) -> list[Target]:
    """Return the deciding figures."""
    made = []
    for cell, one in found.items():
        name = f"{cell.door} door, {cell.streams} stream{'s in step' if cell.streams > 1 else ''}"
        if cell.door == "floor":
            continue
        if cell.streams in LIMITS:
            made.append(
                _at_most(f"processor per token, {name}", one.processor_us, LIMITS[cell.streams], " us")
            )
        if cell.streams >= 1000:
            made.append(_at_most(f"memory per stream, {name}", one.memory_kb, MEMORY_LIMIT, " kB"))
        made.append(_at_most(f"streams lost, {name}", one.lost, 0, ""))
    return made


def _at_most(name: str, value: float, limit: float, unit: str) -> Target:
    return Target(name, value, limit, at_least=False, unit=unit)


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    against: str = Against,
    only: str = typer.Option("", "--only", help="one path (kv, plain or floor)"),
    streams: int = typer.Option(0, "--streams", help="one number of streams; 0: all"),
    seconds: float = typer.Option(0.0, "--seconds", help="of each window; 0: 60, or 3 with --quick"),
) -> None:
    """Measure the router's processor time per streamed token and its memory per stream."""
    every = [*CELLS, *(Cell("floor", count, step) for count, step in ((1, 20.0), (32, 25.0)))]
    cells = [
        cell
        for cell in every
        if only in ("", cell.door) and streams in (0, cell.streams) and (cell.streams < 1000 or not quick)
    ]
    columns = ["path", "streams", "CPU us/token", "idle CPU ms/s", "kB/stream", "tokens/s", "lost"]
    report = Report("Streams: the router's cost of a token", columns)
    found = uvloop.run(run(cells, against, seconds or (3.0 if quick else 60.0), report))
    errors = [one.error for one in found.values() if one.error]
    report.notes += [f"first error: {error}" for error in errors[:1]]
    report.targets = targets(found)
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
