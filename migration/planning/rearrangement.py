"""Plans for engines that move their experts themselves: one handover to a whole map. Pure.

Such an engine (vLLM's EPLB) takes a map with every slot filled, and its replicas share evenly. A map change
stops it for a fixed time per layer in which a rank receives anything, and a time per byte
(`fleet.timing.RearrangeSpeed`). So a plan gathers its moves in the layers in which they pay.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, SlotTable
from fleet.placement import Placement
from fleet.timing import RearrangeSpeed
from migration.model.constraints import UNLIMITED
from migration.model.cost_model import Payback
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, made, within
from migration.model.plan import Handover, PlanStep
from migration.model.sampling_noise import LoadNoise
from migration.planning.handover_batching import CopySources, SlotHolders
from migration.planning.problem import PlanningProblem
from migration.planning.staging_capacity import StagingRoom
from migration.planning.strategies import PlanCandidate, open_layers, without_reversals
from migration.solvers.eplb import as_placement, eplb_global, eplb_hierarchical
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_tables import arrivals, completed, in_place
from migration.solvers.sampled_moves import sampled_moves

COPY_MARGIN = 0.05
"""Least fall of a layer's fullest load, in mean rank loads, that all slots of a layer together must bring:
each received expert its part of it. The rate is that of other engines' copies (`planner._COPY_MARGIN`)."""
_EVENER = "ranks are more even"


# Strategies


def few_moves(found: PlanningProblem) -> PlanCandidate:
    """Make the ranks even by few swaps and replications over spare replicas, in layers where that pays.

    Where samples of short intervals are known, the moves suit what is in demand together
    (`migration.solvers.sampled_moves`), else the mean demand.
    """
    if found.samples is not None:
        least = COPY_MARGIN / found.table.shape[1]
        table = sampled_moves(found.completed, found.samples, found.ranks, found.limits, least=least)
        return _bundled(found, "few moves, one map", table, found.chosen)
    start = found.completed
    changes = even_split_copies(
        start,
        found.load,
        found.ranks,
        # Within a layer that is touched anyway, further moves cost little: aim at the whole gain.
        replace(found.limits, target=1.0, max_copies=None),
        goal=found.anew_balance,
        noise=LoadNoise(found.pairs),
        node=found.several_nodes,
        full=True,
    )
    changes = without_reversals(found, changes)
    left = _copies_left(found, start)
    table = made(start, changes if left is None else within(changes, left))
    return _bundled(found, "few moves, one map", table, found.chosen)


def whole_map(found: PlanningProblem) -> PlanCandidate:
    """Make a full placement from nothing, assigned to the ranks that hold most of it already."""
    table = completed(found.anew_relabelled, found.load, found.ranks)
    return _bundled(found, "all anew, one map", table, open_layers(found))


def eplb_map(found: PlanningProblem) -> PlanCandidate:
    """Apply DeepSeek's EPLB over all ranks. Where an expert is on a rank twice, another takes its place."""
    return _as_map(found, "EPLB", eplb_global(found.load, found.table.shape[1], found.ranks))


def eplb_map_by_node(found: PlanningProblem) -> PlanCandidate:
    """Apply hierarchical EPLB with one group of experts per node. ValueError where the numbers do not
    divide."""
    nodes = int(found.node.max()) + 1
    raw = eplb_hierarchical(found.load, found.table.shape[1], nodes, nodes, found.ranks)
    return _as_map(found, "hierarchical EPLB", raw)


def _as_map(found: PlanningProblem, name: str, raw: NDArray[np.int64]) -> PlanCandidate:
    whole = completed(as_placement(raw, found.ranks), found.load, found.ranks)
    start, table = _open(found, whole, open_layers(found))
    return _within_budget(found, name, table, _gain(found, start, table), np.ones(len(table), bool))


def _bundled(found: PlanningProblem, name: str, table: SlotTable, layers: NDArray[np.bool_]) -> PlanCandidate:
    """Take those of some layers of a table that pay for themselves, best gain per copy first, within the
    budget."""
    start, table = _open(found, table, layers)
    table = _without_reversed_layers(found, start, table)
    gain = _gain(found, start, table)
    worth = gain * found.question.plan_discount * found.steps_per_second * found.config.lifetime_seconds
    return _within_budget(found, name, table, gain, worth > layer_seconds(start, table, found))


def _open(found: PlanningProblem, table: SlotTable, layers: NDArray[np.bool_]) -> tuple[SlotTable, SlotTable]:
    """Return the present map, made legal, and the table in these layers; experts in place."""
    start = in_place(found.table, found.completed, found.ranks)
    return start, in_place(start, np.where(layers[:, None], table, start), found.ranks)


def _gain(found: PlanningProblem, start: SlotTable, table: SlotTable) -> FloatArray:
    """Return the seconds of a step that each layer gains under the demand that plans are fitted to."""
    before, after = (found.price_fit(_placed(found, one)).seconds for one in (start, table))
    return np.asarray(before - after)


