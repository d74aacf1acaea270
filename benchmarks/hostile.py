"""Response times while the router is attacked: `/health`, and a 20 kB prompt of another client, with
attackers and without.

A real router runs in front of a simulated engine (whose long answers the attackers do not read) and a mock
engine (which answers at once). The mock's vocabulary has one token of 512 bytes, so that 8 MB might fit its
context and must be tokenised before they can be refused. Attackers and the simulated engine, which would run
on other machines, have a lower priority on this machine's processors. Every round measures the control, then
each attack. The figure is the median over five rounds of a round's longest answer (`/health`), or of a
round's median (the prompt).

    python -m benchmarks.hostile --quick
"""

import asyncio
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import typer
from tokenizers import AddedToken, Tokenizer

from benchmarks.rig.attackers import LARGE_BODIES, write_bodies
from benchmarks.rig.mock_fleet import MODEL, mock_fleet
from benchmarks.rig.processes import ROOST, ROOT, mock_engines, nats, process, roost_router
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from deploy.demo_model import checkpoint_path

CONTROL = "nobody attacks"
DISTINCT = "8 MB of distinct words"
ROUNDS = 5
MAX_MS = 100.0
_LONG_TOKEN = "#" * 512
_PROMPT_BYTES = 20_000
_PROBE_SECONDS = 0.02
"""between two probes"""


ATTACKS = ("slow heads", "endless heads", "withheld bodies", "unread answers", *LARGE_BODIES)


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[tuple[int, str]]:
    """Yield the router's port, and the simulated engine's model."""
    with tempfile.TemporaryDirectory() as folder:
        _with_long_token(Path(folder))
        async with mock_engines(1) as mocks, nats() as url, mock_fleet(url, mocks, Path(folder)):
            worker = [
                "nice",
                "-n",
                "15",
                *ROOST,
                "worker",
                "--engine",
                "simulated",
                "--name",
                "sim",
                "--ranks",
                "1",
                "--nats",
                url,
            ]
            async with process(worker, None), roost_router("--nats", url) as port:
                yield port, await asyncio.to_thread(_simulated_model, port)


def _with_long_token(folder: Path) -> None:
    """Write the demo model's tokenizer with one additional long token."""
    model = checkpoint_path()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(_LONG_TOKEN, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes((model / "tokenizer_config.json").read_bytes())


def _simulated_model(port: int) -> str:
    """Wait until the simulated engine has joined. Raises TimeoutError."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        names = [
            one["id"] for one in json.loads(ask(port, "GET", "/v1/models", b""))["data"] if one["id"] != MODEL
        ]
        if names:
            return str(names[0])
        time.sleep(0.1)
    raise TimeoutError("the simulated engine did not join within 30 s")


def ask(port: int, method: str, path: str, body: bytes) -> bytes:
    """Return the answer to a request on a new connection; raise RuntimeError if it is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body or None, {"content-type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path} was answered {answer.status}: {said[:200]!r}")
        return said


@contextlib.contextmanager
def attacked_by(kind: str, port: int, model: str, folder: Path) -> Iterator[None]:
    """Run attackers while the context lasts; none for the control."""
    if kind == CONTROL:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.rig.attackers", kind, str(port), model, str(folder)]
    attackers = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert attackers.stdout is not None
        if attackers.stdout.readline() != b"attacking\n":
            raise RuntimeError(f"the attackers with {kind} ended with {attackers.wait()}")
        yield
    finally:
        attackers.send_signal(signal.SIGKILL)
        attackers.wait()


def timed(work: Callable[[], object], seconds: float) -> list[float]:
    """Run work sequentially for a while, at least three times; return the seconds of each."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 3:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
        time.sleep(_PROBE_SECONDS)
    return found


class Prompts:
    """Prompts of 20 kB, all different, so that no cache of texts can answer them."""

    def __init__(self) -> None:
        self._number = 0

    def body(self) -> bytes:
        self._number += 1
        words = " ".join(f"w{self._number}x{at}" for at in range(_PROMPT_BYTES // 8))[:_PROMPT_BYTES]
        return msgspec.json.encode(
            {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": 8}
        )


def router_pid(port: int) -> int:
    """Return the router's process id. Raises LookupError if no router listens there."""
    wanted = [b"router", b"--port", str(port).encode()]
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                folder.name.isdigit()
                and [word for word in (folder / "cmdline").read_bytes().split(b"\0") if word in wanted]
                == wanted
            ):
                return int(folder.name)
    raise LookupError(f"no router listens on port {port}")


