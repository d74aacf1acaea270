"""Assign a new placement's sets of experts to ranks and slots such that least is copied. Pure.

Under the even split all ranks of an engine are equal, so any rank may take any set of experts of a layer.
That is an assignment problem per layer (Jonker and Volgenant 1987, as scipy solves it) over the number of
experts that a rank would already hold. Where nodes matter, sets of a node stay together (an expert's replicas
may have been spread over nodes on purpose): nodes are assigned first, by the experts that then need not cross
between them, and ranks within nodes after that. With demand by source rank, ranks are not equal; then only
slots are rearranged.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fleet.arrays import Float32Array, SlotTable
from fleet.placement import EMPTY


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
    old, new = (
        _held(table[layers], ranks, int(max(before.max(), after.max())) + 1) for table in (before, after)
    )
    source = _assigned(old @ new.swapaxes(1, 2)) if node is None else _by_node(old, new, np.asarray(node))
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
    coming = np.where(at < 0, new, EMPTY)
    first = np.argsort(coming == EMPTY, axis=1, kind="stable")
    counts = (coming != EMPTY).sum(axis=1, keepdims=True)
    open_ = np.argsort(~free, axis=1, kind="stable")
    place, nth = np.nonzero(np.arange(per) < counts)
    result[place, open_[place, nth]] = coming[place, first[place, nth]]
    return result.reshape(after.shape)


def _check(before: SlotTable, after: SlotTable, ranks: int) -> None:
    if before.shape != after.shape or ranks < 1 or before.shape[1] % ranks:
        raise ValueError(
            f"relabel: tables of shapes {before.shape} and {after.shape} on {ranks} ranks cannot be compared"
        )


def _held(table: SlotTable, ranks: int, experts: int) -> Float32Array:
    layers = len(table)
    held = np.zeros((layers, ranks, experts + 1), np.float32)
    np.put_along_axis(held, table.reshape(layers, ranks, -1).astype(np.intp), np.float32(1.0), axis=2)
    return held[:, :, :experts]


def _assigned(common: Float32Array) -> NDArray[np.intp]:
    """Return for each row its column, [n, rows], for the greatest sum of each common [n, rows, columns]."""
    return np.stack([linear_sum_assignment(one, maximize=True)[1] for one in common])


def _by_node(old: Float32Array, new: Float32Array, node: NDArray[np.intp]) -> NDArray[np.intp]:
    """[layers, ranks]: the rank whose new set each rank takes. Nodes are exchanged as a whole, only with
    nodes of equal size."""
    members = [np.flatnonzero(node == at) for at in range(int(node.max()) + 1)]
    sizes = np.array([len(ranks) for ranks in members])
    there = [
        np.stack([held[:, ranks].max(axis=1, initial=0.0) for ranks in members], axis=1)
        for held in (old, new)
    ]
    fits = np.where(sizes[:, None] == sizes, 0.0, -1e9).astype(np.float32)
    others = _assigned(there[0] @ there[1].swapaxes(1, 2) + fits)
    source = np.empty((len(old), len(node)), np.intp)
    layer = np.arange(len(old))[:, None, None]
    for size in np.unique(sizes[sizes > 0]).tolist():
        # Only ranks of a node and of the one whose sets it takes are compared.
        alike = np.flatnonzero(sizes == size)
        ranks_of = np.zeros((len(members), size), np.intp)
        ranks_of[alike] = [members[at] for at in alike]
        theirs = ranks_of[others[:, alike]]
        common = old[:, ranks_of[alike]] @ new[layer, theirs].swapaxes(2, 3)
        taken = _assigned(common.reshape(-1, size, size)).reshape(theirs.shape)
        source[:, ranks_of[alike]] = np.take_along_axis(theirs, taken, axis=2)
    return source
