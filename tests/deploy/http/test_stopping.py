"""A router that is asked to stop: answers under way are finished, the rest end properly, and nothing new is
taken."""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bus.memory import MemoryBroker, MemoryBus
from deploy.http.sockets import listen, url_of
from deploy.parts.router import serve
from router.config import RouterConfig
from tests.hostile.clients import raw_client, until
from tests.simulated_engines import simulated_engine
from tests.web_server import served_web

PIECE = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
LAST = b"data: [DONE]\n\n"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


class Backend:
    """A plain server whose answers go on until they are let end."""

    def __init__(self) -> None:
        self.asked = 0
        self.end = asyncio.Event()

    async def chat(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.asked += 1
        if not body.get("stream"):
            await self.end.wait()
            return web.json_response({"choices": [{"message": {"content": "whole"}}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        await response.write(PIECE)
        await self.end.wait()
        await response.write(LAST)
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        return app


class Running:
    """A router as `roost router` runs it, in this process; `stop` is what SIGTERM does."""

    def __init__(self, url: str, task: "asyncio.Task[None]", http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http
        self._task = task

    def stop(self) -> None:
        self._task.cancel()

    async def stopped(self, seconds: float = 10.0) -> None:
        """TimeoutError when it does not end."""
        await asyncio.wait([self._task], timeout=seconds)
        if not self._task.done():
            raise TimeoutError("the router did not stop")

    def post(self, **more: Any) -> Any:
        return self.http.post(f"{self.url}/v1/chat/completions", json={"model": "demo", **HELLO, **more})


@asynccontextmanager
async def router(**settings: Any) -> AsyncIterator[tuple[Running, Backend]]:
    backend = Backend()
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served_web(backend.app()))
        listener = listen("127.0.0.1", 0)
        address = url_of(listener)
        task = asyncio.create_task(serve(listener, None, RouterConfig(backends=(url,), **settings), None))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            async with asyncio.timeout(10):
                while (await http.get(f"{address}/ready")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            yield Running(address, task, http), backend
        finally:
            backend.end.set()
            task.cancel()
            await asyncio.wait([task])


def no_traceback(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.exc_info is not None]


async def test_answers_under_way_are_finished_and_nothing_new_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        router() as (running, backend),
        raw_client(running.url) as kept,
        raw_client(running.url) as silent,
    ):
        async with running.post(stream=True) as stream:
            whole = asyncio.create_task(_read(running.post()))
            await until(lambda: backend.asked == 2)
            assert await stream.content.readexactly(len(PIECE)) == PIECE
            kept.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await kept.answer()).status == 200
            running.stop()
            assert await kept.rest() == b""  # idle: closed at once
            with pytest.raises(OSError, match="Connect"):
                async with raw_client(running.url):
                    pass
            silent.send(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
            ready = await silent.answer()
            assert (ready.status, ready.json["ready"], ready.headers["connection"]) == (503, False, "close")
            assert "draining" in ready.json["missing"][0]
            backend.end.set()
            assert await stream.content.read() == LAST
        assert await whole == (200, b'{"choices": [{"message": {"content": "whole"}}]}')
        await running.stopped(2)
    assert no_traceback(caplog)


async def _read(asking: Any) -> tuple[int, bytes]:
    async with asking as answer:
        return answer.status, await answer.read()


async def test_a_request_on_a_connection_that_is_still_open_is_refused_while_the_router_drains() -> None:
    async with router() as (running, backend), raw_client(running.url) as other:
        async with running.post(stream=True):
            await until(lambda: backend.asked == 1)
            running.stop()
            body = json.dumps({"model": "demo", **HELLO}).encode()
            other.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
            answer = await other.answer()
            assert (answer.status, answer.headers["connection"], answer.headers["retry-after"]) == (
                503,
                "close",
                "1",
            )
            assert "stopping" in answer.json["error"]["message"]
            backend.end.set()
        await running.stopped(2)


async def test_what_is_not_over_in_time_ends_with_an_error_that_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with router(drain_seconds=0.3) as (running, backend), raw_client(running.url) as client:
        body = json.dumps({"model": "demo", "stream": True, **HELLO}).encode()
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        whole = asyncio.create_task(_read(running.post()))
        await until(lambda: backend.asked == 2)
        caplog.set_level(logging.INFO)
        running.stop()
        head, _, stream = (await client.rest()).partition(b"\r\n\r\n")
        assert b" 200 OK" in head
        assert b"could not finish this answer in time" in stream
        assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")  # the last chunk, too: a proper end
        status, output = await whole
        assert status == 503
        assert json.loads(output)["error"]["code"] == "not_ready"
        await running.stopped(3)
    assert no_traceback(caplog)
    assert [record for record in caplog.records if "2 requests are broken off" in record.getMessage()]


async def test_with_nothing_under_way_a_stop_is_quick_however_long_it_might_drain() -> None:
    async with (
        router(drain_seconds=600.0) as (running, _),
        raw_client(running.url),
    ):  # a silent client holds nothing up
        running.stop()
        await running.stopped(2)


async def test_before_it_stops_it_may_take_requests_for_a_while_though_it_is_not_ready() -> None:
    async with router(pre_stop_seconds=600.0) as (running, backend):
        backend.end.set()
        running.stop()
        async with asyncio.timeout(5):
            while (await _read(running.http.get(f"{running.url}/ready")))[0] != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await _read(running.post()))[0] == 200
        running.stop()


async def test_a_second_signal_ends_the_process_at_once() -> None:
    backend = Backend()
    async with served_web(backend.app()) as url, aiohttp.ClientSession() as http:
        with listen("127.0.0.1", 0) as listener:
            address = url_of(listener)
        port = address.rpartition(":")[2]
        command = [
            sys.executable,
            "-c",
            "from deploy.cli import main; main()",
            "router",
            "--backend",
            url,
            "--port",
            port,
        ]
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(30):
                while not await _is_ready(http, address):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with http.post(
                f"{address}/v1/chat/completions", json={"model": "demo", "stream": True, **HELLO}
            ) as stream:
                assert await stream.content.readexactly(len(PIECE)) == PIECE
                process.send_signal(signal.SIGTERM)
                assert process.stderr is not None
                async with asyncio.timeout(10):
                    while b"the router stops" not in await process.stderr.readline():
                        pass
                process.send_signal(signal.SIGINT)
                assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGINT
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _is_ready(http: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with http.get(f"{address}/ready") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def test_what_a_rank_cannot_finish_in_time_ends_with_an_error_that_its_router_understands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stream that has begun ends with an error event, one that has not with 503: both are continued
    elsewhere."""
    broker = MemoryBroker()
    begun = {
        "prompt": [1, 2, 3],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with aiohttp.ClientSession() as http:
        async with simulated_engine(
            MemoryBus(broker), broker.subjects, ranks=1, time_scale=1.0, drain_seconds=0.1
        ) as host:
            url = f"{host.identity.urls[0]}/v1/completions"
            whole = asyncio.create_task(_read(http.post(url, json=begun | {"stream": False})))
            await asyncio.sleep(0)  # it is sent before the other
            stream = await http.post(url, json=begun)
            for _ in range(9):  # steps in which both run
                assert await stream.content.readline()
        events = (await stream.content.read()).split(b"\n\n")
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["message"] == "the rank is stopping"
        status, output = await whole
        assert (status, json.loads(output)["error"]["code"]) == (503, "engine_failed")
    assert no_traceback(caplog)
