"""What planners propose: a series of changes of one placement, each a copy or two, with what each is worth. Pure.

Planners work on tables (`expert_of_slot`, int16 [layers, slots], rank-major, -1 empty) in layers that know nothing of each other. A change
touches one layer. The changes of a layer build on one another in their order; those of different layers are free of each other.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY

Table = NDArray[np.int16]
NOWHERE = -1
"""no second slot"""


class ChangeKind(IntEnum):
    """What a change does."""

    REPLICATE = 0
    """an expert gets one more replica, in an empty slot or in that of another's spare replica: one copy"""
    SWAP = 1
    """two slots of different ranks exchange their experts: two copies"""
    MOVE = 2
    """an expert goes from one rank to an empty slot, or the slot of a spare replica, of another; its old slot becomes empty: one copy"""
    DROP = 3
    """a spare replica is given up, its slot becomes empty: nothing is copied"""


class PlacementChanges(NamedTuple):
    """n changes, in the order in which they were chosen. Arrays of length n unless said otherwise.

    A change writes `expert` into `slot`, and, where `other_slot` is not NOWHERE, `other_expert` (EMPTY for a move) into `other_slot`.
    """

    kind: NDArray[np.uint8]
    layer: NDArray[np.int32]
    slot: NDArray[np.int32]
    expert: NDArray[np.int16]
    """EMPTY for a drop"""
    other_slot: NDArray[np.int32]
    other_expert: NDArray[np.int16]
    gain: NDArray[np.float64]
    """what the layer gains, in the planner's unit (stated by whoever returns them), when the changes of the layer before it are made"""

    @property
    def copies(self) -> NDArray[np.int64]:
        """int64 [n]: experts' weights that each change brings to a rank."""
        return COPIES[self.kind]

    def __bool__(self) -> bool:
        return len(self.kind) > 0


COPIES = np.array([1, 2, 1, 0], np.int64)
"""by Kind"""
NONE = PlacementChanges(
    np.empty(0, np.uint8), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int16), np.empty(0, np.int32), np.empty(0, np.int16), np.empty(0)
)


def made(table: Table, changes: PlacementChanges) -> Table:
    """The table after these changes, in their order; the argument is left as it was."""
    after = table.copy()
    for layer, slot, expert, other_slot, other_expert in zip(*(part.tolist() for part in changes[1:6]), strict=True):
        after[layer, slot] = expert
        if other_slot != NOWHERE:
            after[layer, other_slot] = other_expert
    return after


def taken(changes: PlacementChanges, which: NDArray[np.bool_] | NDArray[np.intp]) -> PlacementChanges:
    """Some of them."""
    return PlacementChanges._make(part[which] for part in changes)


def joined(parts: Sequence[PlacementChanges]) -> PlacementChanges:
    """One series after the other."""
    return PlacementChanges._make(np.concatenate(columns) for columns in zip(*parts, strict=True)) if parts else NONE


def within(changes: PlacementChanges, most_copies: int) -> PlacementChanges:
    """As many as fit into a budget of copies, best gain per copy first; of each layer a beginning of its series, as they build on one another.

    A change's worth is the best mean gain per copy of any run of its layer's series that begins with it: a small step before a large one is not lost.
    """
    if not changes or int(changes.copies.sum()) <= most_copies:
        return changes
    chosen = np.zeros(len(changes.kind), bool)
    runs = sorted((run for layer in np.unique(changes.layer) for run in _runs(changes, np.flatnonzero(changes.layer == layer))), key=lambda run: -run[0])
    left, closed = most_copies, set[int]()
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
    """A layer's series cut into runs of falling mean gain per copy, (mean, members): the upper concave envelope of gain over copies."""
    runs: list[tuple[float, float, list[int]]] = []
    for member in members.tolist():
        gain, cost, run = float(changes.gain[member]), float(COPIES[changes.kind[member]]), [member]
        while runs and gain * runs[-1][1] > runs[-1][0] * cost:
            before = runs.pop()
            gain, cost, run = gain + before[0], cost + before[1], before[2] + run
        runs.append((gain, cost, run))
    mean = [gain / cost if cost else np.inf if gain >= 0 else -np.inf for gain, cost, _ in runs]
    return list(zip(np.minimum.accumulate(mean).tolist(), [np.array(run) for *_, run in runs], strict=True))  # none before what it builds on


def copies_between(before: Table, after: Table, ranks: int) -> int:
    """(layer, rank, expert) that hold an expert's weights after and did not before: what must be copied, wherever in a rank it lies."""
    layers = len(before)
    experts = int(max(before.max(), after.max())) + 1
    held = np.zeros((2, layers, ranks, experts), bool)
    for at, table in enumerate((before, after)):
        layer, slot = np.nonzero(table != EMPTY)
        held[at, layer, slot // (table.shape[1] // ranks), table[layer, slot]] = True
    return int((held[1] & ~held[0]).sum())
