"""Roost compared with other routers: added latency and requests per second, same client, same prompts, same
mock engines, one run.

`text`: Roost with static backends, cache-aware by text blocks, without tokenising; its counterpart is
SGLang's router (Rust), which does the same. `kv`: Roost over NATS with token-id ranks: renders, tokenises,
hashes, matches, prices, books, rewrites every chunk; its counterpart is Dynamo's frontend in KV mode, whose
figures include its own mocker (four workers), the only engine available to it here. Client, routers and
engines share this machine's cores; client and engines are compiled, and their part is printed. The peers run
a thread per core; Roost is compared with two processes on one port where several connections are open (the
figure of one process is reported too). `floor` is the smallest pass-through in Python on Roost's event loop.
Every cell is measured in alternating rounds; medians are shown.

    python -m benchmarks.peers --quick    # installs the peers first if they are missing
    python -m benchmarks.peers --against HEAD~20    # another commit's router in the peers' place
"""

import contextlib
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
import uvloop
from tokenizers import Tokenizer

from benchmarks.rig import peer_environment
from benchmarks.rig.chat_bodies import (
    GROUPS,
    OUTPUT_TOKENS,
    bodies,
    common_words,
    shared_half,
    sources,
    write_model,
)
from benchmarks.rig.load_client import SETTINGS
from benchmarks.rig.mock_fleet import MODEL, mock_fleet, tell_held
from benchmarks.rig.peer_environment import Peers
from benchmarks.rig.processes import ROOT, Started, mock_engines, nats, started_router
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, percentile
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
from benchmarks.rig.wire import routers
from benchmarks.rig.wire.compiled import Wire, built
from benchmarks.rig.wire.routers import Running, Start, processor_seconds

MOCKS = 4
WORDS = 200
PATH = "/v1/chat/completions"
DIRECT, SMG_CACHE, SMG_ROUND, DYNAMO = "direct", "smg cache_aware", "smg round_robin", "dynamo kv + mocker"
TEXT, TEXT_2, KV, KV_2, FLOOR = "roost text", "roost text x2", "roost kv", "roost kv x2", "floor"
SYSTEMS = (DIRECT, FLOOR, TEXT, TEXT_2, SMG_CACHE, SMG_ROUND, KV, KV_2, DYNAMO)
_MOST_RATE = 16_000
"""Prepared requests per second; a round that uses all of them is shorter."""
PROCESSES = os.cpu_count() or 1
_WARMING_SECONDS = 0.7
"""warm-up of each system before the first round: tokenizers cache words, routers cache connections"""

Install = typer.Option(True, help="install missing peers into .venv-peers first (about 200 MB, a minute)")


@dataclass(frozen=True)
class Cell:
    """One load pattern."""

    connections: int
    stream: bool
    in_turns: bool = False

    @property
    def name(self) -> str:
        return f"c{self.connections}{' stream' if self.stream else ''}{' in turns' if self.in_turns else ''}"


@dataclass(frozen=True)
class Round:
    """One system in one cell, once. Seconds; requests per second; seconds of processor time per request."""

    p50: float
    p99: float
    first_p50: float
    rate: float
    router: float
    engines: float
    client: float


Results = dict[tuple[str, Cell], list[Round]]
"""Rounds by system and cell."""
CELLS = (Cell(1, False), Cell(1, True), Cell(16, False), Cell(16, True))
_WARMING = Cell(16, False)
IN_TURNS = (Cell(1, False, True), Cell(16, False, True))
"""The shared half is a system message, the case for Roost's reuse of token ids by message. Only where prompts
are tokenised."""


