"""A plain server as an engine that comes and goes with it."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from bus.claims import NameTaken
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.parts.static_backend import represent
from deploy.process import alongside, first_of
from engine_adapter.config import AgentConfig
from engine_adapter.openai_backend import BackendAgentConfig
from fleet.facts.engines import EngineJoined, EngineLeft
from tests.web_server import served_web

SUBJECTS = Subjects()
CONFIG = AgentConfig(heartbeat_seconds=0.05, lease_seconds=0.3)


class Server:
    url = ""
    status = 200


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server, app = Server(), web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.Response(body=json.dumps({"data": [{"id": "m"}]}), status=server.status)

    app.router.add_get("/v1/models", models)
    async with served_web(app) as server.url:
        yield server


async def test_it_joins_leaves_with_the_reason_and_joins_again_as_another(server: Server) -> None:
    broker = MemoryBroker(SUBJECTS)
    plain = BackendAgentConfig(url=server.url, probe_seconds=0.02, answer_seconds=1, misses=2)
    server.status = 503  # not there yet: waited for
    async with (
        asyncio.timeout(10),
        alongside(represent(MemoryBus(broker), SUBJECTS, "plain", plain, CONFIG), "plain"),
    ):
        received = MemoryBus(broker).replay(SUBJECTS.membership("plain"))
        server.status = 200
        joined = (await anext(received)).message
        server.status = 503
        left = (await anext(received)).message
        server.status = 200
        again = (await anext(received)).message
    assert isinstance(joined, EngineJoined)
    assert isinstance(left, EngineLeft)
    assert isinstance(again, EngineJoined)
    assert (joined.engine, joined.urls, joined.model) == ("plain", (server.url,), "m")
    assert left.worker_id == joined.worker_id != again.worker_id
    assert "HTTP 503" in left.reason


async def test_a_name_that_is_taken_ends_it(server: Server) -> None:
    broker = MemoryBroker(SUBJECTS)
    plain = BackendAgentConfig(url=server.url, probe_seconds=0.02)
    async with (
        asyncio.timeout(10),
        alongside(represent(MemoryBus(broker), SUBJECTS, "plain", plain, CONFIG), "plain"),
    ):
        await anext(MemoryBus(broker).replay(SUBJECTS.membership("plain")))
        with pytest.raises(ExceptionGroup) as caught:
            await represent(MemoryBus(broker), SUBJECTS, "plain", plain, CONFIG)
    assert first_of(caught.value, (NameTaken,)) is not None
