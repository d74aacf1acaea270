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
import statistics
import subprocess
import sys
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
    """Microseconds of processor time per token, kB per stream, tokens per second, and streams that did not
    arrive whole."""

    processor_us: float
    memory_kb: float
    rate: float
    lost: int
    error: str


CELLS = [
    Cell(door, streams, step_ms)
    for door in ("kv", "plain")
    for streams, step_ms in ((1, 20.0), (32, 25.0), (1000, 100.0), (10_000, 2000.0))
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

    async def until_over(self, streams: int) -> Counts:
        """Wait until every stream is over, at most a minute."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
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

    idle = spent()
    await asyncio.sleep(_IDLE_SECONDS)
    idle = (spent() - idle) / _IDLE_SECONDS
    memory = sum(resident_kb(router.pid) for router in routers)
    ports = [router.port for router in routers]
    async with clients(cell.streams, cell.tokens(seconds), ports) as calls:
        await calls.until_begun(cell.streams)
        before, used = await calls.counts(), spent()
        await asyncio.sleep(seconds)
        after, used = await calls.counts(), spent() - used
        memory = sum(resident_kb(router.pid) for router in routers) - memory
        found = await calls.until_over(cell.streams)
    arrived = max(after.tokens - before.tokens, 1)
    return Measured(
        1e6 * (used - idle * seconds) / arrived,
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


async def run_cell(cell: Cell, trees: Sequence[Path], seconds: float, rounds: int) -> list[list[Measured]]:
    """Run one cell in turns through the routers of all trees; results by tree."""
    results: list[list[Measured]] = [[] for _ in trees]
    count = math.ceil(cell.streams / _STREAMS_PER_ROUTER)
    for _ in range(rounds):
        for at, tree in enumerate(trees):
            async with contextlib.AsyncExitStack() as stack:
                routers = []
                for _ in range(count):
                    mock = await stack.enter_async_context(source(cell.step_ms))
                    if cell.door == "floor":
                        routers.append(await stack.enter_async_context(floor(mock)))
                        continue
                    entered = router_of(tree, cell.door, [mock], checkpoint_path(), token_frames=True)
                    routers.append(await stack.enter_async_context(entered))
                if cell.door != "floor":
                    for router in routers:
                        await _warm(router)
                results[at].append(await measure(routers, cell, seconds))
    return results


async def _warm(router: Started) -> None:
    """Stream two short answers: code is imported and caches are filled, and connections to ranks are open."""
    for _ in range(2):
        async with clients(4, 8, [router.port]) as calls:
            await calls.until_over(4)


async def run(
    cells: Sequence[Cell], against: str, seconds: float, rounds: int, report: Report
) -> dict[Cell, list[Measured]]:
    """Run all cells. Returns the results of the working tree."""
    found: dict[Cell, list[Measured]] = {}
    with contextlib.ExitStack() as stack:
        trees = [ROOT, *([stack.enter_context(worktree(against))] if against else [])]
        for cell in cells:
            results = await run_cell(cell, trees[:1] if cell.door == "floor" else trees, seconds, rounds)
            for name, of_tree in zip(("now", against), results, strict=False):
                report.add(f"{cell.door}, {name}", cell.streams, *_figures(of_tree))
            found[cell] = results[0]
    return found


def _figures(found: Sequence[Measured]) -> list[float | int]:
    return [
        statistics.median(one.processor_us for one in found),
        statistics.median(one.memory_kb for one in found),
        int(statistics.median(one.rate for one in found)),
        sum(one.lost for one in found),
    ]


def targets(found: dict[Cell, list[Measured]]) -> list[Target]:
    """Return the deciding figures."""
    made = []
    for cell, rounds in found.items():
        if cell.door == "floor":
            continue
        processor, memory, _, lost = _figures(rounds)
        name = f"{cell.door} door, {cell.streams} stream{'s in step' if cell.streams > 1 else ''}"
        if cell.streams in LIMITS:
            limit = LIMITS[cell.streams]
            made.append(Target(f"processor per token, {name}", processor, limit, at_least=False, unit=" us"))
        if cell.streams >= 1000:
            made.append(
                Target(f"memory per stream, {name}", memory, MEMORY_LIMIT, at_least=False, unit=" kB")
            )
        made.append(Target(f"streams lost, {name}", lost, 0, at_least=False, unit=""))
    return made


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
    columns = ["path", "streams", "CPU us/token", "kB/stream", "tokens/s", "lost"]
    report = Report("Streams: the router's cost of a token", columns)
    found = uvloop.run(run(cells, against, seconds or (3.0 if quick else 60.0), 1, report))
    errors = [one.error for rounds in found.values() for one in rounds if one.error]
    report.notes += [f"first error: {error}" for error in errors[:1]]
    report.targets = targets(found)
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
