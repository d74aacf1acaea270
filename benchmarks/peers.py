"""Roost compared with other routers: added latency and requests per second, same client, same prompts, same
mock engines, one run.

`text`: Roost with static backends, cache-aware by text blocks, without tokenising; its counterpart is
SGLang's router (Rust), which does the same. `kv`: Roost over NATS with token-id ranks: renders, tokenises,
hashes, matches, prices, books, rewrites every chunk; its counterpart is Dynamo's frontend in KV mode, whose
figures include its own mocker (four workers), the only engine available to it here. Client, routers and
engines share this machine's cores. The peers run a thread per core; Roost is compared with two processes on
one port where several connections are open (the figure of one process is reported too). Every cell is
measured in alternating rounds; medians are shown.

    python -m benchmarks.peers --install --quick
    python -m benchmarks.peers --against HEAD~20    # another commit's router in the peers' place
"""

import contextlib
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
from benchmarks.rig.load_client import SETTINGS, call_all
from benchmarks.rig.mock_fleet import MODEL, mock_fleet, tell_held
from benchmarks.rig.peer_environment import Peers
from benchmarks.rig.processes import ROOT, free_port, mock_engines, nats, process, roost_router
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

MOCKS = 4
WORDS = 200
PATH = "/v1/chat/completions"
DIRECT, SMG_CACHE, SMG_ROUND, DYNAMO = "direct", "smg cache_aware", "smg round_robin", "dynamo kv + mocker"
TEXT, TEXT_2, KV, KV_2 = "roost text", "roost text x2", "roost kv", "roost kv x2"
SYSTEMS = (DIRECT, TEXT, TEXT_2, SMG_CACHE, SMG_ROUND, KV, KV_2, DYNAMO)
_MOST_RATE = 8_000
"""Prepared requests per second; a round that uses all of them is shorter."""
_WARMING_SECONDS = 0.7
"""warm-up of each system before the first round: tokenizers cache words, routers cache connections"""

Start = Callable[[], contextlib.AbstractAsyncContextManager[int]]

Install = typer.Option(
    False, "--install", help="install the peers into .venv-peers first (about 200 MB, a minute)"
)


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
    """One system in one cell, once. Seconds; requests per second."""

    p50: float
    p99: float
    first_p50: float
    rate: float


CELLS = (Cell(1, False), Cell(1, True), Cell(16, False), Cell(16, True))
IN_TURNS = (Cell(1, False, True), Cell(16, False, True))
"""The shared half is a system message, the case for Roost's reuse of token ids by message. Only where prompts
are tokenised."""


@contextlib.asynccontextmanager
async def systems(
    peers: Peers, model: Path, words: list[str], missing: dict[str, str]
) -> AsyncIterator[dict[str, int]]:
    """Start every available system; yield the ports by name. Unavailable ones are noted in `missing`."""
    async with contextlib.AsyncExitStack() as stack:
        mocks = await stack.enter_async_context(mock_engines(MOCKS))
        urls = [f"http://127.0.0.1:{port}" for port in mocks]
        backends = [word for url in urls for word in ("--backend", url)]
        found = {DIRECT: mocks[0], TEXT: await stack.enter_async_context(roost_router(*backends))}
        found[TEXT_2] = await stack.enter_async_context(roost_router(*backends, "--processes", "2"))
        bus_url = await stack.enter_async_context(nats())
        bus = await stack.enter_async_context(mock_fleet(bus_url, mocks, model))
        found[KV] = await stack.enter_async_context(roost_router("--nats", bus_url))
        found[KV_2] = await stack.enter_async_context(roost_router("--nats", bus_url, "--processes", "2"))
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        for at, port in enumerate(mocks):
            await tell_held(bus, port, [_held(tokenizer, words, group) for group in range(at, GROUPS, MOCKS)])
        for name, start in _peers(peers, model, urls).items():
            port_or_reason = await _started(stack, start)
            if isinstance(port_or_reason, int):
                found[name] = port_or_reason
            else:
                missing[name] = port_or_reason
        yield found


