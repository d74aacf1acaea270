"""A recorded vLLM of two data-parallel ranks behind the real parts: agent, NATS and router."""

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bus.config import BusConfig
from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.parts.vllm import represent
from deploy.process import alongside
from engine_adapter.config import AgentConfig
from engine_adapter.vllm.config import VllmConfig
from fleet.blocks import salted_seed
from router.config import RouterConfig
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from tests.engine_adapter.vllm.plugin_workers import SECRET
from tests.engine_adapter.vllm.recorded_server import RECORDING, RecordedVllm, recorded_vllm
from tests.router.router_fixture import archive, bpe, until

AGENT = AgentConfig(heartbeat_seconds=0.2)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RecordedVllm]:
    with_tokenizer = archive(bpe(257), {"eos_token": "<eos>", "chat_template": "x"})
    zipfile.ZipFile(io.BytesIO(with_tokenizer)).extractall(tmp_path)
    async with recorded_vllm() as server:
        server.models["data"][0]["root"] = str(tmp_path)
        yield server


@asynccontextmanager
async def routed(nats_url: str, server: RecordedVllm, subjects: Subjects) -> AsyncIterator[RouterService]:
    """A router and an agent on NATS, once the router may send to the engine."""
    config = VllmConfig(urls=(server.url,), listen="127.0.0.1:0", plugin_seconds=0, load_seconds=0.1)
    buses = [
        await NatsBus.connect(nats_url, subjects, BusConfig(namespace=subjects.namespace)) for _ in range(2)
    ]
    router = RouterService(buses[0], subjects, RouterConfig())
    representing = represent(buses[1], subjects, "v", config, None, SECRET, AGENT)
    try:
        async with alongside(router.run(), "router"), alongside(representing, "agent"):
            await until(lambda: router.ready and [one.ranks for one in router.view.engines()] == [2], 20)
            yield router
    finally:
        for bus in buses:
            await bus.close()


async def until_overlap(router: RouterService, request: dict[str, Any], blocks: int) -> None:
    """Wait until the router knows this number of usable blocks of a recorded request's prompt on its rank.

    vLLM computes the last token of a prompt anew.
    """
    usable = (len(request["prompt"]) - 1) // 32

    def found() -> int:
        known = {one.rank: one.overlap_blocks for one in decide(router, request).candidates}
        return min(known.get(request["rank"], -1), usable)

    await until(lambda: found() == blocks, 10)


def decide(router: RouterService, request: dict[str, Any]) -> DecisionRecord:
    """The router's decision on a request of the recording."""
    log = RequestLog("r", "d", "/v1/completions", 0.0)
    log.model = "small"
    prompt = TokenPrompt(request["prompt"], salted_seed(request["salt"]))
    routing = RoutingRequest("small", prompt, len(request["prompt"]), 8, None, keys=log.keys())
    decision, booking = router.book(log, routing, "", Attempt())
    router.release(booking)
    return decision.record()


async def test_the_router_finds_what_vllm_has_cached_and_sees_its_load(
    nats_url: str, server: RecordedVllm
) -> None:
    """For each recorded request: the overlap that the router sees before it is what vLLM then reused."""
    compared = 0
    async with asyncio.timeout(90), routed(nats_url, server, Subjects("recorded")) as router:
        for number, step in enumerate(RECORDING["steps"]):
            if number:
                await server.publish(number - 1, before=number - 2)
            if step["what"] in ("under load", "cleared"):
                continue
            request, blocks = step["requests"][0], step["requests"][0]["cached"] // 32
            await until_overlap(router, request, blocks)
            compared += 1
            if blocks > 2:
                assert decide(router, request).chosen == f"v/{request['rank']}"
        server.metrics = RECORDING["loaded"]  # rank 1 is busy
        other = {"prompt": [7] * 40, "salt": ""}
        await until(lambda: all(decide(router, other).chosen == "v/0" for _ in range(8)), 10)
    assert compared >= 20
