"""HTTP server protocol with limits: it cuts connections whose head, body, answer or idle time exceeds them.

uvicorn's protocol on httptools bounds none of these. It joins the pieces of a header field as they come
(quadratic work on the event loop), parses all of the rest of a read, and has a timer only between two
requests. In this protocol

- every read is parsed in slices, and the bytes of heads, trailers and chunk headers are counted, so the work
  per byte is bounded;
- deadlines are plain numbers that `sweep` compares once a second, so requests create and cancel no timers;
- a connection is half-closed first, and further input is dropped for a moment: a close with unread input
  would make the kernel send a reset, which can overtake the answer that states the error.
"""

import asyncio
from collections.abc import Iterable
from enum import Enum
from math import inf
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from deploy.http.connection_gate import ConnectionGate
from deploy.http.limits import Count, HttpLimits
from deploy.http.write_coalescing import WriteCoalescing
from fleet.completions import ApiError

SLICE_BYTES = 16 * 1024
"""Bytes parsed in one turn of the event loop. Bodies of a stated length are exempt, since they cost almost
nothing; tiny chunks and heads cost a microsecond for every few bytes."""
MAX_PIPELINED = 16
"""Pipelined requests that may wait behind the running one of a connection."""
MAX_DROPPED_BYTES = 16 * 1024 * 1024
"""Input dropped on a closing connection, so that a client that just finishes its upload can read the error.
"""
READ_AHEAD_BYTES = 64 * 1024
"""Body bytes read before the application asks for them; then reading pauses."""


class Phase(Enum):
    """Phase of an exchange, as seen from the client."""

    HEAD = "head"
    BODY = "body"
    SENT = "sent"
    """the request is complete; its answer is not"""
    IDLE = "idle"
    REFUSED = "refused"
    """input is no longer read"""


# plain names, since enum member look-ups are slow and these run for every request
_HEAD, _BODY, _SENT, _IDLE, _REFUSED = Phase


