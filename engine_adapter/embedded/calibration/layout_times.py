"""Step times of a layout (`fleet.layout_times`) from measured steps. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from engine_adapter.embedded.calibration.cells import Batches
from engine_adapter.embedded.calibration.measurement import MeasuredSteps
from fleet.layout_times import LayoutName, LayoutTimes

_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of many normally distributed values."""
_UNKNOWN_NOISE = 0.1
"""Where every step was measured once."""


def times_of_layout(
    name: LayoutName, every: Batches, steps: Sequence[MeasuredSteps], prompt_tokens: int
) -> LayoutTimes:
    """Return the times of a layout. steps: those of `every.cells`, in that order, then one full of prompt
    tokens on every rank; more are ignored. prompt_tokens: of that step, of all ranks."""
    decodes, full = steps[: len(every.cells)], steps[len(every.cells)]
    width, usual = len(every.sequences), [one.usual for one in decodes]
    return LayoutTimes(
        layout=name,
        sequences=every.sequences,
        contexts=every.contexts,
        seconds=tuple(tuple(usual[at : at + width]) for at in range(0, len(usual), width)),
        noise=noise([one.seconds for one in decodes]),
        prefill_token=full.usual / prompt_tokens,
        surplus=sum(one.surplus for one in decodes) / sum(one.sequences for one in every.cells),
    )


def noise(repeats: Sequence[Sequence[float]]) -> float:
    """Return the relative standard error of the median of such repeats, at most 1: from the median of
    their standard deviations, so that single steps that a busy machine delayed count little."""
    several = [np.asarray(one) for one in repeats if len(one) > 1]
    if not several:
        return _UNKNOWN_NOISE
    deviation = float(np.median([one.std(ddof=1) / np.median(one) for one in several]))
    count = float(np.mean([len(one) for one in several]))
    return min(1.0, _OF_MEDIAN * deviation / math.sqrt(count))
