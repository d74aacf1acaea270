"""A request that asks for the experts of its tokens gets those that the engine itself reports."""

import base64
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_adapter.dynamo.experts import encoded
from engine_adapter.dynamo.requests import parse
from engine_adapter.engine import EndedRequest
from engine_adapter.simulated.engine import SimulatedEngine
from fleet.experts import ModelShape
from fleet.routings import UNKNOWN, count_pairs
from router.dynamo.wire.experts import as_answer
from router.foreign_api.routed_experts_parser import TokenUsage, counted
from tests.engine_adapter.dynamo.request_builders import request
from tests.engine_adapter.dynamo.test_worker import chunks_of, serving, tokens_of

pytestmark = pytest.mark.looptime
PROMPT = list(range(1, 41))
ASKED = {"nvext": {"extra_fields": ["timing", "routed_experts"]}}


def decoded(held: dict[str, Any]) -> NDArray[Any]:
    raw = np.frombuffer(base64.b64decode(held["data"]), held["dtype"])
    return raw.reshape(held["shape"])


def last_report(engine: SimulatedEngine) -> EndedRequest:
    """What the engine tells its agent about the last finished request."""
    return engine.ranks[0].take_facts().ended[-1]


async def test_the_experts_are_those_that_the_engine_reports() -> None:
    async with serving(ranks=1) as (engine, worker, _):
        chunks = await chunks_of(worker, request(PROMPT, extra_args=ASKED))
        assert [chunk.get("engine_data") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        held = chunks[-1]["engine_data"]["routed_experts"]
        assert held["start"] == 0
        assert len(decoded(held)) == 40 + 5 - 1
        assert np.array_equal(decoded(held), last_report(engine).routed)


async def test_the_rows_begin_after_the_cached_prefix() -> None:
    async with serving(ranks=1) as (engine, worker, _):
        await chunks_of(worker, request(PROMPT))
        chunks = await chunks_of(worker, request(PROMPT, extra_args=ASKED))
        held = chunks[-1]["engine_data"]["routed_experts"]
        assert (held["start"], held["shape"][0]) == (32, 40 + 5 - 1 - 32)
        assert np.array_equal(decoded(held), last_report(engine).routed[32:])


async def test_nothing_is_sent_for_tokens_after_the_end_of_the_answer() -> None:
    async with serving(ranks=1) as (_, worker, _spans):
        tokens = tokens_of(await chunks_of(worker, request(PROMPT)))
        chunks = await chunks_of(worker, request([1, *PROMPT], stop_token_ids=tokens, extra_args=ASKED))
        completed = chunks[-1]["completion_usage"]["completion_tokens"]
        assert chunks[-1]["engine_data"]["routed_experts"]["shape"][0] == 41 + completed - 1


@pytest.mark.parametrize(
    "extra", [None, {}, {"nvext": None}, {"nvext": {"extra_fields": "routed_experts"}}, [1]]
)
async def test_requests_that_do_not_ask_get_none(extra: Any) -> None:
    async with serving(ranks=1) as (_, worker, _spans):
        chunks = await chunks_of(worker, request(PROMPT, extra_args=extra))
        assert all("engine_data" not in chunk for chunk in chunks)
        assert not parse(request(PROMPT, extra_args=extra)).wants_experts


async def test_a_router_counts_what_the_engine_computed() -> None:
    async with serving(ranks=1) as (engine, worker, _):
        await chunks_of(worker, request(PROMPT))
        chunks = await chunks_of(worker, request(PROMPT, extra_args=ASKED))
        shape = engine.ranks[0].description.shape
        assert shape is not None
        usage = TokenUsage(prompt=40, completion=5, cached=32)
        found = counted([as_answer(chunks[-1]["engine_data"]["routed_experts"])], shape, usage)
        own = last_report(engine)
        assert found is not None
        assert found.tokens == 40 + 5 - 1 - 32
        assert np.array_equal(found.prompt, count_pairs(own.routed[32:40], shape.experts))
        assert np.array_equal(found.completion, count_pairs(own.routed[40:], shape.experts))


def trace(positions: int, experts: int) -> NDArray[np.int16]:
    return np.random.default_rng(3).integers(0, experts, (positions, 2, 4), np.int16)


@pytest.mark.parametrize(("experts", "kind"), [(64, "uint8"), (256, "uint8"), (257, "int16"), (512, "int16")])
def test_numbers_are_as_small_as_the_experts_allow(experts: int, kind: str) -> None:
    chosen = trace(9, experts)
    held = encoded(chosen, 9, experts)
    assert held is not None
    assert held["dtype"] == kind
    assert np.array_equal(decoded(held), chosen)
    shape = ModelShape(layers=2, experts=experts, top_k=4, hidden=1, expert_intermediate=1)
    found = counted([as_answer(held)], shape, TokenUsage(5, 5))
    assert found is not None
    assert np.array_equal(found.prompt + found.completion, count_pairs(chosen, experts))


def test_a_trace_with_gaps_is_told_from_the_last_gap_on() -> None:
    chosen = trace(12, 8)
    chosen[[0, 1, 6]] = UNKNOWN
    held = encoded(chosen, 10, 8)
    assert held is not None
    assert held["start"] == 7
    assert np.array_equal(decoded(held), chosen[7:10])


def test_a_rank_that_computed_less_than_the_answer_tells_nothing() -> None:
    assert encoded(trace(12, 8), 13, 8) is None
