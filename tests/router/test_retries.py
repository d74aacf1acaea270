"""The retry budget: a share of what came lately, a floor, and no begun answer refused."""

from hypothesis import given
from hypothesis import strategies as st

from router.retries import WINDOW_SECONDS, RetryBudget


def test_a_share_of_the_last_requests_may_be_tried_again() -> None:
    budget = RetryBudget(0.2, 0)
    for _ in range(100):
        budget.asked(5.0)
    assert [budget.may_retry(5.0, begun=False) for _ in range(25)].count(True) == 20
    assert not budget.may_retry(5.0, begun=False)


def test_a_few_retries_are_always_allowed() -> None:
    budget = RetryBudget(0.0, 3)
    assert [budget.may_retry(1.0, begun=False) for _ in range(5)] == [True, True, True, False, False]


def test_an_answer_that_has_begun_is_always_continued_and_counted() -> None:
    budget = RetryBudget(0.0, 3)
    assert all(budget.may_retry(1.0, begun=True) for _ in range(10))
    assert not budget.may_retry(1.0, begun=False)


def test_what_is_older_than_the_window_counts_no_more() -> None:
    budget = RetryBudget(0.5, 1)
    for _ in range(10):
        budget.asked(3.0)
    assert all(budget.may_retry(3.0, begun=False) for _ in range(5))
    assert not budget.may_retry(3.0 + 0.8 * WINDOW_SECONDS, begun=False)
    assert budget.may_retry(3.0 + 1.1 * WINDOW_SECONDS, begun=False)
    assert not budget.may_retry(3.0 + 1.1 * WINDOW_SECONDS, begun=False)


@given(
    st.floats(0, 1),
    st.integers(0, 20),
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["asked", "retry", "begun"])), max_size=150),
)
def test_no_window_holds_more_retries_than_the_budget_says(share: float, least: int, course: list[tuple[float, str]]) -> None:
    budget, now = RetryBudget(share, least), 1000.0
    asked: list[float] = []
    retried: list[tuple[float, bool]] = []
    for pause, what in course:
        now += pause
        if what == "asked":
            budget.asked(now)
            asked.append(now)
        elif budget.may_retry(now, begun=what == "begun"):
            retried.append((now, what == "begun"))
        else:
            assert what == "retry"
            lately = [at for at, _ in retried if at > now - WINDOW_SECONDS]
            assert len(lately) >= least  # the floor is never refused
    for at, begun in retried:  # between two slides of the window the true one is at most a slice shorter or longer
        before = sum(at - WINDOW_SECONDS < other <= at for other, _ in retried if other <= at)
        requests = sum(at - 1.1 * WINDOW_SECONDS < other <= at for other in asked)
        continued = sum(at - WINDOW_SECONDS < other <= at for other, was in retried if was and other <= at)
        assert begun or before <= max(least, share * requests + 1) + continued