@dataclass(frozen=True)
class Rig:
    """Running parts: the compiled client, the processes of the engines, and the systems by name."""

    wire: Wire
    engines: list[Started]
    systems: dict[str, Running]

    async def call(self, name: str, cell: Cell, asks: list[bytes], seconds: float) -> Round:
        """Send these requests to a system for so long."""
        system = self.systems[name]
        engines = [engine.pid for engine in self.engines] if system.engines is None else [system.engines]
        router, served = system.processor_seconds(), sum(map(processor_seconds, engines))
        load = await self.wire.call_all(
            system.port, PATH, asks, connections=cell.connections, seconds=seconds
        )
        whole, answers = [sample.whole for sample in load.samples], len(load.samples)
        return Round(
            statistics.median(whole),
            percentile(whole, 0.99),
            statistics.median(sample.first for sample in load.samples),
            answers / load.wall,
            0.0 if name == DIRECT else (system.processor_seconds() - router) / answers,
            (sum(map(processor_seconds, engines)) - served) / answers,
            load.processor / answers,
        )


@contextlib.asynccontextmanager
async def rig(peers: Peers, model: Path, words: list[str], missing: dict[str, str]) -> AsyncIterator[Rig]:
    """Start every available system. Unavailable ones are noted in `missing`."""
    async with contextlib.AsyncExitStack() as stack:
        wire = stack.enter_context(built())
        engines = await stack.enter_async_context(wire.mock_engines(MOCKS))
        mocks = [engine.port for engine in engines]
        urls = [f"http://127.0.0.1:{port}" for port in mocks]
        backends = [word for url in urls for word in ("--backend", url)]
        found = {
            DIRECT: Running(*engines[0]),
            FLOOR: await stack.enter_async_context(routers.pass_through(mocks)),
        }
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        for text, kv, options in ((TEXT, KV, ()), (TEXT_2, KV_2, ("--processes", str(PROCESSES)))):
            found[text] = Running(*await stack.enter_async_context(started_router(*backends, *options)))
            # a bus each: routers on one bus tell each other of every booking
            bus_url = await stack.enter_async_context(nats())
            bus = await stack.enter_async_context(mock_fleet(bus_url, mocks, model))
            router = started_router("--nats", bus_url, *options)
            found[kv] = Running(*await stack.enter_async_context(router))
            for at, port in enumerate(mocks):
                held = [_held(tokenizer, words, group) for group in range(at, GROUPS, MOCKS)]
                await tell_held(bus, port, held)
        for name, start in _peers(peers, model, urls).items():
            peer = await routers.started(stack, start)
            if isinstance(peer, str):
                missing[name] = peer
            else:
                found[name] = peer
        yield Rig(wire, engines, found)


def _peers(peers: Peers, model: Path, urls: list[str]) -> dict[str, Start]:
    """Return the start command of each installed peer."""
    starts: dict[str, Start] = {}
    if peers.smg is not None:
        starts[SMG_CACHE] = partial(routers.smg, peers.smg, "cache_aware", urls)
        starts[SMG_ROUND] = partial(routers.smg, peers.smg, "round_robin", urls)
    if peers.dynamo is not None:
        starts[DYNAMO] = partial(routers.dynamo, peers.dynamo, model, MOCKS)
    return starts


def _held(tokenizer: Tokenizer, words: list[str], group: int) -> list[int]:
    ids: list[int] = tokenizer.encode(
        f"<|im_start|>user\n{shared_half(words, group, WORDS)} ", add_special_tokens=False
    ).ids
    return ids


async def measure(found: Rig, words: list[str], *, rounds: int, seconds: float) -> Results:
    """Measure every system in every cell, alternating, after a warm-up of each."""
    results: Results = defaultdict(list)

    def asks(cell: Cell, seconds: float, seed: str) -> list[bytes]:
        number = int(_MOST_RATE * seconds)
        return bodies(
            MODEL, words, number, count=WORDS, stream=cell.stream, seed=seed, in_turns=cell.in_turns
        )

    for name in found.systems:
        warming = asks(_WARMING, _WARMING_SECONDS, f"warming {name}")
        await found.call(name, _WARMING, warming, _WARMING_SECONDS)
    for cell in (*CELLS, *IN_TURNS):
        asked = [name for name in SYSTEMS if name in found.systems and name in _worth_asking(cell)]
        for number in range(rounds):
            made = asks(cell, seconds, f"{cell.name} {number}")
            for name in asked[number % len(asked) :] + asked[: number % len(asked)]:
                results[name, cell].append(await found.call(name, cell, made, seconds))
    return results


