"""Answers of the calibrator about a random pair of layouts, beside the truth."""

from typing import NamedTuple

import numpy as np

from benchmarks.rig.step_curves.families import DrawnPair, cells, changes, drawn, measured
from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.curves import LayoutCurves

NOISE = 0.02
DIFFERENT = 0.05
"""relative difference of step times from which an answer counts"""
CONTEXT = 1024
CONTEXTS = (512, 8192)
"""measured, where the step times at one between them are asked for"""
LAYOUTS: tuple[LayoutName, LayoutName] = ("ep", "tp")


class Judged(NamedTuple):
    """One pair: cells and crossings."""

    differing: int
    """cells that differ by more than 5 %"""
    right: int
    """of these, named as they are"""
    covered: float
    """share of all cells whose true difference is within two stated standard errors"""
    crossings: int
    """true ones"""
    answered: int
    """stated ones"""
    matters: bool
    """each layout is faster by more than 5 % somewhere"""


class Score(NamedTuple):
    """Many pairs of one family."""

    right: float
    """share of right cells, of those that differ"""
    covered: float
    without: int
    """pairs without a crossing"""
    false: int
    """of these, pairs with a stated crossing"""
    crossing: int
    """pairs with crossings"""
    missed: int
    """of these, pairs without a stated one"""
    mattering: int
    """of the missed pairs, those in which each layout is faster by more than 5 % somewhere"""
    exact: int
    """of these, pairs with as many stated as true ones"""

    @classmethod
    def of(cls, judged: list[Judged]) -> "Score":
        """Sum up. Cells of all pairs count alike."""
        without = [one for one in judged if not one.crossings]
        crossing = [one for one in judged if one.crossings]
        return cls(
            right=sum(one.right for one in judged) / max(sum(one.differing for one in judged), 1),
            covered=float(np.mean([one.covered for one in judged])),
            without=len(without),
            false=sum(one.answered > 0 for one in without),
            crossing=len(crossing),
            missed=sum(not one.answered for one in crossing),
            mattering=sum(not one.answered and one.matters for one in crossing),
            exact=sum(one.answered == one.crossings for one in crossing),
        )


def noisy_times(
    layout: LayoutName, pair: DrawnPair, most: float, contexts: tuple[int, ...], dice: np.random.Generator
) -> LayoutTimes:
    """Measure a layout of a pair at six batches and these contexts, with noise."""
    batches = measured(most)
    which = LAYOUTS.index(layout)
    seconds = [
        1e-3 * pair.seconds(which, batches, context) * np.exp(dice.normal(0.0, NOISE, len(batches)))
        for context in contexts
    ]
    return LayoutTimes(
        layout=layout,
        sequences=tuple(int(batch) for batch in batches),
        contexts=contexts,
        seconds=tuple(tuple(row.tolist()) for row in seconds),
        noise=NOISE,
        prefill_token=1e-5,
    )


def calibrated(
    pair: DrawnPair, most: float, contexts: tuple[int, ...], dice: np.random.Generator
) -> LayoutCurves:
    """Fit the curves of a pair from noisy measurements of each."""
    return LayoutCurves.fitted([noisy_times(layout, pair, most, contexts, dice) for layout in LAYOUTS])


def judged(family: str, most: float, seed: int, contexts: tuple[int, ...] = (CONTEXT,)) -> Judged:
    """Draw a pair, calibrate it, and compare the answers at a context: the measured one, or one between
    them."""
    dice = np.random.default_rng([seed, int(most), *family.encode()])
    asked = float(dice.uniform(contexts[0], contexts[-1]))
    pair = drawn(family, dice, most, (*contexts, asked) if len(contexts) > 1 else contexts)
    curves, truth = calibrated(pair, most, contexts, dice), pair.log_ratio(most, asked)
    at = cells(most).tolist()
    answers = np.array([curves.better(batch, asked) == LAYOUTS[0] for batch in at])
    differs = np.abs(truth) > np.log1p(DIFFERENT)
    stated = [curves.difference(*LAYOUTS, batch, asked) for batch in at]
    error = np.array([one.log_ratio for one in stated]) - truth
    return Judged(
        differing=int(differs.sum()),
        right=int((differs & (answers == (truth < 0))).sum()),
        covered=float((np.abs(error) <= 2.0 * np.array([one.deviation for one in stated])).mean()),
        crossings=changes(truth),
        answered=len(curves.crossings(*LAYOUTS, asked)),
        matters=bool(min(truth.max(), -truth.min()) > np.log1p(DIFFERENT)),
    )
