"""The comparison of layout policies: its scenarios, its reports to policies, and one small comparison."""

import pytest

from benchmarks.layout_policy import Case, Summary, outcomes, targets
from benchmarks.rig.layout_loads.contestants import OURS, STATIC_EP, STATIC_TP, contestants, wrong_profile
from benchmarks.rig.layout_loads.observation import calibrated, decisions
from benchmarks.rig.layout_loads.scenarios import (
    CROSSOVERS,
    LOADS,
    NO_CROSSOVER,
    Crossover,
    LoadKind,
    scenario,
)
from benchmarks.rig.layout_loads.schedule import play
from migration.layouts.policy import LayoutDecision, LayoutLoad


def test_equal_seeds_give_equal_scenarios_and_others_do_not() -> None:
    one, again, other = (scenario("middle", "rollout", seed) for seed in (4, 4, 6))
    assert (one.turns, one.model, one.start) == (again.turns, again.model, again.start)
    assert one.turns != other.turns


@pytest.mark.parametrize("crossover", CROSSOVERS)
@pytest.mark.parametrize("load", LOADS)
def test_every_load_can_be_served_in_every_layout(crossover: Crossover, load: LoadKind) -> None:
    made = scenario(crossover, load, 2)
    tightest = min(limits.kv_tokens for limits in made.model.limits.values())
    assert max(turn.cached + turn.prompt + turn.output for turn in made.turns) < tightest
    assert all(turn.output >= 2 for turn in made.turns)


@pytest.mark.parametrize("crossover", NO_CROSSOVER)
@pytest.mark.parametrize("seed", range(6))
def test_without_a_crossover_one_layout_is_best_at_every_load(crossover: Crossover, seed: int) -> None:
    model = scenario(crossover, "steady", seed).model
    best = "ep" if crossover == "ep-always" else model.layouts[-1]
    assert len(set(model.limits.values())) == 1
    for times in model.times.values():
        assert model.times[best].prefill_token <= times.prefill_token
        for sequences in (1, 3, 10, 50, 300, 1000, 2048):
            for context in (1, 5000):
                assert model.times[best].seconds(sequences, context) <= times.seconds(sequences, context)


class Watcher:
    """Policy that turns to the other layout once, and keeps its loads."""

    def __init__(self) -> None:
        self.loads: list[LayoutLoad] = []

    def decide(self, load: LayoutLoad) -> LayoutDecision:
        self.loads.append(load)
        goes = len(self.loads) == 20
        return LayoutDecision("experts-tp" if goes else None, None, 0.0, 0.0, "")


def test_reports_add_up_to_the_work_of_the_engine() -> None:
    made = next(
        one
        for one in (scenario("middle", "steady", seed) for seed in range(20))
        if "experts-tp" in one.model.times
    )
    watcher = Watcher()
    served = play(made, decisions(watcher), "ep").engine
    loads = watcher.loads
    assert {load.layout for load in loads} == {"ep", "experts-tp"}
    assert 0 <= served.steps - sum(load.steps for load in loads) <= max(load.steps for load in loads) + 1
    assert sum(load.prefilled for load in loads) == served.prefilled
    after = [load for load in loads if load.layout == "experts-tp"]
    assert all(load.settled_at == after[0].at for load in after)


def test_calibrated_times_are_near_the_true_ones_and_a_wrong_profile_is_not() -> None:
    model = scenario("middle", "bursty", 2).model
    curves = calibrated(model.times, 1).curves
    wrong = wrong_profile(model.times, 1)
    errors = []
    for layout, times in model.times.items():
        for sequences in (2, 20, 200, 2000):
            true = times.seconds(sequences, 1000)
            assert curves.step_seconds(layout, sequences, 1000) == pytest.approx(true, rel=0.15)
            errors.append(abs(wrong[layout].seconds(sequences, 1000) / true - 1.0))
    assert max(errors) > 0.05


def test_policies_begin_anew_for_every_load() -> None:
    made = scenario("low", "steady", 2)
    costs = [
        [play(made, decisions(one.policy, one.curves)).cost for one in contestants(made, 2)] for _ in range(2)
    ]
    assert costs[0] == costs[1]


def test_no_policy_is_better_than_the_schedule_that_is_searched() -> None:
    found = outcomes(Case("low", "tools", 2))
    assert min(one.ratio for one in found) >= 1.0 - 1e-9
    by_name = {one.policy: one for one in found}
    assert by_name[STATIC_EP].switches == by_name[STATIC_TP].switches == 0


def test_a_summary_is_of_ratios_and_the_last_target_is_the_mean_of_ours() -> None:
    found = outcomes(Case("tp-always", "tools", 2))
    spread = [
        one._replace(case=Case(crossover, load, 2))
        for one in found
        for crossover in CROSSOVERS
        for load in LOADS
    ]
    ours = Summary.of([one for one in found if one.policy == OURS])
    last = targets(spread, update=1e-6)[-1]
    assert last.value == pytest.approx(ours.geometric_mean)
    assert last.name == "geometric mean by a correct curve"
