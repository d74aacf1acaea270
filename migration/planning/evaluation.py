"""Evaluate a candidate: seconds gained over the demand's lifetime, less the cost of carrying the plan out,
and what it must gain to be chosen over one that copies less. Pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement, Split
from migration.model.constraints import Constraints
from migration.model.cost_model import Payback, PricedPlacement, payback
from migration.model.placement_changes import PlacementChanges, copies_by_layer, made, within
from migration.model.plan import Handover
from migration.planning.findings import Finding, FindingCode
from migration.planning.handover_batching import ordered, transfers
from migration.planning.problem import PlanningProblem
from migration.planning.rearrangement import layer_seconds, one_map, payback_of
from migration.planning.strategies import PlanCandidate, shared

_CEILING_MARGIN = 0.005
"""Distance of a step's expected balance from the ceiling that chance sets, below which no gain is
noticeable: half a per cent of the slowest rank's time. In balance, so of no unit and for engines of any
size; the ceiling itself follows from the tokens of a step."""
_COPY_MARGIN = 0.05
"""Extra gain demanded of copies, as a part of the seconds that placement decides: the rate for copying every
expert.

Every copy follows the noise of its window a little. On the demo model's routings, with traffic of one domain,
full re-placements were predicted to save up to 2.7 % of dispatch and saved 0.0 +- 1.
Measured on that model only; elsewhere an assumption. It is a floor: where windows are short,
`_NOISE_MARGIN` asks for more, from the counts of the window.
"""
_NOISE_MARGIN = 2.0
"""Standard deviations, of the time that the changed layers take between two windows, by which a plan with
copies must beat one without. Derived from the counts of the window (`PlanningProblem.noise_seconds`), so for
engines and windows of any size: a one-sided error of 2.3 %."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A candidate with its end placement, its handovers and its payback."""

    candidate: PlanCandidate
    placement: Placement
    """Of the problem's layers, at the end."""
    after: PricedPlacement
    handovers: tuple[Handover, ...]
    """Of the whole model's layers."""
    payback: Payback
    gain_seconds: float
    """Predicted reduction of the step time. `payback` counts it after the discount `plan_discount`."""

    @property
    def net_seconds(self) -> float:
        return self.payback.gain_per_second * self.payback.lifetime_seconds - self.payback.cost_seconds

    @cached_property
    def copies(self) -> int:
        return sum(len(step.copies) for handover in self.handovers for step in handover.steps)

    @property
    def layers(self) -> int:
        """Layers whose experts move."""
        steps = (step for handover in self.handovers for step in handover.steps)
        return len({step.layer for step in steps if step.kind != "reweight"})


def evaluate(
    found: PlanningProblem,
    candidate: PlanCandidate,
    end: Placement | None = None,
    after: PricedPlacement | None = None,
) -> EvaluatedPlan:
    """Evaluate a candidate.

    end, after: its end placement, and the price of that, where known. Raises Unorderable when no series of
    handovers can make the changes. A candidate with more than `max_steps` handovers is reduced to its best
    part and evaluated again.
    """
    placement = candidate.placement(found) if end is None else end
    after = candidate.problem(found).price(placement) if after is None else after
    # With dead ranks there is no step time before the plan to compare with.
    by_layer = (
        np.zeros(placement.layers) if found.question.dead else candidate.before(found).seconds - after.seconds
    )
    if candidate.table is not None:
        gain = float(by_layer.sum())
        map_change = one_map(found.view.placement, candidate.table, found.room, by_layer)
        paid = payback_of(found, candidate.table, gain)
        return EvaluatedPlan(candidate, placement, after, map_change, paid, gain)
    handovers = _handovers(found, candidate, by_layer)
    if len(handovers) > found.config.max_steps:
        return evaluate(found, _beginning(found, candidate, by_layer, len(handovers)))
    gain = float(by_layer.sum())
    paid = payback(
        gain * found.question.plan_discount,
        found.steps_per_second,
        found.config.lifetime_seconds,
        transfers(handovers, placement.slots_per_rank),
        found.node,
        found.links,
    )
    return EvaluatedPlan(candidate, placement, after, handovers, paid, gain)


