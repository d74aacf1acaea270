"""Regret: extra cost of a choice over the best one, given the facts measured afterwards."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fleet.timing import EngineSpeed
from router.evaluation.regret import Probe, Truth, WaitingProbes, regret_ms, repriced_ms
from router.fleet_state.reservations import AMOUNTS, PREFILL, SEQUENCES, STEPS
from router.fleet_state.view import FleetView
from tests.router.learnt_tables import halves
from tests.router.scheduling.test_decision import decided, prediction_of, view_of

SPEED = EngineSpeed(prefill_token=1e-3, decode_sequence=1e-3, decode_block=1e-5, dispatch=1e-4)


def house(engines: int = 1, ranks: int = 4) -> FleetView:
    return view_of(*({"ranks": ranks, "speed": SPEED} for _ in range(engines)), clusters=halves(skew=30.0))[0]


def load_of(targets: int, **rows: Any) -> Any:
    load = np.zeros((AMOUNTS, targets), np.int64)
    for name, amounts in rows.items():
        load[{"prefill": PREFILL, "sequences": SEQUENCES, "steps": STEPS}[name]] = amounts
    return load


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_regret_is_never_negative_and_nothing_when_all_was_as_believed(
    seed: int, engines: int, ranks: int
) -> None:
    chance = np.random.default_rng(seed)
    view = house(engines, ranks)
    target_table = view.target_table("demo")
    targets = engines * ranks
    load = chance.integers(0, 5, (AMOUNTS, targets))
    decision = decided(target_table, load=load, overlap=chance.integers(0, 20, targets).tolist(), seed=seed)
    prices = view.prices("demo")
    assert regret_ms(decision, Truth(load), prices) == 0.0
    assert repriced_ms(decision, Truth(load), prices) == pytest.approx(decision.scores.total)
    came_true = chance.integers(0, 500, (AMOUNTS, targets))
    regret = regret_ms(decision, Truth(came_true), prices)
    costs = repriced_ms(decision, Truth(came_true), prices)
    assert regret >= 0
    assert regret == pytest.approx(max(float(costs[decision.chosen] - cost) for cost in costs))


def test_a_rank_that_was_busier_than_believed_is_regretted_by_the_difference() -> None:
    view = house(engines=2, ranks=1)
    decision = decided(view.target_table("demo"), load=load_of(2, prefill=[0, 500]))
    assert decision.chosen == 0
    truth = load_of(2, prefill=[2000, 300])
    assert regret_ms(decision, Truth(truth), view.prices("demo")) == pytest.approx(1700.0)
    # The prefill of the other rank is twice as slow as modelled: 2.0 + 0.1 s against 2 * (0.3 + 0.1) s.
    slower = np.array([[1.0, 2.0], [1.0, 1.0]])
    assert regret_ms(decision, Truth(truth, slower), view.prices("demo")) == pytest.approx(1300.0)


def test_what_the_chosen_rank_had_cached_is_as_it_was() -> None:
    view = house(engines=2, ranks=1)
    decision = decided(view.target_table("demo"), overlap=[10, 5])  # 40 and 20 tokens of 100
    assert decision.chosen == 0
    assert regret_ms(decision, Truth(decision.load, cached_tokens=40), view.prices("demo")) == 0.0
    assert regret_ms(decision, Truth(decision.load, cached_tokens=0), view.prices("demo")) == pytest.approx(
        20.0
    )


def test_a_request_of_another_kind_than_predicted_is_regretted_by_its_traffic() -> None:
    view = house(engines=1, ranks=2)
    prices, target_table = view.prices("demo"), view.target_table("demo")
    first, second = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    prediction = prediction_of(prices.of(first)[0])
    decision = decided(target_table, prediction=prediction)
    assert decision.chosen == 0
    assert regret_ms(decision, Truth(decision.load, weights=first), prices) == 0.0
    remote = prices.of(second)[0]
    expected = 1000.0 * SPEED.dispatch * (100 + 20) * float(remote[0] - remote[1])
    assert regret_ms(decision, Truth(decision.load, weights=second), prices) == pytest.approx(
        expected, rel=1e-5
    )
    wrong_number = Truth(decision.load, weights=np.full(5, 0.2, np.float32))
    assert regret_ms(decision, wrong_number, prices) == 0.0  # clusters changed: the prediction stands


def test_only_candidates_could_have_been_chosen() -> None:
    view = house(engines=3, ranks=1)
    decision = decided(
        view.target_table("demo"), load=load_of(3, sequences=[0, 0, 10])
    )  # the last one is saturated
    assert len(decision.at) == 2
    truth = load_of(3, prefill=[100, 100, 0])
    assert regret_ms(decision, Truth(truth), view.prices("demo")) == 0.0


def probe(view: FleetView, decision_id: str, made_at: float) -> Probe:
    decided_on = decided(view.target_table("demo"))
    decision = structs.replace(decided_on, ask=structs.replace(decided_on.ask, decision_id=decision_id))
    return Probe(decision, view.prices("demo"), decision.load, made_at)


def test_waiting_probes_are_taken_by_name_or_in_the_end() -> None:
    view = house()
    size = probe(view, "d", 0.0).nbytes
    waiting = WaitingProbes(3 * size)
    for number in range(4):
        waiting.add(probe(view, f"d{number}", float(number)))
    taken = waiting.take("d1")
    assert taken is not None
    assert taken.decision.id == "d1"
    assert waiting.take("d1") is None
    assert [late.decision.id for late in waiting.over(0.5)] == ["d0"]
    assert len(waiting) == 2
    for number in range(4, 8):
        waiting.add(probe(view, f"d{number}", float(number)))
    assert [late.decision.id for late in waiting.over(0.5)] == ["d2", "d3", "d4"]  # only three fit
    assert (len(waiting), waiting.bytes) == (3, 3 * size)
    assert len(list(waiting.over(9.0))) == 3
    assert waiting.bytes == 0
