"""Rate of a rank's reads that adapts to what the engine's steps lose by them. Pure: the time comes in as an
argument, in seconds of one clock.

Steps are measured over intervals (the engine's reports, some 50 ms each). The median step of intervals with
reads is compared with that of intervals without, and the difference attributed to the part of the time in
which reads were under way. A loss above the limit halves the rate, one below half of the limit doubles it.
"""

from collections import deque
from statistics import median

LEAST_RATE = 250e6
"""Bytes per second: the lowest rate, and the one at the start. The planner's deadlines allow for as much
(`planner.stage_bytes_per_second`)."""
_IDLE_SECONDS = 1.0
"""Time without a step after which the engine counts as idle."""
_QUIET, _FEW_QUIET = 16, 4
"""Intervals without reads: kept, and needed for a comparison."""
_ENOUGH = 6.0
"""Time with reads, in intervals, from which the loss is known well enough."""
_MOST_INTERVALS = 256
"""Intervals with reads after which the loss is computed in any case."""


class AdaptiveRate:
    """Rate at which steps lose at most the part `max_loss` of their time, as far as LEAST_RATE permits."""

    def __init__(self, max_loss: float) -> None:
        self._max_loss = max_loss
        self._rate = LEAST_RATE
        self._noted: float | None = None
        self._stepped = float("-inf")
        self._reading = 0.0
        """Seconds of reads at the present rate that no interval has accounted for."""
        self._quiet: deque[float] = deque(maxlen=_QUIET)
        """Mean step of intervals without reads."""
        self._busy: list[tuple[float, float]] = []
        """(mean step, part of the time with reads) of intervals with reads."""

    def rate(self, now: float) -> float | None:
        """Bytes per second. None: there are no steps to lose time."""
        return None if now - self._stepped > _IDLE_SECONDS else self._rate

    def begin(self, size: int) -> None:
        """Record the start of a read of `size` bytes."""
        self._reading += size / self._rate

    def note_steps(self, steps: int, seconds: float, now: float) -> None:
        """Record an interval that ends now: the number of steps that ended in it, and their total
        duration."""
        interval = 0.0 if self._noted is None else now - self._noted
        reading, self._reading = self._reading, max(0.0, self._reading - interval)
        self._noted = now
        if steps == 0:
            return
        self._stepped = now
        if reading == 0:
            self._quiet.append(seconds / steps)
        elif interval > 0 and len(self._quiet) >= _FEW_QUIET:
            self._busy.append((seconds / steps, min(1.0, reading / interval)))
            self._adapt()

    def _adapt(self) -> None:
        part = sum(busy for _, busy in self._busy)
        if part < _ENOUGH and len(self._busy) < _MOST_INTERVALS:
            return
        # Medians: a step with a long prompt says nothing about reads.
        slower = median(step for step, _ in self._busy) / median(self._quiet) - 1.0
        loss = slower * len(self._busy) / part
        if loss > self._max_loss:
            self._rate = max(LEAST_RATE, self._rate / 2)
        elif loss < self._max_loss / 2:
            self._rate *= 2
        self._busy.clear()
