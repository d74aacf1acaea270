"""Our engines in both roles, behind Roost's router and behind an unmodified frontend."""

import asyncio
from typing import Any

import pytest

from tests.dynamo.deployment import NAMESPACE, DynamoDeployment, DynamoFrontend, DynamoProcess
from tests.dynamo.test_pairs import decisions
from tests.dynamo.test_router import frontend, roost

pytestmark = pytest.mark.slow
TEXT = "The owl sat in the old tower and thought about the long way home. " * 4


async def start(
    dynamo: DynamoDeployment, name: str, mode: str, *options: str, namespace: str = "workers"
) -> DynamoProcess:
    about = ("--dynamo", namespace, "--disaggregation-mode", mode, *options)
    return await dynamo.worker(name, *about)


async def text(door: DynamoFrontend, number: int, **fields: Any) -> str:
    whole = await door.complete(f"{number} {TEXT}", max_tokens=24, ignore_eos=True, temperature=0, **fields)
    return str(whole["choices"][0]["text"])


async def cached(door: DynamoFrontend, number: int) -> int:
    whole = await door.complete(f"{number} {TEXT}", max_tokens=4, ignore_eos=True, temperature=0)
    return int(whole["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("engine", ["simulated", "embedded"])
async def test_roost_serves_by_pairs_as_one_engine_alone_would(dynamo: DynamoDeployment, engine: str) -> None:
    kind = ("--engine", engine, "--ranks", "1")
    prefill = await start(dynamo, "prefill", "prefill", *kind)
    await start(dynamo, "decode", "decode", *kind)
    url = await roost(dynamo)
    door = await frontend(dynamo)
    by_pair = [await text(door, number) for number in range(4)]
    records = await decisions(url, dynamo, 4)
    for record in records:
        assert record["prefill"]["failure"] is None
        assert record["prefill"]["activated_tokens"] > 0
    assert await cached(door, 9) >= 64, "the decode worker found the prompt in its cache"
    prefill.kill_engine()
    alone = await asyncio.gather(*(text(door, number) for number in range(4, 8)))
    alone_again = [await text(door, number, nvext={"cache_salt": "another"}) for number in range(4)]
    assert alone_again == by_pair, "without the KV that was fetched, the decode worker computes the same"
    assert all(alone)
    last = (await decisions(url, dynamo, 13))[-1]
    assert last["prefill"]["failure"]


async def test_an_unmodified_frontend_serves_by_pairs_of_our_engines(dynamo: DynamoDeployment) -> None:
    kind = ("--engine", "simulated", "--ranks", "1")
    await start(dynamo, "prefill", "prefill", *kind, namespace=NAMESPACE)
    await start(dynamo, "decode", "decode", *kind, namespace=NAMESPACE)
    door = await dynamo.frontend("kv", workers=2)
    first = [await text(door, number) for number in range(3)]
    assert [await text(door, number) for number in range(3)] == first
    assert await cached(door, 9) >= 64, "the decode worker found the prompt in its cache"