def _peers(peers: Peers, model: Path, urls: list[str]) -> dict[str, Start]:
    """Return the start command of each installed peer."""
    starts: dict[str, Start] = {}
    if peers.smg is not None:
        starts[SMG_CACHE] = partial(_smg, peers.smg, "cache_aware", urls)
        starts[SMG_ROUND] = partial(_smg, peers.smg, "round_robin", urls)
    if peers.dynamo is not None:
        starts[DYNAMO] = partial(_dynamo, peers.dynamo, model)
    return starts


def _held(tokenizer: Tokenizer, words: list[str], group: int) -> list[int]:
    ids: list[int] = tokenizer.encode(
        f"<|im_start|>user\n{shared_half(words, group, WORDS)} ", add_special_tokens=False
    ).ids
    return ids


async def _started(stack: contextlib.AsyncExitStack, start: Start) -> int | str:
    """Return the port, or the reason for its absence. Tries twice: a free port may be taken meanwhile."""
    reason = ""
    for _ in range(2):
        try:
            return await stack.enter_async_context(start())
        except (OSError, RuntimeError, TimeoutError) as error:
            reason = f"it did not start: {error}"
    return reason


@contextlib.asynccontextmanager
async def _smg(command: Path, policy: str, urls: list[str]) -> AsyncIterator[int]:
    """Run SGLang's router; yield its port."""
    port = free_port()
    arguments = [
        str(command),
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--worker-urls",
        *urls,
        "--policy",
        policy,
    ]
    quiet = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "error"]
    async with process([*arguments, *quiet], f"http://127.0.0.1:{port}/v1/models"):
        yield port


