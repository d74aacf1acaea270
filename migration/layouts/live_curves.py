"""Step times of layouts, calibrated once and corrected by live steps of the layout in force.

Only the layout in force is measured. A live step that is slower than its curve says two things at once: the
machine is slower, in every layout, or this layout's curve is too low here. Both are estimated as logarithms
that drift, each by a scalar Kalman filter without covariances: the machine's factor, which drifts fast, and
for each layout one correction at every calibrated batch, which drifts slowly. So a change is first believed
of the machine, which leaves the comparison of layouts as it was. A step just after a switch tells more of the
new layout, whose corrections are older. Pure: `at` is Unix time, since corrections are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.curves import LayoutCurves
from migration.layouts.curves_record import MOST_LOG, CurveKey, CurvesRecord, LayoutCorrection

STALE_SECONDS = 86_400.0
"""Age from which a layout that is not in force is uncertain: a day, so that what was learnt of the night's
layout lasts until the next night. Until then its deviation grows.
"""
_MACHINE_DRIFT = 0.1**2 / 600
"""Variance of the machine's log factor, per second: 10 % in ten minutes, as by heat or a neighbour."""
_LAYOUT_DRIFT = 0.03**2 / 3600
"""Variance of a layout's correction, per second: 3 % in an hour. A higher drift lets a slow machine pass for
a slow layout, a lower one learns late of a curve that was measured wrongly."""
_UNKNOWN_MACHINE = 0.3**2
"""Variance of the machine's factor before the first live step: scratch measurements leave parts of a step
out."""
_REPORT_NOISE = 0.02
"""Relative standard error of a reported step time."""
_OUTLIER = 4.0
"""Standard errors to which the surprise of one report is cut."""
_LEAST_SHARE = 0.1
"""Least part of the calibrated step that remains where imbalance is lower than at calibration."""


@dataclass(slots=True)
class _Estimate:
    """Estimate of a log factor that drifts."""

    value: float
    variance: float
    updated: float

    def grow(self, drift: float, at: float) -> None:
        """Add the drift since the last update. drift: variance per second. Time never runs backwards."""
        if at > self.updated:
            self.variance = min(self.variance + drift * (at - self.updated), 1.0)
            self.updated = at

    def take(self, surprise: float, share: float, total: float) -> None:
        """Take this estimate's part of a surprise. share: of this estimate in the prediction; total: variance
        of the surprise."""
        gain = self.variance * share / total
        self.value = min(max(self.value + gain * surprise, -MOST_LOG), MOST_LOG)
        self.variance *= 1.0 - gain * share


class _Correction:
    """Log correction of one layout over batch: estimates at the calibrated batches, with lines in log B
    between."""

    __slots__ = ("_at", "knots", "measured")

    def __init__(self, sequences: Sequence[int], measured: float, knots: list[_Estimate]) -> None:
        self._at = [log(number) for number in sequences]
        self.measured = measured
        self.knots = knots

    def around(self, sequences: float) -> tuple[_Estimate, _Estimate, float]:
        """Return the two estimates beside a batch, and the weight of the second."""
        at, x = self._at, log(max(sequences, 1.0))
        if len(at) == 1 or x <= at[0]:
            return self.knots[0], self.knots[0], 0.0
        upper = 1
        while upper < len(at) - 1 and at[upper] < x:
            upper += 1
        weight = min((x - at[upper - 1]) / (at[upper] - at[upper - 1]), 1.0)
        return self.knots[upper - 1], self.knots[upper], weight

    def value(self, sequences: float) -> float:
        """Return the log correction at a batch."""
        low, high, weight = self.around(sequences)
        return low.value + weight * (high.value - low.value)


