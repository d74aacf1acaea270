"""Demand of short intervals: samples of what single steps ask for. Pure; bounded; the time is an argument."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 256
"""Samples kept per engine: the newest."""
MAX_BYTES = 64 << 20
"""Memory of an engine's samples."""


@dataclass(slots=True, eq=False)
class DemandSamples:
    """Reports of all targets of one engine, summed interval by interval."""

    targets: int
    _open: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """by target: its report of the present interval"""
    _closed: deque[tuple[float, NDArray[np.float32]]] = field(default_factory=deque)

    def add(self, target: int, counts: NDArray[np.float32], now: float) -> None:
        """Add the report of one target [layers, experts]. An interval ends when all targets have reported, or
        one of them reports again."""
        if target in self._open:
            self._close(now)
        self._open[target] = counts
        if len(self._open) == self.targets:
            self._close(now)

    def _close(self, now: float) -> None:
        sample: NDArray[np.float32] = np.asarray(sum(self._open.values()), np.float32)
        self._open.clear()
        if sample.any():
            self._closed.append((now, sample))
        most = max(1, min(MAX_SAMPLES, MAX_BYTES // sample.nbytes))
        while len(self._closed) > most:
            self._closed.popleft()

    def between(self, begin: float, end: float) -> NDArray[np.float32] | None:
        """Return the samples of (begin, end]: float32 [n, layers, experts]; None: there are none."""
        found = [sample for at, sample in self._closed if begin < at <= end]
        return np.stack(found) if found else None
