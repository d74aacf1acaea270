"""Order changes into handovers, each within the staging room of every rank. Pure.

The copies of a handover are staged beside the serving weights until all of them have arrived. So a rank can
receive only a limited number of experts at a time, and every copy is read from what the previous epoch holds.
The changes of a layer keep their order, and a handover takes a prefix of the layer's remaining changes. So
every change finds the state that it was planned on, and no two changes conflict.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.placement import EMPTY, FULL, Placement, Split, even_spill, even_split
from migration.model.constraints import UNLIMITED, Constraints
from migration.model.cost_model import Transfers
from migration.model.placement_changes import COPIES, NOWHERE, ChangeKind, PlacementChanges, made, taken
from migration.model.plan import Copy, Handover, Link, PlanStep, SplitRecord, StepKind
from migration.planning.sentences import NEW_SHARES, change_reason
from migration.planning.staging_capacity import PendingChanges, StagingRoom

KINDS: tuple[StepKind, ...] = ("replicate", "swap", "move", "drop")
"""Names by `ChangeKind`."""
CHANGES = tuple(ChangeKind)
"""The members by their number."""


def ordered(
    placement: Placement,
    changes: PlacementChanges,
    room: StagingRoom,
    *,
    limits: Constraints = UNLIMITED,
    split: Split | None = None,
    reweighted: NDArray[np.float64] | None = None,
    why: Sequence[str] | None = None,
) -> tuple[Handover, ...]:
    """Return the handovers that make these changes: as few as list scheduling finds, most gain per byte
    first.

    Layers with new shares only come first, in a handover of their own: it copies nothing. `split` is that of
    the last epoch (None: the even one). A layer gets it with its last change. Until then, experts with
    changed holders share evenly, or as at the end where they have their final holders.

    changes.gain: seconds by which a step gets shorter. reweighted: float64 [layers], the same for layers
    whose split alone changes. why: a sentence for each change, where the planner knows a better one than the
    tables show.

    limits.live and limits.min_replicas count; a requirement that the start does not meet is not enforced
    later. Unorderable: a change takes the last live replica, puts a second one on a rank, or a group exceeds
    the staging room.
    """
    end = made(placement.expert_of_slot, changes)
    final = (
        even_split(end, placement.experts)
        if split is None
        else Placement(
            end, experts=placement.experts, ranks=placement.ranks, split=split, sharded=placement.sharded
        ).split
    )
    queue = PendingChanges(placement, changes, room, limits)
    shares = _Shares(placement, end, final, even=placement.even and split is None)
    series: list[Handover] = []
    alone = shares.only_reweighted(changes)
    if len(alone):
        steps = tuple(
            _reweight(int(layer), 0.0 if reweighted is None else float(reweighted[layer])) for layer in alone
        )
        series.append(
            Handover(
                epoch=placement.epoch + 1, steps=steps, split=shares.after(placement.expert_of_slot, alone)
            )
        )
    writer = _StepWriter(placement, changes, room, limits, why)
    while queue.waiting:
        steps = writer.steps(queue.round())
        series.append(
            Handover(
                epoch=placement.epoch + len(series) + 1,
                steps=steps,
                split=None if shares.even else shares.after(writer.table, queue.complete()),
            )
        )
    return tuple(series)


def transfers(handovers: Sequence[Handover], slots_per_rank: int) -> Transfers:
    """Return the copies of the handovers, for `migration.model.cost_model.payback`."""
    found = [
        (number, copy)
        for number, handover in enumerate(handovers)
        for step in handover.steps
        for copy in step.copies
    ]
    return Transfers(
        handover=np.array([number for number, _ in found], np.intp),
        source=np.array(
            [-1 if copy.source is None else copy.source // slots_per_rank for _, copy in found], np.intp
        ),
        destination=np.array([copy.slot // slots_per_rank for _, copy in found], np.intp),
        bytes=np.array([copy.bytes for _, copy in found], np.float64),
    )


# The split of intermediate epochs


class _Shares:
    """The split of every intermediate epoch."""

    def __init__(self, placement: Placement, end: SlotTable, final: Split, *, even: bool) -> None:
        self._experts = placement.experts
        self._begin, self._end = placement.expert_of_slot, end
        self._first, self._final = placement.split, final
        self._now = placement.split
        self._done = np.zeros(len(end), bool)
        self._table = placement.expert_of_slot.copy()
        self.even = even
        """True if the split is even throughout and handovers need not state it."""

    def only_reweighted(self, changes: PlacementChanges) -> NDArray[np.intp]:
        """Return the layers whose split changes and whose slots do not."""
        differs = np.logical_or.reduce(
            [(one != other).any(axis=1) for one, other in zip(self._first, self._final, strict=True)]
        )
        differs[changes.layer] = False
        return np.flatnonzero(differs)

    def after(self, table: SlotTable, complete: NDArray[np.intp]) -> SplitRecord:
        """Return the split record of a handover that leaves this table, with these layers in their final
        state."""
        moved = (table != self._table).any(axis=1)
        done = complete[~self._done[complete]]
        self._done[complete] = True
        rows = np.flatnonzero(moved & ~self._done)
        between = self._between(table, rows)
        now = Split(*(part.copy() for part in self._now))
        for part, final, meanwhile in zip(now, self._final, between, strict=True):
            part[done], part[rows] = final[done], meanwhile
        differs = moved
        for one, other in zip(now, self._now, strict=True):
            differs |= (one != other).any(axis=1)
        self._now, self._table = now, table
        return SplitRecord.of(now, np.flatnonzero(differs))

    def _between(self, table: SlotTable, rows: NDArray[np.intp]) -> Split:
        """Return the split of unfinished layers.

        Each expert shares as before while it has its first holders, as at the end once it has its final ones,
        else evenly.
        """
        now, begin, end = table[rows], self._begin[rows], self._end[rows]
        as_end, as_begin = same_holders(now, end, self._experts), same_holders(now, begin, self._experts)
        evenly = ~as_end & ~as_begin & (now != EMPTY)
        even = Split(
            np.where(evenly, FULL, 0), even_spill(now, self._experts, evenly), np.zeros(now.shape, np.uint16)
        )
        return Split(
            *(
                np.where(as_begin, first[rows], np.where(as_end, final[rows], share)).astype(np.uint16)
                for first, final, share in zip(self._first, self._final, even, strict=True)
            )
        )


def same_holders(table: SlotTable, other: SlotTable, experts: int) -> NDArray[np.bool_]:
    """bool [layers, slots]: True if the expert of this slot is in the same slots of both tables."""
    same = np.ones((len(table), experts + 1), bool)
    layer, slot = np.nonzero(table != other)
    same[layer, table[layer, slot]] = False
    same[layer, other[layer, slot]] = False
    return np.take_along_axis(same, np.where(table == EMPTY, experts, table).astype(np.intp), axis=1)


# Records of handovers


def _reweight(layer: int, gain: float) -> PlanStep:
    return PlanStep(kind="reweight", layer=layer, gain=gain, why=NEW_SHARES)


class _StepWriter:
    """Conversion of changes to steps: the source of each copy, the replica that gives way, and the reason."""

    def __init__(
        self,
        placement: Placement,
        changes: PlacementChanges,
        room: StagingRoom,
        limits: Constraints,
        why: Sequence[str] | None,
    ) -> None:
        self.table = placement.expert_of_slot
        """After the steps so far."""
        self._per = placement.slots_per_rank
        self._rows: list[list[int]] = placement.expert_of_slot.tolist()
        self._replicas = _replicas(placement.expert_of_slot, placement.experts).tolist()
        self._holders = SlotHolders(placement.expert_of_slot, placement.experts)
        """Of the previous epoch, which copies are read from."""
        self._of, self._changes = changes, list(zip(*(part.tolist() for part in changes), strict=True))
        self._room, self._limits = room, limits
        self._why = why

    def steps(self, chosen: list[int]) -> tuple[PlanStep, ...]:
        """Return the steps of one handover."""
        sources = CopySources(self._holders, self._per, self._room, self._limits)
        steps = tuple([self._step(at, sources) for at in chosen])
        for at in chosen:
            _, layer, slot, _, other_slot, _, _ = self._changes[at]
            for changed in (slot, other_slot):
                if changed != NOWHERE:
                    self._holders.put(layer, changed, self._rows[layer][changed])
        self.table = made(self.table, taken(self._of, np.array(chosen, np.intp)))
        return steps

    def _step(self, at: int, sources: "CopySources") -> PlanStep:
        kind, layer, slot, expert, other_slot, other_expert, gain = self._changes[at]
        found = self._rows[layer][slot]
        copies = [sources.copy(layer, expert, slot)] if COPIES[kind] else []
        if kind == ChangeKind.SWAP:
            copies.append(sources.copy(layer, other_expert, other_slot))
        step = PlanStep(
            kind=KINDS[kind],
            layer=layer,
            slot=slot,
            expert=found if kind == ChangeKind.DROP else expert,
            evicted=found if kind in (ChangeKind.REPLICATE, ChangeKind.MOVE) and found != EMPTY else None,
            other_slot=None if other_slot == NOWHERE else other_slot,
            other_expert=other_expert if kind == ChangeKind.SWAP else None,
            copies=tuple(copies),
            gain=gain,
            why=(
                change_reason(CHANGES[kind], self._replicas[layer], found, expert, self._lost(other_slot))
                if self._why is None
                else self._why[at]
            ),
        )
        self._put(layer, slot, expert)
        if other_slot != NOWHERE:
            self._put(layer, other_slot, other_expert)
        return step

    def _put(self, layer: int, slot: int, expert: int) -> None:
        row, replicas = self._rows[layer], self._replicas[layer]
        # The last number is that of empty slots: EMPTY is -1.
        replicas[row[slot]] -= 1
        replicas[expert] += 1
        row[slot] = expert

    def _lost(self, other_slot: int) -> int | None:
        """Return the rank of the other slot of a change if that rank is lost."""
        if other_slot == NOWHERE or self._limits.live is None:
            return None
        rank = other_slot // self._per
        return None if self._limits.live[rank] else rank


def _replicas(table: SlotTable, experts: int) -> NDArray[np.intp]:
    """int [layers, experts + 1]: slots that hold each expert, then empty ones."""
    place = np.where(table == EMPTY, experts, table) + np.arange(len(table))[:, None] * (experts + 1)
    return np.bincount(place.ravel(), minlength=len(table) * (experts + 1)).reshape(len(table), -1)


class SlotHolders:
    """Slots that hold each expert of a table. A layer is read when it is first asked for.

    Lists are made of the experts asked for alone: many thousands would keep the garbage collector busy.
    """

    def __init__(self, table: SlotTable, experts: int) -> None:
        self._table, self._experts = table, experts
        self._rows: dict[int, list[int]] = {}
        self._sorted: dict[int, tuple[list[int], list[int]]] = {}
        """Of each layer, slots by expert, and where each expert's begin; first EMPTY's."""
        self._slots: dict[tuple[int, int], list[int]] = {}

    def of(self, layer: int, expert: int) -> list[int]:
        """Return the slots that hold an expert, or none (EMPTY), in any order."""
        found = self._slots.get((layer, expert))
        if found is None:
            if layer not in self._rows:
                self._read(layer)
            order, first = self._sorted[layer]
            found = self._slots[layer, expert] = order[first[expert + 1] : first[expert + 2]]
        return found

    def put(self, layer: int, slot: int, expert: int) -> None:
        """Put an expert, or none, into a slot."""
        into = self.of(layer, expert)
        row = self._rows[layer]
        self.of(layer, row[slot]).remove(slot)
        into.append(slot)
        row[slot] = expert

    def _read(self, layer: int) -> None:
        row = self._table[layer]
        counts = np.bincount(row.astype(np.intp) + 1, minlength=self._experts + 1)
        self._sorted[layer] = np.argsort(row, kind="stable").tolist(), [0, *counts.cumsum().tolist()]
        self._rows[layer] = row.tolist()


class CopySources:
    """Choose the source of each copy in one handover: the nearest live holder, then the one with fewest
    reads so far."""

    def __init__(self, holders: SlotHolders, per: int, room: StagingRoom, limits: Constraints) -> None:
        self._holders, self._per = holders, per
        self._node, self._bytes = room.node.tolist(), room.expert_bytes
        self._live = [True] * len(self._node) if limits.live is None else limits.live.tolist()
        self._given = [0] * len(self._node)

    def copy(self, layer: int, expert: int, slot: int) -> Copy:
        """Return the copy of an expert to a slot.

        Among equal sources, ranks read from the one that follows them, so that not all read from the first.
        """
        rank, ranks = slot // self._per, len(self._node)
        best: tuple[tuple[int, int, int], int] | None = None
        for source in self._holders.of(layer, expert):
            holder = source // self._per
            if self._live[holder]:
                far = (self._node[holder] != self._node[rank]) + (holder != rank)
                found = ((far, self._given[holder], (holder - rank) % ranks), source)
                if best is None or found < best:
                    best = found
        if best is None:
            return Copy(expert=expert, slot=slot, link="checkpoint", bytes=self._bytes)
        holder = best[1] // self._per
        self._given[holder] += 1
        link: Link = "same-node" if self._node[holder] == self._node[rank] else "cross-node"
        return Copy(expert=expert, slot=slot, source=best[1], link=link, bytes=self._bytes)
