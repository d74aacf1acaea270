"""Connections in great number, and no descriptors left: silent ones make room, and who is served goes on
being served."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import psutil
import pytest
from aiohttp import web

from deploy.descriptors import max_connections
from deploy.http.sockets import listen, url_of
from tests.hostile.clients import RawAnswer, raw_client, until
from tests.hostile.conftest import StartTarget
from tests.router.router_fixture import OpenHouse, chat
from tests.web_server import served_web

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_silent_connections_make_room_for_a_client_that_asks(start: StartTarget) -> None:
    target = await start(connections=8)
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(raw_client(target.url)) for _ in range(8)]
        for number in range(3):
            asking = await stack.enter_async_context(raw_client(target.url))
            asking.send(ASK)
            assert (await asking.answer()).status == 200
            assert await silent[number].rest() == b""  # the oldest went first
        assert target.cut == {"shed": 3}


async def test_what_is_shed_first_is_silence_then_idleness_then_an_unfinished_head_and_never_a_request(
    start: StartTarget,
) -> None:
    target = await start(connections=4)
    async with AsyncExitStack() as stack:
        served, unfinished, idle, silent = [
            await stack.enter_async_context(raw_client(target.url)) for _ in range(4)
        ]
        served.send(SLOW)
        unfinished.send(b"GET / HT")
        idle.send(ASK)
        assert (await idle.answer()).status == 200
        for victim in (silent, idle, unfinished):
            newcomer = await stack.enter_async_context(raw_client(target.url))
            newcomer.send(SLOW)
            assert await victim.rest() == b""
            await asyncio.sleep(0.11)  # then the others are looked through again
        refused = await stack.enter_async_context(raw_client(target.url))
        answer = RawAnswer(await refused.rest())
        assert (answer.status, answer.json["error"]["code"], answer.headers["connection"]) == (
            503,
            "too_many_connections",
            "close",
        )
        target.app.go.set()
        assert (await served.answer()).status == 200
    assert target.cut == {"shed": 3, "too_many_connections": 1}


def test_half_of_the_descriptors_are_left_for_connections_to_ranks() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with _limit(1024):
        assert max_connections() == (1024 - 32) // 2
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft


@contextmanager
def _limit(soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


@asynccontextmanager
async def _router(soft: int, hard: int) -> AsyncIterator[str]:
    """`roost router` with these limits of open files; its URL."""
    with listen("127.0.0.1", 0) as door:
        address = url_of(door)
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); from deploy.cli"
        " import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "router",
        "--backend",
        "http://127.0.0.1:1",
        "--port",
        address.rpartition(":")[2],
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(30):
            while b"the router listens" not in await process.stderr.readline():
                pass
        yield address
    finally:
        process.kill()
        await process.communicate()


async def test_a_router_with_few_descriptors_is_not_closed_by_silent_connections() -> None:
    """Before, the seventieth client of a router with 64 descriptors was reset, as were all after it, and
    nothing said so."""
    async with _router(40, 64) as address, AsyncExitStack() as stack:
        for _ in range(100):
            await stack.enter_async_context(raw_client(address))
        asking = await stack.enter_async_context(raw_client(address))
        asking.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        figures = (await asking.answer()).body.decode()
        shed = next(
            line
            for line in figures.splitlines()
            if line.startswith('roost_router_connections_cut_total{cause="shed"}')
        )
        assert float(shed.split(" ")[1]) >= 80
        assert "process_max_fds 64.0" in figures  # the soft limit was raised
        opened = next(line for line in figures.splitlines() if line.startswith("process_open_fds "))
        assert 5 < float(opened.split(" ")[1]) < 64


async def test_descriptors_that_run_out_are_the_routers_fault_and_no_ranks(
    quick_sweep: None, open_house: OpenHouse, caplog: pytest.LogCaptureFixture
) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with served_web(app) as backend:
        house = await open_house(bus=False, backends=(backend,), keepalive_seconds=0.01, probe_seconds=600.0)
        await until(lambda: house.service.view.models(live=True))
        assert (await house.get("/health")).status == 200  # a connection that is there already
        # A descriptor that is freed later would let the router connect, and then the backend could not accept.
        await until(lambda: not _connected(backend))
        with _limit(_next_descriptor()):
            answer = await house.post("/v1/chat/completions", chat())
            await until(lambda: 'cause="out_of_descriptors"' in house.service.metrics.exposition().decode())
        assert (answer.status, answer.json["error"]["code"]) == (503, "out_of_descriptors")
        assert house.service.view.models(live=True)
        assert [record for record in caplog.records if "out_of_descriptors" in record.getMessage()]


def _connected(url: str) -> bool:
    """True while this process has an end of a connection to a server."""
    port = int(url.rpartition(":")[2])
    held = psutil.Process().net_connections("tcp")
    return any(one.raddr and port in (one.laddr.port, one.raddr.port) for one in held)


def _next_descriptor() -> int:
    spare = os.dup(0)
    os.close(spare)
    return spare
