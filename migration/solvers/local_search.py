"""Local search on placements of few slots, for small engines: the work grows with slots x experts x ranks.
Pure.

Each step makes the best of all exchanges of two slots' experts, and of all replacements of a slot's expert by
another one or none, while the sum over ranks of (load / mean)^POWER falls. That is nearly the fullest rank's
load, but it also distinguishes equally full placements by their other ranks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, SlotTable
from fleet.placement import EMPTY

SQUARINGS = 5
"""POWER is 2 to this."""
STEPS = 60
_LITTLE = 1e-6


def cells(table: SlotTable, experts: int, ranks: int) -> int:
    """Return the count of numbers that one step examines."""
    return table.size * (experts + 1) * ranks


def local_search(
    table: SlotTable, load: FloatArray, ranks: int, least: NDArray[np.int64], most: int
) -> SlotTable:
    """Improve a placement; int16 as `table` [layers, slots], which is not changed.

    load: [layers, experts], some of it > 0 in each layer. No expert gets more than `most` replicas, and none
    falls below `least` [layers, experts].
    """
    experts = load.shape[1]
    part = np.pad(load / load.sum(axis=1, keepdims=True) * ranks, ((0, 0), (0, 1)))
    filled = np.where(table == EMPTY, experts, table).astype(np.intp)
    fewest = np.pad(least, ((0, 0), (0, 1)))
    open_ = np.arange(len(table))
    for _ in range(STEPS):
        if not len(open_):
            break
        filled[open_], changed = _step(filled[open_], part[open_], ranks, fewest[open_], most)
        open_ = open_[changed]
    return np.where(filled == experts, EMPTY, filled).astype(np.int16)


def fullest(table: SlotTable, load: FloatArray, ranks: int) -> FloatArray:
    """float64 [layers]: load of the most loaded rank, replicas sharing evenly; load: [layers, experts]."""
    expert = np.where(table == EMPTY, load.shape[1], table).astype(np.intp)
    return np.asarray(_state(expert, np.pad(load, ((0, 0), (0, 1))), ranks).loads.max(axis=1))


class _State(NamedTuple):
    """Layers in their present state. An additional last expert stands for an empty slot: no weight, and never
    counted."""

    expert: NDArray[np.intp]
    """[layers, slots]"""
    rank: NDArray[np.intp]
    """[slots]."""
    part: FloatArray
    """[layers, experts + 1]: load, in mean rank loads."""
    held: NDArray[np.bool_]
    """[layers, ranks, experts + 1]"""
    counts: NDArray[np.int64]
    """[layers, experts + 1]: replicas."""
    loads: FloatArray
    """[layers, ranks]"""

    @property
    def weight(self) -> FloatArray:
        return np.asarray(self.part / np.maximum(self.counts, 1))

    @property
    def penalty(self) -> FloatArray:
        return np.asarray(_power(self.loads).sum(axis=1))


def _power(loads: FloatArray) -> FloatArray:
    for _ in range(SQUARINGS):
        loads = loads * loads
    return loads


def _step(
    expert: NDArray[np.intp], part: FloatArray, ranks: int, least: NDArray[np.int64], most: int
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the table after the best change of each layer, and the layers that have one."""
    layers, slots = expert.shape
    state = _state(expert, part, ranks)
    row = np.arange(layers)
    flat = [one.reshape(layers, -1) for one in (_replaced(state, least, most), _exchanged(state))]
    best = [one.argmin(axis=1) for one in flat]
    penalty = [one[row, at] for one, at in zip(flat, best, strict=True)]
    changed = np.minimum(*penalty) < state.penalty * (1.0 - _LITTLE)
    after = expert.copy()
    where = np.flatnonzero(changed & (penalty[0] <= penalty[1]))
    slot, new = np.divmod(best[0][where], part.shape[1])
    after[where, slot] = new
    where = np.flatnonzero(changed & (penalty[0] > penalty[1]))
    one, two = np.divmod(best[1][where], slots)
    after[where, one], after[where, two] = expert[where, two], expert[where, one]
    return after, changed


def _state(expert: NDArray[np.intp], part: FloatArray, ranks: int) -> _State:
    layers, slots = expert.shape
    rank = np.arange(slots) * ranks // slots
    held = np.zeros((layers, ranks, part.shape[1]), bool)
    held[np.arange(layers)[:, None], rank, expert] = True
    held[:, :, -1] = False
    count = held.sum(axis=1)
    loads = (held * (part / np.maximum(count, 1))[:, None, :]).sum(axis=2)
    return _State(expert, rank, part, held, count, loads)


def _replaced(state: _State, least: NDArray[np.int64], most: int) -> FloatArray:
    """[layers, slots, experts + 1]: penalty when a slot holds another expert, or none; inf where
    forbidden."""
    held, count, expert, rank = state.held, state.counts, state.expert, state.rank
    slot = np.arange(len(rank))
    # Every holder's load changes with the number of replicas, so effects are per rank and not per slot.
    less = held * (state.part / np.maximum(count - 1, 1) - state.weight)[:, None, :]
    more = held * (state.part / (count + 1) - state.weight)[:, None, :]
    without = np.take_along_axis(less, expert[:, None, :], axis=2).swapaxes(1, 2)  # [layers, slots, ranks]
    without[:, slot, rank] = -np.take_along_axis(state.weight, expert, axis=1)
    loads = state.loads[:, None, None, :] + without[:, :, None, :] + more.swapaxes(1, 2)[:, None, :, :]
    loads[:, slot, :, rank] += (state.part / (count + 1))[None]
    empty = count.shape[1] - 1
    # An expert may be replaced above its required number, and may come only to ranks without it.
    free = (np.take_along_axis(count - least, expert, axis=1) > 0) | (expert == empty)
    may = free[:, :, None] & ~held[:, rank] & (count < most)[:, None, :]
    may[:, :, empty] = free & (expert != empty)
    return np.where(may, _power(loads).sum(axis=3), np.inf)


def _exchanged(state: _State) -> FloatArray:
    """[layers, slots, slots]: penalty when two slots exchange their experts; inf where forbidden."""
    rank, weight = state.rank, np.take_along_axis(state.weight, state.expert, axis=1)
    change = weight[:, :, None] - weight[:, None, :]
    load, power = state.loads[:, rank], _power(state.loads)[:, rank]
    moved = _power(load[:, :, None] - change) + _power(load[:, None, :] + change)
    there = np.take_along_axis(
        state.held[:, rank], state.expert[:, None, :], axis=2
    )  # [layers, slots, slots]: the second's expert on the first's rank
    barred = there | there.swapaxes(1, 2) | (rank[:, None] == rank)
    return np.where(
        barred, np.inf, state.penalty[:, None, None] - power[:, :, None] - power[:, None, :] + moved
    )
