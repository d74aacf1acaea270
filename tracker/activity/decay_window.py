"""Exponentially decayed counts and rates, under two time constants at once. Pure: time is an argument.

A time constant T weighs an event of age u with exp(-u / T). A report over s seconds that ends at e counts as
evenly spread over them. At time t its counts weigh T/s * (1 - exp(-s/T)) * exp(-(t-e)/T), and its observed
time weighs s times that. A rate is weighted counts / *exposure*, the weighted observed time. It is therefore
correct from the first report on, without a wait for the window to fill. Exposure is the larger of two sums,
both independent of the order of reports:

- all time since the start of the first report, minus the time of lost reports (`lose`): time without activity
  counts as observed;
- the total time covered by the reports: a burst of delayed reports counts for the time it covers, not for the
  duration of the burst.

Time since the newest report counts as idle only beyond PATIENCE report intervals: present activity is
reported with a delay.

Sums are kept in forward form (Cormode et al. 2009, Forward Decay, section 3). A report enters with its weight
as of a fixed reference time, existing sums stay unchanged, and readers divide by the growth since the
reference. References lie on a grid of MOVE time constants, so that a report is weighed once for all its
windows. Reports are accumulated in batches, as one matrix product of weights and counts, because half of the
time is spent on fetching a rank's sums from memory.
"""

from math import exp, expm1, floor, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array

FAST, SLOW = 0, 1
"""Index of the fast and of the slow time constant."""
PATIENCE = 2.0
"""Wait for the next report, in lengths of the last interval."""
MOVE = 30.0
"""Time constants from one reference to the next. Weights stay below e^30, far inside the range of float32."""
BATCH = 8
"""Reports accumulated together."""
MIN_EXPONENT = -700.0
"""Exponents below this are treated as zero weight."""


class WindowReport:
    """Activity over `seconds` that ended at `end`: counts [layers, experts] of (token, k) pairs, of any
    number type, and tokens.
    """

    __slots__ = ("_weighed", "counts", "end", "seconds", "tokens")

    def __init__(self, counts: NDArray[Any], tokens: float, seconds: float, end: float) -> None:
        self.counts = counts
        self.tokens = tokens
        self.seconds = seconds
        self.end = end
        self._weighed: dict[tuple[float, float], float] = {}

    def span(self, constant: float, reference: float) -> float:
        """Return the weight of its time as of a reference. The weight of its counts and tokens is this
        divided by `seconds`.
        """
        found = self._weighed.get((constant, reference))
        if found is None:
            found = self._weighed[constant, reference] = weight_of(
                self.seconds, self.end, constant, reference
            )
        return found


def weight_of(seconds: float, end: float, constant: float, reference: float) -> float:
    """Integral of exp((t - reference) / constant) over the seconds before end."""
    return -constant * expm1(-seconds / constant) * exp(max(MIN_EXPONENT, (end - reference) / constant))


class _Sums:
    """Decayed sums under one time constant."""

    __slots__ = ("constant", "counts", "lost", "own", "reference", "tokens")

    def __init__(self, layers: int, experts: int, constant: float) -> None:
        self.constant = constant
        self.counts: Float32Array = np.zeros((layers, experts), np.float32)
        self.tokens = 0.0
        self.own = 0.0
        """time covered by reports"""
        self.lost = 0.0
        """time of missing reports"""
        self.reference: float | None = None

    def advance(self, end: float) -> float:
        """Return the reference for an event that ends at `end`, after advancing it if necessary."""
        reference = floor(end / (MOVE * self.constant)) * MOVE * self.constant
        if self.reference is None:
            self.reference = reference
        elif reference > self.reference:
            fade = self.fade(reference)
            self.counts *= np.float32(fade)
            self.tokens, self.own, self.lost = self.tokens * fade, self.own * fade, self.lost * fade
            self.reference = reference
        return self.reference

    def fade(self, now: float) -> float:
        """Return the factor from weights as of the reference to weights at a time not before the newest
        report.
        """
        return 0.0 if self.reference is None else exp((self.reference - now) / self.constant)