class LiveCurves:
    """Expected step times of one engine in every layout that it measured at its start."""

    def __init__(
        self,
        key: CurveKey,
        times: Sequence[LayoutTimes],
        at: float,
        *,
        expert_pair: float = 0.0,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        """times: of the engine's join; () if it measured nothing, so that every layout is uncertain.

        expert_pair: seconds per pair of the most loaded rank above the mean (`EngineSpeed.expert_pair`).
        """
        self.key, self.times = key, tuple(times)
        self.curves = LayoutCurves.fitted(self.times)
        self._expert_pair, self._stale = expert_pair, stale_seconds
        self._now = at
        self._surplus: float | None = None
        self._calibrated = {one.layout: one for one in self.times}
        self._machine = _Estimate(0.0, _UNKNOWN_MACHINE, at)
        self._corrections: dict[LayoutName, _Correction] = {
            one.layout: _Correction(one.sequences, at, [_Estimate(0.0, 0.0, at) for _ in one.sequences])
            for one in self.times
        }

    def observe(
        self, layout: LayoutName, sequences: float, context: float, seconds: float, at: float
    ) -> None:
        """Take the median duration of recent decode steps of the layout in force.

        sequences, context: means of those steps. Batches beyond the range that was measured of all layouts
        are left out, since no curve predicts them; so are layouts without a curve. ValueError for a duration
        that is not above 0.
        """
        if not 0.0 < seconds < float("inf"):
            raise ValueError(
                f"live step of layout {layout}: a duration is finite seconds above 0, not {seconds}"
            )
        self.advance(at)
        correction, common = self._corrections.get(layout), self.curves.measured_range
        if correction is None or not common.fewest <= sequences <= common.most:
            return
        machine, now = self._machine, self._now
        low, high, weight = correction.around(sequences)
        machine.grow(_MACHINE_DRIFT, now)
        low.grow(_LAYOUT_DRIFT, now)
        high.grow(_LAYOUT_DRIFT, now)
        expected = log(self._modelled(layout, sequences, context))
        expected += machine.value + low.value + weight * (high.value - low.value)
        total = (
            machine.variance
            + (1.0 - weight) ** 2 * low.variance
            + weight**2 * high.variance
            + _REPORT_NOISE**2
        )
        limit = _OUTLIER * sqrt(total)
        surprise = min(max(log(seconds) - expected, -limit), limit)
        machine.take(surprise, 1.0, total)
        low.take(surprise, 1.0 - weight, total)
        if weight:
            high.take(surprise, weight, total)
        correction.measured = now

    def advance(self, at: float) -> None:
        """Let time pass without a measurement. An earlier time than before changes nothing."""
        self._now = max(self._now, at)

    def imbalance(self, surplus_per_sequence: float) -> None:
        """State the present imbalance of whole experts: pairs of the most loaded rank above the mean, per
        sequence of the engine and summed over layers, as `LayoutTimes.surplus`. Until then that of the
        calibration counts.
        """
        if not 0.0 <= surplus_per_sequence < float("inf"):
            raise ValueError(
                f"imbalance: surplus pairs are finite and at least 0, not {surplus_per_sequence}"
            )
        self._surplus = surplus_per_sequence

    def step_seconds(self, layout: LayoutName, sequences: float, context: float) -> float:
        """Return the expected duration of a decode step. Beyond the measured range the last value holds.

        KeyError for a layout without a curve; `uncertain` is True for it.
        """
        factor = self._machine.value + self._corrections[layout].value(sequences)
        return self._modelled(layout, sequences, context) * exp(factor)

    def prefill_token(self, layout: LayoutName) -> float:
        """Return the expected seconds per prompt token of the engine. KeyError as in `step_seconds`."""
        return self._calibrated[layout].prefill_token * exp(self._machine.value)

    def deviation(self, layout: LayoutName, sequences: float, context: float) -> float:
        """Return the relative standard error of a layout's step time beside other layouts'.

        The machine's factor, which all have in common, is left out. It grows with the time since the layout
        was measured.
        """
        low, high, weight = self._corrections[layout].around(sequences)
        variance = (1.0 - weight) * self._aged(low) + weight * self._aged(high)
        return sqrt(self.curves.curves[layout].deviation(sequences, context) ** 2 + variance)

    def uncertain(self, layout: LayoutName) -> bool:
        """Return True for a layout that has no curve, or was neither calibrated nor in force for
        `stale_seconds`."""
        correction = self._corrections.get(layout)
        return correction is None or self._now - correction.measured > self._stale

    def within(self, sequences: float, context: float) -> bool:
        """Return True where every layout's curve is measured. Elsewhere the last values hold."""
        return self.curves.measured_range.has(sequences, context)

    def _modelled(self, layout: LayoutName, sequences: float, context: float) -> float:
        """Return the calibrated duration of a step, at the imbalance of today."""
        at = self.curves.measured_range.nearest(sequences, context)
        seconds = self.curves.curves[layout].seconds(*at)
        if layout != "ep" or self._surplus is None:
            return seconds
        more = self._expert_pair * (self._surplus - self._calibrated[layout].surplus) * at[0]
        return max(seconds + more, _LEAST_SHARE * seconds)

    def _aged(self, estimate: _Estimate) -> float:
        """Return the variance of a layout's estimate by now."""
        return estimate.variance + _LAYOUT_DRIFT * (self._now - estimate.updated)

    def record(self) -> CurvesRecord:
        """Return everything that a successor needs."""
        return CurvesRecord(
            key=self.key,
            times=self.times,
            machine=self._machine.value,
            machine_variance=self._machine.variance,
            machine_updated=self._machine.updated,
            corrections=tuple(
                LayoutCorrection(
                    layout=layout,
                    measured=one.measured,
                    logs=tuple(knot.value for knot in one.knots),
                    variances=tuple(knot.variance for knot in one.knots),
                    updated=tuple(knot.updated for knot in one.knots),
                )
                for layout, one in self._corrections.items()
            ),
        )

    @classmethod
    def restored(
        cls,
        record: CurvesRecord,
        key: CurveKey,
        times: Sequence[LayoutTimes],
        at: float,
        *,
        expert_pair: float = 0.0,
        stale_seconds: float = STALE_SECONDS,
    ) -> "LiveCurves":
        """Continue from a record, as far as it applies to the engine of this key.

        Another key drops all of it. times: of the engine's join; () takes those of the record, others than
        those begin anew.
        """
        applies = record.key == key and tuple(times) in ((), record.times)
        made = cls(
            key, record.times if applies else times, at, expert_pair=expert_pair, stale_seconds=stale_seconds
        )
        if applies:
            made._machine = _Estimate(record.machine, record.machine_variance, record.machine_updated)
            made._corrections = {
                one.layout: _Correction(
                    times_of.sequences,
                    one.measured,
                    [_Estimate(*each) for each in zip(one.logs, one.variances, one.updated, strict=True)],
                )
                for times_of, one in zip(record.times, record.corrections, strict=True)
            }
        return made
