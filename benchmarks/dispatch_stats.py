"""Step-time cost of dispatch statistics: ranks of the embedded engine under closed load, with counting in
every second window.

Rank processes meet in a folder and serve their own requests, without bus and HTTP; facts are taken twenty
times a second, as agents do. All ranks switch counting in the same steps. Two figures: the processor time of
counting (on the step thread, and where facts are taken), as a share of step time; and the relative duration
of windows with counting compared with their neighbours without.

    python -m benchmarks.dispatch_stats --quick
"""

import asyncio
import gc
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import typer

from benchmarks.rig.processes import ROOT
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from deploy.demo_model import checkpoint_path
from deploy.process import alongside
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded import step_loop
from engine_adapter.embedded.dispatch_stats import DispatchLog, FinishedStep
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.engine import DispatchCounts

WINDOW_STEPS = 32
MIN_WINDOWS = 12
"""windows measured at least, whatever their duration"""
SLOTS_TO_SPARE = 2
"""per rank and layer, so that experts have replicas to choose from"""
LOOKS_PER_SECOND = 20.0
MAX_SHARE = 0.01
"""limit, as a share of a step's time"""


class Switched(DispatchLog):
    """Counter that counts in every second window of steps, and measures its own time."""

    def __init__(self, rank: int, *, layers: int, top_k: int) -> None:
        super().__init__(rank, layers=layers, top_k=top_k)
        self.seconds: list[float] = []
        """of every step"""
        self.ends: list[float] = []
        self.spent = 0.0
        """processor time"""

    def add(self, epoch: int, step: FinishedStep, sharded: Sequence[int] = ()) -> None:
        """Count, or skip."""
        counting = len(self.ends) // WINDOW_STEPS % 2 == 0
        began = time.thread_time()
        if counting:
            super().add(epoch, step, sharded)
            self.spent += time.thread_time() - began
        self.ends.append(time.perf_counter())
        self.seconds.append(step.seconds)

    def take(self) -> tuple[DispatchCounts, ...]:
        """Return counts as `DispatchLog` does."""
        began = time.thread_time()
        taken = super().take()
        self.spent += time.thread_time() - began
        return taken


async def stream(engine: EmbeddedEngine, prompt: int, seed: int) -> None:
    """Stream one answer after another, forever."""
    dice = np.random.default_rng(seed)
    while True:
        ids = dice.integers(32, 127, prompt).tolist()
        await (
            await engine.submit(
                GenerationRequest(prompt=ids, max_tokens=32 + int(dice.integers(96)), ignore_eos=True)
            )
        ).rest()


async def look(engine: EmbeddedEngine) -> None:
    """Take facts, as an agent does."""
    while True:
        await asyncio.sleep(1 / LOOKS_PER_SECOND)
        engine.take_facts()


def all_done(folder: Path, rank: int, ranks: int) -> None:
    """Return once every rank has called this: each needs the others' steps until then."""
    (folder / f"done-{rank}").touch()
    while len(list(folder.glob("done-*"))) < ranks:
        time.sleep(0.05)


