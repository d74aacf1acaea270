"""Step times of layouts, calibrated once and corrected by live steps of the layout in force.

Only the layout in force is measured. A live step that is slower than its curve says two things at once: the
machine is slower, in every layout, or this layout's curve is too low. Both are estimated as logarithms that
drift: the machine's factor, fast; for each layout a level and a correction at every calibrated batch, slowly.
Each is a Kalman filter of one number, without covariances, and takes its part of the surprise. So a change is
first believed of the machine, which leaves the comparison of layouts as it was. Just after a switch the
machine's factor is known, and a surprise is believed of the new layout, whose corrections are older. Pure:
`at` is Unix time, since corrections are stored.
"""

from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from math import exp, hypot, inf, log, sqrt
from typing import NamedTuple

from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.curves import LayoutCurves
from migration.layouts.curves_record import CurveKey, CurvesRecord, LayoutCorrection
from migration.layouts.log_factor import LogFactor

STALE_SECONDS = 86_400.0
"""Age from which a layout that is not in force is uncertain: a day, so that what was learnt of the night's
layout lasts until the next night. Until then its deviation grows.
"""
_MACHINE_DRIFT = 0.1**2 / 600
"""Variance of the machine's log factor, per second: 10 % in ten minutes, as by heat or a neighbour."""
_LAYOUT_DRIFT = 0.03**2 / 3600
"""Variance of a layout's level, per second: 3 % in an hour. A higher drift lets a slow machine pass for a
slow layout, a lower one learns late of a curve that was measured wrongly."""
_KNOT_DRIFT = 0.02**2 / 3600
"""The same of its correction at one batch."""
_UNKNOWN_MACHINE = 0.3**2
"""Variance of the machine's factor before the first live step: other load than at calibration."""
_UNSEEN_LAYOUT, _UNSEEN_KNOT = 0.03**2, 0.02**2
"""Variance of a layout's corrections before its first live step: a step on scratch memory is not quite a live
one."""
_REPORT_NOISE = 0.02
"""Relative standard error of a reported step time."""
_OUTLIER = 4.0
"""Standard errors to which the surprise of one report is cut."""
_FORMS: tuple[LayoutName, LayoutName] = ("ep", "experts-tp")
"""Layouts with whole and with sharded experts, both with data-parallel attention."""
_LEAST_SHARE = 0.1
"""Least part of the calibrated step that remains where imbalance is lower than at calibration."""


class _Correction:
    """Log correction of one layout over batch."""

    __slots__ = ("_at", "knots", "level", "measured")

    def __init__(
        self, sequences: Sequence[int], measured: float, level: LogFactor, knots: Sequence[LogFactor]
    ) -> None:
        """sequences: the calibrated batches, with a knot for each."""
        self._at = [log(number) for number in sequences]
        self.measured, self.level, self.knots = measured, level, list(knots)

    @classmethod
    def unseen(cls, times: LayoutTimes, at: float) -> "_Correction":
        """Return that of a layout that was calibrated at this time, without any live step since."""
        return cls(
            times.sequences,
            at,
            LogFactor(value=0.0, variance=_UNSEEN_LAYOUT, updated=at),
            [LogFactor(value=0.0, variance=_UNSEEN_KNOT, updated=at) for _ in times.sequences],
        )

    def around(self, sequences: float) -> tuple[LogFactor, LogFactor, float, float]:
        """Return the knots beside a batch, and their weights."""
        at, knots = self._at, self.knots
        x = log(sequences) if sequences > 1.0 else 0.0
        above = bisect_right(at, x)
        if above == 0:
            return knots[0], knots[0], 1.0, 0.0
        if above == len(at):
            return knots[-1], knots[-1], 1.0, 0.0
        weight = (x - at[above - 1]) / (at[above] - at[above - 1])
        return knots[above - 1], knots[above], 1.0 - weight, weight

    def value(self, sequences: float) -> float:
        """Return the log correction at a batch."""
        low, high, of_low, of_high = self.around(sequences)
        return self.level.value + of_low * low.value + of_high * high.value

    def variance(self, sequences: float, at: float) -> float:
        """Return the variance of `value` by this time."""
        return self.estimate(sequences, at)[1]

    def estimate(self, sequences: float, at: float) -> tuple[float, float]:
        """Return `value` and `variance`."""
        low, high, of_low, of_high = self.around(sequences)
        knots = of_low**2 * low.aged(_KNOT_DRIFT, at) + of_high**2 * high.aged(_KNOT_DRIFT, at)
        value = self.level.value + of_low * low.value + of_high * high.value
        return value, self.level.aged(_LAYOUT_DRIFT, at) + knots