class GainLimit(NamedTuple):
    """Upper estimate of what plans towards a placement gain, by their number of copies: a concave line
    through these points. Arrays [n]."""

    copies: NDArray[np.float64]
    """ascending from 0, within the budget"""
    gain: NDArray[np.float64]
    """seconds by which a step gets shorter"""

    @property
    def most(self) -> float:
        """Gain of all copies that the budget allows."""
        return float(self.gain[-1])

    def at(self, copies: float) -> float:
        """Gain of a number of copies."""
        return float(np.interp(copies, self.copies, self.gain))


def gain_limit(found: PlanningProblem, end: Placement) -> GainLimit:
    """Estimate from above the seconds per step gained on the way to a placement within the budget.

    Layers that gain most per copy come first. The last layer that the budget reaches counts in proportion to
    its copies, though its fullest rank is relieved only after others.
    """
    gain = np.maximum(found.before.seconds - found.price(end).seconds, 0.0)
    copies = np.maximum(copies_by_layer(found.table, end.expert_of_slot, found.ranks), 1)
    # Greedy by gain per copy, as in the fractional knapsack: an upper estimate.
    order = np.argsort(-gain / copies, kind="stable")
    limit = GainLimit(
        np.append(0.0, copies[order].cumsum()), np.append(0.0, np.asarray(gain[order], np.float64).cumsum())
    )
    most = found.limits.max_copies
    if most is None or most >= limit.copies[-1]:
        return limit
    reached = int(np.searchsorted(limit.copies, most))
    return GainLimit(
        np.append(limit.copies[:reached], float(most)), np.append(limit.gain[:reached], limit.at(most))
    )


