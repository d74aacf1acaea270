"""What a candidate is worth: seconds gained over the demand's lifetime, less what carrying it out costs. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement, Split
from migration.model.constraints import Constraints
from migration.model.cost_model import Payback, PricedPlacement, payback
from migration.model.placement_changes import PlacementChanges, made, within
from migration.model.plan import Handover
from migration.planning.handover_batching import ordered, transfers
from migration.planning.problem import PlanningProblem
from migration.planning.strategies import PlanCandidate, shared


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A candidate, carried through to its end."""

    candidate: PlanCandidate
    placement: Placement
    """of the situation's layers, in the end"""
    after: PricedPlacement
    handovers: tuple[Handover, ...]
    """of the whole model's layers"""
    payback: Payback
    gain_seconds: float
    """by which a step gets shorter, as far as can be foretold: `payback` counts it as far as that is trusted"""

    @property
    def net_seconds(self) -> float:
        return self.payback.gain_per_second * self.payback.lifetime_seconds - self.payback.cost_seconds

    @property
    def copies(self) -> int:
        return int(self.candidate.changes.copies.sum())


def appraised(found: PlanningProblem, candidate: PlanCandidate, after: PricedPlacement | None = None) -> EvaluatedPlan:
    """after: the judgement of where it leads to, where that is known. Unorderable when no series of handovers can make it."""
    placement = candidate.placement(found)
    after = candidate.situation(found).judge(placement) if after is None else after
    by_layer = np.zeros(placement.layers) if found.question.dead else candidate.before(found).seconds - after.seconds  # the dead have no steps to compare
    handovers = _handovers(found, candidate, by_layer)
    if len(handovers) > found.config.most_steps:
        return appraised(found, _beginning(found, candidate, by_layer, len(handovers)))
    gain = float(by_layer.sum())
    paid = payback(
        gain * found.question.trust,
        found.steps_per_second,
        found.config.lifetime_seconds,
        transfers(handovers, placement.slots_per_rank),
        found.node,
        found.links,
    )
    return EvaluatedPlan(candidate, placement, after, handovers, paid, gain)


def most_gained(found: PlanningProblem, end: Placement) -> float:
    """Seconds by which a step gets shorter on the way to a placement, as far as the budget reaches: the layers that gain most per copy come first, and
    each gains in proportion to its copies, though rank after rank must be relieved before the fullest is."""
    gain = np.maximum(found.before.seconds - found.judge(end).seconds, 0.0)
    most = found.limits.most_copies
    if most is None:
        return float(gain.sum())
    copies = np.maximum((end.replicas_on_rank > found.placement.replicas_on_rank).sum(axis=(1, 2)), 1)
    order = np.argsort(-gain / copies, kind="stable")
    gain, copies = gain[order], copies[order]
    return float((gain * np.clip((most - copies.cumsum()) / copies + 1.0, 0.0, 1.0)).sum())


def least_cost(found: PlanningProblem, candidate: PlanCandidate) -> float:
    """Seconds that carrying it out costs at least, known before its handovers are: the rank that gets most, over the fastest link, at one go."""
    changes, per, links = candidate.changes, found.placement.slots_per_rank, found.links
    slots = np.concatenate([changes.slot[changes.copies > 0], changes.other_slot[changes.copies > 1]])
    if not len(slots):
        return 0.0
    most = float(np.bincount(slots // per).max()) * found.view.shape.expert_bytes
    return links.contention * (most / max(links.same_node, links.cross_node, links.checkpoint) + most / links.checksum + links.handover_seconds)


def _beginning(found: PlanningProblem, candidate: PlanCandidate, by_layer: NDArray[np.float64], handovers: int) -> PlanCandidate:
    """The best part of a candidate that takes too many handovers."""
    copies = int(candidate.changes.copies.sum()) * found.config.most_steps // (2 * handovers)
    changes = within(_in_seconds(candidate.changes, by_layer), copies)
    split = None if candidate.split is None else shared(candidate.situation(found), made(found.table, changes))
    return candidate._replace(changes=changes, split=split)


def _handovers(found: PlanningProblem, candidate: PlanCandidate, by_layer: NDArray[np.float64]) -> tuple[Handover, ...]:
    changes = _in_seconds(candidate.changes, by_layer)
    first, whole = found.first, found.view.placement
    split, limits = candidate.split, found.limits
    if found.question.dead:
        limits = Constraints(live=limits.live)  # second holders may be given up for experts that have none
    if first:
        changes = changes._replace(layer=(changes.layer + first).astype(np.int32))
        by_layer = np.concatenate([np.zeros(first), by_layer])
        split = None if split is None else Split(*(np.concatenate([old[:first], new]) for old, new in zip(whole.split, split, strict=True)))
        least = limits.least_replicas
        if least is not None:
            least = np.concatenate([np.ones((first, whole.experts), np.int64), least])
        limits = Constraints(live=limits.live, least_replicas=least)
    return ordered(whole, changes, found.room, limits=limits, split=split, reweighted=by_layer)


def _in_seconds(changes: PlacementChanges, by_layer: NDArray[np.float64]) -> PlacementChanges:
    """What each layer gains, given to its changes in proportion to what their planner thought of them."""
    if not changes:
        return changes
    thought = np.maximum(changes.gain, 0.0) + 1e-12
    total = np.bincount(changes.layer, thought, len(by_layer))
    return changes._replace(gain=by_layer[changes.layer] * thought / total[changes.layer])
