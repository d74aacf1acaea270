"""Room for a switch: just enough, just too little, and what is given up."""

from collections.abc import Sequence

import pytest

from engine_adapter.kv_switch.capacity import capacity
from engine_adapter.kv_switch.kv_state import SwitchRefused
from fleet.layout import held_limit
from tests.engine_adapter.kv_switch.kv_fixture import SIZE, SwitchableEngine

SHAPES = [(2, 2), (4, 4), (4, 2), (4, 1), (3, 1)]  # ranks, head groups


def full_engine(
    ranks: int, groups: int, blocks: int, sizes: Sequence[int], *, preempt: bool = False
) -> SwitchableEngine:
    """An engine whose ranks hold requests of `sizes` pages each, none shared."""
    engine = SwitchableEngine(ranks, groups, blocks, max_running=100, preempt=preempt)
    for size in sizes:
        for rank in range(ranks):
            engine.submit(rank, [1] * (size * SIZE - 2), 6, salt=f"{rank} {size}")
    engine.step()
    assert [one.scheduler.cache.held for one in engine.served] == [sum(sizes)] * ranks
    return engine


@pytest.mark.parametrize(("ranks", "groups"), SHAPES)
def test_a_switch_fits_exactly_up_to_the_capacity(ranks: int, groups: int) -> None:
    blocks = 12
    most = capacity(ranks, groups, blocks * groups)
    assert most <= held_limit(ranks, groups) * blocks < most + 1
    engine = full_engine(ranks, groups, blocks, [most - 1, 1])
    engine.switch()
    engine.switch()
    engine.run_dry()
    refused = full_engine(ranks, groups, blocks, [most, 1])
    with pytest.raises(SwitchRefused, match=rf"{100 * held_limit(ranks, groups):.1f}% on every rank"):
        refused.switch()
    refused.run_dry()


@pytest.mark.parametrize(("ranks", "groups"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("excess", [0, 1])
def test_a_split_fits_exactly_up_to_the_capacity(ranks: int, groups: int, excess: int) -> None:
    engine = SwitchableEngine(ranks, groups, 14, max_running=100)
    engine.switch()
    pages = capacity(ranks, groups, 14 * groups) + excess
    for number in range(ranks):
        engine.submit(number, [1] * (pages * SIZE - 2), 2, str(number))
    engine.step()
    assert engine.served[0].scheduler.cache.held == ranks * pages
    if excess:
        with pytest.raises(SwitchRefused, match=rf"\d pages; they hold {ranks * pages} pages"):
            engine.switch()
    else:
        assert [len(state.running) for state in engine.switch().states] == [1] * ranks
    engine.run_dry()


def test_the_latest_requests_are_preempted_where_that_is_allowed() -> None:
    engine = full_engine(2, 2, 12, [5, 3, 1], preempt=True)
    (state,) = engine.switch().states
    assert [one.number for one in state.running] == list(range(4))
    assert [one.number for one in state.waiting] == [4, 5]
    assert [(one.computed, one.pages) for one in state.waiting] == [(0, []), (0, [])]
    engine.run_dry()
    assert len(engine.finished) == 6


def test_a_request_that_is_larger_than_a_rank_stays_in_the_engine() -> None:
    engine = SwitchableEngine(2, 2, 10, preempt=True)
    engine.switch()
    engine.submit(1, [1] * 30, 20)
    with pytest.raises(SwitchRefused, match="may grow to 50 tokens, and a rank has room for 40"):
        engine.switch()
    engine.step()
    with pytest.raises(SwitchRefused, match="may grow to 50 tokens"):
        engine.switch()
    engine.run_dry()
    engine.switch()


def test_a_sum_that_fits_but_cannot_be_packed_is_refused() -> None:
    engine = SwitchableEngine(2, 2, 12)
    engine.switch()
    for number in range(3):
        engine.submit(number % 2, [1] * (5 * SIZE - 3), 2, str(number))
    engine.step()
    engine.step()
    assert engine.served[0].scheduler.cache.held == 15, "two times 15 units are fewer than 2 * 24"
    with pytest.raises(SwitchRefused, match="found no assignment of 3 running requests to 2 ranks"):
        engine.switch()


def test_requests_beyond_what_a_rank_may_run_wait_at_the_front() -> None:
    engine = SwitchableEngine(2, 2, 20, max_running=6)
    engine.switch()
    for number in range(9):
        engine.submit(number % 2, [1] * 3, 9, str(number))
    engine.step()
    engine.step()
    assert engine.served[0].scheduler.running == 9
    engine.max_running = 2
    states = engine.switch().states
    assert [len(state.running) for state in states] == [2, 2]
    assert sorted(one.number for state in states for one in state.running) == [0, 1, 2, 3]
    assert [[one.number for one in state.waiting] for state in states] == [[4, 6, 8], [5, 7]]
    engine.run_dry()