@contextlib.asynccontextmanager
async def _dynamo(python: Path, model: Path) -> AsyncIterator[int]:
    """Run Dynamo's frontend in KV mode over its mocker of four workers; yield its port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as shared:
        local = {
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "DYN_SELF_HOST_METADATA": "0",
        }
        planes = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": shared,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "error",
        }
        mocker = [
            str(python),
            "-m",
            "dynamo.mocker",
            "--model-path",
            str(model),
            "--model-name",
            MODEL,
            "--num-workers",
            str(MOCKS),
        ]
        mocker += [
            "--block-size",
            "16",
            "--num-gpu-blocks-override",
            "16384",
            "--speedup-ratio",
            "1000",
            "--max-num-seqs",
            "256",
        ]
        frontend = [
            str(python),
            "-m",
            "dynamo.frontend",
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(port),
            "--router-mode",
            "kv",
        ]
        async with contextlib.AsyncExitStack() as stack:
            # The mocker has no HTTP server: its presence shows in the frontend's list of models.
            await stack.enter_async_context(process(mocker, None, environment=local | planes))
            url = f"http://127.0.0.1:{port}/v1/models"
            await stack.enter_async_context(
                process(
                    frontend, url, environment=local | planes, answers=lambda body: MODEL.encode() in body
                )
            )
            yield port


async def measure(
    found: dict[str, int], words: list[str], *, rounds: int, seconds: float
) -> dict[tuple[str, Cell], list[Round]]:
    """Measure every system in every cell, alternating, after a warm-up of each."""
    results: dict[tuple[str, Cell], list[Round]] = defaultdict(list)
    for port in found.values():
        asks = bodies(
            MODEL,
            words,
            int(_MOST_RATE * _WARMING_SECONDS),
            count=WORDS,
            stream=False,
            seed=f"warming {port}",
        )
        await call_all(port, PATH, asks, connections=16, seconds=_WARMING_SECONDS)
    for cell in (*CELLS, *IN_TURNS):
        asked = [name for name in SYSTEMS if name in found and name in _worth_asking(cell)]
        for number in range(rounds):
            asks = bodies(
                MODEL,
                words,
                int(_MOST_RATE * seconds),
                count=WORDS,
                stream=cell.stream,
                seed=f"{cell.name} {number}",
                in_turns=cell.in_turns,
            )
            for name in asked[number % len(asked) :] + asked[: number % len(asked)]:
                samples, wall = await call_all(
                    found[name], PATH, asks, connections=cell.connections, seconds=seconds
                )
                results[name, cell].append(
                    _round([sample.first for sample in samples], [sample.whole for sample in samples], wall)
                )
    return results


def _worth_asking(cell: Cell) -> tuple[str, ...]:
    """Return the systems that a cell can distinguish: several processes only with several connections, turns
    only where prompts are tokenised."""
    several = (TEXT_2, KV_2) if cell.connections > 1 else ()
    return (
        (DIRECT, KV, DYNAMO, *several[1:])
        if cell.in_turns
        else (DIRECT, TEXT, SMG_CACHE, SMG_ROUND, KV, DYNAMO, *several)
    )


def _round(first: list[float], whole: list[float], wall: float) -> Round:
    return Round(
        statistics.median(whole), percentile(whole, 0.99), statistics.median(first), len(whole) / wall
    )


def add_rows(report: Report, results: dict[tuple[str, Cell], list[Round]]) -> None:
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
                )


def ratio(results: dict[tuple[str, Cell], list[Round]], ours: str, theirs: str, cell: Cell) -> float | None:
    """Return Roost's requests per second over the peer's, the median of adjacent rounds. None if one was not
    measured."""
    if (ours, cell) not in results or (theirs, cell) not in results:
        return None
    return statistics.median(
        one.rate / other.rate for one, other in zip(results[ours, cell], results[theirs, cell], strict=True)
    )


def _of(one: str, two: str, cell: Cell) -> str:
    """Choose Roost's variant for a cell: the peers run a thread per core, so with several connections Roost
    runs several processes."""
    return one if cell.connections == 1 else two


def single(results: dict[tuple[str, Cell], list[Round]]) -> str:
    """Describe what one process reaches where two are compared."""
    pairs = [
        (ours, theirs, cell)
        for ours, theirs in ((TEXT, SMG_CACHE), (KV, DYNAMO), (KV, SMG_CACHE))
        for cell in CELLS
        if cell.connections > 1
    ]
    found = [
        (f"{ours} over {theirs}, {cell.name}", ratio(results, ours, theirs, cell))
        for ours, theirs, cell in pairs
    ]
    return "one process alone: " + "; ".join(
        f"{name} {value:.2f}x" for name, value in found if value is not None
    )


def targets(results: dict[tuple[str, Cell], list[Round]]) -> tuple[list[Target], list[str]]:
    """Return the measured targets, and the names of those not measured."""
    wanted = [(_of(TEXT, TEXT_2, cell), SMG_CACHE, cell, 0.6 if cell.stream else 0.4) for cell in CELLS]
    wanted += [(_of(KV, KV_2, cell), DYNAMO, cell, 2.0 if cell.connections == 1 else 1.5) for cell in CELLS]
    wanted += [(_of(KV, KV_2, cell), SMG_CACHE, cell, 0.15) for cell in CELLS]
    met, not_measured = [], []
    for ours, theirs, cell, limit in wanted:
        value = ratio(results, ours, theirs, cell)
        name = f"req/s of {ours} over {theirs}, {cell.name}"
        if value is None:
            not_measured.append(name)
        else:
            met.append(Target(name, value, limit))
    return met, not_measured


async def run(peers: Peers, missing: dict[str, str], *, quick: bool) -> dict[tuple[str, Cell], list[Round]]:
    texts = sources()
    words = common_words(texts)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / MODEL
        write_model(model, texts)
        async with systems(peers, model, words, missing) as found:
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
    failed = peer_environment.install() if install else {}
    peers = peer_environment.find(failed)
    missing = dict(peers.missing)
    columns = ["cell", "system", "p50 ms", "added p50 ms", "p99 ms", "first byte p50 ms", "req/s", "rounds"]
    report = Report(
        f"Routers side by side: {WORDS}-word prompts, {OUTPUT_TOKENS} output tokens, {MOCKS} engines", columns
    )
    results = uvloop.run(run(peers, missing, quick=quick))
    add_rows(report, results)
    report.targets, not_measured = targets(results)
    report.notes.append(f"client: {SETTINGS}")
    report.notes.append(
        "no two prompts are equal, half of their words are shared in 8 groups; roost kv knows from KV events"
        " who holds the shared half"
    )
    versions = f"{peer_environment.SMG} (a thread per core), {peer_environment.DYNAMO} (the same)"
    report.notes.append(
        f"peers: {versions}; roost: one process, and two on one port (x2), which before plain servers do not"
        " share what they know"
    )
    report.notes.append(single(results))
    report.notes += [f"missing: {name}: {reason}" for name, reason in missing.items()]
    report.notes += [f"not measured: {name}" for name in not_measured]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
