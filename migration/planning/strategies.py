"""What could be done about a placement, each way by itself: new shares, few copies, locality, everything anew, somebody else's algorithm. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import FULL, Placement, Split, even_split
from migration.model.cost_model import PricedPlacement
from migration.model.move_history import counted
from migration.model.placement_changes import NONE, PlacementChanges, Table, joined, made, within
from migration.model.sampling_noise import LoadNoise
from migration.planning.group_affinity import keep_groups
from migration.planning.locality_report import room_of
from migration.planning.problem import PlanningProblem
from migration.solvers.eplb import as_placement, eplb_global, eplb_hierarchical, raw_shares
from migration.solvers.even_split_copies import few
from migration.solvers.fill_empty_slots import filled
from migration.solvers.locality_placement import located
from migration.solvers.ordered_diff import toward
from migration.solvers.split_weights import SLACK, reweight
from migration.solvers.table_diff import between, shortened

NOTICEABLE = 0.02
"""part of the seconds that sending tokens takes now which moving experts nearer to their requests must save: texts that happen to come in one window and
not in the next change the best placement by a percent or so"""
NEARER = 0.05
"""Slack of shares that would rather serve tokens where they come from than even out the ranks."""


class PredictedEffect(NamedTuple):
    """Of a way that changes where requests live: what it is judged by, in the place of the demand that was observed."""

    found: PlanningProblem
    """with the demand that is to be expected in the end"""
    before: PricedPlacement
    """what is served now, under the demand that is to be expected without this"""
    homes: NDArray[np.float64]
    """[K, ranks]: where clusters live in the end"""


class PlanCandidate(NamedTuple):
    """changes: of the situation's layers, in order; their gain is in no unit yet. split: how replicas share in the end; None: evenly."""

    name: str
    changes: PlacementChanges
    split: Split | None
    foretold: PredictedEffect | None = None
    """None: requests go on living where they do"""

    def situation(self, found: PlanningProblem) -> PlanningProblem:
        """With the demand that goes with it."""
        return found if self.foretold is None else self.foretold.found

    def before(self, found: PlanningProblem) -> PricedPlacement:
        """What it must be better than."""
        return found.before if self.foretold is None else self.foretold.before

    def placement(self, found: PlanningProblem) -> Placement:
        """What it leads to."""
        start = found.placement
        return Placement(made(start.expert_of_slot, self.changes), experts=start.experts, ranks=start.ranks, epoch=start.epoch, split=self.split)


Maker = Callable[[PlanningProblem], PlanCandidate]


def shares(found: PlanningProblem) -> PlanCandidate:
    """New split weights, where experts stay as they are: no bytes."""
    return PlanCandidate("new shares", NONE, shared(found, found.table))


def copies(found: PlanningProblem) -> PlanCandidate:
    """Few copies, and shares that go with them."""
    changes = without_reversals(found, found.few_copies)
    return PlanCandidate("few copies", changes, shared(found, made(found.table, changes)))


def copies_and_filling(found: PlanningProblem) -> PlanCandidate:
    """Few copies; and what each rank wants most in the slots that are empty then."""
    first = without_reversals(found, found.few_copies)
    fill = without_reversals(found, filled(made(found.table, first), found.fit, found.ranks, found.limits))
    changes = joined([part for part in (first, fill) if part])
    if found.limits.most_copies is not None:
        changes = within(changes, found.limits.most_copies)
    return PlanCandidate("empty slots filled", changes, shared(found, made(found.table, changes)))


def uniform(found: PlanningProblem) -> PlanCandidate:
    """Few copies for engines whose replicas share evenly, whatever they are told."""
    return PlanCandidate("few copies, even shares", _few(found), None)


def local(found: PlanningProblem) -> PlanCandidate:
    """Experts near the ranks whose requests want them. ValueError where that is worth hardly more than it would be were all ranks' requests alike: what
    ranks differ by is then the few texts that happened to come to each."""
    room = room_of(found)
    whole = keep_groups(found.view.shape, found.terms.speed, found.fit, room)
    goal = located(found.fit, replace(room, home=whole.home), present=found.table)
    changes = without_reversals(found, toward(found.table, goal.table, found.fit, room, found.limits))
    table = made(found.table, changes)
    ways = [PlanCandidate("locality", changes, shared(found, table, slack)) for slack in (SLACK, NEARER)]
    best = min(ways, key=lambda way: float(found.judge(way.placement(found)).seconds.sum()))
    alike = replace(found, judged=np.broadcast_to(found.judged.mean(axis=0), found.judged.shape))
    gains = [float((one.before.seconds - one.judge(best.placement(found)).seconds).sum()) for one in (found, alike)]
    if changes and gains[0] - gains[1] < NOTICEABLE * found.before.figures.seconds.dispatch:
        raise ValueError("locality: ranks' requests differ by too little in the next window")
    return best


