"""Measured step times of layouts: what a join may state."""

from typing import Any

import msgspec
import pytest

from fleet.layout_times import LayoutTimes


def times(**changes: Any) -> LayoutTimes:
    stated: dict[str, Any] = {
        "layout": "ep",
        "sequences": (1, 8),
        "contexts": (64, 512),
        "seconds": ((0.01, 0.02), (0.012, 0.03)),
        "noise": 0.02,
        "prefill_token": 1e-4,
    }
    return LayoutTimes(**{**stated, **changes})


def test_times_pass_through_the_wire_unchanged() -> None:
    stated = times(surplus=0.5)
    assert msgspec.json.decode(msgspec.json.encode(stated), type=LayoutTimes) == stated


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sequences": (8, 1)}, r"sequences .*\[8, 1\]"),
        ({"sequences": ()}, "sequences"),
        ({"contexts": (0, 512)}, "contexts"),
        ({"sequences": tuple(range(1, 34))}, "33 sequences; 32 are enough"),
        ({"seconds": ((0.01, 0.02),)}, "2 rows of 2"),
        ({"seconds": ((0.01, 0.02), (0.012,))}, "2 rows of 2"),
        ({"seconds": ((0.0, 0.02), (0.012, 0.03))}, "not 0.0"),
        ({"seconds": ((0.01, float("nan")), (0.012, 0.03))}, "not nan"),
        ({"prefill_token": float("inf")}, "not inf"),
        ({"noise": -0.1}, "-0.1"),
    ],
)
def test_figures_out_of_range_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        times(**changes)
