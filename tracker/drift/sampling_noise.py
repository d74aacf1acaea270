"""Difference between two samples of one source: Jensen-Shannon divergence, and its sampling noise, learnt
online. Pure.

To second order, the divergence of two samples is a quadratic form in their difference. So its mean falls as 1
/ n, with n the effective number of draws, and it is distributed like mean * chi2(d) / d (Box 1954;
Satterthwaite 1946). The noise y = n * divergence is learnt: its mean, and d from mean(log y) - log(mean y)
(Thom 1958, shape of a gamma), which no single large y distorts. d is shrunk towards few, since a mix of two
kinds of requests has only one degree of freedom. The mean itself is known from b independent looks, so y /
mean is F(d, d * b). Its quantile is Paulson's (1942) cube-root normal approximation.
"""

from math import exp, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray

SAMPLES = 4.0
"""Noise samples per fast time constant."""
LOOK = 1.5
"""Fast time constants between independent looks: the window's own memory, and the length of requests."""
PRIOR_SPREAD = 0.5772
"""log(mean) - mean(log) of two degrees of freedom (Euler's constant)"""
PRIOR_LOOKS = 8.0
"""Weight of this prior, in looks."""


class DriftNoise:
    """Observed y = tokens * divergence without shifts: by layer and overall, decayed."""

    def __init__(self, layers: int) -> None:
        self.weight = 0.0
        self.mean = 0.0
        self.mean_log = 0.0
        self.by_layer = np.zeros(layers)

    def learn(self, seconds: float, memory: float, by_layer: NDArray[np.float64]) -> None:
        kept = exp(-seconds / memory)
        value = float(by_layer.mean())
        weight = self.weight * kept + 1.0
        self.mean += (value - self.mean) / weight
        self.mean_log += (log(value) - self.mean_log) / weight
        self.by_layer += (by_layer - self.by_layer) / weight
        self.weight = weight

    def state(self) -> dict[str, Any]:
        return {
            "sums": [self.weight, self.mean, self.mean_log],
            "by_layer": self.by_layer.astype("<f8").tobytes(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.weight, self.mean, self.mean_log = numbers(state["sums"], 3, signed=True)
        self.by_layer = array(state["by_layer"], self.by_layer.shape)
        if self.weight < 0 or (self.weight > 0 and self.mean <= 0):
            raise ValueError(f"noise of mean {self.mean} and weight {self.weight}")

    @property
    def looks(self) -> float:
        """Independent looks at the noise so far."""
        return self.weight / (SAMPLES * LOOK)

    def freedom(self) -> float:
        """Return the degrees of freedom of y."""
        spread = max(log(self.mean) - self.mean_log, 1e-6)
        share = self.looks / (self.looks + PRIOR_LOOKS)
        return 2.0 * gamma_shape(share * spread + (1.0 - share) * PRIOR_SPREAD)

    def ratio(self, sigmas: float) -> float:
        """Return the quantile of y / mean: of F(d, d * looks)."""
        freedom = self.freedom()
        return f_quantile(sigmas, freedom, freedom * self.looks)

    def usual_ratio(self, sigmas: float) -> float:
        """Return the same quantile for a mean known with certainty: an uncertain mean must not make a shift
        look settled.
        """
        return f_quantile(sigmas, self.freedom(), float("inf"))


def divergence_by_layer(counts: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
    """Return the Jensen-Shannon divergence of two tables' profiles in nats: float64 [layers]; 0 where one is
    empty.
    """
    first, second = counts.sum(axis=1, keepdims=True), others.sum(axis=1, keepdims=True)
    seen = (first > 0) & (second > 0)
    p = np.divide(counts, first, out=np.zeros(counts.shape), where=seen)
    q = np.divide(others, second, out=np.zeros(others.shape), where=seen)
    return np.maximum(_entropy(0.5 * (p + q)) - 0.5 * (_entropy(p) + _entropy(q)), 0.0)


def _entropy(profile: FloatArray) -> NDArray[np.float64]:
    logs = np.log(profile, out=np.zeros_like(profile), where=profile > 0)
    return np.asarray(-np.einsum("le,le->l", profile, logs))


def gamma_shape(spread: float) -> float:
    """Return the shape of the gamma with this log(mean) - mean(log): Thom 1958, in the form of Minka 2002 (to
    1.5 %).
    """
    return (3.0 - spread + sqrt((spread - 3.0) ** 2 + 24.0 * spread)) / (12.0 * spread)


def f_quantile(sigmas: float, first: float, second: float) -> float:
    """Return the quantile of F(first, second) at this many normal standard deviations: Paulson 1942, solved
    for the root of F.
    """
    a, b = 2.0 / (9.0 * first), 2.0 / (9.0 * second)
    square = (1.0 - b) ** 2 - sigmas**2 * b
    cross = (1.0 - a) * (1.0 - b)
    if square <= 0.0:
        return float("inf")  # too few looks for such an extreme quantile
    root = (cross + sqrt(max(0.0, cross**2 - square * ((1.0 - a) ** 2 - sigmas**2 * a)))) / square
    return root**3


def array(raw: Any, shape: tuple[int, ...]) -> NDArray[np.float64]:
    if not isinstance(raw, bytes) or len(raw) != 8 * int(np.prod(shape)):
        raise ValueError(f"not {shape} numbers")
    values: NDArray[np.float64] = np.frombuffer(raw, "<f8").reshape(shape).copy()
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("numbers must be finite and not negative")
    return values


def numbers(raw: Any, count: int, *, signed: bool = False) -> list[float]:
    values = [float(value) for value in raw]
    if len(values) != count or not np.isfinite(values).all() or (not signed and min(values) < 0):
        raise ValueError(f"{values} are not {count} finite numbers")
    return values
