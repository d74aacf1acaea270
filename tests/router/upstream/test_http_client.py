"""The small HTTP client: every way in which an answer may arrive, end or fail, and the reuse of
connections."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.passthrough.event_relay import EventRelay
from router.upstream.http_client import HttpClient, Origin, request_bytes
from router.upstream.outbox import Outbox
from router.upstream.server_connection import BUFFERED_BYTES, MAX_HEAD_BYTES, Connection, ConnectionLost
from tests.router.router_fixture import until

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


@contextlib.asynccontextmanager
async def server(script: Script) -> AsyncIterator[str]:
    """Start a server that plays a script on each connection and then closes it."""
    writers: list[asyncio.StreamWriter] = []

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.close()

    listening = await asyncio.start_server(play, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for writer in writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read one request as it arrives."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def answering(*answers: bytes) -> Script:
    """Answer one request after the other with these bytes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_request(reader)
            writer.write(answer)
            await writer.drain()

    return script


def lingering(*answers: bytes) -> Script:
    """Answer like `answering`, but leave the connection open afterwards."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(*answers)(reader, writer)
        await reader.read()

    return script


async def ask(client: HttpClient, url: str, body: bytes = b"{}") -> Connection:
    """Send, and wait for the head."""
    origin = client.origin(url)
    connection = await client.connect(origin, 2.0)
    connection.send(request_bytes("POST", origin, "/x", {}, body))
    await connection.head()
    return connection


async def whole(connection: Connection) -> bytes:
    body = b""
    while data := await connection.read():
        body += data
    return body


class Client(HttpClient):
    """Client that closes everything it ever opened."""

    def __init__(self, keepalive_seconds: float) -> None:
        super().__init__(keepalive_seconds)
        self.made: list[Connection] = []

    async def connect(self, origin: Origin, seconds: float) -> Connection:
        self.made.append(await super().connect(origin, seconds))
        return self.made[-1]

    async def end(self) -> None:
        self.close()
        for connection in self.made:
            connection.cut("the test is over")
        await asyncio.sleep(0)  # closing takes one turn of the loop


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = Client(keepalive_seconds=60.0)
    yield client
    await client.end()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (OK, b"hello", True),
        (CHUNKED, b"hello, world", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"hello", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi", False),
    ],
)
async def test_an_answer_is_read_to_its_end_and_its_connection_kept_if_it_may_be(
    client: HttpClient, answer: bytes, body: bytes, kept: bool
) -> None:
    async with server(lingering(answer, answer)) as url:
        connection = await ask(client, url)
        assert await whole(connection) == body
        assert connection.complete
        assert connection.reusable == kept
        client.give_back(client.origin(url), connection)
        again = await ask(client, url)
        assert (again is connection) == kept
        assert await whole(again) == body
        again.cut("done")


async def test_an_answer_without_length_ends_with_its_connection(client: HttpClient) -> None:
    async with server(answering(b"HTTP/1.1 200 OK\r\n\r\nall there is")) as url:
        connection = await ask(client, url)
        assert await whole(connection) == b"all there is"
        assert not connection.reusable


async def test_what_came_before_a_break_is_given_out_before_the_error(client: HttpClient) -> None:
    async with server(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf")) as url:
        connection = await ask(client, url)
        await until(lambda: connection.lost)
        assert await connection.read() == b"half"
        with pytest.raises(ConnectionLost, match="closed"):
            await connection.read()


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_HEAD_BYTES + 100), "exceeds"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "not HTTP"),
    ],
)
async def test_no_answer_at_all_is_an_error_that_says_why(
    client: HttpClient, answer: bytes, complaint: str
) -> None:
    async with server(answering(answer)) as url:
        with pytest.raises(ConnectionLost, match=complaint):
            await ask(client, url)


async def test_a_bad_chunk_breaks_the_answer(client: HttpClient) -> None:
    async with server(
        lingering(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n")
    ) as url:
        connection = await ask(client, url)
        with pytest.raises(ConnectionLost, match="not HTTP"):
            await whole(connection)


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n", b"garbage"])
async def test_a_connection_that_sends_more_than_requested_is_not_reused(
    client: HttpClient, more: bytes
) -> None:
    async with server(lingering(OK + more)) as url:
        connection = await ask(client, url)
        with contextlib.suppress(ConnectionLost):
            assert await whole(connection) == b"hello"
        assert not connection.reusable


async def test_bytes_on_an_idle_connection_close_it(client: HttpClient) -> None:
    speak = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(OK)(reader, writer)
        await speak.wait()
        writer.write(b"unasked")
        await reader.read()

    async with server(script) as url:
        connection = await ask(client, url)
        await whole(connection)
        client.give_back(client.origin(url), connection)
        speak.set()
        await until(lambda: not connection.reusable)


async def test_idle_connections_that_the_server_closed_or_that_are_old_are_replaced() -> None:
    client = Client(keepalive_seconds=0.05)
    async with server(lingering(OK, OK)) as url:
        first = await ask(client, url)
        await whole(first)
        client.give_back(client.origin(url), first)
        client.prune()
        assert (client.idle_connections, first.reusable) == (1, True)
        await asyncio.sleep(0.06)
        second = await ask(client, url)
        assert second is not first
        await whole(second)
        client.give_back(client.origin(url), second)
        await asyncio.sleep(0.06)
        client.prune()
        assert (client.idle_connections, second.reusable) == (0, False)
        await client.end()


async def test_a_large_answer_waits_in_the_server_until_it_is_read(client: HttpClient) -> None:
    size = 20 * BUFFERED_BYTES
    sent = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(20):
            writer.write(b"x" * BUFFERED_BYTES)
            await writer.drain()
        sent.set()

    async with server(script) as url:
        connection = await ask(client, url)
        await asyncio.sleep(0.2)
        assert not sent.is_set()
        first = await connection.read()
        assert BUFFERED_BYTES < len(first) < 3 * BUFFERED_BYTES
        assert len(first) + len(await whole(connection)) == size


async def test_cutting_wakes_the_waiting_task_and_the_server_notices(client: HttpClient) -> None:
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async with server(script) as url:
        origin = client.origin(url)
        connection = await client.connect(origin, 2.0)
        connection.send(request_bytes("POST", origin, "/x", {}, b""))
        waiting = asyncio.create_task(connection.head())
        await asyncio.sleep(0)
        connection.cut("enough")
        with pytest.raises(ConnectionLost, match="enough"):
            await waiting
        await left.wait()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
async def test_answers_are_the_same_however_the_bytes_are_cut(chunks: list[bytes], cuts: list[int]) -> None:
    stream = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        + b"0\r\n\r\n"
    )
    connection = Connection(Outbox())
    connection.connection_made(_Deaf())
    connection.send(b"")
    at, turn, body = 0, 0, b""
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        connection.data_received(stream[at : at + step])
        at, turn = at + step, turn + 1
        body += connection.take() or b""
    assert (connection.status, body) == (200, b"".join(chunks))
    assert connection.reusable


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([20, 260, 4100]).map(lambda size: b"data: %b\n\n" % (b"x" * size)),
            st.binary(min_size=1, max_size=40),
            st.binary(min_size=14, max_size=20).map(lambda data: data + b"\n\n"),
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.sampled_from([0, 1, 3, 30, 1000]), min_size=1, max_size=4),
)
async def test_relayed_chunks_and_the_others_are_the_whole_body_in_order(
    chunks: list[bytes], cuts: list[int]
) -> None:
    """cuts: bytes of each arrival; 0: one chunk."""
    body = bytearray()

    def write(data: bytes) -> None:
        while data:
            size, _, rest = data.partition(b"\r\n")
            end = int(size, 16)
            assert rest[end : end + 2] == b"\r\n"
            body.extend(rest[:end])
            data = rest[end + 2 :]

    relay = EventRelay(_Body(write))
    relay.until = 10**9
    connection = Connection(Outbox())
    connection.connection_made(_Deaf())
    connection.send(b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def take(data: bytes) -> bool | None:
        body.extend(data)
        connection.relay = relay
        return None

    async def through() -> None:
        while not connection.complete:
            while data := connection.take():
                take(data)
            await connection.more(take=take)

    waiting = asyncio.create_task(through())
    await asyncio.sleep(0)
    for turn, chunk in enumerate(chunks):
        data = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        step = cuts[turn % len(cuts)] or len(data)
        for at in range(0, len(data), step):
            connection.data_received(data[at : at + step])
            if turn % 2:
                await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert body == b"".join(chunks)
    connection.data_received(b"0\r\n\r\n")
    await waiting
    assert connection.reusable


async def test_a_chunk_reaches_the_relay_only_while_a_task_waits_and_whole() -> None:
    relayed: list[bytes] = []

    class Relay:
        heard_at = 0.0

        def take(self, data: bytes, now: float) -> bool:
            relayed.append(data)
            return True

    connection = Connection(Outbox())
    connection.connection_made(_Deaf())
    connection.send(b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
    assert connection.take() == b"ab"
    waiting = asyncio.create_task(connection.more(take=lambda data: True if data == b"end" else None))
    await asyncio.sleep(0)
    connection.relay = Relay()
    for data in (b"1\r\na\r\n", b"2", b"\r\nbc\r\n", b"1\r\nd\r\n", b"3\r\nend\r\n"):
        if data.startswith(b"3"):
            connection.relay = None
        connection.data_received(data)
    assert relayed == [b"1\r\na\r\n", b"2", b"\r\nbc\r\n", b"1\r\nd\r\n"]
    assert await waiting is True
    assert connection.relay is None


async def test_nothing_overtakes_what_waits_for_a_task_that_was_woken() -> None:
    relayed: list[bytes] = []
    connection = Connection(Outbox())
    connection.connection_made(_Deaf())
    connection.send(b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
    connection.take()
    waiting = asyncio.create_task(connection.more(take=lambda data: None))
    await asyncio.sleep(0)
    relay = connection.relay = EventRelay(_Body(relayed.append))
    relay.until = 100
    for data in (b"1", b"\r\nb\r\n", b"10\r\ndata: %b\n\n\r\n" % (b"x" * 8)):
        connection.data_received(data)
    assert relayed == []
    await waiting
    assert connection.take() == b"bdata: xxxxxxxx\n\n"


class _Body(NamedTuple):
    """The body of a response to a client who reads."""

    write_now: Callable[[bytes], object]


class _Deaf(asyncio.Transport):
    """A transport that accepts everything and does nothing."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self

    def setsockopt(self, *_: int) -> None: ...
    def write(self, data: object) -> None: ...
    def is_closing(self) -> bool:
        return False


