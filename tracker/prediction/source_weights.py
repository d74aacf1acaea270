"""Weights of the prediction sources, learnt from outcomes. Pure.

A prediction is p ~ share * exp(sum_s t_s * r_s) (`fleet.prediction`). The cross-entropy between the observed
signature w and p is convex in the source weights t, with gradient R (p - w) and Hessian R Cov(p) R'. The
weights minimise the decayed sum of its quadratic expansions, each around the weights of its time, plus
PRECISION / 2 * |t - FIRST|^2, within [0, MAX_WEIGHT]. All sources are fitted together, so that redundant
evidence counts once. A second fit is made for each set of sources with evidence (`fleet.prediction.pattern`).
Its prior is the common fit instead of FIRST, or the source's own weight for a single source. The curvature is
taken at (p + w) / 2: an overconfident p has almost none, and a step would be too large. If p is right, this
does not change the optimum.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array
from fleet.prediction import PATTERNS, SOURCES, SourceEvidence, pattern

FIRST = (0.8, 0.5, 0.5, 0.3)
"""Weights before the first outcome, by source."""
MAX_WEIGHT = 2.0
PRECISION = 4.0
"""Curvature of the prior: equivalent to a few outcomes."""
FIRST_MEMORY, MEMORY_GROWTH = 5.0, 0.1
"""Initial memory in outcomes, and its growth per outcome. The tables learn too, so early results are soon
outdated.
"""
SURE = 32.0
"""Outcomes at which a reliability counts half."""
_SWEEPS = 50
_MIN = 1e-6
_GENERAL, _TOGETHER, _PRIOR = -3, -2, -1
_FITTED = slice(_GENERAL, _PRIOR)
"""Rows of the predictions, after those of each single source: all together, twice, and the mix."""


class SourceWeights:
    """Weights and reliabilities of all sources. memory: an outcome this many outcomes ago counts 1/e."""

    def __init__(self, memory: float) -> None:
        count = len(SOURCES)
        self._memory = memory
        self._outcomes = 0
        self._spoken = np.zeros(count, np.int64)
        self._together = np.tile(FIRST, (PATTERNS, 1))
        self._curvature = np.zeros((PATTERNS, count, count))
        self._pull = np.zeros((PATTERNS, count))
        """by set of sources with evidence; row 0: of all outcomes"""
        self._alone = np.array(FIRST)
        self._alone_curvature = np.zeros(count)
        self._alone_pull = np.zeros(count)
        self._excess = np.zeros(count)
        """cross-entropy above that of the observed weights, summed, for each source alone"""
        self._prior_excess = np.zeros(count)
        """the same for the mix, where the source had evidence"""
        self._weight = np.zeros(count)

    @property
    def values(self) -> NDArray[np.float32]:
        """Weights independent of the set of sources with evidence: float32 [sources]."""
        return np.asarray(self.table[0])

    @property
    def table(self) -> NDArray[np.float32]:
        """Weights by set of sources with evidence: float32 [PATTERNS, sources]."""
        return self._together.astype(np.float32)

    @property
    def spoken(self) -> tuple[int, ...]:
        """Outcomes in which each source had evidence."""
        return tuple(self._spoken.tolist())

    @property
    def reliability(self) -> NDArray[np.float32]:
        """Accuracy of each source alone: float32 [sources], in [0, 1]; 0: as the mix, 1: as the observed
        weights.

        Low while there are few outcomes.
        """
        gone = 1.0 - self._excess / np.maximum(self._prior_excess, _MIN)
        return np.asarray(np.clip(gone, 0.0, 1.0) * self._weight / (self._weight + SURE), np.float32)

    def learn(
        self, log_shares: NDArray[np.float32], known: SourceEvidence, observed: Float32Array, weight: float
    ) -> None:
        """Learn from one outcome: the mix [K], the prior evidence of the sources, the observed weights [K],
        and its weight.
        """
        speaking = np.array(known.evidence) > 0
        if not speaking.any():
            return
        self._outcomes += 1
        self._spoken += speaking
        known_set = pattern(known.evidence)
        keep = 1.0 - 1.0 / min(self._memory, FIRST_MEMORY + MEMORY_GROWTH * self._outcomes)
        keeps = np.where(speaking, keep, 1.0)
        keep_alone = np.where(
            speaking, 1.0 - 1.0 / np.minimum(self._memory, FIRST_MEMORY + self._spoken), 1.0
        )
        ratios, seen = known.ratios.astype(np.float64), observed.astype(np.float64)
        predicted = self._predicted(log_shares, ratios, known_set)
        self._evaluate(predicted, seen, keep_alone, np.where(speaking, weight, 0.0))
        between = 0.5 * (predicted + seen)
        means, slopes = between @ ratios.T, (predicted - seen) @ ratios.T
        both = [0, known_set]  # rows of the common fit, and of the fit for this set of sources
        # Hessian R Cov(p) R' = E[r r'] - E[r] E[r]'. The pull is Hessian @ weights - gradient, so that
        # expansions around different weights add up to one quadratic.
        curvature = (ratios * between[_FITTED, None]) @ ratios.T - means[_FITTED, :, None] * means[
            _FITTED, None
        ]
        pull = (curvature @ self._together[both, :, None])[..., 0] - slopes[_FITTED]
        self._curvature[both] = keep * self._curvature[both] + weight * curvature
        self._pull[both] = keep * self._pull[both] + weight * pull
        self._fit(both, self._alone if speaking.sum() == 1 else self._together[0])
        spread = (ratios * ratios * between[: len(FIRST)]).sum(axis=1) - means.diagonal() ** 2
        self._fit_alone(spread, slopes.diagonal(), keeps, weight)

    def _predicted(
        self, log_shares: NDArray[np.float32], ratios: NDArray[np.float64], known_set: int
    ) -> NDArray[np.float64]:
        """Return predictions by each source alone, by all with the common and with this set's weights, and by
        none.

        float64 [sources + 3, K].
        """
        weights = np.zeros((len(FIRST) + 3, len(FIRST)))
        np.fill_diagonal(weights, self._alone)
        weights[_GENERAL], weights[_TOGETHER] = self._together[0], self._together[known_set]
        logits = log_shares + weights @ ratios
        predicted = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(predicted / predicted.sum(axis=1, keepdims=True))

    def _evaluate(
        self,
        predicted: NDArray[np.float64],
        seen: NDArray[np.float64],
        keep: NDArray[np.float64],
        weight: NDArray[np.float64],
    ) -> None:
        """Evaluate prequentially (Dawid 1984): with the weights before this outcome."""
        entropy = float(seen @ np.log(np.maximum(seen, _MIN)))
        excess = np.maximum(entropy - np.log(np.maximum(predicted, _MIN)) @ seen, 0.0)
        for total, new in (
            (self._excess, excess[: len(FIRST)]),
            (self._prior_excess, excess[_PRIOR]),
            (self._weight, 1.0),
        ):
            total *= keep
            total += weight * new

    def _fit(self, both: list[int], held_to: NDArray[np.float64]) -> None:
        """Fit the weights of all outcomes, and of those with the same set of sources."""
        curvature = self._curvature[both] + PRECISION * np.eye(len(FIRST))
        pull = self._pull[both] + PRECISION * np.stack([FIRST, held_to])
        free = np.linalg.solve(curvature, pull[..., None])[..., 0]
        for line, row in enumerate(both):
            inside = free[line].min() >= 0.0 and free[line].max() <= MAX_WEIGHT
            self._together[row] = (
                free[line] if inside else _bounded_minimum(curvature[line], pull[line], self._together[row])
            )

    def _fit_alone(
        self,
        curvature: NDArray[np.float64],
        slope: NDArray[np.float64],
        keep: NDArray[np.float64],
        weight: float,
    ) -> None:
        self._alone_curvature *= keep
        self._alone_curvature += weight * curvature
        self._alone_pull *= keep
        self._alone_pull += weight * (curvature * self._alone - slope)
        fitted = (self._alone_pull + PRECISION * np.array(FIRST)) / (self._alone_curvature + PRECISION)
        self._alone[:] = np.clip(fitted, 0.0, MAX_WEIGHT)

    # Saving and restoring

    def _sums(self) -> dict[str, NDArray[np.float64]]:
        return {
            "together": self._together,
            "curvature": self._curvature,
            "pull": self._pull,
            "alone": self._alone,
            "alone_curvature": self._alone_curvature,
            "alone_pull": self._alone_pull,
            "excess": self._excess,
            "prior_excess": self._prior_excess,
            "weight": self._weight,
        }

    def state(self) -> dict[str, Any]:
        """Return the complete state, for msgpack."""
        sums: dict[str, Any] = {name: values.tobytes() for name, values in self._sums().items()}
        return sums | {"outcomes": self._outcomes, "spoken": self._spoken.tolist()}

    def take_over(self, state: dict[str, Any]) -> None:
        """Restore a state. ValueError if it does not fit, without any change."""
        read = {name: np.frombuffer(state[name], "<f8") for name in self._sums()}
        for name, values in self._sums().items():
            if read[name].size != values.size or not np.isfinite(read[name]).all():
                raise ValueError(f"source weights: {name} must be {values.size} finite numbers")
        spoken = np.array(state["spoken"], np.int64)
        if spoken.shape != self._spoken.shape:
            raise ValueError(f"source weights: {spoken.size} sources; there are {len(SOURCES)}")
        self._outcomes, self._spoken = int(state["outcomes"]), spoken
        for name, values in self._sums().items():
            values[...] = read[name].reshape(values.shape)


def _bounded_minimum(
    curvature: NDArray[np.float64], pull: NDArray[np.float64], start: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the t in [0, MAX_WEIGHT]^n that minimises t'At/2 - b't (A is positive definite), by coordinate
    descent.
    """
    found = start.tolist()
    lines = list(zip(range(len(found)), curvature.tolist(), pull.tolist(), strict=True))
    for _ in range(_SWEEPS):
        moved = 0.0
        for at, line, aim in lines:
            before = found[at]
            found[at] = 0.0
            for factor, value in zip(line, found, strict=True):
                aim -= factor * value
            found[at] = min(max(aim / line[at], 0.0), MAX_WEIGHT)
            moved = max(moved, abs(found[at] - before))
        if moved < 1e-6:
            break
    return np.array(found)
