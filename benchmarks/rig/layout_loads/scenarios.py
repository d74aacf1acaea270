"""Scenarios of the comparison of layout policies, drawn by seed: hardware, step times, a crossover, a load.

Step times have the size of Qwen3-235B on eight H200 (docs/measurements.md): about 15 to 50 ms. The durations
of EP are `fixed + experts (1 - (1 - k/E)^n) + each n`; those of other layouts are EP's times exp(d(log n)),
with d piecewise linear, so that any number of crossings can be drawn.
"""

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.rig.layout_loads.engine import Turn
from benchmarks.rig.layout_loads.engine_model import EngineModel, StepTimes
from benchmarks.rig.layout_loads.loads import Lengths, bursts, rollout, serving, waves
from benchmarks.rig.layout_loads.schedule import LayoutScenario, Schedule, replay
from fleet.layout_times import LayoutName
from migration.layouts.costs import LayoutLimits, SwitchCost

Crossover = Literal["low", "middle", "high", "several", "tp-always", "ep-always"]
LoadKind = Literal["bursty", "diurnal", "steady", "rollout", "tools"]
CROSSOVERS: tuple[Crossover, ...] = ("low", "middle", "high", "several", "tp-always", "ep-always")
LOADS: tuple[LoadKind, ...] = ("bursty", "diurnal", "steady", "rollout", "tools")
NO_CROSSOVER: tuple[Crossover, ...] = ("tp-always", "ep-always")
"""No load makes another layout better than that of the start: by step times, KV, caps or prompts."""
MOST = 2048
"""sequences that expert parallelism runs at once"""
CHUNK = 2048
"""prompt tokens of a step at most"""
LAYOUT_SETS: tuple[tuple[LayoutName, ...], ...] = (
    ("ep", "tp"),
    ("ep", "experts-tp"),
    ("ep", "experts-tp", "tp"),
)
LINKS = ((1.0, 0.5), (6.5, 0.3), (52.0, 0.2))
"""Duration of a copy as a multiple of NVLink's (NVLink, InfiniBand with one NIC per GPU, and with one per
node), and the probability of each."""
WEIGHTS_SECONDS = 0.152
"""seconds for the weights of Qwen3-235B over NVLink"""
KV_TO_TP, KV_FROM_TP = 1.3e-7, 5.5e-8
"""seconds per token of KV over NVLink: 4.21 and 1.80 GB per rank for 100,000 tokens, at 327 GB/s"""


class Knots(NamedTuple):
    """Logarithm of a layout's step time over EP's, at some numbers of sequences; linear in log n between."""

    sequences: Sequence[float]
    ratios: Sequence[float]

    def at(self, sequences: float) -> float:
        """Return the logarithm at a number of sequences; beyond the ends the last one holds."""
        return float(np.interp(log(sequences), np.log(self.sequences), self.ratios))


def scenario(crossover: Crossover, load: LoadKind, seed: int) -> LayoutScenario:
    """Return one scenario. Equal arguments give equal scenarios.

    It begins in the layout that is best if it never changes: the one that an operator would have chosen.
    """
    dice = np.random.default_rng([seed, CROSSOVERS.index(crossover), LOADS.index(load)])
    pivot = _pivot(dice, crossover)
    layouts = LAYOUT_SETS[int(dice.integers(len(LAYOUT_SETS)))]
    times = _times(dice, crossover, pivot, layouts)
    model = EngineModel(times, _limits(dice, crossover, layouts), _switches(dice, layouts), chunk=CHUNK)
    rolls = load in ("rollout", "tools")
    turns = _rollout(dice, pivot, load == "tools") if rolls else _serving(dice, load, pivot, times)
    made = LayoutScenario(f"{crossover}, {load}, {seed}", model, turns, "ep", rolls)
    return made._replace(start=min(layouts, key=lambda one: replay(made, Schedule(one)).cost))


def _pivot(dice: np.random.Generator, crossover: Crossover) -> float:
    """Return the number of sequences around which the load moves: the crossover, where there is one."""
    low, high = {"low": (14, 40), "high": (450, 900)}.get(crossover, (100, 300))
    return exp(dice.uniform(log(low), log(high)))


def _times(
    dice: np.random.Generator, crossover: Crossover, pivot: float, layouts: Sequence[LayoutName]
) -> dict[LayoutName, StepTimes]:
    fixed, experts, each = dice.uniform(0.010, 0.020), dice.uniform(0.006, 0.016), dice.uniform(4e-5, 9e-5)
    active = dice.uniform(0.03, 0.07)
    kv_token = dice.uniform(3e-9, 8e-9)
    prefill = dice.uniform(2.5e-5, 4e-5)
    numbers = np.arange(MOST + 1)
    base = fixed + experts * (1.0 - (1.0 - active) ** numbers) + each * numbers
    found = {}
    knots = _knots(dice, crossover, pivot)
    for layout in layouts:
        ratio = np.zeros(MOST + 1)
        if layout != "ep":
            share = 1.0 if layout == layouts[-1] else dice.uniform(0.3, 0.8)
            shift = 1.0 if layout == layouts[-1] else dice.uniform(1.0, 1.6)
            shift = 1.0 if crossover in NO_CROSSOVER else shift
            ratio = share * np.array([knots.at(max(1, number) / shift) for number in numbers])
        decode = base * np.exp(ratio)
        decode[0] = 0.0
        reading, computing = dice.uniform(1.0, 2.0), dice.uniform(0.95, 1.25)
        if crossover in NO_CROSSOVER:
            reading = computing = 1.0
        found[layout] = StepTimes(
            decode.tolist(),
            kv_token * (reading if layout == "tp" else 1.0),
            prefill * (1.0 if layout == "ep" else computing),
        )
    return found


