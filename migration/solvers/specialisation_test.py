"""Test if demand differs between ranks, or between clusters, by more than chance. If not, locality gains
nothing. Pure.

The statistic is the Jensen-Shannon divergence of the sources' distributions over experts, weighted by their
pairs. It equals the mutual information of source and expert (Lin 1991), in nats, mean over layers. Samples of
the same distribution diverge too. The expectation of that is known exactly: given the pairs of each source
and of each expert, counts are hypergeometric, and the expected mutual information follows (Vinh, Epps and
Bailey 2009). For many pairs it is (experts - 1)(sources - 1) / 2 per pair, with the variance of chi-square.
With few pairs per expert it is less, and that matters: the average over many layers is distinguished from
noise to a few thousandths of it.
"""

from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray

from fleet.arrays import FloatArray

SURE = 5.0
"""Standard deviations beyond the expected noise. A normal tail would be 3e-7, but pairs of one text are
correlated, and the strength of that is only estimated."""
LEAST = 2e-3
"""Least significant divergence in nats: less than this moves no tenth of a per cent of tokens, however
certain it is."""
FEW = 1.0
"""Mean pairs per source and expert below which the test gives no result."""
_NODES, _WEIGHTS = leggauss(48)
_MANY = 50.0
"""Expected pairs of a source and expert beyond which a series replaces the integral."""


class Evidence(Enum):
    """Evidence of the test for different demand."""

    TOO_FEW_PAIRS = auto()
    NONE = auto()
    """The sources diverge as samples of one distribution do."""
    TOO_SMALL = auto()
    """Significant, but too small to matter."""
    CLEAR = auto()


class SpecialisationTest(NamedTuple):
    """Result of the test.

    divergence, floor, spread: nats, mean over layers: observed, expected from noise alone, and the standard
    deviation of the latter. mean_pairs: per source and layer.
    """

    evidence: Evidence
    sources: int
    experts: int
    mean_pairs: float
    divergence: float = 0.0
    floor: float = 0.0
    spread: float = 0.0

    @property
    def specialised(self) -> bool:
        """True if locality can pay."""
        return self.evidence is Evidence.CLEAR


def gate(demand: NDArray[Any], pairs: NDArray[Any], *, dispersion: float = 1.0) -> SpecialisationTest:
    """Test the sources' demand for differences.

    demand: [sources, layers, experts], any unit. pairs: [sources] or [sources, layers], (token, k) pairs
    behind each layer. dispersion: variance of the counts relative to independent pairs, as pairs of one text
    are correlated (the design effect, Kish 1965); the effective number of pairs is smaller by this factor.
    ValueError when shapes do not fit.
    """
    counts = _counts(demand, pairs, dispersion)
    sources, experts = len(counts), counts.shape[2]
    total = counts.sum(axis=(0, 2))
    enough = (counts.sum(axis=2) >= FEW * experts).sum(axis=0) >= 2
    mean_pairs = float(total.mean() / max(1, sources))
    if sources < 2 or not enough.any():
        return SpecialisationTest(Evidence.TOO_FEW_PAIRS, sources, experts, mean_pairs)
    # Layers with too few pairs would add noise only.
    counts, total = counts[:, enough], total[enough]
    noise = expected_noise(counts)
    found, floor, spread = (
        float(divergence(counts).mean()),
        float(noise.mean()),
        float(_spread(counts, noise, total)),
    )
    if found <= floor + SURE * spread:
        evidence = Evidence.NONE
    elif found - floor < LEAST:
        evidence = Evidence.TOO_SMALL
    else:
        evidence = Evidence.CLEAR
    return SpecialisationTest(evidence, sources, experts, mean_pairs, found, floor, spread)


