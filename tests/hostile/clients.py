"""Clients that behave badly, byte by byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any


class RawClient:
    """One TCP connection that sends what it is given and reads when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def push(self, data: bytes) -> bool:
        """Send, as fast as the server takes it; False when it has closed the connection."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            return False
        return True

    async def rest(self, seconds: float = 10.0) -> bytes:
        """All that comes until the server closes. TimeoutError when it does not."""
        data = b""
        async with asyncio.timeout(seconds):
            try:
                while piece := await self.reader.read(65536):
                    data += piece
            except ConnectionResetError:
                return data
        return data

    async def answer(self, seconds: float = 10.0) -> "RawAnswer":
        """One answer with a content-length."""
        async with asyncio.timeout(seconds):
            head = await self.reader.readuntil(b"\r\n\r\n")
            answer = RawAnswer(head)
            answer.body = await self.reader.readexactly(int(answer.headers.get("content-length", "0")))
            return answer

    def close(self) -> None:
        self.writer.transport.abort()


class RawAnswer:
    """An answer's head, and its body where it has a content-length."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def raw_client(url: str, limit: int = 65536) -> AsyncIterator[RawClient]:
    """limit: bytes that the client reads ahead."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        client.close()


class Recorder:
    """An ASGI application that reads bodies, answers b"hello", and remembers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.disconnected = asyncio.Event()
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        """/slow waits for this"""
        self.flooded = 0
        """pieces of 64 KiB that /flood has written"""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.asked.set()
        self.headers.append(list(scope["headers"]))
        if scope["path"] == "/unread":
            await self._answer(send, 401)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        if scope["path"] == "/slow":
            await self.go.wait()
        if scope["path"] == "/flood":
            await self._flood(receive, send)
            return
        await self._answer(send, 200)

    async def _answer(self, send: Any, status: int) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    async def _flood(self, receive: Any, send: Any) -> None:
        watch = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not watch.done():
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            self.flooded += 1
            await asyncio.sleep(0)
        self.disconnected.set()


async def until(fact: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not fact():  # noqa: ASYNC110 facts of another component have no event
            await asyncio.sleep(0.005)
