"""The clairvoyant search beside exhaustive search and the dynamic programme."""

from math import inf

import numpy as np
import pytest

from benchmarks.rig.layout_loads.clairvoyant import beam_schedule, clairvoyant
from benchmarks.rig.layout_loads.engine import SimulatedEngine, Turn
from benchmarks.rig.layout_loads.schedule import LayoutScenario, Schedule, play, replay
from fleet.layout_times import LayoutName
from migration.layouts.costs import SwitchCost
from tests.benchmarks.layout_builders import engine_model, random_model, random_scenario, straight


def exhaustive(scenario: LayoutScenario) -> float:
    """The best of all schedules."""

    def best_from(engine: SimulatedEngine, slot: int) -> float:
        if engine.done:
            return scenario.cost(engine)
        found = inf
        for target in (None, *scenario.model.layouts):
            other = engine.copy()
            if target is None or other.switch(target):
                other.advance(scenario.until(slot + 1, other))
                found = min(found, best_from(other, slot + 1))
        return found

    return min(best_from(scenario.engine(layout), 0) for layout in scenario.model.layouts)


@pytest.mark.parametrize("seed", range(24))
def test_the_search_equals_exhaustive_search_of_short_loads(seed: int) -> None:
    scenario = random_scenario(seed, slots=6 + seed % 3)
    assert clairvoyant(scenario).cost == pytest.approx(exhaustive(scenario), rel=1e-12)


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_the_search_equals_exhaustive_search_of_twelve_decision_points(seed: int) -> None:
    scenario = random_scenario(seed, slots=12)
    model = scenario.model
    two = model._replace(times={name: model.times[name] for name in ("ep", "tp")})
    scenario = scenario._replace(model=two)
    assert clairvoyant(scenario).cost == pytest.approx(exhaustive(scenario), rel=1e-12)


def dynamic_programme(scenario: LayoutScenario) -> float:
    """The least makespan when every step is a decision point, of sequences that all run from the first step
    on: sequences and KV of a step do not depend on the layout."""
    model, turns = scenario.model, scenario.turns
    outputs = sorted(turn.output for turn in turns)
    steps = outputs[-1] - 1
    prompts = sum(turn.prompt for turn in turns)
    sequences = [sum(output - 1 > step for output in outputs) for step in range(steps)]
    kv = [sum(turn.prompt + step for turn in turns if turn.output - 1 > step) for step in range(steps)]

    def step_time(layout: LayoutName, step: int) -> float:
        """Step -1 computes the prompts."""
        times = model.times[layout]
        return (
            prompts * times.prefill_token
            if step < 0
            else times.decode[sequences[step]] + times.kv_token * kv[step]
        )

    best: dict[tuple[int, LayoutName], float] = {(steps, layout): 0.0 for layout in model.layouts}
    for step in range(steps - 1, -2, -1):
        for layout in model.layouts:
            found = step_time(layout, step) + best[step + 1, layout]
            for target in model.layouts:
                if target != layout:
                    cost = model.switches[layout, target]
                    held = kv[step] if step >= 0 else 0
                    spent, at = 0.0, step
                    while at < steps and (spent < cost.seconds(held) or at == step):
                        spent += (1.0 + cost.slowdown) * step_time(layout, at)
                        at += 1
                    rest = cost.pause + best[at, target] if at < steps else 0.0
                    found = min(found, spent + rest)
            best[step, layout] = found
    return min(best[-1, layout] for layout in model.layouts)


@pytest.mark.parametrize("seed", range(12))
def test_the_search_equals_the_dynamic_programme_on_rollouts_without_limits(seed: int) -> None:
    dice = np.random.default_rng(seed)
    model = random_model(dice, limited=False)._replace(chunk=1_000_000)
    outputs = np.minimum(2 + dice.exponential(25, int(dice.integers(10, 60))), 90).astype(int)
    turns = [Turn(0.0, int(dice.integers(5, 100)), int(output)) for output in outputs]
    scenario = LayoutScenario("rollout", model, turns, "ep", rollout=True, report=0.0)
    assert clairvoyant(scenario).cost == pytest.approx(dynamic_programme(scenario), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_search_is_never_worse_than_a_schedule_that_it_is_given(seed: int) -> None:
    scenario = random_scenario(seed, slots=40)
    dice = np.random.default_rng(seed)
    layouts = scenario.model.layouts
    given = Schedule(
        "ep", tuple((slot, layouts[int(dice.integers(len(layouts)))]) for slot in range(3, 40, 7))
    )
    found = clairvoyant(scenario, [given], most=20)
    assert found.cost <= replay(scenario, given).cost
    assert found.cost <= min(replay(scenario, Schedule(layout)).cost for layout in layouts)
    assert replay(scenario, found.schedule).cost == pytest.approx(found.cost, rel=1e-12)


def test_a_decided_schedule_is_replayed_exactly() -> None:
    scenario = random_scenario(5, slots=30)
    played = play(scenario, lambda engine: "tp" if engine.running > 8 else "ep")
    again = replay(scenario, played.schedule)
    assert (again.cost, again.schedule) == (played.cost, played.schedule)
    assert again.engine.first_tokens == played.engine.first_tokens


def test_one_layout_has_no_schedule_to_search() -> None:
    scenario = LayoutScenario(
        "one", engine_model({"ep": straight(0.01, 1e-4)}), [Turn(0.0, 10, 5)], "ep", True
    )
    assert beam_schedule(scenario, 2) is None
    assert clairvoyant(scenario).schedule == Schedule("ep")


def test_a_switch_that_costs_more_than_it_gains_is_not_found() -> None:
    dear = SwitchCost(weights_seconds=1.0, kv_token_seconds=0.0, pause=50.0, slowdown=0.0)
    model = engine_model({"ep": straight(0.02, 1e-4), "tp": straight(0.01, 1e-3)}, dear)
    turns = [Turn(0.1 * at, 50, 40) for at in range(60)]
    assert clairvoyant(LayoutScenario("dear", model, turns, "ep", False)).schedule.switches == ()
