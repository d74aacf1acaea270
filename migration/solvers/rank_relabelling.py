"""Assign a new placement's sets of experts to ranks and slots such that least is copied. Pure.

Under the even split all ranks of an engine are equal, so any rank may take any set of experts of a layer.
That is an assignment problem per layer (Jonker and Volgenant 1987, as scipy solves it) over the number of
experts that a rank would already hold. Where nodes matter, sets of a node stay together (an expert's replicas
may have been spread over nodes on purpose): nodes are assigned first, by the experts that then need not cross
between them, and ranks within nodes after that. With demand by source rank, ranks are not equal; then only
slots are rearranged.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fleet.arrays import FloatArray, IndexArray, SlotTable
from fleet.placement import EMPTY, repeated


def relabelled(
    before: SlotTable, after: SlotTable, ranks: int, node: NDArray[np.intp] | None = None
) -> SlotTable:
    """int16 as `after`: its sets of experts, assigned to the ranks that hold most of them before; kept
    experts keep their slots.

    node: int [ranks], from 0; sets whose ranks share a node in `after` share one in the result. ValueError
    when the tables cannot be compared, or `after` has a node of a size that no other node has.
    """
    _check(before, after, ranks)
    layers = np.flatnonzero((before != after).any(axis=1))
    if not len(layers) or ranks == 1:
        return arranged(before, after, ranks)
    same = _same(before[layers], after[layers], ranks)
    source = (
        _assigned(_counted((same.layer, same.old, same.new), (len(layers), ranks, ranks)))
        if node is None
        else _by_node(same, len(layers), np.asarray(node))
    )
    result = after.copy()
    sets = after[layers].reshape(len(layers), ranks, -1)
    result[layers] = np.take_along_axis(sets, source[:, :, None], axis=1).reshape(len(layers), -1)
    return arranged(before, result, ranks)


def arranged(before: SlotTable, after: SlotTable, ranks: int) -> SlotTable:
    """int16 as `after`: the same experts on every rank; kept ones in their former slots, others in the free
    slots in order."""
    _check(before, after, ranks)
    layers, slots = after.shape
    places, per = layers * ranks, slots // ranks
    old, new = before.reshape(places, per), after.reshape(places, per)
    # The slot that held each new expert before; of several, the last one.
    same = (new[:, :, None] == old[:, None, ::-1]) & (new != EMPTY)[:, :, None]
    at = np.where(same.any(axis=2), per - 1 - same.argmax(axis=2), -1)
    # First, experts that stay, in their former slots.
    result = np.full((places, per), EMPTY, np.int16)
    place, nth = np.nonzero(at >= 0)
    result[place, at[place, nth]] = new[place, nth]
    # Then new ones, into the free slots in order.
    free = np.ones((places, per), bool)
    free[place, at[place, nth]] = False
    coming = (at < 0) & (new != EMPTY)
    result[free & (free.cumsum(axis=1) <= coming.sum(axis=1, keepdims=True))] = new[coming]
    return result.reshape(after.shape)


def _check(before: SlotTable, after: SlotTable, ranks: int) -> None:
    if before.shape != after.shape or ranks < 1 or before.shape[1] % ranks:
        raise ValueError(
            f"relabel: tables of shapes {before.shape} and {after.shape} on {ranks} ranks cannot be compared"
        )


class _Same(NamedTuple):
    """Pairs of ranks of which one held an expert that the other is to hold: [n] each, one for every such
    expert."""

    layer: IndexArray
    expert: IndexArray
    old: IndexArray
    """The rank that held it."""
    new: IndexArray
    """The rank whose set it is in."""

    def taken(self, which: NDArray[np.bool_]) -> "_Same":
        return _Same(*(part[which] for part in self))


def _same(before: SlotTable, after: SlotTable, ranks: int) -> _Same:
    layers, per = len(before), before.shape[1] // ranks
    before, after = (np.where(repeated(table, ranks), EMPTY, table) for table in (before, after))
    # The first number of a layer is that of its empty slots: EMPTY is -1.
    width = int(max(before.max(), after.max())) + 2
    first_of = np.arange(layers)[:, None] * width + 1
    holders = np.bincount((first_of + before).ravel(), minlength=layers * width)
    # Slots by layer and expert; NumPy sorts numbers of 16 bits by radix.
    slots, first = np.argsort(before, axis=1, kind="stable").ravel(), np.cumsum(holders) - holders
    # Every slot of the new table meets all slots that held its expert.
    layer, slot = np.nonzero(after != EMPTY)
    wanted = first_of[layer, 0] + after[layer, slot]
    times = holders[wanted]
    at = np.repeat(np.arange(len(wanted)), times)
    nth = np.arange(len(at)) - np.repeat(np.cumsum(times) - times, times)
    return _Same(layer[at], wanted[at] % width - 1, slots[first[wanted[at]] + nth] // per, slot[at] // per)


def _counted(places: tuple[IndexArray, ...], shape: tuple[int, ...]) -> FloatArray:
    """Return how often each place occurs, float64 of this shape."""
    found = np.bincount(np.ravel_multi_index(places, shape), minlength=int(np.prod(shape)))
    return found.reshape(shape).astype(np.float64)


def _assigned(common: FloatArray) -> NDArray[np.intp]:
    """Return for each row its column, [n, rows], for the greatest sum of each common [n, rows, columns]."""
    return np.stack([linear_sum_assignment(one, maximize=True)[1] for one in common])


def _by_node(same: _Same, layers: int, node: NDArray[np.intp]) -> NDArray[np.intp]:
    """[layers, ranks]: the rank whose new set each rank takes. Nodes are exchanged as a whole, only with
    nodes of equal size."""
    members = [np.flatnonzero(node == at) for at in range(int(node.max()) + 1)]
    sizes = np.array([len(ranks) for ranks in members])
    fits = np.where(sizes[:, None] == sizes, 0.0, -1e9)
    there = np.zeros((2, layers, len(members), int(same.expert.max(initial=0)) + 1), np.float32)
    for on_node, rank in zip(there, (same.old, same.new), strict=True):
        on_node[same.layer, node[rank], same.expert] = 1.0
    others = _assigned(there[0] @ there[1].swapaxes(1, 2) + fits)
    # Only ranks of a node and of the one whose sets it takes are compared.
    same = same.taken(others[same.layer, node[same.old]] == node[same.new])
    place = np.zeros(len(node), np.intp)
    for ranks in members:
        place[ranks] = np.arange(len(ranks))
    common = _counted((same.layer, same.old, place[same.new]), (layers, len(node), int(sizes.max())))
    source = np.empty((layers, len(node)), np.intp)
    for size in np.unique(sizes[sizes > 0]).tolist():
        alike = np.flatnonzero(sizes == size)
        ranks_of = np.zeros((len(members), size), np.intp)
        ranks_of[alike] = [members[at] for at in alike]
        theirs = ranks_of[others[:, alike]]
        taken = _assigned(common[:, ranks_of[alike], :size].reshape(-1, size, size)).reshape(theirs.shape)
        source[:, ranks_of[alike]] = np.take_along_axis(theirs, taken, axis=2)
    return source
