"""Plan homes and placement together: requests go where their experts are, and experts where their requests
will be. Pure.

While demand is equal on all ranks, every placement is equally local, and while every rank is equally local,
demand stays equal. So both are planned at once. They are evaluated on the demand predicted under the new
homes, as far as requests are predictable and reach their home (`migration.planning.demand_forecast`).
Present homes stay unless others save clearly more. There are no homes where clusters are so alike that homes
would hardly matter.
"""

from dataclasses import replace

import numpy as np

from fleet.arrays import FloatArray, SlotTable
from fleet.placement import Placement
from migration.model.cost_model import PricedPlacement
from migration.model.engine_view import PlannedHomes
from migration.model.placement_changes import PlacementChanges, made
from migration.planning.cluster_homes import ClusterTraffic, homes_and_table, homes_for_table
from migration.planning.demand_forecast import RoutingForecast, homes_within_capacity, spread
from migration.planning.findings import Finding, FindingCode, Infeasible
from migration.planning.group_affinity import keep_groups
from migration.planning.locality_report import locality_problem, no_homes
from migration.planning.problem import PlanningProblem
from migration.planning.sentences import sentence
from migration.planning.strategies import (
    NEARER,
    NOTICEABLE,
    PlanCandidate,
    PredictedEffect,
    shared,
    without_reversals,
)
from migration.solvers.locality_placement import locality_table
from migration.solvers.ordered_diff import ordered_diff
from migration.solvers.split_weights import SLACK
from migration.solvers.token_swaps import exchanged

MATERIAL = 0.05
"""Part of the cost of sending tokens that homes must save beyond the placement alone, if every request
followed, before experts are moved for them.

Measured on the demo model's routings (4 ranks, 10 slots): .08 to .21 for mixes of two domains and more of its
own texts, .07 for ten kinds of texts that it was not trained for, .03 to .085 within one domain. Range: that
engine; engines with fewer slots for their experts are scaled by `_HELD`, larger ones are not measured.
"""
_FREE = 0.02
"""The same where no expert moves, as homes alone cost nothing to try. Placements that were not made for homes
reach .008 by chance."""
_HELD = 10 / 32
"""Part of a layer's experts on each rank in that measurement. Where ranks hold less, any placement and any
homes save less in proportion."""
_CLEARLY = 0.01
"""Part of that cost that other homes must save beyond the present ones. An assumption; not measured."""
_REPLACED = 0.25
"""Part of `MATERIAL` that other homes must save beyond the present ones, where that exceeds `_CLEARLY`."""
_EXTENDED = 0.5
"""Part of `MATERIAL` that a plan must save where homes hold already: introducing homes is the larger step."""
_STILL = 0.005
"""Part of that cost that present homes must save to stay."""


def with_expected_demand(found: PlanningProblem) -> PlanningProblem:
    """Return the problem with its expected demand where the homes are younger than the observed windows.

    In that case requests are still moving to their homes.
    """
    known = found.routing
    if isinstance(known, Finding) or known.known is None or not known.stale:
        return found
    return _expected(found, known, known.known)


def effective_homes(found: PlanningProblem) -> tuple[FloatArray | None, Finding]:
    """Return the homes for the present placement, [K, ranks], and the reason for them. None: no cluster has
    one."""
    known = found.routing
    if isinstance(known, Finding):
        return None, known
    traffic, bar = known.later, _material(found, known.later)
    best, saved_by = homes_for_table(traffic, locality_problem(found), found.table)
    none, saved = saved_by(np.zeros_like(best)), saved_by(best)
    # Hysteresis: young homes stay, and older ones stay unless others save clearly more.
    if known.known is not None and found.view.homes is not None:
        kept = saved_by(_within_capacity(known.known, traffic))
        young = found.view.now - found.view.homes.at < found.config.homes_seconds
        if kept >= none + _STILL and (young or saved < kept + max(_CLEARLY, _REPLACED * bar)):
            reason = Finding.of(FindingCode.PRESENT_HOMES_SAVE, kept=kept, without=none)
            return _completed(known.known, best, traffic), reason
    share = best if saved >= none + min(bar, _FREE) else None
    return share, Finding.of(FindingCode.HOMES_SAVE_HERE, saved=saved, without=none)


