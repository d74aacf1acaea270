"""Measured speeds: bounded, robust, forgotten with their engine, and they correct the prices."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.scheduling.speed_correction import (
    DECODE_SPEED,
    ENOUGH,
    HALF_LIFE_SECONDS,
    MIN_OBSERVATIONS,
    PREFILL_SPEED,
    SpeedCorrection,
)

KEY, ROW = (7, 0), 3


def factors(speeds: SpeedCorrection, *rows: int, now: float = 0.0) -> list[list[float]]:
    """Return factors [2][rows], after a refresh."""
    speeds.refresh(now)
    found: list[list[float]] = speeds.factors(np.array(rows)).tolist()
    return found


def feed(
    speeds: SpeedCorrection, ratio: float, times: int, key: tuple[int, int] = KEY, row: int = ROW
) -> None:
    for _ in range(times):
        speeds.prefilled(key, row, 0.1, 0.0, 0.1 * ratio)
        speeds.stepped(key, row, 0.02, 0.02 * ratio)


def test_nothing_is_corrected_before_anything_was_measured() -> None:
    speeds = SpeedCorrection(4.0)
    assert speeds.factors(np.array([0, 900])).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert speeds.of(5000) == (1.0, 1.0)


@pytest.mark.parametrize("ratio", [1 / 3, 0.8, 1.0, 1.5, 3.0])
def test_a_biased_engine_is_known_after_some_tens_of_requests(ratio: float) -> None:
    speeds = SpeedCorrection(4.0)
    chance = np.random.default_rng(0)
    for _ in range(40):
        noise = float(exp(chance.normal(0, 0.2)))
        speeds.prefilled(KEY, ROW, 0.1, 0.0, 0.1 * ratio * noise)
        speeds.stepped(KEY, ROW, 0.02, 0.02 * ratio * noise)
    (prefill, untouched), (decode, _) = factors(speeds, ROW, 4)
    assert prefill == pytest.approx(ratio, rel=0.12)
    assert decode == pytest.approx(ratio, rel=0.12)
    assert untouched == 1.0


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1.0, 16.0),
    st.lists(
        st.tuples(
            st.floats(1e-9, 1e6),
            st.floats(0, 10.0),
            st.floats(1e-9, 1e6),
            st.integers(0, 5),
            st.integers(0, 3),
        ),
        max_size=80,
    ),
    st.floats(0, 1e9),
)
def test_a_factor_never_leaves_its_bounds(
    limit: float, seen: list[tuple[float, float, float, int, int]], later: float
) -> None:
    speeds = SpeedCorrection(limit)
    for predicted, beside, observed, rank, worker in seen:
        speeds.prefilled((worker, rank), 10 * worker + rank, predicted, beside, observed)
        speeds.stepped((worker, rank), 10 * worker + rank, predicted, observed)
    for now in (0.0, later):
        found = np.array(factors(speeds, *range(40), now=now))
        assert np.isfinite(found).all()
        assert (found >= 1 / limit - 1e-12).all()
        assert (found <= limit + 1e-12).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(int(ENOUGH), 200), st.floats(0.5, 2.0), st.floats(1e-6, 1e6))
def test_one_wild_value_changes_nothing_much(times: int, ratio: float, wild: float) -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, ratio, times)
    before = np.array(factors(speeds, ROW))
    feed(speeds, wild, 1)
    after = np.array(factors(speeds, ROW))
    assert (np.abs(np.log(after / before)) <= log(2.0) / ENOUGH + 1e-9).all()


def test_a_few_observations_change_nothing() -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, 3.0, int(MIN_OBSERVATIONS))
    assert factors(speeds, ROW) == [[1.0], [1.0]]


def test_without_evidence_a_factor_returns_to_one() -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, 3.0, 100)
    fresh = factors(speeds, ROW, now=0.0)[0][0]
    later = [factors(speeds, ROW, now=step * HALF_LIFE_SECONDS)[0][0] for step in range(1, 5)]
    assert fresh == pytest.approx(3.0, rel=0.05)
    assert later == sorted(later, reverse=True)
    assert later[-1] == 1.0


def test_an_engine_that_changes_is_followed() -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, 0.5, 100)
    feed(speeds, 2.0, 100)
    assert factors(speeds, ROW)[PREFILL_SPEED][0] == pytest.approx(2.0, rel=0.1)


def test_a_rank_without_evidence_of_its_own_has_its_engines() -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, 2.0, 60)
    feed(speeds, 2.0, 1, key=(7, 1), row=4)
    feed(speeds, 2.0, 1, key=(8, 0), row=5)
    prefill = factors(speeds, ROW, 4, 5)[PREFILL_SPEED]
    assert prefill[:2] == pytest.approx([2.0, 2.0], rel=0.05)
    assert prefill[2] == 1.0


def test_a_rank_that_was_never_observed_has_its_engines_factors_from_the_start() -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, 2.0, 60)
    factors(speeds, ROW)
    speeds.know([(KEY, ROW), ((7, 1), 4), ((8, 0), 5)])
    found = speeds.factors(np.array([ROW, 4, 5]))
    assert found[:, 1].tolist() == pytest.approx(found[:, 0].tolist(), rel=0.05)
    assert found[:, 2].tolist() == [1.0, 1.0], "nothing of its engine was observed"
    feed(speeds, 0.5, 60, key=(7, 1), row=4)
    assert factors(speeds, ROW, 4)[PREFILL_SPEED] == pytest.approx([2.0, 0.5], rel=0.1)


def test_a_rank_with_evidence_of_its_own_differs_from_its_engine() -> None:
    speeds = SpeedCorrection(4.0)
    for rank in range(4):
        feed(speeds, 3.0 if rank == 0 else 1.0, 40, key=(7, rank), row=rank)
    prefill = factors(speeds, 0, 1, 2, 3)[PREFILL_SPEED]
    assert prefill[0] == pytest.approx(3.0, rel=0.1)
    assert prefill[1:] == pytest.approx([1.0, 1.0, 1.0], rel=0.1)


def test_ranks_that_step_together_decode_at_one_speed_whatever_each_has_measured() -> None:
    speeds = SpeedCorrection(4.0)
    for _ in range(40):
        for rank, ratio in enumerate((1.9, 2.1, 2.0, 2.0)):
            speeds.stepped((7, rank), rank, 0.02, 0.02 * ratio)
    decode = factors(speeds, 0, 1, 2, 3)[DECODE_SPEED]
    assert decode[0] == pytest.approx(2.0, rel=0.05)
    assert len(set(decode)) == 1


def test_a_restarted_engine_begins_anew_and_inherits_nothing_with_a_row() -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, 3.0, 100)
    factors(speeds, ROW)
    speeds.forget_worker(KEY[0])
    assert speeds.factors(np.array([ROW])).tolist() == [[1.0], [1.0]]
    feed(speeds, 0.5, 30, key=(8, 0), row=ROW)
    assert factors(speeds, ROW)[PREFILL_SPEED][0] == pytest.approx(0.5, rel=0.1)


def test_a_row_taken_over_without_a_word_is_another_ranks_from_then_on() -> None:
    speeds = SpeedCorrection(4.0)
    feed(speeds, 3.0, 100)
    feed(speeds, 1.0, 1, key=(8, 0))
    assert factors(speeds, ROW) == [[1.0], [1.0]]


def test_what_takes_no_time_to_prefill_says_little_of_prefill() -> None:
    speeds = SpeedCorrection(4.0)
    for _ in range(200):
        # One uncached token. The rest is the wait for a step, and the network.
        speeds.prefilled(KEY, ROW, 0.0002, 0.01, 0.05)
    for _ in range(40):
        speeds.prefilled(KEY, ROW, 1.0, 0.01, 1.01)
    assert factors(speeds, ROW)[PREFILL_SPEED][0] == pytest.approx(1.0, rel=0.1)


def test_a_limit_of_one_corrects_nothing_and_may_change_while_it_runs() -> None:
    speeds = SpeedCorrection(1.0)
    feed(speeds, 3.0, 100)
    assert factors(speeds, ROW) == [[1.0], [1.0]]
    speeds.reconfigure(2.0)
    assert factors(speeds, ROW) == [[pytest.approx(2.0)], [pytest.approx(2.0)]]
