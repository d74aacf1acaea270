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

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fleet.arrays import FloatArray

_PLACES = 13
"""Places of a bend, evenly over the measured range."""
_SHARPNESS = (1.0, 2.5, 12.0)
"""1 is the bend of a sum of two parts, 12 a kink."""
_SMOOTH = ((0.003, 1.5), (0.02, 0.8), (0.02, 2.0), (0.06, 2.0), (0.2, 2.0))
"""Standard deviation and length in log B of a smooth r (squared exponential)."""
_ROUGH = ((0.05, 3.0), (0.15, 3.0), (0.4, 3.0))
"""The same of an r with kinks anywhere, whose mean is nearly straight between the points
(Ornstein-Uhlenbeck)."""
_LEVEL, _SLOPE, _BEND = (0.0, 3.0), (0.1, 0.3), (0.4, 0.4)
"""Prior mean and standard deviation of b0 (beside the mean of log t), b1 and b2."""
_LEAST_NOISE = 0.003
"""Relative; less is not believed, and would make the equations singular."""


class Fit(NamedTuple):
    """Posterior of log t at given places: mean and standard deviation, float64 [places] each."""

    mean: FloatArray
    deviation: FloatArray


class BendModels(NamedTuple):
    """All models for measurements at the same batches, solved as far as they do not depend on the times."""

    slopes: FloatArray
    """[models, points + places]: prior mean of log t, beside its level"""
    known: FloatArray
    """[models, residuals, points, points]: inverse covariance of the measurements"""
    log_determinant: FloatArray
    """[models, residuals]: of the covariance of the measurements"""
    gain: FloatArray
    """[models, residuals, places, points]: from surprises to posterior means"""
    variance: FloatArray
    """[models, residuals, places]: posterior variance"""

    def fit(self, log_seconds: FloatArray) -> Fit:
        """Return the posterior of these measurements, float64 [points]."""
        points = len(log_seconds)
        level = log_seconds.mean()
        surprise = log_seconds - level - self.slopes[:, :points]
        explained = np.einsum("mi,mrij,mj->mr", surprise, self.known, surprise)
        evidence = -0.5 * (explained + self.log_determinant)
        weight = np.exp(evidence - evidence.max())
        weight /= weight.sum()
        prior = level + self.slopes[:, None, points:]
        means = prior + (self.gain @ surprise[:, None, :, None])[..., 0]
        mean = np.einsum("mr,mrx->x", weight, means)
        spread = np.einsum("mr,mrx->x", weight, self.variance + (means - mean) ** 2)
        return Fit(mean, np.sqrt(spread))


@lru_cache(maxsize=8)
def bend_models(sequences: tuple[int, ...], noise: float, intervals: int) -> BendModels:
    """Return the models for these measured batches, of relative error `noise`.

    Places are intervals + 1 numbers, even in log B, over the measured range. Layouts and contexts have the
    same batches, so the last ones are kept.
    """
    at = np.log(np.array(sequences, np.float64))
    both = np.concatenate([at, np.linspace(at[0], at[-1], intervals + 1)])
    points = len(at)
    features = _features(both, at)
    mean, deviation = np.array([_LEVEL, _SLOPE, _BEND]).T
    slopes = np.einsum("f,mfx->mx", mean, features)
    linear = np.einsum("f,mfx,mfy->mxy", deviation**2, features, features[:, :, :points])
    residual = _residuals(np.abs(both[:, None] - at))
    covariance = linear[:, None] + residual
    measured = covariance[:, :, :points] + max(noise, _LEAST_NOISE) ** 2 * np.eye(points)
    known = np.linalg.inv(measured)
    across = covariance[:, :, points:]
    gain = across @ known
    alone = np.einsum("f,mfx->mx", deviation**2, features[:, :, points:] ** 2)[:, None]
    alone = alone + _residuals(np.zeros(1))
    variance = np.maximum(alone - (gain * across).sum(axis=3), 0.0)
    return BendModels(slopes, known, np.linalg.slogdet(measured)[1], gain, variance)


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


def _residuals(distance: FloatArray) -> FloatArray:
    """Return the covariances of r at two places this far apart: float64 [residuals, ...] of [...]."""
    smooth = [size**2 * np.exp(-(distance**2) / (2.0 * length**2)) for size, length in _SMOOTH]
    rough = [size**2 * np.exp(-distance / length) for size, length in _ROUGH]
    return np.array(smooth + rough)
