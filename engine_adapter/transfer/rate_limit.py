"""How fast a rank reads, and how willingly its thread lets others go first."""

import logging
import os
import threading

_SLICE_SECONDS = 0.05
"""of a capped rate, that a single piece may take up at once"""
_LEAST_PIECE = 64 * 1024
_log = logging.getLogger(__name__)


class RateLimit:
    """At most so many bytes per second, however many reads share them. What was not used is not saved up."""

    def __init__(self, bytes_per_second: int | None, piece_bytes: int) -> None:
        self._rate = bytes_per_second
        self._free = 0.0
        slice_bytes = piece_bytes if bytes_per_second is None else int(bytes_per_second * _SLICE_SECONDS)
        self.piece_bytes = min(piece_bytes, max(slice_bytes, _LEAST_PIECE))
        """of one read, at most: small enough that a cap is kept evenly"""

    def wait(self, now: float) -> float:
        """Seconds until the next piece may begin."""
        return max(0.0, self._free - now)

    def begin(self, size: int, now: float) -> None:
        """A piece of so many bytes begins."""
        if self._rate is not None:
            self._free = max(self._free, now) + size / self._rate


def lower_priority(niceness: int) -> None:
    """Make the calling thread give way to others, as `nice` does. Only Linux has a niceness of single threads; elsewhere, and where it is forbidden, that is
    said and nothing changes."""
    try:
        if os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except OSError as error:
        _log.warning("the thread %s cannot be given niceness %d here (%s); it reads at its process's", threading.current_thread().name, niceness, error)
