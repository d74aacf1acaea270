"""A rank of the embedded engine as a separate process, which records every step.

    python -m benchmarks.rig.step_times.timed_rank JOB RANK

JOB is a file with `TimedJob` as JSON. The process prints `Started` on standard output, and serves one `Order`
per line of standard input, each answered with `Served`. When standard input ends, it writes its `TimedStep`s
into RANK.json beside JOB.
"""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.process import alongside
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded import step_loop
from engine_adapter.embedded.dispatch_stats import DispatchLog, FinishedStep
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.embedded.model_runner import Forward, SequenceWork
from engine_adapter.embedded.paged_attention import PAGE_TOKENS
from engine_adapter.embedded.setup import ForwardPass, RankSetup, build_setup
from fleet.experts import ModelShape
from fleet.layout_times import LayoutTimes
from fleet.timing import EngineSpeed


class TimedJob(msgspec.Struct, frozen=True):
    checkpoint: str
    ranks: int
    placement: str
    """File of the placement to serve."""
    kv_blocks: int
    link_seconds: float = 0.0
    collective_seconds: float = 0.0


class Started(msgspec.Struct, frozen=True):
    """Figures that the rank measured at its start."""

    speed: EngineSpeed
    tp_speed: EngineSpeed | None
    layout_times: tuple[LayoutTimes, ...]


class Order(msgspec.Struct, frozen=True):
    """Requests to serve at once."""

    prompts: list[list[int]]
    new_tokens: int
    begin: float
    """Time at which all ranks submit, in seconds of the machine-wide clock."""


class Served(msgspec.Struct, frozen=True):
    """Answer to an order."""

    first: int
    """Number of steps before it. All ranks have the same, since no rank has work then."""


class TimedStep(msgspec.Struct, frozen=True):
    """One step of a rank."""

    seconds: float
    forward_seconds: float
    """Part of `seconds` in the forward pass."""
    prefill_tokens: int
    prefill_pairs: float
    """Pairs of a computed prompt token and a token that it attends to."""
    sequences: int
    """Sequences that decode."""
    blocks: int
    """KV blocks of the decoding sequences."""
    remote: int
    """Remote ranks that the own tokens reach, summed over whole layers."""
    used: list[int]
    """Experts of the own tokens, as layer * experts + expert, each once."""
    surplus: float
    """Pairs of the most loaded rank of each layer above those of the own tokens, summed over layers."""


@dataclass(slots=True)
class RawStep:
    """A forward pass, and the step around it."""

    spans: list[tuple[int, int]]
    """Tokens to compute and their first position, of each sequence."""
    routed: NDArray[Any]
    served_by: Sequence[NDArray[np.int64]]
    forward_seconds: float
    seconds: float = 0.0
    tokens_by_rank: Sequence[int] = ()


@dataclass(slots=True)
class StepRecorder:
    """Forward pass that keeps every step. What a step computed is evaluated at the end."""

    steps: list[RawStep] = field(default_factory=list)
    runner: ForwardPass | None = None

    def forward(self, work: Sequence[SequenceWork], tokens_by_rank: Sequence[int] | None = None) -> Forward:
        assert self.runner is not None
        began = time.perf_counter()
        found = self.runner.forward(work, tokens_by_rank)
        seconds = time.perf_counter() - began
        spans = [(len(one.tokens), one.start) for one in work]
        self.steps.append(RawStep(spans, found.routed, found.served_by, seconds))
        return found

    def log(self, rank: int, *, layers: int, top_k: int) -> DispatchLog:
        """Return a dispatch log that completes the step of the last forward pass."""
        recorder = self

        class TimedLog(DispatchLog):
            """Also notes the duration of each step."""

            def add(self, epoch: int, step: FinishedStep, sharded: Sequence[int] = ()) -> None:
                recorder.steps[-1].seconds = step.seconds
                recorder.steps[-1].tokens_by_rank = step.tokens_by_rank
                super().add(epoch, step, sharded)

        return TimedLog(rank, layers=layers, top_k=top_k)


def evaluated(step: RawStep, rank: int, shape: ModelShape) -> TimedStep:
    """Return what a step computed on this rank."""
    prompts = [(count, start) for count, start in step.spans if count > 1]
    decodes = [start for count, start in step.spans if count == 1]
    first, ranks = sum(step.tokens_by_rank[:rank]), len(step.tokens_by_rank)
    remote, most = 0, shape.layers * shape.top_k * sum(step.tokens_by_rank) / ranks
    for layer in step.served_by:  # of sharded layers, every rank serves its part of every pair
        own = layer[first : first + len(step.routed)]
        remote += sum(int((own == other).any(axis=1).sum()) for other in range(ranks) if other != rank)
        pairs = np.bincount(layer.ravel(), minlength=ranks)
        most += float(pairs.max() - pairs.mean())
    cells = np.arange(shape.layers)[:, None] * shape.experts + step.routed.astype(np.int64)
    return TimedStep(
        seconds=step.seconds,
        forward_seconds=step.forward_seconds,
        prefill_tokens=sum(count for count, _ in prompts),
        prefill_pairs=sum(count * (start + (count + 1) / 2) for count, start in prompts),
        sequences=len(decodes),
        blocks=sum(start // PAGE_TOKENS + 1 for start in decodes),
        remote=remote,
        used=np.unique(cells).tolist(),
        surplus=most - shape.layers * shape.top_k * len(step.routed),
    )


async def serve_order(engine: EmbeddedEngine, order: Order) -> None:
    """Submit the requests together, and wait for their answers."""
    await asyncio.sleep(max(0.0, order.begin - time.monotonic()))
    answers = [
        await engine.submit(GenerationRequest(prompt=prompt, max_tokens=order.new_tokens, ignore_eos=True))
        for prompt in order.prompts
    ]
    for answer in answers:
        await answer.rest()


async def serve(job: TimedJob, folder: Path, rank: int) -> None:
    recorder = StepRecorder()
    setattr(step_loop, "DispatchLog", recorder.log)  # noqa: B010 it makes a subclass, of the same use

    def build(config: EmbeddedConfig, number: int, run_directory: Path | None) -> RankSetup:
        setup = build_setup(config, number, run_directory)
        recorder.runner = setup.runner
        return replace(setup, runner=recorder)

    config = EmbeddedConfig(
        checkpoint=job.checkpoint,
        ranks=job.ranks,
        placement=job.placement,
        kv_blocks=job.kv_blocks,
        link_seconds=job.link_seconds,
        collective_seconds=job.collective_seconds,
    )
    engine = EmbeddedEngine(config, rank, folder, build=build)
    async with AsyncExitStack() as stack:
        await engine.start()
        await stack.enter_async_context(alongside(engine.run(), "steps"))
        about = engine.description
        assert about.speed is not None
        assert about.shape is not None
        say(Started(about.speed, about.tp_speed, about.layout_times))
        gc.collect()
        gc.freeze()
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            first = len(recorder.steps)
            await serve_order(engine, msgspec.json.decode(line, type=Order))
            engine.take_facts()
            say(Served(first))
        logging.disable(logging.CRITICAL)  # once one rank leaves, the others log errors
    steps = [evaluated(one, rank, about.shape) for one in recorder.steps if one.tokens_by_rank]
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(steps))


def say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    asyncio.run(serve(msgspec.json.decode(path.read_bytes(), type=TimedJob), path.parent, int(sys.argv[2])))
