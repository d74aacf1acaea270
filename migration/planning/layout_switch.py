"""Plan a switch of layout: the handovers that turn layers over and change the attention, and what they move.
Pure.

A switch is a plan like any other. It may end after any of its handovers, since an engine with data-parallel
attention serves every set of sharded layers. So it can be resumed, given up and undone like any plan. The
attention changes in a handover of its own while all layers are sharded: to tensor-parallel as the last one,
to data-parallel as the first one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.experts import ModelShape
from fleet.layout import ATTENTION_NAMES, AttentionKind, Layout, layer_ranges, sharding_refusal
from fleet.layout import tp_refusal as heads_refusal
from fleet.placement import EMPTY, Placement, Split, linear, with_attention, with_rows
from fleet.sharding import PartCopies, groups, turn
from migration.model.cost_model import LinkSpeeds, Transfers, transfer_seconds
from migration.model.plan import (
    NO_LAYER,
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
    """A plan that changes the layout, with what its handovers move between ranks: experts, not KV."""

    plan: Plan
    transfers: Transfers
    """one entry per handover, source and destination; copies within a rank are left out"""
    cells: int
    """most cells that a rank needs free for one handover; 0: none, no layer turns over"""

    def seconds(self, node: NDArray[np.intp], links: LinkSpeeds) -> float:
        """Return the duration of all handovers, without waiting for a budget. node: int [ranks]."""
        return transfer_seconds(self.transfers, node, links)


class LayoutChoice(NamedTuple):
    """A layout, and why the engine cannot change to it while it serves; empty: it can."""

    name: str
    refusal: str


# Legality


def turning_refusal(
    shape: ModelShape, attention: AttentionKind, ranks: int, unshardable: str, tp_refusal: str
) -> str:
    """Return why an engine cannot turn any layer over; empty: it can turn all of them, after its attention
    has become data-parallel.

    unshardable, tp_refusal: as in `EngineJoined`.
    """
    if ranks == 1:
        return "it has one rank, so that whole and sharded layers are the same"
    if attention == "tp" and tp_refusal:
        return (
            f"its attention is tensor-parallel, with which no layer turns over, and {tp_refusal}; restart it"
        )
    return unshardable or sharding_refusal(shape, ranks)


def attention_refusal(shape: ModelShape, ranks: int, tp_refusal: str) -> str:
    """Return why an engine cannot change its attention; empty: it can, while all layers are sharded.

    tp_refusal: `EngineJoined.tp_refusal`.
    """
    if ranks == 1:
        return "it has one rank, so that its attention is the same either way"
    return tp_refusal or heads_refusal(shape, ranks)


def choices(
    shape: ModelShape, layout: Layout, ranks: int, unshardable: str, tp_refusal: str
) -> tuple[LayoutChoice, ...]:
    """Return the layouts of an engine, and why those that it cannot change to are refused. The present one,
    `layout`, is not refused."""
    turning = turning_refusal(shape, layout.attention, ranks, unshardable, tp_refusal)
    attention = attention_refusal(shape, ranks, tp_refusal)
    sharded, dp = layout.sharded, layout.attention == "dp"
    every = len(sharded) == shape.layers
    to_dp = "" if dp else attention
    to_every = "" if every else turning
    return (
        LayoutChoice("ep", to_dp or ("" if not sharded else turning)),
        LayoutChoice("experts-tp", to_dp or to_every),
        LayoutChoice("some layers", to_dp or ("" if sharded and not every else turning)),
        LayoutChoice("tp", (attention if dp else "") or to_every),
    )


# Plans


def switch(
    placement: Placement,
    sharded: Sequence[int],
    room: StagingRoom,
    *,
    attention: AttentionKind = "dp",
    goal: Placement | None = None,
) -> Switch:
    """Plan the handovers after which exactly these layers are sharded, and this is the attention.

    goal: a placement of the engine that gives layers which become whole their experts and split. None, or a
    goal in which such a layer is sharded too: every rank gets an even share of the experts, in order.

    Each handover turns over as many layers as `room.staging` has cells for, at least one. The legality of the
    layout is a matter of `turning_refusal` and `attention_refusal`. ValueError if a layer does not exist,
    some are to be whole under tensor-parallel attention, nothing would change, or a rank has too few free
    cells for a single layer.
    """
    wanted = Layout(attention, tuple(sorted(set(sharded))))
    _check_wanted(placement, wanted)
    series = _Series(placement, room, goal)
    if placement.attention == "tp":
        series.change_attention("dp")
    cells = series.turn(sorted(set(wanted.sharded) ^ set(placement.sharded)))
    if attention == "tp":
        series.change_attention("tp")
    plan = planned(placement, series.handovers, reason=_reason(placement, wanted))
    replay(placement, plan)
    return Switch(plan, _transfers(series.moved, room.expert_bytes // placement.ranks), cells)


def _check_wanted(placement: Placement, wanted: Layout) -> None:
    """Raise ValueError unless a layout is another one, of this engine's layers."""
    outside = [layer for layer in wanted.sharded if not 0 <= layer < placement.layers]
    if outside:
        raise ValueError(
            f"layout: layer {outside[0]} does not exist; the engine has MoE layers 0 to"
            f" {placement.layers - 1}"
        )
    if wanted.attention == "tp" and wanted.has_whole(placement.layers):
        raise ValueError(
            f"layout: tensor-parallel attention needs all {placement.layers} layers sharded, not"
            f" {layer_ranges(wanted.sharded) or 'none'}; use tp, or data-parallel attention"
        )
    if wanted == placement.layout:
        forms = (
            f"layers {layer_ranges(wanted.sharded)} are sharded" if wanted.sharded else "all layers are whole"
        )
        tp = ", and attention is tensor-parallel," if wanted.attention == "tp" else ""
        raise ValueError(f"layout: {forms}{tp} already; nothing would change")


