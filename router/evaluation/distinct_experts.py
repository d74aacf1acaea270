"""Mix of clusters among the running requests of each engine, and the experts that one more request adds to
each step's reads. Pure.

An engine that holds all experts reads, in each decode step, the weights of every expert to which some token
of the step is routed. Its ranks share these reads evenly: by experts in whole layers, by parts in sharded
ones. A request adds few reads if its experts are already being read for others
(`fleet.timing.added_distinct_experts`). Source: law 3 of ELDR (arXiv 2607.00466).

State (`ClusterMixes`): per engine, the sum of the signatures of its open bookings. Sequences without a
booking in this router are assumed to follow the mix of the traffic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array, FloatArray
from fleet.signatures import ClusterModel
from fleet.timing import added_distinct_experts, expected_distinct_experts, log_misses

NOTICEABLE = 0.05
"""A mix counts as changed if it differs by at least this share of its sequences ..."""
MIN_CHANGE = 0.5
"""... and by at least this number of sequences."""


class MixShare:
    """Share of one booking in its engine's mix. `end` removes it, once."""

    __slots__ = ("_mix", "_weights")

    def __init__(self, mix: "_Mix", weights: Float32Array) -> None:
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

    __slots__ = ("bookings", "clusters", "priced", "sum")

    def __init__(self, clusters: int, size: int) -> None:
        self.clusters = clusters
        self.sum = np.zeros(size)
        self.bookings = 0
        self.priced: FloatArray | None = None
        """the mix from which prices were last computed"""


class ClusterMixes:
    """Mixes by worker_id. Each covers one version of the clusters and starts anew with a newer version."""

    def __init__(self) -> None:
        self._mixes: dict[int, _Mix] = {}

    def book(self, worker_id: int, weights: Float32Array, clusters: int) -> MixShare | None:
        """Add a running request with this signature (float32 [K], over this version of the clusters). Return
        None if the version is outdated.
        """
        mix = self._mixes.get(worker_id)
        if (
            mix is None
            or clusters > mix.clusters
            or (clusters == mix.clusters and len(weights) != len(mix.sum))
        ):
            mix = self._mixes[worker_id] = _Mix(clusters, len(weights))
        return MixShare(mix, weights) if clusters == mix.clusters else None

    def changed(
        self, worker_id: int, sequences: int, model: ClusterModel, *, delivered: bool
    ) -> FloatArray | None:
        """Return the number of an engine's `sequences` in each cluster, float64 [K], or None if it is about
        the same as at the last call. delivered: False if the result of the last call was lost, which forces a
        new result.
        """
        mix = self._mixes.get(worker_id)
        if mix is None or mix.clusters != model.version or len(mix.sum) != model.clusters:
            mix = self._mixes[worker_id] = _Mix(model.version, model.clusters)
        tokens = mix.sum + max(sequences - mix.bookings, 0) * model.shares.astype(np.float64)
        if (
            delivered
            and mix.priced is not None
            and np.abs(tokens - mix.priced).sum() <= max(MIN_CHANGE, NOTICEABLE * float(tokens.sum()))
        ):
            return None
        mix.priced = tokens
        return tokens

    def forget_worker(self, worker_id: int) -> None:
        """Drop an engine. Bookings that end later have no effect."""
        self._mixes.pop(worker_id, None)


class ReadingGroup(NamedTuple):
    """Facts shared by engines that read the same experts."""

    clusters: ClusterModel
    top_k: int

    def misses(self) -> NDArray[np.float32]:
        """Return `fleet.timing.log_misses`, float32 [K, cells]. Clusters without traffic use the mean profile
        until they get some.
        """
        model = self.clusters
        profiles = np.where((model.shares > 0)[:, None, None], model.profiles, model.mean)
        return log_misses(profiles, self.top_k)


class DistinctReads(NamedTuple):
    """Distinct experts, summed over layers, that the steps of some engines read. now: float64 [engines].
    added: float64 [engines, K], the increase caused by one more sequence of each cluster.
    """

    now: NDArray[np.float64]
    added: NDArray[np.float64]


def read(misses: NDArray[np.float32], mixes: Sequence[FloatArray]) -> DistinctReads:
    """Compute the distinct reads of some engines. mixes: [engines] of float64 [K] sequences."""
    tokens = np.stack(mixes)
    return DistinctReads(
        expected_distinct_experts(misses, tokens), np.maximum(added_distinct_experts(misses, tokens), 0.0)
    )
