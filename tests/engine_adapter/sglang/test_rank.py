"""A rank of SGLang before a fake server: its answers by ids, its end, and its failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from deploy.parts.sglang import read_counts
from deploy.process import alongside
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import AnswerDelta, AnswerStream
from engine_adapter.sglang.config import SglangConfig
from engine_adapter.sglang.deployment import SglangDeployment
from engine_adapter.sglang.discovery import discover
from engine_adapter.sglang.rank import SglangRank
from engine_adapter.sglang.server import SglangServer
from fleet.blocks import local_hashes, sequence_hashes
from fleet.routings import UNKNOWN, count_pairs
from tests.engine_adapter.sglang.fake_server import (
    EOS,
    EXPERTS,
    PAGE,
    TOP_K,
    FakeSglang,
    continued,
    fake_sglang,
    routed,
)

PROMPT = list(b"a prompt that is longer than three pages of sixteen tokens")


async def made(server: FakeSglang, **about: Any) -> SglangDeployment:
    """Return the deployment of a server."""
    config = SglangConfig(**{"url": server.url, "load_seconds": 0.02, "routed_share": 1.0} | about)
    client = SglangServer(config.base, None, 5)
    return SglangDeployment(await discover(config, client), config, client, None, read_counts)


@asynccontextmanager
async def deployed(server: FakeSglang, **about: Any) -> AsyncIterator[SglangDeployment]:
    """The deployment of a server, followed while the context lasts."""
    deployment = await made(server, **about)
    async with alongside(deployment.run(), "the deployment under test"):
        await asyncio.sleep(0)
        yield deployment


@pytest.fixture(params=[True, False], ids=["incremental", "cumulative"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[FakeSglang]:
    async with fake_sglang(incremental=request.param, kv=False) as one:
        yield one


@pytest.fixture
async def rank(server: FakeSglang) -> AsyncIterator[SglangRank]:
    async with deployed(server) as deployment:
        yield deployment.ranks[1]


async def submitted(rank: SglangRank, **about: Any) -> AnswerStream:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **about}
    return await rank.submit(GenerationRequest(**asked))


async def answered(rank: SglangRank, **about: Any) -> AnswerDelta:
    return await (await submitted(rank, **about)).rest()


async def test_an_answer_has_the_ids_the_text_and_the_counts(rank: SglangRank, server: FakeSglang) -> None:
    answer = await answered(rank)
    expected = continued(PROMPT, 12)
    assert (answer.token_ids, answer.text) == (expected, bytes(expected).decode())
    assert answer.outcome is not None
    counts = (answer.outcome.reason, answer.outcome.prompt_tokens, answer.outcome.completion_tokens)
    assert counts == ("length", len(PROMPT), 12)
    assert answer.outcome.cached_tokens == 0
    assert server.requests[0]["data_parallel_rank"] == 1
    again = await answered(rank)
    assert again.outcome is not None
    assert again.outcome.cached_tokens == len(PROMPT) // PAGE * PAGE


async def test_tokens_come_one_by_one(rank: SglangRank, server: FakeSglang) -> None:
    server.hold.clear()
    answer = await submitted(rank)
    assert (await anext(answer)).token_ids == continued(PROMPT, 1)
    server.hold.set()
    assert (await answer.rest()).token_ids == continued(PROMPT, 12)[1:]


async def test_an_answer_ends_at_its_end(rank: SglangRank) -> None:
    prompt = next(
        ids for ids in ([7, 1, one] for one in range(200)) if 0 in [t % 60 for t in continued(ids, 40)]
    )
    whole = continued(prompt, 40)
    before = next(at for at, token in enumerate(whole) if token % 60 == 0)
    answer = await answered(rank, prompt=prompt, max_tokens=40, ignore_eos=False)
    assert answer.token_ids == [*whole[:before], EOS]
    assert answer.text == bytes(whole[:before]).decode()
    assert answer.outcome is not None
    assert answer.outcome.reason == "stop"


async def test_a_stop_string_ends_the_request_at_the_server_too(rank: SglangRank, server: FakeSglang) -> None:
    stop = bytes(continued(PROMPT, 3)[1:]).decode()
    answer = await answered(rank, max_tokens=150, stop=(stop,))
    assert answer.text == bytes(continued(PROMPT, 1)).decode()
    async with asyncio.timeout(5):
        while any(server.running):  # noqa: ASYNC110 no event
            await asyncio.sleep(0.005)
    assert server.aborted == 1


@pytest.mark.parametrize("emitted", [1, 5, 11])
async def test_a_continuation_is_the_rest_of_the_answer(rank: SglangRank, emitted: int) -> None:
    whole = continued(PROMPT, 12)
    prompt = [*PROMPT, *whole[:emitted]]
    rest = await answered(rank, prompt=prompt, max_tokens=12 - emitted, emitted=emitted)
    assert rest.token_ids == whole[emitted:]
    assert rest.outcome is not None
    assert (rest.outcome.prompt_tokens, rest.outcome.completion_tokens) == (len(PROMPT), 12 - emitted)


async def test_a_continuation_that_had_ended_asks_for_nothing(rank: SglangRank, server: FakeSglang) -> None:
    rest = await answered(rank, prompt=[*PROMPT, EOS], emitted=1, ignore_eos=False)
    assert rest.token_ids == []
    assert rest.outcome is not None
    assert rest.outcome.reason == "stop"
    assert server.requests == []


async def test_a_cancelled_request_is_aborted_at_the_server(rank: SglangRank, server: FakeSglang) -> None:
    server.hold.clear()
    answer = await submitted(rank)
    await anext(answer)
    answer.cancel()
    async with asyncio.timeout(5):
        while any(server.running):  # noqa: ASYNC110 no event
            await asyncio.sleep(0.005)
    assert answer.outcome is not None
    assert (answer.outcome.reason, answer.outcome.completion_tokens) == ("cancelled", 1)


async def test_log_probabilities_come_with_their_tokens(rank: SglangRank) -> None:
    answer = await answered(rank, sampling=Sampling(temperature=0.0, logprobs=2))
    assert [one.token for one in answer.scored] == answer.token_ids
    assert [one.offset for one in answer.scored] == list(range(12))
    first = answer.token_ids[0]
    assert answer.scored[0].logprobs.top == ((first, -0.5), ((first + 1) % 200, -1.5))


async def test_experts_of_an_answer_are_reported_by_its_decision(rank: SglangRank) -> None:
    for decision in ("first", "second"):
        await answered(rank, decision=decision)
    facts = rank.take_facts()
    table = routed([*PROMPT, *continued(PROMPT, 12)])[:-1]
    reused = len(PROMPT) // PAGE * PAGE
    first, second = facts.ended
    assert [first.decision, second.decision] == ["first", "second"]
    assert np.array_equal(first.routed, table)
    assert (second.routed[:reused] == UNKNOWN).all()
    assert np.array_equal(second.routed[reused:], table[reused:])
    hashes = [block.block_hash for block in first.blocks]
    assert hashes == sequence_hashes(local_hashes([*PROMPT, *continued(PROMPT, 12)], PAGE))
    assert facts.activations is not None
    assert (facts.activations.tokens, facts.activations.cached_tokens) == (2 * len(table) - reused, reused)
    assert np.array_equal(
        facts.activations.counts, count_pairs(table, EXPERTS) + count_pairs(table[reused:], EXPERTS)
    )
    assert facts.activations.counts.sum(axis=1).tolist() == [facts.activations.tokens * TOP_K] * 4


async def test_no_answer_is_asked_for_experts_that_are_not_wanted(server: FakeSglang) -> None:
    async with deployed(server, routed_share=0.0) as deployment:
        assert not deployment.ranks[0].description.capabilities.experts
        await answered(deployment.ranks[0])
    assert "return_routed_experts" not in server.requests[0]


async def test_an_id_that_the_client_named_ends_an_answer_without_text(rank: SglangRank) -> None:
    whole = continued(PROMPT, 12)
    answer = await answered(rank, fields={"stop_token_ids": [whole[4]], "min_p": 0.1}, ignore_eos=False)
    at = whole.index(whole[4])
    assert answer.token_ids == whole[: at + 1]
    assert answer.text == bytes(whole[:at]).decode()
    assert answer.outcome is not None
    assert answer.outcome.reason == "stop"


async def test_fields_that_are_not_served_are_refused_before_sglang_sees_them(
    rank: SglangRank, server: FakeSglang
) -> None:
    with pytest.raises(ValueError, match="bad_words is not served"):
        await submitted(rank, fields={"bad_words": ["x"]})
    assert server.requests == []


async def test_no_answer_is_asked_for_more_experts_than_it_can_hold(
    rank: SglangRank, server: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_adapter.sglang.rank.MAX_ROUTED_BYTES", 4000)
    await answered(rank, prompt=PROMPT[:20])
    await answered(rank)
    assert [one.get("return_routed_experts") for one in server.requests] == [True, None]


# Failures


@pytest.mark.parametrize(
    ("status", "error", "kind", "text"),
    [
        (400, {"error": {"message": "too long"}}, ValueError, "SGLang: too long"),
        (422, {"error": "no such field"}, ValueError, "no such field"),
        (503, {"error": {"message": "The request queue is full."}}, Overloaded, "queue is full"),
        (500, {"error": {"message": "broken"}}, EngineFailed, "broken"),
        (401, {"error": "Unauthorized"}, EngineFailed, "Unauthorized"),
        (500, {}, EngineFailed, "SGLang"),
    ],
)
async def test_a_refusal_is_the_fault_of_its_cause(
    rank: SglangRank, server: FakeSglang, status: int, error: dict[str, Any], kind: type[Exception], text: str
) -> None:
    server.refusal = (status, error)
    with pytest.raises(kind, match=text):
        await answered(rank)
    server.refusal = None
    assert len((await answered(rank)).token_ids) == 12


ABORT = {"type": "abort", "message": "The request queue is full.", "status_code": 503, "err_type": None}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"error": {"message": "bad", "type": "invalid_request_error", "code": 400}}, ValueError),
        ({"output_ids": [], "meta_info": {"finish_reason": ABORT}}, Overloaded),
        ({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}, EngineFailed),
        ({"output_ids": ["x"]}, EngineFailed),
        ({"output_ids": [5]}, EngineFailed),
    ],
    ids=["error", "full", "aborted", "unreadable", "cut off"],
)
async def test_a_stream_that_ends_early_says_why(
    rank: SglangRank, server: FakeSglang, data: dict[str, Any], kind: type[Exception]
) -> None:
    server.events_instead = [msgspec.json.encode(data)]
    with pytest.raises(kind):
        await answered(rank)
    assert rank.unreadable == (data == {"output_ids": ["x"]})


async def test_a_broken_connection_fails_the_request_alone(rank: SglangRank, server: FakeSglang) -> None:
    server.cut_after = 4
    answer = await submitted(rank)
    first = (await anext(answer)).token_ids
    assert first == continued(PROMPT, len(first))
    with pytest.raises(EngineFailed):
        await answer.rest()
    server.cut_after = None
    assert len((await answered(rank)).token_ids) == 12
    assert rank.failure is None


async def test_requests_out_of_bounds_never_reach_the_server(rank: SglangRank, server: FakeSglang) -> None:
    with pytest.raises(ValueError, match="max_context"):
        await submitted(rank, max_tokens=4096)
    assert server.requests == []


async def test_nothing_stays_open_when_the_agent_stops(server: FakeSglang) -> None:
    server.hold.clear()
    async with deployed(server) as deployment:
        rank = deployment.ranks[0]
        answer = await submitted(rank)
        await anext(answer)
    with pytest.raises(EngineFailed, match="stopping"):
        await answer.rest()
    with pytest.raises(EngineFailed, match="stopping"):
        await submitted(rank)
