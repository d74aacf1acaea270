"""Few moves that even out single steps, found on samples of demand instead of their mean. Pure.

The ranks of an engine wait for the fullest one in every step, and a step has few tokens: the requests that
happen to run decide its demand. A placement that is even for the mean demand may be uneven in most steps.
What counts is which experts are in demand *together*: those belong on different ranks, or on both. The
samples are the demand of short intervals, so they show that, and the objective is the mean over samples of
the fullest rank's load. Replicas share evenly, and no slot becomes empty (`full_tables`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, SlotTable
from migration.model.constraints import UNLIMITED, Constraints

HOTTEST = 3
"""Ranks that are tried as the one to relieve, the one that is fullest most often first."""
SIGNIFICANT = 2.0
"""Standard errors, over the samples, by which a move must lower the objective."""


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


class _Move(NamedTuple):
    """One change: experts written into slots."""

    gain: float
    """Fall of the objective per received expert; -inf: none."""
    writes: tuple[tuple[int, int], ...]
    """(slot, expert)"""


_NONE = _Move(-np.inf, ())


class _Layer:
    """Search in one layer. The row is changed in place."""

    def __init__(
        self,
        row: NDArray[np.int16],
        samples: FloatArray,
        ranks: int,
        frozen: NDArray[np.bool_] | None,
        max_replicas: int | None,
    ) -> None:
        self._row, self._samples, self._ranks = row, samples, ranks
        self._per = len(row) // ranks
        self._most = max_replicas or ranks
        experts = samples.shape[1]
        self._fixed = np.zeros(experts, bool) if frozen is None else frozen
        self._rank = np.arange(len(row)) // self._per
        self._held = np.zeros((ranks, experts), bool)
        self._held[self._rank, row] = True
        self._count = np.bincount(row, minlength=experts)

    def go(self, least: float) -> None:
        """Make the best move per received expert until none brings `least`."""
        for _ in range(len(self._row)):
            self._each = self._samples / np.maximum(self._count, 1)
            self._loads = self._each @ self._held.T
            self._now = self._loads.max(axis=1)
            best = max((self._best_for(hot) for hot in self._hottest()), key=lambda move: move.gain)
            if best.gain <= max(least, 1e-9):
                return
            self._make(best)

    def _hottest(self) -> Iterator[int]:
        above = self._loads - self._loads.mean(axis=1, keepdims=True)
        excess = np.where(self._loads == self._now[:, None], above, 0.0)
        order = np.argsort(-excess.sum(axis=0), kind="stable")
        yield from order[: min(HOTTEST, self._ranks)].tolist()

    def _make(self, move: _Move) -> None:
        for slot, expert in move.writes:
            self._held[self._rank[slot], self._row[slot]] = False
            self._count[self._row[slot]] -= 1
            self._row[slot] = expert
        for slot, expert in move.writes:
            self._held[self._rank[slot], expert] = True
            self._count[expert] += 1

    def _best_for(self, hot: int) -> _Move:
        return max((self._swap(hot), self._replace(hot)), key=lambda move: move.gain)

    def _gain(self, fullest: FloatArray, copies: int) -> FloatArray:
        """Fall of the objective per copy, of candidates whose fullest loads are [n, candidates]; -inf where
        chance may explain it."""
        fall = self._now[:, None] - fullest
        mean = fall.mean(axis=0)
        error = fall.std(axis=0) / np.sqrt(max(len(fall) - 1, 1))
        return np.asarray(np.where(mean > SIGNIFICANT * error, mean / copies, -np.inf))

    # Swaps

    def _swap(self, hot: int) -> _Move:
        """Return the best exchange of an expert of this rank for one of another."""
        here = np.flatnonzero((self._rank == hot) & ~self._fixed[self._row])
        best = _NONE
        for other in range(self._ranks):
            there = np.flatnonzero((self._rank == other) & ~self._fixed[self._row])
            if other == hot or not len(here) or not len(there):
                continue
            goes, comes = np.repeat(here, len(there)), np.tile(there, len(here))
            legal = ~self._held[other, self._row[goes]] & ~self._held[hot, self._row[comes]]
            goes, comes = goes[legal], comes[legal]
            if not len(goes):
                continue
            moved = self._each[:, self._row[goes]] - self._each[:, self._row[comes]]
            rest = np.delete(self._loads, [hot, other], axis=1).max(axis=1, initial=0.0)
            fullest = np.maximum(
                np.maximum(self._loads[:, [hot]] - moved, self._loads[:, [other]] + moved), rest[:, None]
            )
            gain = self._gain(fullest, 2)
            at = int(gain.argmax())
            if gain[at] > best.gain:
                a, b = int(goes[at]), int(comes[at])
                best = _Move(float(gain[at]), ((a, int(self._row[b])), (b, int(self._row[a]))))
        return best

    # Replications over redundant copies

    def _replace(self, hot: int) -> _Move:
        """Return the best write of an expert over a redundant copy: an expert of this rank elsewhere, or a
        lighter one here."""
        slots, experts = self._candidates(hot)
        legal = ~self._held[self._rank[slots], experts] & (self._count[experts] < self._most)
        slots, experts = slots[legal], experts[legal]
        if not len(slots):
            return _NONE
        gain = self._gain(self._after(slots, experts), 1)
        at = int(gain.argmax())
        return _Move(float(gain[at]), ((int(slots[at]), int(experts[at])),))

    def _candidates(self, hot: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        redundant = np.flatnonzero((self._count[self._row] > 1) & ~self._fixed[self._row])
        free = np.flatnonzero(~self._fixed)
        away = redundant[self._rank[redundant] != hot]
        own = free[self._held[hot, free]]
        here, foreign = redundant[self._rank[redundant] == hot], free[~self._held[hot, free]]
        return (
            np.concatenate([np.repeat(away, len(own)), np.repeat(here, len(foreign))]),
            np.concatenate([np.tile(own, len(away)), np.tile(foreign, len(here))]),
        )

    def _after(self, slots: NDArray[np.intp], experts: NDArray[np.intp]) -> FloatArray:
        """Return the fullest load after each write: [n, candidates]."""
        old = self._row[slots]
        count_old, count_new = self._count[old], self._count[experts]
        more = self._samples[:, old] * (1.0 / (count_old - 1) - 1.0 / count_old)
        less = self._samples[:, experts] * (1.0 / (count_new + 1) - 1.0 / count_new)
        fullest = np.zeros((len(self._samples), len(slots)))
        for rank in range(self._ranks):
            load = self._loads[:, [rank]] + more * self._held[rank, old] + less * self._held[rank, experts]
            here = self._rank[slots] == rank
            load[:, here] += self._samples[:, experts[here]] / (count_new[here] + 1) - self._samples[
                :, old[here]
            ] / (count_old[here] - 1)
            np.maximum(fullest, load, out=fullest)
        return fullest