def test_requests_say_their_host_length_and_headers_and_nothing_can_be_smuggled_in() -> None:
    origin = Origin.of("http://example.org:8080/base/")
    sent = request_bytes(
        "POST", origin, "/v1/x", {"a": "b", "evil": "x\r\ninjected: y", "nul": "\0"}, b"body"
    )
    assert (
        sent == b"POST /base/v1/x HTTP/1.1\r\nhost: example.org:8080\r\ncontent-length: 4\r\na: b\r\n\r\nbody"
    )


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h", ("h", 80, False, "", b"h")),
        ("https://h/p", ("h", 443, True, "/p", b"h")),
        ("http://[::1]:9", ("::1", 9, False, "", b"[::1]:9")),
    ],
)
def test_urls_are_taken_apart(url: str, origin: tuple[object, ...]) -> None:
    assert Origin.of(url) == origin


@pytest.mark.parametrize(
    "url", ["ftp://h", "http://", "h:80", "http://h/a b", "http://h/\r\nx", "http://hä", "http://h:99999"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Origin.of(url)


async def test_a_connection_made_while_the_loop_was_kept_is_not_given_up(client: HttpClient) -> None:
    def keep_the_loop(times: int) -> None:
        time.sleep(0.1)
        if times > 1:
            asyncio.get_running_loop().call_soon(keep_the_loop, times - 1)

    async with server(answering(OK)) as url:
        asyncio.get_running_loop().call_soon(keep_the_loop, 8)
        connection = await client.connect(Origin.of(url), 0.15)
        connection.cut("made")


async def test_a_connection_that_is_not_made_in_time_is_given_up(client: HttpClient) -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # connections beyond the backlog are never answered
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with pytest.raises(TimeoutError):
            await client.connect(Origin.of(f"http://127.0.0.1:{full.getsockname()[1]}"), 0.2)


async def test_reasons_for_failed_connections_are_distinguished(client: HttpClient) -> None:
    with pytest.raises(OSError, match=r".+"):
        await client.connect(Origin.of("http://127.0.0.1:9"), 2.0)

    async def no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await reader.read()

    async with server(no_tls) as url:
        with pytest.raises(OSError, match="SSL"):
            await client.connect(Origin.of(url.replace("http:", "https:")), 2.0)


# Silence, on a clock of its own: no socket is involved


class _Pipe(asyncio.Transport):
    """Connection without a peer."""

    def __init__(self) -> None:
        super().__init__(extra={"socket": self})
        self.aborted = False

    def setsockopt(self, *_: object) -> None: ...
    def write(self, data: object) -> None: ...
    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
async def quiet() -> Connection:
    connection = Connection(Outbox())
    connection.connection_made(_Pipe())
    return connection


@pytest.mark.looptime
async def test_a_server_that_is_silent_for_too_long_is_cut_off(quiet: Connection) -> None:
    quiet.send(b"")
    began = asyncio.get_running_loop().time()
    await quiet.more(2.0)
    assert (quiet.fell_silent, asyncio.get_running_loop().time() - began) == (True, 2.0)
    with pytest.raises(ConnectionLost, match="silent for too long"):
        await quiet.more(2.0)


@pytest.mark.looptime
async def test_each_wait_has_its_own_limit_whatever_the_one_before_was(quiet: Connection) -> None:
    loop = asyncio.get_running_loop()
    quiet.send(b"")
    for seconds in (100.0, 1.0):
        loop.call_later(
            0.5,
            quiet.data_received,
            b"HTTP/1.1 200 OK\r\n" if seconds == 100.0 else b"content-length: 5\r\n\r\n",
        )
        await quiet.more(seconds)
    began = loop.time()
    await quiet.more(1.0)
    assert (quiet.fell_silent, loop.time() - began) == (True, 1.0)


@pytest.mark.looptime
async def test_an_idle_connection_is_not_cut_for_silence(quiet: Connection) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(3):
        quiet.send(b"")
        loop.call_later(0.1, quiet.data_received, OK)
        await quiet.more(5.0)
        assert quiet.take() == b"hello"
        await asyncio.sleep(60.0)
    assert (quiet.fell_silent, quiet.complete) == (False, True)
    quiet.cut("the test is over")


@pytest.mark.looptime
async def test_what_a_relay_hears_is_no_silence(quiet: Connection) -> None:
    class Heard:
        heard_at = 0.0

    loop, quiet.heard = asyncio.get_running_loop(), Heard()
    quiet.send(b"")
    quiet.heard = heard = Heard()
    began = loop.time()

    def hear() -> None:
        heard.heard_at = loop.time()

    loop.call_later(1.5, hear)
    await quiet.more(2.0, between=2.0)
    assert (quiet.fell_silent, loop.time() - began) == (True, 3.5)
