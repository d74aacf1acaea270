"""Step times of layouts over batch and context, from a few measurements, and where one layout overtakes
another."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby, pairwise
from math import exp, hypot, inf, log
from typing import NamedTuple

import numpy as np

from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.step_fit import bend_models

_INTERVALS = 96
"""Intervals of a table, even in log B: 8 % of B each between 1 and 2,048."""
INDIFFERENCE = 0.025
"""Relative difference of step times below which two layouts are alike: half of the 5 % that count as a
difference."""
_SIGNIFICANT = 1.3
"""Standard errors from 0 at which a layout counts as better on one side of a crossing. A higher number misses
crossings, a lower one sees some where there are none; `benchmarks/layouts/curves.py` prints both shares.
"""


class MeasuredRange(NamedTuple):
    """Fewest and most sequences, and shortest and longest context in tokens, that were measured."""

    fewest: float
    most: float
    shortest: float
    longest: float

    def has(self, sequences: float, context: float) -> bool:
        """Return True where the curve is measured; elsewhere the nearest measured value holds."""
        return self.fewest <= sequences <= self.most and self.shortest <= context <= self.longest

    def has_batch(self, sequences: float) -> bool:
        """Return True for a batch that is measured, in some context."""
        return self.fewest <= sequences <= self.most

    def common(self, other: "MeasuredRange") -> "MeasuredRange":
        """Return the part of both; empty, with fewest > most, if they do not overlap."""
        return MeasuredRange(
            max(self.fewest, other.fewest),
            min(self.most, other.most),
            max(self.shortest, other.shortest),
            min(self.longest, other.longest),
        )

    def nearest(self, sequences: float, context: float) -> tuple[float, float]:
        """Return the measured batch and context nearest to these."""
        return (
            min(max(sequences, self.fewest), self.most),
            min(max(context, self.shortest), self.longest),
        )


EVERYWHERE = MeasuredRange(0.0, inf, 0.0, inf)
Price = Callable[[float, float], float]
"""Seconds, or a share, of a number of sequences and a context."""


def _tabulated(measured: MeasuredRange) -> list[float]:
    """Return the batches of a table: _INTERVALS + 1, even in log B."""
    growth = measured.most / measured.fewest
    return [measured.fewest * growth ** (at / _INTERVALS) for at in range(_INTERVALS + 1)]


class StepCurve:
    """Duration of a decode step of one layout over the engine's decoding sequences and their mean context.

    Between batches it is the posterior mean of `migration.layouts.step_fit`; between contexts, in tokens, a
    line, as reading the KV cache is. Beyond the measured range the last value holds: `within` says where.
    """

    __slots__ = ("_contexts", "_first", "_per_log", "_rows", "measured_range")

    def __init__(
        self,
        measured_range: MeasuredRange,
        contexts: Sequence[float],
        seconds: list[list[float]],
        deviations: list[list[float]],
    ) -> None:
        """seconds, deviations: tables [contexts][batches of `_tabulated`]."""
        self.measured_range = measured_range
        fewest, most, _, _ = measured_range
        self._contexts = list(contexts)
        self._first = log(fewest)
        self._per_log = _INTERVALS / log(most / fewest) if most > fewest else 0.0
        self._rows = [_cells(*both) for both in zip(seconds, deviations, strict=True)]

    @classmethod
    def fitted(cls, times: LayoutTimes) -> "StepCurve":
        """Fit the measured times of a layout, and tabulate the curve. It takes milliseconds."""
        models = bend_models(times.sequences, times.noise, _INTERVALS)
        rows = [models.fit(np.log(np.array(row))) for row in times.seconds]
        return cls(
            MeasuredRange(times.sequences[0], times.sequences[-1], times.contexts[0], times.contexts[-1]),
            times.contexts,
            [np.exp(row.mean).tolist() for row in rows],
            [row.deviation.tolist() for row in rows],
        )

    def replaced(self, seconds: Price, deviation: Price) -> "StepCurve":
        """Return a curve over the same range with other figures, which are asked for at its batches and
        contexts."""
        batches = _tabulated(self.measured_range)
        tables = [
            [[price(batch, context) for batch in batches] for context in self._contexts]
            for price in (seconds, deviation)
        ]
        return StepCurve(self.measured_range, self._contexts, *tables)

    def seconds(self, sequences: float, context: float) -> float:
        """Return the duration of a step of this many decoding sequences, of this many tokens each on
        average."""
        return self.step(sequences, context)[0]

    def deviation(self, sequences: float, context: float) -> float:
        """Return the relative standard error of `seconds`."""
        return self.step(sequences, context)[1]

    def within(self, sequences: float, context: float) -> bool:
        """Return True inside the measured range. Elsewhere the last value holds."""
        return self.measured_range.has(sequences, context)

    def step(self, sequences: float, context: float) -> tuple[float, float]:
        """Return `seconds` and `deviation`. Plain numbers, interpolated together: policies ask on every
        report."""
        fewest, most, _, _ = self.measured_range
        inside = fewest if sequences < fewest else most if sequences > most else sequences
        at = (log(inside) - self._first) * self._per_log
        cell = int(at)
        if cell >= _INTERVALS:
            cell = _INTERVALS - 1
        part = at - cell
        contexts = self._contexts
        after = bisect_right(contexts, context)
        seconds, rise, deviation, its_rise = self._rows[after - 1 if after else 0][cell]
        seconds += part * rise
        deviation += part * its_rise
        if not 0 < after < len(contexts):
            return seconds, deviation
        further, rise, its_deviation, its_rise = self._rows[after][cell]
        before = contexts[after - 1]
        share = (context - before) / (contexts[after] - before)
        return (
            seconds + share * (further + part * rise - seconds),
            deviation + share * (its_deviation + part * its_rise - deviation),
        )


def _cells(seconds: list[float], deviations: list[float]) -> list[tuple[float, float, float, float]]:
    """Return what a step is interpolated from in each interval of a table: duration and standard error where
    it begins, each with its rise to the end."""
    return [
        (low, high - low, error, next_error - error)
        for (low, high), (error, next_error) in zip(pairwise(seconds), pairwise(deviations), strict=True)
    ]


class CostDifference(NamedTuple):
    """Logarithm of the ratio of two layouts' step times."""

    log_ratio: float
    """log(t of the one / t of the other): below 0 the one is faster"""
    deviation: float
    """standard error"""
    within: bool
    """False beyond the measured range of either layout, where the last difference holds"""

    @property
    def indifferent(self) -> bool:
        """True if the difference is too small to matter, or not significant."""
        return abs(self.log_ratio) < max(INDIFFERENCE, self.deviation)


