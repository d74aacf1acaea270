"""Where the planner wants requests to live: for each cluster, how much of its traffic belongs on which rank of an engine. Pure.

The planner places experts near the homes of the clusters that want them; where ranks cost a request the same, it goes home, and so the demand
comes to be where the planner has placed its experts, or will.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.events import HomesPublished
from fleet.signatures import MOST_CLUSTERS

AT_HOME = 1.5
"""A rank is a home of a request of which it is to get so many times the even share at least, and half of the most that any rank is to get."""


class Homes(NamedTuple):
    """As of one version. lift: float32 [ranks, K], share of a cluster's traffic that belongs on a rank, over the even share; 1 where a cluster is at
    home everywhere. None: nobody has a home."""

    version: int
    lift: NDArray[np.float32] | None


def homes_of(said: HomesPublished, ranks: int) -> Homes:
    """What was said of an engine with so many ranks. ValueError when it contradicts itself or the engine."""
    if said.ranks != ranks:
        raise ValueError(f"homes of engine {said.engine!r} on {said.ranks} ranks; it has {ranks}")
    if not said.homes:
        return Homes(said.version, None)
    if not 1 <= said.count <= MOST_CLUSTERS or len(said.homes) != 4 * said.count * ranks:
        raise ValueError(f"homes of engine {said.engine!r}: {len(said.homes)} bytes do not make shares of {said.count} clusters on {ranks} ranks")
    share = np.frombuffer(said.homes, "<f4").reshape(said.count, ranks).astype(np.float64)
    total = share.sum(axis=1, keepdims=True)
    if not (np.isfinite(share).all() and (share >= 0).all() and ((np.abs(total - 1) < 1e-3) | (total == 0)).all()):
        raise ValueError(f"homes of engine {said.engine!r}: shares must be probabilities, or all 0 for a cluster without a home")
    lift = np.where(total > 0, ranks * share / np.where(total > 0, total, 1.0), 1.0)
    return Homes(said.version, np.ascontiguousarray(lift.T, np.float32))


def at_home(lift: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool [targets]: which ranks are homes of a request with these lifts."""
    most = lift.max(initial=0.0)
    return np.asarray((lift >= AT_HOME) & (lift >= 0.5 * most))
