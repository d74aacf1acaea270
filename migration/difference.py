"""The changes that lead from one table to another, legal after each of them. Pure.

Free slots wander: what comes into one leaves another, which is free in turn. So changes follow the free slots along closed trails (Hierholzer
1873) that begin and end where a rank has a slot to spare, and each copy is one that the end needs. Where no free slot ever comes, experts that
change places in a ring do so from one that is held elsewhere too, or, where there is none, by swaps: those are the only copies beyond what the
end needs.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY
from migration.changes import COPIES, NONE, NOWHERE, Changes, Kind, Table, joined, made, taken

_Row = tuple[int, int, int, int, int]
"""kind, slot, expert, other slot, other expert"""


class _Arrival(NamedTuple):
    """An expert that a rank must get."""

    expert: int
    leaves: int
    """slot that it leaves for this; NOWHERE: it leaves none, or nothing arrives and a slot becomes empty (`expert` is EMPTY)"""


def between(before: Table, after: Table, ranks: int, gain: NDArray[np.float64] | None = None) -> Changes:
    """Changes after which every rank holds what it holds in `after`; what stays on a rank stays in its slot.

    Every expert of a layer keeps a replica throughout, and never has more than in the one or the other table; where rings are turned one may have
    one less than in both for a while.
    gain: float64 [layers], what each layer gains by all of its changes; shared out evenly over its copies. ValueError when the tables cannot be
    compared, or an expert is missing from one of them.
    """
    if before.shape != after.shape or before.shape[1] % ranks:
        raise ValueError(f"difference: tables of shapes {before.shape} and {after.shape} on {ranks} ranks cannot be compared")
    per = before.shape[1] // ranks
    found = [(layer, row) for layer in np.flatnonzero((before != after).any(axis=1)).tolist() for row in _Layer(before[layer], after[layer], per).rows()]
    if not found:
        return NONE
    table = np.array([(layer, *row) for layer, row in found])
    kind, layers = table[:, 1].astype(np.uint8), table[:, 0].astype(np.int32)
    copies = COPIES[kind].astype(np.float64)
    part = np.where(np.bincount(layers, copies, len(before))[layers] > 0, copies, 1.0)
    each = np.zeros(len(before)) if gain is None else gain / np.maximum(np.bincount(layers, part, len(before)), 1.0)
    slot, expert, other_slot, other_expert = table[:, 2:].T
    return Changes(
        kind,
        layers,
        slot.astype(np.int32),
        expert.astype(np.int16),
        other_slot.astype(np.int32),
        other_expert.astype(np.int16),
        each[layers] * part,
    )


def shortened(table: Table, changes: Changes, ranks: int) -> Changes:
    """Changes to what ranks hold after `changes`, layer by layer the others that copy less, if there are any: then no replica is copied that later
    changes of its layer take back. Their gain is the layer's, in even parts. In which slot of its rank an expert ends may differ."""
    layers = len(table)
    gain = np.asarray(np.bincount(changes.layer, changes.gain, layers), np.float64)
    others = between(table, made(table, changes), ranks, gain)
    fewer = np.bincount(others.layer, others.copies, layers) < np.bincount(changes.layer, changes.copies, layers)
    return joined([taken(changes, ~fewer[changes.layer]), taken(others, fewer[others.layer])])


