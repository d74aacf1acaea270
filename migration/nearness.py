"""Where requests should live, and how much of what sending tokens costs a placement saves: what the planner says of locality. Pure."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement
from migration.homes import Traffic, homes
from migration.locality import Prices, Room, bound, measured
from migration.situation import Situation

_LEAST_LEAK = 0.1
"""Part of the requests that goes anywhere, however good predictions are: homes decide among ranks that cost a request the same, and no others."""


class Homes(NamedTuple):
    """share: float32 [K, ranks], how much of a cluster's traffic belongs on which rank; clusters: version of the cluster model."""

    share: NDArray[np.float32]
    clusters: int


def room_of(found: Situation) -> Room:
    """What there is to place on, at the prices that tokens pay for being sent."""
    prices = Prices.of(found.terms.speed, found.terms.top_k, found.node)
    return Room(node=found.node, slots=found.placement.slots_per_rank, prices=prices, most=found.limits.most_replicas)


def housed(found: Situation) -> tuple[Homes | None, str]:
    """The homes of clusters, those of before unless others save clearly more; and why these, or why there are none."""
    view, clusters = found.view, found.view.clusters
    if clusters is None:
        return None, "the tracker knows no kinds of requests yet"
    if clusters.profiles.shape[1:] != (view.shape.layers, view.shape.experts):
        return None, f"the tracker's kinds of requests are of another shape: {clusters.profiles.shape[1:]}"
    if not view.gain:
        return None, "what requests will want cannot be foretold yet, so none could be sent home"
    traffic = Traffic(clusters.profiles[:, found.first :], clusters.shares, leak=max(_LEAST_LEAK, 1.0 - view.gain))
    before = None if view.homes is None or view.homes.shape != (clusters.clusters, found.ranks) else np.asarray(view.homes, np.float64)
    way = homes(traffic, room_of(found), pairs=found.pairs * clusters.shares, before=before, present=found.table)
    return None if way.homes is None else Homes(way.homes.astype(np.float32), clusters.version), way.reason


def saved(found: Situation, placement: Placement) -> tuple[float, float]:
    """(part of what dispatch would cost were nothing local that a placement saves, the most that any could save), mean over the layers of the bound."""
    room = room_of(found)
    layers, most = bound(found.judged, room)
    reached = measured(placement.expert_of_slot, placement.split, found.judged, room).saved[layers]
    return float(reached.mean()), float(most.mean())
