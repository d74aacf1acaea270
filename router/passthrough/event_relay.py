"""The usual events of a server's stream, passed on where they arrive."""

import re
from collections.abc import Callable

from router import kernels
from router.http.asgi_response import ChunkedBody

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,5})\r\n")
"""Size line of a chunk."""
_END = b"\n\n\r\n"
"""of a chunk of whole events"""
_SAYS_END = re.compile(rb'"usage"(?!: ?null)|\[DONE\]')


def whole_events(data: bytes) -> int:
    """Return the number of events in bytes that are whole chunks of whole events. 0: they are something else,
    or some event states usage or is the last.
    """
    at = found = 0
    while at < len(data):
        size = _SIZE.match(data, at)
        if size is None:
            return 0
        start, end = size.end(), size.end() + int(size[1], 16)
        if end < start + 2 or data[end - 2 : end + 2] != _END or _SAYS_END.search(data, start, end):
            return 0
        found += data.count(b"\n\n", start, end)
        at = end + 2
    return found


class EventRelay:
    """Passes chunks of whole events on to the client unchanged, while nothing else has to be done for them.

    Like `router.api.token_relay.TokenRelay`, it holds all that this takes.
    """

    __slots__ = ("_body", "_events_of", "events", "heard_at", "until")

    def __init__(self, body: ChunkedBody) -> None:
        self._body = body
        library = kernels.compiled()
        self._events_of: Callable[[bytes], int] = whole_events if library is None else library.whole_events
        self.events = 0
        """number of events passed on"""
        self.until = 0
        """number up to which they are taken"""
        self.heard_at = 0.0
        """loop time of the last chunk"""

    def take(self, data: bytes, now: float) -> bool:
        """Pass on what arrived between two chunks. False, with nothing done: it is not chunks of whole
        events, some event states usage or is the last, or the client reads too slowly.
        """
        found = self._events_of(data)
        write = self._body.write_now
        if not found or self.events + found > self.until or write is None:
            return False
        write(data)
        self.events += found
        self.heard_at = now
        return True
