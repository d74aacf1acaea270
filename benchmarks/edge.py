"""Router overhead: latency and req/s in front of trivial mock engines, against a mock directly, in one run.

Two paths: `kv` (NATS, ranks that take token ids: the router renders, tokenises, hashes, decides and rewrites
chunks) and `plain` (static backends: bodies forwarded as received). Client, router and mocks share this
machine's cores. Every cell alternates direct and routed rounds and reports medians. Tokenising is measured in
this process with the same tokenizer and prompt.

    python -m benchmarks.edge --quick python -m benchmarks.edge --against HEAD~20    # the same cells through
    another commit's router instead of a mock directly
"""

import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import typer
import uvloop
from tokenizers import Tokenizer

from benchmarks.rig.load_client import SETTINGS, Sample, call_all
from benchmarks.rig.mock_fleet import MODEL, mock_fleet
from benchmarks.rig.processes import ROOT, mock_engines, nats, roost_router
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.revision import (
    COLUMNS,
    Against,
    Compared,
    add_compared,
    compare,
    no_slower,
    router_of,
    worktree,
)
from deploy.demo_model import checkpoint_path

MOCKS = 4
CONNECTIONS = (1, 16, 64)


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    door: str
    tracing: bool
    words: int
    stream: bool
    connections: int


@dataclass(frozen=True)
class Measured:
    """Medians over rounds: added p50 (seconds; relative to the mock directly, round by round), p50s, and
    requests per second."""

    added: float
    direct: float
    routed: float
    routed_p99: float
    rate: float
    direct_rate: float


def body(cell: Cell, number: int) -> bytes:
    """Return a chat request of the cell's number of words. Requests differ only at their end, so no cache of
    whole prompts can answer them."""
    text = " ".join([*(f"word{at % 97}" for at in range(cell.words - 1)), f"number{number}"])
    return msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "stream": cell.stream,
        }
    )


async def measure(direct: int, routed: int, cell: Cell, rounds: int, requests: int) -> Measured:
    """Alternate rounds against the mock at port `direct` and the router at port `routed`."""
    pairs: list[tuple[tuple[list[Sample], float], tuple[list[Sample], float]]] = []
    for number in range(rounds + 1):
        asks = [body(cell, at) for at in range(number * requests, (number + 1) * requests)]
        one = await call_all(direct, "/v1/chat/completions", asks, connections=cell.connections)
        two = await call_all(routed, "/v1/chat/completions", asks, connections=cell.connections)
        pairs.append((one, two))
    pairs = pairs[1:]  # the first round warms connections and caches
    middle = [
        (statistics.median(s.whole for s in one[0]), statistics.median(s.whole for s in two[0]))
        for one, two in pairs
    ]
    tail = [sorted(s.whole for s in two[0])[int(0.99 * len(two[0]))] for _, two in pairs]
    return Measured(
        added=statistics.median(b - a for a, b in middle),
        direct=statistics.median(a for a, _ in middle),
        routed=statistics.median(b for _, b in middle),
        routed_p99=statistics.median(tail),
        rate=statistics.median(len(two[0]) / two[1] for _, two in pairs),
        direct_rate=statistics.median(len(one[0]) / one[1] for one, _ in pairs),
    )


def tokenising_seconds(words: int) -> float:
    """Return the median time to encode a prompt of `words` words with the router's tokenizer."""
    tokenizer = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    text = msgspec.json.decode(body(Cell("kv", False, words, False, 1), 0))["messages"][0]["content"]
    times = []
    for _ in range(200):
        start = time.perf_counter()
        list(tokenizer.encode(text).ids)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cells(quick: bool) -> list[Cell]:
    """Return every cell; quick: only the most informative ones at concurrency 1 and 16."""
    every = [
        Cell(door, tracing, words, stream, connections)
        for door in ("kv", "plain")
        for tracing in (False, True)
        for words in (20, 200)
        for stream in (False, True)
        for connections in CONNECTIONS
    ]
    if not quick:
        return every
    return [
        cell
        for cell in every
        if cell.connections < 64 and not (cell.tracing and (cell.stream or cell.door == "plain"))
    ]


