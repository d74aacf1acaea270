"""Predicted versus measured effects of plans: verdicts and the discount factor."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet.facts.migrations import LoopFigures
from migration.loop_state.verdict import (
    MIN_DISCOUNT,
    Evaluation,
    Measurement,
    PlanCase,
    StepPrices,
    evaluated,
    moved,
    recovered,
)

PRICES = StepPrices(experts=1e-3, remote=2e-3)
SHARES = st.floats(0.05, 1.0)
RANKS = st.floats(0.0, 3.0)


def figures(remote: float, balance: float, step: float = 2e-3, tokens: float = 0.0) -> LoopFigures:
    return LoopFigures(remote_ranks=remote, local=0.5, balance=balance, step_seconds=step, tokens=tokens)


@dataclass(frozen=True)
class Seen:
    """Measured figures, all with the same relative error."""

    remote: float = 1.5
    balance: float = 0.8
    step: float = 2e-3
    token: float = 1e-5
    error: float = 0.01
    pairs: float = 1e6

    def measurement(self) -> Measurement:
        part = self.error
        errors = figures(self.remote * part, self.balance * part, self.step * part)
        return Measurement(
            figures=figures(self.remote, self.balance, self.step, 1e5),
            errors=errors,
            token_seconds=self.token,
            token_error=self.token * part,
            pairs=self.pairs,
        )


def case(before: Seen | None, after: Seen | None, **fields: Any) -> PlanCase:
    plain: dict[str, Any] = {
        "predicted_before": figures(1.5, 0.8),
        "predicted_after": figures(1.0, 0.8),
        "prices": PRICES,
        "min_pairs": 1000.0,
        "counterfactual_gain": 1e-3,
        "min_gain": 1e-5,
    }
    windows = {
        name: None if seen is None else seen.measurement()
        for name, seen in (("before", before), ("after", after))
    }
    return PlanCase(**{**plain, **windows, **fields})


BEFORE = Seen()


@pytest.mark.parametrize(
    ("after", "fields", "verdict", "says"),
    [
        (Seen(remote=1.0), {}, "kept", "1 ms of a step gained of 1 ms predicted"),
        (Seen(remote=1.25), {}, "kept", "0.5 ms of a step gained of 1 ms predicted"),
        (Seen(remote=1.9), {}, "harmful", "a step would be 1 ms shorter as it was before"),
        (Seen(balance=0.5), {}, "harmful", "takes 0.75 ms longer"),
        (Seen(remote=1.9), {"counterfactual_gain": 1e-6}, "kept", "no better as it was before"),
        (Seen(remote=1.9), {"counterfactual_gain": None}, "kept", "cannot be evaluated"),
        (Seen(remote=1.52), {}, "kept", "gained"),
        (Seen(step=4e-3), {}, "kept", "gained"),
        (
            Seen(step=4e-3, token=2e-5),
            {},
            "harmful",
            "a step takes 2 ms longer than before, and also longer per token",
        ),
        (Seen(token=2e-5), {}, "kept", "gained"),
        (Seen(pairs=10.0), {}, "unknown", "too little was measured since it ended: 10 pairs"),
        (None, {}, "unknown", "nothing was measured since it ended"),
        (Seen(remote=1.9), {"prices": None}, "unknown", "not known any more"),
        (
            Seen(remote=1.9),
            {"disturbed": "others moved experts meanwhile"},
            "unknown",
            "others moved experts",
        ),
    ],
)
def test_a_plan_is_harmful_where_it_got_worse_beyond_noise_and_was_better_before(
    after: Seen | None, fields: dict[str, Any], verdict: str, says: str
) -> None:
    found = evaluated(case(BEFORE, after, **fields), 1.0)
    assert found.verdict == verdict, found
    assert says in found.reason
    if verdict == "unknown":
        assert (found.realised, found.plan_discount) == (None, 1.0)


def test_nothing_is_made_of_what_was_not_measured_before_and_a_part_of_a_plan_moves_no_trust() -> None:
    assert evaluated(case(None, BEFORE), 0.7) == Evaluation(
        "unknown", None, 0.7, "nothing was measured before it began"
    )
    part = evaluated(case(BEFORE, Seen(remote=1.9), committed=False), 0.7)
    assert (part.verdict, part.realised, part.plan_discount) == ("harmful", None, 0.7)


@given(RANKS, SHARES, RANKS, SHARES, st.floats(0, 0.2), st.floats(MIN_DISCOUNT, 1.0))
@example(0.0, 0.8392050868718828, 0.0, 0.8392050868718828, 0.0, 1.0)
def test_trust_stays_a_share_and_harm_is_never_found_where_the_cost_fell(
    remote: float, balance: float, then: float, even: float, error: float, discount: float
) -> None:
    found = evaluated(case(Seen(remote, balance, error=error), Seen(then, even, error=error)), discount)
    assert MIN_DISCOUNT <= found.plan_discount <= 1.0
    if PRICES.cost(figures(then, even)) <= PRICES.cost(figures(remote, balance)):
        assert found.verdict == "kept"
    if found.verdict == "harmful":
        assert found.realised is not None
        assert found.realised < 0
        assert found.plan_discount <= discount or found.plan_discount < 0.5


@given(st.floats(-3, 3), st.floats(0, 1), st.floats(MIN_DISCOUNT, 1.0))
def test_trust_moves_towards_what_was_realised_and_falls_faster_than_it_rises(
    realised: float, error: float, discount: float
) -> None:
    after = moved(discount, realised, error)
    aim = min(max(realised + error, MIN_DISCOUNT), 1.0)
    assert min(discount, aim) - 1e-9 <= after <= max(discount, aim) + 1e-9
    assert moved(discount, realised, error + 0.1) >= after - 1e-9, (
        "what is known less well is held against it less"
    )
    down, up = (
        discount - moved(discount, discount - 0.05, 0.0),
        moved(discount, discount + 0.05, 0.0) - discount,
    )
    if MIN_DISCOUNT + 0.05 < discount < 0.95:
        assert down > 2 * up > 0


@given(st.floats(MIN_DISCOUNT, 1.0), st.floats(0, 1e5), st.floats(0, 1e5))
def test_what_is_missing_of_trust_comes_back_by_itself_slowly(
    discount: float, one: float, more: float
) -> None:
    assert (
        discount - 1e-12
        <= recovered(discount, one, 900.0)
        <= recovered(discount, one + more, 900.0) + 1e-12
        <= 1.0 + 1e-9
    )
    assert recovered(discount, -5.0, 900.0) == pytest.approx(discount)


def test_noise_is_no_harm_and_the_same_difference_without_it_is() -> None:
    noisy, quiet = (
        case(replace(BEFORE, error=error), Seen(remote=1.6, error=error)) for error in (0.1, 0.001)
    )
    assert evaluated(noisy, 1.0).verdict == "kept"
    assert evaluated(quiet, 1.0).verdict == "harmful"


@given(st.floats(0.2, 0.95), st.floats(8, 4096), st.floats(8, 4096))
def test_a_balance_is_told_as_it_would_be_at_another_size_of_steps(
    placed: float, tokens: float, instead: float
) -> None:
    prices = StepPrices(experts=1.0, remote=0.0, chance=1.5)

    def measured(size: float) -> float:
        return 1.0 / (1.0 + ((1.0 / placed - 1.0) ** 2 + 1.5**2 / size) ** 0.5)

    assert prices.balance(measured(tokens), tokens, instead) == pytest.approx(measured(instead))
    assert prices.balance(placed, tokens, tokens) == pytest.approx(placed), (
        "also where it is better than chance should allow"
    )


def test_less_traffic_is_no_harm() -> None:
    busy, quiet = (
        Seen(balance=1 / (1 + 0.15), token=2e-3 / 100),
        Seen(balance=1 / (1 + 0.3), token=2e-3 / 25, step=1.9e-3),
    )
    plain = case(busy, quiet, prices=StepPrices(experts=1e-2, remote=2e-3), predicted_after=figures(1.5, 0.9))
    knowing = case(
        busy,
        quiet,
        prices=StepPrices(experts=1e-2, remote=2e-3, chance=1.5),
        predicted_after=figures(1.5, 0.9),
    )
    assert evaluated(plain, 1.0).verdict == "harmful"
    assert evaluated(knowing, 1.0).verdict == "kept"
