"""Improve a placement by exchanges that keep every state legal: by worth alone, whatever the ranks' load.
Pure.

There are two kinds. Two ranks exchange experts of which each has the only replica. Or a rank hands its
replica of an expert to another rank, which gives up a spare one for it; the first rank takes up in its place
what is worth more there.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IndexArray
from migration import kernels
from migration.solvers.holder_value import HolderValue

_TINY = 1e-7
_CYCLE = 4
"""Rounds of hand-overs per round of exchanges; few exchanges are found after the first round."""
_PICKS = 8
"""Hand-overs of a layer between two computations of the gains."""


def exchange_experts(
    worth: HolderValue,
    held: BoolArray,
    slots: int,
    most: int,
    home: BoolArray | None = None,
    rounds: int = 30,
) -> BoolArray:
    """Return a placement worth at least as much as `held`; arguments as for
    `migration.solvers.holder_value.held_by_worth`."""
    held = held.copy()
    # Half the memory traffic; ranking needs no higher precision.
    worth = HolderValue(
        worth.own.astype(np.float32, order="C"), worth.shared.astype(np.float32, order="C"), worth.node
    )
    library = kernels.compiled()
    if library is None or not held.size:
        _exchanged(worth, held, slots, most, home, rounds)
        return held
    library.locality_exchanged(
        worth.own,
        worth.shared,
        kernels.plain(worth.node),
        held,
        None if home is None else kernels.plain(home),
        len(held),
        slots,
        most,
        _PICKS,
        _CYCLE,
        -(-rounds // _CYCLE),
    )
    return held


def _exchanged(
    worth: HolderValue, held: BoolArray, slots: int, most: int, home: BoolArray | None, rounds: int
) -> None:
    """Implement `exchange_experts` in numpy, in place."""
    busy = np.arange(len(held))
    for _ in range(0, rounds, _CYCLE):
        part, mine, places = worth.at(busy), held[busy], None if home is None else home[busy]
        changed = _swapped(part, mine, places)
        for _ in range(_CYCLE):
            handed = _handed_over(part, mine, slots, most, places)
            changed |= handed
            if not handed.any():
                break
        held[busy] = mine
        busy = busy[changed]
        if not len(busy):
            break


def _swapped(worth: HolderValue, held: BoolArray, home: BoolArray | None) -> NDArray[np.bool_]:
    """Exchange sole replicas in place: all pairs of experts that are each other's best partner. bool
    [layers]: layers changed."""
    sole = held.sum(axis=1) == 1
    where = held.argmax(axis=1)
    value = worth.own if worth.flat else worth.own + worth.shared[:, worth.node]
    moved = value - np.take_along_axis(value, where[:, None], 1)
    if home is not None:
        moved = np.where(home, moved, -np.inf)
    # [layers, expert, other]: gain of an expert at the other's rank.
    gain = np.take_along_axis(moved.transpose(0, 2, 1), where[:, None, :].repeat(moved.shape[2], 1), 2)
    gain = gain + gain.transpose(0, 2, 1)
    gain[~(sole[:, :, None] & sole[:, None, :])] = -np.inf
    best = gain.argmax(axis=2)
    # Mutually best pairs are disjoint, so all of them can be made at once.
    mutual = (np.take_along_axis(best, best, 1) == np.arange(best.shape[1])) & (
        np.take_along_axis(gain, best[:, :, None], 2)[:, :, 0] > _TINY
    )
    layer, expert = np.nonzero(mutual)
    other = best[layer, expert]
    held[layer, where[layer, expert], expert] = False
    held[layer, where[layer, other], expert] = True
    return np.asarray(mutual.any(axis=1))


class _HandOvers(NamedTuple):
    """Possible hand-overs: a rank takes up an expert, and hands its replica of another to a taker."""

    gain: FloatArray
    """[layers, ranks]: of each giver's best hand-over."""
    handed: IndexArray
    """[layers, ranks]: the replica that the rank hands over."""
    taken_up: IndexArray
    """[layers, ranks]: the expert that it takes up instead."""
    taker: IndexArray
    """[layers, experts]: the rank that values a further replica most."""
    spare: IndexArray
    """[layers, ranks]: the spare replica that a rank gives up to receive another."""
    free: BoolArray
    """[layers, ranks]: the rank has an empty slot and gives up nothing."""

    def exclude(self, rows: IndexArray, giver: IndexArray, most: int) -> None:
        """Exclude all that the best hand-over of each layer touches, until the gains are computed again."""
        out, up = self.handed[rows, giver], self.taken_up[rows, giver]
        to = self.taker[rows, out]
        down = self.spare[rows, to][:, None]
        takers = self.taker[rows[:, None], self.handed]
        touched = (self.handed == up[:, None]) | (self.handed == down)
        touched |= (takers == to[:, None]) | (takers == giver[:, None])
        touched |= (self.taken_up == down) | ((self.taken_up == up[:, None]) & (most < self.gain.shape[1]))
        touched |= self.spare[rows[:, None], takers] == down
        self.gain[rows, giver] = self.gain[rows, to] = -np.inf
        self.gain[touched] = -np.inf


