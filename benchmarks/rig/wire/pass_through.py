"""Smallest pass-through in Python: the floor of any router on this event loop. It reads a request's head and
body with the router's own parser, sends both to the next server in turn over a kept connection, and passes
the answer back as it arrives. It checks, decides, counts and logs nothing.

    python -m benchmarks.rig.wire.pass_through PORT SERVER_PORT ...
"""

import asyncio
import sys
from collections import deque
from functools import partial
from itertools import cycle
from typing import cast

import httptools
import uvloop


class _Server(asyncio.Protocol):
    """Connection to a server: one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.client: _Client | None = None
        self.idle: deque[_Server]
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.client is not None:
            self.client.transport.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.client = None
        self._parser = httptools.HttpResponseParser(self)
        self.idle.append(self)


class _Client(asyncio.Protocol):
    """Connection of a client."""

    def __init__(self, servers: "cycle[tuple[int, deque[_Server]]]") -> None:
        self.transport: asyncio.Transport
        self._servers = servers
        self._parser = httptools.HttpRequestParser(self)
        self._lines: list[bytes] = []
        self._body: list[bytes] = []
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._lines, self._body, self._path = [], [], b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines.append(b"%b: %b\r\n" % (name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method()
        request = b"".join((b"%b %b HTTP/1.1\r\n" % (method, self._path), *self._lines, b"\r\n", *self._body))
        port, idle = next(self._servers)
        if idle:
            self._send(idle.pop(), request)
        else:
            loop = asyncio.get_running_loop()
            opening = loop.create_task(loop.create_connection(_Server, "127.0.0.1", port))
            opening.add_done_callback(partial(self._opened, idle, request))

    def _opened(
        self, idle: "deque[_Server]", request: bytes, opening: "asyncio.Task[tuple[object, _Server]]"
    ) -> None:
        server = opening.result()[1]
        server.idle = idle
        self._send(server, request)

    def _send(self, server: _Server, request: bytes) -> None:
        server.client = self
        server.transport.write(request)


async def _serve(port: int, servers: list[int]) -> None:
    turns = cycle([(server, deque[_Server]()) for server in servers])
    server = await asyncio.get_running_loop().create_server(lambda: _Client(turns), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), [int(word) for word in sys.argv[2:]]))
