"""Deadlines for reads of expert memory, fitted to earlier reads from the same source by the same transfer
backend. Pure.

A transfer has no timeout of its own: with a stopped peer it stays pending forever. So every read gets a
deadline here. `seconds = a + b * bytes` is fitted by least squares over the last reads. A read may take four
times the fitted time. A read that takes longer is stuck, not slow.
"""

from collections import deque

import numpy as np

SLACK = 4.0
"""Allowed seconds as a multiple of the expected seconds."""
_KEPT = 32
"""Number of past reads in the fit."""
_SLOWEST = 50e6
"""Assumed minimum bandwidth in bytes per second, before the first read was measured."""


class Deadlines:
    """Deadlines of one rank's reads, by (source rank, transfer backend). min_seconds: minimum allowance of
    every read. bytes_per_second: lowest rate limit of the reads. None: no limit."""

    def __init__(self, min_seconds: float, bytes_per_second: float | None = None) -> None:
        self._min_seconds = min_seconds
        self._cap = bytes_per_second
        self._read: dict[tuple[int, str], deque[tuple[int, float]]] = {}

    def learn(self, source: int, transfer: str, size: int, seconds: float) -> None:
        """Record the size and duration of a completed read."""
        self._read.setdefault((source, transfer), deque(maxlen=_KEPT)).append((size, seconds))

    def allowed(self, source: int, transfer: str, size: int) -> float:
        """Seconds allowed for a read of `size` bytes."""
        floor = 0.0 if self._cap is None else size / self._cap
        return max(self._min_seconds, SLACK * max(floor, self.expected(source, transfer, size)))

    def expected(self, source: int, transfer: str, size: int) -> float:
        """Expected seconds for a read of `size` bytes, based on earlier reads."""
        read = self._read.get((source, transfer))
        if not read:
            return size / _SLOWEST
        offset, slope = _fitted(np.array(read, np.float64))
        return offset + slope * size


def _fitted(read: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, float]:
    """Fit seconds = a + b * bytes, with neither a nor b below 0, and return (a, b). read: float64 [n, 2],
    bytes and seconds."""
    size, seconds = read.T
    spread = size - size.mean()
    if not (spread @ spread) > 0:
        return 0.0, float(seconds.mean() / max(size.mean(), 1.0))
    slope = max(0.0, float(spread @ seconds / (spread @ spread)))
    offset = float(seconds.mean() - slope * size.mean())
    if offset < 0:
        return 0.0, float(size @ seconds / (size @ size))
    return offset, slope
