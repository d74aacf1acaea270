"""How long a read may take: from what reads have taken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.handover.read_deadlines import SLACK, Deadlines


def test_before_anything_was_measured_a_read_is_given_what_a_slow_link_takes_and_the_least_at_any_rate() -> (
    None
):
    deadlines = Deadlines(1.0)
    assert deadlines.allowed(0, "nixl", 1000) == 1.0
    assert deadlines.allowed(0, "nixl", 1_000_000_000) == pytest.approx(SLACK * 20)


@settings(max_examples=30)
@given(
    offset=st.floats(0, 0.1),
    slope=st.floats(1e-10, 1e-7),
    sizes=st.lists(st.integers(1, 1 << 30), min_size=2, max_size=6, unique=True),
)
def test_a_line_through_the_reads_is_found_again(offset: float, slope: float, sizes: list[int]) -> None:
    deadlines = Deadlines(1e-9)
    for size in sizes:
        deadlines.learn(1, "shared", size, offset + slope * size)
    for size in (max(sizes), 2 * max(sizes)):
        assert deadlines.expected(1, "shared", size) == pytest.approx(
            offset + slope * size, rel=1e-3, abs=1e-6
        )


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 100)), min_size=1, max_size=40),
    st.integers(0, 1 << 34),
)
def test_whatever_was_measured_the_allowance_is_a_finite_time_and_not_below_the_least(
    read: list[tuple[int, float]], size: int
) -> None:
    deadlines = Deadlines(0.5)
    for bytes_read, seconds in read:
        deadlines.learn(0, "shared", bytes_read, seconds)
    assert 0.5 <= deadlines.allowed(0, "shared", size) < float("inf")


def test_reads_of_one_size_are_taken_to_cost_by_the_byte() -> None:
    deadlines = Deadlines(0.01)
    for seconds in (0.9, 1.1):
        deadlines.learn(0, "shared", 1000, seconds)
    assert deadlines.expected(0, "shared", 2000) == pytest.approx(2.0)
    assert deadlines.allowed(0, "shared", 2000) == pytest.approx(2.0 * SLACK)


def test_sources_and_ways_are_measured_apart_and_only_the_last_reads_count() -> None:
    deadlines = Deadlines(0.01)
    deadlines.learn(0, "shared", 1000, 50.0)
    for _ in range(32):
        deadlines.learn(0, "shared", 1000, 1.0)
    deadlines.learn(0, "nixl", 1000, 3.0)
    assert deadlines.expected(0, "shared", 1000) == pytest.approx(1.0)
    assert deadlines.expected(0, "nixl", 1000) == pytest.approx(3.0)
    assert deadlines.expected(1, "shared", 1000) < 0.001


def test_a_capped_read_is_given_the_time_that_the_cap_makes_it_take() -> None:
    deadlines = Deadlines(0.01, bytes_per_second=100)
    deadlines.learn(0, "shared", 1000, 0.1)
    assert deadlines.allowed(0, "shared", 1000) == pytest.approx(10.0 * SLACK)
