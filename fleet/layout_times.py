"""Measured step times of an engine in each layout that it can serve: the base of every choice of a layout."""

from itertools import pairwise
from typing import Literal

import msgspec

from fleet.timing import MAX_SECONDS

LayoutName = Literal["ep", "experts-tp", "tp"]
"""Layouts that an engine as a whole can be in: `fleet.layout.EP`, `experts_tp` and `tp`."""
MOST_FIGURES = 32
"""Most batches, and most contexts, of one table."""


class LayoutTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of an engine in one layout. ValueError names a figure that is out of range."""

    layout: LayoutName
    sequences: tuple[int, ...]
    """decoding sequences of the engine, ascending"""
    contexts: tuple[int, ...]
    """tokens of each sequence, ascending"""
    seconds: tuple[tuple[float, ...], ...]
    """duration of a decode step, [contexts][sequences]"""
    noise: float
    """relative standard error of one of these durations"""
    prefill_token: float
    """seconds per prompt token of the engine, in steps full of prompt tokens on every rank"""
    surplus: float = 0.0
    """pairs of the most loaded rank above the mean, per sequence of the engine and summed over layers, in the
    steps that were measured. It grows with imbalance, at `EngineSpeed.expert_pair` seconds a pair
    """

    def __post_init__(self) -> None:
        for name, numbers in (("sequences", self.sequences), ("contexts", self.contexts)):
            if not numbers or numbers[0] < 1 or any(later <= one for one, later in pairwise(numbers)):
                raise ValueError(
                    f"times of layout {self.layout}: {name} must be numbers from 1 on, ascending, not"
                    f" {list(numbers)}"
                )
            if len(numbers) > MOST_FIGURES:
                raise ValueError(
                    f"times of layout {self.layout}: {len(numbers)} {name}; {MOST_FIGURES} are enough,"
                    " log-spaced"
                )
        if len(self.seconds) != len(self.contexts) or any(
            len(row) != len(self.sequences) for row in self.seconds
        ):
            raise ValueError(
                f"times of layout {self.layout}: seconds must have {len(self.contexts)} rows of"
                f" {len(self.sequences)}, one for each context and number of sequences"
            )
        figures = [*(one for row in self.seconds for one in row), self.prefill_token]
        bad = next((one for one in figures if not 0 < one <= MAX_SECONDS), None)
        if bad is not None:
            raise ValueError(
                f"times of layout {self.layout}: durations must be above 0 and at most {MAX_SECONDS:g} s,"
                f" not {bad}"
            )
        if not 0 <= self.noise <= 1 or not 0 <= self.surplus <= MAX_SECONDS:
            raise ValueError(
                f"times of layout {self.layout}: noise must be a share from 0 to 1, and surplus pairs from 0"
                f" on, not {self.noise} and {self.surplus}"
            )
