"""The smallest relay: bytes of one connection are written to another, on the router's event loop.

It shows what a streamed token costs a process that only receives and sends. Runs as a separate process:
`python -m benchmarks.streams.bare_relay PORT UPSTREAM_PORT`.
"""

import asyncio
import sys
from typing import cast

import uvloop


class _Upstream(asyncio.Protocol):
    """The connection to the source."""

    def __init__(self, client: asyncio.Transport, request: bytes) -> None:
        self._client = client
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.close()


class _Client(asyncio.Protocol):
    """The connection of a client, whose first bytes are its whole request."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[object]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        made = asyncio.get_running_loop().create_connection(
            lambda: _Upstream(self._transport, data), "127.0.0.1", self._upstream
        )
        self._tasks.add(asyncio.create_task(made, name="connect to the source"))


async def _serve(port: int, upstream: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: _Client(upstream), "127.0.0.1", port, backlog=4096
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
