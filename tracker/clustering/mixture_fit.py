"""Fit of a few expert profiles to sampled requests. Pure: arrays in, arrays out, no random draws.

Requests are compared as square roots of probabilities, shrunk towards the traffic's profile if they are
short. The Euclidean distance of these is Hellinger's, in which counting noise is uniform. k-means runs on the
Gram matrix, so that a round costs n^2 instead of n x layers x experts.

Clusters must predict. Two profiles are better than one if they make completions more likely: the profiles are
fitted on one half of the requests, and weighted for each request of the other half by its *prompt*; the
likelihood is that of its *completion*. On noise, and on differences that do not persist from prompt to
completion, the mean of this gain is negative, for any number of requests.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array, FloatArray
from fleet.signatures import MIN_PROBABILITY, posterior

ENOUGH = 2048.0
"""(token, k) pairs per layer at which a request's weight in a pool is half of its limit. Requests of a
cluster differ by more than counting noise, so a long request does not carry proportionally more evidence
(random effects, DerSimonian & Laird 1986).
"""
CERTAIN = 2.0
"""Standard errors by which a split must predict better than no split. On noise the gain is several errors
below 0, so this need not be strict.
"""
DOUBTFUL = -1.0
"""Two clusters are merged if they predict worse than one by this many standard errors. Between the two limits
nothing changes.
"""
FEWEST = 12
"""Minimum number of requests to split."""
AXES = 3
"""Principal axes along which a split is tried."""
MAX_EVALUATED = 256
"""Limit of requests that judge the sharpness."""
GRID = tuple(float(10.0 ** (-5.0 + step / 4.0)) for step in range(25))
"""Candidate sharpnesses: four per decade, 1e-5 to 10."""
LEVELS = GRID[4::8]
"""Sharpnesses at which splits and merges are judged: each at its best."""


REPEATED = 256.0
"""(token, k) pairs per layer from which on a text mostly repeats itself: twice as many pairs carry less than
1.5 times the evidence. Sharpness is learnt, and correct for the observed lengths. This only extrapolates to
others, above all blocks.
"""


def first_sharpness(layers: int) -> float:
    """Return the sharpness before the first sample: the layers of a token are nearly redundant."""
    return 0.4 / layers


def saturation(layers: int) -> float:
    """Return the saturation of `fleet.signatures.ClusterModel`, per pair over all layers."""
    return 1.0 / (REPEATED * layers)


@dataclass(frozen=True, eq=False)
class FitSample:
    """Samples for a fit, in random order.

    prompt, completion: float32 [n, layers * experts] pairs. weight: float64 [n], current requests that each
    represents. prior_pairs: pairs per layer of the prior, the traffic's profile. layers: their number.
    """

    prompt: Float32Array
    completion: Float32Array
    weight: FloatArray
    prior_pairs: float
    layers: int

    @cached_property
    def pairs(self) -> FloatArray:
        """Pairs per layer of each request: float64 [n]."""
        return np.asarray((self.prompt.sum(axis=1) + self.completion.sum(axis=1)) / self.layers, np.float64)

    @cached_property
    def temper(self) -> Float32Array:
        """Weight of each prompt's evidence, before sharpness: float32 [n, 1]."""
        return np.asarray(
            1.0 / (1.0 + saturation(self.layers) * self.prompt.sum(axis=1, keepdims=True)), np.float32
        )

    @cached_property
    def scale(self) -> Float32Array:
        """Weight of a request's pairs in a pool: float32 [n]."""
        return np.asarray(self.weight / (1.0 + self.pairs / ENOUGH), np.float32)

    @cached_property
    def total(self) -> Float32Array:
        """Pool of all requests: float32 [layers * experts]."""
        return np.asarray(self.scale @ self.prompt + self.scale @ self.completion, np.float32)

    @cached_property
    def prior(self) -> Float32Array:
        """Profile of the traffic: float32 [layers * experts]."""
        return _probabilities(
            self.total, np.full_like(self.total, self.layers / len(self.total)), self.prior_pairs, self.layers
        )

    @cached_property
    def fit_weight(self) -> FloatArray:
        """Weights in k-means: float64 [n]. Short requests are mostly prior."""
        return self.weight * self.pairs / (self.pairs + self.prior_pairs)

    @cached_property
    def gram(self) -> Float32Array:
        """Inner products of the requests' roots, centred on the traffic's: float32 [n, n]."""
        # In place: [n, layers * experts] is the largest array of a refit.
        roots = self.prompt + self.completion
        roots += np.float32(self.prior_pairs) * self.prior
        roots /= np.asarray(self.pairs + self.prior_pairs, np.float32)[:, None]
        np.sqrt(roots, out=roots)
        roots -= np.sqrt(self.prior)  # centred, because float32 keeps small differences of small numbers
        return np.asarray(roots @ roots.T, np.float32)

    def pooled(self, members: NDArray[np.intp], prior: Float32Array) -> Float32Array:
        """Return the common profile of some requests, shrunk to `prior`: float32 [layers * experts]."""
        scale = self.scale[members]
        return _probabilities(
            scale @ self.prompt[members] + scale @ self.completion[members],
            prior,
            self.prior_pairs,
            self.layers,
        )

    def profiles(
        self, labels: NDArray[np.intp], clusters: int, among: NDArray[np.bool_] | None = None
    ) -> Float32Array:
        """Return the profiles of labelled requests (of those in `among`), shrunk to the traffic's: float32
        [clusters, layers * experts].
        """
        chosen = np.zeros((clusters, len(labels)), np.float32)
        # One matrix product with the assignment matrix sums the members of all clusters.
        chosen[labels, np.arange(len(labels))] = self.scale if among is None else self.scale * among
        return _probabilities(
            chosen @ self.prompt + chosen @ self.completion, self.prior, self.prior_pairs, self.layers
        )