def seconds_without_processor(pid: int) -> float:
    """Return the seconds for which a process's main thread was runnable but had no processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9


class Measured(NamedTuple):
    """Seconds by attack and round."""

    health: dict[str, list[float]]
    """longest answer"""
    crowded: dict[str, list[float]]
    """processor wait of the router, per second"""
    prompts: dict[str, list[float]]
    """median answer to a 20 kB prompt, during the large bodies that take longest"""


def measure(port: int, simulated: str, seconds: float, folder: Path) -> Measured:
    """Measure control and attacks, alternating."""
    health: dict[str, list[float]] = defaultdict(list)
    crowded: dict[str, list[float]] = defaultdict(list)
    prompts: dict[str, list[float]] = defaultdict(list)
    texts, pid = Prompts(), router_pid(port)
    ask(port, "POST", "/v1/chat/completions", texts.body())
    for _ in range(ROUNDS):
        for kind in (CONTROL, *ATTACKS):
            with attacked_by(kind, port, simulated if kind == "unread answers" else MODEL, folder):
                began, waited = time.perf_counter(), seconds_without_processor(pid)
                health[kind].append(max(timed(lambda: ask(port, "GET", "/health", b""), seconds)))
                crowded[kind].append(
                    (seconds_without_processor(pid) - waited) / (time.perf_counter() - began)
                )
                if kind in (CONTROL, DISTINCT):
                    prompts[kind].append(
                        median(
                            timed(
                                lambda: ask(port, "POST", "/v1/chat/completions", texts.body()), 2 * seconds
                            )
                        )
                    )
    return Measured(health, crowded, prompts)


async def run(quick: bool, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_bodies(MODEL, Path(folder))
        async with fleet() as (port, simulated):
            health, crowded, prompts = await asyncio.to_thread(
                measure, port, simulated, 0.3 if quick else 3.0, Path(folder)
            )
    for kind, rounds in health.items():
        asked = prompts.get(kind)
        report.add(
            kind,
            1e3 * median(rounds),
            1e3 * max(rounds),
            f"{median(crowded[kind]):.0%}",
            "" if asked is None else f"{1e3 * median(asked):.1f}",
        )
    worst = max((kind for kind in health if kind != CONTROL), key=lambda kind: median(health[kind]))
    delay = median(prompts[DISTINCT]) - median(prompts[CONTROL])
    report.targets.append(
        Target(
            f"/health under the worst attack ({worst})",
            1e3 * median(health[worst]),
            MAX_MS,
            at_least=False,
            unit=" ms",
        )
    )
    report.targets.append(
        Target("delay of a 20 kB prompt by four 8 MB bodies", 1e3 * delay, MAX_MS, at_least=False, unit=" ms")
    )


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Measure response times while the router is attacked."""
    columns = [
        "attack",
        "longest /health ms",
        "worst of the rounds",
        "waits for a processor",
        "20 kB prompt ms",
    ]
    report = Report("The router under attack, and others' answers", columns)
    report.notes.append(
        f"medians of {ROUNDS} rounds; attackers niced, on the same processors; control: the first row"
    )
    report.notes.append(
        "waits for a processor: share of the time; where it is large in the control, too, others use this"
        " machine, and the figures say little"
    )
    asyncio.run(run(quick, report))
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
