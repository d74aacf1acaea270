"""One request and its response on a connection, as an ASGI application sees them.

It does what uvicorn's cycle does, at a third of the cost: events are made only for those who wait, and the
head of a response is checked in one pass.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools

from deploy.http.flow_control import FlowControl
from deploy.http.write_coalescing import WriteCoalescing

Message = Any
Application = Callable[
    [dict[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any
]

BODY, ON_DISCONNECT = "roost.body", "roost.on_disconnect"
"""ASGI extensions: `HttpExchange`, for its `write_now`, and its method `on_disconnect`."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Token of RFC 9110, 5.6.2."""
_CONTROLS = bytes([*range(9), *range(10, 32), 127])
"""Bytes that no header field may contain: control characters except the tab."""
_LENGTH, _CODING, _CONNECTION = b"content-length: ", b"transfer-encoding: ", b"connection: "
_FRAMING = frozenset({_LENGTH, _CODING, _CONNECTION})
_BODILESS = frozenset({204, 304})
_FAILED = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"21"),
    (b"connection", b"close"),
)
_FAILED_TEXT = b"Internal Server Error"
log = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def status_line(status: int) -> bytes:
    """Return the first line of a response, without its end."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}".encode()


@lru_cache(maxsize=1024)
def _field_start(name: bytes) -> bytes:
    """Return a header's name as it is written. RuntimeError if it is none."""
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"{name!r} is no name of a header")
    return name.lower() + b": "


