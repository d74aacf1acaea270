"""A fake SGLang behind the real parts: its agent joins and leaves with it, and a router serves from it by ids."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.client.fleet_status import members
from deploy.http.sockets import listen, url_of
from deploy.parts import sglang, static_backend
from deploy.parts.simulated import hosted
from deploy.process import alongside
from deploy.sections import WorkerConfig
from deploy.views.status import abilities
from engine_adapter.agent.membership import AgentIdentity
from engine_adapter.config import AgentConfig
from engine_adapter.openai_backend import BackendAgentConfig
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.facts.engines import EngineJoined, EngineLeft
from router.api.app import create_app
from router.config import RouterConfig
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from tests.engine_adapter.sglang.fake_server import EXPERTS, FakeSglang, continued, fake_sglang
from tests.router.conftest import served_app
from tests.router.foreign_servers import ForeignServer, saying, serving
from tests.router.router_fixture import until

SUBJECTS = Subjects()
AGENT = AgentConfig(heartbeat_seconds=0.05, lease_seconds=0.3)
PROMPT = "a prompt that is longer than three pages of sixteen tokens each"


@pytest.fixture
async def server() -> AsyncIterator[FakeSglang]:
    async with asyncio.timeout(30), fake_sglang() as one:
        yield one


@contextlib.asynccontextmanager
async def represented(broker: MemoryBroker, server: FakeSglang, name: str = "s") -> AsyncIterator[None]:
    config = SglangConfig(url=server.url, load_seconds=0.02, misses=2, routed_share=1.0)
    worker = WorkerConfig(name=name, drain_seconds=0.2)
    work = sglang.represent(MemoryBus(broker), SUBJECTS, name, config, None, worker, AGENT)
    async with alongside(work, name):
        yield


@contextlib.asynccontextmanager
async def routed(broker: MemoryBroker, ranks: int) -> AsyncIterator[tuple[RouterService, str]]:
    """A router on the same bus, once it may send to this number of targets in all; and its URL."""
    config = RouterConfig(dead_after_seconds=60.0)
    service = RouterService(MemoryBus(broker), SUBJECTS, config)
    async with alongside(service.run(), "router"), served_app(create_app(service), config) as url:
        await until(lambda: service.ready and _targets(service) == ranks, 20)
        yield service, url


def _targets(service: RouterService) -> int:
    models = service.view.models(live=True)
    return sum(len(service.view.target_table(model).targets) for model in models)


def overlaps(service: RouterService, ids: list[int]) -> dict[int, int]:
    """Blocks of a prompt that the router knows, by rank."""
    log = RequestLog("r", "d", "/v1/completions", 0.0)
    log.model, tokenizer = "small", service.view.target_table("small").sent_tokenizer
    routing = RoutingRequest("small", TokenPrompt(ids), len(ids), 8, tokenizer, keys=log.keys())
    decision, booking = service.book(log, routing, "", Attempt())
    service.release(booking)
    return {one.rank: one.overlap_blocks for one in decision.record().candidates}


async def completed(url: str, **about: Any) -> dict[str, Any]:
    body = {
        "model": "small",
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        **about,
    }
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_it_joins_with_all_that_it_found(server: FakeSglang) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, server):
        joined = (await anext(MemoryBus(broker).replay(SUBJECTS.membership("s")))).message
    assert isinstance(joined, EngineJoined)
    assert (joined.engine_kind, joined.model, len(set(joined.urls))) == ("sglang", "small", 2)
    assert (joined.block_size, joined.kv_blocks, joined.max_context) == (16, 48, 256)
    can = joined.capabilities
    assert (can.kv_events, can.load, can.experts, can.token_ids, can.isolates_tenants) == (True,) * 5
    assert joined.tokenizer is not None
    assert joined.placement is None
    assert joined.shape is not None
    assert joined.shape.experts == EXPERTS


async def test_it_leaves_with_the_server_and_comes_back_as_another_incarnation(server: FakeSglang) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, server):
        received = MemoryBus(broker).replay(SUBJECTS.membership("s"))
        first = (await anext(received)).message
        server.up = False
        left = (await anext(received)).message
        server.up = True
        again = (await anext(received)).message
    assert isinstance(first, EngineJoined)
    assert isinstance(left, EngineLeft)
    assert isinstance(again, EngineJoined)
    assert "HTTP 503" in left.reason
    assert again.worker_id != first.worker_id


async def test_a_router_serves_from_it_by_ids_and_finds_what_is_cached(server: FakeSglang) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, server), routed(broker, 2) as (service, url):
        first = await completed(url)
        ids, rank = (server.requests[0][name] for name in ("input_ids", "data_parallel_rank"))
        blocks = len(ids) // 16
        await until(lambda: overlaps(service, ids)[rank] == blocks)
        second = await completed(url)
    expected = bytes(continued(ids, 12)).decode()
    assert [one["choices"][0]["text"] for one in (first, second)] == [expected] * 2
    assert server.requests[1]["data_parallel_rank"] == rank, "the prefix is cached there"
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * blocks


async def test_fields_of_sampling_reach_it_and_others_are_refused_by_name(server: FakeSglang) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with represented(broker, server), routed(broker, 2) as (_, url):
        await completed(url, presence_penalty=0.5, response_format={"type": "json_object"}, user="me")
        body = {"model": "small", "prompt": PROMPT, "bad_words": ["x"]}
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as answer:
            refused = answer.status, (await answer.json())["error"]["message"]
    parameters = server.requests[0]["sampling_params"]
    assert (parameters["presence_penalty"], parameters["json_schema"]) == (0.5, '{"type": "object"}')
    assert refused[0] == 400
    assert "bad_words" in refused[1]


async def test_a_stream_that_breaks_is_continued_by_another_sglang(server: FakeSglang) -> None:
    broker = MemoryBroker(SUBJECTS)
    async with fake_sglang(ranks=1, incremental=False) as other, represented(broker, server):
        async with represented(broker, other, "t"), routed(broker, 3) as (_, url):
            server.cut_after = other.cut_after = 5
            body = {"model": "small", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True}
            text = ""
            async with aiohttp.ClientSession() as http:
                async with http.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}) as answer:
                    async for line in answer.content:
                        if len(server.requests) + len(other.requests) > 1:
                            server.cut_after = other.cut_after = None
                        if line.startswith(b"data: {"):
                            text += json.loads(line[6:])["choices"][0]["text"]
    asked = [*server.requests, *other.requests]
    prompt = min((one["input_ids"] for one in asked), key=len)
    assert len(asked) >= 2
    assert text == bytes(continued(prompt, 12)).decode()


async def test_engines_of_several_kinds_serve_behind_one_router(server: FakeSglang) -> None:
    """An SGLang, a simulated engine and a server of text: each answers for its model, and says what it lacks."""
    broker = MemoryBroker(SUBJECTS)
    plain = ForeignServer("p", saying({"id": "x", "choices": [{"text": "plain", "index": 0}]}), ("m",))
    door = listen("127.0.0.1", 0)
    who = AgentIdentity(engine="sim", worker_id=5, node="n", urls=(url_of(door),))
    simulated = SimulatedConfig(model="sim", ranks=1, time_scale=0.01)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serving(plain))
        await stack.enter_async_context(represented(broker, server))
        await stack.enter_async_context(
            hosted(MemoryBus(broker), SUBJECTS, who, [door], simulated, AGENT, drain_seconds=0.2)
        )
        backend = BackendAgentConfig(url=plain.url, model="m")
        agent = static_backend.represent(MemoryBus(broker), SUBJECTS, "plain", backend, AGENT)
        await stack.enter_async_context(alongside(agent, "plain"))
        _, url = await stack.enter_async_context(routed(broker, 4))
        texts = {
            model: (await completed(url, model=model))["choices"][0]["text"]
            for model in ("small", "sim", "m")
        }
        engines = await members(MemoryBus(broker), SUBJECTS)
    assert texts["m"] == "plain"
    assert texts["small"] == bytes(continued(server.requests[0]["input_ids"], 12)).decode()
    assert texts["sim"]
    told = {one.joined.engine: abilities(one.joined) for one in engines}
    assert told["plain"].startswith("OpenAI-compatible: more fields; without exact KV")
    assert told["s"] == (
        "SGLang (never run with the real engine): exact KV, load, experts, choice of rank, continuation,"
        " more fields, tenants apart; without migration, shares, layouts"
    )
    assert told["sim"].startswith("simulated: exact KV, load, experts, continuation")
