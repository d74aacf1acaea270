"""Closed-loop HTTP client on bare sockets: each connection sends its next request once the last answer is
complete.

Keep-alive, TCP_NODELAY. TCP_QUICKACK is re-armed after every read, so that a server with Nagle's algorithm is
not punished for it (state this beside any number: `SETTINGS`). Answers are measured, checked for their status
and their last bytes, not parsed.
"""

import asyncio
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

SETTINGS = "keep-alive, TCP_NODELAY, TCP_QUICKACK re-armed after every read, one closed loop per connection"
_END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds from sending a request to its first body byte and to its end; bytes of the whole answer, head
    included."""

    first: float
    whole: float
    size: int


class BadAnswer(Exception):
    """The server's answer is not 200; the text carries the answer."""


def request_bytes(path: str, body: bytes, port: int) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\ncontent-length:"
        f" {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Caller(asyncio.Protocol):
    """One connection. `ended` is done when there is no further request, or with the error."""

    def __init__(self, requests: Iterator[bytes], samples: list[Sample], until: float) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._samples = samples
        self._until = until
        self._transport: asyncio.Transport
        self._sock: socket.socket
        self._answer = b""
        self._body_at = 0
        """start of the body, 0 before its head is complete"""
        self._whole_at = 0
        """end of the body; 0: in chunks, at the last of them"""
        self._started = self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._sock = transport.get_extra_info("socket")
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ask()

    def _ask(self) -> None:
        now = time.perf_counter()
        request = next(self._requests, None) if now < self._until else None
        if request is None:
            self._end(None)
            return
        self._answer, self._body_at, self._whole_at, self._first = b"", 0, 0, 0.0
        self._started = now
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        answer = self._answer = self._answer + data if self._answer else data
        if not self._body_at and not self._read_head(answer):
            return
        if not self._first and len(answer) > self._body_at:
            self._first = time.perf_counter()
        if len(answer) >= self._whole_at if self._whole_at else answer.endswith(_END_OF_CHUNKS):
            self._samples.append(
                Sample(self._first - self._started, time.perf_counter() - self._started, len(answer))
            )
            self._ask()

    def _read_head(self, answer: bytes) -> bool:
        end = answer.find(b"\r\n\r\n")
        if end < 0:
            return False
        if not answer.startswith(b"HTTP/1.1 200"):
            self._end(BadAnswer(answer.decode(errors="replace")))
            return False
        self._body_at = end + 4
        head = answer[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            self._whole_at = self._body_at + int(head[at + 15 :].split(b"\r\n", 1)[0])
        return True

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None) if error is None else self.ended.set_exception(error)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or BadAnswer("the server closed the connection before its answer was whole"))


async def call_all(
    port: int, path: str, bodies: Iterable[bytes], *, connections: int, seconds: float = 600.0
) -> tuple[list[Sample], float]:
    """Send `bodies`, each once, over `connections` connections; start none after `seconds`. Returns the
    samples and the wall seconds. Raises BadAnswer or OSError."""
    loop = asyncio.get_running_loop()
    samples: list[Sample] = []
    start = time.perf_counter()
    requests = (request_bytes(path, body, port) for body in bodies)
    callers = [
        (
            await loop.create_connection(
                lambda: _Caller(requests, samples, start + seconds), "127.0.0.1", port
            )
        )[1]
        for _ in range(connections)
    ]
    await asyncio.gather(*(caller.ended for caller in callers))
    return samples, time.perf_counter() - start
