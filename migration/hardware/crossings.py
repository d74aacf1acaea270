"""Batches at which the faster of two layouts changes, from predicted steps. Pure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from fleet.layout_times import LayoutName

INDIFFERENT = 0.05
"""Relative difference of step times below which neither layout counts as faster."""
_STEP = 1.02
"""Ratio of neighbouring numbers of sequences that are compared."""
StepSeconds = Callable[[LayoutName, int], float]


class BatchStretch(NamedTuple):
    """Numbers of sequences, first and last included."""

    first: int
    last: int
    faster: LayoutName | None
    """None: the two differ by less than the band"""


class PredictedCrossing(NamedTuple):
    """Sequences from the last at which `below` is faster by the band, to the first at which `above` is."""

    first: int
    last: int
    below: LayoutName
    above: LayoutName


def counts(fewest: int, most: int) -> list[int]:
    """Return numbers of sequences, even in their logarithm, each once."""
    found = [fewest]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * _STEP))))
    return found


def stretches(
    one: LayoutName,
    other: LayoutName,
    seconds: StepSeconds,
    sequences: Sequence[int],
    band: float = INDIFFERENT,
) -> tuple[BatchStretch, ...]:
    """Return the stretches of one faster layout, ascending. sequences: to be compared, ascending."""

    def faster(count: int) -> LayoutName | None:
        first, second = seconds(one, count), seconds(other, count)
        if abs(first - second) < band * min(first, second):
            return None
        return one if first < second else other

    runs = ((name, list(run)) for name, run in groupby(sequences, key=faster))
    return tuple(BatchStretch(run[0], run[-1], name) for name, run in runs)


def crossings(found: Sequence[BatchStretch]) -> Iterator[PredictedCrossing]:
    """Yield the changes from one faster layout to the other: none, one or several."""
    decided = [one for one in found if one.faster is not None]
    for left, right in pairwise(decided):
        if left.faster is not None and right.faster is not None and left.faster != right.faster:
            yield PredictedCrossing(left.last, right.first, left.faster, right.faster)
