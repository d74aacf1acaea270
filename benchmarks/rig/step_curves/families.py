"""Random pairs of step-time curves, in families of different shapes, so that no calibrator is tuned to one.

A curve maps batches, float64 [n], to seconds of a step. Pairs are drawn so that about half of them cross
within the measured range.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fleet.arrays import FloatArray

Curve = Callable[[FloatArray], FloatArray]
Pair = tuple[Curve, Curve]
POINTS = 6
CELLS = 160
"""batches at which a pair is judged, evenly spaced in log B"""
GRAPHS = np.array(
    [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32), *range(512, 4097, 128)]
)
"""batches to which steps are padded"""
RANKS = 8


def log_uniform(dice: np.random.Generator, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return float(np.exp(dice.uniform(np.log(low), np.log(high))))


def affine(dice: np.random.Generator, most: float) -> Curve:
    """a + b B."""
    fixed, knee = log_uniform(dice, 0.5, 2.0), log_uniform(dice, 2.0, 2.0 * most)
    return lambda batch: fixed * (1.0 + batch / knee)


def experts(dice: np.random.Generator, most: float) -> Curve:
    """a + b B + c (1 - (1 - k / E)^B): each distinct expert is read once."""
    base, reads = affine(dice, most), log_uniform(dice, 0.2, 4.0)
    chance = dice.choice([2, 4, 8]) / dice.choice([32, 64, 128, 256])
    share = dice.choice([1.0, 1.0, 0.5, 0.125])
    return lambda batch: base(batch) + reads * (1.0 - (1.0 - chance) ** (share * batch))


def roofline(dice: np.random.Generator, most: float) -> Curve:
    """Fixed part + parts of which each is the larger of reading and computing."""
    fixed = log_uniform(dice, 0.05, 0.8)
    parts = [
        (log_uniform(dice, low, high), log_uniform(dice, 4.0, 2.0 * most))
        for low, high in ((0.5, 2.0), (0.02, 1.0))
    ]
    return lambda batch: fixed + sum(size * np.maximum(1.0, batch / knee) for size, knee in parts)


def kink(dice: np.random.Generator, most: float) -> Curve:
    """max(a, b B) with a small fixed part: the sharpest bend of a single part."""
    fixed, size, knee = (
        log_uniform(dice, 0.01, 0.3),
        log_uniform(dice, 0.5, 2.0),
        log_uniform(dice, 4.0, 2.0 * most),
    )
    return lambda batch: fixed + size * np.maximum(1.0, batch / knee)


def powers(dice: np.random.Generator, most: float) -> Curve:
    """a B^p + b B^q."""
    size, slow, fast = log_uniform(dice, 0.001, 1.0), dice.uniform(0.0, 0.3), dice.uniform(0.4, 1.0)
    return lambda batch: batch**slow + size * batch**fast


def power(dice: np.random.Generator, most: float) -> Curve:
    """a B^p."""
    slope = dice.uniform(0.0, 0.9)
    return lambda batch: batch**slope


def knots(dice: np.random.Generator, most: float) -> Curve:
    """Straight in log-log between the measured batches."""
    return _straight(dice, np.log(measured(most)))


def convex(dice: np.random.Generator, most: float) -> Curve:
    """Straight in log-log, bent upwards at three places between the measured batches."""
    places = np.concatenate([[0.0], np.sort(dice.uniform(0.0, np.log(most), 3)), [np.log(most)]])
    return _straight(dice, places, rising=True)


def graphs(dice: np.random.Generator, most: float) -> Curve:
    """Steps of captured graphs: batches are padded to the next size, by rank or for all ranks."""
    base, ranks = experts(dice, most), dice.choice([1, RANKS])
    return lambda batch: base(ranks * GRAPHS[np.searchsorted(GRAPHS, batch / ranks - 1e-9)])


def _straight(dice: np.random.Generator, places: FloatArray, *, rising: bool = False) -> Curve:
    """Lines in log-log between places (log B), with slopes from 0 to 1."""
    slopes = dice.uniform(0.0, 1.0, len(places) - 1)
    heights = np.concatenate([[0.0], np.cumsum((np.sort(slopes) if rising else slopes) * np.diff(places))])
    return lambda batch: np.exp(np.interp(np.log(batch), places, heights))


def wave(dice: np.random.Generator, most: float) -> Pair:
    """a + b B, and the same times a random smooth ratio."""
    base, length, size = affine(dice, most), dice.uniform(1.5, 4.0), log_uniform(dice, 0.05, 0.4)
    height, turn, start = (
        dice.normal(0, 1, 12),
        dice.normal(0, 1 / length, 12),
        dice.uniform(0, 2 * np.pi, 12),
    )

    def other(batch: FloatArray) -> FloatArray:
        waves = height[:, None] * np.cos(turn[:, None] * np.log(batch) + start[:, None])
        return np.asarray(base(batch) * np.exp(size * waves.sum(axis=0) / np.sqrt(6.0)))

    return base, other


def zigzag(dice: np.random.Generator, most: float) -> Pair:
    """a + b B, and the same times a ratio whose logarithm is straight between the measured batches."""
    base, places = affine(dice, most), np.log(measured(most))
    heights = dice.normal(0.0, log_uniform(dice, 0.05, 0.5), POINTS)
    return base, lambda batch: base(batch) * np.exp(np.interp(np.log(batch), places, heights))


def alike(dice: np.random.Generator, most: float) -> Pair:
    """One curve twice, up to 6 % apart, so that noise alone makes crossings."""
    base, ratio = experts(dice, most), np.exp(dice.uniform(-0.06, 0.06))
    return base, lambda batch: ratio * base(batch)


SINGLE = (affine, experts, roofline, kink, powers, power, knots, convex, graphs)
"""families of one curve: both layouts draw one"""
PAIRED = (wave, zigzag, alike)
FAMILIES = tuple(one.__name__ for one in (*SINGLE, *PAIRED))


def measured(most: float) -> FloatArray:
    """Return the measured batches: six whole numbers, about evenly spaced in log B, from 1 to `most`."""
    return np.unique(np.round(np.geomspace(1.0, most, POINTS)))


def cells(most: float) -> FloatArray:
    """Return the batches that are judged."""
    return np.geomspace(1.0, most, CELLS)


class DrawnPair(NamedTuple):
    """Two layouts, and the time that a token of context adds to the step of each sequence, as a share of the
    step of one sequence."""

    one: Curve
    other: Curve
    reads: tuple[float, float] = (0.0, 0.0)

    def seconds(self, which: int, batch: FloatArray, context: float) -> FloatArray:
        """Return the true step times of one layout (0) or the other (1)."""
        return np.asarray(self[which](batch) + self.reads[which] * batch * context)

    def log_ratio(self, most: float, context: float) -> FloatArray:
        """Return log(one / other) at `cells`."""
        at = cells(most)
        return np.asarray(np.log(self.seconds(0, at, context) / self.seconds(1, at, context)))

    def is_fair(self, most: float, context: float) -> bool:
        """Return True if there is at most one crossing between neighbouring measured batches."""
        at, log_ratio = cells(most), self.log_ratio(most, context)
        inside = [log_ratio[(at >= low) & (at <= high)] for low, high in pairwise(measured(most))]
        return max(changes(part) for part in inside) <= 1


def changes(values: FloatArray) -> int:
    """Count the changes of sign."""
    sign = np.sign(values)
    return int((sign[1:] != sign[:-1]).sum())


def drawn(
    family: str, dice: np.random.Generator, most: float, contexts: tuple[float, ...] = (0.0,)
) -> DrawnPair:
    """Draw a pair with at most one crossing between neighbouring measured batches, at each of these contexts.

    With several contexts, steps read the KV cache, in one layout up to twice as fast as in the other.
    """
    while True:
        one, other = _pair(family, dice, most)
        reads = (0.0, 0.0)
        if len(contexts) > 1:
            base = float(one(np.ones(1))[0]) * log_uniform(dice, 0.01, 3.0) / (most * max(contexts))
            reads = (base, base * dice.choice([0.5, 1.0, 1.0, 2.0]))
        pair = DrawnPair(one, other, reads)
        if all(pair.is_fair(most, context) for context in contexts):
            return pair


def _pair(family: str, dice: np.random.Generator, most: float) -> Pair:
    paired = next((one for one in PAIRED if one.__name__ == family), None)
    if paired is not None:
        return paired(dice, most)
    draw = next(one for one in SINGLE if one.__name__ == family)
    one, other = draw(dice, most), draw(dice, most)
    # Nearly equal at some batch, which may lie beyond the measured range: about half of the pairs cross.
    meet = np.array([np.clip(np.exp(dice.uniform(-0.3, 1.3) * np.log(most)), 1.0, most)])
    apart = np.exp(dice.normal(0.0, 0.1 if dice.random() < 0.5 else 0.4))
    ratio = float(one(meet)[0] / other(meet)[0] * apart)
    return one, lambda batch: ratio * other(batch)