def _probabilities(
    pooled: Float32Array, prior: Float32Array, prior_pairs: float, layers: int
) -> Float32Array:
    wide = (pooled + np.float32(prior_pairs) * prior).reshape(*pooled.shape[:-1], layers, -1)
    wide = wide / wide.sum(axis=-1, keepdims=True)
    return np.asarray(wide.reshape(pooled.shape), np.float32)


def nearest(
    gram: Float32Array, labels: NDArray[np.intp], weight: FloatArray, clusters: int
) -> NDArray[np.intp]:
    """Do one round of k-means: intp [n], the cluster with the nearest mean; never an empty one."""
    return np.asarray(_distances(gram, labels, weight, clusters).argmin(axis=1))


def _parts(labels: NDArray[np.intp], weight: FloatArray, clusters: int) -> tuple[FloatArray, FloatArray]:
    """Return each request's share in its cluster's mean, float64 [n, clusters], and the clusters' weights,
    float64 [clusters].
    """
    share = np.zeros((len(labels), clusters))
    share[np.arange(len(labels)), labels] = weight
    mass = share.sum(axis=0)
    return share / np.where(mass > 0, mass, 1.0), mass


def _distances(gram: Float32Array, labels: NDArray[np.intp], weight: FloatArray, clusters: int) -> FloatArray:
    """Return squared distances to the means minus each request's own square: float64 [n, clusters]; infinite
    for empty clusters.
    """
    share, mass = _parts(labels, weight, clusters)
    # |x - m|^2 = x'x - 2 x'm + m'm. Row-wise x'x is the same for every cluster, so that it is left out.
    towards = np.asarray(gram @ share.astype(np.float32), np.float64)
    apart = (share * towards).sum(axis=0) - 2.0 * towards
    apart[:, mass == 0] = np.inf
    return np.asarray(apart)


