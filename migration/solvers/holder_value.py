"""Worth of a rank holding an expert, and a first placement by it: every rank holds what it is worth most to.
Pure.

Worth counts once per replica for the requests of its own rank, and once per node for those of the node's
other ranks. One replica of each expert goes where it is worth most, in the order of regret (the loss if the
best rank is taken). The remaining slots are filled, rank by rank, by what a further replica adds there.
`migration.solvers.pairwise_exchange` improves this to within a few thousandths of the optimum.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatingArray
from migration import kernels


class HolderValue(NamedTuple):
    """Worth of replicas. All numbers >= 0, in one unit."""

    own: FloatingArray
    """[layers, ranks, experts]: of a replica on the rank"""
    shared: FloatingArray
    """[layers, nodes, experts]: added by a node's first replica; zeros [layers, 1, experts] where there is
    only one node."""
    node: NDArray[np.intp]
    """[ranks], numbers from 0"""

    @property
    def flat(self) -> bool:
        """True if nodes do not matter."""
        return bool(self.shared.shape[1] == 1)

    def of(self, held: BoolArray) -> FloatingArray:
        """float64 [layers]: total worth of a placement."""
        value = (self.own * held).sum(axis=(1, 2))
        return np.asarray(
            value if self.flat else value + (self.shared * (self.near(held) > 0)).sum(axis=(1, 2))
        )

    def near(self, held: BoolArray) -> NDArray[np.int64]:
        """int64 [layers, nodes, experts]: replicas on each node."""
        if self.flat:
            return np.asarray(held.sum(axis=1, keepdims=True))
        return np.stack([held[:, self.node == at].sum(axis=1) for at in range(self.shared.shape[1])], axis=1)

    def marginal(self, held: BoolArray) -> tuple[FloatingArray, FloatingArray]:
        """Return (win, lose), [layers, ranks, experts]: worth added by one more replica, and lost with the
        present one."""
        if self.flat:
            return self.own, self.own
        near = self.near(held)
        return (
            self.own + (self.shared * (near == 0))[:, self.node],
            self.own + (self.shared * (near == 1))[:, self.node],
        )

    def at(self, layers: NDArray[np.intp]) -> "HolderValue":
        """Return the worth in some layers."""
        return HolderValue(self.own[layers], self.shared[layers], self.node)


def held_by_worth(worth: HolderValue, slots: int, most: int, home: BoolArray | None = None) -> BoolArray:
    """bool [layers, ranks, experts]: every expert at least once, on at most `most` ranks, and at most `slots`
    experts on a rank.

    home: bool [layers, ranks, experts], ranks of which one must hold the expert; None: anywhere. ValueError
    when they do not fit.
    """
    return filled(worth, _one_each(worth, slots, home), slots, most, home)


def filled(
    worth: HolderValue, held: BoolArray, slots: int, most: int, home: BoolArray | None = None, passes: int = 2
) -> BoolArray:
    """Refill every rank in turn: it keeps what only it holds, and fills its other slots with what adds most
    there."""
    held = held.copy()
    library = kernels.compiled()
    if library is None or not held.size or worth.own.dtype != np.float64:
        return _filled(worth, held, slots, most, home, passes)
    library.locality_filled(
        kernels.plain(worth.own),
        kernels.plain(worth.shared),
        kernels.plain(worth.node),
        held,
        None if home is None else kernels.plain(home),
        len(held),
        slots,
        most,
        passes,
    )
    return held


def _filled(
    worth: HolderValue, held: BoolArray, slots: int, most: int, home: BoolArray | None, passes: int
) -> BoolArray:
    """Implement `filled` in numpy, in place."""
    count, near = held.sum(axis=1), worth.near(held)
    based = count if home is None else (held & home).sum(axis=1)
    for rank in [*range(held.shape[1])] * passes:
        mine, at = held[:, rank], 0 if worth.flat else int(worth.node[rank])
        needed = mine if home is None else mine & home[:, rank]
        # Remove this rank's replicas, so that the score of its own experts is computed as for any others.
        count, based = count - mine, based - needed
        near[:, at] -= mine
        score = np.where(count < most, worth.own[:, rank] + worth.shared[:, at] * (near[:, at] == 0), -1.0)
        # The last replica of an expert (where it must be) stays.
        score[(based == 0) & needed] = np.inf
        mine = _best(score, slots)
        held[:, rank] = mine
        count, based = count + mine, based + (mine if home is None else mine & home[:, rank])
        near[:, at] += mine
    return held


def _best(score: FloatingArray, slots: int) -> BoolArray:
    """bool [layers, experts]: the `slots` highest scores that are not negative."""
    if slots >= score.shape[1]:
        return np.asarray(score >= 0.0)
    first = np.argsort(-score, axis=1, kind="stable")[:, :slots]
    best = np.zeros(score.shape, bool)
    np.put_along_axis(best, first, np.take_along_axis(score, first, 1) >= 0.0, 1)
    return best


def _one_each(worth: HolderValue, slots: int, home: BoolArray | None) -> BoolArray:
    """Place one replica of every expert: each bids for its best rank with room, and ranks accept those of
    most regret first."""
    library = kernels.compiled()
    held, fits = np.zeros(worth.own.shape, bool), np.ones(1, bool)
    if library is None or not held.size or worth.own.dtype != np.float64:
        fits[0] = _one_each_in_numpy(worth, held, slots, home)
    else:
        library.locality_one_each(
            kernels.plain(worth.own),
            kernels.plain(worth.shared),
            kernels.plain(worth.node),
            held,
            None if home is None else kernels.plain(home),
            len(held),
            slots,
            fits,
        )
    if not fits[0]:
        ranks, experts = worth.own.shape[1:]
        raise ValueError(
            f"locality: {experts} experts do not fit where they must be, with {slots} slots on each of"
            f" {ranks} ranks"
        )
    return held


def _one_each_in_numpy(worth: HolderValue, held: BoolArray, slots: int, home: BoolArray | None) -> bool:
    """Implement `_one_each`. False: the experts do not fit."""
    value = worth.own if worth.flat else worth.own + worth.shared[:, worth.node]
    value = value if home is None else np.where(home, value, -np.inf)
    layers, ranks, experts = value.shape
    room, left = np.full((layers, ranks), slots), np.ones((layers, experts), bool)
    while left.any():
        # Full ranks are closed; every remaining expert bids for its best open rank.
        open_to = np.where((room > 0)[:, :, None], value, -np.inf)
        target = _spread(open_to, left)
        best = np.take_along_axis(open_to, target[:, None], 1)[:, 0]
        if not np.isfinite(best[left]).all():
            return False
        # Regret: distance to the second-best open rank, infinite where there is none.
        np.put_along_axis(open_to, target[:, None], -np.inf, 1)
        second = open_to.max(axis=1)
        several = np.isfinite(second)
        regret = np.where(several, best, 0.0) - np.where(several, second, -np.inf)
        order = np.argsort(np.where(left, -regret, np.inf), axis=1, kind="stable")
        # Each rank accepts bids in the order of regret while it has room; the others bid again in the next
        # round.
        for rank in range(ranks):
            wants = np.take_along_axis(left & (target == rank), order, 1)
            taken = wants & (np.cumsum(wants, axis=1) <= room[:, rank, None])
            mine = np.zeros_like(left)
            np.put_along_axis(mine, order, taken, 1)
            held[:, rank] |= mine
            room[:, rank] -= taken.sum(axis=1)
            left &= ~mine
    return True


def _spread(value: FloatingArray, left: BoolArray) -> NDArray[np.intp]:
    """[layers, experts]: the best rank of each expert; where several are equal, experts take them in
    turns."""
    tied = value == value.max(axis=1, keepdims=True)
    several = tied.sum(axis=1)
    turn = np.cumsum(left, axis=1) % np.maximum(several, 1)
    return np.asarray((np.cumsum(tied, axis=1) > turn[:, None]).argmax(axis=1))
