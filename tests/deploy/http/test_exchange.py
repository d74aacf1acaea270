"""One request and its response, as an ASGI application sees them."""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import pytest

from deploy.http.exchange import HttpExchange, split_url
from deploy.http.flow_control import FlowControl

START = "http.response.start"
BODY = "http.response.body"


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_through(self, data: bytes) -> None:
        self.write(data)

    @property
    def direct(self) -> Callable[[bytes], object]:
        return self.write

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Parsed:
    """A response as a client's parser reads it."""

    def __init__(self, raw: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(raw)
        self.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def exchange(
    wire: Wire,
    *,
    method: str = "POST",
    keep_alive: bool = True,
    waits: bool = False,
    flow: FlowControl | None = None,
) -> HttpExchange:
    return HttpExchange(
        {"type": "http", "method": method},
        wire,  # type: ignore[arg-type]
        flow or FlowControl(wire),
        lambda: None,
        keep_alive=keep_alive,
        awaits_continue=waits,
    )


async def test_a_response_of_stated_length_is_written_as_it_is() -> None:
    wire = Wire()
    one = exchange(wire)
    await one.send({"type": START, "status": 201, "headers": [(b"Content-Length", b"5")]})
    await one.send({"type": BODY, "body": b"hello"})
    assert wire.written == b"HTTP/1.1 201 Created\r\ncontent-length: 5\r\n\r\nhello"
    assert one.response_complete
    assert not wire.closed


async def test_a_response_of_unknown_length_is_written_in_chunks() -> None:
    wire = Wire()
    one = exchange(wire)
    await one.send({"type": START, "status": 200, "headers": []})
    for piece in (b"one", b"", b"two"):
        await one.send({"type": BODY, "body": piece, "more_body": True})
    assert not Parsed(wire.written).complete
    await one.send({"type": BODY})
    read = Parsed(wire.written)
    assert (read.status, read.body, read.complete) == (200, b"onetwo", True)


@pytest.mark.parametrize("stated", [False, True])
async def test_a_connection_that_ends_with_the_response_says_so_once(stated: bool) -> None:
    wire = Wire()
    one = exchange(wire, keep_alive=stated)
    own = [(b"connection", b"close")] if stated else []
    await one.send({"type": START, "status": 200, "headers": [*own, (b"content-length", b"0")]})
    await one.send({"type": BODY})
    assert Parsed(wire.written).headers.count((b"connection", b"close")) == 1
    assert wire.closed


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_responses_without_a_body_have_no_chunks(method: str, status: int) -> None:
    wire = Wire()
    one = exchange(wire, method=method)
    await one.send({"type": START, "status": status, "headers": []})
    await one.send({"type": BODY})
    assert wire.written.endswith(b"\r\n\r\n")
    assert b"chunked" not in wire.written
    assert one.response_complete


@pytest.mark.parametrize("value", [b"a\r\nx: b", b"a\nb", b"a\rb", b"a\0b", b"a\x7fb"])
async def test_a_value_that_would_break_the_head_is_not_written(value: bytes) -> None:
    wire = Wire()
    with pytest.raises(RuntimeError, match="control character"):
        await exchange(wire).send({"type": START, "status": 200, "headers": [(b"x-a", value)]})
    assert not wire.written


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\r\nb"])
async def test_a_name_that_is_no_token_is_not_written(name: bytes) -> None:
    wire = Wire()
    with pytest.raises(RuntimeError, match="no name of a header"):
        await exchange(wire).send({"type": START, "status": 200, "headers": [(name, b"value")]})
    assert not wire.written


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"123456", "longer than its content-length"), (b"1234", "shorter than its content")],
)
async def test_a_body_of_another_length_than_stated_is_an_error(body: bytes, message: str) -> None:
    one = exchange(Wire())
    await one.send({"type": START, "status": 200, "headers": [(b"content-length", b"5")]})
    with pytest.raises(RuntimeError, match=message):
        await one.send({"type": BODY, "body": body})


async def test_messages_out_of_turn_are_errors() -> None:
    one = exchange(Wire())
    with pytest.raises(RuntimeError, match="out of turn"):
        await one.send({"type": BODY, "body": b""})
    await one.send({"type": START, "status": 204, "headers": []})
    with pytest.raises(RuntimeError, match="out of turn"):
        await one.send({"type": START, "status": 204, "headers": []})
    await one.send({"type": BODY})
    with pytest.raises(RuntimeError, match="out of turn"):
        await one.send({"type": BODY})


