"""Layout policies at single reports and over short histories, with step times made by hand."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.layout_times import LayoutName
from migration.layouts.costs import LayoutLimits, SwitchCost
from migration.layouts.policy import FixedLayout, LayoutDecision, LayoutLoad, LayoutPolicy
from migration.layouts.regret import RegretPolicy, RegretSettings
from migration.layouts.ski_rental import SkiRental
from migration.layouts.threshold import ThresholdRule, Thresholds, rollout_thresholds

ROOMY = LayoutLimits(max_running=1000, kv_tokens=1_000_000)
COST = SwitchCost(weights_seconds=1.0, kv_token_seconds=0.0, pause=0.08, slowdown=1.0)
LOSS = 0.58
"""seconds: the pause, and half of the second in which steps take twice as long"""
PLAIN = RegretSettings(hysteresis=1.0, dear=1e6, memory=1e6, trend=0.0, doubt=0.0)


class Lines:
    """Step times `first + each * sequences` of every layout; prompts cost the same."""

    def __init__(
        self,
        lines: dict[LayoutName, tuple[float, float]],
        unsure: Sequence[LayoutName] = (),
        deviation: float = 0.0,
        prefill: dict[LayoutName, float] | None = None,
    ) -> None:
        self.lines, self.unsure, self.error, self.prefill = lines, unsure, deviation, prefill or {}

    def step_seconds(self, layout: LayoutName, sequences: float, context: float) -> float:
        assert layout not in self.unsure, "asked for the step of an uncertain layout"
        first, each = self.lines[layout]
        return first + each * sequences

    def prefill_token(self, layout: LayoutName) -> float:
        return self.prefill.get(layout, 1e-5)

    def uncertain(self, layout: LayoutName) -> bool:
        return layout in self.unsure

    def step(self, layout: LayoutName, sequences: float, context: float) -> tuple[float, float]:
        return self.step_seconds(layout, sequences, context), self.error


CROSSING = Lines({"ep": (0.020, 0.0001), "tp": (0.010, 0.0002)})
"""TP is faster below 100 sequences."""
BOTH: dict[LayoutName, LayoutLimits] = {"ep": ROOMY, "tp": ROOMY}


def switches(
    *layouts: LayoutName, cost: SwitchCost = COST
) -> dict[tuple[LayoutName, LayoutName], SwitchCost]:
    return {(one, other): cost for one in layouts for other in layouts if one != other}


def regret_policy(
    costs: Lines = CROSSING,
    limits: dict[LayoutName, LayoutLimits] | None = None,
    settings: RegretSettings = PLAIN,
    cost: SwitchCost = COST,
) -> RegretPolicy:
    limits = limits or BOTH
    return RegretPolicy(costs, limits, switches(*limits, cost=cost), settings)


def load(
    at: float, layout: LayoutName = "ep", running: float = 50, waiting: float = 0, **more: float
) -> LayoutLoad:
    return LayoutLoad(
        at,
        layout,
        running,
        waiting,
        kv_tokens=more.get("kv_tokens", 100 * running),
        steps=int(more.get("steps", 10)),
        prefilled=int(more.get("prefilled", 0)),
        settled_at=more.get("settled_at", float("-inf")),
        discount=more.get("discount", 1.0),
    )


def first_switch(policy: LayoutPolicy, loads: Sequence[LayoutLoad]) -> tuple[float, LayoutDecision] | None:
    """Time and decision of the first switch."""
    decided = ((one.at, policy.decide(one)) for one in loads)
    return next((found for found in decided if found[1].target is not None), None)


def steady(seconds: int, **about: float) -> list[LayoutLoad]:
    return [load(at, **about) for at in range(1, seconds)]  # type: ignore[arg-type]


# Regret


def test_it_switches_once_the_regret_reaches_the_loss() -> None:
    # A step of 50 sequences takes 5 ms less under TP; 10 steps a second: the loss of 0.58 s is reached at 12 s.
    found = first_switch(regret_policy(), steady(30))
    assert found is not None
    at, decision = found
    assert (at, decision.target) == (12, "tp")
    assert decision.regret == pytest.approx(0.6, rel=1e-4)
    assert decision.cost == pytest.approx(LOSS)
    assert (
        decision.reason
        == "turns to tp: regret 0.6 s and 0 s by the trend of the load reach the cost of 0.58 s"
    )


def test_after_plans_that_kept_half_of_their_promise_it_waits_for_twice_the_regret() -> None:
    found = first_switch(regret_policy(), steady(30, discount=0.5))
    assert found is not None
    at, decision = found
    assert (at, decision.target) == (24, "tp")
    assert "(counted at 50%, after the results of earlier plans) reach the cost" in decision.reason


def test_it_says_why_it_stays() -> None:
    policy = regret_policy()
    policy.decide(load(1))
    stays = policy.decide(load(2))
    assert stays.target is None
    assert stays.best == "tp"
    assert (
        stays.reason
        == "stays: regret 0.1 s and 0 s by the trend of the load for tp are below the cost of 0.58 s"
    )
    assert "saves nothing" in policy.decide(load(3, running=200)).reason


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30)), min_size=1, max_size=60))
def test_regret_is_the_largest_gain_of_any_stretch_that_ends_now(history: list[tuple[int, int]]) -> None:
    """Lindley's equation, solved by brute force over the beginnings of the stretch."""
    dear = SwitchCost(1e9, 0.0, 0.0, 1.0)
    policy = regret_policy(cost=dear)
    gains: list[float] = []
    for at, (running, steps) in enumerate(history):
        policy.decide(load(at, running=running, steps=steps))
        gains.append(steps * (0.010 - 0.0001 * running) if running else 0.0)
        most = max(sum(gains[begin:]) for begin in range(len(gains) + 1))
        assert policy.regrets["tp"] == pytest.approx(most, rel=1e-3, abs=1e-9)  # hardly anything is forgotten


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 300)), max_size=40))
def test_it_never_leaves_a_layout_that_is_better_at_every_load(history: list[tuple[int, int]]) -> None:
    policy = regret_policy(Lines({"ep": (0.020, 0.0002), "tp": (0.010, 0.0001)}), settings=RegretSettings())
    for at, (running, waiting) in enumerate(history):
        decision = policy.decide(load(at, "tp", running, waiting, prefilled=2000))
        assert decision.target is None