class _Layer:
    """One layer, on its way from one row of slots to another."""

    def __init__(self, before: Table, after: Table, per: int) -> None:
        self._per = per
        self._row: list[int] = before.tolist()
        self._held = [0] * (int(max(before.max(), after.max())) + 1)
        for expert in self._row:
            if expert != EMPTY:
                self._held[expert] += 1
        self._rows: list[_Row] = []
        self._arrivals, self._free = self._edges(before, after)

    def rows(self) -> list[_Row]:
        """The changes, in order."""
        self._follow_free_slots()
        self._turn_rings()
        return self._rows

    def _edges(self, before: Table, after: Table) -> tuple[list[list[_Arrival]], list[int]]:
        """What each rank must get, and the slots that are free from the start: empty, or of a replica that goes for nothing."""
        ranks, per = len(before) // self._per, self._per
        pairs = [{(slot // per, expert): slot for slot, expert in enumerate(row.tolist()) if expert != EMPTY} for row in (before, after)]
        leaving: list[list[int]] = [[] for _ in self._held]
        for (rank, expert), slot in pairs[0].items():
            if (rank, expert) not in pairs[1]:
                leaving[expert].append(slot)
        coming: list[list[_Arrival]] = [[] for _ in range(ranks)]
        free = np.flatnonzero(before == EMPTY).tolist()
        for rank, expert in pairs[1]:
            if (rank, expert) not in pairs[0]:
                if not self._held[expert]:
                    raise ValueError(f"difference: expert {expert} is nowhere before; its weights can be copied from no rank")
                coming[rank].append(_Arrival(expert, leaving[expert].pop() if leaving[expert] else NOWHERE))
        self._check_kept(after)
        free += [slot for slots in leaving for slot in slots]
        for rank in range(ranks):
            room = sum(slot // per == rank for slot in free) + sum(one.leaves // per == rank for all_of in coming for one in all_of if one.leaves != NOWHERE)
            coming[rank] += [_Arrival(EMPTY, NOWHERE)] * (room - len(coming[rank]))
        return coming, free

    def _check_kept(self, after: Table) -> None:
        stays = set(after.tolist())
        for expert, count in enumerate(self._held):
            if count and expert not in stays:
                raise ValueError(f"difference: expert {expert} is nowhere after; every expert needs a replica")

    # Along trails

    def _follow_free_slots(self) -> None:
        """All that free slots can reach, in one closed trail through 'nowhere', where they come from and go to."""
        starts, open_edges = list(self._free), self._arrivals
        stack: list[tuple[int, _Arrival | int | None]] = [(NOWHERE, None)]
        trail: list[_Arrival | int] = []
        while stack:
            at = stack[-1][0]
            if at == NOWHERE and starts:
                slot = starts.pop()
                stack.append((slot // self._per, slot))
            elif at != NOWHERE and open_edges[at]:
                arrival = open_edges[at].pop()
                stack.append((NOWHERE if arrival.leaves == NOWHERE else arrival.leaves // self._per, arrival))
            else:
                edge = stack.pop()[1]
                if edge is not None:
                    trail.append(edge)
        self._walk(trail[::-1])

    def _walk(self, trail: list[_Arrival | int]) -> None:
        """Fill the free slot that wanders along; a number is the slot where one begins."""
        slot = NOWHERE
        for edge in trail:
            if isinstance(edge, int):
                slot = edge
            elif edge.expert != EMPTY:
                self._bring(slot, edge.expert, edge.leaves)
                slot = edge.leaves
            elif self._row[slot] != EMPTY:
                self._rows.append((int(Kind.DROP), slot, EMPTY, NOWHERE, EMPTY))
                self._put(slot, EMPTY)

    def _bring(self, slot: int, expert: int, leaves: int) -> None:
        self._rows.append((int(Kind.REPLICATE if leaves == NOWHERE else Kind.MOVE), slot, expert, leaves, EMPTY))
        self._put(slot, expert)
        if leaves != NOWHERE:
            self._put(leaves, EMPTY)

    def _put(self, slot: int, expert: int) -> None:
        before = self._row[slot]
        if before != EMPTY:
            self._held[before] -= 1
        if expert != EMPTY:
            self._held[expert] += 1
        self._row[slot] = expert

    # In rings

    def _turn_rings(self) -> None:
        """What no free slot reaches: slot after slot gets what is in the next one of its ring."""
        for rank in range(len(self._arrivals)):
            while self._arrivals[rank]:
                self._turn(self._ring(rank))

    def _ring(self, rank: int) -> list[int]:
        """The slots of one ring of ranks, each to get what the next one holds; taken out of what is to be done."""
        ranks, arrivals = [rank], list[_Arrival]()
        while True:
            arrival = self._next(ranks)
            target = arrival.leaves // self._per
            arrivals.append(arrival)
            if target in ranks:
                first = ranks.index(target)
                for at, unused in zip(ranks[:first], arrivals[:first], strict=True):
                    self._arrivals[at].append(unused)
                ring = [one.leaves for one in arrivals[first:]]
                return [ring[-1], *ring[:-1]]
            ranks.append(target)

    def _next(self, ranks: list[int]) -> _Arrival:
        """Back to where it came from, if it can: two that exchange experts copy nothing in vain."""
        options = self._arrivals[ranks[-1]]
        back = [at for at, one in enumerate(options) if len(ranks) > 1 and one.leaves // self._per == ranks[-2]]
        return options.pop(back[-1] if back else -1)

    def _turn(self, ring: list[int]) -> None:
        spare = next((at for at, slot in enumerate(ring) if self._held[self._row[slot]] > 1), None)
        if spare is not None:
            ring = ring[spare:] + ring[:spare]
            first = self._row[ring[0]]
            for slot, other in pairwise(ring):
                self._bring(slot, self._row[other], other)
            self._bring(ring[-1], first, NOWHERE)
            return
        for slot, other in pairwise(ring):
            mine, theirs = self._row[slot], self._row[other]
            self._rows.append((int(Kind.SWAP), slot, theirs, other, mine))
            self._row[slot], self._row[other] = theirs, mine
