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

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IndexArray

SURE = 5.0
"""Standard deviations beyond the expected noise. A normal tail would be 3e-7, but pairs of one text are
correlated, and the strength of that is only estimated."""
LEAST = 2e-3
"""Least significant divergence in nats: less than this moves no tenth of a per cent of tokens, however
certain it is."""
FEW = 1.0
"""Mean pairs per source and expert below which the test gives no result."""
_NODES, _WEIGHTS = leggauss(48)
_MANY = 18.0
"""Expected pairs of a source and expert beyond which a series replaces the integral."""
_BLOCK = 1 << 12
"""Integrals that are computed together: what they need fits in the cache."""


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
    sums, scale = _sums_and_scale(demand, pairs, dispersion)
    sources, experts = len(demand), demand.shape[2]
    of_source = sums * scale
    total = of_source.sum(axis=0)
    enough = (of_source >= FEW * experts).sum(axis=0) >= 2
    mean_pairs = float(total.mean() / max(1, sources))
    if sources < 2 or not enough.any():
        return SpecialisationTest(Evidence.TOO_FEW_PAIRS, sources, experts, mean_pairs)
    # Layers with too few pairs would add noise only.
    layers = slice(None) if enough.all() else enough
    counts = _Counts.of(demand[:, layers], sums[:, layers], scale[:, layers])
    noise = counts.noise
    found, floor, spread = (
        float(counts.divergence.mean()),
        float(noise.mean()),
        _spread(noise, counts.total),
    )
    if found <= floor + SURE * spread:
        evidence = Evidence.NONE
    elif found - floor < LEAST:
        evidence = Evidence.TOO_SMALL
    else:
        evidence = Evidence.CLEAR
    return SpecialisationTest(evidence, sources, experts, mean_pairs, found, floor, spread)


def _sums_and_scale(
    demand: NDArray[Any], pairs: NDArray[Any], dispersion: float
) -> tuple[FloatArray, FloatArray]:
    """Return (demand, factors that make effective pairs of it), [sources, layers] each."""
    if demand.ndim != 3 or np.shape(pairs) not in (demand.shape[:1], demand.shape[:2]):
        raise ValueError(
            f"gate: demand has shape {demand.shape} and pairs {np.shape(pairs)}; expected [sources, layers,"
            " experts] and [sources(, layers)]"
        )
    if not dispersion >= 1.0:
        raise ValueError(f"gate: dispersion must be at least 1, not {dispersion}")
    known = np.asarray(pairs, np.float64).reshape(len(demand), -1) / dispersion
    sums = demand.sum(axis=2, dtype=np.float64)
    return sums, known / np.where(sums > 0, sums, 1.0)


class _Counts(NamedTuple):
    """Sums over counts [sources, layers, experts]."""

    of_source: FloatArray
    """[sources, layers]"""
    of_expert: FloatArray
    """[layers, experts]"""
    cells: FloatArray
    """[layers]: sum of x ln x over all counts"""

    @classmethod
    def of(cls, demand: NDArray[Any], sums: FloatArray, scale: FloatArray) -> "_Counts":
        """Add up the counts demand [sources, layers, experts] * scale [sources, layers].

        sums: of the demand, [sources, layers].
        """
        # x ln x of a scaled number d s is s (d ln d + d ln s). Source by source: one fits in the cache.
        logs = np.stack([_xlogx_sum(np.asarray(one, np.float64)) for one in demand])
        cells = (scale * (logs + sums * np.log(np.maximum(scale, 1e-300)))).sum(axis=0)
        return cls(sums * scale, np.einsum("sl,sle->le", scale, demand), np.asarray(cells))

    @property
    def total(self) -> FloatArray:
        """[layers]"""
        return np.asarray(self.of_source.sum(axis=0))

    @property
    def divergence(self) -> FloatArray:
        """[layers]: Jensen-Shannon divergence of the sources, nats, weighted by their pairs."""
        total = np.maximum(self.total, 1e-300)
        margins = _xlogx_sum(self.of_source.T) + _xlogx_sum(self.of_expert)
        return np.asarray((self.cells - margins + total * np.log(total)) / total)

    @property
    def noise(self) -> FloatArray:
        """[layers]: expectation of `divergence` if all sources had the same distribution, given each source's
        and each expert's pairs."""
        total = np.maximum(self.total, 1.0)
        part = self.of_source / total
        # Drawn without replacement: the variance of an expert with share m of all pairs is 1 - m times the
        # binomial one.
        weight = np.where(self.of_expert > 0, 1.0 - self.of_expert / total[:, None], 0.0)
        # The series of `_excess`, summed over experts: its terms differ in the power of the mean.
        plain, once, twice = (
            (weight / np.maximum(self.of_expert, 1e-100) ** power).sum(axis=1) for power in range(3)
        )
        safe = np.where(part > 0, part, 1.0)
        terms = plain / 2.0 + ((1.0 + part) * once / safe + twice / safe**2) / 12.0
        found = np.where(part > 0, (1.0 - part) * terms, 0.0).sum(axis=0)
        for layer, expert, share in self._rare(part):
            trials = self.of_expert[layer, expert]
            more = _excess(trials, share) - _series(trials, share)
            found += np.bincount(layer, weight[layer, expert] * more, len(found))
        return np.asarray(found / total)

    def _rare(self, part: FloatArray) -> Iterator[tuple[IndexArray, IndexArray, FloatArray]]:
        """Yield (layer, expert, the source's part [sources, layers] of the layer) of counts of which few are
        expected, some thousand at a time."""
        waiting: list[tuple[IndexArray, IndexArray, FloatArray]] = []
        lowest = np.where(self.of_expert > 0, self.of_expert, np.inf).min(axis=1)
        for sent in part[((part * lowest < _MANY) & (part > 0)).any(axis=1)]:
            mean = sent[:, None] * self.of_expert
            layer, expert = np.nonzero((mean < _MANY) & (mean > 0))
            waiting.append((layer, expert, sent[layer]))
            if sum(len(layer) for layer, *_ in waiting) >= _BLOCK:
                yield _joined(waiting)
                waiting = []
        if waiting:
            yield _joined(waiting)


