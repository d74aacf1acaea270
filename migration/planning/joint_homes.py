"""Homes and placement together: requests go where their experts are, and experts where their requests will be. Pure.

While demand is alike on all ranks no placement is nearer to anybody, and while no rank is nearer demand stays alike. So both are planned at once and
judged on the demand that is foretold under the new homes, as far as requests can be foretold and go where they are sent
(`migration.planning.demand_forecast`). Homes of
before stay unless others save clearly more; and there are none where clusters are so alike that homes would hardly matter.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement
from migration.model.cost_model import PricedPlacement
from migration.model.engine_view import PlannedHomes
from migration.model.placement_changes import PlacementChanges, Table, made
from migration.planning.cluster_homes import ClusterTraffic, homes, resident
from migration.planning.demand_forecast import RoutingForecast, lived, spread
from migration.planning.group_affinity import keep_groups
from migration.planning.locality_report import none, room_of
from migration.planning.problem import PlanningProblem
from migration.planning.strategies import NEARER, NOTICEABLE, PlanCandidate, PredictedEffect, shared, without_reversals
from migration.solvers.locality_placement import located
from migration.solvers.ordered_diff import toward
from migration.solvers.split_weights import SLACK

Values = NDArray[np.float64]
MATERIAL = 0.09
"""Part of what sending tokens costs that homes must save beyond what their placement saves without them, if every request followed. Measured on the
demo model's routings (4 ranks, 10 slots): .08 to .21 for mixes of two domains and more, .03 to .085 within one, where clusters are real but worth
next to nothing."""
_HELD = 10 / 32
"""part of a layer's experts that each rank held there: where ranks hold less, any placement and any homes save less in proportion"""
_CLEARLY = 0.01
"""part of that cost which other homes must save beyond those of before"""
_STILL = 0.005
"""what homes of before must save to stay"""


class EffectiveHomes(NamedTuple):
    """Homes under the placement that there is. share: [K, ranks]; None: nobody has one. note: in a sentence, why."""

    share: Values | None
    note: str


def lived_in(found: PlanningProblem) -> PlanningProblem:
    """With the demand that is to be expected where the homes that hold are younger than what was observed: requests are on their way."""
    known = found.steering
    if isinstance(known, str) or known.known is None or not known.stale:
        return found
    return _expected(found, known, known.known)


def settled(found: PlanningProblem) -> EffectiveHomes:
    """Who should live where while experts stay where they are."""
    known = found.steering
    if isinstance(known, str):
        return EffectiveHomes(None, known)
    traffic, bar = known.later, _material(found, known.later)
    before = None if known.known is None else _lived(known.known, traffic)
    way = resident(traffic, room_of(found), found.table, before)
    told = f"homes save {way.saved:.1%} of dispatch under this placement, {way.none:.1%} without them"
    if known.known is not None and way.kept is not None and way.kept >= way.none + _STILL:
        young = found.view.homes is not None and found.view.now - found.view.homes.at < found.config.homes_seconds
        if young or way.saved < way.kept + max(_CLEARLY, bar / 4):
            return EffectiveHomes(
                _completed(known.known, way.homes, traffic), f"the homes of before save {way.kept:.1%} of dispatch, {way.none:.1%} without them"
            )
    if way.saved < way.none + bar:
        return EffectiveHomes(None, told)
    return EffectiveHomes(way.homes, told)


def joint(found: PlanningProblem) -> PlanCandidate:
    """Homes, and the way towards the placement that goes with them. ValueError says why nobody should have a home."""
    match found.steering:
        case str() as reason:
            raise ValueError(f"homes: {reason}")
        case known:
            pass
    room, traffic, stay = room_of(found), known.fit, settled(found)
    bar = _material(found, traffic) / (1.0 if known.known is None else 2.0)
    before = None if stay.share is None else _lived(stay.share, traffic)
    way = homes(traffic, room, before=before, present=found.table, least=bar, better=_CLEARLY)
    if way.homes is None or way.located is None:
        raise ValueError(way.reason)
    share = stay.share if way.homes is before and stay.share is not None else way.homes
    goal, end = way.located.table, _expected(found, known, share)
    whole = keep_groups(found.view.shape, found.terms.speed, end.fit, room)
    if whole.home is not None:
        goal = located(end.fit, replace(room, home=whole.home), present=found.table).table
    changes = without_reversals(found, toward(found.table, goal, end.fit, room, found.limits))
    base = _before(found, known, stay.share)
    ways = [_candidate(found, changes, base, one, of) for one, of in _choices(found, known, share, stay.share, end)]
    best, seconds = min(ways, key=lambda one: one[1])
    least = float(base.seconds.sum()) - NOTICEABLE * base.figures.seconds.dispatch
    if seconds > least and not _worth_going_to(goal, end, least):
        raise ValueError(f"homes and placement would save less than {NOTICEABLE:.0%} of what sending tokens takes")
    return best


