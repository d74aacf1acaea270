"""A closed-loop HTTP client on bare sockets: so many connections, each sends its next request when the last answer is whole.

Keep-alive, TCP_NODELAY; TCP_QUICKACK is re-armed after every read, so that a server which leaves Nagle's algorithm on is not
punished for it (say so beside any number).
"""

import asyncio
import socket
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """Seconds from sending a request to its first body byte and to its end; bytes of the whole answer."""

    first: float
    whole: float
    size: int


class BadAnswer(Exception):
    """The server answered something else than 200; the text carries the head."""


def request_bytes(path: str, body: bytes, port: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _answer(reader: asyncio.StreamReader, sock: socket.socket, start: float) -> Sample:
    head = await reader.readuntil(b"\r\n\r\n")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    if not head.startswith(b"HTTP/1.1 200"):
        raise BadAnswer(head.decode(errors="replace"))
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at >= 0:
        body = await reader.readexactly(int(lower[at + 15 :].split(b"\r\n", 1)[0]))
        end = time.perf_counter()
        return Sample(end - start, end - start, len(body))
    first, size = 0.0, 0
    while (length := int(await reader.readuntil(b"\r\n"), 16)) > 0:
        await reader.readexactly(length + 2)
        first = first or time.perf_counter() - start
        size += length
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    await reader.readexactly(2)
    return Sample(first, time.perf_counter() - start, size)


async def _connection(port: int, request: bytes, count: int, samples: list[Sample]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        for _ in range(count):
            start = time.perf_counter()
            writer.write(request)
            samples.append(await _answer(reader, sock, start))
    finally:
        writer.close()
        await writer.wait_closed()


async def closed_loop(port: int, path: str, body: bytes, *, connections: int, requests: int) -> tuple[list[Sample], float]:
    """Send `requests` equal requests over `connections` connections. Returns the samples and the wall seconds."""
    request = request_bytes(path, body, port)
    samples: list[Sample] = []
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(_connection(port, request, requests // connections, samples), name="sends its next request when the last is answered")
    return samples, time.perf_counter() - start
