"""The embedded engine's two threads: what goes in, what comes out, and how it ends."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.sampling import Sampling
from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.config import EmbeddedConfig
from engine_adapter.embedded.engine import EmbeddedEngine
from engine_adapter.engine import EndedRequest, EngineFailed, RankFacts
from engine_adapter.serving.fact_log import FactLog
from engine_adapter.serving.generation import AnswerDelta, AnswerStream
from fleet.blocks import local_hashes, sequence_hashes
from fleet.routings import UNKNOWN, count_pairs

Starter = Callable[..., AbstractAsyncContextManager[Any]]

PROMPT = [ord(letter) for letter in "a prompt of more than two blocks of tokens"]


async def read(answer: AnswerStream) -> AnswerDelta:
    whole = AnswerDelta()
    async for delta in answer:
        whole.absorb(delta)
    return whole


async def ask(
    engine: EmbeddedEngine, prompt: Sequence[int] = PROMPT, max_tokens: int = 20, **more: Any
) -> AnswerDelta:
    return await read(
        await engine.submit(GenerationRequest(prompt=list(prompt), max_tokens=max_tokens, **more))
    )


async def facts_until(engine: EmbeddedEngine, holds: Callable[[RankFacts], bool]) -> RankFacts:
    """The first facts for which it holds."""
    async with asyncio.timeout(5):
        while True:
            facts = engine.take_facts()
            if holds(facts):
                return facts
            await engine.wait_facts()


async def test_an_answer_is_what_the_model_says_and_its_outcome_counts_it(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        whole = await ask(started.engine)
        assert whole.token_ids == started.runner.alone(PROMPT, 20)
        assert whole.text == bytes(whole.token_ids).decode()
        outcome = whole.outcome
        assert outcome is not None
        assert (outcome.reason, outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (
            "length",
            len(PROMPT),
            20,
            0,
        )
        assert (
            0
            < outcome.moments.submitted
            <= outcome.moments.admitted
            <= outcome.moments.first_token
            <= outcome.moments.finished
        )


async def test_many_at_once_in_small_chunks_with_few_pages_each_get_their_own_answer(
    pretend_engine: Starter,
) -> None:
    prompts = [[65 + one] * (5 + 7 * one) for one in range(12)]
    async with pretend_engine(kv_blocks=14, max_batch_tokens=9, max_running=6) as started:
        answers = await asyncio.gather(*(ask(started.engine, prompt, 30) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == started.runner.alone(prompt, 30)
        assert sum(answer.outcome.preemptions for answer in answers) > 0
        facts = await facts_until(started.engine, lambda facts: not facts.load.running)
        assert facts.load.decode_blocks == 0


async def test_a_repeated_prompt_reuses_blocks_and_reports_what_it_computed_and_what_not(
    pretend_engine: Starter,
) -> None:
    async with pretend_engine() as started:
        engine = started.engine
        first = await ask(engine, max_tokens=4)
        before = await facts_until(engine, lambda facts: facts.activations is not None)
        assert before.activations.tokens == len(PROMPT) + 3
        assert before.activations.counts.sum() == before.activations.tokens * 2 * 2
        stored = [change.stored for change in before.kv if change != "cleared" and change.stored is not None]
        assert sum(len(one.blocks) for one in stored) == (len(PROMPT) + 3) // 16
        second = await ask(engine, max_tokens=4)
        after = await facts_until(engine, lambda facts: facts.activations is not None)
        assert second.token_ids == first.token_ids
        assert second.outcome.cached_tokens == after.activations.cached_tokens == len(PROMPT) // 16 * 16
        assert after.activations.tokens == len(PROMPT) + 3 - after.activations.cached_tokens


async def test_a_requests_profile_tells_computed_positions_from_cached_ones(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        await ask(started.engine, max_tokens=10)
        await ask(started.engine, max_tokens=10)
        chosen = (await ended_requests(started.engine, 2))[1].routed
        known = len(PROMPT) + 9
        assert chosen.shape == (known, 2, 2)
        cached = len(PROMPT) // 16 * 16
        assert (chosen[:cached] == -1).all()
        tokens = (PROMPT + started.runner.alone(PROMPT, 10))[:known]
        for position in range(cached, known):
            assert chosen[position].tolist() == started.runner.routing(tokens[position])
        assert count_pairs(chosen, 8).sum() == (known - cached) * 2 * 2


async def ended_requests(engine: EmbeddedEngine, count: int) -> list[EndedRequest]:
    """The next so many requests that are reported as ended."""
    ended: list[EndedRequest] = []
    while len(ended) < count:
        ended += (await facts_until(engine, lambda facts: bool(facts.ended))).ended
    return ended


def assert_true(one: EndedRequest, tokens: Sequence[int], routing: Callable[[int], Any]) -> None:
    """Every computed position is the routing of its token, and the blocks are those of the tokens."""
    for position in np.flatnonzero(one.routed[:, 0, 0] != UNKNOWN).tolist():
        assert one.routed[position].tolist() == routing(tokens[position])
    assert [block.block_hash for block in one.blocks] == sequence_hashes(local_hashes(tokens))[
        : len(one.blocks)
    ]
    assert len(one.blocks) >= len(one.routed) // 16


async def test_an_ended_request_is_reported_once_with_its_decision_and_what_it_computed(
    pretend_engine: Starter,
) -> None:
    async with pretend_engine() as started:
        for decision, reused in (("one", 0), ("two", len(PROMPT) // 16 * 16)):
            whole = await ask(started.engine, max_tokens=10, decision=decision)
            (one,) = await ended_requests(started.engine, 1)
            assert (one.decision, one.prompt_tokens, len(one.routed)) == (
                decision,
                len(PROMPT),
                len(PROMPT) + 9,
            )
            assert (one.routed[:, 0, 0] == UNKNOWN).tolist() == [
                position < reused for position in range(len(one.routed))
            ]
            assert_true(one, PROMPT + whole.token_ids, started.runner.routing)
        assert started.engine.take_facts().ended == ()


async def test_a_cancelled_request_reports_what_it_had_computed_and_one_that_computed_nothing_is_not_reported(
    pretend_engine: Starter,
) -> None:
    async with pretend_engine(max_running=1) as started:
        engine = started.engine
        gone = await engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=400, decision="gone"))
        never = await engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=400, decision="never"))
        assert (await anext(gone)).token_ids
        never.cancel()
        gone.cancel()
        (one,) = await ended_requests(engine, 1)
        assert (one.decision, one.prompt_tokens) == ("gone", len(PROMPT))
        assert len(one.routed) >= len(PROMPT)
        assert_true(one, PROMPT + started.runner.alone(PROMPT, 400), started.runner.routing)
        await ask(engine, [65] * 5, 1, decision="later")
        assert [each.decision for each in await ended_requests(engine, 1)] == ["later"]


async def test_preempted_requests_are_reported_once_each_and_no_position_twice(
    pretend_engine: Starter,
) -> None:
    prompts = [[65 + one] * (5 + 7 * one) for one in range(12)]
    async with pretend_engine(kv_blocks=14, max_batch_tokens=9, max_running=6) as started:
        answers = await asyncio.gather(
            *(ask(started.engine, prompt, 30, decision=str(at)) for at, prompt in enumerate(prompts))
        )
        assert sum(answer.outcome.preemptions for answer in answers) > 0
        by_decision = {one.decision: one for one in await ended_requests(started.engine, len(prompts))}
        assert len(by_decision) == len(prompts)
        for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            one = by_decision[str(at)]
            assert len(one.routed) == len(prompt) + 29
            assert_true(one, prompt + answer.token_ids, started.runner.routing)


async def test_of_a_continuation_the_clients_own_prompt_is_prompt_and_the_rest_completion(
    pretend_engine: Starter,
) -> None:
    async with pretend_engine() as started:
        emitted = started.runner.alone(PROMPT, 5)
        whole = await ask(started.engine, PROMPT + emitted, 7, emitted=5)
        (one,) = await ended_requests(started.engine, 1)
        assert (one.decision, one.prompt_tokens, len(one.routed)) == ("", len(PROMPT), len(PROMPT) + 5 + 6)
        assert_true(one, PROMPT + emitted + whole.token_ids, started.runner.routing)


async def test_ended_requests_that_nobody_takes_are_bounded_in_bytes_the_oldest_let_go_and_counted() -> None:
    facts = FactLog(2, 8, 100, ended_bytes=10_000)
    for at in range(9):
        trace = RoutedTrace(2, 2)
        trace.note(0, np.zeros((500, 2, 2), np.uint8))  # 4 kB
        facts.add_ended(EndedRequest(str(at), 500, trace, []))
    taken = facts.take()
    assert ([one.decision for one in taken.ended], taken.ended_lost) == (["7", "8"], 7)
    assert (facts.take().ended, facts.take().ended_lost) == ((), 0)
    facts.add_ended(EndedRequest("larger than all", 0, RoutedTrace.of(np.zeros((5000, 2, 2), np.int16)), []))
    assert [one.decision for one in facts.take().ended] == ["larger than all"]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=11)]
)
async def test_a_continuation_elsewhere_ends_like_the_unbroken_run(
    pretend_engine: Starter, sampling: Sampling
) -> None:
    async with pretend_engine() as one, pretend_engine() as other:
        whole = await ask(one.engine, max_tokens=24, sampling=sampling)
        for cut in (1, 7, 23):
            prompt = PROMPT + whole.token_ids[:cut]
            rest = await ask(other.engine, prompt, 24 - cut, sampling=sampling, emitted=cut)
            assert rest.token_ids == whole.token_ids[cut:]
            assert bytes(whole.token_ids[:cut]).decode() + rest.text == whole.text
            assert (rest.outcome.prompt_tokens, rest.outcome.completion_tokens) == (len(PROMPT), 24 - cut)


async def test_a_stop_string_ends_the_answer_before_it(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        text = bytes(started.runner.alone(PROMPT, 20)).decode()
        whole = await ask(started.engine, stop=(text[5:8],))
        assert whole.text == text[: text.find(text[5:8])]
        assert whole.outcome.reason == "stop"
        assert whole.outcome.completion_tokens == text.find(text[5:8]) + 3


async def test_the_end_token_ends_the_answer_unless_ignored(pretend_engine: Starter) -> None:
    async with pretend_engine(letters=b"\x00abc") as started:
        alone = started.runner.alone(PROMPT, 30)
        assert 0 in alone
        whole = await ask(started.engine, max_tokens=30)
        assert whole.token_ids == alone[: alone.index(0) + 1]
        assert (whole.outcome.reason, whole.text) == ("stop", bytes(alone[: alone.index(0)]).decode())
        ignoring = await ask(started.engine, max_tokens=30, ignore_eos=True)
        assert ignoring.token_ids == alone
        assert ignoring.text == bytes(token for token in alone if token).decode()


async def test_a_continuation_that_had_ended_already_adds_nothing(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        whole = await ask(started.engine, [*PROMPT, 65, 0], emitted=2)
        assert (whole.token_ids, whole.outcome.reason, whole.outcome.completion_tokens) == ([], "stop", 0)


async def test_cancelling_frees_everything_while_others_go_on(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        engine = started.engine
        gone = await engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=400))
        stays = await engine.submit(GenerationRequest(prompt=PROMPT[:5], max_tokens=40))
        assert (await anext(gone)).token_ids
        gone.cancel()
        assert (await read(stays)).token_ids == started.runner.alone(PROMPT[:5], 40)
        with pytest.raises(StopAsyncIteration):
            await anext(gone)
        facts = await facts_until(engine, lambda facts: not facts.load.running)
        assert (facts.load.decode_blocks, facts.load.waiting) == (0, 0)


async def test_a_slow_reader_holds_nobody_up_and_finds_its_pieces_joined(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        slow = await started.engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=50))
        await ask(started.engine, PROMPT[:3], 60)
        pieces = [delta async for delta in slow]
        assert len(pieces) == 1
        assert pieces[0].token_ids == started.runner.alone(PROMPT, 50)


async def test_a_patient_reader_gets_the_whole_answer_at_once(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        streamed = await ask(started.engine)
        whole = await (await started.engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=20))).rest()
        assert (whole.token_ids, whole.text) == (streamed.token_ids, streamed.text)
        assert whole.outcome is not None
        assert whole.outcome.completion_tokens == 20


async def test_a_patient_reader_is_told_when_the_engine_fails(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        answer = await started.engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=400))
        await anext(answer)
        started.runner.failure = ArithmeticError("no numbers")
        with pytest.raises(EngineFailed, match="no numbers"):
            await answer.rest()
        with pytest.raises(EngineFailed, match="no numbers"):
            await started.run


async def test_more_than_may_wait_are_refused_with_a_type_of_their_own(pretend_engine: Starter) -> None:
    async with pretend_engine(max_running=2, max_waiting=3) as started:
        started.runner.hold = threading.Event()
        answers = [
            await started.engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=3)) for _ in range(5)
        ]
        with pytest.raises(Overloaded):
            await started.engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=3))
        started.runner.hold.set()
        ends = await asyncio.gather(*(read(answer) for answer in answers))
        assert [len(end.token_ids) for end in ends] == [3] * 5


@pytest.mark.parametrize(
    ("prompt", "more", "complaint"),
    [
        ([], {}, "at least 1"),
        ([1] * 500, {}, "512 in all"),
        ([1, 256], {}, "outside 0..255"),
        ([1, 2], {"emitted": 2}, "client's own"),
    ],
)
async def test_requests_out_of_bounds_are_refused(
    pretend_engine: Starter, prompt: list[int], more: dict[str, Any], complaint: str
) -> None:
    async with pretend_engine() as started:
        with pytest.raises(ValueError, match=complaint):
            await ask(started.engine, prompt, **more)


async def test_a_failing_step_fails_every_request_within_a_second_and_the_engine_for_good(
    pretend_engine: Starter,
) -> None:
    async with pretend_engine() as started:
        engine = started.engine
        answer = await engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=400))
        await anext(answer)
        began = time.monotonic()
        started.runner.failure = ArithmeticError("no numbers")
        with pytest.raises(EngineFailed, match="no numbers"):
            await read(answer)
        with pytest.raises(EngineFailed, match="no numbers"):
            await started.run
        assert time.monotonic() - began < 1.0
        with pytest.raises(EngineFailed):
            await ask(engine)


async def test_a_step_that_hangs_fails_the_engine_after_its_time_out(pretend_engine: Starter) -> None:
    async with pretend_engine(step_timeout_seconds=0.3, stop_timeout_seconds=0.1) as started:
        started.runner.hold = threading.Event()
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=r"longer than 0\.3 s"):
            await ask(started.engine)
        assert time.monotonic() - began < 0.3 + 1.2
        with pytest.raises(EngineFailed):
            await started.run
        started.runner.hold.set()


async def test_stopping_ends_open_requests_and_the_step_thread(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        answer = await started.engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=400))
        await anext(answer)
        started.run.cancel()
        with pytest.raises(EngineFailed, match="stopping"):
            await read(answer)
        with pytest.raises(asyncio.CancelledError):
            await started.run
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("steps of rank")]


async def test_facts_that_nobody_takes_are_restated_not_piled_up(pretend_engine: Starter) -> None:
    async with pretend_engine(kv_blocks=16) as started:
        for token in range(40):
            await ask(started.engine, [token + 1] * 60, 1)
        facts = started.engine.take_facts()
        assert facts.kv[0] == "cleared"
        blocks = sum(
            len(change.stored.blocks)
            for change in facts.kv
            if change != "cleared" and change.stored is not None
        )
        assert blocks <= (4 + 1) * 16


async def test_an_idle_engine_uses_next_to_no_processor_time(pretend_engine: Starter) -> None:
    async with pretend_engine() as started:
        await ask(started.engine)
        steps = started.runner.steps
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(1.5)
        assert (time.process_time() - used) / (time.monotonic() - began) < 0.03
        assert started.runner.steps == steps


async def test_the_description_says_what_a_router_must_know(
    pretend_engine: Starter, byte_folder: Path
) -> None:
    async with pretend_engine(kv_blocks=20) as started:
        about = started.engine.description
        assert (about.model, about.rank, about.ranks, about.block_size, about.kv_blocks) == (
            "pretend",
            0,
            1,
            16,
            20,
        )
        assert about.max_context == 20 * 16
        assert about.shape == started.runner.shape
        assert about.tokenizer[:2] == b"PK"
        assert started.engine.placement.epoch == 0


async def test_an_engine_that_cannot_load_says_why(byte_folder: Path, tmp_path: Path) -> None:
    engine = EmbeddedEngine(EmbeddedConfig(checkpoint=byte_folder))
    with pytest.raises(EngineFailed, match=r"rank 0 cannot start: .*config\.json"):
        await engine.start()
    with pytest.raises(EngineFailed, match=r"tokenizer\.json"):
        await EmbeddedEngine(EmbeddedConfig(checkpoint=tmp_path)).start()


async def test_ranks_that_wait_in_vain_for_another_give_up_in_time_and_say_so(
    byte_folder: Path, tmp_path: Path
) -> None:
    config = EmbeddedConfig(checkpoint=byte_folder, ranks=3, join_timeout_seconds=0.5)
    engines = [EmbeddedEngine(config, rank, tmp_path) for rank in (0, 2)]
    began = time.monotonic()
    failures = await asyncio.gather(*(engine.start() for engine in engines), return_exceptions=True)
    assert time.monotonic() - began < 5.0
    for engine, failure in zip(engines, failures, strict=True):
        assert isinstance(failure, EngineFailed)
        assert engine.failure is failure
        assert re.search(
            r"rank [02] cannot start: join of 3 ranks: rank 1 did not arrive within 0\.5 s", str(failure)
        )


async def test_seeds_of_requests_that_state_none_differ_and_repeat_with_the_engines_seed(
    pretend_engine: Starter,
) -> None:
    async with (
        pretend_engine(seed=5) as one,
        pretend_engine(seed=5) as other,
        pretend_engine(seed=6) as third,
    ):
        seeds = [[started.engine.fresh_seed() for _ in range(3)] for started in (one, other, third)]
        assert seeds[0] == seeds[1] != seeds[2]
        assert len(np.unique(seeds[0])) == 3


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"ranks": 0}, "ranks"),
        ({"kv_blocks": 1}, "kv_blocks"),
        ({"max_batch_tokens": 64, "max_running": 64}, "max_batch_tokens"),
        ({"max_context": 1}, "max_context"),
        ({"threads": 0}, "threads"),
        ({"dtype": "float16"}, "dtype"),
        ({"ballast_bytes": -1}, "ballast_bytes"),
        ({"link_seconds": -1e-6}, "link_seconds"),
        ({"link_seconds": float("nan")}, "link_seconds"),
        ({"link_seconds": 1.0}, "link_seconds"),
        ({"collective_seconds": -1e-6}, "collective_seconds"),
        ({"collective_seconds": 1.0}, "collective_seconds"),
        ({"calibration_seconds": -1.0}, "calibration_seconds"),
        ({"step_timeout_seconds": 0.0}, "step_timeout_seconds"),
        ({"join_timeout_seconds": -1.0}, "join_timeout_seconds"),
        ({"slots_per_rank": 0}, "slots_per_rank"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} "):
        EmbeddedConfig(**settings)


def test_a_rank_that_is_none_of_the_engines_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        EmbeddedEngine(EmbeddedConfig(ranks=2), 2, Path("/tmp"))
    with pytest.raises(ValueError, match="run directory"):
        EmbeddedEngine(EmbeddedConfig(ranks=2), 0)
