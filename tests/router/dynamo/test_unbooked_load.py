"""Requests of other routers are estimated from the blocks that nothing here explains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dynamo.unbooked_load import UnbookedLoad, UsualRequest
from router.fleet_state.reservations import Reservations

RANK = (11, 0)
USUAL = UsualRequest(tokens=256, steps_left=64, at_most=8)


def estimate(
    used: int, booked: list[int], *, passed: float = 1.0, at_most: int = 8
) -> tuple[int, int, int, int]:
    """The sum of all bookings of a rank that reports `used` blocks. booked: blocks of each known request."""
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    reservations.add_rank(RANK)
    for blocks in booked:
        reservations.book(RANK, (0, 1, blocks, 10), 0.0)
    unbooked = UnbookedLoad(reservations, 5.0)
    unbooked.reported(RANK, used, 16, 0.0)
    for _ in range(3):  # repeated comparisons change nothing
        unbooked.refresh(USUAL._replace(at_most=at_most), passed)
    found = reservations.booked(RANK)
    assert found is not None
    prefill, requests, held, steps = found
    return prefill, requests, held, steps


@pytest.mark.parametrize(
    ("used", "booked", "others"),
    [
        (0, [], (0, 0)),
        (7, [], (0, 0)),  # less than half a request of 16 blocks
        (16, [], (1, 16)),
        (50, [], (3, 50)),
        (20, [10], (1, 10)),
        (10, [10], (0, 0)),
        (4, [10, 20], (0, 0)),
        (100, [10, 30], (3, 60)),
        (10**6, [], (8, 10**6)),
    ],
)
def test_the_difference_is_counted_in_requests_of_the_size_of_known_ones(
    used: int, booked: list[int], others: tuple[int, int]
) -> None:
    _, requests, held, _ = estimate(used, booked)
    assert (requests - len(booked), held - sum(booked)) == others


def test_they_have_as_much_left_as_a_usual_request() -> None:
    assert estimate(32, []) == (0, 2, 32, 2 * 64)


def test_an_old_report_counts_no_longer() -> None:
    assert estimate(32, [], passed=6.0) == (0, 0, 0, 0)


def test_a_rank_that_has_left_is_forgotten() -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    reservations.add_rank(RANK)
    unbooked = UnbookedLoad(reservations, 5.0)
    unbooked.reported(RANK, 32, 16, 0.0)
    unbooked.refresh(USUAL, 0.0)
    reservations.remove_rank(RANK)
    unbooked.refresh(USUAL, 0.1)
    reservations.add_rank(RANK)
    unbooked.refresh(USUAL, 0.2)
    assert reservations.booked(RANK) == (0, 0, 0, 0)


@given(st.integers(0, 10**7), st.lists(st.integers(1, 500), max_size=20), st.integers(1, 300))
def test_no_more_is_booked_than_is_reported_and_known(used: int, booked: list[int], at_most: int) -> None:
    _, requests, held, steps = estimate(used, booked, at_most=at_most)
    assert 0 <= requests - len(booked) <= at_most
    assert held <= max(used, sum(booked))
    assert steps == 10 * len(booked) + 64 * (requests - len(booked))
