"""How fast engines are, measured against what the time model says of them: factors that correct its terms. Pure; time comes in as an argument.

Evidence is the logarithm of observed over predicted seconds, per rank and pooled per engine for prefill, per engine alone for decode: its ranks
step together, so what their steps seem to differ by is noise, and one part in a hundred of all of a request's steps is more than it matters
where its experts are. A new observation moves the running mean by its share of what was seen lately, and by no more than OUTLIER of its distance
(Huber's clipped residual), so that one wild value changes nothing much. Evidence halves with every HALF_LIFE_SECONDS of silence; a mean counts
as far as there is evidence, so that a factor returns to 1 without any. Where a rank has too little of its own, its engine's speaks.
"""

from math import log

import numpy as np
from numpy.typing import NDArray

from router.fleet_state.target_table import RankKey

PREFILL_SPEED, DECODE_SPEED = 0, 1
"""Rows of the factors."""
LEAST, ENOUGH, MOST = 4.0, 16.0, 32.0
"""Observations: with LEAST a mean begins to count, with ENOUGH it counts whole, and no more than MOST are remembered."""
OUTLIER = log(2.0)
HALF_LIFE_SECONDS = 60.0
FARTHEST = log(16.0)
"""Logarithms of ratios beyond are taken for this."""
_LEAST_SHARE = 0.1
"""of a first token's time, at least, is prefill"""
NOBODY = 0
"""The engine of rows that nothing was seen of; it never has evidence."""


