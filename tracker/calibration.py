"""What the prediction is worth: predicted against observed locality, and how much of the experts' mass was foreseen. Pure.

For every finished request x = predicted - prior and y = observed - prior share of local pairs, on the rank that was chosen. The
regression y = a + b x + noise is fitted to decayed sums; the intercept a (a prior that is off, for whatever reason) is held near 0
by INTERCEPT, the slope b by a broad prior around 0. Of b the lower end of its confidence counts, so that few outcomes, or
outcomes that do not follow the prediction, count for nothing; and nothing counts when the differences are too small to steer by:
gain = b * S^2 / (S^2 + MATERIAL^4), with S = mean (b x)^2, what the calibrated prediction sets apart.
"""

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

INTERCEPT = 0.02
"""Standard deviation that is allowed to the prior's own error, as a share of the pairs."""
SLOPE = 1.0
"""Standard deviation of slopes before anything was seen."""
NOISE, NOISE_OUTCOMES = 0.1, 4.0
"""Standard deviation of observations about the line, before so many outcomes have told it."""
LEAST_NOISE = 0.02
SIGMAS = 1.64
"""Standard errors that are taken off the slope: one side in twenty."""
MATERIAL = 0.085
"""Differences of locality of this size (root mean square, as a share of the pairs) count half, of half the size 1/17. Measured on the demo
model's routings over 2 to 16 ranks: 0.07 to 0.17 where the placement follows the clusters; 0.05 at most under any other placement and on
traffic of a single domain, where what can be told of a request is true, but too little to give up a balanced load for."""


class Calibration:
    """The gain, and the recalls. memory: outcomes ago that count 1/e."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._outcomes = 0
        self._sums = np.zeros(7)
        """of w, w^2, w x, w y, w x^2, w x y, w y^2"""
        self._recalls = np.zeros(3)
        """of 1, recall, prior recall"""

    @property
    def outcomes(self) -> int:
        """Requests whose predicted locality was compared with what they did."""
        return self._outcomes

    def learn(self, predicted: float, prior: float, observed: float, weight: float) -> None:
        """One outcome: shares of local pairs on the chosen rank, and what it counts, in (0, 1]."""
        x, y = predicted - prior, observed - prior
        self._outcomes += 1
        self._sums = self._sums * (1.0 - 1.0 / self._memory) + weight * np.array((1.0, weight, x, y, x * x, x * y, y * y))

    @property
    def slope(self) -> float:
        """The lower end of the confidence of what a predicted difference is worth, in [0, 1]."""
        weight, squares, x, y, xx, xy, yy = self._sums.tolist()
        if xx <= 0.0:
            return 0.0
        independent = weight * weight / squares
        residual = max(yy - xy * xy / xx, 0.0)
        noise = max(LEAST_NOISE**2, (residual + NOISE_OUTCOMES * NOISE**2) / (weight + NOISE_OUTCOMES))
        per = independent / weight / noise
        one, cross, two = per * weight + INTERCEPT**-2, per * x, per * xx + SLOPE**-2
        determinant = one * two - cross * cross
        slope = (one * per * xy - cross * per * y) / determinant
        return min(max(slope - SIGMAS * sqrt(one / determinant), 0.0), 1.0)

    @property
    def gain(self) -> float:
        """In [0, 1]: what the router's expert term is worth."""
        slope, weight = self.slope, float(self._sums[0])
        if slope <= 0.0 or weight <= 0.0:
            return 0.0
        apart = (slope * slope * float(self._sums[4]) / weight) ** 2
        return slope * apart / (apart + MATERIAL**4)

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
        return {"outcomes": self._outcomes, "sums": self._sums.tolist(), "recalls": self._recalls.tolist()}

    def take_over(self, state: dict[str, Any]) -> None:
        """Become what `state` was. ValueError when it does not fit; then nothing changed."""
        sums, recalls = np.asarray(state["sums"], np.float64), np.asarray(state["recalls"], np.float64)
        if sums.shape != (7,) or recalls.shape != (3,) or not (np.isfinite(sums).all() and np.isfinite(recalls).all()):
            raise ValueError(f"calibration: {sums.size} sums and {recalls.size} recalls; expected 7 and 3 finite numbers")
        self._outcomes, self._sums, self._recalls = int(state["outcomes"]), sums, recalls


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
