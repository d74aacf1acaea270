"""Requests to ranks: caps, balance, shared pages, and the second packing."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.kv_switch.assignment import PageDemand, assign


def sizes(*pages: int) -> list[PageDemand]:
    """Demands of these numbers of pages, none shared."""
    return [PageDemand(frozenset(range(at * 100, at * 100 + count)), 0) for at, count in enumerate(pages)]


def loads(demands: list[PageDemand], ranks: list[int], count: int) -> list[tuple[int, int]]:
    """Pages and requests of each rank."""
    return [
        (
            len(
                frozenset().union(*(one.pages for one, at in zip(demands, ranks, strict=True) if at == rank))
            ),
            ranks.count(rank),
        )
        for rank in range(count)
    ]


demands_of_any_kind = st.lists(
    st.builds(PageDemand, st.frozensets(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2)),
    max_size=5,
)


@settings(max_examples=300, deadline=None)
@given(demands_of_any_kind, st.integers(1, 3), st.integers(1, 10), st.integers(1, 4))
def test_an_assignment_keeps_the_caps_and_is_only_missing_where_few_exist(
    demands: list[PageDemand], ranks: int, max_pages: int, max_running: int
) -> None:
    found = assign(demands, ranks=ranks, max_pages=max_pages, max_running=max_running)

    def legal(owners: list[int]) -> bool:
        return all(
            pages <= max_pages and requests <= max_running
            for pages, requests in loads(demands, owners, ranks)
        )

    if found is not None:
        assert legal(found)
    else:
        every = [list(owners) for owners in product(range(ranks), repeat=len(demands))]
        assert sum(map(legal, every)) <= len(every) / 2


def test_requests_spread_evenly() -> None:
    demands = sizes(7, 6, 5, 4, 3, 2, 1)
    owners = assign(demands, ranks=2, max_pages=100, max_running=10)
    assert owners is not None
    assert sorted(loads(demands, owners, 2)) == [(14, 3), (14, 4)]


def test_equal_requests_stay_on_the_ranks_that_accepted_them() -> None:
    demands = [PageDemand(frozenset([at]), at % 3) for at in range(6)]
    assert assign(demands, ranks=3, max_pages=4, max_running=2) == [0, 1, 2, 0, 1, 2]


def test_a_rank_that_has_the_prefix_is_preferred_by_as_much_as_that_saves() -> None:
    prefix = frozenset(range(5))
    sharing = PageDemand(prefix | {11}, 1)
    short, long = PageDemand(prefix | {10, 12}, 0), PageDemand(prefix | frozenset(range(100, 120)), 0)
    other = PageDemand(frozenset(range(20, 27)), 1)
    assert assign([short, other, sharing], ranks=2, max_pages=50, max_running=3) == [0, 1, 0]
    assert assign([long, other, sharing], ranks=2, max_pages=50, max_running=3) == [0, 1, 1]


def test_pages_are_packed_tightly_where_balance_finds_no_room() -> None:
    demands = sizes(4, 4, 3, 3, 3, 3)
    owners = assign(demands, ranks=2, max_pages=10, max_running=9)
    assert owners is not None
    assert loads(demands, owners, 2) == [(10, 3), (10, 3)]
    shared = [PageDemand(frozenset({0, 1, 2, at}), 0) for at in (5, 6, 7, 8)]
    assert assign(shared, ranks=2, max_pages=7, max_running=4) is not None


@pytest.mark.parametrize("counts", [(6, 6, 6), (11,)])
def test_what_fits_in_sum_but_on_no_ranks_is_not_assigned(counts: tuple[int, ...]) -> None:
    assert assign(sizes(*counts), ranks=2, max_pages=10, max_running=9) is None


def test_no_rank_runs_more_than_it_may() -> None:
    demands = sizes(9, 1, 1, 1)
    owners = assign(demands, ranks=2, max_pages=20, max_running=2)
    assert owners is not None
    assert [requests for _, requests in loads(demands, owners, 2)] == [2, 2]
