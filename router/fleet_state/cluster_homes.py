"""Cluster homes: for each cluster, the share of its traffic that the planner assigns to each rank of an
engine. Pure.

The planner places experts near the homes of the clusters that use them. Among ranks of equal cost a request
goes to a home, so demand arises where the planner has placed the experts.

Homes belong to a placement. Homes of an epoch that is not served and priced yet wait for it; then homes and
prices change together. A decision never combines the homes of one epoch with the prices of another while the
matching ones are known. Homes of an older epoch stay until newer ones come, since few experts move between
two epochs.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.facts.placements import HomesPublished
from fleet.signatures import MAX_CLUSTERS

MIN_HOME_LIFT = 1.5
"""A rank is a home of a request if it gets at least this multiple of its even share, and at least half of the
largest share of any rank.
"""


class ClusterHomes(NamedTuple):
    """Homes of one version, valid from a placement epoch on. lift: float32 [ranks, K], share of a cluster's
    traffic that belongs on a rank, over the even share; 1 where every rank is a home. None: there are no
    homes.
    """

    version: int
    epoch: int
    lift: NDArray[np.float32] | None


def homes_of(published: HomesPublished, ranks: int) -> ClusterHomes:
    """Decode the published homes of an engine with `ranks` ranks. ValueError if they are inconsistent or do
    not fit the engine.
    """
    if published.homes and published.ranks != ranks:
        raise ValueError(f"homes of engine {published.engine!r} on {published.ranks} ranks; it has {ranks}")
    if published.version < 0 or published.epoch < 0:
        raise ValueError(
            f"homes of engine {published.engine!r}: version {published.version} and epoch {published.epoch}"
            " must not be negative"
        )
    if not published.homes:
        return ClusterHomes(published.version, published.epoch, None)
    if not 1 <= published.count <= MAX_CLUSTERS or len(published.homes) != 4 * published.count * ranks:
        raise ValueError(
            f"homes of engine {published.engine!r}: {len(published.homes)} bytes do not make shares of"
            f" {published.count} clusters on {ranks} ranks"
        )
    share = np.frombuffer(published.homes, "<f4").reshape(published.count, ranks).astype(np.float64)
    total = share.sum(axis=1, keepdims=True)
    if not (
        np.isfinite(share).all() and (share >= 0).all() and ((np.abs(total - 1) < 1e-3) | (total == 0)).all()
    ):
        raise ValueError(
            f"homes of engine {published.engine!r}: shares must be probabilities, or all 0 for a cluster"
            " without a home"
        )
    lift = np.where(total > 0, ranks * share / np.where(total > 0, total, 1.0), 1.0)
    return ClusterHomes(published.version, published.epoch, np.ascontiguousarray(lift.T, np.float32))


class EngineHomes(NamedTuple):
    """Homes of one engine. now: those that match its prices; coming: newer ones that wait for their epoch.
    None: there are none.
    """

    now: ClusterHomes | None = None
    coming: ClusterHomes | None = None

    def received(self, homes: ClusterHomes, priced: int | None) -> "EngineHomes":
        """Apply a message of the planner. priced: the epoch of the current prices; None: no epoch yet. An
        outdated message has no effect. A newer message for a priced epoch applies at once and cancels waiting
        homes.
        """
        if priced is None or homes.epoch > priced:
            newest = max(known.version for known in (self.now, self.coming, _NONE) if known is not None)
            return self._replace(coming=homes) if homes.version > newest else self
        if self.now is not None and homes.version <= self.now.version:
            return self
        waits = self.coming is not None and self.coming.version > homes.version
        return EngineHomes(homes, self.coming if waits else None)

    def reaching(self, priced: int | None) -> "EngineHomes":
        """Return the homes once the prices are those of this epoch."""
        if self.coming is None or priced is None or self.coming.epoch > priced:
            return self
        return EngineHomes(self.coming)


_NONE = ClusterHomes(-1, 0, None)


def is_home(lift: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the homes of a request with these lifts, bool [targets]."""
    return np.asarray(lift >= max(MIN_HOME_LIFT, 0.5 * float(np.maximum.reduce(lift, initial=0.0))))
