"""What a plan really brought, beside what was foretold of it: kept, or harmful; and what to take of the next prediction. Pure.

Predictions and measurements are compared in one currency: the seconds of a step that placement decides, at the step size and the prices that the
plan was made with. So a change of load is neither a gain nor a harm, and neither are prices that the engine was told and does not pay.

    cost(figures) = experts / balance + remote * remote_ranks

A plan is harmful when what was measured got worse beyond noise **and** the placement before it would be better under today's demand. The second
condition is the planner's own judgement: where traffic has merely become dearer to serve, under whatever placement, nothing is to be undone.
"""

from math import exp, hypot, sqrt
from typing import NamedTuple

import msgspec

from fleet.events import LoopFigures, Verdict

SIGNIFICANT = 3.0
"""standard errors"""
LEAST_TRUST = 0.1
"""Trust falls no further, so that what promises ten times its cost is still tried."""
FALL, RISE = 0.5, 0.1
"""Parts of the way to what was realised that trust goes, down and up."""
RECOVERY = 8.0
"""Lifetimes of a demand after which what is missing of trust is down to 1/e by itself: what plans brought long ago says little."""


class StepPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step of the engine, all layers together, as the plan was reckoned with."""

    experts: float
    """of the experts, were their load even"""
    remote: float
    """of sending, for each distinct other rank that a token is sent to in a layer, mean"""
    chance: float = 0.0
    """by which chance alone leaves a step of one token uneven, mean load to highest; of a step of n tokens sqrt(n) times less"""

    def cost(self, figures: LoopFigures) -> float:
        """Seconds of a step that placement decides."""
        return self.experts / max(figures.balance, 1e-9) + self.remote * figures.remote_ranks

    def balance(self, balance: float, tokens: float, instead: float) -> float:
        """What the balance of steps of so many tokens would be, were there so many instead: what the placement and what chance leave uneven add up as
        independent deviations do. Without this, less traffic would look like harm."""
        if not (balance and tokens and instead):
            return balance
        uneven = (1.0 / balance - 1.0) ** 2
        chance = min(self.chance**2 / tokens, uneven)
        return 1.0 / (1.0 + sqrt(uneven - chance + chance * tokens / instead))

    def error(self, figures: LoopFigures, errors: LoopFigures) -> float:
        """Standard error of the cost."""
        return hypot(self.experts * errors.balance / max(figures.balance, 1e-9) ** 2, self.remote * errors.remote_ranks)


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of an engine in a window: means, and their standard errors."""

    figures: LoopFigures
    errors: LoopFigures
    token_seconds: float
    """of steps, by the token: of all ranks together"""
    token_error: float
    pairs: float
    """(token, k) pairs behind each layer"""

    @property
    def step_tokens(self) -> float:
        """Of all ranks together; 0: nobody knows."""
        return self.figures.step_seconds / self.token_seconds if self.token_seconds else 0.0


class PlanCase(NamedTuple):
    """A plan that is over, and what is known of it."""

    predicted_before: LoopFigures
    predicted_after: LoopFigures
    before: Measurement | None
    """None: it was not measured"""
    after: Measurement | None
    prices: StepPrices | None
    """None: nobody knows any more"""
    least_pairs: float
    """behind each layer of a measurement that says anything"""
    regret_seconds: float | None
    """by which a step would be shorter under the placement before the plan, under today's demand; None: it could not be reckoned"""
    least_regret: float
    """seconds below which that is noise"""
    whole: bool = True
    """all of its handovers were committed"""
    disturbed: str = ""
    """why what is measured now says nothing of it; empty: it does"""


class Judgement(NamedTuple):
    """realised: share of the predicted gain; None: it is not known."""

    verdict: Verdict
    realised: float | None
    trust: float
    reason: str


def judged(case: PlanCase, trust: float) -> Judgement:
    """trust: what was taken of predictions until now."""
    before, after, prices = case.before, case.after, case.prices
    missing = _missing(case)
    if missing or before is None or after is None or prices is None:
        return Judgement("unknown", None, trust, missing)
    balance = prices.balance(after.figures.balance, after.step_tokens, before.step_tokens)
    gain = prices.cost(before.figures) - prices.cost(msgspec.structs.replace(after.figures, balance=balance))
    error = hypot(prices.error(before.figures, before.errors), prices.error(after.figures, after.errors))
    predicted = prices.cost(case.predicted_before) - prices.cost(case.predicted_after)
    realised = gain / predicted if case.whole and predicted > 0 else None
    now_trusted = trust if realised is None else moved(trust, realised, error / predicted)
    told = _told(before.figures, after.figures, gain, predicted)
    if worse := _worse(before, after, gain, error):
        if case.regret_seconds is not None and case.regret_seconds > case.least_regret:
            return Judgement("harmful", realised, now_trusted, f"{worse}, and a step would be {_ms(case.regret_seconds)} shorter as it was before; {told}")
        why = "today's demand cannot be judged" if case.regret_seconds is None else "under today's demand it would be no better as it was before"
        return Judgement("kept", realised, now_trusted, f"{worse}, but {why}; {told}")
    return Judgement("kept", realised, now_trusted, told)


def moved(trust: float, realised: float, error: float) -> float:
    """Trust after a plan that realised this share of what was foretold, known with this error: quickly down, slowly up; in [LEAST_TRUST, 1]."""
    aim = min(max(realised + error, LEAST_TRUST), 1.0)
    return min(max(trust + (FALL if aim < trust else RISE) * (aim - trust), LEAST_TRUST), 1.0)


def recovered(trust: float, seconds: float, lifetime_seconds: float) -> float:
    """Trust so long after it was last moved."""
    return 1.0 - (1.0 - trust) * exp(-max(seconds, 0.0) / (RECOVERY * lifetime_seconds))


def _missing(case: PlanCase) -> str:
    """Why nothing can be said; empty: something can."""
    if case.disturbed:
        return case.disturbed
    if case.prices is None:
        return "what was foretold and measured before it is not known any more"
    for when, window in (("before it began", case.before), ("since it ended", case.after)):
        if window is None:
            return f"nothing was measured {when}"
        if window.pairs < case.least_pairs:
            return f"too little was measured {when}: {window.pairs:,.0f} pairs per layer of {case.least_pairs:,.0f}"
    return ""


def _worse(before: Measurement, after: Measurement, gain: float, error: float) -> str:
    """What got worse beyond noise, in words; empty: nothing. Steps are longer under more load, and dearer by the token under less: only both at once
    say something of the placement."""
    if -gain > SIGNIFICANT * error:
        return f"what placement decides of a step takes {_ms(-gain)} longer than before"
    step = after.figures.step_seconds - before.figures.step_seconds
    token = after.token_seconds - before.token_seconds
    longer = step > SIGNIFICANT * hypot(before.errors.step_seconds, after.errors.step_seconds)
    if longer and token > SIGNIFICANT * hypot(before.token_error, after.token_error):
        return f"a step takes {_ms(step)} longer than before, and more by the token"
    return ""


def _told(before: LoopFigures, after: LoopFigures, gain: float, predicted: float) -> str:
    return (
        f"remote ranks {before.remote_ranks:.3f} to {after.remote_ranks:.3f}, local {before.local:.1%} to {after.local:.1%}, "
        f"balance {before.balance:.3f} to {after.balance:.3f}: {_ms(gain)} of a step gained of {_ms(predicted)} foretold"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
