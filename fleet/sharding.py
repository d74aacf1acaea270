"""Sharded layers: where the parts of their experts lie, and what moves when a layer turns over. Pure.

An engine of P ranks cuts each expert of a sharded layer into P parts, and rank r holds part r of every
expert. A rank's expert memory is made of cells of equal size. In a *whole* layer a cell holds one expert. In
a sharded layer a cell holds a *group*, the rank's parts of P experts: expert e is the (e mod P)-th of group
e div P. So a sharded layer fills ceil(E / P) cells, never more than a whole layer has slots.

To *turn a layer over* is to change its form by a handover: into sharded, every rank gets its part of every
expert; into whole, it gets all P parts of the experts that its slots are to hold. Parts that the rank holds
already are copied within its memory.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import IntArray
from fleet.placement import EMPTY, Placement

ALL_PARTS = -1
"""In place of the number of a part: the whole expert."""


def groups(experts: int, ranks: int) -> int:
    """Return the cells that a rank needs for a sharded layer: ceil(experts / ranks)."""
    return -(-experts // ranks)


def group_of(expert: int, ranks: int) -> tuple[int, int]:
    """Return (group of an expert in a sharded layer, its position in the group)."""
    return divmod(expert, ranks)


def contents(placement: Placement, rank: int) -> NDArray[np.int16]:
    """Return what a rank's slots hold: int16 [layers, slots_per_rank], -1 for nothing.

    In a whole layer it is the number of an expert; in a sharded layer the number of a group, which lie in
    order in the first slots.
    """
    held = placement.on_rank(rank).copy()
    held[list(placement.sharded)] = EMPTY
    count = groups(placement.experts, placement.ranks)
    for layer in placement.sharded:
        held[layer, :count] = np.arange(count)
    return held


class PartCopies(NamedTuple):
    """Parts of experts to copy, from memory of one rank into memory of another, or within one. Arrays int
    [n], ordered by layer, destination, expert and part.
    """

    layer: IntArray
    expert: IntArray
    part: IntArray
    source: IntArray
    """rank to read from"""
    destination: IntArray
    """rank that gets the part"""

    @property
    def is_local(self) -> NDArray[np.bool_]:
        """Parts that their rank holds already, in the layer's other form: bool [n]."""
        return np.asarray(self.source == self.destination)

    def to(self, rank: int) -> "PartCopies":
        """Return the copies that a rank makes."""
        return self.where(self.destination == rank)

    def where(self, chosen: NDArray[np.bool_]) -> "PartCopies":
        """Return some of the copies. chosen: bool [n]."""
        return PartCopies(*(column[chosen] for column in self))


def turned(before: Placement, after: Placement) -> tuple[int, ...]:
    """Return the layers whose form differs, ascending; none for an engine of one rank, whose forms
    coincide."""
    if after.ranks == 1:
        return ()
    return tuple(sorted(set(before.sharded) ^ set(after.sharded)))


def turn(before: Placement, after: Placement) -> PartCopies:
    """Return the copies that turn layers over between two placements of one engine.

    Each part of a sharded layer is on one rank, so a layer that becomes whole reads part p from rank p. A
    layer that becomes sharded reads a rank's part of an expert from the rank itself if it holds the expert,
    and otherwise from the holder that has been read least in the layer (the lowest rank of several).

    ValueError if the placements are of different engines.
    """
    shapes = [(one.layers, one.experts, one.ranks, one.slots_per_rank) for one in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"turn: {before!r} and {after!r} are not of one engine")
    parts = [
        _into_sharded(before, layer) if layer in after.sharded else _into_whole(after, layer)
        for layer in turned(before, after)
    ]
    columns = np.concatenate([np.zeros((0, 5), np.int64), *parts])
    order = np.lexsort((columns[:, 2], columns[:, 1], columns[:, 4], columns[:, 0]))
    return PartCopies(*columns[order].T)


def _into_sharded(before: Placement, layer: int) -> IntArray:
    """Return [experts * ranks, 5], the columns of `PartCopies`, of a layer that becomes sharded."""
    ranks, experts = before.ranks, before.experts
    holds = before.replicas_on_rank[layer].astype(bool)  # [ranks, experts]
    source = np.where(holds, np.arange(ranks)[:, None], EMPTY)  # [destinations, experts]
    read = np.zeros(ranks, np.int64)
    for expert in range(experts):
        holders = np.flatnonzero(holds[:, expert])
        lacking = np.flatnonzero(~holds[:, expert])
        if len(holders) == 1:  # no choice: the common case
            source[lacking, expert] = holders[0]
            read[holders[0]] += len(lacking)
            continue
        for reader in lacking.tolist():
            chosen = holders[np.argmin(read[holders])]
            source[reader, expert] = chosen
            read[chosen] += 1
    number, destination = np.divmod(np.arange(experts * ranks), ranks)
    columns = np.broadcast_arrays(layer, number, destination, source.T.ravel(), destination)
    return np.stack(columns, axis=1)


def _into_whole(after: Placement, layer: int) -> IntArray:
    """Return [replicas * ranks, 5] of a layer that becomes whole."""
    rank, expert = np.nonzero(after.replicas_on_rank[layer])
    part = np.arange(after.ranks)
    columns = np.broadcast_arrays(layer, expert[:, None], part, part, rank[:, None])
    return np.stack([column.ravel() for column in columns], axis=1)
