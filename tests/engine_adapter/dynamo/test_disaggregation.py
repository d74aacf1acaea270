"""Two simulated engines as a pair of a prefill and a decode worker. Time is virtual."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from engine_adapter.dynamo.requests import UnservableRequest
from engine_adapter.dynamo.worker import DynamoWorker
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from fleet.popularity import PROMPT_EXPERTS, PromptExperts
from router.dynamo.wire.pairs import decode_request, prefill_request, read_handle
from tests.engine_adapter.dynamo.request_builders import FakeContext, request

pytestmark = pytest.mark.looptime
PROMPT = list(range(1, 101))
TOKENS = 12


@asynccontextmanager
async def workers(*modes: Any, **settings: Any) -> AsyncIterator[list[DynamoWorker]]:
    """A worker of each mode, each with an engine of one rank."""
    engines = [SimulatedEngine(SimulatedConfig(**{"ranks": 1} | settings)) for _ in modes]
    runs = [asyncio.create_task(engine.ranks[0].run()) for engine in engines]
    yield [DynamoWorker({0: engine.ranks[0]}, {}, mode) for engine, mode in zip(engines, modes, strict=True)]
    for engine in engines:
        engine.ranks[0].check_idle()
    for run in runs:
        run.cancel()
    await asyncio.wait(runs)


async def served(worker: DynamoWorker, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The maps of an answer, as they arrive over the wire."""
    wire = json.loads(json.dumps(body))
    return [json.loads(json.dumps(one)) async for one in worker.generate(wire, FakeContext())]


async def by_pair(prefill: DynamoWorker, decode: DynamoWorker, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer of the decode worker, with what a router does between both."""
    handle = read_handle((await served(prefill, prefill_request(body, 1, None, None)))[-1])
    assert handle is not None
    return await served(decode, decode_request(body, handle, 1))


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}])
async def test_a_pair_answers_as_one_worker_does(sampling: dict[str, Any]) -> None:
    body = request(PROMPT, max_tokens=TOKENS, **sampling)
    async with workers("agg", "prefill", "decode") as (alone, prefill, decode):
        expected = await served(alone, body)
        chunks = await by_pair(prefill, decode, body)
    assert tokens_of(chunks) == tokens_of(expected)
    assert chunks[-1]["finish_reason"] == expected[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 96


async def test_a_prefill_worker_answers_one_token_whatever_is_asked() -> None:
    async with workers("prefill") as (prefill,):
        chunks = await served(prefill, request(PROMPT, max_tokens=TOKENS))
    assert len(tokens_of(chunks)) == 1
    assert chunks[-1]["disaggregated_params"]["roost_kv"]["blocks"] == len(PROMPT) // 16


async def test_fetching_takes_the_time_of_its_bytes_and_less_than_computing() -> None:
    body = request(PROMPT, max_tokens=1)
    speeds = {"prefill_token": 1e-2, "node_bytes_per_second": 1e9}
    loop = asyncio.get_running_loop()
    async with workers("agg", "prefill", "decode", **speeds) as (alone, prefill, decode):
        handle = read_handle((await served(prefill, prefill_request(body, 1, None, None)))[-1])
        assert handle is not None
        source = handle.params["roost_kv"]
        began = loop.time()
        await served(alone, body)
        computing, began = loop.time() - began, loop.time()
        await served(decode, decode_request(body, handle, 1))
        fetching = loop.time() - began
    assert computing > 1.0
    assert source["blocks"] * source["page_bytes"] / 1e9 < fetching < computing / 2


async def test_what_the_prompt_activated_is_what_the_engine_counts() -> None:
    async with workers("prefill") as (prefill,):
        chunks = await served(prefill, request(PROMPT))
        again = await served(prefill, request(PROMPT))
    stated = msgspec.convert(chunks[-1]["engine_data"][PROMPT_EXPERTS], PromptExperts)
    counts = stated.counts.array()
    assert stated.tokens == len(PROMPT)
    top_k = SimulatedConfig().model_shape.top_k
    assert (np.asarray(counts).sum(axis=1) == len(PROMPT) * top_k).all()
    cached = msgspec.convert(again[-1]["engine_data"][PROMPT_EXPERTS], PromptExperts)
    assert cached.tokens == len(PROMPT) - 96, "tokens from the cache activated nothing"


async def test_a_decode_worker_computes_prompts_that_nobody_has_computed() -> None:
    body = request(PROMPT, max_tokens=TOKENS)
    async with workers("agg", "decode") as (alone, decode):
        expected = tokens_of(await served(alone, body))
        assert tokens_of(await served(decode, body)) == expected
        foreign = body | {"prefill_result": {"disaggregated_params": {"kv_transfer_params": {}}}}
        assert tokens_of(await served(decode, foreign)) == expected


async def test_kv_of_another_model_is_not_taken() -> None:
    body = request(PROMPT, max_tokens=TOKENS)
    async with workers("prefill", model="other") as (prefill,):
        handle = read_handle((await served(prefill, prefill_request(body, 1, None, None)))[-1])
    assert handle is not None
    async with workers("decode") as (decode,):
        chunks = await served(decode, decode_request(body, handle, 1))
    assert chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("mode", ["agg", "prefill"])
async def test_the_kv_of_another_worker_is_refused_where_nothing_is_decoded_for_others(mode: Any) -> None:
    async with workers(mode) as (worker,):
        with pytest.raises(UnservableRequest, match=r"^prefill_result: .*--disaggregation-mode decode"):
            await served(worker, request(PROMPT, prefill_result={"disaggregated_params": {}}))


@pytest.mark.parametrize("source", [5, {"layout": 1}, {"layout": "x", "blocks": "y", "page_bytes": 1}])
async def test_a_source_that_cannot_be_read_is_refused_by_name(source: Any) -> None:
    async with workers("decode") as (decode,):
        sent = request(PROMPT, prefill_result={"disaggregated_params": {"roost_kv": source}})
        with pytest.raises(UnservableRequest, match=r"^prefill_result: roost_kv"):
            await served(decode, sent)
