"""Produce plan candidates, each strategy alone: new shares, few copies, locality, full re-placement, EPLB.
Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.placement import FULL, Placement, Split, even_split
from migration.model.cost_model import PricedPlacement
from migration.model.placement_changes import NONE, PlacementChanges, joined, made, within
from migration.model.sampling_noise import LoadNoise
from migration.planning.findings import Finding, FindingCode, Infeasible
from migration.planning.group_affinity import keep_groups
from migration.planning.locality_report import locality_problem
from migration.planning.problem import PlanningProblem
from migration.solvers.eplb import as_placement, eplb_global, eplb_hierarchical, raw_shares
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.fill_empty_slots import filled
from migration.solvers.locality_placement import locality_table
from migration.solvers.ordered_diff import ordered_diff
from migration.solvers.split_weights import SLACK, reweighted
from migration.solvers.table_diff import between, shortened

NOTICEABLE = 0.02
"""Least saving by locality, as a part of the seconds that sending tokens takes now.

Texts that happen to come in one window and not in the next change the best placement by a percent or so.
An assumption for windows of about a minute; longer windows vary less.
"""
NEARER = 0.05
"""Slack of shares that prefer serving tokens where they originate to evening out the ranks.

In mean rank loads, so for engines of any size: the cost model chooses between this and `SLACK` for each plan.
"""


class PredictedEffect(NamedTuple):
    """Demand and costs that a candidate is evaluated by when it changes where requests go, instead of the
    observed demand."""

    found: PlanningProblem
    """The problem with the demand expected at the end."""
    before: PricedPlacement
    """The served placement, under the demand expected without this candidate."""
    homes: NDArray[np.float64]
    """[K, ranks]: homes of the clusters at the end."""


class PlanCandidate(NamedTuple):
    """Result of a strategy, not yet evaluated.

    changes: of the problem's layers, in order; their gain is in no unit yet. split: of the end placement;
    None: even. table: the end of a plan that is one handover, for engines that move their experts themselves;
    there are no changes then.
    """

    name: str
    changes: PlacementChanges
    split: Split | None
    predicted: PredictedEffect | None = None
    """None: homes of requests do not change."""
    table: SlotTable | None = None

    def problem(self, found: PlanningProblem) -> PlanningProblem:
        """Return the problem with the demand that goes with this candidate."""
        return found if self.predicted is None else self.predicted.found

    def before(self, found: PlanningProblem) -> PricedPlacement:
        """Return the costs that this candidate must beat."""
        return found.before if self.predicted is None else self.predicted.before

    def placement(self, found: PlanningProblem) -> Placement:
        """Return the placement at the end."""
        start = found.placement
        return Placement(
            made(start.expert_of_slot, self.changes) if self.table is None else self.table,
            experts=start.experts,
            ranks=start.ranks,
            epoch=start.epoch,
            split=self.split,
        )


Maker = Callable[[PlanningProblem], PlanCandidate]


def shares(found: PlanningProblem) -> PlanCandidate:
    """Compute new split weights for the present placement: no bytes."""
    return PlanCandidate("new shares", NONE, shared(found, found.table))


def copies(found: PlanningProblem) -> PlanCandidate:
    """Make few copies, and the shares that go with them."""
    changes = without_reversals(found, found.few_copies)
    return PlanCandidate("few copies", changes, shared(found, made(found.table, changes)))


def copies_and_filling(found: PlanningProblem) -> PlanCandidate:
    """Make few copies; then fill empty slots with the experts that each rank's requests demand most."""
    first = without_reversals(found, found.few_copies)
    fill = without_reversals(found, filled(made(found.table, first), found.fit, found.ranks, found.limits))
    changes = joined([part for part in (first, fill) if part])
    if found.limits.max_copies is not None:
        changes = within(changes, found.limits.max_copies)
    return PlanCandidate("empty slots filled", changes, shared(found, made(found.table, changes)))


def uniform(found: PlanningProblem) -> PlanCandidate:
    """Make few copies for engines whose replicas share evenly, whatever split they are given, as under vLLM's
    EPLB."""
    return PlanCandidate("few copies, even shares", _few(found), None)


def local(found: PlanningProblem) -> PlanCandidate:
    """Place experts near the ranks whose requests demand them.

    Infeasible where the gain is hardly more than it would be with identical demand on all ranks: then ranks
    differ only by the few texts that happened to come to each.
    """
    room = locality_problem(found)
    whole = keep_groups(found.view.shape, found.terms.speed, found.fit, room)
    goal = locality_table(found.fit, replace(room, home=whole.home), present=found.table)
    changes = without_reversals(found, ordered_diff(found.table, goal, found.fit, room, found.limits))
    table = made(found.table, changes)
    # Two trade-offs between even ranks and local tokens; the cost model decides.
    ways = [PlanCandidate("locality", changes, shared(found, table, slack)) for slack in (SLACK, NEARER)]
    best = min(ways, key=lambda way: float(found.price(way.placement(found)).seconds.sum()))
    # Control experiment: judge the same placement on demand that is equal on all ranks. The difference is
    # what locality itself is worth; the rest comes from balance.
    alike = replace(found, evaluation=np.broadcast_to(found.evaluation.mean(axis=0), found.evaluation.shape))
    gains = [
        float((one.before.seconds - one.price(best.placement(found)).seconds).sum()) for one in (found, alike)
    ]
    if changes and gains[0] - gains[1] < NOTICEABLE * found.before.figures.seconds.dispatch:
        raise Infeasible(Finding.of(FindingCode.TOO_ALIKE, "locality"))
    return best


