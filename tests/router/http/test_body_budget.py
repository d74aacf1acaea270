"""Memory of bodies: never above the bound, and always room for a client that holds little."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.completions import ApiError
from router.http.body_budget import BodyBudget, BodyShare


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 600), st.booleans()), max_size=80))
def test_bodies_never_exceed_the_bound_and_what_is_released_is_free_again(
    steps: list[tuple[str, int, bool]],
) -> None:
    budget, shares = BodyBudget(1000), list[tuple[str, BodyShare]]()
    for client, size, ends in steps:
        if ends and shares:
            shares.pop(0)[1].release()
            continue
        share, free = budget.share(client), budget.total - budget.held
        own = sum(one.held for name, one in shares if name == client)
        if own + size <= free:
            share.announce(size)
            share.add(size)
            shares.append((client, share))
        else:
            with pytest.raises(ApiError) as refused:
                share.add(size)
            assert (refused.value.status, refused.value.retry_after is not None, share.held) == (503, True, 0)
        assert budget.held == sum(one.held for _, one in shares) <= budget.total
    for _, share in shares * 2:
        share.release()
    assert (budget.held, budget.clients) == (0, 0)


def fill(share: BodyShare, by: int) -> None:
    with contextlib.suppress(ApiError):
        while True:
            share.add(by)


def test_clients_that_want_all_they_can_get_leave_room_for_the_next_one() -> None:
    budget = BodyBudget(1_000_000)
    for others in range(8):
        fill(budget.share(f"client {others}"), by=100)
        assert budget.total - budget.held >= 1_000_000 // 2 ** (others + 1) - 100
    budget.share("a newcomer").add(3000)


def test_a_body_that_was_announced_and_does_not_come_holds_nothing() -> None:
    budget = BodyBudget(1000)
    budget.share("a").announce(500)
    assert budget.held == 0
    with pytest.raises(ApiError):
        budget.share("a").announce(1001)
