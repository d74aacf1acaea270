"""Step times corrected by live steps: the comparison of two layouts while machine and curves are not as
calibrated.

An hour of service with a report a second, at batches that wander over the calibrated range. The layout in
force changes whenever the other one is believed to be faster by more than 5 %, at most once in 20 s. A cell
is a second in which the layouts differ by more than 5 %; it is right if the faster one is named. Beside: the
same with the calibrated curves alone.

    python -m benchmarks.layouts.live_curves --quick
"""

import timeit
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import typer

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.step_curves.accuracy import CONTEXT, DIFFERENT, LAYOUTS, NOISE, noisy_times
from benchmarks.rig.step_curves.families import DrawnPair, drawn
from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.curves import LayoutCurves
from migration.layouts.curves_record import CurveKey
from migration.layouts.live_curves import LiveCurves

MOST = 256
HOUR = 3600
DWELL = 20
"""fewest seconds between changes of layout"""
RIGHT = 0.99
LOSS = 0.01
REPORT_MICROSECONDS = 20.0
KEY = CurveKey(weights="w", hardware="h", ranks=2)
FAMILIES = ("affine", "experts", "roofline")


class Truth(NamedTuple):
    """Log factors beside the calibrated times."""

    machine: Callable[[float], float]
    """of both layouts, over the time in seconds"""
    layout: Callable[[float], tuple[float, float]]
    """of each, over the batch"""


def calm(at: float) -> float:
    """A machine as fast as at the calibration."""
    return 0.0


CASES: dict[str, Truth] = {
    "as calibrated": Truth(calm, lambda batch: (0.0, 0.0)),
    "machine up to 40 % slower": Truth(lambda at: 0.17 * (1 - np.cos(at / 600)), lambda batch: (0.0, 0.0)),
    "machine suddenly 2x slower": Truth(lambda at: 0.7 * (at > 1200), lambda batch: (0.0, 0.0)),
    "one layout 20 % slower": Truth(calm, lambda batch: (0.0, 0.18)),
    "one layout 20 % faster": Truth(calm, lambda batch: (0.0, -0.18)),
    "one layout slower at large batches": Truth(
        calm, lambda batch: (0.3 * np.log(batch) / np.log(MOST), 0.0)
    ),
    "machine slower, one layout faster": Truth(
        lambda at: 0.17 * (1 - np.cos(at / 600)), lambda batch: (-0.18, 0.0)
    ),
}


class Hour(NamedTuple):
    """Seconds that differ, of these right by live and by calibrated curves, and changes of layout."""

    differing: int
    live: int
    calibrated: int
    switches: int


def hour(pair: DrawnPair, times: list[LayoutTimes], truth: Truth, seed: int, seconds: int) -> Hour:
    """Serve an hour."""
    dice = np.random.default_rng(seed)
    live, calibrated = LiveCurves(KEY, times, 0.0), LayoutCurves.fitted(times)
    layout: LayoutName = LAYOUTS[0]
    since, differing, right, right_before, switches = 0, 0, 0, 0, 0
    batch = 16.0
    for at in range(seconds):
        batch = float(np.clip(batch * np.exp(dice.normal(0.0, 0.1)), 1.0, MOST))
        factors = truth.layout(batch)
        true = [
            float(1e-3 * pair.seconds(which, np.array([batch]), CONTEXT)[0])
            * float(np.exp(truth.machine(at) + factors[which]))
            for which in (0, 1)
        ]
        noise = float(np.exp(dice.normal(0.0, NOISE)))
        live.observe(layout, batch, CONTEXT, true[LAYOUTS.index(layout)] * noise, float(at))
        ours, others = (live.step_seconds(one, batch, CONTEXT) for one in LAYOUTS)
        if abs(np.log(true[0] / true[1])) > np.log1p(DIFFERENT):
            differing += 1
            right += (ours < others) == (true[0] < true[1])
            right_before += (calibrated.better(batch, CONTEXT) == LAYOUTS[0]) == (true[0] < true[1])
        better = LAYOUTS[0] if ours < others else LAYOUTS[1]
        if better != layout and abs(np.log(ours / others)) > DIFFERENT and at - since >= DWELL:
            layout, since, switches = better, at, switches + 1
    return Hour(differing, right, right_before, switches)


def report_microseconds() -> float:
    """Return the time of one report: a live step, and the prices of two layouts."""
    dice = np.random.default_rng(0)
    pair = drawn("affine", dice, MOST)
    live = LiveCurves(KEY, [noisy_times(one, pair, MOST, (512, 8192), dice) for one in LAYOUTS], 0.0)

    def report() -> None:
        live.observe("ep", 77.0, 2000.0, 0.005, 1.0)
        for layout in LAYOUTS:
            live.step_seconds(layout, 77.0, 2000.0)
            live.deviation(layout, 77.0, 2000.0)
            live.uncertain(layout)

    return 1e6 * min(timeit.repeat(report, number=2000, repeat=5)) / 2000


def main(quick: bool = Quick, as_json: bool = AsJson, check: bool = Check) -> None:
    """Compare live curves with calibrated ones."""
    report = Report(
        "step times corrected by live steps",
        ["truth beside the calibration", "right, live %", "right, calibrated %", "switches in an hour"],
    )
    gains, machine_only = [], []
    pairs, seconds = 2 if quick else 10, HOUR // 3 if quick else HOUR
    for name, truth in CASES.items():
        found = []
        for at in range(pairs * len(FAMILIES)):
            dice = np.random.default_rng([at, 5])
            pair = drawn(FAMILIES[at % len(FAMILIES)], dice, MOST)
            times = [noisy_times(one, pair, MOST, (CONTEXT,), dice) for one in LAYOUTS]
            found.append(hour(pair, times, truth, at, seconds))
        total = max(sum(one.differing for one in found), 1)
        right = sum(one.live for one in found) / total
        before = sum(one.calibrated for one in found) / total
        gains.append(right - before)
        if truth.layout(MOST) == (0.0, 0.0):
            machine_only.append(right)
        report.add(
            name, 100 * right, 100 * before, sum(one.switches for one in found) / len(found) * HOUR / seconds
        )
    report.targets += [
        Target("a report", report_microseconds(), REPORT_MICROSECONDS, at_least=False, unit=" us"),
        Target(
            "share of right seconds lost in any case against calibrated curves alone",
            max(0.0, -min(gains)),
            LOSS,
            at_least=False,
            unit="",
        ),
        Target("right seconds while only the machine changes", min(machine_only), RIGHT, unit=""),
    ]
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