def _joined(
    parts: list[tuple[IndexArray, IndexArray, FloatArray]],
) -> tuple[IndexArray, IndexArray, FloatArray]:
    layer, expert, share = (np.concatenate(column) for column in zip(*parts, strict=True))
    return layer, expert, share


def _counts(counts: FloatArray) -> _Counts:
    sums = np.asarray(counts.sum(axis=2))
    return _Counts.of(counts, sums, np.ones_like(sums))


def divergence(counts: FloatArray) -> FloatArray:
    """float64 [layers]: Jensen-Shannon divergence of the sources, nats, weighted by their pairs.

    counts: [sources, layers, experts].
    """
    return _counts(counts).divergence


def expected_noise(counts: FloatArray) -> FloatArray:
    """float64 [layers]: expectation of `divergence` if all sources had the same distribution, given each
    source's and each expert's pairs."""
    return _counts(counts).noise


def _series(trials: FloatArray, part: FloatArray) -> FloatArray:
    """Return `_excess` for large means: the first terms of the series in moments about the mean.

    (1 - part) (1 / 2 + (1 + part) / (12 mean) + 1 / (12 mean^2)). Where the part is small, the next term is
    19 / (120 mean^3).
    """
    mean = np.maximum(trials * part, 1e-100)
    return np.asarray((1.0 - part) * (0.5 + ((1.0 + part) / mean + 1.0 / mean**2) / 12.0))


def _excess(trials: FloatArray, part: FloatArray) -> FloatArray:
    """Return E[x ln x] - mu ln mu of binomials x with mu = trials * part, [n] each.

    `trials` is at least 1 where it is not 0. With ln x = int_0^inf (e^-t - e^-xt) / t dt and u = 1 - e^-t:
    E[x ln x] = mu int_0^1 (1 - (1 - part u)^(trials - 1)) / -ln(1 - u) du.
    """
    exact, more = np.zeros(len(trials)), np.maximum(trials, 1.0) - 1.0
    # Nodes in u = v^2: the integrand falls steeply at 0 where mu is large.
    for node, weight in zip(0.5 * (_NODES + 1.0), 0.5 * _WEIGHTS, strict=True):
        u = node * node
        exact += 2.0 * node * weight * (-np.expm1(more * np.log1p(-part * u))) / -np.log1p(-u)
    mu = trials * part
    return np.asarray(mu * (exact - np.log(np.maximum(mu, 1e-300))))


def _spread(noise: FloatArray, total: FloatArray) -> float:
    """Standard deviation of the mean over layers.

    That of chi-square, sqrt(2 * degrees) / (2 * pairs), with the degrees of freedom that the noise implies.
    """
    degrees = 2.0 * total * noise
    return float(np.sqrt((2.0 * degrees / (2.0 * total) ** 2).sum()) / len(noise))


def _xlogx_sum(values: FloatArray) -> FloatArray:
    """[n]: sum of x ln x over the columns of values [n, m]."""
    logs = np.maximum(values, 1e-300)
    np.log(logs, out=logs)
    return np.asarray(np.einsum("nm,nm->n", values, logs))
