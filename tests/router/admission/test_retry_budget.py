"""Retry budget: a share of recent and open requests, and a floor."""

from hypothesis import given
from hypothesis import strategies as st

from router.admission.retry_budget import WINDOW_SECONDS, RetryBudget


def test_a_share_of_the_last_requests_may_be_tried_again() -> None:
    budget = RetryBudget(0.2, 0)
    for _ in range(100):
        budget.count_request(5.0)
    assert [budget.may_retry(5.0, 0) for _ in range(25)].count(True) == 20
    assert not budget.may_retry(5.0, 0)


def test_requests_that_are_still_open_count_however_long_ago_they_came() -> None:
    budget = RetryBudget(0.2, 0)
    assert not budget.may_retry(5.0, 0)
    assert [budget.may_retry(5.0, 100) for _ in range(25)].count(True) == 20


def test_a_few_retries_are_always_allowed() -> None:
    budget = RetryBudget(0.0, 3)
    assert [budget.may_retry(1.0, 0) for _ in range(5)] == [True, True, True, False, False]


def test_another_share_counts_from_now_on() -> None:
    budget = RetryBudget(0.0, 0)
    budget.count_request(1.0)
    budget.reconfigure(1.0, 0)
    assert [budget.may_retry(1.0, 0) for _ in range(2)] == [True, False]


def test_requests_older_than_the_window_do_not_count() -> None:
    budget = RetryBudget(0.5, 1)
    for _ in range(10):
        budget.count_request(3.0)
    assert all(budget.may_retry(3.0, 0) for _ in range(5))
    assert not budget.may_retry(3.0 + 0.8 * WINDOW_SECONDS, 0)
    assert budget.may_retry(3.0 + 1.1 * WINDOW_SECONDS, 0)
    assert not budget.may_retry(3.0 + 1.1 * WINDOW_SECONDS, 0)


@given(st.floats(0, 1), st.integers(0, 20), st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=150))
def test_no_window_holds_more_retries_than_the_budget_says(
    share: float, least: int, course: list[tuple[float, bool]]
) -> None:
    budget, now = RetryBudget(share, least), 1000.0
    asked: list[float] = []
    retried: list[float] = []
    for pause, comes in course:
        now += pause
        if comes:
            budget.count_request(now)
            asked.append(now)
        elif budget.may_retry(now, 0):
            retried.append(now)
        else:
            assert sum(at > now - WINDOW_SECONDS for at in retried) >= least  # the floor is never refused
    for at in retried:  # the window slides by slices, so its length is exact to one slice
        before = sum(at - 0.9 * WINDOW_SECONDS < other <= at for other in retried)
        requests = sum(at - 1.1 * WINDOW_SECONDS < other <= at for other in asked)
        assert before <= max(least, share * requests + 1)
