"""Where the planner wants requests to live: for each cluster, how much of its traffic belongs on which rank of an engine. Pure.

The planner places experts near the homes of the clusters that want them; where ranks cost a request the same, it goes home, and so the demand
comes to be where the planner has placed its experts.

Homes belong to a placement. Those of an epoch that is not served and priced yet wait for it, and then the two change together: a decision
never sees the homes of one epoch with the prices of another while those that belong together are known. Homes of an older epoch stay until newer
ones come: few experts move between two of them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.events import HomesPublished
from fleet.signatures import MOST_CLUSTERS

AT_HOME = 1.5
"""A rank is a home of a request of which it is to get so many times the even share at least, and half of the most that any rank is to get."""


class ClusterHomes(NamedTuple):
    """As of one version; they hold from a placement epoch on. lift: float32 [ranks, K], share of a cluster's traffic that belongs on a rank, over the
    even share; 1 where a cluster is at home everywhere. None: nobody has a home."""

    version: int
    epoch: int
    lift: NDArray[np.float32] | None


def homes_of(said: HomesPublished, ranks: int) -> ClusterHomes:
    """What was said of an engine with so many ranks. ValueError when it contradicts itself or the engine."""
    if said.ranks != ranks:
        raise ValueError(f"homes of engine {said.engine!r} on {said.ranks} ranks; it has {ranks}")
    if said.version < 0 or said.epoch < 0:
        raise ValueError(f"homes of engine {said.engine!r}: version {said.version} and epoch {said.epoch} must not be negative")
    if not said.homes:
        return ClusterHomes(said.version, said.epoch, None)
    if not 1 <= said.count <= MOST_CLUSTERS or len(said.homes) != 4 * said.count * ranks:
        raise ValueError(f"homes of engine {said.engine!r}: {len(said.homes)} bytes do not make shares of {said.count} clusters on {ranks} ranks")
    share = np.frombuffer(said.homes, "<f4").reshape(said.count, ranks).astype(np.float64)
    total = share.sum(axis=1, keepdims=True)
    if not (np.isfinite(share).all() and (share >= 0).all() and ((np.abs(total - 1) < 1e-3) | (total == 0)).all()):
        raise ValueError(f"homes of engine {said.engine!r}: shares must be probabilities, or all 0 for a cluster without a home")
    lift = np.where(total > 0, ranks * share / np.where(total > 0, total, 1.0), 1.0)
    return ClusterHomes(said.version, said.epoch, np.ascontiguousarray(lift.T, np.float32))


class EngineHomes(NamedTuple):
    """Of one engine. now: the homes that its prices go with; coming: newer ones, which wait for their epoch. None: there are none."""

    now: ClusterHomes | None = None
    coming: ClusterHomes | None = None

    def hearing(self, homes: ClusterHomes, priced: int | None) -> "EngineHomes":
        """After the planner's word. priced: the epoch of the prices that are decided by; None: of no epoch yet. What is older than what is known
        already changes nothing; a newer word for an epoch that is priced holds at once and undoes what waits."""
        if priced is None or homes.epoch > priced:
            newest = max(known.version for known in (self.now, self.coming, _NONE) if known is not None)
            return self._replace(coming=homes) if homes.version > newest else self
        if self.now is not None and homes.version <= self.now.version:
            return self
        waits = self.coming is not None and self.coming.version > homes.version
        return EngineHomes(homes, self.coming if waits else None)

    def reaching(self, priced: int | None) -> "EngineHomes":
        """Once the prices are those of this epoch."""
        if self.coming is None or priced is None or self.coming.epoch > priced:
            return self
        return EngineHomes(self.coming)


_NONE = ClusterHomes(-1, 0, None)


def at_home(lift: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool [targets]: which ranks are homes of a request with these lifts."""
    return np.asarray(lift >= max(AT_HOME, 0.5 * float(np.maximum.reduce(lift, initial=0.0))))
