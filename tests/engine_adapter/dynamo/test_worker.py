"""Requests of Dynamo's request plane served by a simulated engine. Time is virtual."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.dynamo.requests import UnservableRequest
from engine_adapter.dynamo.worker import DynamoWorker
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import GenerationOutcome
from engine_adapter.simulated.engine import SimulatedEngine
from engine_adapter.simulated.model.config import SimulatedConfig
from engine_adapter.simulated.model.faults import FaultOrder
from fleet.completions import DECISION_HEADER
from tests.engine_adapter.dynamo.request_builders import FakeContext, request

pytestmark = pytest.mark.looptime
PROMPT = list(range(1, 41))


class SpanLog:
    """Keeps what is recorded of requests."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str | None, GenerationOutcome | None]] = []

    def record(self, traceparent: str | None, outcome: GenerationOutcome | None) -> None:
        self.recorded.append((traceparent, outcome))


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[SimulatedEngine, DynamoWorker, SpanLog]]:
    """A worker with ranks 0 and 1."""
    engine = SimulatedEngine(SimulatedConfig(**{"ranks": 2} | settings))
    runs = [asyncio.create_task(rank.run(), name="a rank under test") for rank in engine.ranks]
    spans = SpanLog()
    yield engine, DynamoWorker(dict(enumerate(engine.ranks)), {0: spans, 1: spans}), spans
    for run in runs:
        run.cancel()
    await asyncio.wait(runs)


async def chunks_of(
    worker: DynamoWorker, sent: object, context: FakeContext | None = None
) -> list[dict[str, Any]]:
    return [chunk async for chunk in worker.generate(sent, context or FakeContext())]


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    return [token for chunk in chunks for token in chunk["token_ids"]]


async def direct(engine: SimulatedEngine, max_tokens: int = 5) -> list[int]:
    asked = GenerationRequest(prompt=PROMPT, max_tokens=max_tokens, ignore_eos=True)
    return (await (await engine.ranks[0].submit(asked)).rest()).token_ids


async def test_the_answer_is_the_engines_own_and_ends_with_its_usage() -> None:
    async with serving() as (engine, worker, _):
        expected = await direct(engine)
        chunks = await chunks_of(worker, request(PROMPT))
        assert tokens_of(chunks) == expected
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert [chunk.get("completion_usage") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["completion_usage"] == {
            "prompt_tokens": 40,
            "completion_tokens": 5,
            "total_tokens": 45,
            "prompt_tokens_details": {"cached_tokens": 32},
        }


async def test_a_stop_token_ends_the_answer_in_the_engine_too() -> None:
    async with serving() as (engine, worker, _):
        expected = await direct(engine)
        hidden = request(PROMPT, stop_token_ids_hidden=[expected[2]], ignore_eos=False, max_tokens=None)
        first = expected.index(expected[2])
        chunks = await chunks_of(worker, hidden)
        assert tokens_of(chunks) == expected[: first + 1], "the frontend removes an end token itself"
        assert chunks[-1]["finish_reason"] == "stop"
        chunks = await chunks_of(worker, request(PROMPT, stop_token_ids=[expected[2]], max_tokens=None))
        assert tokens_of(chunks) == expected[:first]
        assert chunks[-1]["stop_reason"] == expected[2]
        usage = chunks[-1]["completion_usage"]
        assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (
            first + 1,
            32,
        )
        engine.ranks[0].check_idle()


async def test_requests_go_to_the_rank_that_the_router_chose_or_to_the_one_with_fewer() -> None:
    async with serving() as (engine, worker, _):
        answers = [
            worker.generate(request(dp_rank=rank, max_tokens=200), FakeContext()) for rank in (1, 1, None)
        ]
        async with aclosing(answers[0]), aclosing(answers[1]), aclosing(answers[2]):
            for answer in answers:
                await anext(answer)
            running = [rank.take_facts().load.running for rank in engine.ranks]
        assert running == [1, 2]


async def test_a_client_that_goes_away_frees_what_its_request_holds() -> None:
    async with serving() as (engine, worker, spans):
        context = FakeContext({"traceparent": "00-1-2-01"})
        answer = worker.generate(request(max_tokens=500), context)
        await anext(answer)
        context.stop()
        rest = [chunk async for chunk in answer]
        assert sum(len(chunk["token_ids"]) for chunk in rest) < 400
        assert not any(rank.take_facts().load.running for rank in engine.ranks)
        ((traceparent, outcome),) = spans.recorded
        assert traceparent == "00-1-2-01"
        assert outcome is not None
        assert outcome.reason == "cancelled"


async def test_the_trace_comes_from_the_metadata_before_the_headers() -> None:
    async with serving() as (_, worker, spans):
        headers = {"traceparent": "of the frontend"}
        await chunks_of(worker, request(), FakeContext({"traceparent": "of the router"}, headers))
        await chunks_of(worker, request(), FakeContext(headers=headers))
        await chunks_of(worker, request())
        assert [one for one, _ in spans.recorded] == ["of the router", "of the frontend", None]


async def test_the_routing_decision_is_named_in_the_report_of_the_request() -> None:
    async with serving() as (engine, worker, _):
        await chunks_of(worker, request(dp_rank=0), FakeContext({DECISION_HEADER: "decision-7"}))
        (ended,) = engine.ranks[0].take_facts().ended
        assert ended.decision == "decision-7"


async def test_refused_requests_are_counted_and_change_nothing() -> None:
    async with serving() as (_, worker, _):
        for bad in (request(n=2), {"token_ids": "x"}, None, request(dp_rank=2), request([])):
            with pytest.raises(UnservableRequest):
                await chunks_of(worker, bad)
        assert (worker.refused, worker.open_requests) == (5, 0)
        assert tokens_of(await chunks_of(worker, request()))


async def test_log_probabilities_are_sent_for_each_token() -> None:
    async with serving() as (_, worker, _):
        chunks = await chunks_of(worker, request(logprobs=1))
        assert all(len(chunk["log_probs"]) == len(chunk["top_logprobs"]) for chunk in chunks)
        assert "log_probs" not in (await chunks_of(worker, request()))[0]


async def test_the_end_of_the_engine_reaches_open_requests() -> None:
    async with serving() as (engine, worker, _):
        answer = worker.generate(request(max_tokens=500), FakeContext())
        await anext(answer)
        engine.order(FaultOrder(fault="die"))
        with pytest.raises(EngineFailed):
            async for _ in answer:
                pass
        assert worker.open_requests == 0


async def test_it_is_idle_once_the_last_answer_is_read() -> None:
    async with serving() as (_, worker, _):
        await worker.idle()
        answer = worker.generate(request(max_tokens=50), FakeContext())
        await anext(answer)
        idle = asyncio.create_task(worker.idle(), name="waits for idleness")
        await asyncio.sleep(0)
        assert not idle.done()
        async for _ in answer:
            pass
        await idle
