"""Verdicts on switches of layout."""

import random
from math import exp, sqrt

import pytest

from migration.loop_state.switch_trial import LEAST_STEPS, SwitchTrial


def trial(ratio: float, promised: float, steps: int = 100, noise: float = 0.05) -> SwitchTrial:
    """Steps at changing load that take `ratio` of those of the old layout, where `promised` was predicted."""
    dice = random.Random(f"{ratio} {promised}")
    found = SwitchTrial("plan", "ep", "tp")
    for _ in range(steps):
        stayed = dice.uniform(0.005, 0.1)
        found.observe(stayed * ratio * dice.gauss(1.0, noise), stayed, stayed * promised)
    return found


def test_a_switch_that_keeps_its_promise_is_kept_and_believed() -> None:
    found = trial(0.8, 0.8).evaluated(0.5)
    assert found.verdict == "kept"
    assert found.realised == pytest.approx(1.0, abs=0.1)
    assert found.plan_discount > 0.5


def test_longer_steps_are_harmful_and_cost_trust() -> None:
    found = trial(1.2, 0.8).evaluated(1.0)
    assert found.verdict == "harmful"
    assert found.realised is not None
    assert found.realised < 0
    assert found.plan_discount < 0.6


def test_less_gain_than_promised_is_kept_and_believed_less() -> None:
    found = trial(0.95, 0.7).evaluated(1.0)
    assert found.verdict == "kept"
    assert 0.5 < found.plan_discount < 0.9


@pytest.mark.parametrize("ratio", [1.0, 1.01])
def test_a_difference_within_the_error_of_curves_is_no_harm(ratio: float) -> None:
    assert trial(ratio, 0.9, steps=5000).evaluated(1.0).verdict == "kept"


def test_noise_alone_is_no_harm() -> None:
    assert trial(1.03, 0.9, steps=LEAST_STEPS, noise=0.2).evaluated(1.0).verdict == "kept"


def test_a_machine_that_is_slow_for_whole_stretches_makes_no_switch_harmful() -> None:
    """Slowness of 30 % of a step that a step has in common with the one before, but for a twentieth. If steps
    were taken as independent, 43 % of these trials would be harmful."""
    harmful = 0
    for seed in range(200):
        dice, slowness = random.Random(seed), 0.0
        found = SwitchTrial("plan", "ep", "tp")
        for _ in range(200):
            slowness = 0.95 * slowness + dice.gauss(0.0, 0.3 * sqrt(1.0 - 0.95**2))
            found.observe(0.01 * exp(slowness), 0.01, 0.009)
        harmful += found.evaluated(1.0).verdict == "harmful"
    assert harmful <= 10


def test_harm_beyond_such_stretches_is_still_seen() -> None:
    dice, slowness = random.Random(1), 0.0
    found = SwitchTrial("plan", "ep", "tp")
    for _ in range(2000):
        slowness = 0.95 * slowness + dice.gauss(0.0, 0.3 * sqrt(1.0 - 0.95**2))
        found.observe(0.015 * exp(slowness), 0.01, 0.009)
    assert found.evaluated(1.0).verdict == "harmful"


def test_gains_that_noise_always_hides_cost_trust() -> None:
    trust = [1.0]
    for seed in range(8):
        dice, found = random.Random(seed), SwitchTrial("plan", "ep", "tp")
        for _ in range(LEAST_STEPS):
            found.observe(0.01 * dice.gauss(1.0, 0.3), 0.01, 0.0098)
        trust.append(found.evaluated(trust[-1]).plan_discount)
    assert trust[-1] < 0.6


def test_a_few_steps_say_nothing() -> None:
    found = trial(2.0, 0.8, steps=LEAST_STEPS - 1).evaluated(0.7)
    assert (found.verdict, found.plan_discount) == ("unknown", 0.7)
    assert f"{LEAST_STEPS - 1} steps" in found.reason


def test_single_layers_promise_a_part_of_a_step_within_one_layout() -> None:
    found = SwitchTrial("plan", "ep", "ep", gain_of_layers=0.1)
    for _ in range(LEAST_STEPS):
        found.observe(0.0095, 0.01, 0.01)
    verdict = found.evaluated(1.0)
    assert verdict.verdict == "kept"
    assert verdict.realised == pytest.approx(0.5)
    assert "with the layers in their former forms" in verdict.reason
