"""Layout policies that are compared on a scenario, and the curves they decide by."""

from collections.abc import Iterator, Mapping
from math import exp, log
from typing import NamedTuple

import numpy as np

from benchmarks.rig.layout_loads.engine_model import StepTimes, TrueCosts
from benchmarks.rig.layout_loads.observation import Calibrated, calibrated, decisions
from benchmarks.rig.layout_loads.schedule import LayoutScenario, Played, Schedule, play, replay
from fleet.layout_times import LayoutName
from migration.layouts.policy import LayoutPolicy
from migration.layouts.regret import RegretPolicy
from migration.layouts.ski_rental import SkiRental
from migration.layouts.threshold import ThresholdRule, Thresholds, rollout_thresholds

OURS, OURS_CALIBRATED, OURS_WRONG = "regret", "regret, calibrated", "regret, wrong profile"
SKI_RENTAL, SKI_CALIBRATED, SKI_WRONG = "ski rental", "ski rental, calibrated", "ski rental, wrong profile"
THRESHOLD = "threshold rule"
STATIC_EP, STATIC_TP = "static EP", "static TP"
"""Static TP is EXPERTS_TP where the engine has no TP."""
WRONG_FACTOR, WRONG_SLOPE = 0.1, 0.2
"""Standard deviations of a wrong profile's errors: of the logarithm of its factor, and of the change of that
over all numbers of sequences."""


class Contestant(NamedTuple):
    """A policy, and the curves that it decides by, if they follow the engine's steps."""

    name: str
    policy: LayoutPolicy
    curves: Calibrated | None = None


def sharded_layout(scenario: LayoutScenario) -> LayoutName:
    """Return TP, or EXPERTS_TP where the engine has no TP."""
    return "tp" if "tp" in scenario.model.times else "experts-tp"


def contestants(scenario: LayoutScenario, seed: int) -> Iterator[Contestant]:
    """Yield new policies, with nothing accumulated. seed: of the errors of curves."""
    model, limits, switches = scenario.model, scenario.model.limits, scenario.model.switches
    correct = TrueCosts(model.times)
    yield Contestant(OURS, RegretPolicy(correct, limits, switches))
    yield Contestant(SKI_RENTAL, SkiRental(correct, limits, switches))
    wrong = wrong_profile(model.times, seed)
    for ours, ski, times in (
        (OURS_CALIBRATED, SKI_CALIBRATED, model.times),
        (OURS_WRONG, SKI_WRONG, wrong),
    ):
        curves = calibrated(times, seed)
        yield Contestant(ours, RegretPolicy(curves.curves, limits, switches), curves)
        curves = calibrated(times, seed)
        yield Contestant(ski, SkiRental(curves.curves, limits, switches), curves)
    thresholds = rollout_thresholds() if scenario.rollout else Thresholds()
    room = {layout: float(one.kv_tokens) for layout, one in limits.items()}
    yield Contestant(THRESHOLD, ThresholdRule(thresholds, room, calm=sharded_layout(scenario)))


def wrong_profile(times: Mapping[LayoutName, StepTimes], seed: int) -> dict[LayoutName, StepTimes]:
    """Return step times of another machine: each layout's times a factor that changes with log sequences."""
    dice = np.random.default_rng([seed, 1])
    found = {}
    for layout, one in times.items():
        factor, slope = dice.normal(0.0, WRONG_FACTOR), dice.normal(0.0, WRONG_SLOPE)
        per_log = slope / log(len(one.decode) - 1)
        decode = [
            seconds * exp(factor + per_log * log(max(1, number))) for number, seconds in enumerate(one.decode)
        ]
        found[layout] = one._replace(decode=decode)
    return found


def played(scenario: LayoutScenario, seed: int) -> dict[str, Played]:
    """Serve the load by every policy and in both static layouts; return what happened, by name."""
    found = {
        one.name: play(scenario, decisions(one.policy, one.curves)) for one in contestants(scenario, seed)
    }
    found[STATIC_EP] = replay(scenario, Schedule("ep"))
    found[STATIC_TP] = replay(scenario, Schedule(sharded_layout(scenario)))
    return found