def _worth_asking(cell: Cell) -> tuple[str, ...]:
    """Return the systems that a cell can distinguish: several processes only with several connections, turns
    only where prompts are tokenised."""
    several = (TEXT_2, KV_2) if cell.connections > 1 else ()
    return (
        (DIRECT, KV, DYNAMO, *several[1:])
        if cell.in_turns
        else (DIRECT, FLOOR, TEXT, SMG_CACHE, SMG_ROUND, KV, DYNAMO, *several)
    )


def add_rows(report: Report, results: Results) -> None:
    """Add medians over rounds; added latency is relative to the mock directly, round by round."""
    for cell in (*CELLS, *IN_TURNS):
        for name in SYSTEMS:
            rounds = results.get((name, cell))
            if rounds:
                added = statistics.median(
                    one.p50 - direct.p50 for one, direct in zip(rounds, results[DIRECT, cell], strict=True)
                )
                middle = [
                    1e3 * statistics.median(one.p50 for one in rounds),
                    1e3 * added,
                    1e3 * statistics.median(one.p99 for one in rounds),
                ]
                rates = sorted(int(one.rate) for one in rounds)
                report.add(
                    cell.name,
                    name,
                    *middle,
                    1e3 * statistics.median(one.first_p50 for one in rounds),
                    int(statistics.median(rates)),
                    f"{rates[0]}-{rates[-1]}",
                    *(
                        int(1e6 * statistics.median(part))
                        for part in zip(
                            *((one.router, one.engines, one.client) for one in rounds), strict=True
                        )
                    ),
                )


def ratio(results: Results, ours: str, theirs: str, cell: Cell) -> float | None:
    """Return Roost's requests per second over the peer's, the median of adjacent rounds. None if one was not
    measured."""
    return _median(results, ours, theirs, cell, lambda our, their: our.rate / their.rate)


def processor_ratio(results: Results, ours: str, theirs: str, cell: Cell) -> float | None:
    """Return the peer's processor time per request over Roost's: what the ratio of requests per second would
    be if client and engines cost nothing and every core were busy."""
    return _median(results, ours, theirs, cell, lambda our, their: their.router / our.router)


def _median(
    results: Results, ours: str, theirs: str, cell: Cell, of: Callable[[Round, Round], float]
) -> float | None:
    if (ours, cell) not in results or (theirs, cell) not in results:
        return None
    return statistics.median(
        of(one, other) for one, other in zip(results[ours, cell], results[theirs, cell], strict=True)
    )


def _of(one: str, two: str, cell: Cell) -> str:
    """Choose Roost's variant for a cell: the peers run a thread per core, so with several connections Roost
    runs several processes."""
    return one if cell.connections == 1 else two


def ratios(results: Results) -> list[str]:
    """Describe processor time, and what one process reaches where several are compared."""
    lines = []
    for name, of, pick in (
        ("processor time per request, theirs over ours", processor_ratio, _of),
        ("one process alone, req/s", ratio, lambda one, two, cell: one),
    ):
        found = [
            (f"{ours} over {theirs}, {cell.name}", of(results, pick(*ours_of, cell), theirs, cell))
            for ours, ours_of, theirs in (
                ("text", (TEXT, TEXT_2), SMG_CACHE),
                ("kv", (KV, KV_2), DYNAMO),
                ("floor", (FLOOR, FLOOR), SMG_CACHE),
            )
            for cell in CELLS
        ]
        lines.append(f"{name}: " + "; ".join(f"{what} {value:.2f}x" for what, value in found if value))
    return lines