class DecayWindow:
    """Weighted counts of one rank (or one model). Times are seconds of one clock.

    sources: number of concurrent publishers. A loss by one of them is only its share of the whole.
    """

    def __init__(self, layers: int, experts: int, constants: tuple[float, float]) -> None:
        self.layers = layers
        self.experts = experts
        self.sources = 1
        self._sums = tuple(_Sums(layers, experts, constant) for constant in constants)
        self._began = inf
        self._waiting: list[WindowReport] = []
        self._newest = (-inf, 0.0)
        """end and length of the newest report"""

    def observe(self, report: WindowReport) -> None:
        """Add a report. Reports may arrive in any order, each once. Their counts must not change
        afterwards."""
        self._began = min(self._began, report.end - report.seconds)
        if report.end >= self._newest[0]:
            self._newest = max(self._newest, (report.end, report.seconds))
        self._waiting.append(report)
        if len(self._waiting) >= BATCH:
            self._add_up()

    def _add_up(self) -> None:
        """Accumulate the waiting reports."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        spans = np.empty((len(self._sums), len(waiting)), np.float64)
        for row, sums in zip(spans, self._sums, strict=True):
            reference = sums.advance(max(report.end for report in waiting))
            row[:] = [report.span(sums.constant, reference) for report in waiting]
            sums.own += float(row.sum())
        weights = spans / [report.seconds for report in waiting]
        counts = np.empty((len(waiting), self.layers, self.experts), np.float32)
        for place, report in zip(counts, waiting, strict=True):
            place[:] = report.counts
        gained = weights.astype(np.float32) @ counts.reshape(len(waiting), -1)
        tokens = weights @ [report.tokens for report in waiting]
        for number, sums in enumerate(self._sums):
            sums.counts += gained[number].reshape(sums.counts.shape)
            sums.tokens += float(tokens[number])

    def take(self, counts: NDArray[Any], tokens: float, now: float, level: int) -> None:
        """Add counts without an interval, as of this moment. They do not contribute to rates."""
        sums = self._sums[level]
        weight = exp((now - sums.advance(now)) / sums.constant)
        sums.counts += counts * np.float32(weight)
        sums.tokens += tokens * weight
        self._newest = max(self._newest, (now, 0.0))

    def lose(self, start: float, end: float, *, recovered: bool = False) -> None:
        """Mark the time from start to end as unobserved; recovered: as observed again. An empty span has no
        effect.
        """
        if end > start:
            for sums in self._sums:
                span = weight_of(end - start, end, sums.constant, sums.advance(end))
                sums.lost = max(0.0, sums.lost - span) if recovered else sums.lost + span

    def counts(self, level: int, now: float) -> Float32Array:
        """Return weighted (token, k) pairs: float32 [layers, experts]."""
        self._add_up()
        sums = self._sums[level]
        return sums.counts * np.float32(sums.fade(max(now, self._newest[0])))

    def tokens(self, level: int, now: float) -> float:
        """Return the weighted tokens behind the counts."""
        self._add_up()
        sums = self._sums[level]
        return sums.tokens * sums.fade(max(now, self._newest[0]))

    def rates(self, level: int, now: float) -> Float32Array:
        """Return tokens per second to each expert: float32 [layers, experts]; zeros before the first
        report."""
        self._add_up()
        sums, at = self._sums[level], self._evaluation_time(now)
        return sums.counts * np.float32(sums.fade(at) / self._exposure(sums, at))

    def tokens_per_second(self, level: int, now: float) -> float:
        self._add_up()
        sums, at = self._sums[level], self._evaluation_time(now)
        return sums.tokens * sums.fade(at) / self._exposure(sums, at)

    def _evaluation_time(self, now: float) -> float:
        """Return the time up to which activity is known: the end of the newest report plus certain idle
        time."""
        end, seconds = self._newest
        return end + max(0.0, now - end - PATIENCE * seconds) if end > -inf else now

    def _exposure(self, sums: _Sums, at: float) -> float:
        if self._began == inf:
            return 1.0
        share = sums.fade(at) / self.sources
        elapsed = -sums.constant * expm1((self._began - at) / sums.constant)
        return max(elapsed - sums.lost * share, sums.own * share) or 1.0

    @property
    def stored_bytes(self) -> int:
        return sum(sums.counts.nbytes for sums in self._sums) + sum(
            report.counts.nbytes for report in self._waiting
        )

    def state(self) -> dict[str, Any]:
        """Return the complete state, for msgpack."""
        self._add_up()
        return {
            "shape": [self.layers, self.experts],
            "sources": self.sources,
            "began": self._began,
            "newest": list(self._newest),
            "sums": [
                [sums.reference, sums.tokens, sums.own, sums.lost, sums.counts.astype("<f4").tobytes()]
                for sums in self._sums
            ],
        }

    @classmethod
    def restore(cls, constants: tuple[float, float], state: dict[str, Any]) -> "DecayWindow":
        """Restore a window. ValueError if this is not the state of one."""
        try:
            layers, experts = (int(size) for size in state["shape"])
            window = cls(layers, experts, constants)
            window.sources, window._began = max(1, int(state["sources"])), float(state["began"])
            end, seconds = state["newest"]
            window._newest = (float(end), float(seconds))
            for sums, (reference, tokens, own, lost, counts) in zip(window._sums, state["sums"], strict=True):
                sums.reference = None if reference is None else float(reference)
                sums.tokens, sums.own, sums.lost = float(tokens), float(own), float(lost)
                sums.counts = np.frombuffer(counts, "<f4").reshape(layers, experts).astype(np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no state of a window: {error}") from error
        if not all(
            np.isfinite(sums.counts).all() and min(sums.counts.min(), sums.tokens, sums.own, sums.lost) >= 0
            for sums in window._sums
        ):
            raise ValueError("no state of a window: sums must be finite and not negative")
        return window
