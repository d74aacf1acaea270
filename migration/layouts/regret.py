"""Roost's layout policy: the regret of staying, with that of requests that wait, against the cost of going.

The regret of staying is that of ski rental (Karlin et al., Competitive snoopy caching, 1988): the serving
time that the work since the last switch would have saved in another layout, `max(0, regret + saved)`. The
engine switches once regret reaches the loss of the switch. Four things are added.

1. *Queue.* While requests wait because the layout in force has no free sequence or KV, time is saved in a
   layout that runs more of them at once, even if its steps are longer. Not more than its steps can compute
   prompts for: sequences end at the rate at which prompts begin.
2. *Trend.* While the number of requests rises or falls by more than chance explains, what another layout
   would save at the number to come counts beside the regret. So the beginning and the end of a burst are
   answered earlier.
3. *Memory.* Regret is forgotten with a time constant that grows with the time since the last switch. So a
   dear switch, over a slow link, needs a gain that pays for it within that time, and a small gain of long ago
   is no reason to go now.
4. *Doubt.* A gain within the standard error of the step times is none, and a layout whose step times are
   uncertain is no candidate.
"""

from collections.abc import Mapping
from math import exp, hypot, sqrt
from typing import NamedTuple

from fleet.layout_times import LayoutName
from migration.layouts.costs import LayoutLimits, StepCosts, SwitchCost
from migration.layouts.policy import LayoutDecision, LayoutLoad


class RegretSettings(NamedTuple):
    """Settings of the policy. `benchmarks/layout_policy.py` compares them on serving and rollouts."""

    hysteresis: float = 1.2
    """multiple of a switch's loss that must be reached, if that is small: 1 in ski rental"""
    dear: float = 1.0
    """seconds: a loss that raises this multiple by 1. Over a slow link a switch takes longer, and a burst
    that comes meanwhile, or just after, finds the engine in the wrong layout with both ways still to pay
    """
    memory: float = 30.0
    """seconds: least time constant of regret, and so the time in which a switch has to pay. Bursts last about
    as long
    """
    trend: float = 4.0
    """seconds over which the number of requests is averaged, and for which its change is expected to last"""
    doubt: float = 1.0
    """standard errors of the difference of step times that do not count. Where a machine is too busy for
    its layouts to be told apart, engines stay
    """

    def check(self) -> "RegretSettings":
        """Return the settings. ValueError names a setting that is out of range."""
        bad = [
            f"{name} {value:g}"
            for name, value in self._asdict().items()
            if not (0 <= value <= 1e6 and (value > 0 or name in ("trend", "doubt")))
        ]
        if bad:
            raise ValueError(
                f"settings of the layout policy: {', '.join(bad)}; hysteresis, dear and memory must be above"
                " 0, trend and doubt from 0 on"
            )
        return self


DEFAULT_SETTINGS = RegretSettings()
FULL = 1.05
"""A layout is full if at most this times the running sequences could run."""
SMOOTH = 15.0
"""Seconds over which the prompt tokens of steps are averaged."""
LASTING = 0.5
"""Share of the time since the last switch that is the time constant of regret, if that is longer than the
setting: a load that has lasted for long is likely to last. So a small gain is taken at last.
"""
PREFILL_ERROR = 0.05
"""Relative difference of the costs of a prompt token that is within the error of their measurement, for which
no standard error is known."""


_WHOLE = 0.995
"""A discount factor from this one on is not worth telling."""