@contextlib.asynccontextmanager
async def router(door: str, tracing: bool, nats_url: str, mocks: list[int]) -> AsyncIterator[int]:
    """The real `roost router` command on a free port."""
    arguments = (
        [word for mock in mocks for word in ("--backend", f"http://127.0.0.1:{mock}")]
        if door == "plain"
        else ["--nats", nats_url]
    )
    with tempfile.TemporaryDirectory() as folder:
        async with roost_router(
            *arguments, *(["--spans", f"{folder}/spans.jsonl"] if tracing else [])
        ) as port:
            yield port


async def run(quick: bool, report: Report) -> dict[Cell, Measured]:
    rounds, requests = (3, 200) if quick else (3, 500)
    results: dict[Cell, Measured] = {}
    async with (
        mock_engines(MOCKS) as mocks,
        nats() as nats_url,
        mock_fleet(nats_url, mocks, checkpoint_path()),
    ):
        for door, tracing in (("kv", False), ("kv", True), ("plain", False), ("plain", True)):
            chosen = [cell for cell in cells(quick) if (cell.door, cell.tracing) == (door, tracing)]
            if not chosen:
                continue
            async with router(door, tracing, nats_url, mocks) as port:
                for cell in chosen:
                    found = results[cell] = await measure(
                        mocks[0], port, cell, rounds, requests * min(cell.connections, 4)
                    )
                    report.add(*_row(cell, found))
    return results


async def run_against(revision: str, quick: bool, report: Report) -> dict[str, list[Compared]]:
    """Run every cell without tracing through this tree's router and another commit's, alternating; by
    path."""
    rounds, requests = (5, 150) if quick else (9, 400)
    results: dict[str, list[Compared]] = defaultdict(list)
    model = checkpoint_path()
    with worktree(revision) as tree:
        for door in ("kv", "plain"):
            async with (
                mock_engines(MOCKS) as mocks,
                router_of(ROOT, door, mocks, model) as now,
                router_of(tree, door, mocks, model) as before,
            ):
                for cell in cells(quick):
                    if cell.door != door or cell.tracing:
                        continue
                    count = requests * min(cell.connections, 4)
                    asks = [
                        [body(cell, at) for at in range(number * count, (number + 1) * count)]
                        for number in range(rounds + 1)
                    ]
                    found = await compare(now, before, asks, connections=cell.connections)
                    results[door].append(found)
                    add_compared(report, _name(cell), cell.connections, found)
    return results


def _name(cell: Cell) -> str:
    return (
        f"{cell.door}{' traced' if cell.tracing else ''}, {cell.words}"
        f" words{', stream' if cell.stream else ''}"
    )


def _row(cell: Cell, found: Measured) -> list[str | float | int]:
    name = _name(cell)
    return [
        name,
        cell.connections,
        1e3 * found.direct,
        1e3 * found.routed,
        1e3 * found.added,
        1e3 * found.routed_p99,
        int(found.direct_rate),
        int(found.rate),
    ]


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check, against: str = Against) -> None:
    """Measure the added latency and req/s of `roost router` in front of trivial mock engines."""
    if against:
        report = Report(f"The edge: the working tree's router beside {against}'s", COLUMNS)
        report.notes.append(f"client: {SETTINGS}; rounds in turns")
        report.targets = [
            target
            for door, found in uvloop.run(run_against(against, quick, report)).items()
            for target in no_slower(door, found)
        ]
        report.finish(as_json=as_json, check=check)
        return
    columns = [
        "case",
        "conc",
        "direct p50 ms",
        "routed p50 ms",
        "added p50 ms",
        "routed p99 ms",
        "direct req/s",
        "routed req/s",
    ]
    report = Report("The edge: router in front of mock engines", columns)
    results = uvloop.run(run(quick, report))
    tokenising = 1e3 * tokenising_seconds(200)
    report.notes.append(
        f"tokenising 200 words takes {tokenising:.3f} ms in this process; 8 output tokens; client: {SETTINGS}"
    )
    for words, limit in ((20, 0.8), (200, 0.5 + tokenising)):
        found = results[Cell("kv", False, words, False, 1)]
        report.targets.append(
            Target(
                f"added p50 at concurrency 1, {words} words, kv door",
                1e3 * found.added,
                round(limit, 3),
                at_least=False,
                unit=" ms",
            )
        )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