def joint(found: PlanningProblem) -> PlanCandidate:
    """Plan homes, and the changes towards the placement that goes with them. Infeasible gives the reason
    for no homes."""
    known = found.routing
    if isinstance(known, Finding):
        raise Infeasible(known.of_subject("homes"))
    room, traffic, (stay, _) = locality_problem(found), known.fit, effective_homes(found)
    bar = _material(found, traffic) * (1.0 if known.known is None else _EXTENDED)
    before = None if stay is None else _within_capacity(stay, traffic)
    best_homes, goal = homes_and_table(
        traffic, room, before=before, present=found.table, least=bar, better=_CLEARLY
    )
    share = stay if stay is not None and best_homes is before else best_homes
    end = _expected(found, known, share)
    # Group-limited gates: one node per group may be cheaper than free placement.
    whole = keep_groups(found.view.shape, found.terms.speed, end.fit, room)
    if whole.home is not None:
        goal = locality_table(end.fit, replace(room, home=whole.home), present=found.table)
    else:
        goal = _for_tokens(found, end, goal)
    changes = without_reversals(found, ordered_diff(found.table, goal, end.fit, room, found.limits))
    unplanned = (
        end if share is stay else _expected(found, known, np.zeros_like(share) if stay is None else stay)
    )
    # The served placement: under present demand, or with homes alone, whichever is better.
    base = min((found.before, unplanned.before), key=lambda one: float(one.seconds.sum()))
    ways = [_candidate(found, changes, base, share, end)]
    # A budget or a cooldown may have cut the changes short of the placement that the new homes were made for.
    if stay is not None and stay is not share:
        ways.append(_candidate(found, changes, base, stay, unplanned))
    best, seconds = min(ways, key=lambda one: one[1])
    # A plan cut short by limits is still worthwhile if its goal is.
    least = float(base.seconds.sum()) - NOTICEABLE * base.figures.seconds.dispatch
    if seconds > least and not _worth_going_to(goal, end, least):
        raise Infeasible(Finding.of(FindingCode.HOMES_AND_PLACEMENT_SMALL, least=NOTICEABLE))
    return best


def _material(found: PlanningProblem, traffic: ClusterTraffic) -> float:
    """Return the part of dispatch cost that homes must save, given the part of requests that follows them."""
    held = found.placement.slots_per_rank / found.placement.experts
    return MATERIAL * (1.0 - traffic.leak) * min(1.0, held / _HELD)


def published_homes(
    found: PlanningProblem, share: FloatArray | None, reason: Finding, epoch: int | None = None
) -> PlannedHomes:
    """Return the homes to publish.

    epoch: of the placement from which they hold; None: the served one. Homes that hold already keep their
    start time.
    """
    view, note = found.view, sentence(reason)
    if share is None or view.clusters is None:
        return no_homes(view, note)
    rounded = share.astype(np.float32)
    if view.homes is not None and view.homes.share is not None and np.array_equal(rounded, view.homes.share):
        return view.homes._replace(
            clusters=view.clusters.version, note=note, epoch=view.homes.epoch if epoch is None else epoch
        )
    return PlannedHomes(
        rounded, view.clusters.version, view.placement.epoch if epoch is None else epoch, note, view.now
    )


def _worth_going_to(goal: SlotTable, end: PlanningProblem, most: float) -> bool:
    """True if the goal placement takes at most `most` seconds of a step, even if limits allow only a part of
    the way now."""
    start = end.placement
    whole = Placement(
        goal, experts=start.experts, ranks=start.ranks, epoch=start.epoch, split=shared(end, goal)
    )
    return float(end.price(whole).seconds.sum()) <= most


def _candidate(
    found: PlanningProblem,
    changes: PlacementChanges,
    before: PricedPlacement,
    share: FloatArray,
    end: PlanningProblem,
) -> tuple[PlanCandidate, float]:
    """Return (candidate, seconds of a step at the end)."""
    table: SlotTable = made(found.table, changes)
    predicted = PredictedEffect(end, before, share)
    ways = [
        PlanCandidate("homes and placement", changes, shared(end, table, slack), predicted)
        for slack in (SLACK, NEARER)
    ]
    return min(
        ((way, float(end.price(way.placement(found)).seconds.sum())) for way in ways), key=lambda one: one[1]
    )


def _expected(found: PlanningProblem, known: RoutingForecast, share: FloatArray) -> PlanningProblem:
    """Return the problem under other homes."""
    fit, evaluation = (
        spread(window, traffic, _within_capacity(share, traffic))
        for window, traffic in ((found.fit, known.fit), (found.evaluation, known.later))
    )
    return replace(
        found,
        fit=fit,
        evaluation=evaluation,
        sending=(_within_capacity(share, known.later), known.later.leak),
    )


def _for_tokens(found: PlanningProblem, end: PlanningProblem, goal: SlotTable) -> SlotTable:
    """Exchange experts so that sampled tokens are sent to fewer ranks."""
    if end.tokens is None:
        return goal
    return exchanged(goal, end.tokens.fit, end.tokens.evaluation, end.load, locality_problem(found))


def _within_capacity(share: FloatArray, traffic: ClusterTraffic) -> FloatArray:
    return homes_within_capacity(share, traffic.shares, traffic.room_for(share.shape[1]))


def _completed(share: FloatArray, others: FloatArray, traffic: ClusterTraffic) -> FloatArray:
    """Give clusters that appeared since then the homes that suit them now."""
    new = (share.sum(axis=1) == 0) & (np.asarray(traffic.shares) > 0)
    return np.where(new[:, None], others, share) if new.any() else share