class _Candidate(NamedTuple):
    """Another layout at a report, seconds of serving."""

    layout: LayoutName
    regret: float
    coming: float
    """that would be saved at the number of requests to come, if the trend lasts; at least 0"""
    cost: float
    discount: float
    """as in `LayoutLoad`"""
    refusal: str
    """why it cannot be the target now; empty: it can"""

    @property
    def surplus(self) -> float:
        """Gain beyond the cost."""
        return self.discount * (self.regret + self.coming) - self.cost

    @property
    def goes(self) -> bool:
        """True if it is the target now."""
        return self.surplus >= 0.0 and not self.refusal

    def __str__(self) -> str:
        """Return the sentence with the numbers that decided."""
        figures = f"regret {self.regret:.3g} s and {self.coming:.3g} s by the trend of the load"
        if self.discount < _WHOLE:
            figures += f" (counted at {self.discount:.0%}, after the results of earlier plans)"
        if self.goes:
            return f"turns to {self.layout}: {figures} reach the cost of {self.cost:.3g} s"
        if self.refusal:
            return f"stays: {self.layout} has {figures}, but {self.refusal}"
        return f"stays: {figures} for {self.layout} are below the cost of {self.cost:.3g} s"


class RegretPolicy:
    """Policy of one engine. It keeps the regret of staying for each other layout, since the last switch."""

    def __init__(
        self,
        costs: StepCosts,
        limits: Mapping[LayoutName, LayoutLimits],
        switches: Mapping[tuple[LayoutName, LayoutName], SwitchCost],
        settings: RegretSettings = DEFAULT_SETTINGS,
    ) -> None:
        """limits: of every layout that the engine can serve. switches: every change that is possible."""
        self._costs, self._limits, self._switches = costs, limits, switches
        self._settings = settings.check()
        self._regrets: dict[LayoutName, float] = dict.fromkeys(limits, 0.0)
        self._layout: LayoutName | None = None
        self._at = self._since = 0.0
        """times of the last report, and of the first one in this layout"""
        self._ours = self._prompt_token = 0.0
        """seconds of a step, and of a prompt token, in the layout in force at this report"""
        self._our_error = 0.0
        """relative standard error of that step"""
        self._prompts_per_step = 0.0
        """prompt tokens of a step, on average over some time: those of one report say little of the next"""
        self._usual: float | None = None
        """requests, running and waiting, on average over some time; None: no report yet"""
        self._requests_to_come = 0.0
        """number of requests that the trend leads to; 0: there is none"""

    @property
    def regrets(self) -> Mapping[LayoutName, float]:
        """Seconds of serving that were lost by staying, for each other layout, at the last report."""
        return self._regrets

    def decide(self, load: LayoutLoad) -> LayoutDecision:
        """Add the work since the last report to the regrets, and return the decision."""
        layout = load.layout
        if layout != self._layout:
            self._layout, self._at, self._since = layout, load.at, load.at
            self._regrets = dict.fromkeys(self._limits, 0.0)
        memory = max(self._settings.memory, LASTING * (load.at - self._since))
        kept = exp(min(0.0, self._at - load.at) / memory)
        self._follow(load)
        if load.steps:
            share = 1.0 - exp(min(0.0, self._at - load.at) / SMOOTH) if self._prompts_per_step else 1.0
            self._prompts_per_step += share * (load.prefilled / load.steps - self._prompts_per_step)
        self._at = load.at
        if layout not in self._limits or self._costs.uncertain(layout):
            return LayoutDecision(None, None, 0.0, 0.0, f"stays: the step times of {layout} are uncertain")
        if load.running:
            self._ours, self._our_error = self._costs.step(layout, load.running, load.context)
        self._prompt_token = self._costs.prefill_token(layout)
        best: _Candidate | None = None
        for other in self._limits:
            if (layout, other) in self._switches and not self._costs.uncertain(other):
                one = self._candidate(load, other, kept)
                if best is None or (not one.refusal, one.surplus) > (not best.refusal, best.surplus):
                    best = one
        if best is None:
            return LayoutDecision(None, None, 0.0, 0.0, "stays: the step times of all others are uncertain")
        target = best.layout if best.goes else None
        return LayoutDecision(target, best.layout, best.regret, best.cost, best)

    def _candidate(self, load: LayoutLoad, other: LayoutName, kept: float) -> _Candidate:
        """Price another layout at this report. kept: share of the regret that is not forgotten."""
        saved, coming = self._saved(load, other)
        regret = self._regrets[other] = max(0.0, kept * self._regrets[other] + saved)
        loss = self._switches[load.layout, other].loss(load.kv_tokens)
        cost = loss * (self._settings.hysteresis + loss / self._settings.dear)
        refusal, limits = "", self._limits[other]
        if saved <= 0.0:
            refusal = "it saves nothing at this load"
        elif not limits.holds(load.running, load.kv_tokens):
            refusal = (
                f"it holds {limits.max_running} sequences and {limits.kv_tokens} tokens of KV, and"
                f" {load.running:.0f} with {load.kv_tokens:.0f} run"
            )
        elif limits.max_running < min(self._limits[load.layout].max_running, load.running + load.waiting):
            refusal = (
                f"it runs {limits.max_running} sequences at most, and {load.waiting:.0f} requests wait to"
                f" join {load.running:.0f}"
            )
        return _Candidate(other, regret, coming, cost, load.discount, refusal)

    def _follow(self, load: LayoutLoad) -> None:
        """Apply the number of requests to its average, and say where its trend leads.

        A number that rises evenly is ahead of its average by what it rises in `trend` seconds. The standard
        deviation of a number of requests that come and go at random (Poisson) is no trend.
        """
        requests, seconds = load.running + load.waiting, self._settings.trend
        usual = self._usual
        if usual is None or not seconds:
            self._usual = requests
            return
        usual = self._usual = requests + exp(min(0.0, self._at - load.at) / seconds) * (usual - requests)
        ahead, chance = requests - usual, sqrt(max(requests, usual))
        change = max(0.0, ahead - chance) + min(0.0, ahead + chance)
        self._requests_to_come = max(1.0, requests + change) if change else 0.0

    def _saved(self, load: LayoutLoad, other: LayoutName) -> tuple[float, float]:
        """Return the seconds that another layout would have saved on the work since the last report
        (negative: it would take longer), and would save by the trend."""
        costs, layout, running, context = self._costs, load.layout, load.running, load.context
        prompt_token = self._prompt_token
        prompts = prompt_token - costs.prefill_token(other)
        if abs(prompts) <= PREFILL_ERROR * prompt_token:
            prompts = 0.0
        if not running or not load.steps:
            return load.prefilled * prompts, 0.0
        limits, requests = self._limits, running + load.waiting
        is_full = load.waiting > 0 and limits[layout].batch(requests, context) <= FULL * running
        batch = limits[other].batch(requests if is_full else running, context)
        if batch > running and self._prompts_per_step > 0.0:
            batch = max(running, min(batch, running * limits[other].prompt_tokens / self._prompts_per_step))
        ours = self._ours
        theirs, error = costs.step(other, batch, context)
        step = ours - theirs * running / batch
        doubt = self._settings.doubt * hypot(self._our_error, error)
        if 0.0 < step <= doubt * ours:
            step = 0.0
        saved = load.steps * step + load.prefilled * prompts
        trend = self._requests_to_come and saved > 0.0 and not is_full
        return saved, self._by_trend(load, other, step, doubt) if trend else 0.0

    def _by_trend(self, load: LayoutLoad, other: LayoutName, step: float, doubt: float) -> float:
        """Return the seconds that another layout would save while the trend lasts, if it saves a larger share
        of a step then than now. step: seconds of a step saved now; doubt: share of a step that does not
        count."""
        costs, limits, context, requests = self._costs, self._limits, load.context, self._requests_to_come
        ours, theirs = limits[load.layout].batch(requests, context), limits[other].batch(requests, context)
        beside = costs.step_seconds(other, theirs, context) / costs.step_seconds(load.layout, ours, context)
        share = 1.0 - beside * ours / theirs
        return share * self._settings.trend if share > max(doubt, step / self._ours) else 0.0
