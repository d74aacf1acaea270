"""Cost of the plugin in a real vLLM: processor time by step, as it counts it, and tokens per second against
the same vLLM with the plugin disabled (installed, without `ROOST_AGENT`).

Two vLLMs run, each of two data-parallel ranks with expert parallelism and EPLB; the one that is not measured
is stopped by SIGSTOP, because an idle vLLM polls. Rounds of the same requests alternate, the order too, until
the 95 % interval of the ratio is narrower than 2 %, or time is up: then the interval is printed, and its
target is missed. Turns are short, so that both see the same machine, and each begins with requests that do
not count: whatever fell due during the stop (reports, heartbeats) is done then. The ratio of processor time
per token is steadier on a shared machine. The agent runs in the process of the benchmark: it slows the
plugin's turns, but is not in the processor time.

    python -m benchmarks.real_vllm.overhead --quick --python .venv-vllm/bin/python
"""

import asyncio
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import psutil
import typer
from scipy.stats import t as student

from benchmarks.rig.live.document_traffic import Request, texts
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.vllm.arms import NEVER
from benchmarks.rig.vllm.load import Plenty, send
from benchmarks.rig.vllm.server import (
    MODEL,
    PYTHON,
    ROOST,
    STAND_INS,
    Running,
    Server,
    serving,
    with_vllm,
)
from tests.vllm.worker_agent import WorkerAgent

LEAST, WIDTH = 0.97, 0.02
MUCH = Plenty(8, 8, 64, 96)
FIRST = Plenty(8, 8, 64, 8)
"""load at the start of each turn, which does not count"""
LEAST_ROUNDS = 10
_SECRET = b"a secret of the benchmark"
_COLUMNS = ["", "tokens/s", "processor ms per token"]
Python = typer.Option(None, help=f"Python of vLLM's environment; default: ${PYTHON}, .venv-vllm")


class Side(NamedTuple):
    """Figures of one round of one vLLM."""

    tokens_per_second: float
    processor_per_token: float
    """seconds"""


class Interval(NamedTuple):
    """Mean of ratios, with the 95 % interval of it."""

    mean: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