async def test_the_body_is_received_in_pieces_and_then_the_disconnect() -> None:
    one = exchange(Wire())
    waiting = asyncio.create_task(one.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    one.body.append(b"ab")
    one.notify()
    assert await waiting == {"type": "http.request", "body": b"ab", "more_body": True}
    one.body += [b"c", b"d"]
    one.more_body = False
    one.notify()
    assert await one.receive() == {"type": "http.request", "body": b"cd", "more_body": False}
    one.disconnected = True
    one.notify()
    assert await one.receive() == {"type": "http.disconnect"}


async def test_a_client_that_waits_for_permission_gets_it_when_the_body_is_wanted() -> None:
    wire = Wire()
    one = exchange(wire, waits=True)
    assert not wire.written
    one.notify()
    await one.receive()
    assert wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("begun", [False, True])
async def test_an_application_that_fails_is_answered_with_500_or_cut(begun: bool) -> None:
    wire = Wire()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": START, "status": 200, "headers": []})
        raise ValueError("a bug")

    await exchange(wire).run(app)
    assert Parsed(wire.written).status == (200 if begun else 500)
    assert wire.closed


async def test_an_application_that_does_not_complete_its_response_is_answered_with_500() -> None:
    wire = Wire()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    await exchange(wire).run(app)
    assert Parsed(wire.written).status == 500


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        (b"/v1/x", ("/v1/x", b"/v1/x", b"")),
        (b"/a%20b?c=d&e", ("/a b", b"/a%20b", b"c=d&e")),
        (b"http://host:1/p?q", ("/p", b"/p", b"q")),
        (b"/" + b"x" * 100 + b"?y", ("/" + "x" * 100, b"/" + b"x" * 100, b"y")),
    ],
)
def test_a_url_is_split_into_path_and_query(url: bytes, parts: tuple[str, bytes, bytes]) -> None:
    assert split_url(url) == parts


async def test_pieces_are_written_at_once_while_a_body_in_chunks_is_sent() -> None:
    wire = Wire()
    one = exchange(wire)
    assert one.write_now is None, "the head is not written"
    await one.send({"type": START, "status": 200, "headers": []})
    assert one.write_now is None, "the body has not begun"
    await one.send({"type": BODY, "body": b"first", "more_body": True})
    assert one.write_now is not None
    one.write_now(b"5\r\npiece\r\n")
    await one.send({"type": BODY, "body": b"end"})
    assert one.write_now is None
    assert Parsed(wire.written).body == b"firstpieceend"


async def test_a_piece_sent_to_a_client_that_reads_too_slowly_lets_none_be_written_at_once() -> None:
    wire = Wire()
    flow = FlowControl(wire)
    one = exchange(wire, flow=flow)
    await one.send({"type": START, "status": 200, "headers": []})
    wire.write = lambda data: flow.pause_writing()  # type: ignore[method-assign]
    await one.send({"type": BODY, "body": b"much", "more_body": True})
    assert one.write_now is None


async def test_a_response_of_stated_length_takes_no_pieces() -> None:
    one = exchange(Wire())
    await one.send({"type": START, "status": 200, "headers": [(b"content-length", b"5")]})
    await one.send({"type": BODY, "body": b"he", "more_body": True})
    assert one.write_now is None


async def test_nothing_is_written_at_once_for_a_client_that_has_gone() -> None:
    one = exchange(Wire())
    await one.send({"type": START, "status": 200, "headers": []})
    await one.send({"type": BODY, "body": b"piece", "more_body": True})
    one.disconnect()
    assert one.write_now is None


async def test_a_disconnect_is_told_once_and_only_to_those_who_still_want_to_know() -> None:
    gone: list[str] = []
    one, two = exchange(Wire()), exchange(Wire())
    one.on_disconnect(lambda: gone.append("one"))
    two.on_disconnect(lambda: gone.append("two"))
    two.on_disconnect(None)
    for _ in range(2):
        one.disconnect()
        two.disconnect()
    assert gone == ["one"]


async def test_a_disconnect_that_came_before_is_told_at_once() -> None:
    gone: list[str] = []
    one = exchange(Wire())
    one.disconnect()
    one.on_disconnect(lambda: gone.append("one"))
    assert gone == ["one"]


async def test_a_connection_is_read_while_its_disconnect_matters() -> None:
    wire = Wire()
    flow = FlowControl(wire)
    one = exchange(wire, flow=flow)
    flow.pause_reading()
    one.on_disconnect(lambda: None)
    assert not flow.read_paused
