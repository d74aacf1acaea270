"""Server-sent events passed through unchanged and never cut within an event. Pure."""

from fleet.completions import DONE, ApiError, sse

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"


class EventStream:
    """A byte stream, cut after its last complete event. The concatenated output equals the input.

    A partial event is useless to the client. If the server breaks off within an event, an error event after
    it could not be parsed. An event longer than `max_bytes` passes in pieces.
    """

    def __init__(self, max_bytes: int) -> None:
        self.rest = b""
        """start of an event that is not complete yet"""
        self._max_bytes = max_bytes
        self._inside = False
        """True after part of an unfinished event was passed on"""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may be passed on now: complete events, keep-alive comments included; often
        nothing, or `data` itself.
        """
        if not self.rest and data.endswith(b"\n\n"):  # the usual case
            self._inside = False
            return data
        searched = max(0, len(self.rest) - 3)
        data = self.rest + data if self.rest else data
        cut = max(at + len(end) if (at := data.rfind(end, searched)) >= 0 else 0 for end in _ENDS)
        if cut:
            self._inside = False
        if len(data) - cut > self._max_bytes:
            cut, self._inside = len(data), True
        ready, self.rest = data[:cut], data[cut:]
        return ready

    @property
    def between_events(self) -> bool:
        """True when all that was fed is passed on, and was whole events."""
        return not self.rest and not self._inside

    def separator(self) -> bytes:
        """Return the bytes to send before another event after the stream broke: nothing, except after a long
        event that has begun.
        """
        return b"\n\n" if self._inside else b""


def error_event(path: str, error: ApiError) -> bytes:
    """Return an error as the last event of a begun stream, in the form of the route's own API. OpenAI's older
    streams end with [DONE].
    """
    if path.startswith(_MESSAGES):
        body = {"type": "error", "error": {"type": "api_error", "message": error.message}}
        return b"event: error\n" + sse(body)
    if path.startswith(_RESPONSES):
        form = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\n" + sse(form)
    return b"data: " + error.body() + b"\n\n" + DONE
