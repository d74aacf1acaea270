"""A placement bettered by exchanges that leave every state legal: for what it is worth alone, whatever the ranks' load. Pure.

Two kinds. Two ranks exchange experts of which each has the only replica. Or a rank hands its replica of an expert to another, which gives up a
spare one for it, and takes up in its place what is worth more there.
"""

import numpy as np
from numpy.typing import NDArray

from migration.solvers.holder_value import Held, HolderValue

_TINY = 1e-7
_CYCLE = 4
"""rounds of hand-overs for one of exchanges, of which few are found after the first"""
_PICKS = 8
"""hand-overs of a layer between two looks"""


def bettered(worth: HolderValue, held: Held, slots: int, most: int, home: Held | None = None, rounds: int = 30) -> Held:
    """Worth no less than `held`; arguments as of `migration.solvers.holder_value.held_by_worth`."""
    held = held.copy()
    worth = HolderValue(worth.own.astype(np.float32), worth.shared.astype(np.float32), worth.node)  # half the memory to walk through, and ranking needs no more
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


def _swapped(worth: HolderValue, held: Held, home: Held | None) -> NDArray[np.bool_]:
    """Exchanges of only replicas, `held` changed in place: all pairs of experts that are each other's best. bool [layers]: which layers changed."""
    sole = held.sum(axis=1) == 1
    where = held.argmax(axis=1)
    value = worth.own if worth.flat else worth.own + worth.shared[:, worth.node]
    moved = value - np.take_along_axis(value, where[:, None], 1)
    if home is not None:
        moved = np.where(home, moved, -np.inf)
    # [layers, expert, other]: what an expert gains at the other's rank
    gain = np.take_along_axis(moved.transpose(0, 2, 1), where[:, None, :].repeat(moved.shape[2], 1), 2)
    gain = gain + gain.transpose(0, 2, 1)
    gain[~(sole[:, :, None] & sole[:, None, :])] = -np.inf
    best = gain.argmax(axis=2)
    mutual = (np.take_along_axis(best, best, 1) == np.arange(best.shape[1])) & (np.take_along_axis(gain, best[:, :, None], 2)[:, :, 0] > _TINY)
    layer, expert = np.nonzero(mutual)
    other = best[layer, expert]
    held[layer, where[layer, expert], expert] = False
    held[layer, where[layer, other], expert] = True
    return np.asarray(mutual.any(axis=1))


def _handed_over(worth: HolderValue, held: Held, slots: int, most: int, home: Held | None) -> NDArray[np.bool_]:
    """Chains: a rank takes up an expert, hands its replica of another over, for which the receiver gives up a spare one. As above."""
    win, lose = worth.marginal(held)
    count = held.sum(axis=1, keepdims=True)
    based = count if home is None else (held & home).sum(axis=1, keepdims=True)
    fixed = held & (based == 1) & (True if home is None else home)
    spares = np.where(held & ~fixed, lose, np.inf)
    spare = spares.argmin(axis=2)
    given_up = np.where(held.sum(axis=2) < slots, 0.0, np.take_along_axis(spares, spare[:, :, None], 2)[:, :, 0])
    barred = held if home is None else held | (fixed.any(axis=1, keepdims=True) & ~home)
    offers = np.where(barred, -np.inf, win - given_up[:, :, None])
    taker = offers.argmax(axis=1)
    release = np.where(held, lose - np.take_along_axis(offers, taker[:, None], 1), np.inf)
    handed = release.argmin(axis=2)
    wants = np.where(held | (count >= most), -np.inf, win)
    wanted = wants.argmax(axis=2)
    gain = np.take_along_axis(wants, wanted[:, :, None], 2)[:, :, 0] - np.take_along_axis(release, handed[:, :, None], 2)[:, :, 0]
    free = held.sum(axis=2) < slots
    changed, ranks = np.zeros(len(held), bool), held.shape[1]
    rows = np.arange(len(held))
    for _ in range(_PICKS):
        giver = gain.argmax(axis=1)
        out, up = handed[rows, giver], wanted[rows, giver]
        to = taker[rows, out]
        down = spare[rows, to]
        good = np.flatnonzero((gain[rows, giver] > _TINY) & (up != out) & (down != up))
        drops = good[~free[good, to[good]]]
        held[drops, to[drops], down[drops]] = False
        held[good, to[good], out[good]] = True
        held[good, giver[good], out[good]] = False
        held[good, giver[good], up[good]] = True
        changed[good] = True
        # what these touched is left alone until the next look
        gain[rows, giver] = gain[rows, to] = -np.inf
        gain[((wanted == up[:, None]) & (most < ranks)) | (wanted == down[:, None]) | (taker[rows[:, None], handed] == to[:, None])] = -np.inf
        gain[(taker[rows[:, None], handed] == giver[:, None]) | (handed == up[:, None]) | (handed == down[:, None])] = -np.inf
        gain[spare[rows[:, None], taker[rows[:, None], handed]] == down[:, None]] = -np.inf
    return changed
