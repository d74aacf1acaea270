"""Metrics that are updated often and read seldom: plain numbers, independent of the metrics library. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LazyCounter:
    """One number for each combination of label values, which may be of any type with a str() form. goes_down:
    export it as a gauge.
    """

    def __init__(self, name: str, text: str, labels: tuple[str, ...], *, goes_down: bool = False) -> None:
        self.name, self.text, self.labels, self.goes_down = name, text, labels, goes_down
        self.values: defaultdict[tuple[Hashable, ...], float] = defaultdict(float)


class Buckets:
    """Number of values in each bucket, and their sum. bounds: inclusive upper ends, ascending; one more
    bucket is above them.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs (upper end, values up to it); the last pair counts all values."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))


class Histogram:
    """Buckets for each combination of label values."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...]) -> None:
        self.name, self.text, self.names = name, text, labels
        self.spreads: dict[tuple[str, ...], Buckets] = {}
        self._bounds = tuple(float(bound) for bound in bounds)

    def labels(self, *values: str) -> Buckets:
        return self.spreads.setdefault(values, Buckets(self._bounds))


class VectorSums:
    """Sums of vectors of named parts by key, and the number of vectors. unit: factor of a sum in the
    exposition.
    """

    def __init__(
        self, name: str, text: str, key: str, part: str, parts: tuple[str, ...], *, unit: float = 1.0
    ) -> None:
        self.name, self.text, self.names, self._parts, self._unit = name, text, (key, part), parts, unit
        self._sums: dict[str, NDArray[Any]] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add(self, key: str, vector: NDArray[np.float64]) -> None:
        """Add a vector, float64 [parts]."""
        sums = self._sums.get(key)
        if sums is None:
            self._sums[key] = vector.copy()
        else:
            sums += vector
        self._counts[key] += 1

    def rows(self) -> Iterator[tuple[tuple[str, str], int, float]]:
        """Yield (key, part), count, sum."""
        for key, sums in self._sums.items():
            for part, total in zip(self._parts, (sums * self._unit).tolist(), strict=True):
                yield (key, part), self._counts[key], total
