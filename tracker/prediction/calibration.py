"""What the prediction is worth: predicted against observed locality, and how much of the experts' mass was foreseen. Pure.

For every finished request x = predicted - prior and y = observed - prior share of local pairs, on the rank that was chosen. The
regression y = a + b x + noise is fitted to decayed sums; the intercept a (a prior that is off, for whatever reason) is held near 0
by INTERCEPT, the slope b by a broad prior around 0. Of b the lower end of its confidence counts, so that few outcomes, or
outcomes that do not follow the prediction, count for nothing; and nothing counts when the differences are too small to steer by:
gain = b * S^2 / (S^2 + MATERIAL^4), with S = mean (b s)^2, what the calibrated prediction sets apart. s is what could be steered by, whether
it was or not: by how much the nearest rank stands out among those of the engine (where nobody tells, x itself: what was chosen).

Each cluster has a slope of its own, from the outcomes of requests that were foretold to be of it, held to b by SLOPES: a cluster whose
predicted locality does not come true earns nothing, one of which little was seen earns what all do.
"""

from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.signatures import Weights

INTERCEPT = 0.02
"""Standard deviation that is allowed to the prior's own error, as a share of the pairs."""
SLOPE = 1.0
"""Standard deviation of slopes before anything was seen."""
SLOPES = 0.3
"""Standard deviation of the clusters' slopes about the common one, before anything was seen of them."""
NOISE, NOISE_OUTCOMES = 0.1, 4.0
"""Standard deviation of observations about the line, before so many outcomes have told it."""
LEAST_NOISE = 0.02
SPREADS_MEMORY = 100.0
"""Outcomes ago that count 1/e of what could be steered by: that changes with the placement, at once, and is known without noise."""
_UNSEEN = 1e-12
SIGMAS = 1.64
"""Standard errors that are taken off the slope: one side in twenty."""
MATERIAL = 0.085
"""Differences of locality of this size (root mean square, as a share of the pairs) count half, of half the size 1/17. Measured on the demo
model's routings over 2 to 16 ranks: 0.07 to 0.17 where the placement follows the clusters; 0.05 at most under any other placement and on
traffic of a single domain, where what can be told of a request is true, but too little to give up a balanced load for."""


class _Line(NamedTuple):
    """What all outcomes say together. slope: the lower end of its confidence, in [0, 1]; noise: variance of an observation about the line."""

    intercept: float
    slope: float
    noise: float


_NOTHING = _Line(0.0, 0.0, NOISE**2)


