"""A prompt's KV is computed by one engine and fetched by another, whose answer is that of one engine alone
and of transformers."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from engine_adapter.batching.handed_kv import PromptKv
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.sampling import Sampling
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.serving.generation import AnswerDelta
from tests.engine_adapter.embedded.test_engine_parity import PROMPTS, Oracle, engine_of, oracle

__all__ = ["oracle"]
pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = PROMPTS[-1]
FULL = (len(LONG) - 1) // 16
NEW = 24
Pair = tuple[EmbeddedEngine, EmbeddedEngine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    about = {"kv_blocks": 64, "calibration_seconds": 0.0}
    async with engine_of(**about) as prefill, engine_of(**about) as decode:
        yield prefill, decode


async def ask(engine: EmbeddedEngine, prompt: list[int], **more: Any) -> tuple[AnswerDelta, PromptKv | None]:
    """An answer, and where it says the prompt's KV is, as it comes over the wire."""
    fields = {"max_tokens": NEW, "ignore_eos": True} | more
    answer = await engine.submit(GenerationRequest(prompt=list(prompt), **fields))
    whole = await answer.rest()
    wire = msgspec.json.encode(answer.kv)
    return whole, msgspec.json.decode(wire, type=PromptKv | None)


async def prefilled(engine: EmbeddedEngine, prompt: list[int], **more: Any) -> PromptKv:
    _, source = await ask(engine, prompt, max_tokens=1, hands_over=True, **more)
    assert source is not None
    return source


def cached(whole: AnswerDelta) -> int:
    assert whole.outcome is not None
    return whole.outcome.cached_tokens


async def test_answers_are_those_of_one_engine_and_of_transformers(pair: Pair, oracle: Oracle) -> None:
    prefill, decode = pair
    for at, prompt in enumerate(PROMPTS[1::6]):
        sampling = Sampling(temperature=0.0 if at % 2 else 0.8, seed=at)
        whole, _ = await ask(decode, prompt, sampling=sampling, kv=await prefilled(prefill, prompt))
        alone, _ = await ask(prefill, prompt, sampling=sampling)
        assert whole.token_ids == alone.token_ids
        assert cached(whole) == (len(prompt) - 1) // 16 * 16
        if at % 2:
            oracle.assert_greedy(prompt, whole.token_ids)


async def test_nothing_is_held_and_what_was_fetched_is_reused(pair: Pair) -> None:
    prefill, decode = pair
    source = await prefilled(prefill, LONG, salt="reused")
    first, _ = await ask(decode, LONG, kv=source, salt="reused")
    again, _ = await ask(decode, LONG, salt="reused")
    assert again.token_ids == first.token_ids
    assert cached(again) == 16 * FULL
    for engine in pair:
        assert engine.take_facts().load.decode_blocks == 0


async def test_pages_that_were_evicted_meanwhile_are_computed_again(pair: Pair) -> None:
    prefill, decode = pair
    source = await prefilled(prefill, LONG, salt="evicted")
    for other in range(8):  # together more than the pool has
        await ask(prefill, [(7 * at + other) % 255 + 1 for at in range(200)], max_tokens=2)
    whole, _ = await ask(decode, LONG, kv=source, salt="evicted")
    alone, _ = await ask(prefill, LONG)
    assert whole.token_ids == alone.token_ids
    assert cached(whole) < 16 * FULL


async def test_kv_of_one_tenant_is_fetched_for_this_tenant_alone(pair: Pair) -> None:
    prefill, decode = pair
    source = await prefilled(prefill, LONG, salt="one")
    mine, _ = await ask(decode, LONG, kv=source, salt="one")
    assert cached(mine) == 16 * FULL
    assert cached((await ask(decode, LONG, salt="two"))[0]) == 0


async def test_a_source_that_does_not_fit_is_not_read(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = pair
    source = await prefilled(prefill, LONG)
    assert source.address is not None
    address = source.address
    changed = msgspec.structs.replace
    beyond = tuple((10**6,) * len(page) for page in source.units)
    wrong = [
        changed(source, layout="other weights"),
        changed(source, address=None),
        changed(source, units=beyond),
        changed(source, units=source.units[1:]),
        changed(source, checksums=tuple(one ^ 1 for one in source.checksums)),
        changed(source, address=changed(address, host="elsewhere")),
        changed(source, address=changed(address, inode=address.inode + 1)),
        changed(source, address=changed(address, pid=2**22 - 1)),
    ]
    expected, _ = await ask(prefill, LONG, max_tokens=4)
    for at, one in enumerate(wrong):
        whole, _ = await ask(decode, LONG, kv=one, salt=str(at), max_tokens=4)
        assert whole.token_ids == expected.token_ids
        assert cached(whole) == 0
    assert len([one for one in caplog.records if "computed again" in one.message]) == len(wrong) - 1


async def test_under_pressure_as_much_is_fetched_as_there_is_room_for(pair: Pair) -> None:
    prefill, decode = pair
    source = await prefilled(prefill, LONG, salt="pressed")
    running = [
        await decode.submit(GenerationRequest(prompt=[one + 1] * 230, max_tokens=30, ignore_eos=True))
        for one in range(4)
    ]
    whole, _ = await ask(decode, LONG, kv=source, salt="pressed")
    alone, _ = await ask(prefill, LONG)
    assert whole.token_ids == alone.token_ids
    for one in running:
        assert len((await one.rest()).token_ids) == 30
