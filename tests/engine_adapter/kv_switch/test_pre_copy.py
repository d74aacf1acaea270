"""Pre-copy: pages that were copied ahead are not read at the switch, and nobody reads another page's
content."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.batching import kv_cache
from engine_adapter.kv_switch.kv_state import SwitchRefused
from fleet.blocks import chain
from fleet.layout import head_groups
from tests.engine_adapter.kv_switch.pre_copy_fixture import CopyingEngine
from tests.engine_adapter.kv_switch.test_switches import PREFIXES, shapes


def serve_copy_and_switch(
    engine: CopyingEngine, dice: random.Random, actions: int, switching: float = 0.05
) -> None:
    """Take random actions, then serve all requests to their end. switching: probability that an action is a
    switch."""
    for _ in range(actions):
        action = dice.random()
        if action < switching:
            switch_if_it_fits(engine)
        elif action < 0.3:
            prompt = dice.choice(PREFIXES) + [dice.randrange(3) for _ in range(dice.randint(1, 14))]
            engine.submit(dice.randrange(engine.ranks), prompt, dice.randint(1, 8))
        elif action < 0.33 and engine.open_requests:
            engine.cancel(dice.choice(sorted(engine.open_requests)))
        elif action < 0.4:
            engine.start_pre_copy()
        elif action < 0.42:
            engine.stop_pre_copy()
        else:
            engine.step()
    engine.stop_pre_copy()
    engine.run_dry()


def switch_if_it_fits(engine: CopyingEngine) -> None:
    engine.settle_reads()
    try:
        engine.switch()
    except SwitchRefused:
        assert not engine.preempt


@settings(max_examples=120, deadline=None)
@given(shapes, st.integers(14, 34), st.booleans(), st.integers(0, 1 << 32))
def test_copying_ahead_and_switching_in_any_order(
    shape: tuple[int, int], blocks: int, preempt: bool, seed: int
) -> None:
    ranks, kv_heads = shape
    engine = CopyingEngine(ranks, head_groups(ranks, kv_heads), blocks, seed=seed, preempt=preempt)
    serve_copy_and_switch(engine, random.Random(seed), actions=60)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(14, 34), st.integers(2, 12), st.integers(0, 1 << 32))
def test_collisions_of_hashes_copy_no_wrong_content(
    shape: tuple[int, int], blocks: int, names: int, seed: int
) -> None:
    ranks, kv_heads = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "chain", lambda parent, local: chain(parent, local) % names)
        engine = CopyingEngine(ranks, head_groups(ranks, kv_heads), blocks, seed=seed, preempt=True)
        serve_copy_and_switch(engine, random.Random(seed), actions=60)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(40, 60), st.integers(0, 1 << 32))
def test_reads_that_are_open_at_the_switch_end_in_quarantined_units(
    shape: tuple[int, int], blocks: int, seed: int
) -> None:
    """The memory is checked while requests are served to their end: reads end in between. At most 18 and 6
    units of a rank are lost in the two switches, so the largest request fits."""
    ranks, kv_heads = shape
    engine = CopyingEngine(ranks, head_groups(ranks, kv_heads), blocks, seed=seed, preempt=True)
    engine.end_probability, engine.overdue_probability, engine.max_pages = 0.1, 0.2, 1
    for _ in range(2):
        for number in range(6):
            prompt = PREFIXES[number % 4] + [engine.random.randrange(3) for _ in range(6)]
            engine.submit(number % ranks, prompt, 8)
        engine.start_pre_copy()
        for _ in range(engine.random.randint(1, 6)):
            engine.step()
        engine.switch()
    engine.run_dry()


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(14, 20), st.booleans(), st.integers(0, 1 << 32))
def test_overdue_reads_of_pages_that_are_evicted_since_leave_no_trace(
    shape: tuple[int, int], blocks: int, tensor_parallel: bool, seed: int
) -> None:
    ranks, kv_heads = shape
    engine = CopyingEngine(ranks, head_groups(ranks, kv_heads), blocks, seed=seed, preempt=True)
    engine.end_probability, engine.overdue_probability = 0.2, 0.5
    if tensor_parallel:
        engine.switch()
    engine.start_pre_copy()
    for number in range(40):
        prompt = [engine.random.randrange(3) for _ in range(20)]
        engine.submit(number % ranks, prompt, 4)
        engine.step()
    engine.switch()


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_copies_of_pages_that_were_evicted_since_are_not_used(tensor_parallel: bool) -> None:
    """The owner reuses the pages in the step that switches, before a note could withdraw them."""
    engine = copied_engine(2, 2, tensor_parallel=tensor_parallel)
    for number in sorted(engine.open_requests):
        engine.cancel(number)
    for one in engine.served:
        one.scheduler.cache.clear()
    for rank in range(2):
        for number in range(8):
            engine.submit(rank, [number] * 30, 2)
    engine.note_exchange = False
    for _ in range(3):
        engine.step()
    states = engine.states()
    stale = {(copy.source_rank, copy.source) for state in states for ours in state.ahead for copy in ours}
    sources = {
        (rank if tensor_parallel else owner, unit)
        for owner, state in enumerate(states)
        for page in state.pages
        for rank, unit in enumerate(page.units)
    }
    assert stale & sources
    engine.switch()


def copied_engine(ranks: int, groups: int, *, tensor_parallel: bool) -> CopyingEngine:
    """An engine in which all registered pages are copied."""
    engine = CopyingEngine(ranks, groups, 60)
    engine.end_probability, engine.max_pages = 1.0, 100
    if tensor_parallel:
        engine.switch()
    for number in range(2 * ranks):
        engine.submit(number % ranks, [number % 3] * 9 + [number] * 12, 30)
    for _ in range(4):
        engine.step()
    engine.start_pre_copy()
    for _ in range(4):
        engine.step()
    for _ in range(2):
        engine.exchange_notes()
    return engine


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize(("ranks", "groups"), [(2, 2), (4, 4), (4, 2), (3, 1)])
def test_the_last_round_reads_only_what_was_not_announced(
    ranks: int, groups: int, tensor_parallel: bool
) -> None:
    engine = copied_engine(ranks, groups, tensor_parallel=tensor_parallel)
    before = engine.states()
    reads = sum(map(len, engine.switch().reads))
    fresh = [page for state in before for page in state.pages if page.block is None]
    assert fresh
    assert reads <= len(fresh) * ((groups - 1) if tensor_parallel else (ranks - 1))


def test_requests_go_where_their_pages_were_copied_to() -> None:
    engine = copied_engine(2, 2, tensor_parallel=True)
    (state,) = engine.states()
    copied = [{one.source for one in copies} for copies in state.ahead]
    other = {
        one.number: [
            sum(state.pages[page].units[1 - rank] in copied[rank] for page in one.pages) for rank in (0, 1)
        ]
        for one in state.running
    }
    for rank, after in enumerate(engine.switch().states):
        for one in after.running:
            assert other[one.number][rank] == max(other[one.number]) > 0


def test_copies_yield_to_requests() -> None:
    engine = CopyingEngine(2, 2, 20, max_running=8)
    engine.end_probability, engine.overdue_probability = 1.0, 0.0
    engine.submit(0, [1] * 40, 30)
    for _ in range(6):
        engine.step()
    engine.start_pre_copy()
    for _ in range(8):
        engine.step()
    assert engine.served[1].scheduler.cache.reserved
    late = engine.submit(1, [2] * 60, 10)
    for _ in range(3):
        engine.step()
    (sequence,) = engine.served[1].scheduler.running_sequences
    assert engine.origins[sequence].number == late
    engine.run_dry()


def test_a_pre_copy_that_is_stopped_gives_all_pages_back() -> None:
    engine = copied_engine(4, 2, tensor_parallel=False)
    assert all(one.scheduler.cache.reserved for one in engine.served)
    engine.stop_pre_copy()
    assert not any(one.scheduler.cache.reserved for one in engine.served)
    assert all(part.idle for part in engine.owners)