def anew(found: PlanningProblem) -> PlanCandidate:
    """Make a full placement from nothing, assigned to the ranks that hold most of it already."""
    changes = _towards(found, found.anew_relabelled)
    return PlanCandidate("all anew", changes, shared(found, made(found.table, changes)))


def anew_evenly(found: PlanningProblem) -> PlanCandidate:
    """Make the same placement as `anew` for engines whose replicas share evenly, whatever split they are
    given, as under vLLM's EPLB."""
    return PlanCandidate("all anew, even shares", _towards(found, found.anew_relabelled), None)


def anew_at_most(found: PlanningProblem) -> Placement:
    """Return the end of `anew` without budget and cooldown: known before any of its changes."""
    table = np.where(found.chosen[:, None], found.anew_relabelled, found.table)
    start = found.placement
    return Placement(
        table, experts=start.experts, ranks=start.ranks, epoch=start.epoch, split=shared(found, table)
    )


def eplb(found: PlanningProblem) -> PlanCandidate:
    """Apply DeepSeek's EPLB over all ranks."""
    raw = eplb_global(found.load, found.table.shape[1], found.ranks)
    return _as_mapped("EPLB", found, raw)


def eplb_by_node(found: PlanningProblem) -> PlanCandidate:
    """Apply hierarchical EPLB with one group of experts per node. ValueError where the numbers do not
    divide."""
    nodes = int(found.node.max()) + 1
    if (np.diff(found.node) < 0).any():
        raise ValueError("eplb: the hierarchical variant needs consecutive ranks on each node")
    raw = eplb_hierarchical(found.load, found.table.shape[1], nodes, nodes, found.ranks)
    return _as_mapped("hierarchical EPLB", found, raw)


def _as_mapped(name: str, found: PlanningProblem, raw: NDArray[np.int64]) -> PlanCandidate:
    """Approach a raw map [layers, slots] as far as the limits allow.

    Where the map is reached, replicas share as the map counts them: a rank that holds an expert twice counts
    twice.
    """
    goal = as_placement(raw, found.ranks)
    changes = _towards(found, goal)
    end = made(found.table, changes)
    even, per, experts = (
        even_split(end, found.placement.experts),
        found.placement.slots_per_rank,
        found.placement.experts,
    )
    layer, slot = np.nonzero(goal >= 0)
    # Shares that the raw map implies, by rank and expert, as slots may differ between goal and end.
    part = np.zeros((len(goal), found.ranks, experts))
    part[layer, slot // per, goal[layer, slot]] = raw_shares(raw, found.ranks)[layer, slot]
    held = np.zeros(part.shape, bool)
    layer, slot = np.nonzero(end >= 0)
    held[layer, slot // per, end[layer, slot]] = True
    # Use the map's shares only in layers that reach it: elsewhere they do not sum to one.
    whole = (held == (part > 0)).all(axis=(1, 2))
    shares_held = np.where(
        whole[layer], part[layer, slot // per, end[layer, slot]], even.spill[layer, slot] / FULL
    )
    # Round a running sum per expert, so that each expert's shares add up to exactly FULL.
    order = np.lexsort((slot, layer * experts + end[layer, slot]))
    spill = np.zeros_like(even.spill)
    spill[layer[order], slot[order]] = np.diff(np.rint(FULL * np.cumsum(shares_held[order])), prepend=0.0)
    return PlanCandidate(name, changes, even._replace(spill=spill))


def _few(found: PlanningProblem) -> PlacementChanges:
    changes = even_split_copies(
        found.table,
        found.load,
        found.ranks,
        found.limits,
        goal=found.anew_balance,
        noise=LoadNoise(found.pairs),
        node=found.several_nodes,
    )
    return without_reversals(found, shortened(found.table, changes, found.ranks))


def _towards(found: PlanningProblem, goal: SlotTable) -> PlacementChanges:
    """Return the changes towards another table: of the chosen layers, within the budget, without experts in
    cooldown."""
    table = np.where(open_layers(found)[:, None], goal, found.table)
    gain = np.where((table != found.table).any(axis=1), 1.0, 0.0)
    changes = without_reversals(found, between(found.table, table, found.ranks, gain))
    return changes if found.limits.max_copies is None else within(changes, found.limits.max_copies)


def open_layers(found: PlanningProblem) -> NDArray[np.bool_]:
    """bool [layers]: chosen layers without any expert in cooldown."""
    frozen = found.limits.frozen
    return found.chosen if frozen is None else found.chosen & ~frozen.any(axis=1)


def without_reversals(found: PlanningProblem, changes: PlacementChanges) -> PlacementChanges:
    """Remove changes that undo recent moves. The history numbers all layers of the model, sharded ones
    included."""
    view = found.view
    if view.past is None:
        return changes
    kept = view.past.without_reversals(found.numbered(changes), view.demand.evidence)
    return kept._replace(layer=np.searchsorted(found.layers, kept.layer).astype(np.int32))


def shared(found: PlanningProblem, table: SlotTable, slack: float = SLACK) -> Split:
    """Return the shares that suit the demand in the chosen layers, and in those that lost holders; other
    layers keep theirs. slack: see `reweight`.
    """
    key = table.tobytes(), slack
    if (known := found.splits.get(key)) is not None:
        return known
    new = reweighted(table, found.pull, pairs=found.pairs, slack=slack)
    if not found.chosen.all():
        old, anew = found.placement.split, found.chosen | (table != found.table).any(axis=1)
        new = Split(*(np.where(anew[:, None], part, other) for part, other in zip(new, old, strict=True)))
    found.splits[key] = new
    return new
