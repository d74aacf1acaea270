"""What is known of requests that can be foretold: which clusters a window is of, how far they live at home, and what ranks will want once they do. Pure.

A window tells how much of each expert is wanted, whoever asks. Where it will be wanted follows from the homes: of a cluster's requests the part 1 - leak
goes home, the rest anywhere. So the forecast keeps the window's own counts, its sampling noise among them, and only spreads them over the
ranks anew: a placement that is judged on it is not flattered by smooth profiles.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from migration.model.engine_view import Demand, EngineView
from migration.planning.cluster_homes import ClusterTraffic
from migration.solvers.specialisation_test import gate

Values = NDArray[np.float64]
STEERED = 0.9
"""part of what can be foretold which goes home, before any was seen to: the rest goes where its session is, or where there is room. On a live fleet (4 ranks,
demo model, held-out documents) .66 to .78 of the demand went home where requests could be foretold by .5, which this makes .64"""
_DOUBT = 0.3
"""standard deviation of that"""
REPEATS = 8.0
"""pairs of one text are worth so many times fewer independent ones (the design effect, Kish 1965)"""
_ROUNDS = 30
_STIR = 0.1
"""of the mix that the search for a window's own begins with: spread evenly, so that a cluster that was hardly there may grow"""
CROWDED = 1.1
"""Requests of a rank, in even shares, beyond which its load sends them elsewhere, whatever their home."""
LEAST_FORESEEN = 0.02
"""of the way from the traffic's mix to hindsight: what goes less far steers nobody"""
LEAST_LEAK = 0.1
"""Part of the requests that goes anywhere, however good predictions are: homes decide among ranks that cost a request much the same."""
_TINY = 1e-300


class RoutingForecast(NamedTuple):
    """What is known of an engine's requests that can be sent home."""

    fit: ClusterTraffic
    """of the window that plans are made from"""
    later: ClusterTraffic
    """of the one that they are judged on"""
    followed: "ForecastDemand"
    known: NDArray[np.float64] | None
    """[K, ranks]: the homes that hold; None: nobody has one"""
    stale: bool
    """a window began before those did: it tells what is wanted, and not where it will be"""


def steering(view: EngineView, fit: NDArray[Any], judged: NDArray[Any]) -> RoutingForecast | str:
    """What can be said of sending requests home, or why nothing can. fit, judged: [ranks, layers, experts], the last layers of the view's windows."""
    clusters, layers = view.clusters, fit.shape[1]
    if clusters is None:
        return "the tracker knows no kinds of requests yet"
    if clusters.profiles.shape[1:] != (view.shape.layers, view.shape.experts):
        return f"the tracker's kinds of requests are of another shape: {clusters.profiles.shape[1:]}"
    if view.foreseen < LEAST_FORESEEN:
        return "what requests will want cannot be foretold yet, so none could be sent home"
    if int((clusters.shares > 0).sum()) < 2:
        return "one cluster has no place of its own"
    known = _known(view, clusters.clusters)
    profiles = clusters.profiles[:, -layers:]
    if known is None:
        found = gate(profiles, float(view.demand.pairs.sum()) * np.asarray(clusters.shares, np.float64), of="clusters")
        if not found.specialised:
            return found.reason
    shares = [mix_of(window.sum(axis=0), profiles, clusters.shares) for window in (fit, judged)]
    plain = ClusterTraffic(profiles, shares[1])
    held = None if known is None else lived(known, shares[1], plain.room_for(len(view.node)))
    seen = _fresh(view, view.judged) and held is not None
    part = followed(judged, view.judged.pairs, plain, held, view.foreseen) if seen and held is not None else expected(view.foreseen)
    leak = max(LEAST_LEAK, 1.0 - part.part)
    stale = known is not None and not (_fresh(view, view.demand) and _fresh(view, view.judged))
    return RoutingForecast(ClusterTraffic(profiles, shares[0], leak), ClusterTraffic(profiles, shares[1], leak), part, known, stale)


def _known(view: EngineView, clusters: int) -> NDArray[np.float64] | None:
    said = view.homes
    if said is None or said.share is None or said.share.shape != (clusters, len(view.node)) or said.epoch > view.placement.epoch:
        return None
    return np.asarray(said.share, np.float64)


def _fresh(view: EngineView, window: Demand) -> bool:
    """Whether it was counted while the present homes held; those of a plan hold from its last epoch on."""
    if view.homes is None:
        return True
    since = view.homes.at
    if view.history is not None and view.history.epoch == view.homes.epoch:
        since = max(since, float(view.history.moved.max(initial=-np.inf)))
    return window.began >= since