@given(st.lists(st.integers(1, 400), min_size=20, max_size=200), st.floats(0.01, 3.0))
def test_plain_regret_loses_at_most_three_times_what_any_schedule_does(
    runs: list[int], weights: float
) -> None:
    """The bound of two-state task systems is 3 times the optimum, and one report and switch more."""
    cost = SwitchCost(weights, 0.0, 0.05, 1.0)
    policy, layout, paid = regret_policy(cost=cost), "ep", 0.0
    optimum: dict[LayoutName, float] = {"ep": 0.0, "tp": cost.loss(0)}
    longest = 0.0
    for at, running in enumerate(runs):
        steps = {name: 10 * CROSSING.step_seconds(name, running, 0) for name in optimum}
        paid += steps[layout]
        longest = max(longest, *steps.values())
        for name in optimum:
            optimum[name] += steps[name]
        ep, tp = optimum["ep"], optimum["tp"]
        optimum = {"ep": min(ep, tp + cost.loss(0)), "tp": min(tp, ep + cost.loss(0))}
        target = policy.decide(load(at, layout, running)).target  # type: ignore[arg-type]
        if target is not None:
            layout, paid = target, paid + cost.loss(0)
    assert paid <= 3.0 * min(optimum.values()) + 2.0 * (longest + cost.loss(0))


