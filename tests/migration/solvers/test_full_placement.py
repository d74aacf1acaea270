"""Full placement: legal for every shape, near the optimum where that can be found, and never behind its bound
or EPLB."""

from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement
from migration.solvers.eplb import eplb_global
from migration.solvers.full_placement import bound, full_placement
from migration.solvers.replica_counts import CountBounds, replica_counts


def balance(table: NDArray[np.integer], load: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """Balance by definition, slot by slot; duplicates on a rank count as replicas."""
    loads = np.zeros((len(table), ranks))
    for layer, row in enumerate(table.tolist()):
        for slot, expert in enumerate(row):
            loads[layer, slot * ranks // len(row)] += (
                load[layer, expert] / row.count(expert) if expert != EMPTY else 0.0
            )
    return loads.mean(axis=1) / np.maximum(loads.max(axis=1), 1e-300)


def zipf(layers: int, experts: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).permuted(np.tile(1.0 / np.arange(1, experts + 1), (layers, 1)), axis=1)


def lognormal(layers: int, experts: int, seed: int) -> NDArray[np.float64]:
    return np.exp(np.random.default_rng(seed).standard_normal((layers, experts)))


def best_of_all(load: NDArray[np.float64], ranks: int, per_rank: int) -> NDArray[np.float64]:
    """[layers]: least load of the fullest rank, by trying every placement."""
    experts = load.shape[1]
    sets = [
        np.isin(np.arange(experts), chosen)
        for size in range(1, per_rank + 1)
        for chosen in combinations(range(experts), size)
    ]
    tried = np.array(
        [[sets[at] for at in chosen] for chosen in combinations_with_replacement(range(len(sets)), ranks)]
    )
    tried = tried[tried.any(axis=1).all(axis=1)].astype(float)
    part = tried / tried.sum(axis=1, keepdims=True)
    return np.array([(part @ one).max(axis=1).min() for one in load])


@pytest.mark.parametrize("skew", [zipf, lognormal])
def test_small_engines_get_nearly_the_best_of_all_placements(skew: object) -> None:
    load = zipf(40, 6, 1) if skew is zipf else lognormal(40, 6, 1)
    found = load.sum(axis=1) / 3 / balance(full_placement(load, 3, 3), load, 3)
    best = best_of_all(load, 3, 3)
    assert (found > best * (1 - 1e-9)).all()
    assert (found / best).mean() < 1.01
    assert (found / best).max() < 1.08


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_every_shape_gives_a_lawful_placement_not_above_its_bound(data: st.DataObject) -> None:
    ranks, per_rank = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    experts = data.draw(st.integers(1, ranks * per_rank))
    most = data.draw(st.none() | st.integers(1, 3))
    load = np.array(
        [data.draw(st.lists(st.integers(0, 9), min_size=experts, max_size=experts)) for _ in range(2)], float
    )
    table = full_placement(load, ranks, per_rank, max_replicas=most)
    Placement(table, experts=experts, ranks=ranks)
    assert max(row.tolist().count(expert) for row in table for expert in range(experts)) <= min(
        ranks, most or ranks
    )
    for found, limit, asked in zip(
        balance(table, load, ranks), bound(load, ranks, per_rank, most), load.any(axis=1), strict=True
    ):
        assert found <= limit + 1e-9 or not asked
    assert np.array_equal(table, full_placement(load, ranks, per_rank, max_replicas=most))


@pytest.mark.parametrize(("ranks", "per_rank"), [(8, 10), (16, 5), (32, 3), (32, 2)])
def test_it_is_at_least_as_even_as_eplb_whose_raw_map_may_hold_duplicates(ranks: int, per_rank: int) -> None:
    for load in (zipf(4, 64, 3), lognormal(4, 64, 3)):
        ours, theirs = (
            balance(table, load, ranks)
            for table in (full_placement(load, ranks, per_rank), eplb_global(load, ranks * per_rank, ranks))
        )
        assert ours.mean() >= theirs.mean() - 1e-9


def test_five_slots_a_rank_come_near_the_bound() -> None:
    for load in (zipf(4, 128, 5), lognormal(4, 128, 5)):
        assert (bound(load, 32, 5) - balance(full_placement(load, 32, 5), load, 32)).mean() < 0.004


def test_replicas_that_equal_loads_leave_over_are_dealt_one_each() -> None:
    load = np.ones((1, 6))
    counts = replica_counts(load, CountBounds.of(load, 3, 3, None, None))
    assert sorted(counts[0].tolist()) == [1, 1, 1, 2, 2, 2]


def test_experts_that_nobody_asked_for_share_what_slots_are_left() -> None:
    table = full_placement(np.zeros((1, 4)), 4, 2)
    assert [table[0].tolist().count(expert) for expert in range(4)] == [2, 2, 2, 2]


def test_divisor_counts_make_the_heaviest_replica_lightest() -> None:
    load, slots = lognormal(3, 12, 7), 20
    counts = replica_counts(load, CountBounds.of(load, slots, 1, None, None))
    greedy = np.ones_like(counts)
    for _ in range(slots - 12):
        greedy[np.arange(3), (load / greedy).argmax(axis=1)] += 1
    np.testing.assert_allclose((load / counts).max(axis=1), (load / greedy).max(axis=1))
    assert (counts.sum(axis=1) == slots).all()


def test_replicas_lie_on_different_nodes_and_ranks_carry_what_they_carried() -> None:
    node = np.repeat(np.arange(4), 2)
    for load in (zipf(5, 24, 2), lognormal(5, 24, 2)):
        flat, spread = full_placement(load, 8, 4), full_placement(load, 8, 4, node=node)
        np.testing.assert_allclose(balance(flat, load, 8), balance(spread, load, 8))
        before, after = (nodes_of_a_pair(table, load, node) for table in (flat, spread))
        assert after > 1.1 * before


def nodes_of_a_pair(table: NDArray[np.int16], load: NDArray[np.float64], node: NDArray[np.intp]) -> float:
    """Mean number of nodes that hold a pair's expert."""
    per = table.shape[1] // len(node)
    found = [
        [len(set(node[np.flatnonzero(row == expert) // per].tolist())) for expert in range(load.shape[1])]
        for row in table
    ]
    return float((np.array(found) * load).sum() / load.sum())


def test_chosen_experts_have_the_replicas_they_must_have() -> None:
    load, least = zipf(2, 8, 4), np.ones((2, 8), int)
    least[:, 3] = 3
    for ranks, per_rank in ((4, 4), (12, 2)):
        table = full_placement(load, ranks, per_rank, min_replicas=least)
        assert all((row == 3).sum() >= 3 for row in table)
        Placement(table, experts=8, ranks=ranks)
    with pytest.raises(ValueError, match="take 10 slots in a layer of 8"):
        full_placement(load, 4, 2, min_replicas=least)


def test_ranks_that_are_not_live_get_nothing_and_the_others_what_they_would_get_alone() -> None:
    load, live = lognormal(2, 6, 8), np.array([True, False, True, True])
    table = full_placement(load, 4, 3, live=live, node=np.array([0, 0, 1, 2]))
    assert (table.reshape(2, 4, 3)[:, 1] == EMPTY).all()
    alone = full_placement(load, 3, 3)
    np.testing.assert_allclose(
        balance(table.reshape(2, 4, 3)[:, live].reshape(2, -1), load, 3), balance(alone, load, 3)
    )
    with pytest.raises(ValueError, match="6 experts do not fit into 3 slots on each of 1 ranks"):
        full_placement(load, 4, 3, live=np.array([True, False, False, False]))


@pytest.mark.parametrize(
    ("load", "named"),
    [
        (np.ones((2, 9)), "9 experts do not fit into 2 slots on each of 4 ranks"),
        (np.full((1, 4), -1.0), "negative"),
        (np.full((1, 4), np.nan), "not finite"),
        (np.ones(4), r"shape \(4,\)"),
    ],
)
def test_what_cannot_be_placed_is_refused(load: NDArray[np.float64], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        full_placement(load, 4, 2)
