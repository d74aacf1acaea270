"""Return the changes that lead from one table to another, legal after each of them. Pure.

Free slots move: an expert that comes into one leaves another, which is free in turn. So changes follow the
free slots along closed trails (Hierholzer 1873) that begin and end where a rank has a slot to spare, and each
copy is one that the end needs. Where no free slot ever arrives, experts exchange places in a ring. A ring
starts from an expert that is also held elsewhere, or, where there is none, uses swaps: those are the only
copies beyond what the end needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.experts import ExpertId
from fleet.placement import EMPTY
from migration.model.placement_changes import (
    COPIES,
    NONE,
    NOWHERE,
    ChangeKind,
    PlacementChanges,
    joined,
    made,
    taken,
)

_Row = tuple[int, int, int, int, int]
"""(kind, slot, expert, other slot, other expert)."""
_Edge = tuple[int, int]
"""(expert, slot): an expert that a rank must get, and the slot that it leaves for that; NOWHERE: it leaves
none.

(EMPTY, slot): a slot that is free from the start. (EMPTY, NOWHERE): the slot stays empty.
"""


def between(
    before: SlotTable, after: SlotTable, ranks: int, gain: NDArray[np.float64] | None = None
) -> PlacementChanges:
    """Return changes after which every rank holds what it holds in `after`; experts that stay on a rank keep
    their slots.

    Every expert of a layer keeps a replica throughout, and never has more than in either table; while rings
    are turned, one may have one less than in both. gain: float64 [layers], total gain of each layer's
    changes; divided evenly among its copies. ValueError when the tables cannot be compared, or an expert is
    missing from one of them.
    """
    if before.shape != after.shape or before.shape[1] % ranks:
        raise ValueError(
            f"difference: tables of shapes {before.shape} and {after.shape} on {ranks} ranks cannot be"
            " compared"
        )
    found = [(layer, row) for layer, one in _layers(before, after, ranks) for row in one.rows()]
    if not found:
        return NONE
    table = np.array([(layer, *row) for layer, row in found])
    kind, layers = table[:, 1].astype(np.uint8), table[:, 0].astype(np.int32)
    copies = COPIES[kind].astype(np.float64)
    # Layers without copies (drops only) divide the gain among all their changes.
    part = np.where(np.bincount(layers, copies, len(before))[layers] > 0, copies, 1.0)
    each = (
        np.zeros(len(before))
        if gain is None
        else gain / np.maximum(np.bincount(layers, part, len(before)), 1.0)
    )
    slot, expert, other_slot, other_expert = table[:, 2:].T
    return PlacementChanges(
        kind,
        layers,
        slot.astype(np.int32),
        expert.astype(np.int16),
        other_slot.astype(np.int32),
        other_expert.astype(np.int16),
        each[layers] * part,
    )


def shortened(table: SlotTable, changes: PlacementChanges, ranks: int) -> PlacementChanges:
    """Replace a layer's changes by others with the same end and fewer copies, where there are any.

    The result copies no replica that later changes of its layer take back. Its gain is the layer's, in even
    parts. An expert may end in another slot of its rank.
    """
    layers = len(table)
    gain = np.asarray(np.bincount(changes.layer, changes.gain, layers), np.float64)
    others = between(table, made(table, changes), ranks, gain)
    fewer = np.bincount(others.layer, others.copies, layers) < np.bincount(
        changes.layer, changes.copies, layers
    )
    return joined([taken(changes, ~fewer[changes.layer]), taken(others, fewer[others.layer])])


def _layers(before: SlotTable, after: SlotTable, ranks: int) -> Iterator[tuple[int, "_Layer"]]:
    """Yield the layers in which ranks hold different experts after than before."""
    per, experts = before.shape[1] // ranks, max(int(before.max()), int(after.max()), 0) + 1
    rank = np.arange(before.shape[1]) // per
    was, goal = (_held(table, rank, ranks, experts) for table in (before, after))
    _check(was, goal)
    layer, to, expert = np.nonzero(goal & ~was)
    filled = before != EMPTY
    stays = goal[np.arange(len(before))[:, None], rank, np.where(filled, before, 0)]
    from_layer, from_slot = np.nonzero(filled & ~stays)
    leaves, unneeded = _matched(
        layer * experts + expert, from_layer * experts + before[from_layer, from_slot], from_slot
    )
    free = ~filled
    free[from_layer[unneeded], from_slot[unneeded]] = True
    # Slots of each rank that stay empty at the end: trails end there.
    ends = (free | (filled & ~stays)).reshape(len(before), ranks, per).sum(axis=2) - (goal & ~was).sum(axis=2)
    bounds = np.searchsorted(layer, np.arange(len(before) + 1)).tolist()
    for at in np.flatnonzero(ends.any(axis=1) | np.diff(bounds).astype(bool)).tolist():
        edges: list[list[_Edge]] = [[(EMPTY, NOWHERE)] * count for count in ends[at].tolist()]
        here = slice(bounds[at], bounds[at + 1])
        for place, *edge in zip(to[here].tolist(), expert[here].tolist(), leaves[here].tolist(), strict=True):
            edges[place].append((edge[0], edge[1]))
        edges.append([(EMPTY, slot) for slot in np.flatnonzero(free[at]).tolist()])
        yield at, _Layer(per, before[at].tolist(), was[at].sum(axis=0).tolist(), edges)


def _held(table: SlotTable, rank: NDArray[np.intp], ranks: int, experts: int) -> NDArray[np.bool_]:
    """bool [layers, ranks, experts]."""
    held = np.zeros((len(table), ranks, experts), bool)
    layer, slot = np.nonzero(table != EMPTY)
    held[layer, rank[slot], table[layer, slot]] = True
    return held


def _check(was: NDArray[np.bool_], goal: NDArray[np.bool_]) -> None:
    """Raise ValueError unless every expert is in both tables."""
    missing = np.argwhere(was.any(axis=1) != goal.any(axis=1))
    if len(missing):
        layer, expert = missing[0].tolist()
        when = (
            "after; every expert needs a replica"
            if was[layer, :, expert].any()
            else "before; its weights can be copied from no rank"
        )
        raise ValueError(f"difference: expert {ExpertId(layer, expert)} is nowhere {when}")


def _matched(
    comes: NDArray[np.intp], goes: NDArray[np.intp], slot: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Match experts that come with slots that the same expert leaves, the nth of a kind with the nth.

    Returns ([n] the slot that it leaves; NOWHERE: none) and (bool [m], departures without a match). comes,
    goes: kinds.
    """
    come, go = ((kind, _nth(kind)) for kind in (comes, goes))
    most = 1 + max(int(nth.max(initial=0)) for _, nth in (come, go))
    sought, there = (kind * most + nth for kind, nth in (come, go))
    order = np.argsort(there)
    at = np.searchsorted(there[order], sought)
    known = at < len(there)
    known[known] = there[order[at[known]]] == sought[known]
    leaves = np.full(len(comes), NOWHERE)
    leaves[known] = slot[order[at[known]]]
    unneeded = np.ones(len(goes), bool)
    unneeded[order[at[known]]] = False
    return leaves, unneeded


