"""Placements by Roost's own commands, on a real vLLM behind Roost's router, while it streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from tests.conftest import free_port
from tests.vllm.roost import NAME, Agent, Fleet, random_map, roost, until_served
from tests.vllm.server import BLOCK, Options, Vllm, vllm
from tests.vllm.traffic import Prompt, prompts, streaming, unbroken

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@dataclass
class Stack:
    fleet: Fleet
    agent: Agent
    server: Vllm
    expected: dict[Prompt, list[int]]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tp", "dp"])
async def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """One vLLM behind Roost for all tests of a module: with tensor, then with data parallelism."""
    folder, port = tmp_path_factory.mktemp(f"roost-{request.param}"), free_port()
    async with roost(folder) as fleet:
        agent = Agent(fleet.live, f"http://127.0.0.1:{port}", free_port(), folder)
        await agent.start()
        try:
            options = Options(
                attention=request.param,
                port=port,
                kv_port=free_port(),
                agent=f"127.0.0.1:{agent.port}",
                secret=agent.secret,
            )
            async with vllm(options, folder) as server:
                await fleet.until_joined()
                await until_served(fleet)
                yield Stack(fleet, agent, server, await unbroken(server, prompts(12)))
        finally:
            await agent.end()


async def test_twenty_placements_by_commands_come_into_force_under_streams_and_change_no_token(
    stack: Stack, tmp_path: Path
) -> None:
    fleet = stack.fleet
    rng = np.random.default_rng(3)
    first = await fleet.now()
    assert first is not None
    async with streaming(fleet, stack.expected) as traffic:
        for number in range(20):
            before = (await fleet.until_joined()).now
            if number % 5 == 4:  # the others by plans: an expert by its name
                layer, rank = int(rng.integers(before.layers)), int(rng.integers(before.ranks))
                missing = np.setdiff1d(np.arange(before.experts), before.on_rank(rank)[layer])
                expert = f"{layer}/{int(rng.choice(missing))}"
                await fleet.command("migrate", "--expert", expert, "--to", f"{NAME}/{rank}")
            else:
                assert await fleet.apply(random_map(before, number)) == ""
            after = (await fleet.until_joined()).now
            assert after.epoch == before.epoch + 1
        await asyncio.sleep(2)
    last = await fleet.now()
    assert last is not None
    assert last.joined.worker_id == first.joined.worker_id, "it was the same incarnation throughout"
    assert traffic.finished >= 10
    assert (traffic.differ, traffic.failed) == ([], [])
    status = json.loads(await fleet.command("status", "--json"))
    (engine,) = [one for one in status["engines"] if one["engine"] == NAME]
    assert not any(rank["draining"] for rank in engine["ranks"]), "no slot's digest was wrong"
    assert engine["epoch"] == last.now.epoch


async def test_the_last_plan_is_rolled_back(stack: Stack) -> None:
    fleet = stack.fleet
    before = (await fleet.until_joined()).now
    assert await fleet.apply(random_map(before, 99)) == ""
    await fleet.command("rollback", NAME)
    after = (await fleet.until_joined()).now
    assert after.epoch == before.epoch + 2
    ranks = range(before.ranks)
    assert [set(after.on_rank(rank)[0]) for rank in ranks] == [set(before.on_rank(rank)[0]) for rank in ranks]


async def test_a_turn_of_a_conversation_goes_where_its_prefix_is(stack: Stack) -> None:
    """The chosen rank and the blocks that lie there, by the router's own records."""
    fleet, asked = stack.fleet, prompts(4, seed=8)
    async with httpx.AsyncClient(timeout=120, base_url=fleet.url) as client:

        async def decided(text: str) -> dict[str, Any]:
            body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert '"prompt_token_ids":null' in answer.text, "as vLLM answers those who do not ask for ids"
            return (await client.get(f"/v1/decisions/{answer.headers['x-roost-decision-id']}")).json()

        for prompt in asked:
            text = "".join(map(chr, prompt)) * 6
            turns = [await decided(text)]
            await asyncio.sleep(1.5)  # events of its blocks arrive
            turns += [await decided(text + " and then?") for _ in range(3)]
            assert len({turn["chosen"] for turn in turns}) == 1, json.dumps(turns, indent=1)
            shared = turns[0]["prompt_tokens"] // BLOCK - 1  # what ends a prompt differs
            for turn in turns[1:]:
                there = next(one for one in turn["candidates"] if f"vllm/{one['rank']}" == turn["chosen"])
                assert turn["hashed"] == "ids"
                assert there["overlap_blocks"] >= shared > 0, json.dumps(turns, indent=1)
