"""Server-sent events on their way through: bytes as they came, but never half an event. Pure."""

import msgspec

from fleet.completions import ApiError

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_DONE = b"data: [DONE]\n\n"
_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"


class EventStream:
    """A stream of bytes, cut behind its last complete event. What comes out, joined, is what went in.

    An unfinished event is of no use to the client, and where the server breaks off within one, an error event
    behind it could not be parsed. An event longer than `most_bytes` passes in pieces.
    """

    def __init__(self, most_bytes: int) -> None:
        self.rest = b""
        """of an event that is not complete yet"""
        self._most = most_bytes
        self._inside = False
        """part of an unfinished event has been given out"""

    def feed(self, data: bytes) -> bytes:
        """Bytes that may be passed on now: whole events, keep-alive comments included; often nothing, or
        `data` itself."""
        if not self.rest and data.endswith(b"\n\n"):  # as servers write
            self._inside = False
            return data
        searched = max(0, len(self.rest) - 3)
        data = self.rest + data if self.rest else data
        cut = max(at + len(end) if (at := data.rfind(end, searched)) >= 0 else 0 for end in _ENDS)
        if cut:
            self._inside = False
        if len(data) - cut > self._most:
            cut, self._inside = len(data), True
        ready, self.rest = data[:cut], data[cut:]
        return ready

    def separator(self) -> bytes:
        """Bytes that must go out before another event, once the stream broke: nothing, but for a long
        event that has begun."""
        return b"\n\n" if self._inside else b""


def error_event(path: str, error: ApiError) -> bytes:
    """An error as the last event of a begun stream, in the form of the route's own API; OpenAI's older
    streams end with [DONE]."""
    if path.startswith(_MESSAGES):
        said = {"type": "error", "error": {"type": "api_error", "message": error.message}}
        return b"event: error\ndata: " + msgspec.json.encode(said) + b"\n\n"
    if path.startswith(_RESPONSES):
        form = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(form) + b"\n\n"
    return b"data: " + error.body() + b"\n\n" + _DONE
