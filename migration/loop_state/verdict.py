"""Verdict on a plan: predicted versus measured effect, and the discount factor for the next prediction. Pure.

Predictions and measurements are compared in the same unit: placement-dependent seconds of a step, at the step
size and prices of the plan. A change of load is therefore neither a gain nor a harm. Neither are configured
prices that the engine does not actually pay.

    cost(figures) = experts / balance + remote * remote_ranks

A plan is harmful if the measured cost increased beyond noise **and** the previous placement would be better
under today's demand. The second condition is evaluated by the planner: if traffic has become more expensive
to serve under any placement, nothing is to be undone.
"""

from math import exp, hypot, sqrt
from typing import NamedTuple

import msgspec

from fleet.facts.migrations import LoopFigures, Verdict

SIGNIFICANT = 3.0
"""standard errors"""
_ROUNDING_SECONDS = 1e-12
"""Difference of two costs that says nothing: they are computed in another order"""
MIN_DISCOUNT = 0.1
"""Lower bound of the discount factor, so that a plan which promises ten times its cost is still tried."""
FALL, RISE = 0.5, 0.1
"""Step sizes of the discount factor towards the realised share, downwards and upwards."""
RECOVERY = 8.0
"""Time constant of the discount factor's recovery towards 1, in demand lifetimes: old results say little."""


class StepPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Placement-dependent prices in seconds of one engine step, over all layers, as used for the plan."""

    experts: float
    """seconds for the experts under an even load"""
    remote: float
    """seconds per distinct other rank that a token is sent to in a layer, mean"""
    chance: float = 0.0
    """imbalance of a step of one token from sampling noise alone (relative excess of the highest load over
    the mean); for n tokens it is smaller by sqrt(n)"""

    def cost(self, figures: LoopFigures) -> float:
        """Return the placement-dependent seconds of a step."""
        return self.experts / max(figures.balance, 1e-9) + self.remote * figures.remote_ranks

    def balance(self, balance: float, tokens: float, instead: float) -> float:
        """Convert the balance of steps with `tokens` tokens to steps with `instead` tokens.

        The imbalance of the placement and the sampling noise combine like independent deviations. Without
        this conversion, less traffic would look like harm.
        """
        if not (balance and tokens and instead):
            return balance
        uneven = (1.0 / balance - 1.0) ** 2
        chance = min(self.chance**2 / tokens, uneven)
        return 1.0 / (1.0 + sqrt(uneven - chance + chance * tokens / instead))

    def error(self, figures: LoopFigures, errors: LoopFigures) -> float:
        """Return the standard error of the cost."""
        return hypot(
            self.experts * errors.balance / max(figures.balance, 1e-9) ** 2, self.remote * errors.remote_ranks
        )


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of an engine in a window: means and their standard errors."""

    figures: LoopFigures
    errors: LoopFigures
    token_seconds: float
    """step seconds per token, over all ranks"""
    token_error: float
    pairs: float
    """(token, k) pairs behind each layer"""

    @property
    def step_tokens(self) -> float:
        """Tokens of a step, over all ranks; 0: unknown."""
        return self.figures.step_seconds / self.token_seconds if self.token_seconds else 0.0


class PlanCase(NamedTuple):
    """Plan that has ended, with the data for its evaluation."""

    predicted_before: LoopFigures
    predicted_after: LoopFigures
    before: Measurement | None
    """None: not measured"""
    after: Measurement | None
    prices: StepPrices | None
    """None: not known any more"""
    min_pairs: float
    """minimum pairs behind each layer for a valid measurement"""
    counterfactual_gain: float | None
    """reduction of the step time under the placement before the plan, with today's demand; None: could not be
    computed"""
    min_gain: float
    """noise threshold for `counterfactual_gain`"""
    committed: bool = True
    """True if all its handovers were committed"""
    disturbed: str = ""
    """reason why the measurement after the plan is not valid; empty: it is valid"""


class Evaluation(NamedTuple):
    """Verdict on a plan. realised: share of the predicted gain; None: unknown."""

    verdict: Verdict
    realised: float | None
    plan_discount: float
    reason: str