def _knots(dice: np.random.Generator, crossover: Crossover, pivot: float) -> Knots:
    """Return the curve of the layout that differs most from EP; negative: it is faster."""
    fast, slow = -dice.uniform(0.15, 0.4), dice.uniform(0.15, 0.5)
    width = exp(dice.uniform(log(3.0), log(10.0)))
    if crossover == "tp-always":
        return Knots((1, pivot, MOST), (fast, 0.5 * fast, -dice.uniform(0.03, 0.1)))
    if crossover == "ep-always":
        return Knots((1, pivot, MOST), (dice.uniform(0.03, 0.1), 0.5 * slow, slow))
    if crossover == "several":
        high = dice.uniform(0.05, 0.25)
        points = (pivot / 6.0, pivot / 2.5, pivot / 1.5, pivot, pivot * 1.6)
        return Knots(points, (fast, 0.5 * high, high, -0.5 * high, slow))
    return Knots((pivot / width, pivot, pivot * width), (fast, 0.0, slow))


def _limits(
    dice: np.random.Generator, crossover: Crossover, layouts: Sequence[LayoutName]
) -> dict[LayoutName, LayoutLimits]:
    kv_tokens = int(dice.uniform(1.2e6, 2.0e6))
    cap = int(dice.choice([256, 512, MOST]))
    share = dice.choice([0.5, 1.0])
    if crossover in NO_CROSSOVER:
        cap, share = MOST, 1.0
    return {
        one: LayoutLimits(cap, int(share * kv_tokens), CHUNK)
        if one == "tp"
        else LayoutLimits(MOST, kv_tokens, CHUNK)
        for one in layouts
    }


def _switches(
    dice: np.random.Generator, layouts: Sequence[LayoutName]
) -> dict[tuple[LayoutName, LayoutName], SwitchCost]:
    link = float(dice.choice([one for one, _ in LINKS], p=[chance for _, chance in LINKS]))
    pause, slowdown = dice.uniform(0.01, 0.08), dice.uniform(0.1, 0.5)
    found = {}
    for one in layouts:
        for other in layouts:
            weights = WEIGHTS_SECONDS if "ep" in (one, other) else 0.0
            kv = KV_TO_TP if other == "tp" else KV_FROM_TP if one == "tp" else 0.0
            if one != other:
                found[one, other] = SwitchCost(link * weights, link * kv, pause, slowdown)
    return found


def _serving(
    dice: np.random.Generator, load: LoadKind, pivot: float, times: Mapping[LayoutName, StepTimes]
) -> list[Turn]:
    """Return requests whose number in the engine lies below the pivot in quiet times and above it in loud
    ones."""
    lengths = Lengths(dice.uniform(200, 900), dice.uniform(100, 350), dice.uniform(0.5, 1.0))
    seconds = dice.uniform(120, 200)
    fastest = min(times.values(), key=lambda one: one.seconds(pivot, 1000.0))

    def rate(sequences: float) -> float:
        """Requests per second that keep this many in the engine (Little's law)."""
        step = fastest.seconds(sequences, lengths.prompt + 0.5 * lengths.output)
        return sequences / (lengths.output * step + sequences * lengths.prompt * fastest.prefill_token)

    if load == "steady":
        level = rate(pivot * dice.uniform(0.6, 1.5))
        return serving(dice, lambda at: level, level, 0.7 * seconds, lengths)
    quiet = rate(pivot * dice.uniform(0.15, 0.7))
    loud = rate(min(1500.0, pivot * dice.uniform(1.2, 5.0)))
    if load == "diurnal":
        return serving(dice, waves(quiet, loud, seconds / dice.integers(1, 4)), loud, seconds, lengths)
    loud *= dice.uniform(1.0, 1.6)
    begins = [seconds * dice.uniform(0.1, 0.2), seconds * dice.uniform(0.5, 0.7)]
    return serving(dice, bursts(quiet, loud, begins, dice.uniform(8, 25)), loud, seconds, lengths)


def _rollout(dice: np.random.Generator, pivot: float, tools: bool) -> list[Turn]:
    """Return sequences that begin above the pivot, and end below it."""
    count = int(min(MOST, max(24, pivot * dice.uniform(1.5, 8.0))))
    lengths = Lengths(dice.uniform(100, 500), dice.uniform(300, 1200), dice.uniform(0.7, 1.1))
    return rollout(dice, count, lengths, 4 if tools else 1, dice.uniform(1, 15) if tools else 0.0)
