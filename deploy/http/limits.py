"""Limits of an HTTP server: size of a request head, and time for each part of an exchange."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf

Count = Callable[[str], None]
"""Callback that counts a cut connection by its cause."""


class Phase(Enum):
    """Phase of an exchange, as seen from the client."""

    HEAD = "head"
    BODY = "body"
    SENT = "sent"
    """the request is complete; its answer is not"""
    IDLE = "idle"
    REFUSED = "refused"
    """input is no longer read"""


HEAD, BODY, SENT, IDLE, REFUSED = Phase
"""Plain names: look-ups of members are slow, and these are compared for every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Sizes in bytes, times in seconds. The application limits bodies, since it reads them."""

    head_bytes: int = 64 * 1024
    """request line and header fields together; also the bytes between two pieces of a chunked body"""
    head_fields: int = 100
    url_bytes: int = 8 * 1024
    head_seconds: float = 30.0
    """from the connection, or from the first byte of a head on a kept-alive connection, to the end of the
    head"""
    body_seconds: float = 60.0
    """from the end of a head to the end of its body"""
    connections: int | None = None
    """open connections; None: derived from the limit of file descriptors. Beyond it, idle ones are closed for
    new ones"""
    idle_seconds: float = 75.0
    """between two requests of one connection"""
    write_seconds: float = 60.0
    """time an answer may wait for a client that does not read"""

    def seconds(self, phase: Phase) -> float:
        """Return the time that a client has for a phase."""
        if phase is HEAD:
            return self.head_seconds
        if phase is BODY:
            return self.body_seconds
        return self.idle_seconds if phase is IDLE else inf


LIMITS = HttpLimits()
RANK_LIMITS = HttpLimits(write_seconds=300.0)
"""Limits of a rank. Its client is a router, whose own write limit must expire first; otherwise the rank would
seem to have failed."""
LOG_SECONDS = 10.0
log = logging.getLogger(__name__)


class CutConnections:
    """Count cut connections by cause and log them, at most one line per `LOG_SECONDS`, so that an attacker
    cannot fill the log."""

    def __init__(self, count: Count | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the counter. count: also called for each connection."""
        self._also = count
        self._clock = clock
        self._unlogged: Counter[str] = Counter()
        self._silent_until = clock()

    def count(self, cause: str) -> None:
        if self._also is not None:
            self._also(cause)
        self._unlogged[cause] += 1
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + LOG_SECONDS
            log.warning(
                "connections of clients were cut: %s",
                ", ".join(f"{number} {name}" for name, number in self._unlogged.items()),
            )
            self._unlogged.clear()
