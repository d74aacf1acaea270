"""Bytes copied by plans, against their budget."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from migration.model import byte_budget
from migration.model.byte_budget import ByteBudget

STORY = st.lists(st.tuples(st.floats(0, 50), st.integers(0, 1000)), max_size=30)
"""(seconds since the previous request, requested bytes)"""


@given(STORY, st.integers(0, 2000), st.floats(1, 100))
@example(
    [(6.4e-178, 1), (1.0, 1)], 1, 1.0
)  # the second request comes when the interval of the first has ended by less than the resolution of a float
def test_who_copies_no_more_than_is_left_never_copies_more_than_the_budget_in_any_interval(
    story: list[tuple[float, int]], budget: int, seconds: float
) -> None:
    kept, now, done = ByteBudget(), 0.0, []
    for pause, wish in story:
        now += pause
        copied = min(wish, kept.left(now, budget, seconds))
        kept.spend(now, copied)
        done.append((now, copied))
    for end, _ in done:
        assert sum(copied for at, copied in done if at <= end and end - at < seconds) <= budget


@given(STORY, st.floats(0, 200), st.floats(1, 100))
def test_what_is_within_an_interval_is_what_was_copied_in_it(
    story: list[tuple[float, int]], later: float, seconds: float
) -> None:
    kept, now, done = ByteBudget(), 0.0, []
    for pause, copied in story:
        now += pause
        kept.spend(now, copied)
        done.append((now, copied))
    now += later
    assert kept.within(now, seconds) == sum(copied for at, copied in done if now - at < seconds)


@given(STORY)
def test_of_too_many_handovers_the_oldest_count_longer_never_shorter(story: list[tuple[float, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_budget, "MAX_ENTRIES", 4)
        few, now = ByteBudget(), 0.0
        done = []
        for pause, copied in story:
            now += pause
            few.spend(now, copied)
            done.append((now, copied))
        windows = sorted({now - at + 0.001 for at, _ in done})
        # As many sums as there are entries, and none.
        assert len({few.within(now, seconds) for seconds in windows}) <= 5
        for seconds in (1.0, 20.0, 1e6):
            assert few.within(now, seconds) >= sum(copied for at, copied in done if now - at < seconds)
        assert few.within(now, 1e9) == sum(copied for _, copied in done)


def test_nobody_copies_less_than_nothing_and_what_is_told_late_counts_from_the_one_before() -> None:
    kept = ByteBudget()
    with pytest.raises(ValueError, match="-1 bytes"):
        kept.spend(0.0, -1)
    kept.spend(10.0, 5)
    kept.spend(3.0, 7)
    assert kept.within(14.0, 5.0) == 12


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=10),
    st.lists(st.integers(0, 10), max_size=10),
    st.integers(1, 15),
    st.integers(1, 30),
)
def test_the_wait_is_what_looking_every_second_finds(
    story: list[tuple[int, int]], sizes: list[int], budget: int, seconds: int
) -> None:
    """Times are whole seconds, so that looking every second misses no moment."""
    kept, now = ByteBudget(), 0
    for pause, copied in story:
        now += pause
        kept.spend(now, copied)
    expected = kept.wait(now, sizes, budget, seconds)
    at = now
    for size in sizes:
        while not kept.permits(at, size, budget, seconds):
            at += 1
        kept.spend(at, size)
    assert expected == at - now


def test_a_budget_of_0_permits_nothing_and_one_that_is_too_small_permits_one_at_a_time() -> None:
    kept = ByteBudget()
    assert not kept.permits(0.0, 5, 0, 10.0)
    assert kept.wait(0.0, [5], 0, 10.0) == float("inf")
    assert kept.wait(0.0, [50, 50, 50], 10, 60.0) == 120.0
    assert kept.permits(0.0, 50, 10, 60.0)
    kept.spend(0.0, 50)
    assert not kept.permits(59.0, 1, 10, 60.0)
    assert kept.permits(60.0, 50, 10, 60.0)
