"""Simulated engines on a NATS server before a router: what a client gets, also when an engine dies under its
request."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import pytest

from bus.nats import NatsBus
from bus.protocol.subjects import Subjects
from deploy.parts.simulated import SimulatedHost
from router.api.app import create_app
from router.config import RouterConfig
from router.service import RouterService
from tests.router.router_fixture import running, served_app, until
from tests.simulated_engines import simulated_engine
from tests.system.fleets import Fleet, Home

ASK = {
    "model": "demo",
    "seed": 5,
    "max_tokens": 60,
    "messages": [{"role": "user", "content": "Tell me about the river and the old bridge."}],
}
_numbers = itertools.count()


@dataclass
class Deployment:
    """Two engines of two ranks, a router, and its client."""

    hosts: dict[str, SimulatedHost]
    service: RouterService
    url: str
    http: aiohttp.ClientSession

    async def ask(self, **changes: Any) -> tuple[str, str]:
        """The text of an unbroken answer, and the id of the decision."""
        async with self.http.post(f"{self.url}/v1/chat/completions", json=ASK | changes) as answer:
            outcomes = await answer.json()
            assert answer.status == 200, outcomes
            return outcomes["choices"][0]["message"]["content"], answer.headers["x-roost-decision-id"]

    async def foreseen(self) -> dict[str, Any]:
        """What would be decided now."""
        async with self.http.post(f"{self.url}/v1/route", json=ASK) as answer:
            record: dict[str, Any] = await answer.json()
            return record

    async def decided(self, decision: str) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/v1/decisions/{decision}") as answer:
            record: dict[str, Any] = await answer.json()
            return record


@pytest.fixture
async def deployment(nats_url: str) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        subjects = Subjects(f"simulated{next(_numbers)}")

        async def bus() -> NatsBus:
            client = await NatsBus.connect(nats_url, subjects)
            stack.push_async_callback(client.close)
            return client

        settings = {"time_scale": 1.0, "drain_seconds": 0.2}
        hosts = {
            name: await stack.enter_async_context(simulated_engine(await bus(), subjects, name, **settings))
            for name in ("left", "right")
        }
        config = RouterConfig()
        service = RouterService(await bus(), subjects, config)
        await stack.enter_async_context(running(service))
        url = await stack.enter_async_context(served_app(create_app(service)))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: len(service.view.target_table("demo").targets) == 4 and service.ready)
        yield Deployment(hosts, service, url, http)


async def test_a_conversation_returns_to_the_rank_that_knows_its_prefix(deployment: Deployment) -> None:
    text, decision = await deployment.ask()
    assert len(text.split()) > 40
    first = (await deployment.decided(decision))["chosen"]
    async with asyncio.timeout(5):
        while not (await deployment.foreseen())["candidates"][0]["overlap_blocks"]:  # noqa: ASYNC110 KV events arrive when they do
            await asyncio.sleep(0.01)
    again, decision = await deployment.ask()
    assert again == text
    second = await deployment.decided(decision)
    assert second["chosen"] == first
    assert max(one["overlap_blocks"] for one in second["candidates"]) > 0


async def test_an_answer_goes_on_elsewhere_word_for_word_when_its_engine_dies(deployment: Deployment) -> None:
    whole, _ = await deployment.ask()
    pieces: list[str] = []
    async with deployment.http.post(
        f"{deployment.url}/v1/chat/completions", json=ASK | {"stream": True}
    ) as answer:
        chosen = (await deployment.decided(answer.headers["x-roost-decision-id"]))["chosen"].split("/")[0]
        async for line in answer.content:
            if line.startswith(b"data: {"):
                outcomes = json.loads(line[6:])
                assert "error" not in outcomes, outcomes
                pieces += [one["delta"].get("content") or "" for one in outcomes["choices"]]
            if len(pieces) == 12:
                await deployment.hosts[chosen].kill()
    assert "".join(pieces) == whole


@pytest.mark.slow
def test_a_simulated_fleet_starts_answers_survives_a_death_and_leaves_nothing(home: Home) -> None:
    fleet = Fleet(
        home, "--engine", "simulated", "--engines", "2", "--ranks", "2", "--model-shape", "qwen3-235b"
    )
    try:
        ask = ASK | {"model": "qwen3-235b", "max_tokens": 8}
        assert fleet.http.post("/v1/chat/completions", json=ask).status_code == 200
        url = next(
            line.split()[1]
            for line in fleet.up.output.splitlines()
            if line.strip().startswith("engine-1 http")
        )
        assert httpx.post(f"{url}/simulate", json={"fault": "die"}, trust_env=False).status_code == 401
        assert (
            httpx.post(
                f"{url}/simulate", json={"fault": "die"}, headers=fleet.to_ranks, trust_env=False
            ).status_code
            == 200
        )
        fleet.up.says("engine-1 serves again")
        assert fleet.http.post("/v1/chat/completions", json=ask).status_code == 200
    finally:
        fleet.http.close()
        assert fleet.up.stop() == 0
