"""Settings: bounds in their types, and errors that state them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from fleet.settings import (
    FilePath,
    NonNegative,
    PartialShare,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    allowed_values,
    check_bounds,
    converted,
)


@dataclass(frozen=True, slots=True)
class Clock:
    tick_seconds: Positive = 1.0
    drift: Share = 0.0
    hands: PositiveInt | None = None
    face: Literal["round", "square"] = "round"
    makers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_bounds(self)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Positive, "a number above 0"),
        (NonNegative, "a number of at least 0"),
        (Share, "a number from 0 to 1"),
        (PositiveShare, "a number above 0 and at most 1"),
        (PartialShare, "a number above 0 and below 1"),
        (PositiveInt | None, "a whole number of at least 1 or unset"),
        (Annotated[int, Meta(ge=1, le=64)], "a whole number from 1 to 64"),
        (Literal["text", "json"], "text or json"),
        (tuple[str, ...], "a list of text"),
        (FilePath | None, "a file or unset"),
        (bool, "true or false"),
    ],
)
def test_a_type_says_which_values_it_allows(hint: Any, words: str) -> None:
    assert allowed_values(hint) == words


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("many", int),
        (True, int),
        (True, float),
        (0, Positive),
        (float("nan"), NonNegative),
        (float("inf"), Positive),
        (float("inf"), float | None),
        (1.1, Share),
        (0, PositiveInt | None),
        ("oval", Literal["round", "square"]),
    ],
)
def test_a_value_that_its_type_does_not_allow_is_refused(value: object, hint: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        converted(value, hint)


def test_numbers_are_read_from_text_where_settings_are_text() -> None:
    assert converted("2", Positive, strict=False) == 2.0
    assert converted(3, Positive) == 3.0
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        converted("2", PositiveInt)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"tick_seconds": 0.0}, "tick_seconds must be a number above 0, not 0.0"),
        ({"drift": 2}, "drift must be a number from 0 to 1, not 2"),
        ({"hands": 0}, "hands must be a whole number of at least 1 or unset, not 0"),
        ({"face": "oval"}, "face must be round or square, not 'oval'"),
    ],
)
def test_settings_made_by_hand_are_refused_by_name(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Clock(**fields)


def test_settings_within_their_bounds_are_accepted() -> None:
    assert Clock(tick_seconds=1e-9, drift=1, hands=2, face="square").hands == 2