def interval(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean and its 95 % interval by Student's t; infinitely wide for fewer than two."""
    if len(ratios) < 2:
        return Interval(ratios[0], 0.0, math.inf)
    logs = [math.log(ratio) for ratio in ratios]
    middle, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(student.ppf(0.975, len(logs) - 1)) * error
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


async def side(vllm: Running, traffic: Sequence[Request]) -> Side:
    """Wake the server, send the requests, the first of them unmeasured, and stop it again."""
    first, several = traffic[: FIRST.count], traffic[FIRST.count :]
    _all(vllm, signal.SIGCONT)
    await send(vllm.url, MODEL, first, FIRST)
    before, began = _processor(vllm), time.monotonic()
    answers = await send(vllm.url, MODEL, several, MUCH)
    seconds, tokens = time.monotonic() - began, sum(answer.completion_tokens for answer in answers)
    spent = _processor(vllm) - before
    _all(vllm, signal.SIGSTOP)
    return Side(tokens / seconds, spent / tokens)


def _all(vllm: Running, number: signal.Signals) -> None:
    for one in vllm.family():
        one.send_signal(number)


def _all_of(servers: list[Running], number: signal.Signals) -> None:
    for vllm in servers:
        _all(vllm, number)


def _processor(vllm: Running) -> float:
    """Return the processor seconds of all processes of a server."""
    total = 0.0
    for one in vllm.family():
        times: psutil._common.pcputimes = one.cpu_times()
        total += times.user + times.system
    return total


async def compare(
    with_plugin: Running, without: Running, traffic: Iterator[Request], minutes: float
) -> tuple[list[Side], list[Side]]:
    """Alternate until the interval is narrow enough, or time is up."""
    ours: list[Side] = []
    plain: list[Side] = []
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        several = list(islice(traffic, FIRST.count + MUCH.count))
        order = ((with_plugin, ours), (without, plain))
        for vllm, found in order if len(ours) % 2 else reversed(order):
            found.append(await side(vllm, several))
        if len(ours) >= LEAST_ROUNDS and interval(speeds(ours, plain)).width < WIDTH:
            break
    return ours, plain


def speeds(ours: Sequence[Side], plain: Sequence[Side]) -> list[float]:
    return [one.tokens_per_second / two.tokens_per_second for one, two in zip(ours, plain, strict=True)]


def costs(ours: Sequence[Side], plain: Sequence[Side]) -> list[float]:
    return [one.processor_per_token / two.processor_per_token for one, two in zip(ours, plain, strict=True)]


def plugin_cost(agent: WorkerAgent) -> list[str]:
    """Return what the workers say that the plugin took, by rank."""
    lines = []
    for rank, worker in sorted(agent.workers.items()):
        steps = sum(one.steps for one in worker.demand)
        own, votes = sum(one.plugin_seconds for one in worker.demand), sum(one.votes for one in worker.demand)
        voting = sum(one.vote_seconds for one in worker.demand)
        span = sum(one.seconds for one in worker.demand)
        lines.append(
            f"rank {rank}: {1e3 * own / max(steps, 1):.3f} ms of processor time a step over {steps} steps of"
            f" {1e3 * span / max(steps, 1):.1f} ms; {votes} votes of {1e3 * voting / max(votes, 1):.2f} ms"
        )
    return lines


async def measure(python: Path, minutes: float, report: Report) -> None:
    """Start both servers and compare them."""
    with tempfile.TemporaryDirectory(prefix="roost-vllm-overhead-") as name:
        folder = Path(name)
        (folder / "secret").write_bytes(_SECRET)
        async with AsyncExitStack() as stack:
            agent = await stack.enter_async_context(WorkerAgent(_SECRET, vote_steps=16).serving())
            known = {"ROOST_AGENT": f"127.0.0.1:{agent.port}", "ROOST_SECRET_FILE": str(folder / "secret")}
            servers: list[Running] = []
            for environment in (known, {}):
                server = Server(
                    python,
                    (STAND_INS, ROOST),
                    NEVER,
                    environment=environment,
                    eplb={"log_balancedness": False},
                )
                running = serving(server, folder / f"vllm-{len(servers)}.log")
                servers.append(await stack.enter_async_context(running))
                if environment:
                    await agent.until_connected()
            stack.callback(_all_of, servers, signal.SIGCONT)
            await judge(servers, agent, minutes, report)


async def judge(servers: list[Running], agent: WorkerAgent, minutes: float, report: Report) -> None:
    """Warm both up, compare them, and add rows and targets; the deciding ratio last."""
    traffic = texts(None, MUCH.prompt).requests(MUCH.prompt, 0, 0)
    several = list(islice(traffic, FIRST.count + MUCH.count))
    for vllm in servers:
        await side(vllm, several)
    for worker in agent.workers.values():
        worker.demand.clear()
    ours, plain = await compare(servers[0], servers[1], traffic, minutes)
    for name, sides in (("plugin", ours), ("plugin disabled", plain)):
        report.add(
            name,
            statistics.median(one.tokens_per_second for one in sides),
            1e3 * statistics.median(one.processor_per_token for one in sides),
        )
    speed = interval(speeds(ours, plain))
    report.notes += plugin_cost(agent)
    report.notes.append(f"processor time per token, plugin over disabled: {interval(costs(ours, plain))}")
    report.notes.append(f"tokens/s over {len(ours)} rounds: {speed}")
    report.targets.append(Target("width of the 95 % interval", speed.width, WIDTH, at_least=False, unit=""))
    report.targets.append(Target("tokens/s, plugin over disabled", speed.mean, LEAST))


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    python: Path = Python,
    minutes: float = typer.Option(None, help="longest duration of the rounds"),
) -> None:
    """Measure the plugin's cost in a real vLLM."""
    report = Report("The plugin in a real vLLM", _COLUMNS)
    duration = minutes or (1.0 if quick else 8.0)
    with_vllm(
        report,
        python,
        lambda interpreter: asyncio.run(measure(interpreter, duration, report)),
        as_json=as_json,
        check=check,
    )


if __name__ == "__main__":
    typer.run(main)
