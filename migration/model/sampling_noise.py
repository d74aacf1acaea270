"""What a window's sampling noise explains by itself, and which layers' demand has changed beyond it. Pure.

A window of n (token, k) pairs per layer knows an expert's load to about the root of its count (Poisson). A plan fits the noise of its window; the next
window has its own, so what a plan shows on its window it does not show on the next.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, ndtr, ndtri

Layers = NDArray[np.float64]
FALSE_ALARMS = 1e-3
"""share of the layers reported as changed that may be so by chance (Benjamini and Hochberg 1995), and so the chance of any where none has"""

COMMON = 0.5
"""where more than this part of the layers is found to have changed, all have: demand moves as a whole"""
_POINTS = np.linspace(-3.0, 5.0, 11)
"""standard deviations beyond the largest mean between which the distribution of the largest of normals is added up"""


class LoadNoise(NamedTuple):
    """How many (token, k) pairs stand behind a load, in each layer: a number, or [layers]."""

    window: float | NDArray[Any]
    """in the window that the load was counted in"""
    step: float | NDArray[Any] | None = None
    """in one step of the engine; None: not known, or of no concern"""


def expected_most(ranks: int) -> float:
    """Expected largest of so many standard normals (Blom 1958); 0 for one."""
    return float(ndtri((ranks - 0.375) / (ranks + 0.25)))


def deviation(load: NDArray[np.float64], replicas: NDArray[Any], ranks: int, pairs: float | NDArray[Any]) -> Layers:
    """float64 [layers]: standard deviation, between two windows, of a rank's load over the mean rank load.

    load: [layers, experts], any unit; replicas: int [layers, experts]. Counts are Poisson, replicas of an expert share its noise evenly: the variance
    of an average rank is sum(load / replicas) * ranks / (sum(load) * pairs) per window.
    """
    total = np.maximum(load.sum(axis=1), 1e-300)
    alone = (load / np.maximum(replicas, 1)).sum(axis=1) / total
    return np.asarray(np.sqrt(2.0 * alone * ranks / np.maximum(pairs, 1.0)))


def scatter(before: NDArray[Any], now: NDArray[Any]) -> float:
    """By how much two windows' counts differ more than independent pairs would: chi-square of both, all layers, over its degrees of freedom (the design
    effect, Kish 1965, with what has really changed in between); at least 1. before, now: [layers, experts] pairs."""
    sums = [np.maximum(counts.sum(axis=1, keepdims=True), 1e-300) for counts in (before, now)]
    apart = before * np.sqrt(sums[1] / sums[0]) - now * np.sqrt(sums[0] / sums[1])
    both = before + now
    free = np.count_nonzero(both) - len(both)
    return max(1.0, float((apart**2 / np.maximum(both, 1e-300)).sum()) / free) if free > 0 else 1.0


def deviations(shares: NDArray[np.float64], replicas: NDArray[Any], pairs: float | NDArray[Any]) -> NDArray[np.float64]:
    """float64 [layers, ranks]: as `deviation`, of each rank. shares: [layers, ranks, slots of a rank], what each slot serves in mean rank loads; replicas:
    of what is in it, so shaped."""
    ranks = shares.shape[1]
    alone = (shares / np.maximum(replicas, 1)).sum(axis=2)
    return np.asarray(np.sqrt(2.0 * ranks * alone / np.maximum(np.broadcast_to(pairs, len(shares)), 1.0)[:, None]))


def freedom(load: NDArray[np.float64], replicas: NDArray[Any], ranks: int) -> Layers:
    """float64 [layers]: of how many independent numbers the noise of so many ranks' loads is made. Arguments as of `deviation`.

    Replicas of an expert err together: Satterthwaite's (1946) degrees of freedom, tr(C)^2 / tr(C^2) for the covariance C of rank loads, where two
    experts share as many ranks as they do by chance.
    """
    alone = load / np.maximum(replicas, 1)
    total = np.maximum(alone.sum(axis=1), 1e-300)
    return np.asarray(1.0 / (1.0 / ranks + ((alone / total[:, None]) ** 2).sum(axis=1)))  # of nothing wanted: ranks


def changed(loads: NDArray[np.float64], goal: Layers, noise: NDArray[np.float64], free: Layers | None = None) -> NDArray[np.bool_]:
    """bool [layers]: where rank loads lie further apart than a good placement's do when nothing but the sample is new.

    loads: [layers, ranks] over their mean, live ranks only; goal: balance that a full re-placement reaches on this window; noise: `deviation` of a layer's
    ranks, or `deviations`, of each; free: `freedom`, None: ranks err on their own. Every rank is held against the normal tail beyond the re-placement's
    most, all that are above the mean together against chi-square (of half a normal's square, mean 1/2 and variance 5/4, as a gamma: a good placement
    may well have a rank far below the mean).
    """
    ranks = loads.shape[1]
    most = 1.0 / np.maximum(goal, 1e-9)[:, None]
    spread = np.maximum(noise if noise.ndim == 2 else noise[:, None], 1e-12)
    alone = ranks * ndtr(((most - loads) / spread).min(axis=1))
    degrees = np.maximum(ranks - 1.0 if free is None else np.minimum(free, ranks - 1.0), 1.0)
    above = ((np.maximum(loads - 1.0, 0.0) / np.hypot(spread, most - 1.0)) ** 2).sum(axis=1)
    together = chdtrc(0.4 * degrees, above * degrees / ranks / 1.25)
    chance = np.minimum(2.0 * np.minimum(alone, together), 1.0)
    found = _discoveries(chance)
    return found if found.mean() <= COMMON else np.ones(len(found), bool)


def _discoveries(chance: Layers) -> NDArray[np.bool_]:
    """Which chances are small enough together (Benjamini and Hochberg's step-up)."""
    ordered = np.sort(chance)
    passing = np.flatnonzero(ordered <= FALSE_ALARMS * np.arange(1, len(chance) + 1) / len(chance))
    return chance <= ordered[passing[-1]] if len(passing) else np.zeros(len(chance), bool)


def expected_max(loads: NDArray[np.float64], spread: Layers) -> Layers:
    """float64 [layers]: expected largest of normals with means loads [layers, ranks] and one standard deviation per layer."""
    most = loads.max(axis=1)
    where = most[:, None] + spread[:, None] * _POINTS  # [layers, points]
    below = ndtr((where[:, None, :] - loads[:, :, None]) / np.maximum(spread, 1e-12)[:, None, None]).prod(axis=1)
    step = spread * (_POINTS[1] - _POINTS[0])
    return np.asarray(where[:, -1] - step * (below.sum(axis=1) - 0.5 * (below[:, 0] + below[:, -1])))
