"""Continuous batching over a pretend model whose output depends on what its pages really hold."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.batching.kv_cache import KvCache
from engine_adapter.batching.scheduler import BatchScheduler, Overloaded, SequenceState, Slice

SIZE = 4


@dataclass
class PretendModel:
    """Writes tokens into pages and answers with a hash of everything it reads back through the page table."""

    cache: KvCache
    memory: dict[tuple[int, int], int] = field(default_factory=dict)

    def step(self, scheduler: BatchScheduler, slices: Sequence[Slice], budget: int) -> list[SequenceState]:
        assert sum(one.count for one in slices) <= budget
        written = [
            (one.sequence.table.pages[position // SIZE], position % SIZE)
            for one in slices
            for position in range(one.start, one.start + one.count)
        ]
        assert len(set(written)) == len(written), "two sequences write one place"
        for one in slices:
            for offset, token in enumerate(one.tokens):
                position = one.start + offset
                self.memory[one.sequence.table.pages[position // SIZE], position % SIZE] = token
        sampled = [(one.sequence, self._next(one)) for one in slices if one.last]
        for one in slices:
            scheduler.computed(one)
        for generation, token in sampled:
            scheduler.append(generation, token)
        done = [generation for generation, _ in sampled if generation.generated >= generation.max_new]
        for generation in done:
            scheduler.remove(generation)
        return done

    def _next(self, one: Slice) -> int:
        seen = [
            self.memory[one.sequence.table.pages[at // SIZE], at % SIZE]
            for at in range(one.start + one.count)
        ]
        assert seen == one.sequence.tokens, "pages hold another sequence's tokens"
        return pretend_token(seen)


def pretend_token(seen: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(bytes(seen)) % 3


def alone(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(pretend_token(tokens))
    return tokens


def build(
    pages: int = 16, budget: int = 12, running: int = 4, waiting: int = 100
) -> tuple[BatchScheduler, PretendModel]:
    cache = KvCache(pages, SIZE)
    return BatchScheduler(
        cache, max_batch_tokens=budget, max_running=running, max_waiting=waiting
    ), PretendModel(cache)


def run_dry(scheduler: BatchScheduler, model: PretendModel, limit: int = 10_000) -> list[SequenceState]:
    done: list[SequenceState] = []
    for _ in range(limit):
        if scheduler.idle:
            return done
        done += model.step(scheduler, scheduler.plan(), scheduler.max_batch_tokens)
        scheduler.check_integrity()
    raise AssertionError("requests never finish")


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
requests = st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(requests, st.integers(13, 40), st.integers(1, 5), st.integers(1, 20))
def test_every_request_finishes_with_the_output_it_has_alone_and_no_page_leaks(
    expected: list[tuple[list[int], int]], pages: int, running: int, more_budget: int
) -> None:
    scheduler, model = build(pages, running + more_budget, running)
    generations = [SequenceState(list(prompt), count) for prompt, count in expected]
    for generation in generations:
        scheduler.submit(generation)
    assert len(run_dry(scheduler, model)) == len(expected)
    for generation, (prompt, count) in zip(generations, expected, strict=True):
        assert generation.tokens == alone(prompt, count)
    assert scheduler.cache.held == 0


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(13, 30), st.randoms(use_true_random=False))
def test_arrivals_and_cancellations_at_any_time_leave_nothing_behind(
    expected: list[tuple[list[int], int]], pages: int, random: random.Random
) -> None:
    scheduler, model = build(pages)
    live: list[SequenceState] = []
    queue = [SequenceState(list(prompt), count) for prompt, count in expected]
    while queue or not scheduler.idle:
        if queue and random.random() < 0.5:
            live.append(queue.pop())
            scheduler.submit(live[-1])
        if live and random.random() < 0.2:
            scheduler.remove(live.pop(random.randrange(len(live))))
        model.step(scheduler, scheduler.plan(), scheduler.max_batch_tokens)
        scheduler.check_integrity()
    assert scheduler.cache.held == 0


def test_decoding_goes_on_in_every_step_of_a_long_prefill() -> None:
    scheduler, model = build(pages=64, budget=8)
    short = SequenceState([1], 30)
    scheduler.submit(short)
    model.step(scheduler, scheduler.plan(), 8)
    scheduler.submit(SequenceState([2] * 100, 1))
    for _ in range(10):
        before = short.generated
        slices = scheduler.plan()
        assert sum(one.count for one in slices) == 8
        model.step(scheduler, slices, 8)
        assert short.generated == before + 1


def test_prefill_goes_on_while_as_many_as_may_run_decode() -> None:
    scheduler, model = build(pages=64, budget=5, running=4)
    for token in range(3):
        scheduler.submit(SequenceState([token], 50))
    model.step(scheduler, scheduler.plan(), 5)
    late = SequenceState([2] * 20, 1)
    scheduler.submit(late)
    for step in range(1, 6):
        model.step(scheduler, scheduler.plan(), 5)
        assert late.computed == 2 * step


def test_the_latest_arrival_is_preempted_and_later_reuses_what_is_still_cached() -> None:
    scheduler, model = build(pages=6, budget=32)
    first, second = SequenceState([1] * 8, 12), SequenceState([2] * 8, 12)
    scheduler.submit(first)
    scheduler.submit(second)
    done = run_dry(scheduler, model)
    assert done == [first, second]
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.tokens == alone([2] * 8, 12)


def test_a_preempted_request_goes_before_those_that_never_ran() -> None:
    scheduler, model = build(pages=6, budget=32)
    order = [SequenceState([token] * 8, 12) for token in (1, 2, 0)]
    for generation in order:
        scheduler.submit(generation)
    assert run_dry(scheduler, model) == order


def test_the_last_prompt_token_is_computed_even_when_all_of_the_prompt_is_cached() -> None:
    scheduler, model = build()
    scheduler.submit(SequenceState([1] * 8, 1))
    run_dry(scheduler, model)
    again = SequenceState([1] * 8, 1)
    scheduler.submit(again)
    (only,) = scheduler.plan()
    assert (only.start, only.count, again.cached_tokens) == (4, 4, 4)
    longer = SequenceState([1] * 9, 1)
    scheduler.submit(longer)
    assert [(one.start, one.count) for one in scheduler.plan() if one.sequence is longer] == [(8, 1)]


def test_a_full_queue_refuses_with_a_type_of_its_own() -> None:
    scheduler, model = build(running=4, waiting=2)
    for _ in range(6):
        scheduler.submit(SequenceState([1], 9))
    model.step(scheduler, scheduler.plan(), 12)
    assert (scheduler.running, scheduler.waiting) == (4, 2)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        scheduler.submit(SequenceState([1], 1))


def test_what_could_never_fit_is_refused_at_once() -> None:
    scheduler, _ = build(pages=4)
    with pytest.raises(ValueError, match="16 in all fit"):
        scheduler.submit(SequenceState([1] * 10, 7))


def test_a_budget_that_would_starve_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="must exceed max_running"):
        build(budget=4, running=4)


def test_tokens_still_to_be_computed_are_counted() -> None:
    scheduler, model = build(budget=12)
    scheduler.submit(SequenceState([1] * 20, 4))
    scheduler.submit(SequenceState([2] * 5, 4))
    assert scheduler.uncomputed_prompt_tokens == 25
    model.step(scheduler, scheduler.plan(), 12)
    assert scheduler.uncomputed_prompt_tokens == 13


@settings(max_examples=40, deadline=None)
@given(requests, st.integers(13, 30), st.randoms(use_true_random=False))
def test_a_scheduler_that_takes_over_from_another_finishes_its_requests(
    expected: list[tuple[list[int], int]], pages: int, random: random.Random
) -> None:
    scheduler, model = build(pages)
    for prompt, count in expected:
        scheduler.submit(SequenceState(list(prompt), count))
    done: list[SequenceState] = []
    while not scheduler.idle:
        done += model.step(scheduler, scheduler.plan(), scheduler.max_batch_tokens)
        if random.random() < 0.2:
            running, waiting = scheduler.running_sequences, scheduler.waiting_sequences
            scheduler = BatchScheduler(model.cache, max_batch_tokens=12, max_running=4, max_waiting=0)
            scheduler.restore(running, waiting)
            scheduler.check_integrity()
    assert sorted(one.tokens for one in done) == sorted(alone(*one) for one in expected)
    assert model.cache.held == 0


def test_requests_are_restored_into_an_idle_scheduler_that_has_room() -> None:
    scheduler, _ = build(running=1)
    with pytest.raises(ValueError, match="2 running requests"):
        scheduler.restore([SequenceState([1], 1), SequenceState([2], 1)], [])
    scheduler.restore([], [SequenceState([1], 1)])
    with pytest.raises(ValueError, match="1 waiting"):
        scheduler.restore([], [])


def test_pages_that_the_first_waiting_request_lacks_are_counted() -> None:
    scheduler, model = build(pages=12, budget=40)
    scheduler.submit(SequenceState([1] * 30, 2))
    model.step(scheduler, scheduler.plan(), 40)
    assert scheduler.lacking_pages == 0
    scheduler.submit(SequenceState([2] * 20, 1))
    scheduler.submit(SequenceState([2], 1))
    assert scheduler.plan()
    assert scheduler.lacking_pages == 5 + 1 - 4
    assert len(run_dry(scheduler, model)) == 3
    assert scheduler.lacking_pages == 0
