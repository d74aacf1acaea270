"""Speed correction: factors that correct the terms of the time model by the measured speed of engines. Pure;
the time comes in as an argument.

Evidence is the logarithm of observed over predicted seconds. For prefill it is kept per rank and pooled per
engine. For decode it is kept per engine only: the ranks step together, so apparent differences between them
are noise, and one percent of all steps of a request costs more than the location of its experts. A new
observation moves the running mean by its share of the recent evidence, and by at most OUTLIER of its distance
(Huber's clipped residual), so that a single wild value has little effect. Evidence halves with every
HALF_LIFE_SECONDS without observations. A mean counts in proportion to its evidence, so a factor returns to 1
without any. A rank with too little evidence, or none, uses that of its engine.
"""

from collections.abc import Iterable
from math import log

import numpy as np
from numpy.typing import NDArray

from router.fleet_state.target_table import RankKey

PREFILL_SPEED, DECODE_SPEED = 0, 1
"""Rows of the factors."""
MIN_OBSERVATIONS, ENOUGH, MAX_OBSERVATIONS = 4.0, 16.0, 32.0
"""A mean begins to count with MIN_OBSERVATIONS and counts fully with ENOUGH; at most MAX_OBSERVATIONS are
remembered.
"""
OUTLIER = log(2.0)
HALF_LIFE_SECONDS = 60.0
MAX_LOG_RATIO = log(16.0)
"""Logarithms of ratios are clipped to this."""
_MIN_SHARE = 0.1
"""Smallest share of the prefill in the time of a first token."""
NO_ENGINE = 0
"""Engine of rows without observations. It never has evidence."""


def prefill_evidence(predicted_s: float, beside_s: float, observed_s: float) -> tuple[float, float]:
    """Return the logarithm of observed over predicted prefill of a first token that came after observed_s,
    and its weight. predicted_s: the uncorrected model's time of this prefill and of the prefill ahead of it;
    beside_s: everything else that passes until a first token comes. Its error is one of the ratio times
    beside_s / predicted_s, so an observation weighs as the square of the prefill's share (inverse variance).
    """
    ratio = log(max(observed_s - beside_s, _MIN_SHARE * observed_s) / predicted_s)
    return ratio, (predicted_s / (predicted_s + beside_s)) ** 2


