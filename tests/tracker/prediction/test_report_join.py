"""Join of two reports of one request, in either order."""

from typing import Any

import pytest

from tracker.prediction.report_join import OVERHEAD, ReportJoin


def made(budget: int = 100_000, limit: int = 100, seconds: float = 60.0) -> ReportJoin:
    return ReportJoin(budget, limit, seconds, (4, 1))


def test_the_second_half_gets_the_first_and_both_are_done() -> None:
    pairs = made()
    assert pairs.offer(0, "a", (1, b"x"), 0.0) is None
    assert pairs.offer(1, "b", (2,), 1.0) is None
    assert pairs.offer(1, "a", (3,), 2.0) == (1, b"x")
    assert pairs.offer(0, "b", (4,), 3.0) == (2,)
    assert len(pairs) == 0
    assert pairs.repeated(0, "a")
    assert pairs.repeated(1, "a")


def test_a_half_that_waits_is_a_repetition_of_its_own_side_only() -> None:
    pairs = made()
    pairs.offer(0, "a", (1,), 0.0)
    assert pairs.repeated(0, "a")
    assert not pairs.repeated(1, "a")
    assert not pairs.repeated(0, "c")


def test_what_waited_too_long_is_given_up() -> None:
    pairs = made(seconds=10.0)
    pairs.offer(0, "a", (1,), 0.0)
    pairs.offer(0, "b", (1,), 9.0)
    assert pairs.offer(1, "a", (2,), 10.5) is None
    assert pairs.given_up == 1
    assert len(pairs) == 2


def test_bytes_and_number_are_bounded_the_oldest_go() -> None:
    pairs = made(budget=10 * (OVERHEAD + 100))
    for at in range(50):
        pairs.offer(0, f"{at}", (bytes(100),), 0.0)
    assert len(pairs) == 10
    assert pairs.nbytes <= 10 * (OVERHEAD + 100)
    assert not pairs.repeated(0, "39")
    assert pairs.repeated(0, "40")
    few = made(limit=3)
    for at in range(9):
        few.offer(0, f"{at}", (), 0.0)
        few.offer(1, f"{at}", (), 0.0)
        few.offer(0, f"x{at}", (), 0.0)
    assert len(few) == 3
    assert not few.repeated(0, "5")
    assert few.repeated(0, "6")


def test_a_restart_changes_nothing() -> None:
    pairs, again = made(), made()
    pairs.offer(0, "a", (1, 2.5, None, b"x"), 0.0)
    pairs.offer(1, "b", (b"y",), 1.0)
    pairs.offer(0, "b", (), 2.0)
    pairs.offer(1, "c", (b"z",), 2.5)
    again.take_over(pairs.state())
    assert again.state() == pairs.state()
    assert again.nbytes == pairs.nbytes
    assert again.offer(1, "a", (), 3.0) == (1, 2.5, None, b"x")


@pytest.mark.parametrize(("side", "part"), [(2, []), (0, [1]), (1, [1, 2])])
def test_a_state_that_does_not_fit_is_refused(side: int, part: list[int]) -> None:
    state: dict[str, Any] = {"waiting": [("a", side, 0.0, part)], "paired": [], "given_up": 0}
    with pytest.raises(ValueError, match=f"side {side}"):
        made().take_over(state)