class Calibration:
    """The gains, and the recalls. memory: outcomes ago that count 1/e; clusters: K."""

    def __init__(self, memory: float, clusters: int = 1) -> None:
        self._memory = memory
        self._outcomes = 0
        self._sums = np.zeros(7)
        """of w, w^2, w x, w y, w x^2, w x y, w y^2"""
        self._spreads = np.zeros(2)
        """of w and w s^2"""
        self._by_cluster = np.zeros((5, clusters))
        """of v, v^2, v x, v x^2, v x y, where v is w times what a request was foretold to be of the cluster"""
        self._recalls = np.zeros(3)
        """of 1, recall, prior recall"""

    @property
    def outcomes(self) -> int:
        """Requests whose predicted locality was compared with what they did."""
        return self._outcomes

    def learn(self, predicted: float, prior: float, observed: float, weight: float, spread: float | None = None, of: Weights | None = None) -> None:
        """One outcome: shares of local pairs on the chosen rank, and what it counts, in (0, 1]. spread: by how much the nearest rank stands out; of: [K],
        the clusters that it was foretold to be of."""
        x, y = predicted - prior, observed - prior
        self._outcomes += 1
        keep = 1.0 - 1.0 / self._memory
        self._sums = self._sums * keep + weight * np.array((1.0, weight, x, y, x * x, x * y, y * y))
        self._spreads = self._spreads * (1.0 - 1.0 / min(self._memory, SPREADS_MEMORY)) + weight * np.array((1.0, x * x if spread is None else spread * spread))
        if of is not None:
            part = weight * of.astype(np.float64)
            self._by_cluster = self._by_cluster * keep + part * np.stack((np.ones(len(of)), part, *np.full((3, len(of)), [[x], [x * x], [x * y]])))

    def move(self, source: int, target: int, share: float) -> None:
        """This share of what was seen of one cluster is another's."""
        moved = self._by_cluster[:, source] * share
        self._by_cluster[:, target] += moved
        self._by_cluster[:, source] -= moved

    @property
    def slope(self) -> float:
        """The lower end of the confidence of what a predicted difference is worth, in [0, 1]."""
        return self._line().slope

    def _line(self) -> _Line:
        weight, squares, x, y, xx, xy, yy = self._sums.tolist()
        if xx <= 0.0:
            return _NOTHING
        independent = weight * weight / squares
        residual = max(yy - xy * xy / xx, 0.0)
        noise = max(LEAST_NOISE**2, (residual + NOISE_OUTCOMES * NOISE**2) / (weight + NOISE_OUTCOMES))
        per = independent / weight / noise
        one, cross, two = per * weight + INTERCEPT**-2, per * x, per * xx + SLOPE**-2
        determinant = one * two - cross * cross
        slope = (one * per * xy - cross * per * y) / determinant
        intercept = (two * per * y - cross * per * xy) / determinant
        return _Line(intercept, min(max(slope - SIGMAS * sqrt(one / determinant), 0.0), 1.0), noise)

    @property
    def gain(self) -> float:
        """In [0, 1]: what the router's expert term is worth, over all."""
        slope = self.slope
        return slope * self._matters(slope)

    @property
    def gains(self) -> NDArray[np.float32]:
        """float32 [K], in [0, 1]: what it is worth for requests of each cluster."""
        line = self._line()
        seen, squares, x, xx, xy = self._by_cluster
        per = seen / np.maximum(squares, _UNSEEN) / line.noise
        slopes = (line.slope / SLOPES**2 + per * (xy - line.intercept * x)) / (SLOPES**-2 + per * xx)
        return np.asarray(np.clip(slopes, 0.0, 1.0) * self._matters(line.slope), np.float32)

    def _matters(self, slope: float) -> float:
        """In [0, 1]: how far what could be steered by is large enough to."""
        weight, squares = self._spreads.tolist()
        if weight <= 0.0:
            return 0.0
        apart = (slope * slope * squares / weight) ** 2
        return float(apart / (apart + MATERIAL**4))

    # Recall

    def sampled(self, counts: NDArray[Any], predicted: NDArray[Any], prior: NDArray[Any]) -> None:
        """A request counted whole: pairs, what was predicted, and the mix, each [layers, experts]."""
        recalled = (1.0, recall(counts, predicted), recall(counts, prior))
        self._recalls = self._recalls * (1.0 - 1.0 / self._memory) + np.array(recalled)

    @property
    def recall(self) -> float | None:
        """Mass of the true most popular half of a layer's experts that was predicted / its whole mass; None before the first sample."""
        return float(self._recalls[1] / self._recalls[0]) if self._recalls[0] > 0 else None

    @property
    def prior_recall(self) -> float | None:
        """The same for the mix."""
        return float(self._recalls[2] / self._recalls[0]) if self._recalls[0] > 0 else None

    # Surviving

    def state(self) -> dict[str, Any]:
        """Everything, as msgpack takes it."""
        sums = {"sums": self._sums.tolist(), "spreads": self._spreads.tolist(), "by_cluster": self._by_cluster.ravel().tolist()}
        return {"outcomes": self._outcomes, "recalls": self._recalls.tolist()} | sums

    def take_over(self, state: dict[str, Any]) -> None:
        """Become what `state` was. ValueError when it does not fit; then nothing changed."""
        sizes = {"sums": 7, "recalls": 3, "spreads": 2, "by_cluster": self._by_cluster.size}
        read = {name: np.asarray(state[name], np.float64) for name in sizes}
        for name, size in sizes.items():
            if read[name].shape != (size,) or not np.isfinite(read[name]).all():
                raise ValueError(f"calibration: {read[name].size} {name}; expected {size} finite numbers")
        self._outcomes, self._sums, self._recalls, self._spreads = int(state["outcomes"]), read["sums"], read["recalls"], read["spreads"]
        self._by_cluster = read["by_cluster"].reshape(self._by_cluster.shape)


def recall(counts: NDArray[Any], predicted: NDArray[Any]) -> float:
    """Mass of the true most popular half of the experts of each layer that is among the predicted half / its whole mass.

    counts, predicted: [layers, experts]. 1 where nothing was counted.
    """
    half = counts.shape[1] - counts.shape[1] // 2
    true = np.argsort(-counts.astype(np.float64), axis=1, kind="stable")[:, :half]
    foreseen = np.zeros(counts.shape, bool)
    np.put_along_axis(foreseen, np.argsort(-predicted, axis=1, kind="stable")[:, :half], True, axis=1)
    masses = np.take_along_axis(counts, true, axis=1).astype(np.float64)
    whole = masses.sum()
    return float((masses * np.take_along_axis(foreseen, true, axis=1)).sum() / whole) if whole > 0 else 1.0
