"""How long a read of expert memory may take: fitted to what reads from that source by that way have taken. Pure.

A transfer has no time-out of its own (a stopped peer leaves it pending for ever), so every read has one of ours. `seconds = a + b * bytes` is fitted by
least squares over the last reads, and a read is given four times that: what takes longer is no slow read but a stuck one.
"""

from collections import deque

import numpy as np

SLACK = 4.0
"""times the expected seconds"""
_KEPT = 32
"""reads that the fit looks back on"""
_SLOWEST = 50e6
"""bytes per second that any link is taken to reach, before one read was measured"""


class Deadlines:
    """Of one rank's reads, by (source rank, way). least_seconds: given to every read. bytes_per_second: a cap that reads are held to; None: none is."""

    def __init__(self, least_seconds: float, bytes_per_second: int | None = None) -> None:
        self._least = least_seconds
        self._cap = bytes_per_second
        self._read: dict[tuple[int, str], deque[tuple[int, float]]] = {}

    def learn(self, source: int, way: str, size: int, seconds: float) -> None:
        """A read of so many bytes took so long."""
        self._read.setdefault((source, way), deque(maxlen=_KEPT)).append((size, seconds))

    def allowed(self, source: int, way: str, size: int) -> float:
        """Seconds that a read of so many bytes is given."""
        floor = 0.0 if self._cap is None else size / self._cap
        return max(self._least, SLACK * max(floor, self.expected(source, way, size)))

    def expected(self, source: int, way: str, size: int) -> float:
        """Seconds that it takes, by the reads before."""
        read = self._read.get((source, way))
        if not read:
            return size / _SLOWEST
        offset, slope = _fitted(np.array(read, np.float64))
        return offset + slope * size


def _fitted(read: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * bytes, neither below 0. read: float64 [n, 2], bytes and seconds."""
    size, seconds = read.T
    spread = size - size.mean()
    if not (spread @ spread) > 0:
        return 0.0, float(seconds.mean() / max(size.mean(), 1.0))
    slope = max(0.0, float(spread @ seconds / (spread @ spread)))
    offset = float(seconds.mean() - slope * size.mean())
    if offset < 0:
        return 0.0, float(size @ seconds / (size @ size))
    return offset, slope
