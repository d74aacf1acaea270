"""State of a placement search over many layers: holders, rank loads, and the penalty that the search lowers.
Pure.

The penalty of a layer is summed over its ranks. A load above the layer's cap costs its excess, plus a
constant for being above at all, as every such rank takes a change to relieve. A load below the cap costs a
small square of its distance from the cap, so that room is concentrated where the next excess fits in. Loads
are relative to the mean rank's; `over` is the load minus the cap. Replicas share an expert's load evenly.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IndexArray

ROOM = 10.0
"""Weight of the square of a rank's room below the cap, against excess over it."""
DEEP = 0.5
"""Weight of room itself, used where that is less: emptying a rank to relieve another one is fine."""
ABOVE, SLOPE = 0.05, 25.0
"""Constant penalty of a rank above the cap, and the slope with which it sets in."""
ENDLESS = 1 << 20
"""Number of replicas assigned to an empty slot, so that it counts as replaceable at any time."""


@dataclass(slots=True)
class SearchState:
    """Layers being searched. An additional last expert of each layer stands for an empty slot."""

    ranks: int
    per: int
    """Slots of a rank."""
    max_replicas: int
    away: BoolArray
    """[ranks]: dead."""
    layer: IndexArray
    """Number of each layer."""
    expert: IndexArray
    """[layers, slots]; slots of dead ranks count as empty."""
    load: FloatArray
    """[layers, experts + 1]"""
    replicas: FloatArray
    """[layers, experts + 1]"""
    least: FloatArray
    """[layers, experts + 1]: an expert with more replicas than this may lose one."""
    fixed: BoolArray
    """[layers, experts + 1]: replicas stay where they are, and none are added."""
    cap: FloatArray
    """[layers]: highest acceptable load of a rank."""
    first: IndexArray
    """[layers, slots]: `expert` before any change."""
    fresh: BoolArray
    """[layers, slots]: the expert was not on the rank initially."""
    inviting: BoolArray
    """[layers, ranks]: the rank has such a slot."""
    held: BoolArray
    """[layers, experts + 1, ranks]: True if the rank holds the expert."""
    each: FloatArray
    """[layers, experts + 1]: load of each replica."""
    over: FloatArray
    """[layers, ranks]"""
    pays: FloatArray
    """[layers, ranks]: penalty."""
    full: bool = False
    """No slot may become empty."""

    @property
    def empty(self) -> int:
        """Number of the expert that stands for an empty slot."""
        return int(self.load.shape[1]) - 1

    @property
    def penalty(self) -> FloatArray:
        """[layers]: the objective, to be minimised."""
        return np.asarray(self.pays.sum(axis=1))

    def measure(self) -> None:
        """Recompute `over` and `pays` from `expert` and `each`."""
        start = np.arange(0, self.load.size, self.empty + 1)[:, None]
        share = np.take(self.each, self.expert + start).reshape(len(self.layer), self.ranks, self.per)
        self.over = share @ np.ones(self.per) - self.cap[:, None]
        self.pays = penalty(self.over)

    def lower(self, rows: IndexArray, by: FloatArray) -> None:
        """Lower the caps of some layers."""
        self.cap[rows] -= by
        self.over[rows] += by[:, None]
        self.pays[rows] = penalty(self.over[rows])

    def put(self, rows: IndexArray, slot: IndexArray, expert: IndexArray) -> None:
        """Put an expert into a slot of each of these layers; a layer may occur more than once, with different
        slots."""
        rank, at = slot // self.per, rows[:, None]
        self.held[rows, self.expert[rows, slot], rank] = False
        self.expert[rows, slot] = expert
        self.held[rows, expert, rank] = True
        beside = (rank * self.per)[:, None] + np.arange(self.per)
        self.fresh[rows, slot] = (expert != self.empty) & (self.first[at, beside] != expert[:, None]).all(
            axis=1
        )
        self.inviting[rows, rank] = self.fresh[at, beside].any(axis=1)

    def count(self, rows: IndexArray, expert: IndexArray, more: FloatArray) -> None:
        """Add `more` replicas of an expert in each of these layers; a layer may occur more than once, with
        different experts."""
        self.replicas[rows, expert] += more
        self.each[rows, expert] = self.load[rows, expert] / self.replicas[rows, expert]

    def taken(self, which: BoolArray) -> "SearchState":
        """Return the state of some of the layers."""
        arrays: dict[str, Any] = {name: getattr(self, name)[which] for name in PER_LAYER}
        return replace(self, **arrays)


_OF_ALL = ("ranks", "per", "max_replicas", "away", "full")
PER_LAYER = tuple(field.name for field in fields(SearchState) if field.name not in _OF_ALL)


def penalty(over: NDArray[Any]) -> NDArray[Any]:
    """Return the penalty of loads, given as their excess over the cap (below 0: their room)."""
    paid = over * (1.0 + SLOPE)
    other = over + ABOVE
    np.minimum(paid, other, out=paid)
    np.multiply(over, over, out=other)
    other *= ROOM
    # Negative above the cap, so the maximum below picks the right branch.
    np.minimum(other, over * -DEEP, out=other)
    return np.asarray(np.maximum(paid, other, out=paid))
