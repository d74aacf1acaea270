"""What an answer is written in, and what becomes of it when the connection goes."""

import asyncio
from typing import Any

import pytest

from deploy.http.exchange import HttpExchange
from deploy.http.flow_control import FlowControl
from deploy.http.server import HttpServer
from deploy.http.sockets import listen
from deploy.http.write_coalescing import MAX_GATHERED_BYTES, WriteCoalescing


class Wire(asyncio.Transport):
    """Keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 7

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@pytest.fixture
async def wire() -> Wire:
    return Wire()


@pytest.fixture
async def gathering(wire: Wire) -> WriteCoalescing:
    return WriteCoalescing(wire, asyncio.get_running_loop())


async def test_what_is_written_in_one_turn_of_the_loop_leaves_together(
    wire: Wire, gathering: WriteCoalescing
) -> None:
    gathering.write(b"head")
    gathering.write(b"body")
    assert (wire.writes, gathering.get_write_buffer_size()) == ([], 8 + 7)
    await asyncio.sleep(0)
    assert wire.writes == [b"headbody"]
    gathering.write(b"next")
    await asyncio.sleep(0)
    assert wire.writes == [b"headbody", b"next"]


async def test_nothing_is_lost_when_the_server_closes(wire: Wire, gathering: WriteCoalescing) -> None:
    gathering.write(b"last words")
    gathering.close()
    await asyncio.sleep(0)
    assert (wire.writes, wire.closed) == ([b"last words"], True)


async def test_much_leaves_at_once(wire: Wire, gathering: WriteCoalescing) -> None:
    gathering.write(b"x")
    gathering.write(bytes(MAX_GATHERED_BYTES))
    assert [len(data) for data in wire.writes] == [MAX_GATHERED_BYTES + 1]


async def test_nothing_is_written_to_a_client_that_has_gone(wire: Wire, gathering: WriteCoalescing) -> None:
    gathering.write(b"to nobody")
    wire.closed = True
    await asyncio.sleep(0)
    gathering.write(b"to nobody")
    gathering.abort()
    await asyncio.sleep(0)
    assert wire.writes == []


async def _app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def test_a_short_answer_arrives_in_one_piece() -> None:
    listener = listen("127.0.0.1", 0)
    async with HttpServer(_app, listener, drain_seconds=1):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(
            b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        pieces = []
        while piece := await reader.read(65536):
            pieces.append(piece)
        writer.close()
        await writer.wait_closed()
    assert b"".join(pieces).count(b"hello") == 2
    assert pieces[0].endswith(b"hello")


async def test_a_client_that_does_not_read_holds_up_its_answer_and_not_the_servers_memory() -> None:
    piece, pieces = bytes(256 * 1024), 256
    sent = 0

    async def flood(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal sent
        if scope["type"] == "lifespan":
            await _app(scope, receive, send)
            return
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", str(pieces * len(piece)).encode())],
            }
        )
        for at in range(pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": at < pieces - 1})
            sent += 1

    listener = listen("127.0.0.1", 0)
    async with HttpServer(flood, listener, drain_seconds=1):
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        before = -1
        while sent != before or not sent:  # until it stands still
            before = sent
            await asyncio.sleep(0.02)
        assert sent < pieces
        received = 0
        while data := await reader.read(1 << 20):
            received += len(data)
        assert received > pieces * len(piece)
        writer.close()
        await writer.wait_closed()


async def test_output_that_is_not_to_wait_leaves_at_once_with_what_waits(
    wire: Wire, gathering: WriteCoalescing
) -> None:
    gathering.write_through(b"alone")
    assert wire.writes == [b"alone"]
    gathering.write(b"head")
    gathering.write_through(b"piece")
    gathering.direct(b"next")
    await asyncio.sleep(0)
    assert wire.writes == [b"alone", b"headpiece", b"next"]
    wire.close()
    gathering.write_through(b"late")
    assert wire.writes == [b"alone", b"headpiece", b"next"]


async def test_a_short_streamed_answer_leaves_in_one_write_and_later_pieces_at_once(
    wire: Wire, gathering: WriteCoalescing
) -> None:
    def exchange() -> HttpExchange:
        return HttpExchange(
            {"method": "POST"},
            gathering,
            FlowControl(wire),
            lambda: None,
            keep_alive=True,
            awaits_continue=False,
        )

    short, longer = exchange(), exchange()
    for one in (short, longer):
        await one.send({"type": "http.response.start", "status": 200, "headers": []})
        await one.send({"type": "http.response.body", "body": b"first", "more_body": True})
        if one is short:
            await one.send({"type": "http.response.body", "body": b""})
            await asyncio.sleep(0)
            assert [written.endswith(b"5\r\nfirst\r\n0\r\n\r\n") for written in wire.writes] == [True]
    for chunk in (b"1\r\na\r\n", b"1\r\nb\r\n"):
        assert longer.write_now is not None
        longer.write_now(chunk)
    assert wire.writes[1].endswith(b"first\r\n1\r\na\r\n")
    assert wire.writes[2:] == [b"1\r\nb\r\n"]


async def test_a_client_that_stops_reading_is_written_nothing_past_the_servers_limits() -> None:
    """The application writes at once what it may, and the rest waits for the client."""
    chunk = b"%x\r\n%b\r\n" % (16 * 1024, bytes(16 * 1024))
    written, reading, done = 0, asyncio.Event(), asyncio.Event()

    async def stream(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal written
        if scope["type"] == "lifespan":
            await _app(scope, receive, send)
            return
        body = scope["extensions"]["roost.body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while body.write_now is not None:
            body.write_now(chunk)
            written += 1
        reading.set()
        await send({"type": "http.response.body", "body": b"again", "more_body": True})
        assert body.write_now is not None, "the client has read"
        body.write_now(b"4\r\ntail\r\n")
        await send({"type": "http.response.body", "body": b"last"})
        done.set()

    listener = listen("127.0.0.1", 0)
    async with HttpServer(stream, listener, drain_seconds=1):
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await reading.wait()
        received = b""
        while data := await reader.read(1 << 20):
            received += data
        await done.wait()
        writer.close()
        await writer.wait_closed()
    body = received.partition(b"\r\n\r\n")[2]
    assert body.startswith(b"5\r\nfirst\r\n")
    assert body.endswith(b"5\r\nagain\r\n4\r\ntail\r\n4\r\nlast\r\n0\r\n\r\n")
    assert len(body) == len(chunk) * written + len(b"5\r\nfirst\r\n5\r\nagain\r\n") + len(
        b"4\r\ntail\r\n4\r\nlast\r\n0\r\n\r\n"
    )
