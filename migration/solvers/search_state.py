"""Placements of many layers while they are changed: who holds what, how loaded ranks are, and what that is worth. Pure.

The penalty of a layer is summed over its ranks. That of a load above the layer's cap is its excess and something for being above at all, as every rank
that is takes a change to relieve; below the cap it is a small square of what is missing to it, so that room lies where the next excess fits in. Loads are
relative to the mean rank's; `over` is by how much one exceeds the cap. Replicas share an expert's load evenly.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Flags = NDArray[np.bool_]
ROOM = 10.0
"""weight of the square of a rank's room below the cap, against excess over it"""
DEEP = 0.5
"""weight of room itself, where that is less: a rank may well be emptied to make another lighter"""
ABOVE, SLOPE = 0.05, 25.0
"""what a rank pays for being above the cap, and how steeply it comes to that"""
ENDLESS = 1 << 20
"""replicas of what may be replaced at will: an empty slot"""


@dataclass(slots=True)
class SearchState:
    """Layers that are worked on. Each layer's experts have one more among them, the last, that stands for an empty slot."""

    ranks: int
    per: int
    """slots of a rank"""
    most_replicas: int
    away: Flags
    """[ranks]: dead"""
    layer: Index
    """number of each layer"""
    expert: Index
    """[layers, slots]; slots of dead ranks as if empty"""
    load: Array
    """[layers, experts + 1]"""
    replicas: Array
    """[layers, experts + 1]"""
    least: Array
    """[layers, experts + 1]: an expert with more replicas than this may lose one"""
    fixed: Flags
    """[layers, experts + 1]: replicas stay where they are, and no more are made"""
    cap: Array
    """[layers]: most load of a rank that is good enough"""
    first: Index
    """[layers, slots]: `expert` before any change"""
    fresh: Flags
    """[layers, slots]: the expert was not on the rank at first"""
    inviting: Flags
    """[layers, ranks]: has such a slot"""
    held: Flags
    """[layers, experts + 1, ranks]: who holds what"""
    each: Array
    """[layers, experts + 1]: load of each replica"""
    over: Array
    """[layers, ranks]"""
    pays: Array
    """[layers, ranks]: penalty"""

    @property
    def empty(self) -> int:
        """number of the expert that stands for an empty slot"""
        return int(self.load.shape[1]) - 1

    @property
    def penalty(self) -> Array:
        """[layers]: what is to fall"""
        return np.asarray(self.pays.sum(axis=1))

    def measure(self) -> None:
        """Brings `over` and `pays` up to date with `expert` and `each`."""
        start = np.arange(0, self.load.size, self.empty + 1)[:, None]
        share = np.take(self.each, self.expert + start).reshape(len(self.layer), self.ranks, self.per)
        self.over = share @ np.ones(self.per) - self.cap[:, None]
        self.pays = penalty(self.over)

    def lower(self, rows: Index, by: Array) -> None:
        """Lowers the caps of some layers."""
        self.cap[rows] -= by
        self.over[rows] += by[:, None]
        self.pays[rows] = penalty(self.over[rows])

    def put(self, rows: Index, slot: Index, expert: Index) -> None:
        """An expert into a slot of each of these layers; a layer may come more than once, with other slots."""
        rank, at = slot // self.per, rows[:, None]
        self.held[rows, self.expert[rows, slot], rank] = False
        self.expert[rows, slot] = expert
        self.held[rows, expert, rank] = True
        beside = (rank * self.per)[:, None] + np.arange(self.per)
        self.fresh[rows, slot] = (expert != self.empty) & (self.first[at, beside] != expert[:, None]).all(axis=1)
        self.inviting[rows, rank] = self.fresh[at, beside].any(axis=1)

    def count(self, rows: Index, expert: Index, more: Array) -> None:
        """So many more replicas of an expert of each of these layers; a layer may come more than once, with other experts."""
        self.replicas[rows, expert] += more
        self.each[rows, expert] = self.load[rows, expert] / self.replicas[rows, expert]

    def taken(self, which: Flags) -> "SearchState":
        """Some of the layers."""
        arrays: dict[str, Any] = {name: getattr(self, name)[which] for name in PER_LAYER}
        return replace(self, **arrays)


PER_LAYER = tuple(field.name for field in fields(SearchState) if field.name not in ("ranks", "per", "most_replicas", "away"))


def penalty(over: NDArray[Any]) -> NDArray[Any]:
    """Of loads by how much they exceed the cap (below 0: their room)."""
    paid = over * (1.0 + SLOPE)
    other = over + ABOVE
    np.minimum(paid, other, out=paid)
    np.multiply(over, over, out=other)
    other *= ROOM
    np.minimum(other, over * -DEEP, out=other)  # below 0 where above the cap
    return np.asarray(np.maximum(paid, other, out=paid))