def cost_floor(found: PlanningProblem, candidate: PlanCandidate) -> float:
    """Lower bound of the seconds that a candidate costs, known before its handovers.

    It counts the rank that receives most, over the fastest link, in one handover.
    """
    if candidate.table is not None:
        return float(layer_seconds(found.table, candidate.table, found).sum())
    changes, per, links = candidate.changes, found.placement.slots_per_rank, found.links
    slots = np.concatenate([changes.slot[changes.copies > 0], changes.other_slot[changes.copies > 1]])
    if not len(slots):
        return 0.0
    most = float(np.bincount(slots // per).max()) * found.view.shape.expert_bytes
    return links.contention * (
        most / max(links.same_node, links.cross_node, links.checkpoint)
        + most / links.checksum
        + links.handover_seconds
    )


def worth(found: PlanningProblem, gain_seconds: float) -> float:
    """Seconds saved over the lifetime of the demand by a predicted gain per step, discounted by
    `plan_discount`."""
    return (
        gain_seconds * found.question.plan_discount * found.steps_per_second * found.config.lifetime_seconds
    )


def margin(found: PlanningProblem) -> float:
    """Seconds by which a strategy must beat another one that copies less."""
    return found.config.min_gain * found.even_step * found.steps_per_second * found.config.lifetime_seconds


def doubt(found: PlanningProblem, copies: float, layers: int, best: EvaluatedPlan | None) -> float:
    """Extra seconds that a strategy must gain because it copies more than the best one so far.

    copies, layers: number of its copies, and of the layers that they change.
    """
    # Moves that were found on samples were tested one by one, and each brings what its copy must.
    if found.question.policy != "roost" or found.samples is not None:
        return 0.0
    more = max(copies - (0 if best is None else best.copies), 0) / max(changeable_slots(found), 1)
    spent = found.before.figures.seconds
    touched = 0.0 if not more else layers / len(found.chosen)
    noise = _NOISE_MARGIN * np.sqrt(touched) * found.noise_seconds
    return worth(found, max(_COPY_MARGIN * more * (spent.experts + spent.dispatch), noise))


def changeable_slots(found: PlanningProblem) -> int:
    """Number of slots in the layers that may change."""
    return int(found.chosen.sum()) * int(found.table.shape[1])


def outweighed(found: PlanningProblem, best: EvaluatedPlan | None, limit: GainLimit) -> bool:
    """True if no number of copies gains as much more than `best` as that number must.

    The line of gains is concave and what copies must gain rises evenly, so their difference is greatest
    at a point of the line, or where copies begin to exceed those of `best`.
    """
    beaten, fewest = (0.0, 0) if best is None else (best.net_seconds, best.copies)
    points = [(fewest, limit.at(fewest)), *zip(limit.copies.tolist(), limit.gain.tolist(), strict=True)]
    return all(
        worth(found, gain) < beaten + margin(found) + doubt(found, copies, 0, best) for copies, gain in points
    )


def enough(
    found: PlanningProblem, best: EvaluatedPlan | None, gain: float, cost_seconds: float = 0.0
) -> Finding | None:
    """Reason to stop evaluating a strategy beside `best`, which copies less; None: there is none.

    gain: seconds per step that the strategy would gain. cost_seconds: a lower bound of its cost.
    """
    if best is None:
        small = worth(found, gain) < margin(found)
        return Finding.of(FindingCode.SMALL_AT_MOST, gain=gain) if small else None
    target, least_gain = found.limits.target, found.config.min_gain
    both: dict[str, Any] = {"gain": gain, "best": best.candidate.name, "best_gain": best.gain_seconds}
    if worth(found, gain) < best.net_seconds + margin(found):
        return Finding.of(FindingCode.GAINS_NO_MORE, **both, least_gain=least_gain)
    if worth(found, gain) - cost_seconds < best.net_seconds + margin(found):
        return Finding.of(FindingCode.COSTS_MORE, **both)
    if best.gain_seconds >= target * gain:
        part = best.gain_seconds / gain
        return Finding.of(FindingCode.NOT_NEEDED, best=best.candidate.name, part=part, target=target)
    return None


def at_ceiling(found: PlanningProblem) -> bool:
    """True if every layer's expected balance is as good as the few tokens of a step allow."""
    even = found.before.figures.least_balance
    chance = 1.0 / found.before.figures.step_ceiling - 1.0
    return bool(
        1.0 / (1.0 + np.hypot(1.0 / even - 1.0, chance))
        >= found.before.figures.step_ceiling - _CEILING_MARGIN
    )


def travel_costs(found: PlanningProblem) -> bool:
    """True if sending tokens takes a noticeable part of a step."""
    return found.before.figures.seconds.dispatch > found.config.min_gain * found.even_step


def _beginning(
    found: PlanningProblem, candidate: PlanCandidate, by_layer: NDArray[np.float64], handovers: int
) -> PlanCandidate:
    """Return the best part of a candidate that takes too many handovers."""
    copies = int(candidate.changes.copies.sum()) * found.config.max_steps // (2 * handovers)
    changes = within(_in_seconds(candidate.changes, by_layer), copies)
    split = None if candidate.split is None else shared(candidate.problem(found), made(found.table, changes))
    return candidate._replace(changes=changes, split=split)


def _handovers(
    found: PlanningProblem, candidate: PlanCandidate, by_layer: NDArray[np.float64]
) -> tuple[Handover, ...]:
    changes = _in_seconds(candidate.changes, by_layer)
    whole = found.view.placement
    split, limits = candidate.split, found.limits
    if found.question.dead:
        # A second holder may give way to an expert that has no holder at all.
        limits = Constraints(live=limits.live)
    # Problems leave sharded layers out, and plans number all layers of the model.
    if len(found.layers) < whole.layers:
        changes = found.numbered(changes)
        by_layer = _placed(np.zeros(whole.layers), found.layers, by_layer)
        if split is not None:
            parts = zip(whole.split, split, strict=True)
            split = Split(*(_placed(old, found.layers, new) for old, new in parts))
        least = limits.min_replicas
        if least is not None:
            least = _placed(np.ones((whole.layers, whole.experts), np.int64), found.layers, least)
        limits = Constraints(live=limits.live, min_replicas=least)
    return ordered(whole, changes, found.room, limits=limits, split=split, reweighted=by_layer)


def _placed(every: NDArray[Any], layers: NDArray[np.intp], some: NDArray[Any]) -> NDArray[Any]:
    """Return `every` with the rows of some layers replaced."""
    placed = every.copy()
    placed[layers] = some
    return placed


def _in_seconds(changes: PlacementChanges, by_layer: NDArray[np.float64]) -> PlacementChanges:
    """Convert gains to seconds: each layer's gain, divided among its changes in proportion to their solver's
    estimates."""
    if not changes:
        return changes
    estimate = np.maximum(changes.gain, 0.0) + 1e-12
    total = np.bincount(changes.layer, estimate, len(by_layer))
    return changes._replace(gain=by_layer[changes.layer] * estimate / total[changes.layer])
