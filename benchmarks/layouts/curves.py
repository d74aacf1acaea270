"""Accuracy of the calibrator of layouts: six noisy step times of each of two layouts, and the answers beside
the truth.

Random pairs of curves in families of different shapes, at six log-spaced batches up to 256 or 2,048, with 2 %
noise and at most one crossing between neighbouring measured batches. A cell is one of 160 log-spaced batches;
it counts if the layouts differ there by more than 5 %, and is right if the faster one is named. "No
crossover" is false where the faster layout changes; a crossing is false where it does not, by however little.
Pairs whose crossing is missed are also counted if each layout is faster by more than 5 % somewhere.

    python -m benchmarks.layouts.curves --quick
"""

import timeit

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.step_curves.accuracy import CONTEXT, CONTEXTS, Judged, Score, calibrated, judged
from benchmarks.rig.step_curves.families import FAMILIES, drawn, measured

MOST = (256, 2048)
PAIRS = 1000
RIGHT = 0.99
ANSWERS = 0.9
CALL_SECONDS = 2e-6


def call_seconds() -> float:
    """Return the seconds of one question for a step time."""
    dice = np.random.default_rng(0)
    curve = calibrated(drawn("affine", dice, 256), 256, CONTEXTS, dice).curves["ep"]
    calls = 20_000
    return min(timeit.repeat(lambda: curve.seconds(77.0, CONTEXT), number=calls, repeat=5)) / calls


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    pairs: int = typer.Option(None, help="pairs of curves of each family and range"),
    seed: int = typer.Option(1, help="another seed draws other pairs"),
) -> None:
    """Compare the calibrator's answers with the truth."""
    count = pairs or (60 if quick else PAIRS)
    report = Report(
        "calibrated step times",
        [
            "family, batches up to",
            "right cells %",
            "in 2 errors %",
            "no crossing",
            "false",
            "crossing",
            "missed",
            "by 5 %",
            "exact",
        ],
    )
    every: list[Judged] = []
    for family in FAMILIES:
        found = [judged(family, most, seed * 1_000_000 + at) for most in MOST for at in range(count)]
        every += found
        for at, most in enumerate(MOST):
            add(report, f"{family}, {most}", Score.of(found[at * count : (at + 1) * count]))
    between = [
        judged(family, most, seed * 1_000_000 + at, CONTEXTS)
        for family in FAMILIES
        for most in MOST
        for at in range(max(count // 10, 5))
    ]
    add(report, "all, between two contexts", Score.of(between))
    score = Score.of(every)
    add(report, "all, at a measured context", score)
    answers = 1.0 - (score.false + score.missed) / (score.without + score.crossing)
    report.notes.append(
        f"measured batches: {', '.join(str(measured(most).astype(int).tolist()) for most in MOST)}"
    )
    report.targets += [
        Target("time of one question, us", 1e6 * call_seconds(), 1e6 * CALL_SECONDS, at_least=False, unit=""),
        Target("right answers to whether there is a crossing", answers, ANSWERS, unit=""),
        Target("right cells between two contexts", Score.of(between).right, RIGHT, unit=""),
        Target("right cells of those that differ by more than 5 %", score.right, RIGHT, unit=""),
    ]
    report.finish(as_json=as_json, check=check)


def add(report: Report, name: str, score: Score) -> None:
    """Add a row."""
    report.add(
        name,
        100 * score.right,
        100 * score.covered,
        score.without,
        score.false,
        score.crossing,
        score.missed,
        score.mattering,
        score.exact,
    )


if __name__ == "__main__":
    typer.run(main)
