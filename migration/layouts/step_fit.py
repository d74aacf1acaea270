"""Step time over batch from a few noisy measurements: a mean of models, each weighted by its evidence.

A decode step has a fixed part and a part that grows with the batch, so log t over x = log B bends from one
slope to a steeper one: smoothly where the parts add up (a + b B), at once where the larger one hides the
other (max(a, b B)). Experts that are read once bend it the other way. Each model is a Bayesian linear
regression

    log t = b0 + b1 x + b2 bend(x) + r(x),   bend(x) = log(1 + exp(sharpness (x - place))) / sharpness

with Gaussian priors on b and a Gaussian process r for what no bend explains. Places, sharpnesses, and the
size and length of r are a grid. The posterior is the mean of its models, weighted by marginal likelihood
(Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2.2, 2.7 and 5.4.1; Hoeting et al.,
"Bayesian Model Averaging", 1999). So a few points decide how far they may bend the curve, and the
disagreement of models is part of the error.
"""

from typing import NamedTuple

import numpy as np

from fleet.arrays import FloatArray

_PLACES = 13
"""Places of a bend, evenly over the measured range."""
_SHARPNESS = (1.0, 2.5, 12.0)
"""1 is the bend of a sum of two parts, 12 a kink."""
_RESIDUALS = (
    (0.003, 1.5),
    (0.02, 0.8),
    (0.02, 2.0),
    (0.06, 0.8),
    (0.06, 2.0),
    (0.2, 0.8),
    (0.2, 2.0),
    (0.5, 2.0),
)
"""Standard deviation of r, and its length in log B (squared exponential)."""
_LEVEL, _SLOPE, _BEND = (0.0, 3.0), (0.1, 0.3), (0.4, 0.4)
"""Prior mean and standard deviation of b0 (beside the mean of log t), b1 and b2."""
_LEAST_NOISE = 0.003
"""Relative; less is not believed, and would make the equations singular."""


class Fit(NamedTuple):
    """Posterior of log t at given places: mean and standard deviation, float64 [places] each."""

    mean: FloatArray
    deviation: FloatArray


def fit(at: FloatArray, log_seconds: FloatArray, noise: float, places: FloatArray) -> Fit:
    """Return the posterior at `places` of measurements `log_seconds` of relative error `noise` at `at`.

    at, places: log B, float64 [points] and [places].
    """
    both = np.concatenate([at, places])
    features = _features(both, at)  # [models, 3, both]
    prior_mean, prior = np.array([_LEVEL, _SLOPE, _BEND]).T
    level = log_seconds.mean()
    mean = level + np.einsum("f,mfx->mx", prior_mean, features)
    linear = np.einsum("f,mfx,mfy->mxy", prior**2, features, features[:, :, : len(at)])
    distance = (both[:, None] - at) ** 2
    residual = np.array([size**2 * np.exp(-distance / (2 * length**2)) for size, length in _RESIDUALS])
    # [models, residuals, both, points]: every bend with every residual.
    covariance = linear[:, None] + residual
    n = len(at)
    seen = covariance[:, :, :n] + max(noise, _LEAST_NOISE) ** 2 * np.eye(n)
    error = np.broadcast_to((log_seconds - mean[:, :n])[:, None, :, None], (*seen.shape[:3], 1))
    known = np.linalg.inv(seen)
    solved = known @ error
    evidence = -0.5 * (error * solved).sum(axis=(2, 3)) - 0.5 * np.linalg.slogdet(seen)[1]
    weight = np.exp(evidence - evidence.max())
    weight /= weight.sum()
    across = covariance[:, :, n:]
    found = mean[:, None, n:] + (across @ solved)[..., 0]
    own = (prior[:, None] ** 2 * features[:, :, n:] ** 2).sum(axis=1)[:, None] + np.array(
        [s**2 for s, _ in _RESIDUALS]
    )[:, None]
    variance = np.maximum(own - ((across @ known) * across).sum(axis=3), 0.0)
    average = np.einsum("mr,mrx->x", weight, found)
    spread = np.einsum("mr,mrx->x", weight, variance + (found - average) ** 2)
    return Fit(average, np.sqrt(spread))


def _features(x: FloatArray, measured: FloatArray) -> FloatArray:
    """Return the regressors 1, x and the bend of every model at x, less the middle of the measured places:
    float64 [models, 3, x]."""
    middle = measured.mean()
    made = []
    for place in np.linspace(measured[0], measured[-1], _PLACES):
        for sharp in _SHARPNESS:
            bend = np.logaddexp(0.0, sharp * (x - place)) / sharp
            bend = bend - np.logaddexp(0.0, sharp * (middle - place)) / sharp
            made.append([np.ones_like(x), x - middle, bend])
    return np.array(made)
