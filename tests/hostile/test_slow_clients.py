"""Clients that send slowly, say nothing, or do not read: cut after a limit, and nothing stays held for
them."""

import asyncio
import json

import pytest
from aiohttp import web

from tests.hostile.clients import RawAnswer, RawClient, raw_client, until
from tests.hostile.conftest import StartTarget
from tests.router.router_fixture import House, OpenHouse, chat
from tests.web_server import served_web

HEAD = b"POST /slow HTTP/1.1\r\nhost: x\r\n"


async def test_a_head_that_trickles_is_cut_with_408(start: StartTarget) -> None:
    target = await start(head_seconds=0.15)
    async with raw_client(target.url) as client:
        trickling = asyncio.create_task(_trickle(client, b"GET / HTTP/1.1\r\nx-a: ", 0.02))
        answer = RawAnswer(await client.rest())
        trickling.cancel()
    assert (answer.status, answer.json["error"]["code"]) == (408, "slow_head")
    assert target.cut == {"slow_head": 1}


async def _trickle(client: RawClient, first: bytes, seconds: float) -> None:
    await client.push(first)
    while await client.push(b"a"):  # noqa: ASYNC110
        await asyncio.sleep(seconds)


@pytest.mark.parametrize(
    "head", [HEAD + b"content-length: 1000000\r\n\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\nfffff\r\n"]
)
async def test_a_body_that_trickles_is_cut_with_408_and_its_request_ends(
    start: StartTarget, head: bytes
) -> None:
    target = await start(body_seconds=0.15)
    async with raw_client(target.url) as client:
        trickling = asyncio.create_task(_trickle(client, head, 0.02))
        answer = RawAnswer(await client.rest())
        trickling.cancel()
    assert (answer.status, answer.json["error"]["code"]) == (408, "slow_body")
    await asyncio.wait_for(target.app.disconnected.wait(), 5)
    assert target.app.bodies == []


async def test_a_new_connection_that_says_nothing_is_closed(start: StartTarget) -> None:
    target = await start(head_seconds=0.1)
    async with raw_client(target.url) as client:
        assert await client.rest() == b""
    assert not target.cut


async def test_a_connection_kept_alive_is_closed_when_no_request_follows_and_not_before(
    start: StartTarget,
) -> None:
    target = await start(head_seconds=0.1, idle_seconds=0.4)
    async with raw_client(target.url) as client:
        for _ in range(2):
            client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.answer()).status == 200
            await asyncio.sleep(
                0.2
            )  # longer than a head may take: silence between requests is something else
        before = asyncio.get_running_loop().time()
        assert await client.rest() == b""
        assert asyncio.get_running_loop().time() - before < 5


async def test_no_deadline_of_the_client_runs_while_it_waits_for_its_answer(start: StartTarget) -> None:
    target = await start(head_seconds=0.05, body_seconds=0.05, idle_seconds=0.05, write_seconds=0.05)
    async with raw_client(target.url) as client:
        client.send(HEAD + b"content-length: 3\r\n\r\nabc")
        await asyncio.wait_for(target.app.asked.wait(), 5)
        await asyncio.sleep(0.3)
        target.app.go.set()
        assert (await client.answer()).status == 200


async def test_a_client_that_does_not_read_its_answer_is_cut_and_its_request_ends(start: StartTarget) -> None:
    target = await start(write_seconds=0.2)
    async with raw_client(target.url, limit=1024) as client:
        client.send(b"POST /flood HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        await asyncio.wait_for(target.app.disconnected.wait(), 10)
    assert target.cut == {"unread_answer": 1}


async def test_a_client_that_reads_slowly_is_served_as_long_as_it_reads(start: StartTarget) -> None:
    target = await start(write_seconds=0.5)
    async with raw_client(target.url, limit=1024) as client:
        client.send(b"POST /flood HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        for _ in range(20):  # twice as long as the limit, and never silent for half of it
            await asyncio.wait_for(client.reader.readexactly(1 << 20), 5)
            await asyncio.sleep(0.05)
        assert not target.app.disconnected.is_set()
    assert not target.cut


async def test_an_answer_that_is_refused_before_its_body_came_closes_the_connection(
    start: StartTarget,
) -> None:
    """Else whoever has no key could upload for ever."""
    target = await start()
    async with raw_client(target.url) as client:
        client.send(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n" + bytes(1000))
        answer = RawAnswer(await client.rest())
        assert (answer.status, answer.headers["connection"], answer.body) == (401, "close", b"hello")


async def test_half_requests_are_forgotten_when_their_client_leaves(start: StartTarget) -> None:
    target = await start()
    for half in (
        b"",
        b"GET",
        HEAD,
        HEAD + b"content-length: 10\r\n\r\nabc",
        HEAD + b"transfer-encoding: chunked\r\n\r\nff\r\nabc",
    ):
        async with raw_client(target.url) as client:
            client.send(half)
            await asyncio.sleep(0.01)
    await asyncio.wait_for(target.app.disconnected.wait(), 5)
    assert target.app.bodies == []


async def test_a_stream_that_is_not_read_gives_its_booking_back(
    quick_sweep: None, open_house: OpenHouse
) -> None:
    """Before, three such streams stayed booked for as long as their clients pleased."""
    left = asyncio.Event()

    async def flood(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        try:
            while True:
                await response.write(b"data: {" + b" " * 65536 + b"}\n\n")
        finally:
            left.set()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", flood)
    app.router.add_get("/v1/models", models)
    async with served_web(app) as backend:
        house = await open_house(bus=False, write_seconds=0.3, backends=(backend,))
        await until(lambda: house.service.view.models(live=True))
        async with raw_client(house.url, limit=1024) as client:
            body = json.dumps(chat(stream=True)).encode()
            client.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
            await client.reader.readexactly(1000)
            assert await _figure(house, "rank_sequences") == 1
            await asyncio.wait_for(left.wait(), 10)
            while await _figure(house, "rank_sequences"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (
                'roost_router_connections_cut_total{cause="unread_answer"} 1.0'
                in (await house.get("/metrics")).body.decode()
            )


async def _figure(house: House, name: str) -> float:
    lines = (await house.get("/metrics")).body.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"roost_router_{name}{{"))
