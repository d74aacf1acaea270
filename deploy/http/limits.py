"""Limits of an HTTP server: how large a request's head may be, and how long a client may take for each part of an exchange."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

Count = Callable[[str], None]
"""Counts a connection that was cut, by its cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Sizes in bytes, times in seconds. Bodies are bounded by the application, which reads them."""

    head_bytes: int = 64 * 1024
    """request line and header fields together; also what may come between two pieces of a chunked body"""
    head_fields: int = 100
    url_bytes: int = 8 * 1024
    head_seconds: float = 30.0
    """from the connection, or from a head's first byte on a connection kept alive, to the head's end"""
    body_seconds: float = 60.0
    """from a head's end to the end of its body"""
    connections: int | None = None
    """open at once; None: as many as the limit of file descriptors allows. Then silent ones make room for new ones"""
    idle_seconds: float = 75.0
    """between two requests of one connection"""
    write_seconds: float = 60.0
    """how long an answer may wait for a client that does not read"""


LIMITS = HttpLimits()
RANK_LIMITS = HttpLimits(write_seconds=300.0)
"""A rank's client is a router, whose own limit for a client that does not read must come first: the rank would seem to have failed."""
LOG_SECONDS = 10.0
log = logging.getLogger(__name__)


class CutConnections:
    """Counts connections that were cut by cause, and logs them, at most one line in `LOG_SECONDS`: whoever attacks must not fill the log."""

    def __init__(self, count: Count | None, clock: Callable[[], float] = time.monotonic) -> None:
        """count: is also called for each."""
        self._also = count
        self._clock = clock
        self._unsaid: Counter[str] = Counter()
        self._silent_until = clock()

    def count(self, cause: str) -> None:
        if self._also is not None:
            self._also(cause)
        self._unsaid[cause] += 1
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + LOG_SECONDS
            log.warning("connections of clients were cut: %s", ", ".join(f"{number} {name}" for name, number in self._unsaid.items()))
            self._unsaid.clear()
