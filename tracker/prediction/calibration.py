"""Calibration of predictions: predicted against observed locality, and recall of the experts' mass. Pure.

For every finished request, x = predicted - prior and y = observed - prior share of local pairs, on the chosen
rank. The regression y = a + b x + noise is fitted to decayed sums. The intercept a (a wrong prior, for any
reason) is held near 0 by INTERCEPT, the slope b by a broad prior around 0. The lower confidence bound of b
counts, so that few outcomes, or outcomes that do not follow the prediction, count for nothing. Nothing counts
either if the differences are too small to steer by: gain = b * S^2 / (S^2 + MATERIAL^4), with S = mean (b
s)^2, the separation by the calibrated prediction. s is the possible steering effect, used or not: the
advantage of the nearest rank over the mean of its engine (where it is not reported, x itself, that of the
chosen rank).

Each cluster has its own slope, from the outcomes of requests predicted to belong to it, held near b by
SLOPES. A cluster whose predicted locality does not come true gets no gain. A cluster with few outcomes gets
the common gain.
"""

from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array

INTERCEPT = 0.02
"""Standard deviation of the prior's own error, as a share of the pairs."""
SLOPE = 1.0
"""Prior standard deviation of slopes."""
SLOPES = 0.3
"""Prior standard deviation of the clusters' slopes around the common one."""
NOISE, NOISE_OUTCOMES = 0.1, 4.0
"""Prior standard deviation of observations around the line, with the weight of NOISE_OUTCOMES outcomes."""
MIN_NOISE = 0.02
SPREADS_MEMORY = 100.0
"""Memory of the steering effect, in outcomes that count 1/e: it changes with the placement, at once, and is
known without noise.
"""
_UNSEEN = 1e-12
SIGMAS = 1.64
"""Standard errors subtracted from the slope: one-sided 5 %."""
MATERIAL = 0.085
"""Differences of locality of this size (root mean square, as a share of the pairs) count half, of half the
size 1/17. Measured on the demo model's routings over 2 to 16 ranks: 0.07 to 0.17 if the placement follows the
clusters; 0.05 at most under any other placement and on traffic of a single domain. There predictions are
true, but too small to justify an unbalanced load.
"""


class _Line(NamedTuple):
    """Fit over all outcomes. slope: lower confidence bound, in [0, 1]. noise: variance of an observation
    around the line.
    """

    intercept: float
    slope: float
    noise: float


_NOTHING = _Line(0.0, 0.0, NOISE**2)