def mix_of(wanted: NDArray[Any], profiles: NDArray[Any], shares: NDArray[Any]) -> Values:
    """float64 [K]: of which clusters a window's pairs are, as parts that add up to 1; unused clusters (share 0) stay unused.

    wanted: [layers, experts] pairs; profiles: [K, layers, experts], rows sum to 1. The likeliest parts of a mixture whose components are known, by
    expectation and maximisation (Dempster, Laird and Rubin 1977), from the shares that the tracker gives.
    """
    used = np.flatnonzero(np.asarray(shares) > 0)
    total = float(np.sum(wanted, dtype=np.float64))
    found = np.zeros(len(shares))
    if not len(used) or total <= 0:
        return np.asarray(shares, np.float64)
    components = np.ascontiguousarray(np.asarray(profiles)[used].reshape(len(used), -1), np.float32)
    weight = (np.asarray(wanted, np.float64).ravel() / total).astype(np.float32)
    part = np.asarray(shares, np.float64)[used]
    part = ((1.0 - _STIR) * part / part.sum() + _STIR / len(used)).astype(np.float32)
    for _ in range(_ROUNDS):
        part *= components @ (weight / np.maximum(part @ components, 1e-12)) * np.float32(wanted.shape[0])
        part /= part.sum()
    found[used] = part / part.sum(dtype=np.float64)
    return found


def lived(homes: Values, shares: NDArray[Any], capacity: Values) -> Values:
    """float64 [K, ranks]: homes as requests will live in them: where more are at home than there is room for, the rest goes where there is some."""
    load = np.asarray(shares, np.float64) @ homes
    room = CROWDED * capacity / max(float(capacity.sum()), _TINY) * max(float(load.sum()), _TINY)
    fits = np.minimum(1.0, room / np.maximum(load, _TINY))
    left = np.maximum(room - load, 0.0)
    elsewhere = (homes * (1.0 - fits)).sum(axis=1, keepdims=True)
    return np.asarray(homes * fits + elsewhere * left / max(float(left.sum()), _TINY))


def spread(wanted: NDArray[Any], traffic: ClusterTraffic, homes: Values) -> Values:
    """float64 [ranks, layers, experts]: as much of every expert as all ranks together want, by the ranks at which its requests will live.

    wanted: [ranks, layers, experts] pairs, in any unit, which is kept; homes: [K, ranks], a row of zeros: anywhere.
    """
    part = traffic.demand(homes)
    total = part.sum(axis=0)
    even = traffic.room_for(len(part)) / traffic.room_for(len(part)).sum()
    part = np.where(total > 0, part / np.where(total > 0, total, 1.0), even[:, None, None])
    part *= wanted.sum(axis=0, dtype=np.float64)
    return np.asarray(part)


class ForecastDemand(NamedTuple):
    """How far requests live where they are at home."""

    part: float
    """in [0, 1], of all requests"""
    seen: bool
    """whether a window has said anything of it; False: it is what is to be expected of requests that can be foretold so well"""


def expected(foreseen: float) -> ForecastDemand:
    """Before anything was seen. foreseen: in [0, 1], how well requests can be foretold: a share of a divergence, which grows with the square of how far
    signatures are apart, while the part of demand that goes home is linear in them."""
    return ForecastDemand(STEERED * min(max(foreseen, 0.0), 1.0) ** 0.5, False)


def followed(wanted: NDArray[Any], pairs: NDArray[Any], traffic: ClusterTraffic, homes: Values, foreseen: float) -> ForecastDemand:
    """How far the ranks' demand is what homes make of it: 0 where all ranks want the same, 1 where every request is at home.

    wanted: [ranks, layers, experts], any unit; pairs: [ranks] behind each layer of it; homes: [K, ranks] that held while it was counted. Demand is linear in
    the part that goes home, so the part is a regression of how ranks differ on how they would: its precision is that of Poisson counts, and what is
    expected without it stands for so much that little evidence changes little.
    """
    before = expected(foreseen)
    rank = wanted.sum(axis=(1, 2), keepdims=True, dtype=np.float64)
    if not (rank > 0).all():
        return before
    weight = rank / rank.sum()
    seen, would = (_apart(part, weight) for part in (wanted / rank, _own(ClusterTraffic(traffic.profiles, traffic.shares, 0.0, traffic.capacity), homes)))
    energy = float((weight * would**2).sum())
    noise = float((weight**2 * would**2 * (wanted / rank) / np.maximum(pairs, 1.0)[:, None, None]).sum()) * REPEATS / wanted.shape[1]
    if energy <= 0.0 or noise <= 0.0:
        return before
    found, precision = float((weight * seen * would).sum()) / energy, energy**2 / noise
    doubt = 1.0 / _DOUBT**2
    return ForecastDemand(min(max((before.part * doubt + found * precision) / (doubt + precision), 0.0), 1.0), precision > doubt)


def _own(traffic: ClusterTraffic, homes: Values) -> Values:
    """[ranks, layers, experts]: what each rank's requests want, as parts of all that they want."""
    demand = traffic.demand(homes)
    return np.asarray(demand / np.maximum(demand.sum(axis=(1, 2), keepdims=True), _TINY))


def _apart(part: NDArray[Any], weight: Values) -> Values:
    """Less what all ranks want together."""
    return np.asarray(part - (weight * part).sum(axis=0))
