"""How far each source of prediction is to be trusted, learnt from what requests then did. Pure.

A prediction is p ~ share * exp(sum_s t_s * r_s) (`fleet.prediction`); the cross-entropy between the observed weights w and p is convex in
the trusts t, with gradient R (p - w) and Hessian R Cov(p) R'. The trusts minimise, with older outcomes forgotten, the sum of its
quadratic expansions, each about the trusts of its time, plus PRECISION / 2 * |t - FIRST|^2, within [0, MOST]. All sources are
fitted together, so that what two of them say alike is believed once. The curvature is taken at (p + w) / 2: an overconfident p has
hardly any of its own, and a step would go too far; where p is right it makes no difference to where the fit ends.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.prediction import SOURCES
from fleet.signatures import Weights

FIRST = (0.8, 0.5, 0.5, 0.3)
"""Trusts before anything was learnt, by source."""
MOST = 2.0
PRECISION = 4.0
"""Curvature that speaks for the first trusts: that of a few outcomes."""
SURE = 32.0
"""Outcomes at which a reliability counts half."""
_SWEEPS = 12
_LEAST = 1e-6


class Trust:
    """The trusts and reliabilities of all sources. memory: outcomes ago that count 1/e."""

    def __init__(self, memory: float) -> None:
        count = len(SOURCES)
        self._memory = memory
        self._outcomes = 0
        self._together = np.asarray(FIRST, np.float64)
        self._curvature = np.zeros((count, count))
        self._pull = np.zeros(count)
        self._alone = np.asarray(FIRST, np.float64)
        self._alone_curvature = np.zeros(count)
        self._alone_pull = np.zeros(count)
        self._excess = np.zeros(count)
        self._prior_excess = np.zeros(count)
        self._weight = np.zeros(count)
        self._spoken = np.zeros(count, np.int64)

    @property
    def values(self) -> NDArray[np.float32]:
        """float32 [sources]"""
        return self._together.astype(np.float32)

    @property
    def spoken(self) -> tuple[int, ...]:
        """Outcomes in which each source had something to say."""
        return tuple(self._spoken.tolist())

    @property
    def reliability(self) -> NDArray[np.float32]:
        """float32 [sources]: share of the way from the mix to hindsight that each source goes alone, in [0, 1]; low while little was seen."""
        gone = 1.0 - self._excess / np.maximum(self._prior_excess, _LEAST)
        return np.asarray(np.clip(gone, 0.0, 1.0) * self._weight / (self._weight + SURE), np.float32)

    def learn(self, shares: Weights, ratios: NDArray[np.float32], observed: Weights, weight: float) -> None:
        """One outcome: the mix [K], what the sources said before it [sources, K] (0: nothing), what it was [K], and what it counts."""
        speaking = ratios.any(axis=1)
        if not speaking.any():
            return
        self._outcomes += 1
        self._spoken += speaking
        keep = 1.0 - 1.0 / min(self._memory, 20.0 + 0.5 * self._outcomes)
        with np.errstate(divide="ignore"):
            logits = np.log(shares.astype(np.float64))
        said, seen = ratios.astype(np.float64), observed.astype(np.float64)
        self._judge(logits, said, seen, np.where(speaking, keep, 1.0), weight * speaking)
        self._fit_together(logits, said, seen, keep, weight)
        self._fit_alone(logits, said, seen, np.where(speaking, keep, 1.0), weight)

    def _judge(self, logits: NDArray[np.float64], said: NDArray[np.float64], seen: NDArray[np.float64], keep: Any, weight: Any) -> None:
        """Prequentially: by the trusts before this outcome."""
        with np.errstate(divide="ignore", invalid="ignore"):
            hindsight = float(np.sum(np.where(seen > 0, seen * np.log(seen), 0.0)))
        alone = np.log(np.maximum(_likely(logits + self._alone[:, None] * said), _LEAST))
        prior = np.log(np.maximum(_likely(logits), _LEAST))
        self._excess = keep * self._excess + weight * np.maximum(hindsight - alone @ seen, 0.0)
        self._prior_excess = keep * self._prior_excess + weight * max(hindsight - float(prior @ seen), 0.0)
        self._weight = keep * self._weight + weight

    def _fit_together(self, logits: NDArray[np.float64], said: NDArray[np.float64], seen: NDArray[np.float64], keep: float, weight: float) -> None:
        likely = _likely(logits + self._together @ said)
        between = 0.5 * (likely + seen)
        centred = said - (said @ between)[:, None]
        curvature = weight * (centred * between) @ centred.T
        self._curvature = keep * self._curvature + curvature
        self._pull = keep * self._pull + curvature @ self._together - weight * (said @ (likely - seen))
        self._together = _bounded_minimum(self._curvature + PRECISION * np.eye(len(FIRST)), self._pull + PRECISION * np.asarray(FIRST), self._together)

    def _fit_alone(self, logits: NDArray[np.float64], said: NDArray[np.float64], seen: NDArray[np.float64], keep: Any, weight: float) -> None:
        likely = _likely(logits + self._alone[:, None] * said)
        between = 0.5 * (likely + seen)
        centred = said - (said * between).sum(axis=1, keepdims=True)
        curvature = weight * (between * centred * centred).sum(axis=1)
        self._alone_curvature = keep * self._alone_curvature + curvature
        self._alone_pull = keep * self._alone_pull + curvature * self._alone - weight * (said * (likely - seen)).sum(axis=1)
        fitted = (self._alone_pull + PRECISION * np.asarray(FIRST)) / (self._alone_curvature + PRECISION)
        self._alone = np.clip(fitted, 0.0, MOST)

    # Surviving

    def state(self) -> dict[str, Any]:
        """Everything, as msgpack takes it."""
        return {"outcomes": self._outcomes, "spoken": self._spoken.tolist()} | {name: getattr(self, f"_{name}").tobytes() for name in _KEPT}

    def take_over(self, state: dict[str, Any]) -> None:
        """Become what `state` was. ValueError when it does not fit; then nothing changed."""
        kept = {name: np.frombuffer(state[name], "<f8") for name in _KEPT}
        for name, values in kept.items():
            if values.size != getattr(self, f"_{name}").size or not np.isfinite(values).all():
                raise ValueError(f"trust: {name} must be {getattr(self, f'_{name}').size} finite numbers")
        spoken = np.asarray(state["spoken"], np.int64)
        if spoken.shape != self._spoken.shape:
            raise ValueError(f"trust: {spoken.size} sources; there are {len(SOURCES)}")
        self._outcomes, self._spoken = int(state["outcomes"]), spoken
        for name, values in kept.items():
            setattr(self, f"_{name}", values.reshape(getattr(self, f"_{name}").shape).copy())


_KEPT = ("together", "curvature", "pull", "alone", "alone_curvature", "alone_pull", "excess", "prior_excess", "weight")


def _likely(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., K] probabilities."""
    likely = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(likely / likely.sum(axis=-1, keepdims=True))


def _bounded_minimum(curvature: NDArray[np.float64], pull: NDArray[np.float64], start: NDArray[np.float64]) -> NDArray[np.float64]:
    """The t in [0, MOST]^n that minimises t'At/2 - b't, by coordinate descent (exact in the limit: A is positive definite)."""
    table, aim, found = curvature.tolist(), pull.tolist(), start.tolist()
    for _ in range(_SWEEPS):
        for at, line in enumerate(table):
            rest = aim[at] - sum(factor * value for factor, value in zip(line, found, strict=True)) + line[at] * found[at]
            found[at] = min(max(rest / line[at], 0.0), MOST)
    return np.asarray(found)
