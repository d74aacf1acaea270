"""Many clients of streams in one process, which only count what arrives.

Runs as a separate process: `python -m benchmarks.streams.clients STREAMS TOKENS PORT...`; the streams are
spread over the ports. After each line on standard input it writes its counts as one JSON line.
"""

import asyncio
import socket
import sys
from typing import cast

import msgspec
import uvloop

_TOKEN = b" word"
"""Text of each token of `source`; nothing else in an answer contains it."""
_END = b"data: [DONE]"
_OPENED_TOGETHER = 64
"""connections opened at once, fewer than a listening socket's queue"""


class Counts(msgspec.Struct):
    """Counts over all streams."""

    tokens: int = 0
    begun: int = 0
    whole: int = 0
    """streams that ended with all their tokens and the end of the stream"""
    broken: int = 0
    """streams that ended otherwise"""
    error: str = ""
    """of the first broken stream"""


class _Client(asyncio.Protocol):
    """One request, whose tokens are counted."""

    def __init__(self, counts: Counts, request: bytes, tokens: int) -> None:
        self._counts = counts
        self._request = request
        self._left = tokens
        self._begun = self._over = False
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        found = data.count(_TOKEN)
        if found:
            self._left -= found
            self._counts.tokens += found
            if not self._begun:
                self._begun = True
                self._counts.begun += 1
        if not self._left and _END in data:
            self._end(data, whole=True)
        elif not data.startswith(b"HTTP/1.1 200") and not self._begun:
            self._end(data, whole=False)
        self._rest = b"" if data.endswith(b"\n\r\n") else data[data.rfind(b"\n", 0, -1) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        self._end(b"the connection closed", whole=False)

    def _end(self, data: bytes, *, whole: bool) -> None:
        if not self._over:
            self._over = True
            self._counts.whole += whole
            self._counts.broken += not whole
            if not whole:
                self._counts.error = self._counts.error or data[:500].decode(errors="replace")


def _request(port: int, tokens: int, number: int) -> bytes:
    body = msgspec.json.encode(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": f"request number {number}"}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _run(streams: int, tokens: int, ports: list[int]) -> None:
    loop, counts = asyncio.get_running_loop(), Counts()
    opened = 0
    while opened < streams:
        count = min(_OPENED_TOGETHER, streams - opened)
        numbers = [(opened + at, ports[(opened + at) % len(ports)]) for at in range(count)]
        requests = [(port, _request(port, tokens, number)) for number, port in numbers]
        await asyncio.gather(
            *(
                loop.create_connection(
                    lambda request=request: _Client(counts, request, tokens),  # type: ignore[misc]
                    "127.0.0.1",
                    port,
                )
                for port, request in requests
            )
        )
        opened += count
    while await asyncio.to_thread(sys.stdin.buffer.readline):
        sys.stdout.buffer.write(msgspec.json.encode(counts) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(_run(int(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:]))))
