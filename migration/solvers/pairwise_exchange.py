"""Improve a placement by exchanges that keep every state legal: by worth alone, whatever the ranks' load.
Pure.

There are two kinds. Two ranks exchange experts of which each has the only replica. Or a rank hands its
replica of an expert to another rank, which gives up a spare one for it; the first rank takes up in its place
what is worth more there.
"""

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray
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
    worth = HolderValue(worth.own.astype(np.float32), worth.shared.astype(np.float32), worth.node)
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
    return held


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


def _handed_over(
    worth: HolderValue, held: BoolArray, slots: int, most: int, home: BoolArray | None
) -> NDArray[np.bool_]:
    """Make hand-overs in place. bool [layers]: layers changed.

    A rank takes up an expert and hands its replica of another to a second rank, which gives up a spare one.
    """
    win, lose = worth.marginal(held)
    count = held.sum(axis=1, keepdims=True)
    based = count if home is None else (held & home).sum(axis=1, keepdims=True)
    fixed = held & (based == 1) & (True if home is None else home)
    # Each rank's cheapest spare replica: what it would give up to receive another.
    spares = np.where(held & ~fixed, lose, np.inf)
    spare = spares.argmin(axis=2)
    given_up = np.where(
        held.sum(axis=2) < slots, 0.0, np.take_along_axis(spares, spare[:, :, None], 2)[:, :, 0]
    )
    barred = held if home is None else held | (fixed.any(axis=1, keepdims=True) & ~home)
    # For each expert the rank that values a further replica most, net of what it gives up.
    offers = np.where(barred, -np.inf, win - given_up[:, :, None])
    taker = offers.argmax(axis=1)
    # For each rank the replica that costs least to hand over, and the expert that it values most.
    release = np.where(held, lose - np.take_along_axis(offers, taker[:, None], 1), np.inf)
    handed = release.argmin(axis=2)
    wants = np.where(held | (count >= most), -np.inf, win)
    takes_up = wants.argmax(axis=2)
    gain = (
        np.take_along_axis(wants, takes_up[:, :, None], 2)[:, :, 0]
        - np.take_along_axis(release, handed[:, :, None], 2)[:, :, 0]
    )
    free = held.sum(axis=2) < slots
    changed, ranks = np.zeros(len(held), bool), held.shape[1]
    rows = np.arange(len(held))
    # Several hand-overs per computation of the gains, as long as they do not touch each other.
    for _ in range(_PICKS):
        giver = gain.argmax(axis=1)
        out, up = handed[rows, giver], takes_up[rows, giver]
        to = taker[rows, out]
        down = spare[rows, to]
        # A chain that would return to its own expert is no gain.
        good = np.flatnonzero((gain[rows, giver] > _TINY) & (up != out) & (down != up))
        drops = good[~free[good, to[good]]]
        held[drops, to[drops], down[drops]] = False
        held[good, to[good], out[good]] = True
        held[good, giver[good], out[good]] = False
        held[good, giver[good], up[good]] = True
        changed[good] = True
        # Exclude everything that these changes touched until the gains are computed again.
        gain[rows, giver] = gain[rows, to] = -np.inf
        gain[
            ((takes_up == up[:, None]) & (most < ranks))
            | (takes_up == down[:, None])
            | (taker[rows[:, None], handed] == to[:, None])
        ] = -np.inf
        gain[
            (taker[rows[:, None], handed] == giver[:, None])
            | (handed == up[:, None])
            | (handed == down[:, None])
        ] = -np.inf
        gain[spare[rows[:, None], taker[rows[:, None], handed]] == down[:, None]] = -np.inf
    return changed
