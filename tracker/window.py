"""Counts that fade with time, and the rates they stand for. Pure: the time is an argument.

A window of time constant T weighs what happened u seconds ago with exp(-u / T). Its *exposure* is the integral of that weight
over the time that was observed; a rate is weighted counts / exposure, which is right from the first report on and does not
wait for the window to fill. A report over s seconds counts as evenly spread over them: its counts weigh
T/s * (1 - exp(-s/T)), its exposure is T * (1 - exp(-s/T)), both as of its end. For reports that follow one another the
exposures add up to T * (1 - exp(-age/T)), and a constant rate is estimated exactly. The time since the last report is
silence only beyond PATIENCE of its intervals: what happens now is reported a moment later.
"""

from math import exp, expm1
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
"""float64 [layers, experts]"""
PATIENCE = 2.0
"""Reports are awaited for so many of the last interval's lengths."""


class Window:
    """Weighted counts of one rank (or one model), brought up to date only when it is looked at."""

    def __init__(self, layers: int, experts: int, time_constant: float) -> None:
        self.layers = layers
        self.experts = experts
        self._constant = time_constant
        self._counts: Table = np.zeros((layers, experts))
        self._tokens = 0.0
        self._exposure = 0.0
        self._patience = 0.0
        self._at: float | None = None

    def observe(self, counts: NDArray[Any], tokens: float, seconds: float, now: float, *, lost: bool = False) -> None:
        """A report over the last `seconds`: counts [layers, experts] of (token, k) pairs, and the tokens they come from.

        now: seconds of a clock that never goes back. lost: reports before this one are missing, so that the time since the
        last one is not observed; without it, silence is observed silence.
        """
        observed = -self._constant * expm1(-seconds / self._constant)
        weight = observed / seconds
        if self._at is None or lost:
            exposure = self._fade(now) * self._exposure + observed
            exposure = min(exposure, self._constant)
        else:
            exposure = self._exposure_at(now)
        fade = self._fade(now)
        self._counts *= fade
        self._counts += counts * weight
        self._tokens = self._tokens * fade + tokens * weight
        self._exposure = exposure
        self._patience = PATIENCE * seconds
        self._at = now if self._at is None else max(now, self._at)

    def _fade(self, now: float) -> float:
        return 1.0 if self._at is None else exp(-max(0.0, now - self._at) / self._constant)

    def _exposure_at(self, now: float) -> float:
        fade = self._fade(now)
        return self._exposure * fade + self._constant * (1.0 - fade)

    def counts(self, now: float) -> Table:
        """float64 [layers, experts]: weighted (token, k) pairs."""
        return self._counts * self._fade(now)

    def tokens(self, now: float) -> float:
        """Weighted tokens behind the counts."""
        return self._tokens * self._fade(now)

    def rates(self, now: float) -> Table:
        """float64 [layers, experts]: tokens per second that go to each expert; zeros before the first report."""
        return self.counts(self._judged(now)) / self._divisor(now)

    def tokens_per_second(self, now: float) -> float:
        return self.tokens(self._judged(now)) / self._divisor(now)

    def _judged(self, now: float) -> float:
        """The moment up to which anything can be said: that of the last report, moved on by what is silence beyond doubt."""
        return now if self._at is None else self._at + max(0.0, now - self._at - self._patience)

    def _divisor(self, now: float) -> float:
        return self._exposure_at(self._judged(now)) or 1.0
