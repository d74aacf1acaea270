"""Another commit of this repository beside the working tree, so that both are measured in one run.

The commit is checked out into a temporary git worktree. Its routers and its mock fleet run as processes from
there, with this environment's libraries: each side uses its own messages, so changes of the bus do not
matter. Its inner loops are compiled as ours are.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from benchmarks.rig.load_client import call_all
from benchmarks.rig.processes import ROOT, Started, nats, process, started_router
from benchmarks.rig.report import Report, Target, percentile

Against = typer.Option(
    "",
    "--against",
    metavar="REV",
    help="compare with this commit's router in the same run, instead of with other systems",
)
TOLERANCE = 0.05
"""Tolerated slowdown of the working tree: medians of paired rounds differ by that much on shared machines."""
_PATH = "/v1/chat/completions"
_FLEET = """
import asyncio, inspect, sys
from pathlib import Path
from benchmarks.rig.mock_fleet import mock_fleet

async def main(url, folder, frames, *ports):
    knows_frames = "token_frames" in inspect.signature(mock_fleet).parameters
    more = {"token_frames": True} if frames and knows_frames else {}
    async with mock_fleet(url, [int(port) for port in ports], Path(folder), **more):
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""
"""Program of a mock fleet; in a worktree it imports that commit's code."""


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out a commit into a temporary folder, removed at the end, and compile its inner loops. Raises
    typer.BadParameter if git fails."""
    with tempfile.TemporaryDirectory() as parent:
        tree = Path(parent) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), revision)
        try:
            _compile(tree, revision)
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _compile(tree: Path, revision: str) -> None:
    """Compile the inner loops of a commit that has any; say so if that is not possible."""
    if not (tree / "hatch_build.py").exists():
        return
    command = [sys.executable, "hatch_build.py"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{revision} runs in its Python form: {done.stderr.strip()}", file=sys.stderr)


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise typer.BadParameter(
            f"git {arguments[0]} {arguments[1]} failed: {done.stderr.strip()}", param_hint="--against"
        )


@contextlib.asynccontextmanager
async def router_of(
    tree: Path, door: str, mocks: Sequence[int], model: Path, *options: str, token_frames: bool = False
) -> AsyncIterator[Started]:
    """Run the `roost router` of a tree in front of these mock engines, on its path `plain` or `kv`.

    token_frames: the mocks declare that they send token frames, if the tree knows them.
    """
    async with contextlib.AsyncExitStack() as stack:
        if door == "plain":
            arguments = [word for mock in mocks for word in ("--backend", f"http://127.0.0.1:{mock}")]
        else:
            url = await stack.enter_async_context(nats())
            frames = "frames" if token_frames else ""
            fleet = [sys.executable, "-c", _FLEET, url, str(model), frames, *map(str, mocks)]
            await stack.enter_async_context(process(fleet, None, tree=tree))
            arguments = ["--nats", url]
        yield await stack.enter_async_context(started_router(*arguments, *options, tree=tree))


@dataclass(frozen=True)
class Round:
    """One side, once. Seconds; requests per second; seconds of the router's processor time per request."""

    p50: float
    p99: float
    rate: float
    processor: float


@dataclass(frozen=True)
class Compared:
    """One case on both sides, round by round; the sides alternate in going first."""

    now: list[Round]
    before: list[Round]

    @property
    def rate_ratio(self) -> float:
        """Return the working tree's requests per second over the other commit's, median of the rounds."""
        return statistics.median(one.rate / two.rate for one, two in zip(self.now, self.before, strict=True))

    @property
    def processor_ratio(self) -> float:
        """Return the working tree's processor time per request over the other commit's, median of the rounds.
        It is less sensitive to other processes than the rate."""
        return statistics.median(
            one.processor / two.processor for one, two in zip(self.now, self.before, strict=True)
        )


async def compare(
    now: Started, before: Started, bodies: Sequence[Sequence[bytes]], *, connections: int
) -> Compared:
    """Send each round's bodies to both, alternating. The first round only warms connections and caches."""
    found: dict[Started, list[Round]] = {now: [], before: []}
    for number, asks in enumerate(bodies):
        for router in (now, before) if number % 2 else (before, now):
            spent = router.processor_seconds()
            samples, wall = await call_all(router.port, _PATH, asks, connections=connections)
            spent = (router.processor_seconds() - spent) / len(samples)
            whole = [sample.whole for sample in samples]
            found[router].append(
                Round(statistics.median(whole), percentile(whole, 0.99), len(whole) / wall, spent)
            )
    return Compared(found[now][1:], found[before][1:])


COLUMNS = [
    *(
        "case",
        "conc",
        "before p50 ms",
        "now p50 ms",
        "before p99 ms",
        "now p99 ms",
        "before req/s",
        "now req/s",
        "now/before",
    ),
    *("before CPU us/req", "now CPU us/req", "CPU now/before"),
]


def add_compared(report: Report, case: str, connections: int, found: Compared) -> None:
    """Add a row of medians."""
    both = found.before, found.now
    report.add(
        case,
        connections,
        *(1e3 * statistics.median(one.p50 for one in side) for side in both),
        *(1e3 * statistics.median(one.p99 for one in side) for side in both),
        *(int(statistics.median(one.rate for one in side)) for side in both),
        found.rate_ratio,
        *(int(1e6 * statistics.median(one.processor for one in side)) for side in both),
        found.processor_ratio,
    )


def no_slower(door: str, found: Sequence[Compared]) -> list[Target]:
    """Return the deciding ratios of one path: medians over its cases."""
    rate = statistics.median(one.rate_ratio for one in found)
    processor = statistics.median(one.processor_ratio for one in found)
    of = f"of the working tree over the other commit, {door} door"
    return [
        Target(f"req/s {of}", rate, 1.0 - TOLERANCE),
        Target(f"router's processor time per request {of}", processor, 1.0 + TOLERANCE, at_least=False),
    ]
