"""Sampling noise of a demand window, and detection of layers whose demand changed beyond that noise. Pure.

With n (token, k) pairs per layer, the error of an expert's load is about the root of its count (Poisson). A
plan fits the noise of its own window. The next window has different noise, so part of the apparent gain
disappears there.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtrc, ndtr, ndtri

from fleet.arrays import FloatArray

FALSE_ALARMS = 1e-3
"""false discovery rate of the layers reported as changed (Benjamini and Hochberg 1995); also the probability
of any report when nothing has changed"""

COMMON = 0.5
"""if more than this share of the layers has changed, all layers count as changed: demand shifts as a whole"""
_POINTS = np.linspace(-3.0, 5.0, 11)
"""integration points of the distribution of the maximum of normals, in standard deviations above the largest
mean"""


class LoadNoise(NamedTuple):
    """(token, k) pairs behind a load, in each layer: a number, or [layers]."""

    window: float | NDArray[Any]
    """pairs in the window in which the load was counted"""
    step: float | NDArray[Any] | None = None
    """pairs in one engine step; None: unknown or irrelevant"""


def expected_most(ranks: int) -> float:
    """Return the expected maximum of this many standard normals (Blom 1958); 0 for one."""
    return float(ndtri((ranks - 0.375) / (ranks + 0.25)))


def deviation(
    load: NDArray[np.float64], replicas: NDArray[Any], ranks: int, pairs: float | NDArray[Any]
) -> FloatArray:
    """Return the standard deviation, between two windows, of a rank's load over the mean rank load: float64
    [layers].

    load: [layers, experts], any unit; replicas: int [layers, experts]. Counts are Poisson, and the replicas
    of an expert share its noise evenly. The variance of an average rank is sum(load / replicas) * ranks /
    (sum(load) * pairs) per window.
    """
    total = np.maximum(load.sum(axis=1), 1e-300)
    alone = (load / np.maximum(replicas, 1)).sum(axis=1) / total
    return np.asarray(np.sqrt(2.0 * alone * ranks / np.maximum(pairs, 1.0)))


def scatter(before: NDArray[Any], now: NDArray[Any]) -> float:
    """Return the overdispersion between two windows relative to independent pairs; at least 1.

    It is the chi-square of both windows over all layers, divided by its degrees of freedom (the design
    effect, Kish 1965, including real changes in between). before, now: [layers, experts] pairs.
    """
    sums = [np.maximum(counts.sum(axis=1, keepdims=True), 1e-300) for counts in (before, now)]
    apart = before * np.sqrt(sums[1] / sums[0]) - now * np.sqrt(sums[0] / sums[1])
    both = before + now
    free = np.count_nonzero(both) - len(both)
    return max(1.0, float((apart**2 / np.maximum(both, 1e-300)).sum()) / free) if free > 0 else 1.0


def deviations(
    shares: NDArray[np.float64], replicas: NDArray[Any], pairs: float | NDArray[Any]
) -> NDArray[np.float64]:
    """Return the `deviation` of each rank, float64 [layers, ranks].

    shares: [layers, ranks, slots of a rank], load of each slot in units of the mean rank load; replicas: of
    the expert in each slot, same shape.
    """
    ranks = shares.shape[1]
    alone = (shares / np.maximum(replicas, 1)).sum(axis=2)
    return np.asarray(
        np.sqrt(2.0 * ranks * alone / np.maximum(np.broadcast_to(pairs, len(shares)), 1.0)[:, None])
    )


def freedom(load: NDArray[np.float64], replicas: NDArray[Any], ranks: int) -> FloatArray:
    """Return the degrees of freedom of the noise of the ranks' loads, float64 [layers]. Arguments as in
    `deviation`.

    Errors of the replicas of an expert are correlated. Satterthwaite (1946): tr(C)^2 / tr(C^2) for the
    covariance C of the rank loads, assuming that two experts share as many ranks as they would by chance.
    """
    alone = load / np.maximum(replicas, 1)
    total = np.maximum(alone.sum(axis=1), 1e-300)
    # without demand: ranks
    return np.asarray(1.0 / (1.0 / ranks + ((alone / total[:, None]) ** 2).sum(axis=1)))


def changed(
    loads: NDArray[np.float64], goal: FloatArray, noise: NDArray[np.float64], free: FloatArray | None = None
) -> NDArray[np.bool_]:
    """Return the layers whose rank loads are spread more than sampling noise explains for a good placement,
    bool [layers].

    loads: [layers, ranks] over their mean, live ranks only; goal: balance of a full re-placement on this
    window; noise: `deviation` of a layer's ranks, or `deviations` of each rank; free: `freedom`, None: ranks
    are independent.

    Two tests are combined. Each rank is tested against the normal tail beyond the maximum of the
    re-placement. All ranks above the mean are tested together against chi-square: half a normal's square has
    mean 1/2 and variance 5/4 and is treated as a gamma, because a good placement may well have a rank far
    below the mean.
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


def _discoveries(chance: FloatArray) -> NDArray[np.bool_]:
    """Select the discoveries among the p-values (step-up procedure of Benjamini and Hochberg)."""
    ordered = np.sort(chance)
    passing = np.flatnonzero(ordered <= FALSE_ALARMS * np.arange(1, len(chance) + 1) / len(chance))
    return chance <= ordered[passing[-1]] if len(passing) else np.zeros(len(chance), bool)


def expected_max(loads: NDArray[np.float64], spread: FloatArray) -> FloatArray:
    """Return the expected maximum of normals, float64 [layers].

    loads: means, [layers, ranks]; spread: one standard deviation per layer.
    """
    most = loads.max(axis=1)
    where = most[:, None] + spread[:, None] * _POINTS  # [layers, points]
    below = ndtr((where[:, None, :] - loads[:, :, None]) / np.maximum(spread, 1e-12)[:, None, None]).prod(
        axis=1
    )
    step = spread * (_POINTS[1] - _POINTS[0])
    return np.asarray(where[:, -1] - step * (below.sum(axis=1) - 0.5 * (below[:, 0] + below[:, -1])))
