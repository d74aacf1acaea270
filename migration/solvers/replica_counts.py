"""Choose the number of replicas of each expert, and bound the load of the fullest rank from it. Pure.

Replicas are apportioned by a divisor rule, as parliaments apportion seats: t is the least load such that
experts of load x get max(1, ceil(x / t - s)) replicas and all fit into the slots. s is the signpost. At 0
this is the rule of Adams, which makes the heaviest replica as light as possible; below 0 the experts of most
demand get fewer replicas.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IntArray

EVEN = 0.0
_HALVINGS = 40


class CountBounds(NamedTuple):
    """Bounds on the numbers of replicas."""

    slots: int
    least: IntArray
    """[layers, experts]."""
    most: int
    """Of one expert."""

    @classmethod
    def of(
        cls,
        load: FloatArray,
        ranks: int,
        per_rank: int,
        most: int | None,
        least: NDArray[np.integer[Any]] | None,
    ) -> "CountBounds":
        """Check and combine the bounds. ValueError when the required replicas do not fit."""
        most = ranks if most is None else min(ranks, most)
        fewest = (
            np.ones(load.shape, np.int64) if least is None else np.clip(np.asarray(least, np.int64), 1, most)
        )
        if fewest.sum(axis=1).max() > ranks * per_rank:
            raise ValueError(
                f"placing: the required replicas take {fewest.sum(axis=1).max()} slots in a layer of"
                f" {ranks * per_rank}; ask for fewer replicas"
            )
        return cls(ranks * per_rank, fewest, most)

    def of_layers(self, layers: NDArray[np.intp]) -> "CountBounds":
        return self._replace(least=self.least[layers])


def replica_counts(load: FloatArray, bounds: CountBounds, signpost: float = EVEN) -> IntArray:
    """int64 [layers, experts]: replicas by the divisor rule above, within bounds. load > 0."""
    low, high = np.zeros((len(load), 1)), load.max(axis=1, keepdims=True) / (1.0 + signpost)
    # Bisect for t: the number of replicas falls as t grows.
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        fits = _seats(load, middle, bounds, signpost).sum(axis=1, keepdims=True) <= bounds.slots
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    counts = _seats(load, high, bounds, signpost)
    # Equal loads reach t together, and not all of them fit: give the remaining slots one by one.
    while True:
        left = bounds.slots - counts.sum(axis=1, keepdims=True)
        first = np.argsort(
            np.where(counts < bounds.most, -load / (counts + signpost), np.inf), axis=1, kind="stable"
        )
        given = (np.arange(load.shape[1]) < left) & (np.take_along_axis(counts, first, axis=1) < bounds.most)
        if not given.any():
            return counts.astype(np.int64)
        layer, nth = np.nonzero(given)
        counts[layer, first[layer, nth]] += 1


def _seats(load: FloatArray, each: FloatArray, bounds: CountBounds, signpost: float) -> FloatArray:
    return np.clip(np.ceil(load / np.maximum(each, 1e-300) - signpost), bounds.least, bounds.most)


def pigeonhole(load: FloatArray, counts: IntArray, ranks: int, per_rank: int) -> FloatArray:
    """float64 [layers]: lower bound of the fullest rank's load, given the counts.

    For each k some rank holds k + 1 of the k * ranks + 1 heaviest replicas, at best the lightest of these,
    and per_rank - k - 1 others.
    """
    _, weight = replicas(load / counts, counts, ranks * per_rank)
    sums = np.concatenate([np.zeros((len(load), 1)), weight.cumsum(axis=1)], axis=1)
    k = np.arange(per_rank)
    others = sums[:, [-1]] - sums[:, ranks * per_rank - (per_rank - 1 - k)]
    return np.asarray((sums[:, k * ranks + 1] - sums[:, k * ranks - k] + others).max(axis=1))


def replicas(weight: FloatArray, counts: IntArray, slots: int) -> tuple[IntArray, FloatArray]:
    """Return experts and weights [layers, slots] of all replicas, heaviest first, replicas of one expert
    together.

    Unused slots hold expert number `experts`, of weight 0.
    """
    layers, experts = weight.shape
    order = np.concatenate(
        [np.argsort(-weight, axis=1, kind="stable"), np.full((layers, 1), experts)], axis=1
    )
    times = np.concatenate([counts, slots - counts.sum(axis=1, keepdims=True)], axis=1)
    expert = np.repeat(order.ravel(), np.take_along_axis(times, order, axis=1).ravel()).reshape(layers, slots)
    padded = np.concatenate([weight, np.zeros((layers, 1))], axis=1)
    return expert, np.take_along_axis(padded, expert, axis=1)


def floor(load: FloatArray, even: IntArray, ranks: int, per_rank: int) -> FloatArray:
    """float64 [layers]: lower bound of the fullest rank's load, for any counts. even: the counts of signpost
    0."""
    beside = max(0, load.shape[1] - (ranks - 1) * per_rank - 1)
    lightest = np.sort(load, axis=1)[:, :beside].sum(axis=1) / ranks
    return np.asarray(np.maximum(load.sum(axis=1) / ranks, (load / even).max(axis=1) + lightest))
