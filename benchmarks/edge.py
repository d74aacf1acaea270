"""What the router adds: latency and req/s in front of trivial mock engines, against a mock directly, in one run.

Two doors: `kv` (NATS, ranks that take token ids: the router renders, tokenises, hashes, decides and rewrites chunks) and `plain`
(foreign servers by URL: bodies forwarded as received). Client, router and mocks share this machine's cores; every cell alternates
direct and routed rounds and reports medians. Tokenising is measured in this process with the same tokenizer and prompt.

    python -m benchmarks.edge --quick
"""

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer
import uvloop
from tokenizers import Tokenizer

from benchmarks.rig.load_client import Sample, closed_loop
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from bus.nats import NatsBus
from bus.subjects import Subjects
from deploy.demo_model import checkpoint_path
from engine_adapter.rank.text import CheckpointTokenizer
from fleet.events import Capabilities, EngineHeartbeat, EngineJoined

MOCKS = 4
MODEL = "mock"
BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[1]
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
    """Medians over rounds: added p50 (seconds; over the mock directly, round by round), p50s, and requests per second."""

    added: float
    direct: float
    routed: float
    routed_p99: float
    rate: float
    direct_rate: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def body(cell: Cell) -> bytes:
    """A chat request of so many words, about a quarter of them like in everybody's request."""
    text = " ".join(f"word{at % 97}" for at in range(cell.words))
    return msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": cell.stream})


@contextlib.asynccontextmanager
async def process(arguments: list[str], ready: str) -> AsyncIterator[None]:
    """A child that answers `ready` (a URL); ended with the context. The event loop goes on meanwhile: mocks must keep their hearts beating."""
    child = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        await asyncio.to_thread(_await_url, ready, child)
        yield
    finally:
        if child.returncode is None:
            child.terminate()
        await asyncio.wait_for(child.wait(), 10)