def _handed_over(
    worth: HolderValue, held: BoolArray, slots: int, most: int, home: BoolArray | None
) -> NDArray[np.bool_]:
    """Make hand-overs in place. bool [layers]: layers changed."""
    found = _hand_overs(worth, held, slots, most, home)
    changed, rows = np.zeros(len(held), bool), np.arange(len(held))
    # Several hand-overs per computation of the gains, as long as they do not touch each other.
    for _ in range(_PICKS):
        giver = found.gain.argmax(axis=1)
        out, up = found.handed[rows, giver], found.taken_up[rows, giver]
        to = found.taker[rows, out]
        down = found.spare[rows, to]
        # A chain that would return to its own expert is no gain.
        good = np.flatnonzero((found.gain[rows, giver] > _TINY) & (up != out) & (down != up))
        drops = good[~found.free[good, to[good]]]
        held[drops, to[drops], down[drops]] = False
        held[good, to[good], out[good]] = True
        held[good, giver[good], out[good]] = False
        held[good, giver[good], up[good]] = True
        changed[good] = True
        found.exclude(rows, giver, most)
    return changed


def _hand_overs(
    worth: HolderValue, held: BoolArray, slots: int, most: int, home: BoolArray | None
) -> _HandOvers:
    """Return the best hand-over of every rank, regardless of the others."""
    win, lose = worth.marginal(held)
    count = held.sum(axis=1, keepdims=True)
    based = count if home is None else (held & home).sum(axis=1, keepdims=True)
    fixed = held & (based == 1) & (True if home is None else home)
    free = held.sum(axis=2) < slots
    # Each rank's cheapest spare replica: what it would give up to receive another.
    spares = np.where(held & ~fixed, lose, np.inf)
    spare = spares.argmin(axis=2)
    given_up = np.where(free, 0.0, np.take_along_axis(spares, spare[:, :, None], 2)[:, :, 0])
    barred = held if home is None else held | (fixed.any(axis=1, keepdims=True) & ~home)
    # For each expert the rank that values a further replica most, net of what it gives up.
    offers = np.where(barred, -np.inf, win - given_up[:, :, None])
    taker = offers.argmax(axis=1)
    # For each rank the replica that costs least to hand over, and the expert that it values most.
    release = np.where(held, lose - np.take_along_axis(offers, taker[:, None], 1), np.inf)
    handed = release.argmin(axis=2)
    values = np.where(held | (count >= most), -np.inf, win)
    taken_up = values.argmax(axis=2)
    gain = (
        np.take_along_axis(values, taken_up[:, :, None], 2)[:, :, 0]
        - np.take_along_axis(release, handed[:, :, None], 2)[:, :, 0]
    )
    return _HandOvers(gain, handed, taken_up, taker, spare, free)