class _Evidence:
    """Running means of log ratios and the evidence behind them, each [2][n]; lists, since they are written one by one."""

    def __init__(self) -> None:
        self.mean: list[list[float]] = [[], []]
        self.weight: list[list[float]] = [[], []]

    def reserve(self, columns: int) -> None:
        for rows in (*self.mean, *self.weight):
            rows += [0.0] * (columns - len(rows))

    def add(self, kind: int, at: int, ratio: float, weight: float) -> None:
        """ratio: logarithm; weight: in (0, 1], how much of an observation it is."""
        mean, before = self.mean[kind][at], self.weight[kind][at]
        after = min(before + weight, MOST)
        if after:
            farthest = OUTLIER if before >= LEAST else FARTHEST  # a mean that does not count yet may be anywhere
            self.weight[kind][at] = after
            self.mean[kind][at] = mean + min(max(ratio - mean, -farthest), farthest) * weight / after

    def clear(self, at: int) -> None:
        for rows in (*self.mean, *self.weight):
            rows[at] = 0.0

    def age(self, left: float) -> None:
        """So much of the evidence is left."""
        self.weight = (left * np.array(self.weight)).tolist()

    def trusted(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """float64 [2, n]: how far the means count, in [0, 1], and the means times that."""
        trust = np.clip((np.array(self.weight) - LEAST) / (ENOUGH - LEAST), 0.0, 1.0)
        return trust, trust * np.array(self.mean)


class SpeedCorrection:
    """State: evidence by the rows of the load tables (`Reservations.add_rank`) and by engine. `refresh` makes factors of it, every now
    and then; a decision only reads them."""

    def __init__(self, limit: float) -> None:
        """limit: a factor is at most this, and at least 1 / limit; 1: no correction."""
        self._limit = log(limit)
        self._ranks = _Evidence()
        self._engines = _Evidence()
        self._engine_at: dict[int, int] = {}
        """columns of engines by worker_id; column NOBODY is nobody's"""
        self._free_engines: list[int] = []
        self._row_of: dict[RankKey, int] = {}
        self._engine_of: list[int] = []
        self._factors = np.ones((2, 0))
        self._engines.reserve(NOBODY + 1)
        self._refreshed_at: float | None = None

    def reconfigure(self, limit: float) -> None:
        """Counts from the next refresh on."""
        self._limit = log(limit)

    @property
    def measured(self) -> bool:
        """Whether anything was seen at all."""
        return bool(self._row_of)

    def factors(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """float64 [2, len(rows)]: what predicted prefill and decode seconds are to be multiplied with. A copy."""
        try:
            return self._factors.take(rows, axis=1)
        except IndexError:  # rows of ranks that nothing was seen of yet
            self._reserve(int(rows.max()) + 1)
            return self._factors.take(rows, axis=1)

    def of(self, row: int) -> tuple[float, float]:
        """The same of one rank."""
        return (float(self._factors[0, row]), float(self._factors[1, row])) if row < self._factors.shape[1] else (1.0, 1.0)

    def prefilled(self, key: RankKey, row: int, predicted_s: float, beside_s: float, observed_s: float) -> None:
        """A first token came after observed_s. predicted_s: what the model, uncorrected, says of the prefill and of the prefill before it;
        beside_s: of what else passes until a first token comes. Its error is one of the ratio times beside_s / predicted_s, so that an
        observation weighs as the square of the prefill's share (inverse variance)."""
        if predicted_s > 0 and observed_s > 0:
            ratio = log(max(observed_s - beside_s, _LEAST_SHARE * observed_s) / predicted_s)
            self._add(PREFILL_SPEED, key, row, ratio, (predicted_s / (predicted_s + beside_s)) ** 2)

    def stepped(self, key: RankKey, row: int, predicted_s: float, observed_s: float, weight: float = 1.0) -> None:
        """A decode step took observed_s where the model, uncorrected, says predicted_s. weight: in (0, 1]."""
        if predicted_s > 0 and observed_s > 0:
            self._add(DECODE_SPEED, key, row, log(observed_s / predicted_s), weight)

    def refresh(self, now: float) -> None:
        """Make factors of the evidence, which ages."""
        if self._refreshed_at is not None:
            left = 0.5 ** (max(now - self._refreshed_at, 0.0) / HALF_LIFE_SECONDS)
            self._ranks.age(left)
            self._engines.age(left)
        self._refreshed_at = now
        trust, own = self._ranks.trusted()
        _, pooled = self._engines.trusted()
        logs = own + (1.0 - trust) * pooled.take(np.array(self._engine_of, np.intp), axis=1)
        self._factors = np.exp(np.clip(logs, -self._limit, self._limit))

    def forget_worker(self, worker_id: int) -> None:
        """An incarnation is gone; its rows may be another's next."""
        for key in [key for key in self._row_of if key[0] == worker_id]:
            self._clear(self._row_of.pop(key))
        column = self._engine_at.pop(worker_id, None)
        if column is not None:
            self._engines.clear(column)
            self._free_engines.append(column)

    def _add(self, kind: int, key: RankKey, row: int, ratio: float, weight: float) -> None:
        if self._row_of.get(key) != row:
            self._meet(key, row)
        ratio = min(max(ratio, -FARTHEST), FARTHEST)
        if kind == PREFILL_SPEED:
            self._ranks.add(kind, row, ratio, weight)
        self._engines.add(kind, self._engine_of[row], ratio, weight)

    def _meet(self, key: RankKey, row: int) -> None:
        self._reserve(row + 1)
        for other in [other for other, held in self._row_of.items() if held == row]:
            del self._row_of[other]
        self._clear(row)
        self._row_of[key] = row
        column = self._engine_at.get(key[0])
        if column is None:
            column = self._engine_at[key[0]] = self._free_engines.pop() if self._free_engines else len(self._engine_at) + 1
            self._engines.reserve(column + 1)
        self._engine_of[row] = column

    def _clear(self, row: int) -> None:
        self._ranks.clear(row)
        self._engine_of[row] = NOBODY
        self._factors[:, row] = 1.0

    def _reserve(self, rows: int) -> None:
        more = rows - len(self._engine_of)
        if more > 0:
            more = max(more, len(self._engine_of))
            self._engine_of += [NOBODY] * more
            self._ranks.reserve(len(self._engine_of))
            self._factors = np.pad(self._factors, ((0, 0), (0, more)), constant_values=1.0)