def _await_url(url: str, child: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if child.returncode is not None:
            raise RuntimeError(f"the process behind {url} ended with {child.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer within 30 s")


@contextlib.asynccontextmanager
async def mock_fleet(nats_url: str, ports: list[int], subjects: Subjects) -> AsyncIterator[None]:
    """Announce each mock as an engine of one rank that takes token ids, and keep its heart beating."""
    bus = await NatsBus.connect(nats_url, subjects)
    digest = await bus.put_blob(CheckpointTokenizer(checkpoint_path()).archive)
    joined = [_joined(f"mock{at}", port, digest) for at, port in enumerate(ports)]
    for event in joined:
        await bus.record(subjects.membership(event.engine), event)
    beating = asyncio.create_task(_beat(bus, subjects, joined), name="heartbeats of the mock engines")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await bus.close()


def _joined(name: str, port: int, digest: str) -> EngineJoined:
    return EngineJoined(
        engine=name,
        worker_id=port,
        model=MODEL,
        node="bench",
        urls=(f"http://127.0.0.1:{port}",),
        block_size=16,
        kv_blocks=65536,
        max_context=65536,
        max_batch_tokens=8192,
        tokenizer=digest,
        capabilities=Capabilities(load=False, experts=False),
    )


async def _beat(bus: NatsBus, subjects: Subjects, engines: list[EngineJoined]) -> None:
    publisher = bus.publisher(subjects.heartbeats)
    while True:
        for engine in engines:
            await publisher.publish(EngineHeartbeat(engine=engine.engine, worker_id=engine.worker_id, epoch=0))
        await asyncio.sleep(1)


async def measure(direct: int, routed: int, cell: Cell, rounds: int, requests: int) -> Measured:
    """Alternate rounds against the mock at port `direct` and the router at port `routed`."""
    content = body(cell)
    pairs: list[tuple[tuple[list[Sample], float], tuple[list[Sample], float]]] = []
    for _ in range(rounds + 1):
        one = await closed_loop(direct, "/v1/chat/completions", content, connections=cell.connections, requests=requests)
        two = await closed_loop(routed, "/v1/chat/completions", content, connections=cell.connections, requests=requests)
        pairs.append((one, two))
    pairs = pairs[1:]  # the first round warms connections and caches
    middle = [(statistics.median(s.whole for s in one[0]), statistics.median(s.whole for s in two[0])) for one, two in pairs]
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
    """Median time of encoding the prompt of so many words with the tokenizer that the router uses."""
    tokenizer = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    text = msgspec.json.decode(body(Cell("kv", False, words, False, 1)))["messages"][0]["content"]
    times = []
    for _ in range(200):
        start = time.perf_counter()
        list(tokenizer.encode(text).ids)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cells(quick: bool) -> list[Cell]:
    """Every cell; quickly only those at concurrency 1 and 16 that say most."""
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
    return [cell for cell in every if cell.connections < 64 and not (cell.tracing and (cell.stream or cell.door == "plain"))]


@contextlib.asynccontextmanager
async def router(door: str, tracing: bool, nats_url: str, mocks: list[int]) -> AsyncIterator[int]:
    """The real `roost router` command on a free port."""
    port = free_port()
    arguments = [str(BIN / "roost"), "router", "--port", str(port)]
    arguments += [word for mock in mocks for word in ("--backend", f"http://127.0.0.1:{mock}")] if door == "plain" else ["--nats", nats_url]
    with tempfile.TemporaryDirectory() as folder:
        if tracing:
            arguments += ["--spans", f"{folder}/spans.jsonl"]
        async with process(arguments, f"http://127.0.0.1:{port}/ready"):
            yield port


async def run(quick: bool, report: Report) -> dict[Cell, Measured]:
    rounds, requests = (3, 200) if quick else (3, 500)
    results: dict[Cell, Measured] = {}
    subjects = Subjects()
    mocks, nats_port = [free_port() for _ in range(MOCKS)], free_port()
    nats_url = f"nats://127.0.0.1:{nats_port}"
    async with contextlib.AsyncExitStack() as stack:
        for port in mocks:
            await stack.enter_async_context(process([sys.executable, "-m", "benchmarks.rig.mock_engine", str(port)], f"http://127.0.0.1:{port}/v1/models"))
        store, health = stack.enter_context(tempfile.TemporaryDirectory()), free_port()
        server = [str(BIN / "nats-server"), "-a", "127.0.0.1", "-p", str(nats_port), "-m", str(health), "-js", "-sd", store]
        await stack.enter_async_context(process(server, f"http://127.0.0.1:{health}/healthz"))
        await stack.enter_async_context(mock_fleet(nats_url, mocks, subjects))
        for door, tracing in (("kv", False), ("kv", True), ("plain", False), ("plain", True)):
            chosen = [cell for cell in cells(quick) if (cell.door, cell.tracing) == (door, tracing)]
            if not chosen:
                continue
            async with router(door, tracing, nats_url, mocks) as port:
                for cell in chosen:
                    found = results[cell] = await measure(mocks[0], port, cell, rounds, requests * min(cell.connections, 4))
                    report.add(*_row(cell, found))
    return results


def _row(cell: Cell, found: Measured) -> list[str | float | int]:
    name = f"{cell.door}{' traced' if cell.tracing else ''}, {cell.words} words{', stream' if cell.stream else ''}"
    return [name, cell.connections, 1e3 * found.direct, 1e3 * found.routed, 1e3 * found.added, 1e3 * found.routed_p99, int(found.direct_rate), int(found.rate)]


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Added latency and req/s of `roost router` in front of trivial mock engines."""
    columns = ["case", "conc", "direct p50 ms", "routed p50 ms", "added p50 ms", "routed p99 ms", "direct req/s", "routed req/s"]
    report = Report("The edge: router in front of mock engines", columns)
    results = uvloop.run(run(quick, report))
    tokenising = 1e3 * tokenising_seconds(200)
    report.notes.append(f"tokenising 200 words takes {tokenising:.3f} ms in this process; 8 output tokens; client: keep-alive, quick ACKs")
    for words, limit in ((20, 0.8), (200, 0.5 + tokenising)):
        found = results[Cell("kv", False, words, False, 1)]
        report.targets.append(Target(f"added p50 at concurrency 1, {words} words, kv door", 1e3 * found.added, round(limit, 3), at_least=False, unit=" ms"))
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
