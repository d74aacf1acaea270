"""How much two samples of one source differ: the Jensen-Shannon divergence, and what of it is sampling noise, learnt online. Pure.

The divergence of two samples is, to second order, a quadratic form in their difference. So its mean falls as 1 / n, n the effective
number of draws, and it is distributed like mean * chi2(d) / d (Box 1954; Satterthwaite 1946). Learnt is the noise y = n * divergence:
its mean, and d from mean(log y) - log(mean y) (Thom 1958, shape of a gamma), which no single large y spoils; d is shrunk to few, as
a mix of two kinds of requests has but one. The mean itself is known from b independent looks, so y / mean is F(d, d * b); its
quantile is Paulson's (1942) cube-root normal approximation.
"""

from math import exp, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
"""float64 [layers, experts]"""
SAMPLES = 4.0
"""Noise is sampled so often in a fast time constant."""
LOOK = 1.5
"""Fast time constants from one independent look to the next: the window's own memory, and the length of requests."""
PRIOR_SPREAD = 0.5772
"""log(mean) - mean(log) of two degrees of freedom (Euler's constant)"""
PRIOR_LOOKS = 8.0
"""That is believed as if so many looks had shown it."""


class DriftNoise:
    """What y = tokens * divergence was while nothing shifted: by layer and over all, decayed."""

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
        return {"sums": [self.weight, self.mean, self.mean_log], "by_layer": self.by_layer.astype("<f8").tobytes()}

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
        """Degrees of freedom of y."""
        spread = max(log(self.mean) - self.mean_log, 1e-6)
        share = self.looks / (self.looks + PRIOR_LOOKS)
        return 2.0 * gamma_shape(share * spread + (1.0 - share) * PRIOR_SPREAD)

    def ratio(self, sigmas: float) -> float:
        """What y / mean hardly exceeds: the quantile of F(d, d * looks)."""
        freedom = self.freedom()
        return f_quantile(sigmas, freedom, freedom * self.looks)

    def usual_ratio(self, sigmas: float) -> float:
        """The same, were the mean known for certain: an uncertain mean must not make a shift look settled."""
        return f_quantile(sigmas, self.freedom(), float("inf"))


def divergence_by_layer(counts: NDArray[Any], others: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [layers]: Jensen-Shannon divergence in nats of the profiles of two tables [layers, experts]; 0 where one is empty."""
    first, second = counts.sum(axis=1, keepdims=True), others.sum(axis=1, keepdims=True)
    seen = (first > 0) & (second > 0)
    p = np.divide(counts, first, out=np.zeros(counts.shape), where=seen)
    q = np.divide(others, second, out=np.zeros(others.shape), where=seen)
    return np.maximum(_entropy(0.5 * (p + q)) - 0.5 * (_entropy(p) + _entropy(q)), 0.0)


def _entropy(profile: Table) -> NDArray[np.float64]:
    logs = np.log(profile, out=np.zeros_like(profile), where=profile > 0)
    return np.asarray(-np.einsum("le,le->l", profile, logs))


def gamma_shape(spread: float) -> float:
    """Shape of the gamma whose log(mean) - mean(log) this is: Thom 1958, in the form of Minka 2002 (to 1.5 %)."""
    return (3.0 - spread + sqrt((spread - 3.0) ** 2 + 24.0 * spread)) / (12.0 * spread)


def f_quantile(sigmas: float, first: float, second: float) -> float:
    """Quantile of F(first, second) as many normal standard deviations out: Paulson 1942, solved for the cube root of F."""
    a, b = 2.0 / (9.0 * first), 2.0 / (9.0 * second)
    square = (1.0 - b) ** 2 - sigmas**2 * b
    cross = (1.0 - a) * (1.0 - b)
    if square <= 0.0:
        return float("inf")  # too few looks for any quantile so far out
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
