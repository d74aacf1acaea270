"""Requests sent behind others, expectations, upgrades and old versions: answered in order, or refused, and
nothing goes on for a client that left."""

import asyncio

import pytest

from tests.hostile.clients import RawAnswer, raw_client
from tests.hostile.conftest import StartTarget

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
SLOW = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"


async def test_pipelined_requests_are_answered_in_order(start: StartTarget) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        client.send(
            b"".join(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n%d" % at for at in range(8))
        )
        for _ in range(8):
            assert (await client.answer()).body == b"hello"
    assert target.app.bodies == [b"%d" % at for at in range(8)]


@pytest.mark.parametrize("cut", [0, 9, len(ASK)])
async def test_requests_sent_while_an_answer_takes_long_follow_it(start: StartTarget, cut: int) -> None:
    """The server frees what it does not need during a long answer."""
    target = await start(head_seconds=0.05)
    async with raw_client(target.url) as client, raw_client(target.url) as silent:
        client.send(SLOW)
        await asyncio.wait_for(target.app.asked.wait(), 5)
        await silent.rest()  # deadlines were looked at since
        client.send(ASK[:cut])
        target.app.go.set()
        assert (await client.answer()).body == b"hello"
        client.send(ASK[cut:] + SLOW)
        for _ in range(2):
            assert (await client.answer()).body == b"hello"
    assert target.app.bodies == [b"hi", b"", b"hi"]


async def test_what_follows_the_last_request_of_a_connection_is_ignored_during_its_answer(
    start: StartTarget,
) -> None:
    target = await start(head_seconds=0.05)
    async with raw_client(target.url) as client:
        client.send(SLOW.replace(b"host: x", b"host: x\r\nconnection: close"))
        await asyncio.wait_for(target.app.asked.wait(), 5)
        for sent in (b"", b"\x00\x01 nonsense\r\n\r\n"):
            await client.push(sent)
            async with raw_client(target.url) as silent:
                await silent.rest()  # deadlines were looked at since
        target.app.go.set()
        answer = RawAnswer(await client.rest())
    assert (answer.status, answer.body) == (200, b"hello")
    assert "malformed" not in target.cut


async def test_a_flood_of_pipelined_requests_ends_the_connection_after_the_answer_under_way(
    start: StartTarget,
) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        client.send(SLOW)
        await asyncio.wait_for(target.app.asked.wait(), 5)
        await client.push(ASK * 14_000)  # 350 kB: what one read may bring, and more
        await asyncio.sleep(0.05)
        assert target.cut == {"pipelined": 1}
        target.app.go.set()
        answers = await client.rest()
    assert answers.count(b"hello") == 1
    assert target.app.bodies == [b"hi"]


async def test_nonsense_behind_a_request_does_not_get_into_its_answer(start: StartTarget) -> None:
    """The server used to write its 400 into the middle of whatever was being sent."""
    target = await start()
    async with raw_client(target.url) as client:
        client.send(SLOW + b"\x00\x01 nonsense\r\n\r\n")
        await asyncio.wait_for(target.app.asked.wait(), 5)
        target.app.go.set()
        answer = RawAnswer(await client.rest())
    assert (answer.status, answer.body) == (200, b"hello")
    assert target.cut == {"malformed": 1}


async def test_a_request_that_is_answered_ends_when_its_client_leaves_though_another_one_was_read_behind_it(
    start: StartTarget,
) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        client.send(b"POST /flood HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" + ASK)
        await client.reader.readexactly(100_000)
    await asyncio.wait_for(target.app.disconnected.wait(), 5)


@pytest.mark.parametrize("path", ["/", "/unread"])
async def test_a_client_that_expects_to_be_told_to_go_on_is_told_so_or_refused(
    start: StartTarget, path: str
) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        client.send(
            b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
            % path.encode()
        )
        first = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5)
        if path == "/":
            assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(b"abc")
            assert (await client.answer()).status == 200
            client.send(ASK)  # and the connection is as good as any
            assert (await client.answer()).status == 200
            assert target.app.bodies == [b"abc", b""]
        else:
            assert first.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in first


async def test_a_client_that_expects_to_be_told_to_go_on_and_then_says_nothing_is_cut(
    start: StartTarget,
) -> None:
    target = await start(body_seconds=0.1)
    async with raw_client(target.url) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        rest = await client.rest()
    assert rest.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 408")
    assert target.cut == {"slow_body": 1}


BODIES = {
    "length": b"content-length: 3\r\n\r\nabc",
    "chunks": b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "none": b"content-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("pieces", [1, 2])
async def test_upgrades_are_declined_by_answering_as_usual_body_and_all(
    start: StartTarget, body: bytes, pieces: int
) -> None:
    """Java's HttpClient asks so by default; before, such a request arrived without its body."""
    target = await start()
    pipelined = (
        b"POST / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade:"
        b" h2c\r\nhttp2-settings: AAMAAABk\r\n" + body
    )
    async with raw_client(target.url) as client:
        for _ in range(2):  # and once more on the same connection
            for piece in (
                pipelined[: len(pipelined) // pieces - 2],
                pipelined[len(pipelined) // pieces - 2 :],
            ):
                client.send(piece)
                await asyncio.sleep(0.01)
            assert (await client.answer()).status == 200
        client.send(ASK)
        assert (await client.answer()).status == 200
    assert target.app.bodies == [b"abc" if b"abc" in body else b""] * 2 + [b""]
    assert not target.cut


async def test_the_last_requests_of_old_clients_close_their_connections(start: StartTarget) -> None:
    target = await start()
    for request in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"):
        async with raw_client(target.url) as client:
            client.send(request)
            assert (await client.rest()).endswith(b"hello")