@lru_cache(maxsize=256)
def _split(url: bytes) -> tuple[str, bytes, bytes]:
    """Return path, raw path and query string of a request's URL."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


@lru_cache(maxsize=4)
def asgi_versions(asgi: str) -> dict[str, str]:
    """Return the versions of ASGI that a scope states. One object for all connections."""
    return {"version": asgi, "spec_version": "2.3"}


def split_url(url: bytes) -> tuple[str, bytes, bytes]:
    """Return path, raw path and query string of a request's URL; those of short ones are remembered.
    HttpParserError if there is no path.
    """
    return _split(url) if len(url) <= 64 else _split.__wrapped__(url)


class HttpExchange:
    """State of one exchange. The connection's protocol feeds the request and calls `notify`; the application
    calls `receive` and `send`.
    """

    __slots__ = (
        "_awaits_continue",
        "_chunked",
        "_event",
        "_flow",
        "_left",
        "_news",
        "_on_disconnect",
        "_on_response",
        "_transport",
        "body",
        "body_bytes",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "write_now",
    )

    def __init__(
        self,
        scope: dict[str, Any],
        transport: WriteCoalescing,
        flow: FlowControl,
        on_response: Callable[[], None],
        *,
        keep_alive: bool,
        awaits_continue: bool,
    ) -> None:
        """on_response: called once the response is complete. awaits_continue: the client sends the body only
        after 100 Continue.
        """
        self.scope = scope
        scope["extensions"] = {BODY: self, ON_DISCONNECT: self.on_disconnect}
        self._transport = transport
        self._flow = flow
        self._on_response = on_response
        self._on_disconnect: Callable[[], object] | None = None
        self.keep_alive = keep_alive
        self._awaits_continue = awaits_continue
        self.disconnected = False
        self.body: list[bytes] = []
        """pieces that the application has not read"""
        self.body_bytes = 0
        self.more_body = True
        self.response_started = self.response_complete = False
        self._chunked: bool | None = None
        """None: the head says nothing about the body's length"""
        self.write_now: Callable[[bytes], object] | None = None
        """Sends a chunk of a chunked body, its size and line ends included, without waiting. None: only
        `send` can, since the body has not begun or is over, or the client reads too slowly or has gone.
        """
        self._left = 0
        """bytes that the stated length still requires"""
        self._news = False
        self._event: asyncio.Event | None = None
        """exists once a receiver has waited"""

    def notify(self) -> None:
        """Wake `receive`: there is a piece of the body, or an end."""
        self._news = True
        if self._event is not None:
            self._event.set()

    def disconnect(self) -> None:
        """Record that the client has gone before the response was complete."""
        self.disconnected, self.write_now = True, None
        self.notify()
        if self._on_disconnect is not None:
            gone, self._on_disconnect = self._on_disconnect, None
            gone()

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` when the client disconnects before the response is complete, now if it has; None:
        do not. It is for applications that have read the request, and costs no task that waits in `receive`.
        """
        self._on_disconnect = callback
        if callback is None:
            return
        if self.disconnected:
            self.disconnect()
        else:
            self._flow.resume_reading()  # otherwise the end of the connection is not noticed

    async def run(self, app: Application) -> None:
        """Run the application. One that fails, or ends too early, gets status 500 if nothing was sent, else
        its connection is closed.
        """
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            # at the end of a stop: that is no error of the application
            await self._fail()
        except BaseException as error:
            log.exception("exception in the ASGI application", exc_info=error)
            await self._fail()
        else:
            if not self.response_complete and not self.disconnected:
                log.error("the ASGI application returned without completing its response")
                await self._fail()
        finally:
            self._on_response, self._on_disconnect, self.write_now = _nothing, None, None
            self.scope["extensions"] = {}  # no ring of references is left

    async def _fail(self) -> None:
        if self.response_started:
            self._transport.close()
            return
        await self.send({"type": "http.response.start", "status": 500, "headers": _FAILED})
        await self.send({"type": "http.response.body", "body": _FAILED_TEXT})

    async def receive(self) -> Message:
        """Return the next piece of the body, or the disconnect."""
        if self._awaits_continue and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._awaits_continue = False
        if not self.disconnected and not self.response_complete:
            self._flow.resume_reading()
            if not self._news:
                if self._event is None:
                    self._event = asyncio.Event()
                self._event.clear()
                await self._event.wait()
            self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        parts = self.body
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self.body, self.body_bytes = [], 0
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send a part of the response; wait first while the client reads too slowly. RuntimeError for a
        message out of turn, an invalid header, or a body of another length than stated.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._send_head(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"the ASGI message {kind!r} is out of turn")

    def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        self._awaits_continue = False
        lines = [status_line(status)]
        says_close = False
        for name, value in headers:
            start = _field_start(name)
            if start in _FRAMING:
                says_close |= self._note_framing(start, value)
            lines.append(start + value)
        if says_close:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        if self._chunked is None and self.scope["method"] != "HEAD" and status not in _BODILESS:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked")
        lines.append(b"\r\n")
        head = b"\r\n".join(lines)
        if len(head) - len(head.translate(None, _CONTROLS)) != 2 * len(lines):
            raise RuntimeError("a header's value contains a control character")
        self._transport.write(head)

    def _note_framing(self, start: bytes, value: bytes) -> bool:
        """Read a header that says where the response or the connection ends. Return True if the connection
        ends with the response.
        """
        if start == _CONNECTION:
            return b"close" in [option.strip().lower() for option in value.split(b",")]
        if start == _CODING:
            if value.lower() == b"chunked":
                self._left, self._chunked = 0, True
        elif self._chunked is None:
            self._left, self._chunked = int(value), False
        return False

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._left = 0
        elif self._chunked and more:
            self._send_piece(body)
        elif self._chunked:
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n")
        else:
            self._left -= len(body)
            if self._left < 0:
                raise RuntimeError("the response is longer than its content-length")
            self._transport.write(body)
        if more:
            return
        if self._left:
            raise RuntimeError("the response is shorter than its content-length")
        self.response_complete, self.write_now = True, None
        self.notify()
        if not self.keep_alive:
            self._transport.close()
        self._on_response()

    def _send_piece(self, piece: bytes) -> None:
        """Send a chunk of a body that is not over, and let more be sent without waiting. It leaves at the end
        of this turn of the event loop, with the end of a short body.
        """
        if piece:
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.write_now = None if self._flow.write_paused else self._write_first

    def _write_first(self, chunk: bytes) -> None:
        """Send a chunk at once, after what was to leave at the end of the turn. Later ones go directly."""
        self._transport.write_through(chunk)
        if self.write_now is not None:  # the client reads on
            self.write_now = self._transport.direct


def _nothing() -> None:
    """Placeholder of a callback that is no longer due."""
