"""HTTP server protocol with limits: it cuts connections whose head, body, answer or idle time exceeds them.

uvicorn's protocol on httptools bounds none of these. httptools joins the pieces of a header field as they
come (quadratic work on the event loop), and uvicorn parses all of the rest of a read and has a timer only
between two requests. In this protocol

- every read is parsed in slices, and the bytes of heads, trailers and chunk headers are counted, so the work
  per byte is bounded;
- deadlines are plain numbers that the server compares once a second, so requests create and cancel no timers;
- a connection is half-closed first, and further input is dropped for a moment: a close with unread input
  would make the kernel send a reset, which can overtake the answer that states the error.
"""

import asyncio
from math import inf
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from deploy.http import refusal
from deploy.http.connection_gate import ConnectionGate
from deploy.http.declined_upgrade import ReadOn, repeated_head
from deploy.http.exchange import HttpExchange, asgi_versions, split_url
from deploy.http.flow_control import FlowControl
from deploy.http.limits import BODY, HEAD, IDLE, REFUSED, SENT, Count, HttpLimits
from deploy.http.refusal import Refusal
from deploy.http.write_coalescing import WriteCoalescing

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


class LimitedProtocol(asyncio.Protocol):
    """One connection. `count` is called with the cause when the connection is cut: head_too_large,
    url_too_long, malformed, pipelined, slow_head, slow_body, unread_answer, shed or too_many_connections."""

    __slots__ = (
        "_app",
        "_app_state",
        "_asgi",
        "_awaits_continue",
        "_client",
        "_connections",
        "_count",
        "_draining",
        "_dropped",
        "_due",
        "_flow",
        "_gate",
        "_headers",
        "_keep_alive",
        "_limits",
        "_overhead",
        "_parser",
        "_phase",
        "_pipeline",
        "_read",
        "_running",
        "_scheme",
        "_server",
        "_server_state",
        "_silent",
        "_tasks",
        "_unparsed",
        "_upgrading",
        "_url",
        "_wire",
        "_write_due",
        "loop",
        "transport",
    )  # a dictionary of so many attributes takes 1.6 kB

    def __init__(
        self,
        limits: HttpLimits,
        count: Count,
        gate: ConnectionGate,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        if not config.loaded:
            config.load()
        self._app = config.loaded_app
        self.loop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None
        """None while a client has long awaited its answer"""
        self._new_parser(self)
        self._server_state = server_state
        self._connections = server_state.connections
        self._tasks = server_state.tasks
        self._asgi = asgi_versions(config.asgi_version)
        self._app_state = app_state
        self._pipeline: list[HttpExchange] = []
        """the next one last"""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._awaits_continue = False
        self._read: HttpExchange | None = None
        """the exchange whose request was read last"""
        self._limits = limits
        self._count = count
        self._gate = gate
        self._phase = HEAD
        self._due = self.loop.time() + limits.head_seconds
        self._write_due = inf
        self._overhead = 0
        """bytes since the last body piece or the last head"""
        self._dropped = 0
        self._unparsed = bytearray()
        self._running: HttpExchange | None = None
        """the exchange that is being answered"""
        self._keep_alive = True
        """keep-alive of the request read last, by its head"""
        self._upgrading = False
        """the request read last asks for another protocol; the parser will stop after its head"""
        self._draining = False
        self._silent = True
        """True until the first byte arrives"""

    def _new_parser(self, callbacks: object) -> httptools.HttpRequestParser:
        self._parser = parser = httptools.HttpRequestParser(callbacks)
        # as uvicorn does: data after a request that closes the connection must not prevent its answer
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        real = cast("asyncio.Transport", transport)
        self._wire = WriteCoalescing(
            real, self.loop, linger_seconds=self._limits.write_seconds, has_input=self._has_input
        )
        self.transport = self._wire
        self._flow = FlowControl(self._wire)
        self._server, self._client = get_local_addr(self._wire), get_remote_addr(self._wire)
        self._scheme = "https" if is_ssl(self._wire) else "http"
        self._connections.add(self)  # type: ignore[arg-type]
        if self._gate.closed:
            self._wire.abort()
        elif len(self._connections) > self._gate.limit:
            self._make_room_or_refuse(len(self._connections) - self._gate.limit)

    def _make_room_or_refuse(self, excess: int) -> None:
        """Shed a connection to make room for this one, or refuse this one."""
        if self._gate.make_room(self._connections, self, self.loop.time()):  # type: ignore[arg-type]
            return
        if excess > self._gate.limit // 4:  # refused connections stay open for a moment
            self._count("too_many_connections")
            self._wire.abort()
        else:
            self._refuse(refusal.too_many_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        for exchange in (self._running, self._read):
            if exchange is not None and not exchange.response_complete:
                exchange.disconnect()
        self._flow.resume_writing()
        if exc is None:
            self._wire.close()
        self._due = self._write_due = inf
        self._unparsed.clear()
        # no ring of references is left: a connection that was open for long would wait for a full collection
        self._wire.let_go()
        self._parser = None

    def _has_input(self) -> bool:
        return self._phase is BODY or self._phase is REFUSED

    def _leave_running(self) -> None:
        """Drop the running exchange: its client has gone, or counts as gone."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnect()

    def shutdown(self) -> None:
        """Close after the running request: the server stops. A request that is being received is still
        answered."""
        self._draining = True
        if self._running is not None and not self._running.response_complete:
            self._running.keep_alive = False
        elif self._phase is IDLE:
            self.transport.close()

    def shed_order(self) -> tuple[int, float] | None:
        """Return the place in the order of shedding (see `Sheddable`): connections without any byte, then
        those between two requests, then unfinished heads."""
        if self.transport.is_closing():
            return None
        if self._phase is HEAD:
            return 0 if self._silent else 2, self._due
        return (1, self._due) if self._phase is IDLE else None

    def shed(self) -> None:
        """Close now: another connection needs the place."""
        self._count("shed")
        self._wire.abort()
        self._connections.discard(self)

    # Input

    def data_received(self, data: bytes) -> None:
        if self._phase is REFUSED:
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
            self._wire.let_read(paused=self._flow.read_paused)

    def _parse_first(self, size: int) -> None:
        piece = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        if piece and not self.transport.is_closing():
            self._parse(piece)

    def _has_plain_body(self) -> bool:
        return (
            self._phase is BODY
            and self._read is not None
            and all(name != b"transfer-encoding" for name, _ in self._read.scope["headers"])
        )

    def _parse(self, data: bytes) -> None:
        before = self._phase
        self._overhead += len(data)
        try:
            (self._parser or self._new_parser(self)).feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._read is not None:
                self._read_on(self._read, data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            refused = error.__context__
            if not isinstance(refused, Refusal):
                refused = refusal.malformed()
            self._refuse(refused)
            return
        if self._overhead > self._limits.head_bytes:
            too_large = refusal.head_too_large if self._phase is HEAD else refusal.chunk_head_too_large
            self._refuse(too_large(self._limits))
        elif self._phase is not before:
            self._due = self._deadline()

    def _read_on(self, exchange: HttpExchange, rest: bytes) -> None:
        """Continue after a head with an upgrade request, where the parser stopped."""
        self._upgrading = False
        self._due = self._deadline()
        self._new_parser(ReadOn(self))
        self._parse(repeated_head(exchange.scope["headers"]) + rest)

    def _deadline(self) -> float:
        return inf if self._phase is SENT else self.loop.time() + self._limits.seconds(self._phase)

    # Parser callbacks

    def on_message_begin(self) -> None:
        self._phase = HEAD
        self._url, self._headers, self._awaits_continue = b"", [], False

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.url_bytes:
            raise refusal.url_too_long(self._limits)

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._awaits_continue = True
        self._headers.append((name, value))
        if len(self._headers) > self._limits.head_fields:
            raise refusal.too_many_fields(self._limits)

    def on_headers_complete(self) -> None:
        if self._overhead > self._limits.head_bytes and self._head_bytes() > self._limits.head_bytes:
            raise refusal.head_too_large(self._limits)
        if len(self._pipeline) >= MAX_PIPELINED:
            raise refusal.pipelined(MAX_PIPELINED)
        self._overhead = 0
        self._phase = BODY
        exchange = self._read = self._exchange()
        running = self._running
        if running is None or running.response_complete:
            self._start(exchange)
        else:
            self._flow.pause_reading()
            self._pipeline.insert(0, exchange)
        self._headers = []  # trailers are read and dropped

    def _exchange(self) -> HttpExchange:
        """Return the exchange of the head that has just been read."""
        parser = self._parser
        assert parser is not None, "it has just called"
        version = parser.get_http_version()
        path, raw_path, query = split_url(self._url)
        scope = {
            "type": "http",
            "asgi": self._asgi,
            "root_path": "",
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self._headers,
            "state": self._app_state.copy(),
        }
        self._upgrading = parser.should_upgrade()
        self._keep_alive = version != "1.0" and parser.should_keep_alive()
        # keep_alive: if the answer ends before the body arrives, the rest is not read
        return HttpExchange(
            scope,
            self._wire,
            self._flow,
            self.on_response_complete,
            keep_alive=False,
            awaits_continue=self._awaits_continue,
        )

    def _head_bytes(self) -> int:
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        exchange = self._read
        if exchange is not None and not exchange.response_complete:
            exchange.body.append(body)
            exchange.body_bytes += len(body)
            if exchange.body_bytes > READ_AHEAD_BYTES:
                self._flow.pause_reading()
            exchange.notify()

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._overhead = 0
        self._phase = SENT
        exchange = self._read
        if exchange is None:
            return
        if not exchange.response_started:
            exchange.keep_alive = self._keep_alive and not self._draining
        if not exchange.response_complete:
            exchange.more_body = False
            exchange.notify()

    # Answers

    def _start(self, exchange: HttpExchange) -> None:
        self._running = exchange
        task = self.loop.create_task(exchange.run(self._app))
        task.add_done_callback(self._tasks.discard)
        self._tasks.add(task)

    def on_response_complete(self) -> None:
        """End the exchange as uvicorn does, without its timer: this protocol has deadlines instead."""
        self._server_state.total_requests += 1
        if self._phase is BODY and self._running is self._read:
            self._phase, self._due = REFUSED, inf  # drop the rest of the body: the connection is closing
            self._unparsed.clear()
        if self.transport.is_closing():
            return
        self._flow.resume_reading()
        if self._pipeline:
            self._start(self._pipeline.pop())
        elif self._phase is SENT:
            self._phase = IDLE
            self._due = self._deadline()

    def pause_writing(self) -> None:
        self._write_due = self.loop.time() + self._limits.write_seconds
        self._flow.pause_writing()
        if self._running is not None:
            self._running.write_now = None

    def resume_writing(self) -> None:
        self._write_due = inf
        self._flow.resume_writing()

    # End of a connection

    def enforce(self, now: float) -> None:
        """Cut the connection if a deadline has passed. Free the parser of one whose answer takes long."""
        if self._phase is SENT and self._keep_alive:
            # it is between two requests, where a new one begins; after the last request it ignores the rest
            self._parser = None
        if self._write_due <= now:
            self._write_due = inf
            self._count("unread_answer")
            self._wire.abort()
        elif self._due <= now:
            self._due = inf
            if self._phase is BODY:
                self._refuse(refusal.slow_body(self._limits))
            elif self._phase is HEAD and not self._silent:
                self._refuse(refusal.slow_head(self._limits))
            else:
                self.transport.close()

    def _refuse(self, refused: Refusal) -> None:
        """Send the error and close. An answer that is being sent is finished first, and replaces the
        error."""
        self._count(refused.cause)
        own_body = self._phase is BODY
        self._phase, self._due = REFUSED, inf
        self._unparsed.clear()
        running = self._running
        if running is not None and not running.response_complete:
            if not own_body or running is not self._read:
                running.keep_alive = False
                self._pipeline.clear()
                return
            self._leave_running()
            if running.response_started:
                self._wire.close_gently()
                return
        self.transport.write(refused.response())
        self._wire.close_gently()
