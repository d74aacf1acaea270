"""Cost of reading distinct experts (the router's `distinct` term): predicted and measured step times of the
embedded engine.

Sequences decode one token each: once all the same token (few distinct experts), once different tokens (many).
The difference of the step times is compared with the engine's measured `expert_read` times the difference in
distinct experts, counted from the model's routers. One rank, no network.

    python -m benchmarks.demo_model.distinct_experts --quick
"""

import statistics
import time
from functools import partial

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from deploy.demo_model import checkpoint_path
from engine_adapter.embedded.calibration.calibrate import measure_prices
from engine_adapter.embedded.checkpoint import Checkpoint
from engine_adapter.embedded.model_runner import Forward, ModelRunner, SequenceWork
from fleet.placement import linear

SEQUENCES = (2, 4, 8, 16, 32)
LIMIT = 1.5
"""Largest factor between prediction and measurement, median over batch sizes."""


def batch(tokens: list[int]) -> list[SequenceWork]:
    """Return sequences that decode one token each, without context."""
    return [SequenceWork([token], 0, [page], needs_logits=True) for page, token in enumerate(tokens)]


def distinct(forward: Forward) -> int:
    """Count the distinct experts of a step, summed over layers."""
    return sum(len(np.unique(forward.routed[:, layer])) for layer in range(forward.routed.shape[1]))


def compared(
    runner: ModelRunner, same: list[SequenceWork], different: list[SequenceWork], rounds: int
) -> tuple[float, int]:
    """Return the added seconds of different tokens, each side at its fastest, alternating; and the added
    distinct experts."""
    taken: tuple[list[float], list[float]] = [], []
    counts = [0, 0]
    for _ in range(rounds):
        for at, step in enumerate((partial(runner.forward, same), partial(runner.forward, different))):
            begun = time.perf_counter()
            forward = step()
            taken[at].append(time.perf_counter() - begun)
            counts[at] = distinct(forward)
    return min(taken[1]) - min(taken[0]), counts[1] - counts[0]


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Compare predicted and measured cost of distinct experts."""
    report = Report(
        "Distinct experts: what reading them costs",
        ["sequences", "distinct more", "predicted us", "measured us", "ratio"],
    )
    chance = np.random.default_rng(7)
    with Checkpoint(checkpoint_path()) as checkpoint:
        about = checkpoint.config
        runner = ModelRunner(checkpoint, linear(layers=about.layers, experts=about.experts, ranks=1))
    speed = measure_prices(runner).dp
    ratios = []
    for count in SEQUENCES:
        tokens = chance.permutation(np.arange(32, 127))[:count].tolist()
        seconds, more = compared(runner, batch(tokens[:1] * count), batch(tokens), 30 if quick else 200)
        predicted = speed.expert_read * more
        ratios.append(predicted / seconds if seconds > 0 else float("inf"))
        report.add(str(count), more, 1e6 * predicted, 1e6 * seconds, ratios[-1])
    report.notes.append(
        f"expert_read as the engine measures it at start: {1e6 * speed.expert_read:.1f} us per distinct"
        " expert of a layer"
    )
    middle = statistics.median(ratios)
    report.targets.append(
        Target(
            "predicted over measured, median, whichever way it is off",
            max(middle, 1 / middle if middle else float("inf")),
            LIMIT,
            at_least=False,
        )
    )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