def targets(results: Results) -> tuple[list[Target], list[str]]:
    """Return the targets, and the names of those not measured, which count as missed."""
    wanted = [
        (_of(TEXT, TEXT_2, cell), SMG_CACHE, cell, 0.9 if cell.stream else 0.7)
        for cell in CELLS
        if cell.connections > 1
    ]
    wanted += [(_of(KV, KV_2, cell), DYNAMO, cell, 3.0) for cell in CELLS]
    found, not_measured = [], []
    for ours, theirs, cell, limit in wanted:
        value = ratio(results, ours, theirs, cell)
        name = f"req/s of {ours} over {theirs}, {cell.name}"
        if value is None:
            not_measured.append(name)
        found.append(Target(name, value or 0.0, limit))
    return found, not_measured


async def run(peers: Peers, missing: dict[str, str], *, quick: bool) -> Results:
    texts = sources()
    words = common_words(texts)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / MODEL
        write_model(model, texts)
        async with rig(peers, model, words, missing) as found:
            return await measure(found, words, rounds=3 if quick else 9, seconds=0.25 if quick else 1.0)


async def run_against(revision: str, quick: bool, report: Report) -> dict[str, list[Compared]]:
    """Send the same prompts through this tree's router and another commit's, alternating; by path. One
    process each."""
    rounds, requests = (5, 120) if quick else (9, 400)
    texts = sources()
    words = common_words(texts)
    results: dict[str, list[Compared]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, worktree(revision) as tree:
        model = Path(folder) / MODEL
        write_model(model, texts)
        for door, cells in (("plain", CELLS), ("kv", (*CELLS, *IN_TURNS))):
            async with (
                mock_engines(MOCKS) as mocks,
                router_of(ROOT, door, mocks, model) as now,
                router_of(tree, door, mocks, model) as before,
            ):
                for cell in cells:
                    made = partial(
                        bodies,
                        MODEL,
                        words,
                        requests * min(cell.connections, 4),
                        count=WORDS,
                        stream=cell.stream,
                        in_turns=cell.in_turns,
                    )
                    asks = [made(seed=f"{door} {cell.name} {number}") for number in range(rounds + 1)]
                    found = await compare(now, before, asks, connections=cell.connections)
                    results[door].append(found)
                    add_compared(report, f"{door} {cell.name}", cell.connections, found)
    return results


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    install: bool = Install,
    against: str = Against,
) -> None:
    """Compare Roost with SGLang's router and Dynamo's frontend, or with another commit of Roost."""
    if against:
        report = Report(f"{WORDS}-word prompts: the working tree's router beside {against}'s", COLUMNS)
        report.notes.append(f"client: {SETTINGS}; rounds in turns")
        report.targets = [
            target
            for door, found in uvloop.run(run_against(against, quick, report)).items()
            for target in no_slower(door, found)
        ]
        report.finish(as_json=as_json, check=check)
        return
    peers = peer_environment.find({})
    if peers.missing and install:
        peers = peer_environment.find(peer_environment.install())
    missing = dict(peers.missing)
    columns = ["cell", "system", "p50 ms", "added p50 ms", "p99 ms", "first byte p50 ms", "req/s", "rounds"]
    columns += ["router us", "engines us", "client us"]
    report = Report(
        f"Routers side by side: {WORDS}-word prompts, {OUTPUT_TOKENS} output tokens, {MOCKS} engines", columns
    )
    results = uvloop.run(run(peers, missing, quick=quick))
    add_rows(report, results)
    report.targets, not_measured = targets(results)
    report.notes.append(f"client: {SETTINGS}; us: processor time per request; dynamo's engines: its mocker")
    report.notes.append(
        "no two prompts are equal, half of their words are shared in 8 groups; roost kv knows from KV events"
        " who holds the shared half"
    )
    versions = f"{peer_environment.SMG} (a thread per core), {peer_environment.DYNAMO} (the same)"
    report.notes.append(
        f"peers: {versions}; roost: one process, and one a core on one port (x2), which before plain"
        " servers do not share what they know"
    )
    report.notes += ratios(results)
    report.notes += [f"missing: {name}: {reason}" for name, reason in missing.items()]
    report.notes += [f"not measured: {name}" for name in not_measured]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
