"""Value of redundant slots against the KV blocks they take."""

from functools import cache as cache_results

import numpy as np
import pytest

from fleet.timing import EngineSpeed
from migration.model.cost_model import CostTerms
from migration.planning.slots_vs_kv_cache import (
    KvCacheModel,
    TradeOffPoint,
    best,
    curve,
    memory_seconds,
    waiting_seconds,
)


def cache(blocks: float, used: float, requests: float, variation: float = 0.0) -> KvCacheModel:
    return KvCacheModel(blocks=blocks, block_bytes=1000, used=used, requests=requests, variation=variation)


def erlang_c(servers: int, offered: float) -> float:
    """Probability of waiting in M/M/c, by Erlang's recursion."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1.0 - offered / servers * (1.0 - blocked))


@pytest.mark.parametrize(("servers", "offered"), [(20, 16.0), (64, 60.0), (200, 190.0)])
def test_requests_of_one_block_wait_as_in_erlangs_queue(servers: int, offered: float) -> None:
    waits = 2.0 * waiting_seconds(cache(servers, offered, offered), servers, 1.0)
    assert waits == pytest.approx(erlang_c(servers, offered) / (servers - offered), rel=0.15)


def test_waiting_grows_with_fewer_blocks_longer_steps_and_uneven_requests() -> None:
    now = cache(100.0, 70.0, 14.0)
    waits = [waiting_seconds(now, blocks, 1.0) for blocks in (120.0, 100.0, 90.0, 80.0, 71.0)]
    assert waits == sorted(waits)
    assert waits[0] > 0
    assert waiting_seconds(now, 100.0, 1.0, growth=1.2) > waits[1]
    assert waiting_seconds(cache(100.0, 70.0, 14.0, variation=2.0), 100.0, 1.0) > waits[1]


def test_a_cache_that_is_too_small_is_never_caught_up_with_and_an_idle_one_makes_nobody_wait() -> None:
    assert waiting_seconds(cache(100.0, 70.0, 14.0), 70.0, 1.0) == np.inf
    assert waiting_seconds(cache(100.0, 0.0, 0.0), 5.0, 1.0) == 0.0
    assert waiting_seconds(cache(1e9, 1.0, 1.0), 1e9, 1.0) == 0.0


def test_replicas_cost_what_requests_wait_longer_for_their_sake_and_never_more_than_a_step() -> None:
    now = cache(100.0, 90.0, 18.0)
    assert memory_seconds(now, 20_000, 0.01) == pytest.approx(
        waiting_seconds(now, 100.0, 0.01) - waiting_seconds(now, 120.0, 0.01)
    )
    assert memory_seconds(now, 0, 0.01) == 0.0
    assert memory_seconds(cache(100.0, 100.0, 18.0), 1e9, 0.01) == 0.01


@cache_results
def points(used: float, requests: float = 16.0, sharded: int = 0) -> tuple[TradeOffPoint, ...]:
    load = 1.0 / np.arange(1, 17)
    demand = np.repeat(np.stack([load, load[::-1]])[None], 4, axis=0)
    terms = CostTerms(
        EngineSpeed(step=1e-3, decode_sequence=0.0, decode_block=0.0, expert_pair=1e-5, dispatch=1e-6),
        np.zeros(4, np.intp),
        2,
        step_tokens=64,
    )
    return curve(
        demand,
        terms,
        cache(100.0, used, requests, 1.0),
        (3, 4, 5, 6, 7, 14, 15, 17),
        present=5,
        expert_bytes=5_000,
        sharded=sharded,
    )


def test_slots_of_sharded_layers_take_memory_too() -> None:
    alone, beside = points(20.0), points(20.0, sharded=2)
    assert [point.slots_per_rank for point in beside] == [4, 5, 6, 7]
    for one, other in zip(alone, beside, strict=False):
        assert other.bytes_per_rank == 2 * one.bytes_per_rank
        assert other.kv_blocks - 100 == 2 * (one.kv_blocks - 100)
        assert other.figures == one.figures


def test_slots_are_worth_it_while_there_are_blocks_to_spare() -> None:
    idle, busy = points(20.0), points(85.0)
    assert [point.slots_per_rank for point in idle] == [4, 5, 6, 7, 14]
    assert [point.kv_blocks for point in idle] == [110, 100, 90, 80, 10]
    assert [point.bytes_per_rank for point in idle] == [0, 10_000, 20_000, 30_000, 100_000]
    most, least = best(idle), best(busy)
    assert most is not None
    assert least is not None
    assert most.slots_per_rank > least.slots_per_rank == 5
    assert idle[0].step_seconds > idle[1].step_seconds
    assert busy[-1].total_seconds is None


def test_a_step_lasts_longer_by_what_the_slowest_rank_has_above_the_mean() -> None:
    first = points(20.0)[0]
    even = 1e-5 * 2 * 64 * 2 / 4
    assert first.step_seconds == pytest.approx(
        1e-3 + first.figures.seconds.experts - even + first.figures.seconds.dispatch
    )


def test_with_more_requests_than_any_cache_serves_nothing_is_best() -> None:
    assert best([point for point in points(85.0) if point.total_seconds is None]) is None


@pytest.mark.parametrize("wrong", [{"block_bytes": 0}, {"used": -1.0}, {"blocks": float("inf")}])
def test_a_cache_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cache"):
        KvCacheModel(**{"blocks": 1.0, "block_bytes": 1, "used": 0.0, "requests": 0.0, **wrong})  # type: ignore[arg-type]
