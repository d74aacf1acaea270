"""Rate limit of a rank's reads, and scheduling priority of its reader thread."""

import logging
import os
import threading

from engine_adapter.config import TransferConfig
from engine_adapter.transfer.adaptive_rate import LEAST_RATE, AdaptiveRate

_SLICE_SECONDS = 0.01
"""Longest time that a single piece may take at a limited rate."""
_MIN_PIECE = 64 * 1024
_log = logging.getLogger(__name__)


class RateLimit:
    """Limit on bytes per second, shared by all reads. Unused capacity does not accumulate. Thread-safe."""

    def __init__(
        self, bytes_per_second: int | None, piece_bytes: int, adaptive: AdaptiveRate | None = None
    ) -> None:
        """bytes_per_second: None: unlimited. adaptive: a second limit, which changes."""
        self._cap = bytes_per_second
        self._most = piece_bytes
        self._adaptive = adaptive
        self._free = 0.0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: TransferConfig) -> "RateLimit":
        """Return the limit for reads of one rank, whose steps it is told of by `note_steps`."""
        adaptive = None if config.max_step_loss >= 1 else AdaptiveRate(config.max_step_loss)
        return cls(config.bytes_per_second, config.piece_bytes, adaptive)

    @property
    def least(self) -> float | None:
        """Lowest rate that the limit can have. None: there is no limit."""
        return self._lower(None if self._adaptive is None else LEAST_RATE)

    def piece_bytes(self, now: float) -> int:
        """Largest size of one read. Small enough to keep the rate even."""
        rate = self._rate(now)
        slice_bytes = self._most if rate is None else int(rate * _SLICE_SECONDS)
        return min(self._most, max(slice_bytes, _MIN_PIECE))

    def wait(self, now: float) -> float:
        """Seconds until the next piece may begin."""
        return max(0.0, self._free - now)

    def begin(self, size: int, now: float) -> None:
        """Record the start of a piece of `size` bytes."""
        with self._lock:
            if self._adaptive is not None:
                self._adaptive.begin(size)
            if (rate := self._rate(now)) is not None:
                self._free = max(self._free, now) + size / rate

    def note_steps(self, steps: int, seconds: float, now: float) -> None:
        """Record the steps of the engine since the last call: their number and total duration."""
        with self._lock:
            if self._adaptive is not None:
                self._adaptive.note_steps(steps, seconds, now)

    def _rate(self, now: float) -> float | None:
        return self._lower(None if self._adaptive is None else self._adaptive.rate(now))

    def _lower(self, rate: float | None) -> float | None:
        """Return the lower one of the cap and another rate."""
        return min((one for one in (self._cap, rate) if one is not None), default=None)


def lower_priority(niceness: int) -> None:
    """Lower the priority of the calling thread, as `nice` does. Only Linux has per-thread niceness. Where it
    is missing or forbidden, log a warning and change nothing."""
    try:
        if os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except OSError as error:
        _log.warning(
            "thread %s cannot be set to niceness %d (%s); it keeps the niceness of its process",
            threading.current_thread().name,
            niceness,
            error,
        )
