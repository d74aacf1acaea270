"""The plain door before a server that does what a test says."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from engine_adapter.engine import EngineFailed
from engine_adapter.openai_backend import BackendAgent, BackendAgentConfig
from fleet.facts.engines import Capabilities
from tests.web_server import served_web


class Server:
    """A list of models, or whatever answer a test sets."""

    def __init__(self) -> None:
        self.models: list[dict[str, object]] = [
            {"id": "m-1", "object": "model", "max_model_len": 4096},
            {"id": "m-2"},
        ]
        self.status = 200
        self.raw: bytes | None = None
        self.keys: list[str | None] = []
        self.requested = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        self.requested.set()
        body = json.dumps({"object": "list", "data": self.models}).encode() if self.raw is None else self.raw
        return web.Response(body=body, status=self.status, content_type="application/json")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server, app = Server(), web.Application()
    app.router.add_get("/v1/models", server.answer)
    async with served_web(app) as server.url:
        yield server


def engine(
    server: Server, *, url: str | None = None, model: str | None = None, api_key: str | None = None
) -> BackendAgent:
    return BackendAgent(
        BackendAgentConfig(
            url=url or server.url,
            model=model,
            api_key=api_key,
            probe_seconds=0.02,
            answer_seconds=0.5,
            misses=2,
        )
    )


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
async def test_it_describes_what_the_server_lists_and_declares_what_it_cannot_report(
    server: Server, tail: str
) -> None:
    plain = engine(server, url=server.url + tail)
    await plain.start()
    about = plain.description
    assert (about.model, about.max_context, about.ranks, about.rank) == ("m-1", 4096, 1, 0)
    assert about.capabilities == Capabilities(kv_events=False, load=False, experts=False, token_ids=False)
    assert (about.shape, about.tokenizer, plain.placement) == (None, None, None)


async def test_a_server_that_isolates_tenants_is_declared_so(server: Server) -> None:
    plain = BackendAgent(BackendAgentConfig(url=server.url, isolates_tenants=True))
    await plain.start()
    assert plain.description.capabilities.isolates_tenants


async def test_a_named_model_is_taken_and_its_context_has_a_default(server: Server) -> None:
    plain = engine(server, model="m-2")
    await plain.start()
    assert (plain.description.model, plain.description.max_context) == ("m-2", 131_072)


async def test_the_key_is_sent_and_never_shown(server: Server) -> None:
    plain = engine(server, api_key="secret")
    await plain.start()
    assert server.keys == ["Bearer secret"]
    assert "secret" not in repr(BackendAgentConfig(url=server.url, api_key="secret"))


@pytest.mark.parametrize(
    ("status", "raw", "code"),
    [
        (401, b"{}", "refuses the key .HTTP 401.; give the right one with --api-key-file"),
        (500, b"{}", "HTTP 500; is this an OpenAI-compatible server"),
        (302, b"{}", "HTTP 302"),
        (200, b"<html>", "no list of models"),
        (200, b'{"data": [{"name": "x"}]}', "no list of models.*id"),
        (200, b'{"data": []}', "lists no model"),
        (200, b" " * 2_000_000, "longer than 1048576 bytes"),
    ],
)
async def test_a_server_that_is_none_is_refused_with_the_reason(
    server: Server, status: int, raw: bytes, code: str
) -> None:
    server.status, server.raw = status, raw
    with pytest.raises(EngineFailed, match=code):
        await engine(server).start()


async def test_a_model_the_server_lacks_is_refused_with_those_it_has(server: Server) -> None:
    with pytest.raises(EngineFailed, match="does not serve 'gpt', but 'm-1', 'm-2'; name one with --model"):
        await engine(server, model="gpt").start()


async def test_nobody_at_the_address_is_an_error_that_names_it(server: Server, unused_port: int) -> None:
    with pytest.raises(EngineFailed, match=f"http://127.0.0.1:{unused_port}/v1/models does not answer"):
        await engine(server, url=f"http://127.0.0.1:{unused_port}").start()


async def test_a_server_that_stays_away_fails_the_engine_and_one_miss_does_not(server: Server) -> None:
    plain = engine(server)
    await plain.start()
    running = asyncio.create_task(plain.run())
    server.status = 503
    server.requested.clear()
    await server.requested.wait()
    server.status = 200
    for _ in range(3):
        server.requested.clear()
        await server.requested.wait()
    assert not running.done()
    server.status = 503
    with pytest.raises(EngineFailed, match="HTTP 503"):
        await asyncio.wait_for(running, 5)
    server.status = 200
    await plain.start()  # and back


async def test_a_model_that_vanishes_fails_the_engine(server: Server) -> None:
    plain = engine(server)
    await plain.start()
    server.models = [{"id": "other"}]
    with pytest.raises(EngineFailed, match="does not serve 'm-1', but 'other'"):
        await asyncio.wait_for(plain.run(), 5)


@pytest.fixture
async def unused_port() -> int:
    holder = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = int(holder.sockets[0].getsockname()[1])
    holder.close()
    await holder.wait_closed()
    return port


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="must start with http"):
        BackendAgentConfig(url="server:8000")
    with pytest.raises(ValueError, match="misses"):
        BackendAgentConfig(url="http://a", misses=0)


async def test_the_experts_of_its_model_are_told_when_they_are_known(server: Server) -> None:
    plain = BackendAgent(BackendAgentConfig(url=server.url, layers=58, experts=256, top_k=8))
    await plain.start()
    shape = plain.description.shape
    assert shape is not None
    assert (shape.layers, shape.experts, shape.top_k) == (58, 256, 8)
    assert not plain.description.capabilities.experts


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layers": 58}, "not only layers"),
        ({"experts": 256, "top_k": 8}, "not only experts and top_k"),
        ({"layers": 0, "experts": 256, "top_k": 8}, "layers must be at least 1"),
        ({"layers": 58, "experts": 4, "top_k": 8}, "top_k 8 exceeds"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BackendAgentConfig(url="http://x", **fields)  # type: ignore[arg-type]