def anew(found: PlanningProblem) -> PlanCandidate:
    """The whole placement made afresh, given to the ranks that hold most of it."""
    changes = _towards(found, found.anew_at_home)
    return PlanCandidate("all anew", changes, shared(found, made(found.table, changes)))


def anew_evenly(found: PlanningProblem) -> PlanCandidate:
    """The same for engines whose replicas share evenly, whatever they are told."""
    return PlanCandidate("all anew, even shares", _towards(found, found.anew_at_home), None)


def anew_at_most(found: PlanningProblem) -> Placement:
    """What `anew` leads to where no budget and no cooldown stops it: known before any of its changes."""
    table = np.where(found.chosen[:, None], found.anew_at_home, found.table)
    start = found.placement
    return Placement(table, experts=start.experts, ranks=start.ranks, epoch=start.epoch, split=shared(found, table))


def eplb(found: PlanningProblem) -> PlanCandidate:
    """The published algorithm, over all ranks."""
    raw = eplb_global(found.load, found.table.shape[1], found.ranks)
    return _as_mapped("EPLB", found, raw)


def eplb_by_node(found: PlanningProblem) -> PlanCandidate:
    """The published algorithm with a group of experts for each node. ValueError where they do not divide."""
    nodes = int(found.node.max()) + 1
    if (np.diff(found.node) < 0).any():
        raise ValueError("eplb: the ranks of a node must follow one another for the hierarchical variant")
    raw = eplb_hierarchical(found.load, found.table.shape[1], nodes, nodes, found.ranks)
    return _as_mapped("hierarchical EPLB", found, raw)


def _as_mapped(name: str, found: PlanningProblem, raw: NDArray[np.int64]) -> PlanCandidate:
    """A raw map [layers, slots] as far as it may be reached. Where it is, replicas share as it counts them: a rank that has an expert twice, twice."""
    goal = as_placement(raw, found.ranks)
    changes = _towards(found, goal)
    end = made(found.table, changes)
    even, per, experts = even_split(end, found.placement.experts), found.placement.slots_per_rank, found.placement.experts
    layer, slot = np.nonzero(goal >= 0)
    part = np.zeros((len(goal), found.ranks, experts))
    part[layer, slot // per, goal[layer, slot]] = raw_shares(raw, found.ranks)[layer, slot]
    held = np.zeros(part.shape, bool)
    layer, slot = np.nonzero(end >= 0)
    held[layer, slot // per, end[layer, slot]] = True
    whole = (held == (part > 0)).all(axis=(1, 2))
    wanted = np.where(whole[layer], part[layer, slot // per, end[layer, slot]], even.spill[layer, slot] / FULL)
    order = np.lexsort((slot, layer * experts + end[layer, slot]))
    spill = np.zeros_like(even.spill)
    spill[layer[order], slot[order]] = np.diff(np.rint(FULL * np.cumsum(wanted[order])), prepend=0.0)
    return PlanCandidate(name, changes, even._replace(spill=spill))


def _few(found: PlanningProblem) -> PlacementChanges:
    changes = few(found.table, found.load, found.ranks, found.limits, goal=found.anew_balance, noise=LoadNoise(found.pairs), node=found.several_nodes)
    return without_reversals(found, shortened(found.table, changes, found.ranks))


def _towards(found: PlanningProblem, goal: Table) -> PlacementChanges:
    """As much of the way to another table as may be gone: of the chosen layers, within the budget, nothing that rests."""
    table = np.where(_open_layers(found)[:, None], goal, found.table)
    gain = np.where((table != found.table).any(axis=1), 1.0, 0.0)
    changes = without_reversals(found, between(found.table, table, found.ranks, gain))
    return changes if found.limits.most_copies is None else within(changes, found.limits.most_copies)


def _open_layers(found: PlanningProblem) -> NDArray[np.bool_]:
    """bool [layers]: chosen ones, in which nothing rests."""
    frozen = found.limits.frozen
    return found.chosen if frozen is None else found.chosen & ~frozen.any(axis=1)


def without_reversals(found: PlanningProblem, changes: PlacementChanges) -> PlacementChanges:
    """What is remembered is of all layers, sharded ones among them."""
    view, first = found.view, np.int32(found.first)
    if view.past is None:
        return changes
    whole = changes._replace(layer=changes.layer + first)
    kept = view.past.without_reversals(whole, counted(view.demand.rates, view.demand.pairs))
    return kept._replace(layer=kept.layer - first)


def shared(found: PlanningProblem, table: Table, slack: float = SLACK) -> Split:
    """The shares that suit the demand, of the chosen layers; the others keep theirs, evenly where their experts have moved. slack: see `reweight`."""
    experts, start = found.placement.experts, found.placement
    new = reweight(table, found.fit, found.ranks, experts, found.several_nodes, pairs=found.pairs, live=found.limits.live, slack=slack)
    if found.chosen.all():
        return new
    return Split(*(np.where(found.chosen[:, None], part, old) for part, old in zip(new, start.split, strict=True)))
