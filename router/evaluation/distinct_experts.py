"""Which clusters the running requests of each engine are of, and how many experts a further request would make its steps read. Pure.

Engines that each hold all experts read, per decode step, the weights of every expert that some token of the step goes to. A request whose
experts are being read for others anyway adds few (`fleet.timing.added_distinct_experts`); law 3 of ELDR (arXiv 2607.00466).

State (`ClusterMixes`): per engine the sum of the signatures of open bookings. Sequences that nobody booked here are taken to be of the
traffic's mix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.signatures import ClusterModel, Weights
from fleet.timing import added_distinct_experts, expected_distinct_experts, log_misses

Tokens = NDArray[np.float64]
NOTICEABLE = 0.05
"""A mix has changed when it differs by this share of its sequences,"""
LEAST_CHANGE = 0.5
"""and by at least so many sequences."""


class MixShare:
    """One booking's part of its engine's mix; `end` takes it out again, once."""

    __slots__ = ("_mix", "_weights")

    def __init__(self, mix: "_Mix", weights: Weights) -> None:
        self._mix: _Mix | None = mix
        self._weights = weights
        mix.sum += weights
        mix.bookings += 1

    def end(self) -> None:
        mix, self._mix = self._mix, None
        if mix is not None:
            mix.bookings -= 1
            if mix.bookings:
                mix.sum -= self._weights
            else:
                mix.sum[:] = 0.0  # and rounding with it


class _Mix:
    """sum: float64 [K] over one version of the clusters."""

    __slots__ = ("bookings", "clusters", "sum", "told")

    def __init__(self, clusters: int, size: int) -> None:
        self.clusters = clusters
        self.sum = np.zeros(size)
        self.bookings = 0
        self.told: Tokens | None = None
        """the mix that prices were last made of"""


class ClusterMixes:
    """By worker_id. A mix is over one version of the clusters; with a newer one it begins anew."""

    def __init__(self) -> None:
        self._mixes: dict[int, _Mix] = {}

    def book(self, worker_id: int, weights: Weights, clusters: int) -> MixShare | None:
        """A request with this signature (float32 [K], over this version of the clusters) runs there from now on. None: of an old version."""
        mix = self._mixes.get(worker_id)
        if mix is None or clusters > mix.clusters or (clusters == mix.clusters and len(weights) != len(mix.sum)):
            mix = self._mixes[worker_id] = _Mix(clusters, len(weights))
        return MixShare(mix, weights) if clusters == mix.clusters else None

    def changed(self, worker_id: int, sequences: int, model: ClusterModel, *, told: bool) -> Tokens | None:
        """float64 [K]: how many of an engine's `sequences` are of each cluster; None when that is about what it was when asked last.
        told: what was asked last is known where it is needed."""
        mix = self._mixes.get(worker_id)
        if mix is None or mix.clusters != model.version or len(mix.sum) != model.clusters:
            mix = self._mixes[worker_id] = _Mix(model.version, model.clusters)
        tokens = mix.sum + max(sequences - mix.bookings, 0) * model.shares.astype(np.float64)
        if told and mix.told is not None and np.abs(tokens - mix.told).sum() <= max(LEAST_CHANGE, NOTICEABLE * float(tokens.sum())):
            return None
        mix.told = tokens
        return tokens

    def forget_worker(self, worker_id: int) -> None:
        """Bookings that end later change nothing."""
        self._mixes.pop(worker_id, None)


class ReadingGroup(NamedTuple):
    """What engines with the same experts to read have in common. boundary: layers below are sharded and always read."""

    clusters: ClusterModel
    top_k: int
    boundary: int

    def misses(self) -> NDArray[np.float32]:
        """float32 [K, cells], `fleet.timing.log_misses`. Clusters that nobody uses stand for the mean until they are used."""
        model = self.clusters
        profiles = np.where((model.shares > 0)[:, None, None], model.profiles, model.mean)
        return log_misses(profiles[:, self.boundary :], self.top_k)


class DistinctReads(NamedTuple):
    """Distinct experts, summed over layers, that the steps of some engines read. now: float64 [engines]. added: float64 [engines, K], by
    one more sequence of each cluster."""

    now: NDArray[np.float64]
    added: NDArray[np.float64]


def read(misses: NDArray[np.float32], mixes: Sequence[Tokens]) -> DistinctReads:
    """mixes: [engines] of float64 [K] sequences."""
    tokens = np.stack(mixes)
    return DistinctReads(expected_distinct_experts(misses, tokens), np.maximum(added_distinct_experts(misses, tokens), 0.0))
