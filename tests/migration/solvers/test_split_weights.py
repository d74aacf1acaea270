"""New split weights for a fixed placement: as balanced as a linear programme, closer to the even split,
robust to noise."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from benchmarks.rig.placements.popularity import by_rank, domains, drifted, load, sampled
from fleet.dispatch import flows, loads
from fleet.placement import EMPTY, FULL, Placement, Split, even_split
from migration.solvers.split_weights import reweight


def tables(layers: int, experts: int, ranks: int, slots: int, dice: np.random.Generator) -> NDArray[np.int16]:
    """Random placements of all experts, spare slots filled with further replicas, empty where a rank would
    hold one twice."""
    rows = []
    for _ in range(layers):
        row = np.full((ranks, slots // ranks), EMPTY, np.int16)
        row.T.flat[:experts] = dice.permutation(experts)
        for rank, free in np.argwhere(row == EMPTY):
            row[rank, free] = dice.choice(np.setdiff1d(np.arange(experts), row[rank]))
        rows.append(row.ravel())
    return np.stack(rows)


def balance(rank_loads: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(rank_loads.mean(axis=1) / rank_loads.max(axis=1))


def served(
    table: NDArray[np.int16],
    demand: NDArray[Any],
    ranks: int,
    split: Split | None,
    node: NDArray[np.intp] | None = None,
) -> NDArray[np.float64]:
    """[layers, ranks] by the shared dispatch rule; demand without sources comes evenly from all ranks."""
    demand = np.broadcast_to(demand / ranks, (ranks, *demand.shape)) if demand.ndim == 2 else demand
    placement = Placement(table, experts=demand.shape[2], ranks=ranks, split=split)
    return loads(placement, demand, np.zeros(ranks, np.intp) if node is None else node)


def best_balance(table: NDArray[np.int16], wanted: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """[layers]: balance reached by a linear programme over all splits."""
    found = []
    for row, load_ in zip(table, wanted, strict=True):
        slot = np.flatnonzero(row != EMPTY)
        rank, expert, n = slot // (len(row) // ranks), row[slot], len(slot)
        upper = np.zeros((ranks, n + 1))
        upper[rank, np.arange(n)], upper[:, n] = load_[expert], -1.0
        equal = np.zeros((len(load_), n + 1))
        equal[expert, np.arange(n)] = 1.0
        answer = linprog(np.eye(n + 1)[n], upper, np.zeros(ranks), equal, np.ones(len(load_)), method="highs")
        found.append(load_.sum() / ranks / answer.fun)
    return np.array(found)


@pytest.mark.parametrize("skew", ["mild", "zipf", "lognormal"])
@pytest.mark.parametrize(("ranks", "slots"), [(4, 24), (8, 40), (16, 32)])
def test_reaches_what_a_linear_programme_reaches(skew: str, ranks: int, slots: int) -> None:
    dice = np.random.default_rng(ranks)
    table, wanted = tables(3, 20, ranks, slots, dice), load(skew, 3, 20, dice)
    got = balance(served(table, wanted, ranks, reweight(table, wanted, ranks, 20)))
    np.testing.assert_allclose(got, best_balance(table, wanted, ranks), atol=0.004)


def test_known_sources_do_not_stand_in_the_way_of_balance() -> None:
    dice = np.random.default_rng(3)
    table, demand = tables(4, 20, 8, 40, dice), by_rank(domains("topheavy", 4, 1.0, 4, 20, dice), 8, 0.0)
    got = balance(served(table, demand, 8, reweight(table, demand, 8, 20)))
    np.testing.assert_allclose(
        got, np.minimum(best_balance(table, demand.sum(axis=0), 8), 1 / 1.005), atol=0.006
    )


def test_what_is_balanced_stays_at_home_and_near_home() -> None:
    dice = np.random.default_rng(4)
    table, demand = tables(2, 8, 4, 16, dice), np.ones((4, 2, 8))
    node = np.array([0, 0, 1, 1])
    split = reweight(table, demand, 4, 8, node, slack=0.5)
    assert (split.keep[table != EMPTY] == FULL).all()
    here, there = (
        flows(Placement(table, experts=8, ranks=4, split=each), demand, node) for each in (split, None)
    )
    assert here.near.sum() > 0 == there.near.sum()
    np.testing.assert_allclose(here.kept.sum(), there.kept.sum())


def test_a_rank_gives_away_its_own_only_when_its_own_is_too_much() -> None:
    table = np.array([[0, 1, 0, 2]], np.int16)
    demand = np.zeros((2, 1, 3))
    demand[0, 0], demand[1, 0] = [8, 2, 0], [0, 0, 2]
    split = reweight(table, demand, 2, 3, slack=0.0)
    assert split.keep[0, 0] == pytest.approx(FULL / 2, rel=0.01)
    np.testing.assert_allclose(served(table, demand, 2, split), [[6, 6]], rtol=0.001)
    np.testing.assert_array_equal(split.keep[0, 1:], FULL)


def test_weights_fitted_to_a_window_serve_the_next_better_than_the_even_split() -> None:
    dice = np.random.default_rng(5)
    before, foreign = load("zipf", 6, 64, dice), load("zipf", 6, 64, dice)
    truth = drifted(before, foreign, "jitter30", dice)
    table = tables(6, 64, 8, 96, dice)
    window, following = sampled(truth, 1e5, dice), sampled(truth, 1e5, dice)
    new = balance(served(table, following, 8, reweight(table, window, 8, 64, pairs=1e5)))
    assert (new > balance(served(table, following, 8, None)) + 0.01).all()


def test_a_small_window_is_trusted_little_and_an_empty_one_not_at_all() -> None:
    dice = np.random.default_rng(6)
    table, wanted = tables(4, 32, 8, 48, dice), np.ones((4, 32))
    window = sampled(wanted / 32, 200, dice)
    far = [
        np.abs(
            reweight(table, window, 8, 32, pairs=pairs).spill.astype(int) - even_split(table, 32).spill
        ).sum()
        for pairs in (200, 2000, None)
    ]
    assert far[0] < far[1] < far[2]
    nothing = reweight(table, np.zeros((4, 32)), 8, 32, pairs=0)
    np.testing.assert_allclose(nothing.spill, even_split(table, 32).spill, atol=1)


def test_dead_ranks_serve_nothing_that_lives_elsewhere() -> None:
    table = np.array([[0, 1, 0, 2, 1, 2]], np.int16)
    split = reweight(table, np.array([[4.0, 1.0, 1.0]]), 3, 3, live=np.array([True, True, False]))
    np.testing.assert_array_equal(
        split.spill, [[split.spill[0, 0], FULL, FULL - split.spill[0, 0], FULL, 0, 0]]
    )
    np.testing.assert_array_equal(split.keep[0, 4:], 0)


def test_contradicting_shapes_are_refused_by_name() -> None:
    table = np.zeros((1, 4), np.int16)
    with pytest.raises(ValueError, match="does not fit 3 ranks"):
        reweight(table, np.ones((1, 1)), 3, 1)
    with pytest.raises(ValueError, match=r"demand has shape \(2, 1\); expected \(1, 1\) or \(2, 1, 1\)"):
        reweight(table, np.ones((2, 1)), 2, 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5), st.booleans(), st.booleans())
def test_every_split_is_one_that_a_placement_takes_and_never_fuller_than_the_even_one(
    seed: int, ranks: int, sources: bool, nodes: bool
) -> None:
    dice = np.random.default_rng(seed)
    table = tables(2, 2 * ranks, ranks, 3 * ranks, dice)
    shape = (ranks, 2, 2 * ranks) if sources else (2, 2 * ranks)
    demand = dice.gamma(0.5, size=shape) * (dice.random(shape) < 0.7)
    node = np.arange(ranks) % 2 if nodes else None
    split = reweight(table, demand, ranks, 2 * ranks, node)
    now, even = served(table, demand, ranks, split, node), served(table, demand, ranks, None, node)
    np.testing.assert_allclose(now.sum(axis=1), even.sum(axis=1))
    assert (
        now.max(axis=1) <= np.maximum(even.max(axis=1), 1.006 * even.mean(axis=1)) + 1e-3 * even.sum(axis=1)
    ).all()