def test_a_new_layout_begins_without_regret() -> None:
    policy = regret_policy()
    for one in steady(11):
        policy.decide(one)
    assert policy.regrets["tp"] == pytest.approx(0.5, rel=1e-4)
    policy.decide(load(12, "tp"))
    assert policy.regrets == {"ep": 0.0, "tp": 0.0}


def falling(seconds: int, by: float) -> list[LayoutLoad]:
    """From 400 sequences down: TP is faster below 100."""
    return [load(at, running=max(400 - by * at, 1)) for at in range(1, seconds)]


def test_a_load_that_falls_steadily_is_answered_before_the_regret_has_added_up() -> None:
    ends = falling(60, by=20)
    slow = first_switch(regret_policy(), ends)
    early = first_switch(regret_policy(settings=PLAIN._replace(trend=4.0)), ends)
    assert slow is not None
    assert early is not None
    assert 15 < early[0] < slow[0]  # below 100 sequences both, and some seconds apart
    assert "by the trend of the load" in early[1].reason


def test_the_trend_of_a_load_that_is_steady_again_counts_nothing() -> None:
    policy = regret_policy(settings=PLAIN._replace(trend=4.0))
    for one in falling(16, by=20):
        policy.decide(one)
    steady_again = [load(at, running=100) for at in range(16, 60)]
    assert first_switch(policy, steady_again) is None
    assert " and 0 s by the trend" in policy.decide(load(61, running=99)).reason


def test_a_load_that_varies_by_chance_has_no_trend() -> None:
    # Ten more or fewer than 100 is the standard deviation of requests that come and go at random.
    varying = [load(at, running=70 + 8 * (-1) ** at) for at in range(1, 60)]
    slow = first_switch(regret_policy(), varying)
    with_trend = first_switch(regret_policy(settings=PLAIN._replace(trend=4.0)), varying)
    assert slow is not None
    assert with_trend is not None
    assert slow[0] == with_trend[0]


def test_waiting_requests_count_as_far_as_steps_can_compute_their_prompts() -> None:
    costs = Lines({"ep": (0.020, 0.0), "tp": (0.019, 0.0)})
    waits = steady(60, layout="tp", running=64, waiting=64, prefilled=20_000)  # type: ignore[arg-type]
    for most, target in ((2_000, None), (4_000, "ep")):  # a step computes 2,000 prompt tokens now
        limits = {"ep": LayoutLimits(1000, 1_000_000, most), "tp": LayoutLimits(64, 1_000_000, most)}
        found = first_switch(regret_policy(costs, limits), waits)
        assert (found and found[1].target) == target


def test_requests_that_the_layout_cannot_admit_count() -> None:
    costs = Lines({"ep": (0.020, 0.0001), "tp": (0.010, 0.0001)})  # a step of TP is always shorter
    limits = {"ep": ROOMY, "tp": LayoutLimits(64, 1_000_000)}
    waits = steady(60, layout="tp", running=64, waiting=400)  # type: ignore[arg-type]
    found = first_switch(regret_policy(costs, limits), waits)
    assert found is not None
    assert found[1].target == "ep"
    assert first_switch(SkiRental(costs, limits, switches("ep", "tp")), waits) is None


def test_a_dear_switch_needs_more_than_its_loss() -> None:
    found = first_switch(regret_policy(settings=PLAIN._replace(dear=1.0)), steady(30))
    assert found is not None
    assert found[1].cost == pytest.approx(LOSS * (1.0 + LOSS))
    assert found[0] == 19


def test_a_layout_with_fewer_sequences_is_no_target_while_others_wait_to_join() -> None:
    limits: dict[LayoutName, LayoutLimits] = {"ep": ROOMY, "tp": LayoutLimits(64, 1_000_000)}
    policy = regret_policy(limits=limits)
    assert first_switch(policy, steady(60, running=40, waiting=400)) is None
    assert "wait to join" in policy.decide(load(61, running=40, waiting=400)).reason
    assert first_switch(policy, steady(60, running=40)) is not None


