"""Rate limit of a rank's reads, and scheduling priority of its reader thread."""

import logging
import os
import threading

_SLICE_SECONDS = 0.05
"""Longest time that a single piece may take at a limited rate."""
_MIN_PIECE = 64 * 1024
_log = logging.getLogger(__name__)


class RateLimit:
    """Limit on bytes per second, shared by all reads. Unused capacity does not accumulate."""

    def __init__(self, bytes_per_second: int | None, piece_bytes: int) -> None:
        self._rate = bytes_per_second
        self._free = 0.0
        slice_bytes = piece_bytes if bytes_per_second is None else int(bytes_per_second * _SLICE_SECONDS)
        self.piece_bytes = min(piece_bytes, max(slice_bytes, _MIN_PIECE))
        """Largest size of one read. Small enough to keep the rate even."""

    def wait(self, now: float) -> float:
        """Seconds until the next piece may begin."""
        return max(0.0, self._free - now)

    def begin(self, size: int, now: float) -> None:
        """Record the start of a piece of `size` bytes."""
        if self._rate is not None:
            self._free = max(self._free, now) + size / self._rate


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
