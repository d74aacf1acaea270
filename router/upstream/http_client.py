"""Small HTTP/1.1 client for many short requests to few servers: persistent connections and streamed answers,
nothing else.

A general client costs more than everything else that the router does for a request. This client sends
requests with a complete body, and reads answers by length, in chunks, or until the connection closes. It
supports no redirects, cookies, proxies or compression. Its parser also serves the router's own clients.
"""

import asyncio
import re
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from fleet.settings import FilePath
from router.upstream.outbox import Outbox
from router.upstream.server_connection import Connection

_IDLE_PER_ORIGIN = 1024
_MAX_ORIGINS = 4096
_BEFORE_SECONDS = 0.002
_LATE_SECONDS = 0.02
"""A loop that is later than this was held up by something else."""


_BREAKING = re.compile(rb"[\r\n\0]")


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
