"""Speeds fitted to steps that the time model made up are those that it made them up from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.embedded.calibration.speed_fit import StepLoad, fitted
from fleet.timing import EngineSpeed, step_seconds

NAMES = EngineSpeed.__struct_fields__
speeds = st.builds(EngineSpeed, **{name: st.floats(1e-7, 1e-2) for name in NAMES if name != "dispatch_node"})
LOADS = [
    *(
        StepLoad(0, 0, n, n * blocks, 3 * n, 8 * (1 - 0.7**n), n % 3, 0)
        for n in (1, 4, 32)
        for blocks in (1, 64)
    ),
    *(StepLoad(n, n * (cached + n / 2), 0, 0, 3 * n, 8, n / 4, 0) for n in (64, 256) for cached in (0, 768)),
]
"""Of an engine whose layers are whole."""


def seconds(speed: EngineSpeed, load: StepLoad) -> float:
    one = {
        "prefill_tokens": load.prefill_token,
        "prefill_pairs": load.prefill_pair,
        "sequences": load.decode_sequence,
        "blocks": load.decode_block,
        "remote_ranks": load.dispatch,
        "remote_nodes": 0.0,
        "distinct_experts": load.expert_read,
    }
    arrays = {name: np.array([value], np.float64) for name, value in one.items()}
    return float(step_seconds(speed, **arrays, surplus=load.expert_pair, gathered=load.gather_byte)[0])


@given(speeds)
def test_the_speed_behind_steps_is_found_if_prices_were_measured_right(speed: EngineSpeed) -> None:
    taken = [seconds(speed, load) for load in LOADS]
    found = fitted(speed, LOADS, taken)
    assert [seconds(found, load) for load in LOADS] == pytest.approx(taken, rel=1e-6)
    assert found.gather_byte == pytest.approx(speed.gather_byte)  # no step says anything about it


@given(speeds, st.floats(0.5, 2))
def test_steps_correct_prices_that_were_measured_wrong(speed: EngineSpeed, wrong: float) -> None:
    prices = EngineSpeed(
        dispatch=wrong * speed.dispatch,
        expert_read=wrong * speed.expert_read,
        expert_pair=wrong * speed.expert_pair,
        gather_byte=speed.gather_byte,
    )
    found = fitted(prices, LOADS, [seconds(speed, load) for load in LOADS])
    for load in LOADS:
        assert seconds(found, load) == pytest.approx(seconds(speed, load), rel=0.1)


@given(st.lists(st.floats(1e-4, 1), min_size=len(LOADS), max_size=len(LOADS)))
def test_steps_of_a_busy_machine_never_give_a_speed_that_is_negative(taken: list[float]) -> None:
    found = fitted(EngineSpeed(), LOADS, taken)
    assert all(getattr(found, name) >= 0 for name in found.__struct_fields__)


def test_what_costs_nothing_stays_free() -> None:
    prices = EngineSpeed(dispatch=0.0, expert_read=0.0, expert_pair=0.0, gather_byte=0.0)
    found = fitted(prices, LOADS, [1e-2] * len(LOADS))
    assert found.dispatch == found.expert_read == found.expert_pair == found.gather_byte == 0