class _Evidence:
    """Running means of log ratios and the evidence behind them, each [2][n]. Lists, since entries are written
    one by one.
    """

    def __init__(self) -> None:
        self.mean: list[list[float]] = [[], []]
        self.weight: list[list[float]] = [[], []]

    def reserve(self, columns: int) -> None:
        for rows in (*self.mean, *self.weight):
            rows += [0.0] * (columns - len(rows))

    def add(self, kind: int, at: int, ratio: float, weight: float) -> None:
        """Add an observation. ratio: logarithm; weight: in (0, 1], its share of a full observation."""
        mean, before = self.mean[kind][at], self.weight[kind][at]
        after = min(before + weight, MAX_OBSERVATIONS)
        if after:
            max_step = OUTLIER if before >= MIN_OBSERVATIONS else MAX_LOG_RATIO  # a young mean may be far off
            self.weight[kind][at] = after
            self.mean[kind][at] = mean + min(max(ratio - mean, -max_step), max_step) * weight / after

    def clear(self, at: int) -> None:
        for rows in (*self.mean, *self.weight):
            rows[at] = 0.0

    def age(self, left: float) -> None:
        """Keep this share of the evidence."""
        self.weight = (left * np.array(self.weight)).tolist()

    def trusted(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the degree to which the means count, in [0, 1], and the means times that, each float64 [2,
        n].
        """
        trust = np.clip((np.array(self.weight) - MIN_OBSERVATIONS) / (ENOUGH - MIN_OBSERVATIONS), 0.0, 1.0)
        return trust, trust * np.array(self.mean)


class SpeedCorrection:
    """State: evidence by the rows of the load tables (`Reservations.add_rank`) and by engine. `refresh` turns
    it into factors from time to time; a decision only reads them.
    """

    def __init__(self, limit: float) -> None:
        """limit: a factor is at most this, and at least 1 / limit; 1: no correction."""
        self._limit = log(limit)
        self._ranks = _Evidence()
        self._engines = _Evidence()
        self._engine_at: dict[int, int] = {}
        """columns of engines by worker_id; one column belongs to no engine"""
        self._free_engines: list[int] = []
        self._row_of: dict[RankKey, int] = {}
        self._engine_of: list[int] = []
        self._factors = np.ones((2, 0))
        self._engines.reserve(NO_ENGINE + 1)
        self._refreshed_at: float | None = None

    def reconfigure(self, limit: float) -> None:
        """Apply another limit from the next refresh on."""
        self._limit = log(limit)

    @property
    def measured(self) -> bool:
        """True once anything was observed."""
        return bool(self._row_of)

    def factors(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the multipliers of predicted prefill and decode seconds, float64 [2, len(rows)]. A copy."""
        try:
            return self._factors.take(rows, axis=1)
        except IndexError:  # rows of ranks without observations
            self._reserve(int(rows.max()) + 1)
            return self._factors.take(rows, axis=1)

    def know(self, ranks: Iterable[tuple[RankKey, int]]) -> None:
        """Let ranks, with their rows, have their engine's factors, if anything of the engine was observed. A
        rank that was never observed would otherwise seem faster than its engine, or slower.
        """
        new = [(key, row) for key, row in ranks if key[0] in self._engine_at and self._row_of.get(key) != row]
        for key, row in new:
            self._add_rank(key, row)
        if new:
            self._compute()

    def of(self, row: int) -> tuple[float, float]:
        """Return the same for one rank."""
        return (
            (float(self._factors[0, row]), float(self._factors[1, row]))
            if row < self._factors.shape[1]
            else (1.0, 1.0)
        )

    def prefilled(
        self, key: RankKey, row: int, predicted_s: float, beside_s: float, observed_s: float
    ) -> None:
        """Record a first token (`prefill_evidence`)."""
        if predicted_s > 0 and observed_s > 0:
            self._add(PREFILL_SPEED, key, row, *prefill_evidence(predicted_s, beside_s, observed_s))

    def stepped(
        self, key: RankKey, row: int, predicted_s: float, observed_s: float, weight: float = 1.0
    ) -> None:
        """Record a decode step that took observed_s; the uncorrected model predicts predicted_s. weight: in
        (0, 1].
        """
        if predicted_s > 0 and observed_s > 0:
            self._add(DECODE_SPEED, key, row, log(observed_s / predicted_s), weight)

    def refresh(self, now: float) -> None:
        """Compute factors from the evidence, which ages."""
        if self._refreshed_at is not None:
            left = 0.5 ** (max(now - self._refreshed_at, 0.0) / HALF_LIFE_SECONDS)
            self._ranks.age(left)
            self._engines.age(left)
        self._refreshed_at = now
        self._compute()

    def _compute(self) -> None:
        trust, own = self._ranks.trusted()
        _, pooled = self._engines.trusted()
        logs = own + (1.0 - trust) * pooled.take(np.array(self._engine_of, np.intp), axis=1)
        self._factors = np.exp(np.clip(logs, -self._limit, self._limit))

    def forget_worker(self, worker_id: int) -> None:
        """Drop an incarnation. Its rows may be reused by another."""
        for key in [key for key in self._row_of if key[0] == worker_id]:
            self._clear(self._row_of.pop(key))
        column = self._engine_at.pop(worker_id, None)
        if column is not None:
            self._engines.clear(column)
            self._free_engines.append(column)

    def _add(self, kind: int, key: RankKey, row: int, ratio: float, weight: float) -> None:
        if self._row_of.get(key) != row:
            self._add_rank(key, row)
        ratio = min(max(ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)
        if kind == PREFILL_SPEED:
            self._ranks.add(kind, row, ratio, weight)
        self._engines.add(kind, self._engine_of[row], ratio, weight)

    def _add_rank(self, key: RankKey, row: int) -> None:
        self._reserve(row + 1)
        for other in [other for other, held in self._row_of.items() if held == row]:
            del self._row_of[other]
        self._clear(row)
        self._row_of[key] = row
        column = self._engine_at.get(key[0])
        if column is None:
            column = self._engine_at[key[0]] = (
                self._free_engines.pop() if self._free_engines else len(self._engine_at) + 1
            )
            self._engines.reserve(column + 1)
        self._engine_of[row] = column

    def _clear(self, row: int) -> None:
        self._ranks.clear(row)
        self._engine_of[row] = NO_ENGINE
        self._factors[:, row] = 1.0

    def _reserve(self, rows: int) -> None:
        more = rows - len(self._engine_of)
        if more > 0:
            more = max(more, len(self._engine_of))
            self._engine_of += [NO_ENGINE] * more
            self._ranks.reserve(len(self._engine_of))
            self._factors = np.pad(self._factors, ((0, 0), (0, more)), constant_values=1.0)