def evaluated(case: PlanCase, plan_discount: float) -> Evaluation:
    """Evaluate a plan. plan_discount: factor applied to predictions so far."""
    before, after, prices = case.before, case.after, case.prices
    missing = _missing(case)
    if missing or before is None or after is None or prices is None:
        return Evaluation("unknown", None, plan_discount, missing)
    balance = prices.balance(after.figures.balance, after.step_tokens, before.step_tokens)
    gain = prices.cost(before.figures) - prices.cost(msgspec.structs.replace(after.figures, balance=balance))
    error = hypot(prices.error(before.figures, before.errors), prices.error(after.figures, after.errors))
    predicted = prices.cost(case.predicted_before) - prices.cost(case.predicted_after)
    realised = gain / predicted if case.committed and predicted > 0 else None
    if realised is not None:
        plan_discount = moved(plan_discount, realised, error / predicted)
    summary = _summary(before.figures, after.figures, gain, predicted)
    if worse := _worse(before, after, gain, error):
        if case.counterfactual_gain is not None and case.counterfactual_gain > case.min_gain:
            return Evaluation(
                "harmful",
                realised,
                plan_discount,
                f"{worse}, and a step would be {_ms(case.counterfactual_gain)} shorter as it was before;"
                f" {summary}",
            )
        why = (
            "today's demand cannot be evaluated"
            if case.counterfactual_gain is None
            else "under today's demand it would be no better as it was before"
        )
        return Evaluation("kept", realised, plan_discount, f"{worse}, but {why}; {summary}")
    return Evaluation("kept", realised, plan_discount, summary)


def moved(plan_discount: float, realised: float, error: float) -> float:
    """Return the discount factor after a plan that realised this share of its prediction, with this error.

    It falls quickly and rises slowly, within [MIN_DISCOUNT, 1].
    """
    aim = min(max(realised + error, MIN_DISCOUNT), 1.0)
    step = FALL if aim < plan_discount else RISE
    return min(max(plan_discount + step * (aim - plan_discount), MIN_DISCOUNT), 1.0)


def recovered(plan_discount: float, seconds: float, lifetime_seconds: float) -> float:
    """Return the discount factor `seconds` after its last change."""
    return 1.0 - (1.0 - plan_discount) * exp(-max(seconds, 0.0) / (RECOVERY * lifetime_seconds))


def _missing(case: PlanCase) -> str:
    """Return the reason why no verdict is possible; empty: a verdict is possible."""
    if case.disturbed:
        return case.disturbed
    if case.prices is None:
        return "its predictions and earlier measurements are not known any more"
    for when, window in (("before it began", case.before), ("since it ended", case.after)):
        if window is None:
            return f"nothing was measured {when}"
        if window.pairs < case.min_pairs:
            return (
                f"too little was measured {when}: {window.pairs:,.0f} pairs per layer of"
                f" {case.min_pairs:,.0f}"
            )
    return ""


def _worse(before: Measurement, after: Measurement, gain: float, error: float) -> str:
    """Describe the deterioration beyond noise; empty: there is none.

    Steps are longer under more load, and cost more per token under less. Only both together indicate a worse
    placement.
    """
    if -gain > SIGNIFICANT * error + _ROUNDING_SECONDS:
        return f"the placement-dependent part of a step takes {_ms(-gain)} longer than before"
    step = after.figures.step_seconds - before.figures.step_seconds
    token = after.token_seconds - before.token_seconds
    longer = step > SIGNIFICANT * hypot(before.errors.step_seconds, after.errors.step_seconds)
    if longer and token > SIGNIFICANT * hypot(before.token_error, after.token_error):
        return f"a step takes {_ms(step)} longer than before, and also longer per token"
    return ""


def _summary(before: LoopFigures, after: LoopFigures, gain: float, predicted: float) -> str:
    return (
        f"remote ranks {before.remote_ranks:.3f} to {after.remote_ranks:.3f}, local {before.local:.1%} to"
        f" {after.local:.1%}, balance {before.balance:.3f} to {after.balance:.3f}: {_ms(gain)} of a step"
        f" gained of {_ms(predicted)} predicted"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