class _Refused(Exception):
    """Raised by the parser's callbacks: the request exceeds a limit."""

    def __init__(self, status: int, cause: str, text: str) -> None:
        super().__init__(text)
        self.status, self.cause, self.text = status, cause, text


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `count` is called with the cause when the connection is cut: head_too_large,
    url_too_long, malformed, pipelined, slow_head, slow_body, unread_answer, shed or too_many_connections."""

    def __init__(
        self,
        limits: HttpLimits,
        count: Count,
        gate: ConnectionGate,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._count = count
        self._gate = gate
        self._phase = _HEAD
        self._due = self.loop.time() + limits.head_seconds
        self._write_due = inf
        self._overhead = 0
        """bytes since the last body piece or the last head"""
        self._dropped = 0
        self._unparsed = bytearray()
        self._running: RequestResponseCycle | None = None
        """the exchange that is being answered; `self.cycle`, of uvicorn's base class, is the one read last"""
        self._keep_alive = True
        """keep-alive of the request read last, by its head"""
        self._upgrading = False
        """the request read last asks for another protocol; the parser will stop after its head"""
        self._draining = False
        self._silent = True
        """True until the first byte arrives"""

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        real = cast("asyncio.Transport", transport)
        self._wire = WriteCoalescing(
            real, self.loop, linger_seconds=self._limits.write_seconds, has_input=self._has_input
        )
        super().connection_made(self._wire)
        if self._gate.closed:
            self._wire.abort()
        elif len(self.connections) > self._gate.limit:
            self._make_room_or_refuse(len(self.connections) - self._gate.limit)

    def _make_room_or_refuse(self, excess: int) -> None:
        """Shed a connection to make room for this one, or refuse this one."""
        if self._gate.make_room(self.connections, self, self.loop.time()):  # type: ignore[arg-type]
            return
        if excess > self._gate.limit // 4:  # refused connections stay open for a moment
            self._count("too_many_connections")
            self._wire.abort()
        else:
            self._refuse(
                _Refused(503, "too_many_connections", "too many connections are open; try again later")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave_running()
        self._due = self._write_due = inf
        self._unparsed.clear()

    def _has_input(self) -> bool:
        return self._phase is _BODY or self._phase is _REFUSED

    def _leave_running(self) -> None:
        """Drop the running exchange: its client has gone, or counts as gone."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def shutdown(self) -> None:
        """Close after the running request: the server stops. A request that is being received is still
        answered."""
        self._draining = True
        if self._running is not None and not self._running.response_complete:
            self._running.keep_alive = False
        elif self._phase is _IDLE:
            self.transport.close()

    def shed_order(self) -> tuple[int, float] | None:
        """Return the place in the order of shedding (see `Sheddable`): connections without any byte, then
        those between two requests, then unfinished heads."""
        if self.transport.is_closing():
            return None
        if self._phase is _HEAD:
            return 0 if self._silent else 2, self._due
        return (1, self._due) if self._phase is _IDLE else None

    def shed(self) -> None:
        """Close now: another connection needs the place."""
        self._count("shed")
        self._wire.abort()
        self.connections.discard(self)

    # Input

    def data_received(self, data: bytes) -> None:
        if self._phase is _REFUSED:
            self._dropped += len(data)
            if self._dropped > MAX_DROPPED_BYTES:
                self._wire.abort()
            return
        self._silent = False
        if self._unparsed:
            self._unparsed += data
        elif len(data) <= SLICE_BYTES:
            self._parse(data)
        else:
            self._unparsed += data
            self._parse_slice()

    def _parse_slice(self) -> None:
        """Parse one slice; the rest follows in the next turn of the loop. Reading pauses meanwhile."""
        self._parse_first(SLICE_BYTES)
        if self._unparsed and self._has_plain_body():
            self._parse_first(len(self._unparsed))
        if self._unparsed:
            self._wire.hold_reading()
            self.loop.call_soon(self._parse_slice)
        else:
            self._wire.let_read(paused=self.flow.read_paused)

    def _parse_first(self, size: int) -> None:
        piece = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        if piece and not self.transport.is_closing():
            self._parse(piece)

    def _has_plain_body(self) -> bool:
        return self._phase is _BODY and all(name != b"transfer-encoding" for name, _ in self.scope["headers"])

    def _parse(self, data: bytes) -> None:
        before = self._phase
        self._overhead += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_on(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            refused = error.__context__
            if not isinstance(refused, _Refused):
                refused = _Refused(400, "malformed", "this is no HTTP/1.1 request that can be read")
            self._refuse(refused)
            return
        if self._overhead > self._limits.head_bytes:
            self._refuse(
                self._head_too_large()
                if self._phase is _HEAD
                else _Refused(400, "malformed", "too much between two chunks of the body")
            )
        elif self._phase is not before:
            self._due = self._deadline()

    def _read_on(self, rest: bytes) -> None:
        """Continue with HTTP/1.1 after a head with an upgrade request, where the parser stops. The body is
        still to come.

        Java's HttpClient and `curl --http2` send such requests by default. A new parser gets a head with the
        same framing and without the upgrade.
        """
        framing = [
            b"%s: %s\r\n" % field
            for field in self.scope["headers"]
            if field[0] in (b"content-length", b"transfer-encoding")
        ]
        self._upgrading = False
        self._due = self._deadline()
        self.parser = httptools.HttpRequestParser(_ReadOn(self))
        self._parse(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n" + rest)

    def _deadline(self) -> float:
        if self._phase is _SENT or self._phase is _REFUSED:
            return inf
        limits = self._limits
        seconds = (
            limits.head_seconds
            if self._phase is _HEAD
            else limits.body_seconds
            if self._phase is _BODY
            else limits.idle_seconds
        )
        return self.loop.time() + seconds

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._phase = _HEAD
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.url_bytes:
            raise _Refused(414, "url_too_long", f"the URL is longer than {self._limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))
        if len(self.headers) > self._limits.head_fields:
            raise _Refused(431, "head_too_large", f"the head has more than {self._limits.head_fields} fields")

    def on_headers_complete(self) -> None:
        if self._overhead > self._limits.head_bytes and self._head_bytes() > self._limits.head_bytes:
            raise self._head_too_large()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused(
                429,
                "pipelined",
                f"more than {MAX_PIPELINED} requests wait on this connection; wait for answers",
            )
        self._overhead = 0
        self._phase = _BODY
        super().on_headers_complete()
        self._upgrading = self.parser.should_upgrade()
        self._keep_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False  # if the answer ends before the body arrives, the rest is not read
        self.headers = []  # trailers are read and dropped

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _head_too_large(self) -> _Refused:
        return _Refused(431, "head_too_large", f"the head is longer than {self._limits.head_bytes} bytes")

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > READ_AHEAD_BYTES:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._overhead = 0
        self._phase = _SENT
        cycle = self.cycle
        if not cycle.response_started:
            cycle.keep_alive = self._keep_alive and not self._draining
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """End the exchange as uvicorn does, without its timer: this protocol has deadlines instead."""
        self.server_state.total_requests += 1
        if self._phase is _BODY and self._running is self.cycle:
            self._phase, self._due = _REFUSED, inf  # drop the rest of the body: the connection is closing
            self._unparsed.clear()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._phase is _SENT:
            self._phase = _IDLE
            self._due = self._deadline()

    def pause_writing(self) -> None:
        self._write_due = self.loop.time() + self._limits.write_seconds
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_due = inf
        super().resume_writing()

    # End of a connection

    def enforce(self, now: float) -> None:
        """Cut the connection if a deadline has passed."""
        if self._write_due <= now:
            self._write_due = inf
            self._count("unread_answer")
            self._wire.abort()
        elif self._due <= now:
            self._due = inf
            if self._phase is _BODY:
                self._refuse(
                    _Refused(408, "slow_body", f"the body was not here after {self._limits.body_seconds:g} s")
                )
            elif self._phase is _HEAD and not self._silent:
                self._refuse(
                    _Refused(408, "slow_head", f"the head was not here after {self._limits.head_seconds:g} s")
                )
            else:
                self.transport.close()

    def _refuse(self, refused: _Refused) -> None:
        """Send the error and close. An answer that is being sent is finished first, and replaces the
        error."""
        self._count(refused.cause)
        own_body = self._phase is _BODY
        self._phase, self._due = _REFUSED, inf
        self._unparsed.clear()
        running = self._running
        if running is not None and not running.response_complete:
            if not own_body or running is not self.cycle:
                running.keep_alive = False
                self.pipeline.clear()
                return
            self._leave_running()
            if running.response_started:
                self._wire.close_gently()
                return
        body = ApiError(refused.status, refused.text, code=refused.cause).body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[refused.status] + head + body)
        self._wire.close_gently()


class _ReadOn:
    """Callbacks for the parser after a declined upgrade: ignores the repeated head and forwards the rest to
    the protocol."""

    def __init__(self, protocol: LimitedProtocol) -> None:
        self._protocol = protocol
        self._known = True
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self._known:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._known:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._known:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._known:
            self._known = False
        else:
            self._protocol.on_headers_complete()


def sweep(connections: Iterable[Any], now: float) -> None:
    """Cut the connections whose deadline has passed."""
    for connection in list(connections):
        connection.enforce(now)