@dataclass(eq=False)
class _Series:
    """Handovers of a switch, one after another."""

    now: Placement
    """after the handovers so far"""
    room: StagingRoom
    goal: Placement | None
    handovers: list[Handover] = field(default_factory=list)
    moved: list[PartCopies] = field(default_factory=list)
    """by handover"""

    def change_attention(self, attention: AttentionKind) -> None:
        """Add the handover that changes the attention."""
        why = (
            "every rank computes its heads of all requests"
            if attention == "tp"
            else "every rank computes its own requests"
        )
        step = PlanStep(kind="attention", layer=NO_LAYER, attention=attention, why=why)
        after = with_attention(self.now, attention, epoch=self.now.epoch + 1)
        self._add(Handover(epoch=after.epoch, steps=(step,)), after, turn(self.now, after))

    def turn(self, layers: Sequence[int]) -> int:
        """Add the handovers that turn layers over. Returns the most cells that a rank needs free for one."""
        if not layers:
            return 0
        placement, staging = self.now, self.room.staging
        rows = {
            layer: _row(placement, self.goal, layer) if layer in placement.sharded else None
            for layer in layers
        }
        cells = max(_cells(placement, row) for row in rows.values())
        if staging is not None and staging < cells:
            raise ValueError(
                f"layout: a rank needs {cells} free cells to turn a layer over, and one has only {staging};"
                " wait until reads have settled, or raise engine.spare_layers"
            )
        each = 1 if staging is None else max(staging // placement.slots_per_rank, 1)
        for at in range(0, len(layers), each):
            self._turn({layer: rows[layer] for layer in layers[at : at + each]})
        return cells * min(each, len(layers))

    def _turn(self, rows: dict[int, SlotTable | None]) -> None:
        """Add the handover that turns these layers over."""
        split = _split(self.now, self.goal, rows)
        after = with_rows(self.now, rows, epoch=self.now.epoch + 1, split=split)
        parts = turn(self.now, after)
        steps = tuple(_step(layer, row, parts, self.room, self.now.ranks) for layer, row in rows.items())
        stated = None if after.even else SplitRecord.of(after.split, np.array(list(rows), np.intp))
        self._add(Handover(epoch=after.epoch, steps=steps, split=stated), after, parts)

    def _add(self, handover: Handover, after: Placement, parts: PartCopies) -> None:
        self.handovers.append(handover)
        self.moved.append(parts)
        self.now = after


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


def _reason(placement: Placement, wanted: Layout) -> str:
    before, after = set(placement.sharded), set(wanted.sharded)
    parts = [
        f"layer {min(layers)} becomes {form}"
        if len(layers) == 1
        else f"layers {layer_ranges(sorted(layers))} become {form}"
        for layers, form in ((after - before, "sharded"), (before - after, "whole"))
        if layers
    ]
    if wanted.attention != placement.attention:
        parts.append(f"attention becomes {ATTENTION_NAMES[wanted.attention]}")
    return "; ".join(parts)


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