def _counts(demand: NDArray[Any], pairs: NDArray[Any], dispersion: float) -> FloatArray:
    """[sources, layers, experts]: demand, scaled to effective pairs."""
    if demand.ndim != 3 or np.shape(pairs) not in (demand.shape[:1], demand.shape[:2]):
        raise ValueError(
            f"gate: demand has shape {demand.shape} and pairs {np.shape(pairs)}; expected [sources, layers,"
            " experts] and [sources(, layers)]"
        )
    if not dispersion >= 1.0:
        raise ValueError(f"gate: dispersion must be at least 1, not {dispersion}")
    known = np.asarray(pairs, np.float64).reshape(len(demand), -1, 1) / dispersion
    sums = demand.sum(axis=2, dtype=np.float64, keepdims=True)
    return np.asarray(demand * (known / np.where(sums > 0, sums, 1.0)))


def divergence(counts: FloatArray) -> FloatArray:
    """float64 [layers]: Jensen-Shannon divergence of the sources, nats, weighted by their pairs.

    counts: [sources, layers, experts].
    """
    total = np.maximum(counts.sum(axis=(0, 2)), 1e-300)
    cells = _xlogx(counts).sum(axis=(0, 2))
    margins = _xlogx(counts.sum(axis=2)).sum(axis=0) + _xlogx(counts.sum(axis=0)).sum(axis=1)
    return np.asarray((cells - margins + _xlogx(total)) / total)


def expected_noise(counts: FloatArray) -> FloatArray:
    """float64 [layers]: expectation of `divergence` if all sources had the same distribution, given each
    source's and each expert's pairs."""
    of_source, of_expert = counts.sum(axis=2), counts.sum(axis=0)
    total = np.maximum(of_expert.sum(axis=1), 1.0)
    found = np.zeros(len(total))
    for sent in of_source:
        part = (sent / total)[:, None]
        mean = part * of_expert
        # Drawn without replacement: the variance of an expert with share m of all pairs is 1 - m times the
        # binomial one.
        found += (_excess(of_expert, part) * (1.0 - of_expert / total[:, None]) * (mean > 0)).sum(axis=1)
    return np.asarray(found / total)


def _excess(trials: FloatArray, part: FloatArray) -> FloatArray:
    """Return E[x ln x] - mu ln mu of a binomial x with mu = trials * part.

    The arguments broadcast; `trials` is at least 1 where it is not 0. With ln x = int_0^inf (e^-t - e^-xt) /
    t dt and u = 1 - e^-t: E[x ln x] = mu int_0^1 (1 - (1 - part u)^(trials - 1)) / -ln(1 - u) du. For large
    mu: (1 - part) / 2 + (1 - part)(1 + part) / (12 mu), the first terms of the series in moments about the
    mean.
    """
    mean = trials * part
    series = (1.0 - part) * (0.5 + (1.0 + part) / (12.0 * np.maximum(mean, 1e-300)))
    small = np.broadcast_to(mean < _MANY, mean.shape)
    if not small.any():
        return np.asarray(series)
    at, share = np.broadcast_to(trials, mean.shape)[small], np.broadcast_to(part, mean.shape)[small]
    exact = np.zeros(len(at))
    # Nodes in u = v^2: the integrand falls steeply at 0 where mu is large.
    for node, weight in zip(0.5 * (_NODES + 1.0), 0.5 * _WEIGHTS, strict=True):
        u = node * node
        exact += (
            2.0
            * node
            * weight
            * (-np.expm1((np.maximum(at, 1.0) - 1.0) * np.log1p(-share * u)))
            / -np.log1p(-u)
        )
    mu = at * share
    found = np.array(series)
    found[small] = mu * (exact - np.log(np.maximum(mu, 1e-300)))
    return found


def _spread(counts: FloatArray, noise: FloatArray, total: FloatArray) -> float:
    """Standard deviation of the mean over layers.

    That of chi-square, sqrt(2 * degrees) / (2 * pairs), with the degrees of freedom that the noise implies.
    """
    degrees = 2.0 * total * noise
    return float(np.sqrt((2.0 * degrees / (2.0 * total) ** 2).sum()) / counts.shape[1])


def _xlogx(values: FloatArray) -> FloatArray:
    return np.asarray(values * np.log(np.where(values > 0, values, 1.0)))