def test_requests_that_wait_for_their_prompts_alone_do_not_count() -> None:
    costs = Lines({"ep": (0.020, 0.0001), "tp": (0.010, 0.0001)})
    limits = {"ep": ROOMY, "tp": LayoutLimits(64, 1_000_000)}
    assert (
        first_switch(regret_policy(costs, limits), steady(60, layout="tp", running=40, waiting=400)) is None
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("few", [LayoutLimits(40, 1_000_000), LayoutLimits(1000, 5_000)])
def test_a_layout_that_cannot_hold_what_runs_is_no_target(few: LayoutLimits) -> None:
    policy = regret_policy(limits={"ep": ROOMY, "tp": few}, settings=PLAIN._replace(hysteresis=0.1))
    assert first_switch(policy, steady(60)) is None
    assert "it holds" in policy.decide(load(61)).reason


def test_an_uncertain_layout_is_no_target_and_is_not_left() -> None:
    for unsure in ("ep", "tp"):
        policy = regret_policy(Lines(CROSSING.lines, unsure=[unsure]))  # type: ignore[list-item]
        assert first_switch(policy, steady(60)) is None
        assert "uncertain" in policy.decide(load(61)).reason


def test_a_direction_without_a_price_is_not_taken() -> None:
    policy = RegretPolicy(CROSSING, BOTH, {("tp", "ep"): COST}, PLAIN)
    assert first_switch(policy, steady(60)) is None


def test_a_difference_within_the_error_does_not_count() -> None:
    settings = PLAIN._replace(doubt=1.0)
    near = Lines(CROSSING.lines, deviation=0.2)  # the difference of 5 ms in 25 ms is 20 %, its error 28 %
    assert first_switch(regret_policy(near, settings=settings), steady(200)) is None
    sure = Lines(CROSSING.lines, deviation=0.1)
    assert first_switch(regret_policy(sure, settings=settings), steady(200)) is not None


def test_costs_of_prompts_count_if_they_differ_clearly() -> None:
    same = {"ep": (0.02, 0.0), "tp": (0.02, 0.0)}
    busy = steady(300, prefilled=5000)
    clearly = Lines(same, prefill={"ep": 1.2e-5, "tp": 1e-5})  # type: ignore[arg-type]
    hardly = Lines(same, prefill={"ep": 1.04e-5, "tp": 1e-5})  # type: ignore[arg-type]
    assert first_switch(regret_policy(clearly), busy) is not None  # type: ignore[arg-type]
    assert first_switch(regret_policy(hardly), busy) is None


def test_a_gain_that_does_not_pay_within_the_memory_is_taken_once_it_has_lasted() -> None:
    dear = SwitchCost(weights_seconds=9.0, kv_token_seconds=0.0, pause=0.1, slowdown=1.0)
    costs = Lines({"ep": (0.0205, 0.0), "tp": (0.0200, 0.0)})  # 5 ms a second, 0.3 s a minute; loss 4.6 s
    policy = regret_policy(costs, settings=PLAIN._replace(memory=60.0), cost=dear)
    found = first_switch(policy, steady(5000))
    assert found is not None
    assert found[0] > 1100  # without forgetting, 4.6 s of regret are there after 920 s


def test_it_compares_every_layout_and_takes_the_best() -> None:
    costs = Lines({"ep": (0.03, 0.0), "experts-tp": (0.02, 0.0), "tp": (0.01, 0.0)})
    limits: dict[LayoutName, LayoutLimits] = {"ep": ROOMY, "experts-tp": ROOMY, "tp": ROOMY}
    assert first_switch(regret_policy(costs, limits), steady(60))[1].target == "tp"  # type: ignore[index]
    limits["tp"] = LayoutLimits(10, 1_000_000)
    assert first_switch(regret_policy(costs, limits), steady(60))[1].target == "experts-tp"  # type: ignore[index]


@pytest.mark.parametrize(
    "setting",
    [{"memory": 0.0}, {"hysteresis": -1.0}, {"trend": -1.0}, {"doubt": float("nan")}],
)
def test_settings_out_of_range_are_named(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="settings of the layout policy"):
        RegretSettings(**setting).check()


# Ski rental and static


def test_ski_rental_switches_at_the_same_time_on_a_steady_load() -> None:
    found = first_switch(SkiRental(CROSSING, BOTH, switches("ep", "tp")), steady(30))
    assert found is not None
    assert (found[0], found[1].target) == (12, "tp")


def test_a_static_layout_stays() -> None:
    assert first_switch(FixedLayout(), steady(20)) is None


# Threshold rule


PAPER = Thresholds()


def rule(thresholds: Thresholds = PAPER) -> ThresholdRule:
    return ThresholdRule(thresholds, {"ep": 1_000_000, "tp": 100_000})


def test_waiting_requests_count_toward_the_threshold() -> None:
    decision = rule().decide(load(0, "tp", running=200, waiting=56))
    assert decision.target == "ep"
    assert decision.reason == "turns to ep: 256 requests reach 256"
    assert rule().decide(load(0, "tp", running=200, waiting=55)).target is None


def test_the_mean_over_the_window_decides_on_the_way_to_tensor_parallelism() -> None:
    policy = rule(Thresholds(window=2.0))
    counts = [400, 100, 100, 100]
    targets = [policy.decide(load(at, running=count)).target for at, count in enumerate(counts)]
    assert targets == [None, None, "tp", "tp"]  # means 400, 250, 200, and 100 of the last two seconds


def test_it_rests_from_the_end_of_a_switch() -> None:
    assert rule().decide(load(10.0, "tp", running=500, settled_at=5.5)).target is None
    assert rule().decide(load(10.0, "tp", running=500, settled_at=5.0)).target == "ep"


def test_it_needs_room_for_the_kv() -> None:
    decision = rule().decide(load(0, running=10, kv_tokens=100_001))
    assert decision.target is None
    assert "have no room in tp" in decision.reason


def test_the_variant_for_rollouts_has_no_band() -> None:
    policy = rule(rollout_thresholds())
    assert policy.decide(load(0, running=256)).target is None
    assert policy.decide(load(1, running=255)).target == "tp"


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.integers(0, 500)), min_size=1, max_size=50))
def test_the_mean_is_that_of_the_reports_in_the_window(reports: list[tuple[float, int]]) -> None:
    policy, at, seen = rule(Thresholds(window=4.0)), 0.0, []
    for wait, count in reports:
        at += wait
        seen.append((at, count))
        inside = [number for time, number in seen if time >= at - 4.0]
        mean = sum(inside) / len(inside)
        target = policy.decide(load(at, running=count, kv_tokens=1.0)).target
        assert (target == "tp") == (mean < 205.0)


@pytest.mark.parametrize("thresholds", [Thresholds(100.0, 120.0), Thresholds(0.0, 0.0)])
def test_thresholds_in_the_wrong_order_are_refused(thresholds: Thresholds) -> None:
    with pytest.raises(ValueError, match="layout thresholds: low must be above 0"):
        rule(thresholds)


# Costs


def test_the_loss_of_a_switch_is_the_time_by_which_requests_are_delayed() -> None:
    cost = SwitchCost(weights_seconds=2.0, kv_token_seconds=1e-5, pause=0.3, slowdown=0.25)
    assert cost.seconds(100_000) == pytest.approx(3.0)
    assert cost.loss(100_000) == pytest.approx(0.3 + 3.0 - 3.0 / 1.25)


def test_a_batch_is_limited_by_sequences_and_by_kv() -> None:
    limits = LayoutLimits(100, 100_000)
    assert limits.batch(50, 100) == 50
    assert limits.batch(500, 100) == 100
    assert limits.batch(500, 9_700) == pytest.approx(10)
    counts = [limits.batch(500, context) for context in range(1, 5000, 100)]
    assert all(later <= one for one, later in pairwise(counts))
