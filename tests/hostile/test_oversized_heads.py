"""Heads, URLs, trailers and chunks without end: cut at a limit, whose work is bounded, and with an answer
that says why."""

import asyncio
import time

import pytest

from tests.hostile.clients import RawAnswer, RawClient, raw_client
from tests.hostile.conftest import StartTarget

ENDLESS = 64 * 1024 * 1024
"""bytes that an attacker would send, if he were let"""


async def _flood(client: RawClient, piece: bytes) -> int:
    """Send until the server closes; how much was sent."""
    sent = 0
    while sent < ENDLESS and await client.push(piece):
        sent += len(piece)
    return sent


@pytest.mark.parametrize("piece", [256 * 1024, 16 * 1024, 500])
async def test_an_endless_header_value_is_cut_with_431_whatever_pieces_it_comes_in(
    start: StartTarget, piece: int
) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\nx-a: ")
        for _ in range(200 * 1024 // piece + 1):
            await client.push(b"a" * piece)
        answer = RawAnswer(await client.rest())
    assert (answer.status, answer.headers["connection"], answer.json["error"]["code"]) == (
        431,
        "close",
        "head_too_large",
    )
    assert target.cut == {"head_too_large": 1}
    assert not target.app.asked.is_set()


async def test_a_client_that_floods_a_header_costs_the_server_next_to_no_processor_time(
    start: StartTarget,
) -> None:
    """Before there was a limit, the pieces of a field were joined one by one: 105 MB took 13 s of the loop,
    and as many bytes of memory."""
    target = await start()
    async with raw_client(target.url) as client:
        client.send(b"GET / HTTP/1.1\r\nx-a: ")
        before = time.thread_time()
        sent = await _flood(client, b"a" * 262144)
        assert sent < ENDLESS
        assert time.thread_time() - before < 2.0  # of this thread: client and server


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /" + b"u" * 9000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414, "url_too_long"),
        (
            b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: 1\r\n" % at for at in range(101)) + b"\r\n",
            431,
            "head_too_large",
        ),
        (b"GET / HTTP/1.1\r\n" + b"x: 1\r\n" * 100_000, 431, "head_too_large"),
        (
            b"GET / HTTP/1.1\r\n"
            + b"".join(b"x-%d: %s\r\n" % (at, b"v" * 3000) for at in range(30))
            + b"\r\n",
            431,
            "head_too_large",
        ),
        (b"\x00\xff\x13 nonsense\r\n\r\n", 400, "malformed"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "malformed"),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400, "malformed"),
        (
            (
                b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding:"
                b" chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
            ),
            400,
            "malformed",
        ),
        (b"\r\n" * 50_000, 431, "head_too_large"),
    ],
)
async def test_what_exceeds_a_limit_or_makes_no_sense_is_answered_and_closed(
    start: StartTarget, head: bytes, status: int, code: str
) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        await client.push(head)
        answer = RawAnswer(await client.rest())
    assert (answer.status, answer.json["error"]["code"], answer.headers["connection"]) == (
        status,
        code,
        "close",
    )
    assert target.cut == {code: 1}
    assert target.app.headers == []


async def test_a_head_just_below_the_limits_is_served(start: StartTarget) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        fields = b"".join(b"x-%d: %s\r\n" % (at, b"v" * 620) for at in range(98))
        body = b"b" * 300_000
        await client.push(
            b"POST /"
            + b"u" * 2000
            + b" HTTP/1.1\r\nhost: x\r\n"
            + fields
            + b"content-length: 300000\r\n\r\n"
            + body
        )
        assert (await client.answer()).status == 200
    assert target.app.bodies == [body]
    assert not target.cut


@pytest.mark.parametrize(
    "trailer", [b"x-t: " + b"a" * 300_000, b"x: 1\r\n" * 50_000], ids=["one value", "many fields"]
)
async def test_endless_trailers_are_cut(start: StartTarget, trailer: bytes) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        await client.push(
            b"POST /slow HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n" + trailer
        )
        answer = RawAnswer(await client.rest())
    assert answer.status in (400, 431)
    await asyncio.wait_for(target.app.disconnected.wait(), 5)
    assert target.app.bodies == []


async def test_trailers_are_no_headers(start: StartTarget) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        client.send(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nauthorization:"
            b" Bearer smuggled\r\n\r\n"
        )
        assert (await client.answer()).status == 200
    assert target.app.bodies == [b"abc"]
    assert b"authorization" not in dict(target.app.headers[0])


async def test_an_endless_chunk_extension_is_cut(start: StartTarget) -> None:
    target = await start()
    async with raw_client(target.url) as client:
        await client.push(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3;" + b"e" * 300_000
        )
        answer = RawAnswer(await client.rest())
    assert (answer.status, answer.json["error"]["code"]) == (400, "malformed")


async def test_a_body_in_chunks_of_one_byte_arrives_and_others_are_served_meanwhile(
    start: StartTarget,
) -> None:
    target, size = await start(), 100_000
    async with raw_client(target.url) as client, raw_client(target.url) as other:
        client.send(
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"1\r\na\r\n" * size
            + b"0\r\n\r\n"
        )
        await asyncio.wait_for(target.app.asked.wait(), 5)
        other.send(b"GET /other HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await other.answer()).status == 200
        assert target.app.bodies == [b""]  # the other's; this one is still on its way
        assert (await client.answer()).status == 200
    assert target.app.bodies == [b"", b"a" * size]


async def test_a_large_body_of_stated_length_passes_unchanged(start: StartTarget) -> None:
    target = await start()
    body = bytes(range(256)) * 16384
    async with raw_client(target.url) as client:
        await client.push(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert (await client.answer()).status == 200
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer()).status == 200
    assert target.app.bodies == [body, b""]
