"""Benchmarks that decide outside of an event loop, on small cases."""

from benchmarks.backends import routed
from benchmarks.queueing import House, booked
from benchmarks.tenants import hits


def test_requests_with_one_prefix_find_it_where_the_policy_sends_them() -> None:
    beside = routed("round_robin", None, 950, 6, seed=1)
    found = routed("kv", None, 950, 6, seed=1)
    assert found.cached > beside.cached
    assert found.together == 8


def test_an_order_of_requests_has_a_cost() -> None:
    house = House.of(8, 6)
    assert booked(house, list(range(6))) > 0
    assert not house.service.scheduler.reservations.open_bookings


def test_tenants_share_no_prefix() -> None:
    alone, _ = hits(1, 2, 4096, salted=True)
    several, _ = hits(4, 2, 4096, salted=True)
    assert 0 < several < alone
