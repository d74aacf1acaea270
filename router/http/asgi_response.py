"""Response to one HTTP request over ASGI: started once, ended once."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from fleet.completions import ApiError
from router.http.body_budget import BODIES_FULL

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
OnDisconnect = Callable[[Callable[[], object] | None], object]
BODY = "roost.body"
"""ASGI extension of Roost's HTTP server: a `ChunkedBody`."""
ON_DISCONNECT = "roost.on_disconnect"
"""Another one: sets a callback for a client that disconnects before its response is complete."""


class ChunkedBody(Protocol):
    """Body of a response, for those who send pieces of it without waiting."""

    @property
    def write_now(self) -> Callable[[bytes], object] | None:
        """Sends a chunk of a chunked body, its size and line ends included. None: only `Send` can send, since
        the body has not begun or is over, or the client reads too slowly or has gone.
        """
        ...


class _UnknownBody:
    """Stands for the body in a server without the extension."""

    write_now = None


class AsgiResponse:
    """Response of one request. `status` is 0 until it has started. `before_end` is called when nothing can
    fail for the client any longer.
    """

    def __init__(self, send: Send, before_end: Callable[[], object], body: ChunkedBody | None = None) -> None:
        """body: the HTTP server's extension `BODY`; None: it has none."""
        self._send = send
        self.body = body or _UnknownBody()
        self._before_end = before_end
        self.status = 0
        self.ended = False
        self._content_type = b""

    @property
    def streams_events(self) -> bool:
        """True when the response that has started is a stream of server-sent events."""
        return self._content_type.startswith(b"text/event-stream")

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        for name, value in headers:  # of all the headers, only this is kept
            if name == b"content-type":
                self._content_type = value
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def write_now(self, data: bytes) -> bool:
        """Send a piece of the body without waiting. False, with nothing sent: only `write` can send it."""
        write = self.body.write_now
        if write is None:
            return False
        write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def write(self, data: bytes) -> None:
        """Send a piece of the body. Waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.ended = True
        self._before_end()
        await self._send({"type": "http.response.body", "body": data})

    def abandon(self) -> None:
        """Leave the response unfinished. The HTTP server then closes the connection, so that the client
        detects the truncation.
        """
        self.ended = True
        self._before_end()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def error(self, error: ApiError, headers: Headers) -> None:
        """Send OpenAI's error body, with Retry-After if the error has one."""
        await self.whole(error.status, [*headers, *error_headers(error)], error.body())


def not_ready(message: str) -> ApiError:
    """Return the error of a router that is starting or stopping, or has not loaded something yet."""
    return ApiError(503, message, code="not_ready", retry_after=1.0)


def error_headers(error: ApiError) -> Headers:
    """Return the headers of the response that carries an error."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after))).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (401, 403, 413) or error.code == BODIES_FULL:
        headers.append((b"connection", b"close"))  # part of the body stays unread
    return headers
