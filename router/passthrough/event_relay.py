"""The usual event of a server's stream, passed on where it arrives."""

from router.http.asgi_response import WriteChunk

_END = b"\n\n\r\n"
"""of a chunk of whole events"""
_SMALLEST, _TWO_DIGITS, _LARGEST = 22, 262, 4103
"""Lengths of chunks whose size has two or three digits: from the first to the second, and from there to the
third, both exclusive."""


class EventRelay:
    """Passes chunks of whole events on to the client unchanged, while nothing else has to be done for them.

    Like `router.api.token_relay.TokenRelay`, it holds all that this takes.
    """

    __slots__ = ("_write_chunk", "events", "heard_at", "until")

    def __init__(self, write_chunk: WriteChunk) -> None:
        self._write_chunk = write_chunk
        self.events = 0
        """number of events passed on"""
        self.until = 0
        """number up to which they are taken"""
        self.heard_at = 0.0
        """loop time of the last chunk"""

    def take(self, data: bytes, now: float) -> bool:
        """Pass on what arrived between two chunks. False, with nothing done: it is not one chunk of whole
        events as `write_now` makes them, it states usage or is the last, or the client reads too slowly.
        """
        length = len(data)
        if not _SMALLEST <= length < _LARGEST or length == _TWO_DIGITS or not data.endswith(_END):
            return False
        if not data.startswith(b"%x\r\n" % (length - (6 if length < _TWO_DIGITS else 7))):
            return False
        events = self.events + data.count(b"\n\n")
        if events > self.until or b'"usage"' in data or b"[DONE]" in data or not self._write_chunk(data):
            return False
        self.events = events
        self.heard_at = now
        return True
