"""One HTTP/1.1 connection to a server: requests with complete bodies, and their answers as they arrive."""

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from router.upstream.outbox import Outbox

MAX_HEAD_BYTES = 64 * 1024
"""Longer heads of an answer are refused."""
BUFFERED_BYTES = 1024 * 1024
"""Unread bytes of an answer at which reading pauses."""
_ALIVE_SECONDS, _ALIVE_AGAIN_SECONDS, _ALIVE_TRIES = 15, 5, 3
"""TCP keepalive of a silent peer. A vanished machine is noticed after half a minute."""
Take = Callable[[Any], Any]
"""Receives the body's next bytes (b"" at its end). A result other than None ends the wait for the body."""


class ConnectionLost(Exception):
    """The connection closed, was cut, or carried something other than HTTP. The text gives the reason."""


class Heard(Protocol):
    """Time of the last arrival, on the loop's clock."""

    heard_at: float


class ChunkRelay(Heard, Protocol):
    """Passes chunks of a body on, without the task that waits for them."""

    def take(self, data: bytes, now: float) -> bool:
        """Pass on bytes that begin where a chunk does. True: they were whole chunks, not the last one, and
        are passed on; false: nothing is done.
        """
        ...


class Connection(asyncio.Protocol):
    """One connection, one request at a time: `send`, `head`, then `read` until it returns nothing."""

    __slots__ = (
        "_alarm",
        "_alarm_at",
        "_between",
        "_between_chunks",
        "_buffered",
        "_deadline",
        "_head_bytes",
        "_keep",
        "_loop",
        "_outbox",
        "_overrun",
        "_parser",
        "_parts",
        "_paused",
        "_receiver",
        "_silent_at",
        "_taker",
        "_transport",
        "_until_closed",
        "_waiter",
        "complete",
        "fell_silent",
        "headers",
        "heard",
        "idle_since",
        "lost",
        "raw_headers",
        "read_any",
        "relay",
        "status",
    )

    def __init__(self, outbox: Outbox) -> None:
        """outbox: sends its requests."""
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser | None = None
        self._parts: list[bytes] = []
        self._buffered = 0
        self._head_bytes = 0
        self._paused = False
        self.lost: str | None = None
        """reason why the connection is closed; None: it is open"""
        self._waiter: asyncio.Future[Any] | None = None
        self._taker: Take | None = None
        """receives arriving bytes without waking the waiting task"""
        self._receiver: Take | None = None
        """the same for what arrives on another connection"""
        self.heard: Heard | None = None
        """knows of arrivals that do not pass through here"""
        self.relay: ChunkRelay | None = None
        """gets what arrives first, while a task waits in `more`"""
        self._between_chunks = False
        """the parser is where a chunk of the body begins; whole chunks leave it there"""
        self._between = self._deadline = math.inf
        self._silent_at = math.inf
        """time at which the server will have been silent for too long; inf while nothing waits for it"""
        self._alarm: asyncio.TimerHandle | None = None
        """fires at or before `_silent_at`; kept from request to request, since most waits are short"""
        self._alarm_at = math.inf
        self.fell_silent = False
        """True if the connection was cut because the server was silent for too long"""
        self._until_closed = False
        self._keep = False
        self._overrun = False
        self.status = 0
        """0 until the head of the answer has arrived"""
        self.headers: dict[bytes, bytes] = {}
        """names in lower case"""
        self.raw_headers: list[tuple[bytes, bytes]] = []
        """all headers, unchanged"""
        self.complete = False
        self.read_any = False
        """True once bytes of the body were read"""
        self.idle_since = 0.0

    # Called by users

    def send(self, request: bytes) -> None:
        """Send a complete request, at the end of this turn of the loop. Reset the state of an earlier
        answer.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._parts.clear()
        self._buffered = self._head_bytes = self.status = 0
        self.headers, self.raw_headers, self.read_any, self.heard = {}, [], False, None
        self.complete = self._until_closed = self._keep = self._overrun = self._between_chunks = False
        self._outbox.add(self._transport, request)

    async def head(self) -> None:
        """Wait for `status` and `headers`. ConnectionLost when they do not come."""
        while not self.status:
            await self.more()

    async def read(self) -> bytes:
        """Return the body bytes that have arrived since the last call; b"" at the end. ConnectionLost if the
        body breaks off, after everything that arrived before was returned.
        """
        while (data := self.take()) is None:
            await self.more()
        return data

    def take(self) -> bytes | None:
        """Return the same as `read` without waiting; None if nothing has arrived."""
        if not self._parts:
            return b"" if self.complete else None
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._buffered = 0
        self.read_any = True
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def more(
        self,
        seconds: float = math.inf,
        take: Take | None = None,
        receive: Take | None = None,
        *,
        between: float = math.inf,
        deadline: float = math.inf,
    ) -> Any:
        """Wait for a change, and cut the connection after `seconds` without one. ConnectionLost if no change
        is possible.

        take: receives bytes of the body as they arrive, in the event loop's callback, so that a token costs
        no switch to this task. The wait continues until it returns something other than None, which is the
        result, or raises; the time limit is then `between`, at most until `deadline` of the loop's clock.
        receive: the same for what `give` brings.
        """
        if self.lost is not None and not self.complete:
            raise ConnectionLost(self.lost)
        # No timer per wait: the alarm of an earlier, shorter wait is left to fire and then finds nothing due.
        waiter = self._waiter = self._loop.create_future()
        self._taker, self._receiver, self._between, self._deadline = take, receive, between, deadline
        self._silent_at = self._loop.time() + seconds
        if self._silent_at < self._alarm_at:
            self._set_alarm()
        try:
            return await waiter
        finally:
            self._taker = self._receiver = self.relay = None
            self._silent_at = math.inf

    def forget_head(self) -> None:
        """Free the headers of the answer, once they are of no use."""
        self.headers, self.raw_headers = {}, []

    def cut(self, why: str) -> None:
        """Close at once. A waiting task gets the reason. The server sees the connection close."""
        self.lost = self.lost or why
        self._quiet_alarm()
        self._transport.abort()
        self._wake()

    @property
    def reusable(self) -> bool:
        """True if the answer is complete and the server keeps the connection open."""
        return (
            self.complete
            and self._keep
            and not self._overrun
            and self.lost is None
            and not self._transport.is_closing()
        )

    def _wake(self) -> None:
        self._silent_at = math.inf
        self.relay = None  # what arrives from now on comes after what the task finds
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def give(self, item: Any) -> bool:
        """Give the waiting task's `receive` something that arrived on another connection. False: no task
        waits for it.
        """
        waiter, receive = self._waiter, self._receiver
        if receive is None or waiter is None or waiter.done():
            return False
        self.read_any = True
        self._pass_on(receive, waiter, item)
        return True

    def wake(self) -> None:
        """Wake the waiting task: something has changed that concerns it."""
        self._wake()

    def _pass_on(self, take: Take, waiter: asyncio.Future[Any], item: Any) -> None:
        """Give what has arrived to a function of the waiting task."""
        try:
            result = take(item)
        except Exception as error:  # noqa: BLE001 (raised in the waiting task)
            waiter.set_exception(error)
            return
        if result is not None or self.complete:
            self._silent_at, self.relay = math.inf, None
            if not waiter.done():
                waiter.set_result(result)
            return
        self._silent_at = min(self._loop.time() + self._between, self._deadline)
        if self._silent_at < self._alarm_at:
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = self._silent_at
        self._alarm = self._loop.call_at(self._alarm_at, self._look)

    def _quiet_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._alarm_at = None, math.inf

    def _look(self) -> None:
        """Handle the alarm: give the server up, or set the alarm again if a task still waits."""
        self._alarm, self._alarm_at = None, math.inf
        if self.heard is not None:
            self._silent_at = max(self._silent_at, min(self.heard.heard_at + self._between, self._deadline))
        if self._loop.time() >= self._silent_at:
            self.fell_silent = True
            self.cut("silent for too long")
        elif self._silent_at < math.inf:
            self._set_alarm()

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's class is not derived from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ALIVE_SECONDS)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ALIVE_AGAIN_SECONDS)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ALIVE_TRIES)

    def data_received(self, data: bytes) -> None:
        relay = self.relay
        if relay is not None and self._between_chunks and relay.take(data, self._loop.time()):
            return
        if self._parser is None or self.complete:
            self.cut("the server sent data that was not requested")
            return
        # Counted until the status is known, since a server could send a head without an end.
        self._head_bytes += 0 if self.status else len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.cut(f"the answer is not HTTP: {error}")
            return
        if self._between_chunks and not data.endswith(b"\r\n"):
            self._between_chunks = False  # the next chunk's size has begun
        if not self.status and self._head_bytes > MAX_HEAD_BYTES:
            self.cut(f"the head of the answer exceeds {MAX_HEAD_BYTES} bytes")
            return
        waiter = self._waiter
        if self._taker is not None and self._parts and waiter is not None and not waiter.done():
            self._pass_on(self._taker, waiter, self.take())
            return
        if self._buffered > BUFFERED_BYTES and not self._paused and not self.complete:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self.status and self._until_closed and error is None and self.lost is None:
            self.complete = True
        self.lost = self.lost or (str(error) if error else "the server closed the connection")
        self._parser = None  # no ring of references is left
        self._quiet_alarm()
        self._wake()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._overrun = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value
        self.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and not self.complete:
            self.status = status
            self._until_closed = (
                b"content-length" not in self.headers and b"transfer-encoding" not in self.headers
            )
            self._keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._parts.append(body)
            self._buffered += len(body)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True
        else:
            self.headers, self.raw_headers = {}, []  # an interim answer (1xx); the real one follows