def likeliest(requests: FitSample, profiles: Float32Array, used: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return for each request the likeliest used profile: intp [n], indices into profiles [K, layers *
    experts].
    """
    logs = np.log(np.maximum(profiles[used], MIN_PROBABILITY)).T
    return np.asarray(used[(requests.prompt @ logs + requests.completion @ logs).argmax(axis=1)])


def k_means(
    gram: Float32Array, labels: NDArray[np.intp], weight: FloatArray, clusters: int, rounds: int = 10
) -> NDArray[np.intp]:
    """Run k-means from the given labels: intp [n]."""
    for _ in range(rounds):
        moved = nearest(gram, labels, weight, clusters)
        if np.array_equal(moved, labels):
            break
        labels = moved
    return labels


def halves(gram: Float32Array, weight: FloatArray, axis: int) -> NDArray[np.intp] | None:
    """Split by 2-means that starts along a principal axis: intp [n] of 0 and 1; None if one side is empty."""
    share = weight / weight.sum()
    # Kernel principal components (Schoelkopf et al. 1998): centre the Gram matrix on the weighted mean.
    centred = gram - share @ gram - (gram @ share)[:, None] + share @ gram @ share
    root = np.sqrt(share)
    directions = _axes(root[:, None] * centred * root)
    if axis >= directions.shape[1]:
        return None
    labels = k_means(gram, (directions[:, axis] > 0).astype(np.intp), weight, 2)
    return labels if 0 < labels.sum() < len(labels) else None


def _axes(matrix: NDArray[np.floating]) -> FloatArray:
    """Return leading eigenvectors of a symmetric matrix: float64 [n, up to AXES]. Orthogonal iteration from a
    fixed start.
    """
    size = len(matrix)
    # Cosines of incommensurable frequencies: independent columns without a random draw.
    start = np.cos(np.outer(np.arange(size) + 0.5, np.arange(1, min(AXES, size) + 1) * 0.7390851332))
    for _ in range(20):
        start, _ = np.linalg.qr(matrix @ start)
    values = (start * (matrix @ start)).sum(axis=0)
    return np.asarray(start[:, np.argsort(-values, kind="stable")])


class FitGain(NamedTuple):
    """Advantage of two profiles over one in predicting completions: total nats (of pooled pairs), and in
    standard errors.
    """

    total: float
    certainty: float


def gain(
    requests: FitSample, parts: tuple[NDArray[np.intp], NDArray[np.intp]], evaluated: NDArray[np.intp]
) -> FloatArray:
    """Return the nats by which two profiles predict each completion better than one: float64 [LEVELS,
    judged].

    The prompt weighs the two profiles. `parts` are the requests on which they are fitted. The one profile is
    their mean, so that both alternatives have seen the same data. The logarithm of the mixed profile is
    bounded from below by the mixture of logarithms (Jensen), which only makes splits rarer.
    """
    masses = np.array([requests.fit_weight[part].sum() for part in parts], np.float32)
    masses /= masses.sum()
    # Shrink both profiles to their common one, so that a small part is not favoured by its noise.
    together = requests.pooled(np.concatenate(parts), requests.prior)
    two = np.stack([requests.pooled(part, together) for part in parts])
    ratios = (np.log(np.maximum(two, MIN_PROBABILITY)) - np.log(np.maximum(masses @ two, MIN_PROBABILITY))).T
    prompts, completions = (
        requests.temper[evaluated] * (requests.prompt[evaluated] @ ratios),
        requests.completion[evaluated] @ ratios,
    )
    weights = posterior(masses, np.multiply.outer(np.array(LEVELS, np.float32), prompts))
    return np.asarray((weights * completions).sum(axis=2) * _worth(requests)[evaluated], np.float64)


def _worth(requests: FitSample) -> FloatArray:
    """Return the weight of a nat of each completion: float64 [n]."""
    return np.asarray(requests.weight / (1.0 + requests.completion.sum(axis=1) / (requests.layers * ENOUGH)))


def _best_level(gains: list[FloatArray]) -> FitGain:
    """Select the best level among gains [LEVELS, requests] of both folds."""
    each = np.concatenate(gains, axis=1)
    best = each[each.sum(axis=1).argmax()]
    error = float(best.std(ddof=1)) * len(best) ** 0.5
    return FitGain(float(best.sum()), float(best.sum()) / error if error > 0 else 0.0)


def split(requests: FitSample, members: NDArray[np.intp]) -> tuple[NDArray[np.intp], FitGain] | None:
    """Split the members in two: intp [members] of 0 and 1, with the gain; None if no axis gives a certain
    gain.
    """
    if len(members) < FEWEST:
        return None
    tried = ((_crossed(requests, members, axis), axis) for axis in range(AXES))
    certain = [(found, axis) for found, axis in tried if found is not None and found.certainty >= CERTAIN]
    if not certain:
        return None
    best, axis = max(certain)
    sides = halves(requests.gram[np.ix_(members, members)], requests.fit_weight[members], axis)
    return None if sides is None else (sides, best)


def _crossed(requests: FitSample, members: NDArray[np.intp], axis: int) -> FitGain | None:
    """Judge a split by cross-validation: fitted on each half of the members, judged on the other."""
    gains = []
    for inside, evaluated in _folds(members):
        sides = halves(requests.gram[np.ix_(inside, inside)], requests.fit_weight[inside], axis)
        if sides is None:
            return None
        gains.append(gain(requests, (inside[sides == 0], inside[sides == 1]), evaluated))
    return _best_level(gains)


def _folds(members: NDArray[np.intp]) -> tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]:
    """Return the even and odd members as halves, in both orders. Their random order makes this a fair
    split."""
    return (members[::2], members[1::2]), (members[1::2], members[::2])


def apart(requests: FitSample, first: NDArray[np.intp], second: NDArray[np.intp]) -> FitGain | None:
    """Return the gain of keeping two clusters apart; None if one has too few requests to tell."""
    if min(len(first), len(second)) < 2:
        return None
    pairs = zip(_folds(first), _folds(second), strict=True)
    return _best_level(
        [gain(requests, (here[0], there[0]), np.concatenate([here[1], there[1]])) for here, there in pairs]
    )


def neighbours(gram: Float32Array, labels: NDArray[np.intp], weight: FloatArray, clusters: int) -> FloatArray:
    """Return squared distances between means: float64 [clusters, clusters]; infinite for empty clusters and
    on the diagonal.
    """
    share, mass = _parts(labels, weight, clusters)
    inner = share.T @ (np.asarray(gram, np.float64) @ share)
    squares = np.diag(inner)
    distances = squares[:, None] + squares[None, :] - 2.0 * inner
    distances[mass == 0] = distances[:, mass == 0] = np.inf
    np.fill_diagonal(distances, np.inf)
    return np.asarray(distances)


class HeldOutLikelihood:
    """Judge of how well signatures predict at a given sharpness. Each request is judged by profiles fitted on
    the other fold.
    """

    def __init__(self, requests: FitSample, labels: NDArray[np.intp], shares: FloatArray) -> None:
        telling = np.flatnonzero(requests.prompt.any(axis=1) & requests.completion.any(axis=1))
        self.evaluated = telling[:: max(1, -(-len(telling) // MAX_EVALUATED))]
        self._requests, self._shares = requests, shares.astype(np.float32)
        self._floor = np.log(np.maximum(requests.prior, MIN_PROBABILITY))
        self._known: dict[float, float] = {}
        fold = np.zeros(len(labels), np.bool_)
        # Every second member of each cluster: both folds have all clusters, and members are in random order.
        for slot in np.unique(labels):
            fold[np.flatnonzero(labels == slot)[::2]] = True
        folds = ((fitted, self.evaluated[~fitted[self.evaluated]]) for fitted in (fold, ~fold))
        self._folds = [
            self._prepared(chosen, requests.profiles(labels, len(shares), fitted)) for fitted, chosen in folds
        ]

    def _prepared(
        self, chosen: NDArray[np.intp], profiles: Float32Array
    ) -> tuple[NDArray[np.intp], Float32Array, Float32Array]:
        ratios = np.log(np.maximum(profiles, MIN_PROBABILITY)) - self._floor
        return (
            chosen,
            profiles,
            np.asarray(
                self._requests.temper[chosen] * (self._requests.prompt[chosen] @ ratios.T), np.float32
            ),
        )

    def likelihood(self, sharpness: float) -> float:
        """Return the gain in nats of completions under their prompts' signatures, compared with the traffic's
        profile.
        """
        if sharpness not in self._known:
            self._known[sharpness] = sum(self._nats(sharpness, *fold) for fold in self._folds)
        return self._known[sharpness]

    def _nats(
        self, sharpness: float, chosen: NDArray[np.intp], profiles: Float32Array, prompts: Float32Array
    ) -> float:
        weights = posterior(self._shares, sharpness * prompts)
        ratios = np.log(np.maximum(weights @ profiles, MIN_PROBABILITY)) - self._floor
        nats: FloatArray = (self._requests.completion[chosen] * ratios).sum(axis=1)
        return float((_worth(self._requests)[chosen] * nats).sum())


def sharpest(requests: FitSample, labels: NDArray[np.intp], shares: FloatArray, present: float) -> float:
    """Return the sharpness of the grid that makes completions likeliest, by hill climbing from the present
    one.
    """
    if (shares > 0).sum() < 2:
        return present
    held_out = HeldOutLikelihood(requests, labels, shares)
    if len(held_out.evaluated) < FEWEST:
        return present
    here = int(np.argmin(np.abs(np.log(GRID) - np.log(present))))
    while True:
        around = [place for place in (here, here - 1, here + 1) if 0 <= place < len(GRID)]
        best = max(around, key=lambda place: held_out.likelihood(GRID[place]))
        if best == here:
            return GRID[here]
        here = best
