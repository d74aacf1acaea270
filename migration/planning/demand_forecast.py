"""Forecast demand by rank once requests follow their homes. Pure.

The inputs are the mix of clusters in a window, the part of requests that reach their home, and the homes
themselves. A window counts the demand for each expert, wherever its requests are served. The homes determine
where that demand will be: of a cluster's requests the part 1 - leak goes to its home, the rest anywhere. So
the forecast keeps the window's own counts, their sampling noise included, and only redistributes them over
the ranks: smooth profiles do not flatter a placement that is evaluated on the forecast.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from migration.model.engine_view import Demand, EngineView
from migration.planning.cluster_homes import ClusterTraffic
from migration.planning.findings import Finding, FindingCode
from migration.solvers.specialisation_test import gate

REACHED = 0.9
"""Part of the predictable demand that reaches its home, assumed before any observation.

The rest goes where its session is, or where there is room. On a live fleet (4 ranks, demo model, held-out
documents) .66 to .78 of the demand reached its home where the predictability of requests was .5; this
constant predicts .64.
"""
_DOUBT = 0.3
"""Standard deviation of that."""
DESIGN_EFFECT = 8.0
"""Pairs of one text count as this many times fewer independent pairs (the design effect, Kish 1965).

A lower bound: the planner measures the overdispersion between its two windows and takes the larger value
(`PlanningProblem.scatter`), so this decides only until two windows are there, and for very even traffic.
"""
_ROUNDS = 30
_STIR = 0.1
"""Part of the initial mix that is spread evenly, so that a cluster with hardly any share can grow."""
CROWDED = 1.1
"""Requests of a rank, in even shares, beyond which its load sends them elsewhere, whatever their home."""
MIN_PREDICTABILITY = 0.02
"""Least predictability, on the way from the traffic's mix to the true clusters, for which requests are
steered. The part of demand that reaches its home grows with its square root (`expected_part`): 13 % here."""
MIN_LEAK = 0.1
"""Part of the requests that goes anywhere, however good predictions are: homes decide only among ranks of
similar cost."""
_TINY = 1e-300


class RoutingForecast(NamedTuple):
    """Forecast for an engine whose requests can be sent to their homes."""

    fit: ClusterTraffic
    """Of the window that plans are fitted to."""
    later: ClusterTraffic
    """Of the window that plans are evaluated on."""
    followed: "ForecastDemand"
    known: NDArray[np.float64] | None
    """[K, ranks]: the homes that hold; None: no cluster has one."""
    stale: bool
    """True if a window began before those homes held: its demand is valid, and its distribution over ranks is
    not."""


def routing_forecast(
    view: EngineView, fit: NDArray[Any], evaluation: NDArray[Any]
) -> RoutingForecast | Finding:
    """Forecast the effect of sending requests to their homes, or return the reason why that is impossible.

    fit, evaluation: [ranks, layers, experts], the layers of the view's windows that hold whole experts.
    """
    clusters = view.clusters
    if clusters is None:
        return Finding.of(FindingCode.NO_CLUSTERS)
    if clusters.profiles.shape[1:] != (view.shape.layers, view.shape.experts):
        return Finding.of(FindingCode.OTHER_CLUSTERS, shape=clusters.profiles.shape[1:])
    if view.predictability < MIN_PREDICTABILITY:
        return Finding.of(FindingCode.UNPREDICTABLE)
    if int((clusters.shares > 0).sum()) < 2:
        return Finding.of(FindingCode.SINGLE_CLUSTER)
    known = _known(view, clusters.clusters)
    profiles = clusters.profiles[:, view.placement.whole]
    if known is None:
        found = gate(profiles, float(view.demand.pairs.sum()) * np.asarray(clusters.shares, np.float64))
        if not found.specialised:
            return Finding.of(FindingCode.SPECIALISATION, test=found, of="clusters")
    shares = [mix_of(window.sum(axis=0), profiles, clusters.shares) for window in (fit, evaluation)]
    # Converted once: every demand is a product with these.
    profiles = np.asarray(profiles, np.float64)
    plain = ClusterTraffic(profiles, shares[1])
    held = None if known is None else homes_within_capacity(known, shares[1], plain.room_for(len(view.node)))
    seen = _fresh(view, view.evaluation) and held is not None
    part = (
        observed_part(evaluation, view.evaluation.pairs, plain, held, view.predictability)
        if seen and held is not None
        else expected_part(view.predictability)
    )
    leak = max(MIN_LEAK, 1.0 - part.part)
    stale = known is not None and not (_fresh(view, view.demand) and _fresh(view, view.evaluation))
    return RoutingForecast(
        ClusterTraffic(profiles, shares[0], leak),
        ClusterTraffic(profiles, shares[1], leak),
        part,
        known,
        stale,
    )


def _known(view: EngineView, clusters: int) -> NDArray[np.float64] | None:
    homes = view.homes
    if (
        homes is None
        or homes.share is None
        or homes.share.shape != (clusters, len(view.node))
        or homes.epoch > view.placement.epoch
    ):
        return None
    return np.asarray(homes.share, np.float64)


def _fresh(view: EngineView, window: Demand) -> bool:
    """True if the window was counted while the present homes held. Homes of a plan hold from its last epoch
    on."""
    if view.homes is None:
        return True
    since = view.homes.at
    if view.history is not None and view.history.epoch == view.homes.epoch:
        since = max(since, float(view.history.moved.max(initial=-np.inf)))
    return window.began >= since


def mix_of(observed: NDArray[Any], profiles: NDArray[Any], shares: NDArray[Any]) -> FloatArray:
    """float64 [K]: clusters of a window's pairs, as parts that add up to 1; unused clusters (share 0) stay
    unused.

    observed: [layers, experts] pairs; profiles: [K, layers, experts], rows sum to 1. This is the
    maximum-likelihood mixture of known components by expectation-maximisation (Dempster, Laird and Rubin
    1977), started from the tracker's shares.
    """
    used = np.flatnonzero(np.asarray(shares) > 0)
    total = float(np.sum(observed, dtype=np.float64))
    found = np.zeros(len(shares))
    if not len(used) or total <= 0:
        return np.asarray(shares, np.float64)
    components = np.ascontiguousarray(np.asarray(profiles)[used].reshape(len(used), -1), np.float32)
    weight = (np.asarray(observed, np.float64).ravel() / total).astype(np.float32)
    part = np.asarray(shares, np.float64)[used]
    part = ((1.0 - _STIR) * part / part.sum() + _STIR / len(used)).astype(np.float32)
    # One line of EM: responsibilities, then new parts. Counts enter as weights.
    for _ in range(_ROUNDS):
        part *= components @ (weight / np.maximum(part @ components, 1e-12)) * np.float32(observed.shape[0])
        part /= part.sum()
    found[used] = part / part.sum(dtype=np.float64)
    return found


def homes_within_capacity(homes: FloatArray, shares: NDArray[Any], capacity: FloatArray) -> FloatArray:
    """float64 [K, ranks]: homes with limited capacity: requests beyond the capacity of their home go where
    there is room."""
    load = np.asarray(shares, np.float64) @ homes
    room = CROWDED * capacity / max(float(capacity.sum()), _TINY) * max(float(load.sum()), _TINY)
    fits = np.minimum(1.0, room / np.maximum(load, _TINY))
    left = np.maximum(room - load, 0.0)
    elsewhere = (homes * (1.0 - fits)).sum(axis=1, keepdims=True)
    return np.asarray(homes * fits + elsewhere * left / max(float(left.sum()), _TINY))


def spread(observed: NDArray[Any], traffic: ClusterTraffic, homes: FloatArray) -> FloatArray:
    """float64 [ranks, layers, experts]: the total demand for every expert, redistributed over ranks by the
    homes.

    observed: [ranks, layers, experts] pairs, in any unit, which is kept; homes: [K, ranks], a row of zeros:
    anywhere.
    """
    room, whole = traffic.room_for(homes.shape[1]), observed.sum(axis=0, dtype=np.float64)
    even = room / room.sum()
    if not homes.any():
        return np.asarray(even[:, None, None] * whole)
    part = traffic.demand(homes)
    total = part.sum(axis=0)
    # In place: these arrays are large.
    part /= np.where(total > 0, total, 1.0)
    part[:, total <= 0] = even[:, None]
    part *= whole
    return part


class ForecastDemand(NamedTuple):
    """Degree to which requests are served at their home."""

    part: float
    """In [0, 1], of all requests."""
    seen: bool
    """True if a window was evidence for this; False: expectation from the predictability of requests
    alone."""


def expected_part(predictability: float) -> ForecastDemand:
    """Return the expectation before any observation. predictability: in [0, 1], predictability of requests.

    Predictability is a share of a divergence, which grows with the square of the distance between signatures.
    The part of demand that reaches its home is linear in that distance, hence the square root.
    """
    return ForecastDemand(REACHED * min(max(predictability, 0.0), 1.0) ** 0.5, False)


def observed_part(
    observed: NDArray[Any],
    pairs: NDArray[Any],
    traffic: ClusterTraffic,
    homes: FloatArray,
    predictability: float,
) -> ForecastDemand:
    """Estimate the degree to which the ranks' demand follows the homes: 0 with equal demand on all ranks, 1
    with every request at its home.

    observed: [ranks, layers, experts], any unit; pairs: [ranks] behind each layer of it; homes: [K, ranks]
    that held while it was counted. Demand is linear in the part that reaches its home, so the part is a
    regression of the observed differences between ranks on the predicted ones. Its precision is that of
    Poisson counts. The expectation without observation acts as a prior, so little evidence changes little.
    """
    before = expected_part(predictability)
    rank = observed.sum(axis=(1, 2), keepdims=True, dtype=np.float64)
    if not (rank > 0).all():
        return before
    weight = rank / rank.sum()
    seen, would = (
        _apart(part, weight)
        for part in (
            observed / rank,
            _own(ClusterTraffic(traffic.profiles, traffic.shares, 0.0, traffic.capacity), homes),
        )
    )
    # Weighted least squares through the origin: `found` = sum(seen * would) / sum(would^2).
    energy = float((weight * would**2).sum())
    noise = (
        float((weight**2 * would**2 * (observed / rank) / np.maximum(pairs, 1.0)[:, None, None]).sum())
        * DESIGN_EFFECT
        / observed.shape[1]
    )
    if energy <= 0.0 or noise <= 0.0:
        return before
    found, precision = float((weight * seen * would).sum()) / energy, energy**2 / noise
    # Precision-weighted mean with the prior, as for two normal estimates.
    doubt = 1.0 / _DOUBT**2
    return ForecastDemand(
        min(max((before.part * doubt + found * precision) / (doubt + precision), 0.0), 1.0), precision > doubt
    )


def _own(traffic: ClusterTraffic, homes: FloatArray) -> FloatArray:
    """[ranks, layers, experts]: demand of each rank's requests, as parts of their total."""
    demand = traffic.demand(homes)
    return np.asarray(demand / np.maximum(demand.sum(axis=(1, 2), keepdims=True), _TINY))


def _apart(part: NDArray[Any], weight: FloatArray) -> FloatArray:
    """Subtract the demand of all ranks together."""
    return np.asarray(part - (weight * part).sum(axis=0))