def _nth(kind: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return for each element the number of equal ones before it."""
    order = np.argsort(kind, kind="stable")
    ordered = kind[order]
    found = np.empty(len(kind), np.intp)
    found[order] = np.arange(len(kind)) - np.searchsorted(ordered, ordered)
    return found


@dataclass(slots=True, eq=False)
class _Layer:
    """One layer, on its way from one row of slots to another."""

    per: int
    row: list[int]
    """Expert of each slot."""
    held: list[int]
    """Replicas of each expert."""
    edges: list[list[_Edge]]
    """Remaining edges, by rank; last: the free slots, which come from nowhere."""
    made: list[_Row] = field(default_factory=list)

    def rows(self) -> list[_Row]:
        """Return the changes, in order."""
        self._follow_free_slots()
        self._turn_rings()
        return self.made

    # Along trails

    def _follow_free_slots(self) -> None:
        """Walk everything that free slots can reach, in one closed trail through 'nowhere', where they begin
        and end."""
        stack: list[_Edge] = [(EMPTY, NOWHERE)]
        trail: list[_Edge] = []
        while stack:
            # Hierholzer's algorithm with an explicit stack. NOWHERE is -1, the index of the last list.
            waiting = self.edges[stack[-1][1] // self.per]
            if waiting:
                stack.append(waiting.pop())
            else:
                trail.append(stack.pop())
        self._walk(trail[-2::-1])

    def _walk(self, trail: list[_Edge]) -> None:
        """Fill the free slot that moves along the trail."""
        slot = NOWHERE
        for expert, leaves in trail:
            if slot != NOWHERE and expert != EMPTY:
                self._bring(slot, expert, leaves)
            elif slot != NOWHERE and self.row[slot] != EMPTY:
                self.made.append((int(ChangeKind.DROP), slot, EMPTY, NOWHERE, EMPTY))
                self._put(slot, EMPTY)
            slot = leaves

    def _bring(self, slot: int, expert: int, leaves: int) -> None:
        self.made.append(
            (int(ChangeKind.REPLICATE if leaves == NOWHERE else ChangeKind.MOVE), slot, expert, leaves, EMPTY)
        )
        self._put(slot, expert)
        if leaves != NOWHERE:
            self._put(leaves, EMPTY)

    def _put(self, slot: int, expert: int) -> None:
        before = self.row[slot]
        if before != EMPTY:
            self.held[before] -= 1
        if expert != EMPTY:
            self.held[expert] += 1
        self.row[slot] = expert

    # In rings

    def _turn_rings(self) -> None:
        """Rotate the rings that no free slot reaches: slot after slot gets the expert of the next one in its
        ring."""
        for rank in range(len(self.edges) - 1):
            while self.edges[rank]:
                self._turn(self._ring(rank))

    def _ring(self, rank: int) -> list[int]:
        """Remove one ring of ranks from the remaining edges; return its slots, each of which gets what the
        next one holds."""
        ranks, edges = [rank], list[_Edge]()
        while True:
            edges.append(self._next(ranks))
            target = edges[-1][1] // self.per
            if target in ranks:
                first = ranks.index(target)
                for at, unused in zip(ranks[:first], edges[:first], strict=True):
                    self.edges[at].append(unused)
                ring = [leaves for _, leaves in edges[first:]]
                return [ring[-1], *ring[:-1]]
            ranks.append(target)

    def _next(self, ranks: list[int]) -> _Edge:
        """Prefer the edge back to the rank it came from: two ranks that exchange experts copy nothing in
        vain."""
        options = self.edges[ranks[-1]]
        back = [
            at for at, (_, leaves) in enumerate(options) if len(ranks) > 1 and leaves // self.per == ranks[-2]
        ]
        return options.pop(back[-1] if back else -1)

    def _turn(self, ring: list[int]) -> None:
        # An expert with another holder may be overwritten first and copied last: no swap is needed.
        spare = next((at for at, slot in enumerate(ring) if self.held[self.row[slot]] > 1), None)
        if spare is not None:
            ring = ring[spare:] + ring[:spare]
            first = self.row[ring[0]]
            for slot, other in pairwise(ring):
                self._bring(slot, self.row[other], other)
            self._bring(ring[-1], first, NOWHERE)
            return
        for slot, other in pairwise(ring):
            mine, theirs = self.row[slot], self.row[other]
            self.made.append((int(ChangeKind.SWAP), slot, theirs, other, mine))
            self.row[slot], self.row[other] = theirs, mine
