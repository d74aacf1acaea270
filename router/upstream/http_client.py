"""Small HTTP/1.1 client for many short requests to few servers: persistent connections and streamed answers,
nothing else.

A general client costs more than everything else that the router does for a request. This client sends
requests with a complete body, and reads answers by length, in chunks, or until the connection closes. It
supports no redirects, cookies, proxies or compression. Its parser also serves the router's own clients.
"""

import asyncio
import math
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from fleet.settings import FilePath
from router.upstream.outbox import Outbox

MAX_HEAD_BYTES = 64 * 1024
"""Longer heads of an answer are refused."""
BUFFERED_BYTES = 1024 * 1024
"""Unread bytes of an answer at which reading pauses."""
_IDLE_PER_ORIGIN = 1024
_MAX_ORIGINS = 4096
_BEFORE_SECONDS = 0.002
_LATE_SECONDS = 0.02
"""A loop that is later than this was held up by something else."""
_ALIVE_SECONDS, _ALIVE_AGAIN_SECONDS, _ALIVE_TRIES = 15, 5, 3
"""TCP keepalive of a silent peer. A vanished machine is noticed after half a minute."""
Take = Callable[[Any], Any]
"""Receives the body's next bytes (b"" at its end). A result other than None ends the wait for the body."""


_BREAKING = re.compile(rb"[\r\n\0]")


class ConnectionLost(Exception):
    """The connection closed, was cut, or carried something other than HTTP. The text gives the reason."""


class Origin(NamedTuple):
    """Server of a URL. `path`: the URL's path without a trailing slash."""

    host: str
    port: int
    tls: bool
    path: str
    header: bytes
    """the Host header"""

    @classmethod
    def of(cls, url: str) -> "Origin":
        """Parse a URL. ValueError if it is not an http(s) URL."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not url.isascii()
            or any(sign in url for sign in " \r\n\t")
        ):
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = parts.port or (443 if tls else 80)
        return cls(
            parts.hostname,
            port,
            tls,
            parts.path.rstrip("/"),
            (f"{name}:{parts.port}" if parts.port else name).encode(),
        )


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


class _Excuse:
    """Extends a time limit by the delay of the event loop. A peer that answered during the delay was not
    slow.

    The check runs just before the limit, so that the limit is moved before it expires.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: asyncio.Timeout) -> None:
        self._loop = loop
        self._limit = limit
        self._arm()

    def end(self) -> None:
        self._timer.cancel()

    def _arm(self) -> None:
        self._due = (self._limit.when() or 0.0) - _BEFORE_SECONDS
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        late = self._loop.time() - self._due
        if late > _LATE_SECONDS:
            self._limit.reschedule(self._loop.time() + late)
            self._arm()


class HttpClient:
    """Connections by origin. Idle ones are reused, the youngest first. `keepalive_seconds`: longer idle
    connections are closed.
    """

    def __init__(self, keepalive_seconds: float, ca: FilePath | None = None) -> None:
        """Create the client on the event loop that will use it. ca: PEM file of certificate authorities to
        trust for https:// servers, in addition to the system's. OSError if the file cannot be used.
        """
        self.loop = asyncio.get_running_loop()
        """kept for callers, since looking up the loop is a system call each time"""
        self._keepalive = keepalive_seconds
        self._new_connection = partial(Connection, Outbox())
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
        self._origins: dict[str, Origin] = {}
        self._tls: ssl.SSLContext | None = None
        if ca is not None:
            self.trust(ca)

    def trust(self, ca: FilePath) -> None:
        """Trust the authorities now in the file, in addition to the system's, for new connections. OSError if
        it cannot be used.
        """
        self._tls = _verifying(ca)

    def origin(self, url: str) -> Origin:
        """Return the origin of a URL. ValueError if it is not an http(s) URL."""
        known = self._origins.get(url)
        if known is None:
            if len(self._origins) >= _MAX_ORIGINS:
                self._origins.clear()
            known = self._origins[url] = Origin.of(url)
        return known

    async def connect(self, origin: Origin, seconds: float) -> Connection:
        """Return an idle connection, or a new one. OSError (also for certificates) or TimeoutError."""
        loop, idle = self.loop, self._idle.get(origin[:3])
        while idle:
            kept = idle.pop()
            if self._fresh(kept):
                return kept
            kept.cut("idle for too long")
        if origin.tls and self._tls is None:
            self._tls = _verifying(None)
        async with asyncio.timeout(seconds) as limit:
            excuse = _Excuse(loop, limit)
            try:
                _, connection = await loop.create_connection(
                    self._new_connection, origin.host, origin.port, ssl=self._tls if origin.tls else None
                )
            finally:
                excuse.end()
        return connection

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection whose answer is complete, or close it."""
        idle = self._idle.setdefault(origin[:3], [])
        if connection.reusable and len(idle) < _IDLE_PER_ORIGIN:
            connection.idle_since = self.loop.time()
            idle.append(connection)
        else:
            connection.cut("not kept")

    def prune(self) -> None:
        """Drop idle connections that are too old or closed, and origins without any. Call regularly."""
        for key, idle in list(self._idle.items()):
            for connection in [connection for connection in idle if not self._fresh(connection)]:
                idle.remove(connection)
                connection.cut("idle for too long")
            if not idle:
                del self._idle[key]

    @property
    def idle_connections(self) -> int:
        """Number of connections kept for reuse."""
        return sum(map(len, self._idle.values()))

    def _fresh(self, connection: Connection) -> bool:
        return connection.reusable and self.loop.time() - connection.idle_since < self._keepalive

    def close(self) -> None:
        """Close idle connections."""
        for idle in self._idle.values():
            for connection in idle:
                connection.cut("the client is closing")
        self._idle.clear()


def _verifying(ca: FilePath | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise OSError(f"upstream_ca {ca} cannot be used: {error}") from error
    return context


def request_bytes(
    method: str,
    origin: Origin,
    path: str,
    headers: Mapping[str, str] | Sequence[tuple[bytes, bytes]],
    body: bytes,
) -> bytes:
    """Encode a request for the wire. Headers that would break the framing (line ends in a value) are left
    out.
    """
    if isinstance(headers, Mapping):
        headers = [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in headers.items()
        ]
    lines = [
        f"{method} {origin.path}{path} HTTP/1.1".encode(),
        b"host: " + origin.header,
        b"content-length: %d" % len(body),
    ]
    own = len(lines)
    lines += [b"%b: %b" % header for header in headers]
    lines += b"", body
    request = b"\r\n".join(lines)
    # one pass instead of one for each header; bodies are not searched
    head = len(request) - len(body)
    if (
        request.count(b"\n", 0, head) != len(lines) - 1
        or request.count(b"\r", 0, head) != len(lines) - 1
        or request.find(b"\0", 0, head) >= 0
    ):
        safe = [line for line in lines[own:-2] if not _BREAKING.search(line)]
        return b"\r\n".join([*lines[:own], *safe, b"", body])
    return request
