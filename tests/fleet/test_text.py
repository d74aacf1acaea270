"""Quantities as people read them."""

import pytest

from fleet.text import byte_size, counted, duration, listed


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2_500_000, "2.5 MB"), (12_345_678_901, "12.3 GB")],
)
def test_bytes_are_in_powers_of_a_thousand(count: int, text: str) -> None:
    assert byte_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 us"), (4e-5, "40 us"), (-0.0012345, "-1.23 ms"), (0.5, "500 ms")]
)
def test_times_of_steps_are_in_milliseconds_or_microseconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_noun_follows_its_number() -> None:
    assert [counted(1, "copy", "copies"), counted(1200, "rank")] == ["1 copy", "1,200 ranks"]


def test_a_long_list_is_cut_and_says_how_much_is_missing() -> None:
    assert [listed(range(3)), listed(range(9), 8), listed([])] == [
        "0, 1, 2",
        "0, 1, 2, 3, 4, 5, 6, 7 and 1 more",
        "",
    ]