class Crossing(NamedTuple):
    """A batch at which another layout becomes the faster one."""

    sequences: float
    surely_below: float
    """up to this batch `below` is faster, significantly"""
    surely_above: float
    """from this batch on `above` is faster, significantly"""
    below: LayoutName
    above: LayoutName


class LayoutCurves:
    """Curves of the layouts of one engine, compared where both were measured."""

    def __init__(self, curves: Mapping[LayoutName, StepCurve]) -> None:
        self.curves = dict(curves)
        self.measured_range = reduce(
            MeasuredRange.common, (one.measured_range for one in curves.values()), EVERYWHERE
        )
        """of all layouts"""
        self._widest = max(curves.values(), key=lambda one: one.measured_range.most, default=None)

    @classmethod
    def fitted(cls, times: Sequence[LayoutTimes]) -> "LayoutCurves":
        """Fit the curves of all measured layouts. Of two tables of one layout the last counts."""
        return cls({one.layout: StepCurve.fitted(one) for one in times})

    def seconds(self, layout: LayoutName, sequences: float, context: float) -> float:
        """Return the duration of a step. KeyError for a layout without a curve.

        Beyond what was measured of this layout, its ratio to the layout that was measured up to the largest
        batch holds, not its time: of two layouts, the one that was measured less is not the faster one for
        that.
        """
        return self.step(layout, sequences, context)[0]

    def step(self, layout: LayoutName, sequences: float, context: float) -> tuple[float, float]:
        """Return `seconds`, and their relative standard error where the layout was measured."""
        curve, widest = self.curves[layout], self._widest
        found = curve.step(sequences, context)
        if widest is curve or widest is None or curve.measured_range.has(sequences, context):
            return found
        at = curve.measured_range.nearest(sequences, context)
        return found[0] * widest.seconds(sequences, context) / widest.seconds(*at), found[1]

    def difference(
        self, one: LayoutName, other: LayoutName, sequences: float, context: float
    ) -> CostDifference:
        """Compare two layouts. KeyError for a layout without a curve."""
        first, second = self.curves[one], self.curves[other]
        return CostDifference(
            log(self.seconds(one, sequences, context) / self.seconds(other, sequences, context)),
            hypot(first.deviation(sequences, context), second.deviation(sequences, context)),
            first.within(sequences, context) and second.within(sequences, context),
        )

    def better(self, sequences: float, context: float) -> LayoutName:
        """Return the layout with the shortest expected step, also where the difference is small."""
        names = list(self.curves)
        best = names[0]
        for name in names[1:]:
            if self.difference(name, best, sequences, context).log_ratio < 0:
                best = name
        return best

    def crossings(self, one: LayoutName, other: LayoutName, context: float) -> tuple[Crossing, ...]:
        """Return the batches at which the faster of two layouts changes, ascending; () if none does.

        A change counts if each layout is significantly faster somewhere on its side, so that noise around a
        small difference makes no crossings.
        """
        regions = list(self._regions(one, other, context))
        return tuple(
            Crossing(
                sequences=self._zero(one, other, context, left.last, right.first),
                surely_below=left.last,
                surely_above=right.first,
                below=left.faster,
                above=right.faster,
            )
            for left, right in pairwise(regions)
        )

    def _regions(self, one: LayoutName, other: LayoutName, context: float) -> Iterator["_Region"]:
        """Yield the ranges of batches in which either layout is significantly faster, in turn."""
        both = self.curves[one].measured_range.common(self.curves[other].measured_range)
        if both.fewest > both.most:
            return
        compared = [(batch, self.difference(one, other, batch, context)) for batch in _tabulated(both)]
        sure = [
            (batch, one if each.log_ratio < 0 else other)
            for batch, each in compared
            if abs(each.log_ratio) > _SIGNIFICANT * each.deviation
        ]
        for faster, run in groupby(sure, key=lambda entry: entry[1]):
            batches = [batch for batch, _ in run]
            yield _Region(faster, batches[0], batches[-1])

    def _zero(self, one: LayoutName, other: LayoutName, context: float, low: float, high: float) -> float:
        """Return a batch between low and high where the expected difference is 0, by halving in log B."""
        sign = self.difference(one, other, low, context).log_ratio < 0
        for _ in range(40):
            middle = exp(0.5 * (log(low) + log(high)))
            if (self.difference(one, other, middle, context).log_ratio < 0) == sign:
                low = middle
            else:
                high = middle
        return low


class _Region(NamedTuple):
    faster: LayoutName
    first: float
    last: float
