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
        lower = np.flatnonzero(self.spread < 0)
        if len(lower) > count:
            lower = lower[np.argpartition(self.spread[lower], count)[:count]]
        return _Moves._make(part[lower] for part in self)


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
        """Return all legal exchanges of two slots."""
        first, second = np.triu_indices(len(self._row), 1)
        a, b, here, there = self._row[first], self._row[second], self._rank[first], self._rank[second]
        legal = ~(self._held[there, a] | self._held[here, b] | self._fixed[a] | self._fixed[b])
        first, second, a, b, here, there = (part[legal] for part in (first, second, a, b, here, there))
        part_a, part_b = 1.0 / self._count[a], 1.0 / self._count[b]
        square = (
            self._both[a, a] * part_a**2
            + self._both[b, b] * part_b**2
            - 2.0 * self._both[a, b] * part_a * part_b
        )
        moved = self._beside[there, a] - self._beside[here, a]
        returned = self._beside[there, b] - self._beside[here, b]
        # Two received experts for twice the square and twice the products.
        return _Moves(square + part_a * moved - part_b * returned, first, b.astype(np.intp), second)

    def _writes(self) -> _Moves:
        """Return all legal writes of an expert over a redundant copy."""
        redundant = np.flatnonzero((self._count[self._row] > 1) & ~self._fixed[self._row])
        free = np.flatnonzero(~self._fixed & (self._count < self._most))
        slot, new = np.repeat(redundant, len(free)), np.tile(free, len(redundant))
        legal = ~self._held[self._rank[slot], new]
        slot, new = slot[legal], new[legal]
        old, rank = self._row[slot], self._rank[slot]
        gone, come = self._count[old], self._count[new]
        more, less = 1.0 / (gone - 1) - 1.0 / gone, 1.0 / come - 1.0 / (come + 1)
        beside = (self._beside * self._held).sum(axis=0)
        products = (
            more * beside[old]
            - (more + 1.0 / gone) * self._beside[rank, old]
            - less * beside[new]
            + self._beside[rank, new] / (come + 1)
        )
        shared = self._held.T.astype(np.float64) @ self._held
        squares = (
            self._both[old, old] * (more**2 * (gone - 1) + 1.0 / gone**2)
            + self._both[new, new] * (less**2 * come + 1.0 / (come + 1) ** 2)
            - 2.0 * self._both[old, new] * (more * less * shared[old, new] + 1.0 / (gone * (come + 1)))
        )
        return _Moves(2.0 * products + squares, slot, new, np.full(len(slot), -1))

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