def _material(found: PlanningProblem, traffic: ClusterTraffic) -> float:
    """What homes must save, as a part of what sending tokens costs, as far as requests follow them."""
    held = found.placement.slots_per_rank / found.placement.experts
    return MATERIAL * (1.0 - traffic.leak) * min(1.0, held / _HELD)


def at_home(found: PlanningProblem, share: Values | None, note: str, epoch: int | None = None) -> PlannedHomes:
    """What is said of homes. epoch: of the placement that they hold from on; None: that which is served. Those that hold already keep their time."""
    view = found.view
    if share is None or view.clusters is None:
        return none(view, note)
    said = share.astype(np.float32)
    if view.homes is not None and view.homes.share is not None and np.array_equal(said, view.homes.share):
        return view.homes._replace(clusters=view.clusters.version, note=note, epoch=view.homes.epoch if epoch is None else epoch)
    return PlannedHomes(said, view.clusters.version, view.placement.epoch if epoch is None else epoch, note, view.now)


def _choices(found: PlanningProblem, known: RoutingForecast, share: Values, stay: Values | None, end: PlanningProblem) -> list[tuple[Values, PlanningProblem]]:
    """The homes that may go with the end, which a budget or a cooldown may have cut short of what they were made for."""
    if stay is None or stay is share:
        return [(share, end)]
    return [(share, end), (stay, _expected(found, known, stay))]


def _worth_going_to(goal: Table, end: PlanningProblem, most: float) -> bool:
    """Whether the placement that a plan leads to takes at most so many seconds of a step, though a budget or a cooldown lets it go only a part of the way."""
    start = end.placement
    whole = Placement(goal, experts=start.experts, ranks=start.ranks, epoch=start.epoch, split=shared(end, goal))
    return float(end.judge(whole).seconds.sum()) <= most


def _candidate(found: PlanningProblem, changes: PlacementChanges, before: PricedPlacement, share: Values, end: PlanningProblem) -> tuple[PlanCandidate, float]:
    """(way, seconds of a step in the end)."""
    table: Table = made(found.table, changes)
    foretold = PredictedEffect(end, before, share)
    ways = [PlanCandidate("homes and placement", changes, shared(end, table, slack), foretold) for slack in (SLACK, NEARER)]
    return min(((way, float(end.judge(way.placement(found)).seconds.sum())) for way in ways), key=lambda one: one[1])


def _before(found: PlanningProblem, known: RoutingForecast, stay: Values | None) -> PricedPlacement:
    """What is served now: under the demand of today, or as homes alone would make it, whichever is better."""
    clusters = len(known.later.shares)
    foretold = _expected(found, known, np.zeros((clusters, found.ranks)) if stay is None else stay).before
    return min((found.before, foretold), key=lambda one: float(one.seconds.sum()))


def _expected(found: PlanningProblem, known: RoutingForecast, share: Values) -> PlanningProblem:
    """The same under other homes."""
    fit, judged = (spread(window, traffic, _lived(share, traffic)) for window, traffic in ((found.fit, known.fit), (found.judged, known.later)))
    return replace(found, fit=fit, judged=judged)


def _lived(share: Values, traffic: ClusterTraffic) -> Values:
    return lived(share, traffic.shares, traffic.room_for(share.shape[1]))


def _completed(share: Values, others: Values, traffic: ClusterTraffic) -> Values:
    """Clusters that came up since get the homes that suit them now."""
    new = (share.sum(axis=1) == 0) & (np.asarray(traffic.shares) > 0)
    return np.where(new[:, None], others, share) if new.any() else share