class Calibration:
    """Gains and recalls. memory: an outcome this many outcomes ago counts 1/e. clusters: K."""

    def __init__(self, memory: float, clusters: int = 1) -> None:
        self._memory = memory
        self._outcomes = 0
        self._sums = np.zeros(7)
        """sums of w, w^2, w x, w y, w x^2, w x y, w y^2"""
        self._spreads = np.zeros(2)
        """sums of w and w s^2"""
        self._by_cluster = np.zeros((5, clusters))
        """sums of v, v^2, v x, v x^2, v x y, where v is w times the predicted weight of the cluster"""
        self._recalls = np.zeros(3)
        """sums of 1, recall, prior recall"""

    @property
    def outcomes(self) -> int:
        """Requests whose predicted locality was compared with the observed one."""
        return self._outcomes

    def learn(
        self,
        predicted: float,
        prior: float,
        observed: float,
        weight: float,
        spread: float | None = None,
        of: Float32Array | None = None,
    ) -> None:
        """Learn from one outcome: shares of local pairs on the chosen rank, and its weight, in (0, 1].

        spread: advantage of the nearest rank. of: [K], the predicted cluster weights.
        """
        x, y = predicted - prior, observed - prior
        self._outcomes += 1
        keep = 1.0 - 1.0 / self._memory
        self._sums = self._sums * keep + weight * np.array((1.0, weight, x, y, x * x, x * y, y * y))
        self._spreads = self._spreads * (1.0 - 1.0 / min(self._memory, SPREADS_MEMORY)) + weight * np.array(
            (1.0, x * x if spread is None else spread * spread)
        )
        if of is not None:
            part = weight * of.astype(np.float64)
            self._by_cluster = self._by_cluster * keep + part * np.stack(
                (np.ones(len(of)), part, *np.full((3, len(of)), [[x], [x * x], [x * y]]))
            )

    def move(self, source: int, target: int, share: float) -> None:
        """Move this share of a cluster's statistics to another one."""
        moved = self._by_cluster[:, source] * share
        self._by_cluster[:, target] += moved
        self._by_cluster[:, source] -= moved

    @property
    def slope(self) -> float:
        """Lower confidence bound of the effect per predicted difference, in [0, 1]."""
        return self._line().slope

    def _line(self) -> _Line:
        weight, squares, x, y, xx, xy, yy = self._sums.tolist()
        if xx <= 0.0:
            return _NOTHING
        independent = weight * weight / squares
        residual = max(yy - xy * xy / xx, 0.0)
        noise = max(MIN_NOISE**2, (residual + NOISE_OUTCOMES * NOISE**2) / (weight + NOISE_OUTCOMES))
        per = independent / weight / noise
        one, cross, two = per * weight + INTERCEPT**-2, per * x, per * xx + SLOPE**-2
        determinant = one * two - cross * cross
        slope = (one * per * xy - cross * per * y) / determinant
        intercept = (two * per * y - cross * per * xy) / determinant
        return _Line(intercept, min(max(slope - SIGMAS * sqrt(one / determinant), 0.0), 1.0), noise)

    @property
    def gain(self) -> float:
        """Factor on the router's expert-locality term over all requests, in [0, 1]."""
        slope = self.slope
        return slope * self._matters(slope)

    @property
    def gains(self) -> NDArray[np.float32]:
        """Factor per cluster: float32 [K], in [0, 1]."""
        line = self._line()
        seen, squares, x, xx, xy = self._by_cluster
        per = seen / np.maximum(squares, _UNSEEN) / line.noise
        slopes = (line.slope / SLOPES**2 + per * (xy - line.intercept * x)) / (SLOPES**-2 + per * xx)
        return np.asarray(np.clip(slopes, 0.0, 1.0) * self._matters(line.slope), np.float32)

    def _matters(self, slope: float) -> float:
        """Return the factor for the size of the steering effect, in [0, 1]."""
        weight, squares = self._spreads.tolist()
        if weight <= 0.0:
            return 0.0
        apart = (slope * slope * squares / weight) ** 2
        return float(apart / (apart + MATERIAL**4))

    # Recall

    def sampled(self, counts: NDArray[Any], predicted: NDArray[Any], prior: NDArray[Any]) -> None:
        """Learn from a sampled request: pairs, prediction and mix, each [layers, experts]."""
        recalled = (1.0, recall(counts, predicted), recall(counts, prior))
        self._recalls = self._recalls * (1.0 - 1.0 / self._memory) + np.array(recalled)

    @property
    def recall(self) -> float | None:
        """Predicted mass of the true most popular half of a layer's experts / its whole mass; None before the
        first sample.
        """
        return float(self._recalls[1] / self._recalls[0]) if self._recalls[0] > 0 else None

    @property
    def prior_recall(self) -> float | None:
        """The same for the traffic mix."""
        return float(self._recalls[2] / self._recalls[0]) if self._recalls[0] > 0 else None

    # Saving and restoring

    def state(self) -> dict[str, Any]:
        """Return the complete state, for msgpack."""
        sums = {
            "sums": self._sums.tolist(),
            "spreads": self._spreads.tolist(),
            "by_cluster": self._by_cluster.ravel().tolist(),
        }
        return {"outcomes": self._outcomes, "recalls": self._recalls.tolist()} | sums

    def take_over(self, state: dict[str, Any]) -> None:
        """Restore a state. ValueError if it does not fit, without any change."""
        sizes = {"sums": 7, "recalls": 3, "spreads": 2, "by_cluster": self._by_cluster.size}
        read = {name: np.asarray(state[name], np.float64) for name in sizes}
        for name, size in sizes.items():
            if read[name].shape != (size,) or not np.isfinite(read[name]).all():
                raise ValueError(f"calibration: {read[name].size} {name}; expected {size} finite numbers")
        self._outcomes, self._sums, self._recalls, self._spreads = (
            int(state["outcomes"]),
            read["sums"],
            read["recalls"],
            read["spreads"],
        )
        self._by_cluster = read["by_cluster"].reshape(self._by_cluster.shape)


def recall(counts: NDArray[Any], predicted: NDArray[Any]) -> float:
    """Return the mass of the true top half of each layer's experts that is in the predicted half / its whole
    mass.

    counts, predicted: [layers, experts]. 1 if nothing was counted.
    """
    half = counts.shape[1] - counts.shape[1] // 2
    true = np.argsort(-counts.astype(np.float64), axis=1, kind="stable")[:, :half]
    foreseen = np.zeros(counts.shape, bool)
    np.put_along_axis(foreseen, np.argsort(-predicted, axis=1, kind="stable")[:, :half], True, axis=1)
    masses = np.take_along_axis(counts, true, axis=1).astype(np.float64)
    total = masses.sum()
    return float((masses * np.take_along_axis(foreseen, true, axis=1)).sum() / total) if total > 0 else 1.0
