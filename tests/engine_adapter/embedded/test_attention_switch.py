"""An engine changes between data-parallel and tensor-parallel attention while it serves: requests go on with
their KV, and the rank that accepted a request keeps its stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3MoeForCausalLM

from engine_adapter.batching.sampling import Sampling
from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.kv_switch.kv_state import SwitchRefused
from fleet.blocks import BLOCK_SIZE
from tests.engine_adapter.embedded_ranks import write_speaking_model
from tests.engine_adapter.switching_ranks import SwitchingRanks, collected, judge, switching_ranks
from tests.faults.fleet_fixture import until
from tests.unmeasured_engines import skip_calibration

LAYERS, EXPERTS = 2, 6
TEXT = Path(__file__).read_bytes()
PROMPTS = [list(TEXT[70 * at : 70 * at + 5 + 13 * at]) for at in range(6)]


@dataclass(frozen=True)
class Model:
    folder: Path
    oracle: Qwen3MoeForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return Model(
        folder,
        write_speaking_model(
            folder,
            num_hidden_layers=LAYERS,
            num_experts=EXPERTS,
            hidden_size=32,
            moe_intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        ),
    )


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_calibration(monkeypatch)


def started(
    model: Model, folder: Path, ranks: int = 2, **settings: Any
) -> AbstractAsyncContextManager[SwitchingRanks]:
    return switching_ranks(model.folder, folder, ranks, LAYERS, EXPERTS, **settings)


@pytest.fixture
async def pair(model: Model, tmp_path: Path) -> AsyncIterator[SwitchingRanks]:
    async with started(model, tmp_path) as ranks:
        yield ranks


@pytest.mark.parametrize("ranks", [2, 4])
async def test_streams_go_on_through_every_change_with_the_tokens_of_transformers(
    model: Model, tmp_path: Path, ranks: int
) -> None:
    async with started(model, tmp_path, ranks) as engine:
        streams = [await engine.ranks[at % ranks].submit(prompt, 60) for at, prompt in enumerate(PROMPTS)]
        reading = [asyncio.create_task(collected(stream)) for stream in streams]
        for attention in ("tp", "dp", "tp", "dp"):
            enough = engine.ranks[0].seen.steps + 5
            await until(lambda enough=enough: engine.ranks[0].seen.steps >= enough, "steps", 20)
            await engine.change_to(attention)
        for prompt, answer in zip(PROMPTS, await asyncio.gather(*reading), strict=True):
            assert answer.outcome is not None
            assert (answer.outcome.reason, answer.outcome.completion_tokens) == ("length", 60)
            assert len(answer.token_ids) == 60
            judge(model.oracle, prompt, answer.token_ids)


async def test_a_request_is_served_whichever_rank_accepts_it(model: Model, pair: SwitchingRanks) -> None:
    await pair.change_to("tp")
    for rank in pair.ranks:
        for prompt in PROMPTS:
            answer = await (await rank.submit(prompt, 20)).rest()
            assert len(answer.token_ids) == 20
            assert answer.text == bytes(filter(None, answer.token_ids)).decode("utf-8", "replace")
            judge(model.oracle, prompt, answer.token_ids)


async def test_under_tensor_parallel_attention_every_rank_computes_every_token(pair: SwitchingRanks) -> None:
    await pair.change_to("tp")
    before = [rank.seen.tokens for rank in pair.ranks]
    await (await pair.ranks[1].submit(PROMPTS[3], 10)).rest()
    computed = [rank.seen.tokens - at for rank, at in zip(pair.ranks, before, strict=True)]
    assert computed == [len(PROMPTS[3]) + 9] * 2


async def test_prefixes_computed_in_one_layout_are_reused_in_the_other(
    model: Model, pair: SwitchingRanks
) -> None:
    long = list(TEXT[1000:1100])
    await (await pair.ranks[1].submit(long, 4)).rest()
    stored = pair.blocks
    for attention in ("tp", "dp", "tp"):
        await pair.change_to(attention)
        assert pair.blocks >= stored
        (owner,) = (rank for rank in pair.ranks if set(rank.blocks) >= stored)
        answer = await (await owner.submit(long + list(b"more"), 8)).rest()
        assert answer.outcome is not None
        assert answer.outcome.cached_tokens == len(long) // BLOCK_SIZE * BLOCK_SIZE
        judge(model.oracle, long + list(b"more"), answer.token_ids)


async def test_after_a_change_the_ranks_report_their_blocks_anew(pair: SwitchingRanks) -> None:
    for rank in pair.ranks:
        await (await rank.submit(TEXT[:100], 4)).rest()
    before = pair.blocks
    await pair.change_to("tp")
    assert pair.blocks == before
    assert set(pair.ranks[0].blocks) == before
    assert not pair.ranks[1].blocks


async def test_a_stop_string_that_spans_a_change_ends_the_answer(model: Model, pair: SwitchingRanks) -> None:
    whole = await (await pair.ranks[1].submit(PROMPTS[2], 40)).rest()
    stop = whole.text[18:24]
    cut = whole.text.index(stop)
    answer = await pair.ranks[1].submit(PROMPTS[2], 40, stop=(stop,))
    reading = asyncio.create_task(collected(answer))
    await until(lambda: pair.ranks[1].seen.tokens >= len(PROMPTS[2]) * 2 + 5, "a part of the answer", 20)
    await pair.change_to("tp")
    found = await reading
    assert found.text == whole.text[:cut]
    assert found.outcome is not None
    assert found.outcome.reason == "stop"


async def test_log_probabilities_and_sampling_are_those_of_an_engine_that_never_changed(
    model: Model, tmp_path: Path, pair: SwitchingRanks
) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, seed=7, logprobs=2)
    async with started(model, tmp_path) as still:
        known = await (await still.ranks[1].submit(PROMPTS[4], 40, sampling)).rest()
    reading = asyncio.create_task(collected(await pair.ranks[1].submit(PROMPTS[4], 40, sampling)))
    for attention in ("tp", "dp"):
        await asyncio.sleep(0.02)
        await pair.change_to(attention)
    found = await reading
    assert found.token_ids == known.token_ids
    assert [one.offset for one in found.scored] == [one.offset for one in known.scored]
    for one, other in zip(found.scored, known.scored, strict=True):
        assert abs(one.logprobs.chosen - other.logprobs.chosen) < 1e-3


async def test_a_cancelled_request_frees_its_pages_whichever_rank_owns_it(pair: SwitchingRanks) -> None:
    for attention in ("tp", "dp", "tp"):
        streams = [await pair.ranks[at % 2].submit(PROMPTS[at], 180) for at in range(4)]
        await asyncio.sleep(0.02)
        streams[0].cancel()
        await pair.change_to(attention)
        streams[1].cancel()
        for stream in streams[2:]:
            await asyncio.sleep(0.01)
            stream.cancel()
        await until(lambda: pair.held == 0, "no page held", 10)
        for stream in streams:
            assert stream.outcome is not None
            assert stream.outcome.reason == "cancelled"


async def test_a_request_refused_by_its_owner_is_refused_where_it_came_from(
    model: Model, tmp_path: Path
) -> None:
    async with started(model, tmp_path, max_running=1, max_waiting=1) as engine:
        await engine.change_to("tp")
        streams = [await engine.ranks[at % 2].submit(PROMPTS[1], 30) for at in range(8)]
        found = await asyncio.gather(*(stream.rest() for stream in streams), return_exceptions=True)
        assert sum(isinstance(one, Overloaded) for one in found) == 4
        assert sum(not isinstance(one, BaseException) for one in found) == 4


async def test_routed_experts_of_a_request_that_moved_cover_all_its_tokens(pair: SwitchingRanks) -> None:
    stream = await pair.ranks[1].submit(PROMPTS[3], 30)
    await asyncio.sleep(0.01)
    await pair.change_to("tp")
    await asyncio.sleep(0.01)
    await pair.change_to("dp")
    await stream.rest()
    ended = [one for rank in pair.ranks for one in rank.take_facts().ended]
    assert len(ended) == 1
    assert ended[0].prompt_tokens == len(PROMPTS[3])
    assert len(ended[0].routed) == len(PROMPTS[3]) + 29
    assert np.all(ended[0].routed >= 0)


async def test_a_change_that_open_requests_leave_no_room_for_is_refused_with_the_numbers(
    model: Model, tmp_path: Path
) -> None:
    async with started(model, tmp_path, kv_blocks=16) as engine:
        streams = [await engine.ranks[at % 2].submit(TEXT[:80], 100) for at in range(2)]
        reading = [asyncio.create_task(stream.rest()) for stream in streams]
        await until(lambda: engine.held >= 22, "pages held", 20)
        with pytest.raises(SwitchRefused, match=r"hold 2\d pages.* 32 units.*limit is 67%"):
            await engine.change_to("tp")
        await asyncio.gather(*reading)

        async def changed() -> bool:
            with contextlib.suppress(SwitchRefused):  # Ranks learn of the others' pages in the next step.
                await engine.change_to("tp")
            return engine.placement.attention == "tp"

        await until(changed, "room after the requests have finished", 10)


async def test_where_it_may_the_latest_requests_are_computed_again_to_make_room(
    model: Model, tmp_path: Path
) -> None:
    async with started(model, tmp_path, kv_blocks=16, preempt_to_switch=True) as engine:
        prompts = [TEXT[:80], TEXT[200:280]]
        streams = [await engine.ranks[at].submit(prompt, 100) for at, prompt in enumerate(prompts)]
        reading = [asyncio.create_task(stream.rest()) for stream in streams]
        await until(lambda: engine.held >= 22, "pages held", 20)
        await engine.change_to("tp")
        answers = await asyncio.gather(*reading)
        assert [len(one.token_ids) for one in answers] == [100, 100]
        assert sum(one.outcome.preemptions for one in answers if one.outcome is not None) == 1
        for prompt, one in zip(prompts, answers, strict=True):
            judge(model.oracle, prompt, one.token_ids)


@pytest.mark.parametrize("ahead", [True, False])
async def test_pages_that_were_copied_ahead_are_not_read_in_the_step_that_switches(
    model: Model, tmp_path: Path, ahead: bool
) -> None:
    async with started(model, tmp_path, copy_ahead_seconds=30.0 if ahead else 0.0) as engine:
        streams = [await engine.ranks[at % 2].submit(TEXT[100 * at : 100 * at + 150], 100) for at in range(4)]
        reading = [asyncio.create_task(collected(stream)) for stream in streams]
        await until(lambda: min(rank.seen.tokens for rank in engine.ranks) > 2 * 150, "full pages", 20)
        for attention in ("tp", "dp"):
            await engine.change_to(attention)
            for rank in engine.ranks:
                assert rank.seen.switch.last_round is not None
                pages = rank.seen.switch.last_round.bytes * 2 / engine.page_bytes
                # Of four requests, the page that is being filled, and a few that filled up meanwhile.
                assert (pages <= 8) if ahead else (pages >= 16), (attention, pages, engine.held)
        await asyncio.gather(*reading)


async def test_a_change_that_is_given_up_leaves_no_page_reserved(model: Model, pair: SwitchingRanks) -> None:
    await (await pair.ranks[1].submit(TEXT[:100], 4)).rest()
    known = pair.blocks
    for attention in ("tp", "dp"):
        for _ in range(3):
            prepared = await pair.prepare(attention)
            for experts, one in zip(pair.experts, prepared, strict=True):
                experts.forget(one)
        stream = await pair.ranks[0].submit(PROMPTS[2], 8)
        judge(model.oracle, PROMPTS[2], (await stream.rest()).token_ids)
        await until(lambda: pair.used == len(pair.blocks), "no page in use but those of known blocks", 10)
        await pair.change_to(attention)
        assert pair.blocks >= known


@pytest.mark.parametrize(
    ("ranks", "seed"),
    [
        (2, 0),
        *(pytest.param(ranks, seed, marks=pytest.mark.slow) for ranks in (2, 4) for seed in range(1, 3)),
        *(
            pytest.param(ranks, seed, marks=[pytest.mark.slow, pytest.mark.long])
            for ranks in (2, 4)
            for seed in range(3, 101)
        ),
    ],
)
async def test_random_changes_under_load_lose_nothing(
    model: Model, tmp_path: Path, ranks: int, seed: int
) -> None:
    dice = np.random.default_rng((ranks, seed))
    async with started(model, tmp_path, ranks, kv_blocks=24, max_running=4) as engine:
        going, answered = True, 0

        async def client(number: int) -> None:
            nonlocal answered
            while going:
                prompt = list(TEXT[: int(dice.integers(1, 60))])
                count = int(dice.integers(1, 40))
                stream = await engine.ranks[number % ranks].submit(prompt, count)
                if dice.random() < 0.2:
                    await asyncio.sleep(0.02 * dice.random())
                    stream.cancel()
                    continue
                answer = await (stream.rest() if number % 2 else collected(stream))
                assert len(answer.token_ids) == count
                judge(model.oracle, prompt, answer.token_ids)
                answered += 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(3 * ranks):
                tasks.create_task(client(number))
            changed = 0
            async with asyncio.timeout(240):
                while changed < 12:
                    await asyncio.sleep(0.05 * dice.random())
                    try:
                        await engine.change_to("dp" if engine.placement.attention == "tp" else "tp")
                        changed += 1
                    except SwitchRefused:
                        continue
            going = False
        assert answered > 10
        await until(lambda: engine.held == 0, "no page held", 10)