class EvenGain(NamedTuple):
    """Seconds of a step that sharding saves in a layer of even load; below 0: it costs."""

    seconds: float
    error: float
    """standard error"""


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
        self.key = key
        self.times = tuple({one.layout: one for one in times}.values())
        self.curves = LayoutCurves.fitted(self.times)
        self._expert_pair, self._stale = expert_pair, stale_seconds
        self._now = at
        self._surplus: float | None = None
        self._sharded = 0.0
        """share of layers that are sharded in the layout ep"""
        self._calibrated = {one.layout: one for one in self.times}
        self._machine = LogFactor(value=0.0, variance=_UNKNOWN_MACHINE, updated=at)
        self._corrections = {one.layout: _Correction.unseen(one, at) for one in self.times}

    def observe(
        self, layout: LayoutName, sequences: float, context: float, seconds: float, at: float
    ) -> None:
        """Take the median duration of recent decode steps of the layout in force.

        sequences, context: means of those steps. Batches beyond the range that was measured of the layout are
        left out, since no curve predicts them; so are layouts without a curve. ValueError for a duration that
        is not above 0, and for a context that is below 0.
        """
        if not 0.0 < seconds < inf or not 0.0 <= context < inf:
            raise ValueError(
                f"live step of layout {layout}: {seconds} s of sequences of {context} tokens; a duration is"
                " finite seconds above 0, and a context finite tokens"
            )
        self.advance(at)
        correction = self._corrections.get(layout)
        if correction is None or not self.curves.curves[layout].measured_range.has_batch(sequences):
            return
        now, machine, level = self._now, self._machine, correction.level
        low, high, of_low, of_high = correction.around(sequences)
        machine.grow(_MACHINE_DRIFT, now)
        level.grow(_LAYOUT_DRIFT, now)
        low.grow(_KNOT_DRIFT, now)
        high.grow(_KNOT_DRIFT, now)
        total = machine.variance + level.variance + _REPORT_NOISE**2
        total += of_low**2 * low.variance + of_high**2 * high.variance
        limit = _OUTLIER * sqrt(total)
        surprise = min(max(log(seconds / self.step_seconds(layout, sequences, context)), -limit), limit)
        machine.take(surprise, 1.0, total)
        level.take(surprise, 1.0, total)
        low.take(surprise, of_low, total)
        high.take(surprise, of_high, total)
        correction.measured = now

    def advance(self, at: float) -> None:
        """Let time pass without a measurement. An earlier time than before changes nothing."""
        self._now = max(self._now, at)

    def imbalance(self, surplus_per_sequence: float) -> None:
        """State the present imbalance of whole experts: pairs of the most loaded rank above the mean, per
        sequence of the engine and summed over layers, as `LayoutTimes.surplus`. Until then that of the
        calibration counts.
        """
        if not 0.0 <= surplus_per_sequence < inf:
            raise ValueError(
                f"imbalance: surplus pairs are finite and at least 0, not {surplus_per_sequence}"
            )
        self._surplus = surplus_per_sequence

    def sharded_layers(self, share: float) -> None:
        """State the share of layers that are sharded in the layout ep: single hot ones, 0 to 1."""
        self._sharded = share

    @property
    def knows_imbalance(self) -> bool:
        """True once the imbalance of today is known. Until then a live step of the layout ep says little."""
        return self._surplus is not None

    def even_layer_gain(self, sequences: float, context: float, layers: int) -> EvenGain | None:
        """Return what sharding saves in one of `layers` layers, if its load is even in every step. None:
        whole or sharded experts were not measured, or too long ago.

        In seconds of the machine at calibration, as `EngineSpeed` is; see `machine`.
        """
        if any(map(self.uncertain, _FORMS)):
            return None
        calibrated = (
            self._ep_seconds(sequences, context, 0.0, 0.0),
            self.curves.seconds("experts-tp", sequences, context),
        )
        whole, sharded = (
            seconds * exp(self._corrections[layout].value(sequences))
            for layout, seconds in zip(_FORMS, calibrated, strict=True)
        )
        errors = (self.deviation(layout, sequences, context) for layout in _FORMS)
        error = hypot(*(part * seconds for part, seconds in zip(errors, (whole, sharded), strict=True)))
        return EvenGain((whole - sharded) / layers, error / layers)

    @property
    def machine(self) -> float:
        """Factor by which all steps take longer than at calibration."""
        return exp(self._machine.value)

    def step_seconds(self, layout: LayoutName, sequences: float, context: float) -> float:
        """Return the expected duration of a decode step. Beyond the measured range the last value holds.

        KeyError for a layout without a curve; `uncertain` is True for it.
        """
        factor = self._machine.value + self._corrections[layout].value(sequences)
        return self._modelled(layout, sequences, context) * exp(factor)

    def step(self, layout: LayoutName, sequences: float, context: float) -> tuple[float, float]:
        """Return `step_seconds` and `deviation` at the price of one of them."""
        value, variance = self._corrections[layout].estimate(sequences, self._now)
        seconds, error = self.curves.step(layout, sequences, context)
        if layout == "ep" and (self._surplus is not None or self._sharded):
            seconds = self._modelled(layout, sequences, context)
        return seconds * exp(self._machine.value + value), sqrt(error * error + variance)

    def prefill_token(self, layout: LayoutName) -> float:
        """Return the expected seconds per prompt token of the engine. KeyError as in `step_seconds`."""
        return self._calibrated[layout].prefill_token * exp(self._machine.value)

    def deviation(self, layout: LayoutName, sequences: float, context: float) -> float:
        """Return the relative standard error of a layout's step time beside other layouts'.

        The machine's factor, which all have in common, is left out. It grows with the time since the layout
        was measured.
        """
        variance = self._corrections[layout].variance(sequences, self._now)
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
        """Return the calibrated duration of a step, at the imbalance of today and with the layers that are
        sharded."""
        if layout != "ep" or (self._surplus is None and not self._sharded):
            return self.curves.seconds(layout, sequences, context)
        surplus = self._surplus
        if surplus is None:
            surplus = (1.0 - self._sharded) * self._calibrated[layout].surplus
        return self._ep_seconds(sequences, context, surplus, self._sharded)

    def _ep_seconds(self, sequences: float, context: float, surplus: float, sharded: float) -> float:
        """Return the calibrated duration of a step in the layout ep, at an imbalance and with a share of the
        layers sharded, which then take as long as in experts-tp."""
        seconds = self.curves.seconds("ep", sequences, context)
        batch, _ = self.curves.curves["ep"].measured_range.nearest(sequences, context)
        even = seconds - self._expert_pair * self._calibrated["ep"].surplus * batch
        if sharded and "experts-tp" in self._calibrated:
            even += sharded * (self.curves.seconds("experts-tp", sequences, context) - even)
        return max(even + self._expert_pair * surplus * batch, _LEAST_SHARE * seconds)

    def corrected(self) -> LayoutCurves:
        """Return the curves as they are believed now, to be shown: with their differences and crossings.
        Deviations are those of `deviation`."""
        return LayoutCurves(
            {
                layout: curve.replaced(partial(self.step_seconds, layout), partial(self.deviation, layout))
                for layout, curve in self.curves.curves.items()
            }
        )

    def copied(self) -> "LiveCurves":
        """Return the curves as they are now, which later steps do not change."""
        return deepcopy(self)

    def record(self) -> CurvesRecord:
        """Return everything that a successor needs."""
        return CurvesRecord(
            key=self.key,
            times=self.times,
            machine=self._machine.copy(),
            corrections=tuple(
                LayoutCorrection(
                    layout=layout,
                    measured=one.measured,
                    level=one.level.copy(),
                    knots=tuple(knot.copy() for knot in one.knots),
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
            made._machine = record.machine.copy()
            made._corrections = {
                one.layout: _Correction(
                    times_of.sequences, one.measured, one.level.copy(), [knot.copy() for knot in one.knots]
                )
                for times_of, one in zip(record.times, record.corrections, strict=True)
            }
        return made
