"""Proposed changes of one placement: a series, each with up to two copies and an estimated gain. Pure.

Solvers work on tables (`expert_of_slot`, int16 [layers, slots], rank-major, -1 for empty). Layers are
independent: a change touches one layer. Changes of the same layer build on one another in order.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.placement import EMPTY

NOWHERE = -1
"""no second slot"""


class ChangeKind(IntEnum):
    """Kind of a placement change."""

    REPLICATE = 0
    """add a replica of an expert, in an empty slot or in place of a spare replica: one copy"""
    SWAP = 1
    """exchange the experts of two slots of different ranks: two copies"""
    MOVE = 2
    """move an expert to an empty slot, or the slot of a spare replica, of another rank; its old slot becomes
    empty: one copy"""
    DROP = 3
    """remove a spare replica; its slot becomes empty: no copy"""


class PlacementChanges(NamedTuple):
    """Series of n changes, in the order in which they were chosen. Arrays of length n unless stated
    otherwise.

    A change writes `expert` into `slot`. Unless `other_slot` is NOWHERE, it also writes `other_expert` (EMPTY
    for a move) into `other_slot`.
    """

    kind: NDArray[np.uint8]
    layer: NDArray[np.int32]
    slot: NDArray[np.int32]
    expert: NDArray[np.int16]
    """EMPTY for a drop"""
    other_slot: NDArray[np.int32]
    other_expert: NDArray[np.int16]
    gain: NDArray[np.float64]
    """gain of the layer, given that its previous changes are applied. The unit is that of the solver that
    returned it"""

    @property
    def copies(self) -> NDArray[np.int64]:
        """int64 [n]: expert weights that each change copies to a rank."""
        return COPIES[self.kind]

    def __bool__(self) -> bool:
        return len(self.kind) > 0


COPIES = np.array([1, 2, 1, 0], np.int64)
"""by `ChangeKind`"""
NONE = PlacementChanges(
    np.empty(0, np.uint8),
    np.empty(0, np.int32),
    np.empty(0, np.int32),
    np.empty(0, np.int16),
    np.empty(0, np.int32),
    np.empty(0, np.int16),
    np.empty(0),
)


def made(table: SlotTable, changes: PlacementChanges) -> SlotTable:
    """Return the table after these changes, applied in order. The argument is not modified."""
    after = table.copy()
    two = changes.other_slot != NOWHERE
    which = np.repeat(np.arange(len(two)), 1 + two)
    second = np.zeros(len(which), bool)
    second[1:] = which[1:] == which[:-1]
    at = changes.layer[which].astype(np.intp) * table.shape[1] + np.where(
        second, changes.other_slot[which], changes.slot[which]
    )
    # Of several changes of a slot the last one counts.
    last = np.full(table.size, -1)
    np.maximum.at(last, at, np.arange(len(at)))
    slots = np.flatnonzero(last >= 0)
    expert = np.where(second, changes.other_expert[which], changes.expert[which])
    after.reshape(-1)[slots] = expert[last[slots]]
    return after


def taken(changes: PlacementChanges, which: NDArray[np.bool_] | NDArray[np.intp]) -> PlacementChanges:
    """Select a subset of the changes."""
    return PlacementChanges._make(part[which] for part in changes)


def joined(parts: Sequence[PlacementChanges]) -> PlacementChanges:
    """Concatenate several series."""
    return (
        PlacementChanges._make(np.concatenate(columns) for columns in zip(*parts, strict=True))
        if parts
        else NONE
    )


def within(changes: PlacementChanges, max_copies: int) -> PlacementChanges:
    """Choose the changes that fit into a copy budget, best gain per copy first.

    Only a prefix of each layer's series can be chosen, because its changes build on one another. The priority
    of a change is the best mean gain per copy of any run that starts with it. A small step before a large one
    is therefore not lost.
    """
    if not changes or int(changes.copies.sum()) <= max_copies:
        return changes
    chosen = np.zeros(len(changes.kind), bool)
    runs = sorted(
        (
            run
            for layer in np.unique(changes.layer)
            for run in _runs(changes, np.flatnonzero(changes.layer == layer))
        ),
        key=lambda run: -run[0],
    )
    left, closed = max_copies, set[int]()
    for _, members in runs:
        layer = int(changes.layer[members[0]])
        for member in members.tolist() if layer not in closed else ():
            cost = int(COPIES[changes.kind[member]])
            if cost > left:
                closed.add(layer)
                break
            chosen[member] = True
            left -= cost
    return taken(changes, chosen)


def _runs(changes: PlacementChanges, members: NDArray[np.intp]) -> list[tuple[float, NDArray[np.intp]]]:
    """Cut a layer's series into runs of falling mean gain per copy: the upper concave envelope of gain over
    copies.

    Returns (mean, members) for each run.
    """
    runs: list[tuple[float, float, list[int]]] = []
    for member in members.tolist():
        gain, cost, run = float(changes.gain[member]), float(COPIES[changes.kind[member]]), [member]
        while runs and gain * runs[-1][1] > runs[-1][0] * cost:
            before = runs.pop()
            gain, cost, run = gain + before[0], cost + before[1], before[2] + run
        runs.append((gain, cost, run))
    mean = [gain / cost if cost else np.inf if gain >= 0 else -np.inf for gain, cost, _ in runs]
    # a run never precedes one it builds on
    return list(zip(np.minimum.accumulate(mean).tolist(), [np.array(run) for *_, run in runs], strict=True))


def copies_by_layer(before: SlotTable, after: SlotTable, ranks: int) -> NDArray[np.int64]:
    """int64 [layers]: (rank, expert) pairs held after but not before: the necessary copies, wherever they lie
    in a rank. No rank holds an expert twice."""
    old, new = (table.reshape(len(table), ranks, -1) for table in (before, after))
    stays = (new[:, :, :, None] == old[:, :, None, :]).any(axis=3)
    return np.asarray(((new != EMPTY) & ~stays).sum(axis=(1, 2)), np.int64)


def copies_between(before: SlotTable, after: SlotTable, ranks: int) -> int:
    """Count the (layer, rank, expert) triples held after but not before: the necessary copies, wherever they
    lie in a rank."""
    layers = len(before)
    experts = int(max(before.max(), after.max())) + 1
    held = np.zeros((2, layers, ranks, experts), bool)
    for at, table in enumerate((before, after)):
        layer, slot = np.nonzero(table != EMPTY)
        held[at, layer, slot // (table.shape[1] // ranks), table[layer, slot]] = True
    return int((held[1] & ~held[0]).sum())
