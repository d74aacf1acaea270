"""Decayed counts against the integral they stand for."""

from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracker.window import Window

T = 60.0


def ones(scale: float = 1.0) -> np.ndarray:
    return np.full((2, 4), scale)


def test_an_empty_window_says_nothing() -> None:
    window = Window(2, 4, T)
    assert not window.rates(1e6).any()
    assert window.tokens_per_second(1e6) == 0.0
    assert not window.counts(0.0).any()


@given(st.lists(st.floats(0.01, 500.0), min_size=1, max_size=30), st.floats(0.01, 1e6))
def test_a_constant_rate_is_estimated_exactly_whatever_the_intervals(lengths: list[float], rate: float) -> None:
    window, now = Window(2, 4, T), 1000.0
    for seconds in lengths:
        now += seconds
        window.observe(ones(3 * rate * seconds), rate * seconds, seconds, now)
        np.testing.assert_allclose(window.rates(now), 3 * rate, rtol=1e-6)
        assert window.tokens_per_second(now) == pytest.approx(rate, rel=1e-6)


@given(st.lists(st.tuples(st.floats(0.1, 20.0), st.floats(0.0, 1000.0)), min_size=1, max_size=20))
def test_counts_are_the_integral_of_the_fading_weight(intervals: list[tuple[float, float]]) -> None:
    """Oracle: Riemann sum over what each moment activated, weighted by its age."""
    window, now, moments = Window(1, 1, T), 0.0, []
    for seconds, amount in intervals:
        steps = 2000
        moments += [(now + seconds * (i + 0.5) / steps, amount / steps) for i in range(steps)]
        now += seconds
        window.observe(np.array([[amount]]), amount, seconds, now)
    later = now + 7.0
    expected = sum(amount * exp(-(later - at) / T) for at, amount in moments)
    assert window.counts(later)[0, 0] == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert window.tokens(later) == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_a_silent_rank_decays() -> None:
    window, now = Window(2, 4, T), 0.0
    for _ in range(600):
        now += 1.0
        window.observe(ones(10.0), 10.0, 1.0, now)
    assert window.tokens_per_second(now) == pytest.approx(10.0, rel=1e-9)
    assert window.tokens_per_second(now + 2.0) == pytest.approx(10.0, rel=1e-9), "the next report may still come"
    assert window.tokens_per_second(now + 2.0 + T) == pytest.approx(10.0 / np.e, rel=1e-3)
    assert window.rates(now + 20 * T).max() < 1e-6


def test_time_whose_reports_were_lost_is_not_taken_for_silence() -> None:
    known, blind = Window(2, 4, T), Window(2, 4, T)
    for window in (known, blind):
        window.observe(ones(10.0), 10.0, 1.0, 1.0)
    for window, lost in ((known, False), (blind, True)):
        window.observe(ones(10.0), 10.0, 1.0, 31.0, lost=lost)
    assert blind.tokens_per_second(31.0) == pytest.approx(10.0, rel=1e-9)
    assert known.tokens_per_second(31.0) < 1.0


def test_recent_behaviour_outweighs_old() -> None:
    window = Window(1, 2, T)
    window.observe(np.array([[100.0, 0.0]]), 100, 1.0, 0.0)
    window.observe(np.array([[0.0, 100.0]]), 100, 1.0, 5 * T)
    first, second = window.rates(5 * T)[0]
    assert second > 100 * first > 0


@given(st.floats(-1e9, 1e9), st.floats(-100, 100))
def test_a_clock_that_seems_to_go_back_changes_nothing_for_the_worse(start: float, jump: float) -> None:
    window = Window(1, 1, T)
    window.observe(np.array([[5.0]]), 5, 1.0, start)
    window.observe(np.array([[5.0]]), 5, 1.0, start + jump)
    rates = window.rates(start + jump)
    assert np.isfinite(rates).all()
    assert rates.min() >= 0
