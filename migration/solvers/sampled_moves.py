"""Few moves that even out single steps, found on samples of demand instead of their mean. Pure.

The ranks of an engine wait for the fullest one in every step, and a step has few tokens: the requests that
happen to run decide its demand. A placement that is even for the mean demand may be uneven in most steps.
What counts is which experts are in demand *together*: those belong on different ranks, or on both. The
samples are the demand of short intervals, so they show that, and the objective is the mean over samples of
the fullest rank's load. Replicas share evenly, and no slot becomes empty (`full_tables`).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, IndexArray, SlotTable
from migration.model.constraints import UNLIMITED, Constraints

TRIED = 64
"""Moves of a round whose effect on the fullest rank is computed, of those that lower the spread most."""
SIGNIFICANT = 2.0
"""Standard errors, over the samples, by which a move must lower the objective."""
_LEAST = 1e-9
"""A fall of the objective below this is rounding."""


def sampled_moves(
    table: SlotTable,
    samples: NDArray[Any],
    ranks: int,
    limits: Constraints = UNLIMITED,
    *,
    least: float = 0.0,
) -> SlotTable:
    """Return the table after few moves: int16 [layers, slots].

    table: full, no expert twice on a rank. samples: [n, layers, experts], demand of short intervals, any
    unit. least: fall of the mean fullest load, in mean rank loads, that a received expert must bring at
    least. limits.frozen and limits.max_replicas count; the budget is the caller's.
    """
    after = table.copy()
    for layer, row in enumerate(after):
        part = np.asarray(samples[:, layer], np.float64)
        total = part.sum()
        if total > 0:
            frozen = None if limits.frozen is None else limits.frozen[layer]
            part = part[part.sum(axis=1) > 0]
            search = _Layer(row, part * (len(part) * ranks / total), ranks, frozen, limits.max_replicas)
            search.go(least)
    return after


class _Moves(NamedTuple):
    """Candidates, arrays [n]. Each writes `expert` into `slot`; a swap also writes that slot's expert into
    `other`."""

    spread: FloatArray
    """Change of the sum of squared loads, per received expert: what candidates are chosen by."""
    slot: IndexArray
    expert: IndexArray
    other: IndexArray
    """-1: no swap."""

    def best(self, count: int) -> "_Moves":
        """Return those that lower the spread most."""
        if len(self.spread) <= count:
            return self
        lowest = np.argpartition(self.spread, count)[:count]
        return _Moves._make(part[lowest] for part in self)


class _Layer:
    """Search in one layer. The row is changed in place."""

    def __init__(
        self,
        row: NDArray[np.int16],
        samples: FloatArray,
        ranks: int,
        frozen: BoolArray | None,
        max_replicas: int | None,
    ) -> None:
        self._row, self._samples, self._ranks = row, samples, ranks
        self._rank = np.arange(len(row)) // (len(row) // ranks)
        self._most = max_replicas or ranks
        experts = samples.shape[1]
        self._fixed = np.zeros(experts, bool) if frozen is None else frozen
        self._held = np.zeros((ranks, experts), bool)
        self._held[self._rank, row] = True
        self._count = np.bincount(row, minlength=experts)
        self._both = samples.T @ samples
        """[experts, experts]: products of demand, summed over the samples."""

    def go(self, least: float) -> None:
        """Make the best move per received expert until none brings `least`."""
        for _ in range(len(self._row)):
            self._loads = (self._samples / np.maximum(self._count, 1)) @ self._held.T
            self._beside = self._loads.T @ self._samples
            tried = _Moves._make(map(np.concatenate, zip(self._swaps(), self._writes(), strict=True)))
            tried = tried.best(TRIED)
            gain = self._gain(tried)
            at = int(gain.argmax()) if len(gain) else -1
            if at < 0 or gain[at] <= max(least, _LEAST):
                return
            self._make(tried, at)

    def _make(self, moves: _Moves, at: int) -> None:
        slot, expert, other = int(moves.slot[at]), int(moves.expert[at]), int(moves.other[at])
        writes = {slot: expert} if other < 0 else {slot: expert, other: int(self._row[slot])}
        for where in writes:
            self._held[self._rank[where], self._row[where]] = False
            self._count[self._row[where]] -= 1
        for where, what in writes.items():
            self._row[where] = what
            self._held[self._rank[where], what] = True
            self._count[what] += 1

    # Candidates, by their effect on the sum of squared loads: it needs no pass over the samples

    def _swaps(self) -> _Moves:
        """Return the legal exchanges of two slots that lower the spread."""
        row, part = self._row, 1.0 / self._count[self._row]
        both = self._both[np.ix_(row, row)] * part[:, None] * part
        square = np.diagonal(both)
        # [i, j]: the load of slot i's rank, times the demand for slot j's expert.
        beside = self._beside[np.ix_(self._rank, row)]
        own = np.diagonal(beside)
        spread = (
            square[:, None]
            + square
            - 2.0 * both
            + part[:, None] * (beside.T - own[:, None])
            + part * (beside - own)
        )
        held = self._held[np.ix_(self._rank, row)]
        fixed = self._fixed[row]
        legal = ~(held | held.T | fixed | fixed[:, None])
        # Two received experts for twice the squares and twice the products.
        first, second = np.nonzero(np.triu(legal & (spread < 0.0)))
        return _Moves(spread[first, second], first, row[second].astype(np.intp), second)

    def _writes(self) -> _Moves:
        """Return the legal writes of an expert over a redundant copy that lower the spread."""
        slot = np.flatnonzero((self._count[self._row] > 1) & ~self._fixed[self._row])
        new = np.flatnonzero(~self._fixed & (self._count < self._most))
        old, rank = self._row[slot], self._rank[slot]
        gone, come = self._count[old], self._count[new]
        more, less = 1.0 / (gone - 1) - 1.0 / gone, 1.0 / come - 1.0 / (come + 1)
        beside, own = (self._beside * self._held).sum(axis=0), np.diagonal(self._both)
        leaves = 2.0 * (more * beside[old] - (more + 1.0 / gone) * self._beside[rank, old])
        leaves += own[old] * (more**2 * (gone - 1) + 1.0 / gone**2)
        comes = own[new] * (less**2 * come + 1.0 / (come + 1) ** 2) - 2.0 * less * beside[new]
        shared = self._held[:, old].T.astype(np.float64) @ self._held[:, new]
        together = self._both[np.ix_(old, new)] * (
            shared * more[:, None] * less + 1.0 / (gone[:, None] * (come + 1))
        )
        here = self._beside[np.ix_(rank, new)] / (come + 1)
        spread = leaves[:, None] + comes + 2.0 * (here - together)
        at, what = np.nonzero(~self._held[np.ix_(rank, new)] & (spread < 0.0))
        return _Moves(spread[at, what], slot[at], new[what], np.full(len(at), -1))

    # The effect on the fullest rank

    def _gain(self, moves: _Moves) -> FloatArray:
        """Return the fall of the mean fullest load per received expert; -inf where chance may explain it."""
        now, swap = self._loads.max(axis=1), moves.other >= 0
        after = np.where(swap, self._after_swaps(moves), self._after_writes(moves))
        fall = now[:, None] - after
        mean = fall.mean(axis=0)
        error = fall.std(axis=0) / np.sqrt(max(len(fall) - 1, 1))
        copies = np.where(swap, 2.0, 1.0)
        return np.asarray(np.where(mean > SIGNIFICANT * error, mean / copies, -np.inf))

    def _after_swaps(self, moves: _Moves) -> FloatArray:
        """[n, candidates]: fullest load after each exchange."""
        each = self._samples / np.maximum(self._count, 1)
        moved = each[:, self._row[moves.slot]] - each[:, moves.expert]
        fullest = np.zeros(moved.shape)
        for rank in range(self._ranks):
            sign = (self._rank[moves.other] == rank) * 1.0 - (self._rank[moves.slot] == rank)
            np.maximum(fullest, self._loads[:, [rank]] + sign * moved, out=fullest)
        return fullest

    def _after_writes(self, moves: _Moves) -> FloatArray:
        """[n, candidates]: fullest load after each write."""
        old, new = self._row[moves.slot], moves.expert
        gone, come = np.maximum(self._count[old], 2), self._count[new]
        more = self._samples[:, old] * (1.0 / (gone - 1) - 1.0 / gone)
        less = self._samples[:, new] * (1.0 / (come + 1) - 1.0 / come)
        here = self._samples[:, old] / (gone - 1) - self._samples[:, new] / (come + 1)
        fullest = np.zeros(more.shape)
        for rank in range(self._ranks):
            load = self._loads[:, [rank]] + more * self._held[rank, old] + less * self._held[rank, new]
            np.maximum(fullest, load - here * (self._rank[moves.slot] == rank), out=fullest)
        return fullest
