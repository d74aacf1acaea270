"""Where requests should live, and how much of what sending tokens costs a placement saves: what the planner says of locality. Pure."""

import numpy as np

from fleet.placement import Placement
from migration.homes import Traffic, homes
from migration.locality import Prices, Room, bound, measured
from migration.situation import Situation
from migration.view import Homes, View

_LEAST_LEAK = 0.1
"""Part of the requests that goes anywhere, however good predictions are: homes decide among ranks that cost a request the same, and no others."""


def room_of(found: Situation) -> Room:
    """What there is to place on, at the prices that tokens pay for being sent."""
    prices = Prices.of(found.terms.speed, found.terms.top_k, found.node)
    return Room(node=found.node, slots=found.placement.slots_per_rank, prices=prices, most=found.limits.most_replicas)


def housed(found: Situation) -> Homes:
    """The homes of clusters. They are thought over anew no oftener than `homes_seconds`, unless experts have moved; and those of before stay unless
    others save clearly more."""
    view, clusters, known = found.view, found.view.clusters, found.view.homes
    if clusters is None:
        return none(view, "the tracker knows no kinds of requests yet")
    if clusters.profiles.shape[1:] != (view.shape.layers, view.shape.experts):
        return none(view, f"the tracker's kinds of requests are of another shape: {clusters.profiles.shape[1:]}")
    if not view.gain:
        return none(view, "what requests will want cannot be foretold yet, so none could be sent home")
    if known is not None and known.clusters and known.epoch == view.placement.epoch and view.now - known.at < found.config.homes_seconds:
        return known
    traffic = Traffic(clusters.profiles[:, found.first :], clusters.shares, leak=max(_LEAST_LEAK, 1.0 - view.gain))
    before = None if known is None or known.share is None or known.share.shape != (clusters.clusters, found.ranks) else np.asarray(known.share, np.float64)
    way = homes(traffic, room_of(found), pairs=found.pairs * clusters.shares, before=before, present=found.table)
    share = None if way.homes is None else way.homes.astype(np.float32)
    return Homes(share, clusters.version, view.placement.epoch, way.reason, view.now)


def none(view: View, note: str) -> Homes:
    """Nobody has a home, for this reason."""
    return Homes(None, 0, view.placement.epoch, note, view.now)


def saved(found: Situation, placement: Placement) -> tuple[float, float]:
    """(part of what dispatch would cost were nothing local that a placement saves, the most that any could save), mean over the layers of the bound."""
    room = room_of(found)
    layers, most = bound(found.judged, room)
    reached = measured(placement.expert_of_slot, placement.split, found.judged, room).saved[layers]
    return float(reached.mean()), float(most.mean())
