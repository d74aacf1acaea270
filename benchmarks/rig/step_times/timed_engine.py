"""An engine of timed ranks (`timed_rank`): orders in, steps of the whole engine out."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.rig.processes import ROOT
from benchmarks.rig.step_times.timed_rank import Order, Served, Started, TimedJob, TimedStep
from fleet.experts import ModelShape
from fleet.placement import Placement
from fleet.timing import EngineSpeed, gathered_bytes, step_seconds

PATIENCE = 120.0
_AHEAD_SECONDS = 0.03
"""Between an order and its begin, so that all ranks have read it by then."""


class EngineStep(NamedTuple):
    """One step, by rank."""

    ranks: tuple[TimedStep, ...]
    tensor_parallel: bool

    @property
    def working(self) -> tuple[TimedStep, ...]:
        """Ranks with tokens of their own: under tensor-parallel attention all have those of rank 0."""
        return self.ranks[:1] if self.tensor_parallel else self.ranks

    @property
    def seconds(self) -> float:
        """Mean over the ranks, which step together."""
        return float(np.mean([one.seconds for one in self.ranks]))

    def predicted(self, speed: EngineSpeed, shape: ModelShape, placement: Placement) -> float:
        """Return the seconds that the time model expects, as the router prices them: every rank reads as many
        of the step's distinct experts. speed: of the placement's attention."""
        distinct = len(set().union(*(one.used for one in self.ranks)))
        readers = 1 if self.tensor_parallel else placement.ranks
        working = self.working
        tokens = sum(one.prefill_tokens + one.sequences for one in working)

        def column(name: str) -> Any:
            return np.array([getattr(one, name) for one in working], np.float64)

        by_rank = step_seconds(
            speed,
            prefill_tokens=column("prefill_tokens"),
            prefill_pairs=column("prefill_pairs"),
            sequences=column("sequences"),
            blocks=column("blocks"),
            remote_ranks=column("remote"),
            remote_nodes=np.zeros(len(working)),
            distinct_experts=np.full(len(working), distinct / readers),
            surplus=np.zeros(1) if self.tensor_parallel else column("surplus"),
            gathered=tokens * gathered_bytes(shape, placement.ranks, len(placement.sharded)),
        )
        return float(by_rank.max())


class TimedEngine:
    """A running engine. `steps` ends it."""

    def __init__(
        self, folder: Path, children: Sequence[subprocess.Popen[bytes]], tensor_parallel: bool
    ) -> None:
        self._folder = folder
        self._tensor_parallel = tensor_parallel
        self._children = children
        started: list[Started] = [self._read(child, Started) for child in children]
        self.speed, self.tp_speed = started[0].speed, started[0].tp_speed
        self.layout_times = started[0].layout_times
        """As rank 0 states them when the engine joins."""

    def serve(self, prompts: Sequence[list[list[int]]], new_tokens: int) -> int:
        """Have each rank serve its prompts, all at once. Return the number of steps made before."""
        begin = time.monotonic() + _AHEAD_SECONDS
        for child, own in zip(self._children, prompts, strict=True):
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(Order(own, new_tokens, begin)) + b"\n")
            child.stdin.flush()
        return max(self._read(child, Served).first for child in self._children)

    def steps(self) -> list[EngineStep]:
        """Stop the ranks, and return all steps."""
        for child in self._children:
            child.communicate(timeout=PATIENCE)  # closes its standard input, at whose end it stops
        by_rank = [
            msgspec.json.decode((self._folder / f"{rank}.json").read_bytes(), type=list[TimedStep])
            for rank in range(len(self._children))
        ]
        return [EngineStep(step, self._tensor_parallel) for step in zip(*by_rank, strict=False)]

    @staticmethod
    def _read(child: subprocess.Popen[bytes], kind: Any) -> Any:
        assert child.stdout is not None
        # Libraries write there, too.
        while not (line := child.stdout.readline()).startswith(b"{"):
            if not line:
                raise RuntimeError("a timed rank has ended; see its standard error")
        return msgspec.json.decode(line, type=kind)


@contextmanager
def timed_engine(
    checkpoint: Path,
    placement: Placement,
    kv_blocks: int,
    *,
    link_seconds: float = 0.0,
    collective_seconds: float = 0.0,
) -> Iterator[TimedEngine]:
    """Run an engine that serves a placement while the context lasts. link_seconds, collective_seconds: as in
    `EmbeddedConfig`."""
    with tempfile.TemporaryDirectory(prefix="steps-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "placement.json").write_bytes(msgspec.json.encode(placement.record()))
        job = TimedJob(
            str(checkpoint),
            placement.ranks,
            str(folder / "placement.json"),
            kv_blocks,
            link_seconds,
            collective_seconds,
        )
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        children = []
        for rank in range(placement.ranks):
            command = [
                *(sys.executable, "-m", "benchmarks.rig.step_times.timed_rank"),
                *(str(folder / "job.json"), str(rank)),
            ]
            child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(_end, child)
            children.append(child)
        yield TimedEngine(folder, children, placement.attention == "tp")


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(OSError, ValueError):
        child.kill()
        child.communicate(timeout=PATIENCE)
