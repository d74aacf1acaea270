"""Verdict on a switch of layout: the steps after it beside those that the old layout would have taken. Pure.

The rule is that of plans that move experts (`migration.loop_state.verdict`), with whole steps instead of
the prices of a step: each measured step is compared with the old layout's at the same load, as the curves had
it when the switch began. A change of load is therefore neither a gain nor a harm.
"""

from dataclasses import dataclass
from math import sqrt

from fleet.layout_times import LayoutName
from fleet.text import duration
from migration.loop_state.verdict import SIGNIFICANT, Evaluation, moved

LEAST_STEPS = 20
"""Measured steps for a verdict. A report states the median of several."""
_HARM = 0.02
"""Part of a step by which it must be longer than before, at least: curves are no better."""

_EXCUSED = 0.5
"""Part of a promise that noise excuses, at most. Where noise hides all gains, switches that were expected to
gain are believed less with each of them, and the engine stays."""
_MOST_CORRELATED = 0.98
"""Correlation of steps that follow each other, at most: a few steps tell little of it."""


@dataclass(slots=True)
class SwitchTrial:
    """Sums over the measured steps since a switch."""

    plan: str
    before: LayoutName
    after: LayoutName
    gain_of_layers: float = 0.0
    """part of a step that single layers in another form were to save, in the layout of both names"""
    steps: int = 0
    measured: float = 0.0
    """seconds, of all of them"""
    stayed: float = 0.0
    """seconds that the old layout would have taken"""
    promised: float = 0.0
    """seconds that the new one was to take"""
    _squares: float = 0.0
    """of the gain of each step, relative to the old layout"""
    _gains: float = 0.0
    _products: float = 0.0
    """of the gains of each two steps that follow each other"""
    _last: float = 0.0

    def observe(self, seconds: float, stayed: float, promised: float) -> None:
        """Add a measured step, with what both layouts were expected to take at its load. The promise of
        single layers comes on top."""
        gain = 1.0 - seconds / stayed
        self.steps += 1
        self.measured += seconds
        self.stayed += stayed
        self.promised += promised * (1.0 - self.gain_of_layers)
        self._gains += gain
        self._squares += gain * gain
        self._products += gain * self._last
        self._last = gain

    @property
    def gain(self) -> float:
        """Mean part of a step that the switch saved; below 0: steps became longer."""
        return self._gains / self.steps if self.steps else 0.0

    @property
    def error(self) -> float:
        """Standard error of `gain`.

        On a shared machine a slow step follows a slow one. n steps that follow each other with correlation r
        say as much as n (1 - r) / (1 + r) independent ones (a first-order autoregressive process).
        """
        if self.steps < 2:
            return 1.0
        variance = max(self._squares / self.steps - self.gain**2, 0.0)
        together = self._products / (self.steps - 1) - self.gain**2
        correlation = min(max(together / variance, 0.0), _MOST_CORRELATED) if variance else 0.0
        independent = (self.steps - 1) * (1.0 - correlation) / (1.0 + correlation)
        return sqrt(variance / independent)

    def evaluated(self, plan_discount: float) -> Evaluation:
        """Return the verdict. plan_discount: factor applied to predictions so far."""
        if self.steps < LEAST_STEPS:
            reason = f"too little was measured since it ended: {self.steps} steps of {LEAST_STEPS}"
            return Evaluation("unknown", None, plan_discount, reason)
        predicted = 1.0 - self.promised / self.stayed
        realised = None
        if predicted > 0:
            realised = self.gain / predicted
            plan_discount = moved(plan_discount, realised, min(self.error / predicted, _EXCUSED))
        measured, stayed = (duration(one / self.steps) for one in (self.measured, self.stayed))
        would = (
            f"a step takes {measured}, and would take {stayed} with the layers in their former forms"
            if self.before == self.after
            else f"a step takes {measured} in layout {self.after}, and would take {stayed} in {self.before}"
        )
        summary = f"{would} at the same load: {self.gain:.1%} gained of {predicted:.1%} predicted"
        harmful = -self.gain > max(SIGNIFICANT * self.error, _HARM)
        return Evaluation("harmful" if harmful else "kept", realised, plan_discount, summary)
