"""Plan a switch of layout: the handovers that turn layers over, and what they move. Pure.

A switch is a plan like any other. It may end after any of its handovers, since an engine with data-parallel
attention serves every set of sharded layers. So it can be resumed, given up and undone like any plan.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.experts import ModelShape
from fleet.layout import AttentionKind, Layout, layer_ranges, sharding_refusal, tp_refusal
from fleet.placement import EMPTY, Placement, Split, linear, with_rows
from fleet.sharding import PartCopies, groups, turn
from migration.model.cost_model import LinkSpeeds, Transfers, transfer_seconds
from migration.model.plan import (
    PART_LINKS,
    Handover,
    PartsMoved,
    Plan,
    PlanStep,
    SplitRecord,
    planned,
    replay,
)
from migration.planning.staging_capacity import StagingRoom


class Switch(NamedTuple):
    """A plan that turns layers over, with what its handovers move between ranks."""

    plan: Plan
    transfers: Transfers
    """one entry per handover, source and destination; copies within a rank are left out"""
    cells: int
    """most cells that a rank needs free for one handover"""

    def seconds(self, node: NDArray[np.intp], links: LinkSpeeds) -> float:
        """Return the duration of all handovers, without waiting for a budget. node: int [ranks]."""
        return transfer_seconds(self.transfers, node, links)


class LayoutChoice(NamedTuple):
    """A layout, and why the engine cannot change to it while it serves; empty: it can."""

    name: str
    refusal: str


# Legality


def turning_refusal(shape: ModelShape, attention: AttentionKind, ranks: int, unshardable: str) -> str:
    """Return why an engine cannot turn any layer over; empty: it can turn all of them.

    unshardable: `EngineJoined.unshardable`.
    """
    if ranks == 1:
        return "it has one rank, so that whole and sharded layers are the same"
    if attention == "tp":
        return (
            "its attention is tensor-parallel, which needs the experts of every layer sharded, or of none,"
            " and layers turn over one after another; restart it in the other layout"
        )
    return unshardable or sharding_refusal(shape, ranks)


def choices(shape: ModelShape, layout: Layout, ranks: int, unshardable: str) -> tuple[LayoutChoice, ...]:
    """Return the layouts of an engine, and why those that it cannot change to are refused. The present one,
    `layout`, is not refused."""
    turning = turning_refusal(shape, layout.attention, ranks, unshardable)
    sharded, dp = layout.sharded, layout.attention == "dp"
    every = len(sharded) == shape.layers
    fixed = "attention does not change while an engine runs; restart it with {} attention"
    to_dp = "" if dp else fixed.format("data-parallel")
    to_tp = sharding_refusal(shape, ranks) or tp_refusal(shape, ranks)
    return (
        LayoutChoice("ep", to_dp or ("" if not sharded else turning)),
        LayoutChoice("experts-tp", to_dp or ("" if every else turning)),
        LayoutChoice("some layers", to_dp or ("" if sharded and not every else turning)),
        LayoutChoice("tp", to_tp or (fixed.format("tensor-parallel") if dp else "" if every else turning)),
    )


# Plans


def switch(
    placement: Placement, sharded: Sequence[int], room: StagingRoom, *, goal: Placement | None = None
) -> Switch:
    """Plan the handovers after which exactly these layers are sharded.

    goal: a placement of the engine that gives layers which become whole their experts and split. None, or a
    goal in which such a layer is sharded too: every rank gets an even share of the experts, in order.

    Each handover turns over as many layers as `room.staging` has cells for, at least one. The legality of the
    layout is a matter of `turning_refusal`. ValueError if a layer does not exist, nothing would change, or a
    rank has too few free cells for a single layer.
    """
    wanted = set(sharded)
    outside = sorted(layer for layer in wanted if not 0 <= layer < placement.layers)
    if outside:
        raise ValueError(
            f"layout: layer {outside[0]} does not exist; the engine has MoE layers 0 to"
            f" {placement.layers - 1}"
        )
    layers = sorted(wanted ^ set(placement.sharded))
    if not layers:
        form = f"layers {layer_ranges(sorted(wanted))} are sharded" if wanted else "all layers are whole"
        raise ValueError(f"layout: {form} already; nothing would change")
    rows = {layer: None if layer in wanted else _row(placement, goal, layer) for layer in layers}
    cells = max(_cells(placement, row) for row in rows.values())
    if room.staging is not None and room.staging < cells:
        raise ValueError(
            f"layout: a rank needs {cells} free cells to turn a layer over, and one has only {room.staging};"
            " wait until reads have settled, or raise engine.spare_layers"
        )
    each = 1 if room.staging is None else max(room.staging // placement.slots_per_rank, 1)
    now, handovers, moved = placement, list[Handover](), list[PartCopies]()
    for at in range(0, len(layers), each):
        taken = layers[at : at + each]
        split = _split(now, goal, {layer: rows[layer] for layer in taken})
        after = with_rows(now, {layer: rows[layer] for layer in taken}, epoch=now.epoch + 1, split=split)
        parts = turn(now, after)
        steps = tuple(_step(layer, rows[layer], parts, room, placement.ranks) for layer in taken)
        stated = None if after.even else SplitRecord.of(after.split, np.array(taken, np.intp))
        handovers.append(Handover(epoch=after.epoch, steps=steps, split=stated))
        moved.append(parts)
        now = after
    plan = planned(placement, handovers, reason=_reason(placement, wanted))
    replay(placement, plan)
    return Switch(
        plan, _transfers(moved, room.expert_bytes // placement.ranks), cells * min(each, len(layers))
    )


def _row(placement: Placement, goal: Placement | None, layer: int) -> SlotTable:
    """Return the experts in the slots of a layer that becomes whole."""
    if goal is not None and layer not in goal.sharded:
        return np.asarray(goal.expert_of_slot[layer], np.int16)
    even = linear(
        layers=1,
        experts=placement.experts,
        ranks=placement.ranks,
        slots_per_rank=placement.slots_per_rank,
    )
    return np.asarray(even.expert_of_slot[0], np.int16)


def _cells(placement: Placement, row: SlotTable | None) -> int:
    """Return the cells that the rank which gets most needs for a layer."""
    if row is None:
        return groups(placement.experts, placement.ranks)
    return int((row.reshape(placement.ranks, -1) != EMPTY).sum(axis=1).max())


def _split(now: Placement, goal: Placement | None, rows: dict[int, SlotTable | None]) -> Split | None:
    """Return the split of all layers after some have turned over; None: the new ones share evenly."""
    restored = [layer for layer, row in rows.items() if row is not None and layer not in _sharded(goal)]
    if goal is None or goal.even or not restored:
        return None
    evenly = with_rows(now, dict(rows), epoch=now.epoch).split
    split = Split(*(part.copy() for part in evenly))
    for part, before in zip(split, goal.split, strict=True):
        part[restored] = before[restored]
    return split


def _sharded(goal: Placement | None) -> tuple[int, ...]:
    return () if goal is None else goal.sharded


def _step(layer: int, row: SlotTable | None, parts: PartCopies, room: StagingRoom, ranks: int) -> PlanStep:
    of_layer = parts.where(parts.layer == layer)
    crosses = room.node[of_layer.source] != room.node[of_layer.destination]
    link = np.where(of_layer.is_local, 0, np.where(crosses, 2, 1))
    counts = np.bincount(link, minlength=len(PART_LINKS)).tolist()
    size = room.expert_bytes // ranks
    return PlanStep(
        kind="shard" if row is None else "gather",
        layer=layer,
        slots=b"" if row is None else row.astype("<i2").tobytes(),
        parts=tuple(
            PartsMoved(link=name, parts=count, bytes=count * size)
            for name, count in zip(PART_LINKS, counts, strict=True)
            if count
        ),
        why="every rank gets its part of every expert" if row is None else "ranks get whole experts",
    )


def _reason(placement: Placement, wanted: set[int]) -> str:
    before = set(placement.sharded)
    return "; ".join(
        f"layers {layer_ranges(sorted(layers))} become {form}"
        for layers, form in ((wanted - before, "sharded"), (before - wanted, "whole"))
        if layers
    )


def _transfers(moved: Sequence[PartCopies], part_bytes: int) -> Transfers:
    """Sum the parts of each handover by source and destination."""
    rows = [np.zeros((0, 4), np.int64)]
    for number, parts in enumerate(moved):
        away = parts.where(~parts.is_local)
        pairs, counts = np.unique(
            np.stack([away.source, away.destination], axis=1), axis=0, return_counts=True
        )
        rows.append(np.column_stack([np.full(len(pairs), number), pairs, counts * part_bytes]))
    table = np.concatenate(rows)
    return Transfers(
        handover=table[:, 0].astype(np.intp),
        source=table[:, 1].astype(np.intp),
        destination=table[:, 2].astype(np.intp),
        bytes=table[:, 3].astype(np.float64),
    )
