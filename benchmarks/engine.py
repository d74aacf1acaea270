"""Tokens per second of the embedded engine against `transformers` `generate`: demo model, fp32, greedy, same
prompts, one run.

The sides are separate processes and alternate, so that the machine's load affects all alike. transformers
runs on one thread and on all cores; the faster of the two counts in every round. A rank of the embedded
engine computes on one thread; an engine of one rank shares its large steps among all cores. Every round has
new prompts, so no cache helps. vLLM (`make test-vllm` installs it) computes the same, on one thread, as that
target starts it. Without it `--check` fails.

    python -m benchmarks.engine --quick
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import typer

from benchmarks.rig.generator import Batch, Result
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from deploy.demo_model import checkpoint_path
from engine_adapter.embedded.kernels import missing

PROMPT = 128
ROOT = Path(__file__).resolve().parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
START_SECONDS = 10.0
"""limit of a start, to the first token, with all files in the system's cache"""


class Timed(NamedTuple):
    """A batch of one side."""

    seconds: float
    processor_seconds: float
    outputs: list[list[int]]


class Side:
    """One or more generator processes that share a batch evenly."""

    def __init__(self, name: str, children: list[subprocess.Popen[bytes]]) -> None:
        self.name = name
        self._children = children
        for child in children:
            if b"ready" not in self._line(child):
                raise RuntimeError(f"{name}: a generator process did not start")

    def processor_seconds(self) -> float:
        """Processor time of all processes so far."""
        times = [psutil.Process(child.pid).cpu_times() for child in self._children]
        return sum(one.user + one.system for one in times)

    def generate(self, prompts: list[list[int]], tokens: int) -> "Timed":
        """Return the slowest share's seconds, the processor time of all shares, and the outputs in order."""
        before = self.processor_seconds()
        busy = self._children[: len(prompts)]
        shares = [prompts[at :: len(busy)] for at in range(len(busy))]
        for child, share in zip(busy, shares, strict=True):
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(Batch(share, tokens)) + b"\n")
            child.stdin.flush()
        results = [msgspec.json.decode(self._line(child), type=Result) for child in busy]
        outputs = [results[at % len(busy)].outputs[at // len(busy)] for at in range(len(prompts))]
        slowest = max(result.seconds for result in results)
        return Timed(slowest, self.processor_seconds() - before, outputs)

    @staticmethod
    def _line(child: subprocess.Popen[bytes]) -> bytes:
        assert child.stdout is not None
        return child.stdout.readline()


@contextlib.contextmanager
def side(name: str, commands: list[list[str]], environment: dict[str, str] | None = None) -> Iterator[Side]:
    """Run a side's processes while the context lasts."""
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
        )
        for command in commands
    ]
    try:
        yield Side(name, children)
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _generator(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.rig.generator", *arguments]


def roost(ranks: int, folder: str) -> contextlib.AbstractContextManager[Side]:
    commands = [_generator("roost", str(rank), str(ranks), folder) for rank in range(ranks)]
    return side(f"roost, P={ranks}", commands)


def vllm() -> contextlib.AbstractContextManager[Side]:
    """Run vLLM, in whose environment nothing of Roost is found."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = ROOT / "benchmarks" / "rig" / "vllm" / "generator.py"
    return side("vLLM, P=1", [[str(VLLM), str(script), str(checkpoint_path()), "1"]], found)


def start_seconds() -> float:
    """Seconds from the start of a process to the first token of an engine of one rank, its calibration
    included."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, roost(1, folder) as engine:
        engine.generate(prompts(np.random.default_rng(0), 1), 1)
        return time.monotonic() - began


def prompts(rng: np.random.Generator, batch: int) -> list[list[int]]:
    """Return prompts of printable bytes: only their equality on both sides matters."""
    return [[int(token) for token in rng.integers(32, 127, PROMPT)] for _ in range(batch)]


def agreement(one: list[list[int]], two: list[list[int]]) -> float:
    """Return the share of sequences generated alike (random prompts leave near-ties, so a few may differ)."""
    return float(np.mean([a == b for a, b in zip(one, two, strict=True)]))


def compare(
    references: list[Side], other: Side, batch: int, tokens: int, rounds: int, report: Report
) -> float:
    """Alternate rounds. The row's ratio is the median over rounds of the ratio to the round's fastest
    reference; that of processor time, which load on the machine distorts less, to the cheapest one."""
    rng = np.random.default_rng(batch)
    pairs: list[tuple[Timed, Timed]] = []
    saved = []
    for _ in range(rounds + 1):
        content = prompts(rng, batch)
        theirs = [reference.generate(content, tokens) for reference in references]
        pairs.append((min(theirs, key=lambda one: one.seconds), other.generate(content, tokens)))
        saved.append(min(one.processor_seconds for one in theirs) / pairs[-1][1].processor_seconds)
    pairs = pairs[1:]  # the first round warms both
    rates = [(batch * tokens / one.seconds, batch * tokens / two.seconds) for one, two in pairs]
    ratio = statistics.median(two / one for one, two in rates)
    same = statistics.mean(agreement(one.outputs, two.outputs) for one, two in pairs)
    report.add(
        other.name,
        batch,
        statistics.median(one for one, _ in rates),
        statistics.median(two for _, two in rates),
        ratio,
        statistics.median(saved[1:]),
        f"{same:.0%}",
    )
    return ratio


def beside(references: list[Side], tokens: int, rounds: int, report: Report) -> None:
    """Compare vLLM, if it is installed."""
    installed = VLLM.exists()
    report.targets.append(Target("vLLM is installed (make test-vllm)", float(installed), 1.0, unit=""))
    if not installed:
        report.notes.append("vLLM: not installed")
        return
    with vllm() as engine:
        for batch in (1, 16):
            compare(references, engine, batch, tokens, rounds, report)


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Compare tokens/s of the embedded engine with transformers generate."""
    columns = [
        "engine",
        "batch",
        "transformers tok/s",
        "its tok/s",
        "ratio",
        "by processor time",
        "same sequences",
    ]
    report = Report(f"Generation: {PROMPT} prompt tokens, fp32, greedy", columns)
    tokens, rounds = (48, 3) if quick else (128, 7)
    with contextlib.ExitStack() as stack:
        threads = sorted({1, os.cpu_count() or 1})
        references = [
            stack.enter_context(
                side(f"transformers on {count} threads", [_generator("transformers", str(count))])
            )
            for count in threads
        ]
        for ranks in (1, 2) if quick else (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder, roost(ranks, folder) as engine:
                for batch, limit in ((1, 1.0), (16, 1.5)):
                    ratio = compare(
                        references,
                        engine,
                        batch,
                        tokens if ranks < 4 else tokens // 2,
                        rounds if ranks == 1 else 2,
                        report,
                    )
                    if ranks == 1:
                        name = f"tokens/s over transformers at batch {batch}, P=1"
                        report.targets.append(Target(name, ratio, limit))
        beside(references, tokens, rounds, report)
        started = start_seconds()
    report.targets.append(
        Target("start of P=1 to the first token", started, START_SECONDS, at_least=False, unit=" s")
    )
    report.notes.append(
        f"{tokens} tokens per sequence, {rounds} rounds; transformers: the faster of {threads} threads;"
        " vLLM: one thread"
    )
    report.notes.append("Roost: one thread per rank; at P=1 large steps are shared among all cores")
    report.notes.append(f"Roost's layers: {f'by torch ({missing})' if missing else 'compiled'}")
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