def _within_budget(
    found: PlanningProblem, name: str, table: SlotTable, gain: FloatArray, taken: NDArray[np.bool_]
) -> PlanCandidate:
    """Return the candidate with those of the layers `taken` that the budget allows, most gain per copy
    first."""
    start = in_place(found.table, found.completed, found.ranks)
    copies = np.where(taken, arrivals(found.table, table, found.ranks).sum(axis=1), 0)
    left = _copies_left(found, start)
    if left is not None:
        order = np.argsort(-gain / np.maximum(copies, 1), kind="stable")
        taken = taken.copy()
        taken[order[np.cumsum(copies[order]) > left]] = False
    end = np.where(taken[:, None], table, start)
    return PlanCandidate(name, NONE, None, table=in_place(found.table, end, found.ranks))


def _copies_left(found: PlanningProblem, start: SlotTable) -> int | None:
    """Return the copies that the budget leaves for moves, after those that make the present map legal. None:
    no limit."""
    most = found.limits.max_copies
    return None if most is None else max(most - int(arrivals(found.table, start, found.ranks).sum()), 0)


def _without_reversed_layers(found: PlanningProblem, start: SlotTable, table: SlotTable) -> SlotTable:
    """Leave layers as they are in which some move would undo the last plan without new evidence."""
    layer, slot = np.nonzero(table != start)
    count = len(layer)
    changes = PlacementChanges(
        kind=np.full(count, ChangeKind.REPLICATE, np.uint8),
        layer=layer.astype(np.int32),
        slot=slot.astype(np.int32),
        expert=table[layer, slot],
        other_slot=np.full(count, NOWHERE, np.int32),
        other_expert=np.full(count, -1, np.int16),
        gain=np.zeros(count),
    )
    kept = np.bincount(without_reversals(found, changes).layer, minlength=len(table))
    whole = kept == np.bincount(layer, minlength=len(table))
    return np.where(whole[:, None], table, start)


def _placed(found: PlanningProblem, table: SlotTable) -> Placement:
    return Placement(table, experts=found.placement.experts, ranks=found.ranks, duplicates=True)


# Price


def layer_seconds(before: SlotTable, after: SlotTable, found: PlanningProblem) -> FloatArray:
    """Return the seconds that each layer of a map change takes: float64 [layers]; 0 where nothing arrives."""
    return rearrange_seconds(
        before, after, found.ranks, found.view.shape.expert_bytes, found.view.rearrange_speed
    )


def rearrange_seconds(
    before: SlotTable, after: SlotTable, ranks: int, expert_bytes: int, speed: RearrangeSpeed
) -> FloatArray:
    """Return the seconds that each layer of a map change takes: float64 [layers]; 0 where nothing arrives."""
    come = arrivals(before, after, ranks).reshape(len(before), ranks, -1).sum(axis=2)
    busiest = come.max(axis=1)
    return np.where(busiest > 0, speed.layer + speed.byte * expert_bytes * busiest, 0.0)


def payback_of(found: PlanningProblem, table: SlotTable, gain_seconds: float) -> Payback:
    """Return the payback of a map change: the engine serves nothing meanwhile. gain_seconds: of a step,
    before the discount."""
    cost = float(layer_seconds(found.table, table, found).sum())
    gain = gain_seconds * found.question.plan_discount * found.steps_per_second
    return Payback(
        gain_per_second=gain,
        cost_seconds=cost,
        transfer_seconds=cost,
        lifetime_seconds=found.config.lifetime_seconds,
        bytes=int(arrivals(found.table, table, found.ranks).sum()) * found.view.shape.expert_bytes,
        after_seconds=cost / gain if gain > 0 else None,
    )


# The handover


def one_map(
    placement: Placement,
    table: SlotTable,
    room: StagingRoom,
    gain: FloatArray | None = None,
    why: str = _EVENER,
) -> tuple[Handover, ...]:
    """Return the one handover that leads from a placement to a full table; none where nothing arrives.

    Each step brings an expert to a slot, instead of another expert; all happen at once. gain: float64
    [layers], reduction of the step time. The table is aligned with the placement first (`in_place`).
    """
    before, ranks = placement.expert_of_slot, placement.ranks
    after = in_place(before, table, ranks)
    rows = before.tolist()
    sources = CopySources(SlotHolders(before, placement.experts), placement.slots_per_rank, room, UNLIMITED)
    changed = np.argwhere(after != before)
    each = np.bincount(changed[:, 0], minlength=placement.layers)
    steps = tuple(
        PlanStep(
            kind="replicate",
            layer=layer,
            slot=slot,
            expert=int(after[layer, slot]),
            evicted=rows[layer][slot],
            copies=(sources.copy(layer, int(after[layer, slot]), slot),),
            gain=0.0 if gain is None else float(gain[layer]) / int(each[layer]),
            why=why,
        )
        for layer, slot in changed.tolist()
    )
    return (Handover(epoch=placement.epoch + 1, steps=steps),) if steps else ()