async def serve(
    folder: Path, rank: int, ranks: int, sequences: int, prompt: int, seconds: float
) -> dict[str, Any]:
    """Return the measurements of one rank."""
    made: list[Switched] = []

    def switched(number: int, *, layers: int, top_k: int) -> Switched:
        made.append(Switched(number, layers=layers, top_k=top_k))
        return made[0]

    setattr(step_loop, "DispatchLog", switched)  # noqa: B010 it is another class, of the same use
    slots = None if ranks == 1 else 32 // ranks + SLOTS_TO_SPARE
    engine = EmbeddedEngine(
        EmbeddedConfig(
            checkpoint=checkpoint_path(), ranks=ranks, slots_per_rank=slots, kv_blocks=1024, threads=1
        ),
        rank,
        folder,
    )
    async with AsyncExitStack() as stack:
        await engine.start()
        await stack.enter_async_context(alongside(engine.run(), "steps"))
        await stack.enter_async_context(alongside(look(engine), "takes facts"))
        gc.collect()
        gc.freeze()
        for number in range(sequences):
            await stack.enter_async_context(
                alongside(stream(engine, prompt, 100 * rank + number), f"stream {number}")
            )
        await asyncio.sleep(seconds)
        log = made[0]
        while len(log.ends) < MIN_WINDOWS * WINDOW_STEPS:  # noqa: ASYNC110 of a machine that is busy with other things
            await asyncio.sleep(0.1)
        lengths, spent, speed = np.diff(log.ends, prepend=log.ends[0]), log.spent, engine.description.speed
        logging.disable(logging.CRITICAL)  # once one rank leaves, the others log errors
        await asyncio.to_thread(all_done, folder, rank, ranks)
    windows = lengths[: len(lengths) // WINDOW_STEPS * WINDOW_STEPS].reshape(-1, WINDOW_STEPS).sum(axis=1)
    return {
        "windows": windows[1:].tolist(),
        "share": spent / float(windows[::2].sum()),
        "dispatch": 0.0 if speed is None else speed.dispatch,
    }


def measured(ranks: int, sequences: int, prompt: int, seconds: float) -> list[dict[str, Any]]:
    """Return the measurements of each rank."""
    with tempfile.TemporaryDirectory(prefix="sent-") as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.dispatch_stats",
            "--rank-of",
            f"{ranks},{sequences},{prompt},{seconds}",
            "--folder",
            folder,
        ]
        children = [
            subprocess.Popen([*command, "--rank", str(rank)], cwd=ROOT, stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            said = [child.communicate(timeout=seconds + 300)[0] for child in children]
        finally:
            for child in children:
                child.kill()
    return [json.loads(one) for one in said]


def longer(windows: list[float]) -> tuple[float, float]:
    """Return the added duration of windows with counting (every second one, the first is without) relative to
    the mean of their neighbours: median, standard error."""
    ratios = [
        windows[at] / ((windows[at - 1] + windows[at + 1]) / 2) - 1 for at in range(1, len(windows) - 1, 2)
    ]
    if len(ratios) < 2:
        raise RuntimeError(f"{len(windows)} windows are too few to compare; measure longer")
    return statistics.median(ratios), 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    seconds: float = typer.Option(None, help="seconds of each case"),
    rank_of: str = typer.Option("", hidden=True),
    rank: int = typer.Option(0, hidden=True),
    folder: str = typer.Option("", hidden=True),
) -> None:
    """Measure the cost of dispatch statistics."""
    if rank_of:
        *numbers, lasting = rank_of.split(",")
        ranks, sequences, prompt = map(int, numbers)
        print(json.dumps(asyncio.run(serve(Path(folder), rank, ranks, sequences, prompt, float(lasting)))))
        return
    cases = (
        [(2, 2, 16), (2, 16, 64)] if quick else [(1, 8, 16), (2, 2, 16), (2, 16, 64), (4, 2, 16), (4, 8, 64)]
    )
    report = Report(
        "counting where tokens were sent",
        ["ranks, sequences each, prompt", "windows", "step ms", "counting us", "share %", "longer %", "+- %"],
    )
    shares = []
    for count, sequences, prompt in cases:
        found = measured(count, sequences, prompt, seconds or (6.0 if quick else 20.0))
        step = statistics.median(window / WINDOW_STEPS for one in found for window in one["windows"])
        share = max(one["share"] for one in found)
        shares.append(share)
        more, error = longer(found[0]["windows"])
        report.add(
            f"{count}, {sequences}, {prompt}",
            len(found[0]["windows"]) + 1,
            1e3 * step,
            1e6 * share * step,
            100 * share,
            100 * more,
            100 * error,
        )
        if found[0]["dispatch"]:
            measures = ", ".join(f"{1e6 * one['dispatch']:.2f}" for one in found)
            report.notes.append(
                f"{count} ranks: a token sent to one rank more costs {measures} us by the measurement at the"
                " start (of each rank)"
            )
    report.notes.append(
        "longer: a window of steps with counting, over the mean of its two neighbours without; median, and"
        " its standard error"
    )
    report.targets.append(
        Target(
            "processor time of counting over the time of the steps, worst",
            max(shares),
            MAX_SHARE,
            at_least=False,
            unit="",
        )
    )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
