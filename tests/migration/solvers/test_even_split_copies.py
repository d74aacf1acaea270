"""Few copies with even shares: the balance they win back, their number, and the limits they keep."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.rig.placements.cases import Case, Drifting, balance, rank_loads
from fleet.arrays import SlotTable
from fleet.placement import EMPTY, Placement
from migration.model.constraints import Constraints
from migration.model.placement_changes import (
    ChangeKind,
    PlacementChanges,
    copies_between,
    made,
    taken,
    within,
)
from migration.model.sampling_noise import LoadNoise, changed, deviations, expected_max, expected_most
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_placement import full_placement


def random_table(
    layers: int, experts: int, ranks: int, per_rank: int, dice: np.random.Generator
) -> SlotTable:
    """Every expert at least once, replicas and empty slots where there is room."""
    table = np.full((layers, ranks, per_rank), EMPTY, np.int16)
    for row in table:
        row.T.flat[:experts] = dice.permutation(experts)
        for rank, slot in np.argwhere(row == EMPTY):
            expert = dice.integers(-1, experts)
            if expert not in row[rank]:
                row[rank, slot] = expert
    return table.reshape(layers, -1)


def most_loaded(
    table: SlotTable, load: NDArray[np.float64], ranks: int, live: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """[layers], in mean rank loads."""
    alive = np.ones(ranks, bool) if live is None else live
    table = np.where(np.repeat(alive, table.shape[1] // ranks), table, EMPTY)
    loads = rank_loads(table, load, ranks)[:, alive]
    return np.asarray(loads.max(axis=1) / loads.mean(axis=1))


def replicas(table: SlotTable, experts: int, live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[layers, experts], on live ranks."""
    counts = np.zeros((len(table), experts), np.int64)
    for slot in np.flatnonzero(np.repeat(live, table.shape[1] // len(live))):
        held = np.flatnonzero(table[:, slot] != EMPTY)
        counts[held, table[held, slot]] += 1
    return counts


def states(table: SlotTable, changes: PlacementChanges) -> Iterator[SlotTable]:
    """The table after each of the changes."""
    for number in range(len(changes.kind)):
        yield made(table, taken(changes, np.arange(number + 1)))


def test_one_swap_evens_out_two_ranks() -> None:
    table = np.array([[0, 1, 2, 3]], np.int16)
    changes = even_split_copies(table, np.array([[4.0, 3.0, 2.0, 1.0]]), 2, goal=np.array([1.0]))
    assert [ChangeKind(kind) for kind in changes.kind] == [ChangeKind.SWAP]
    assert most_loaded(made(table, changes), np.array([[4.0, 3.0, 2.0, 1.0]]), 2) == pytest.approx([1.0])


def test_a_hot_expert_is_replicated_into_an_empty_slot() -> None:
    table = np.array([[0, EMPTY, 1, EMPTY]], np.int16)
    changes = even_split_copies(table, np.array([[4.0, 0.0]]), 2, goal=np.array([1.0]))
    assert [ChangeKind(kind) for kind in changes.kind] == [ChangeKind.REPLICATE]
    assert copies_between(table, made(table, changes), 2) == 1


def test_a_spare_replica_of_the_fullest_rank_is_given_up_for_nothing() -> None:
    table = np.array([[0, 1, 0, 2]], np.int16)
    changes = even_split_copies(table, np.array([[2.0, 4.0, 2.0]]), 2, goal=np.array([1.0]))
    assert [ChangeKind(kind) for kind in changes.kind] == [ChangeKind.DROP]
    assert changes.copies.sum() == 0


def test_a_flat_layer_is_left_as_it_is() -> None:
    assert not even_split_copies(
        np.arange(8, dtype=np.int16)[None, :], np.ones((1, 8)), 4, goal=np.array([1.0])
    )


def test_no_demand_and_one_rank_are_left_as_they_are() -> None:
    assert not even_split_copies(
        np.arange(8, dtype=np.int16)[None, :], np.zeros((1, 8)), 4, goal=np.array([1.0])
    )
    assert not even_split_copies(
        np.arange(8, dtype=np.int16)[None, :], np.arange(8.0)[None, :], 1, goal=np.array([1.0])
    )


@pytest.mark.parametrize(("table", "goal", "named"), [((1, 7), (1,), "7 slots"), ((1, 8), (2,), r"\(2,\)")])
def test_what_does_not_fit_together_is_named(table: tuple[int, int], goal: tuple[int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        even_split_copies(np.zeros(table, np.int16), np.ones((1, 4)), 4, goal=np.ones(goal))


def test_without_redundancy_everything_is_a_swap() -> None:
    dice = np.random.default_rng(0)
    table = np.stack([dice.permutation(24) for _ in range(4)]).astype(np.int16)
    changes = even_split_copies(table, dice.lognormal(0.0, 0.5, (4, 24)), 4, goal=np.full(4, 0.99))
    assert set(changes.kind) == {ChangeKind.SWAP}


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_every_state_between_is_legal_and_gains_add_up(seed: int) -> None:
    dice = np.random.default_rng(seed)
    layers, ranks, per = 2, int(dice.integers(2, 6)), int(dice.integers(1, 5))
    experts = int(dice.integers(max(1, ranks * per - 4), ranks * per + 1))
    table, load = random_table(layers, experts, ranks, per, dice), dice.lognormal(0.0, 1.0, (layers, experts))
    changes = even_split_copies(table, load, ranks, goal=np.ones(layers))
    before, now = most_loaded(table, load, ranks), table
    for after in states(table, changes):
        Placement(after, experts=experts, ranks=ranks)  # refuses what is not legal
        now = after
    gained = np.bincount(changes.layer, changes.gain, layers)
    assert gained == pytest.approx(before - most_loaded(now, load, ranks), abs=1e-6)
    assert (most_loaded(now, load, ranks) <= before + 1e-9).all()
    assert copies_between(table, now, ranks) <= changes.copies.sum()


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_every_limit_is_kept(seed: int) -> None:
    dice = np.random.default_rng(seed)
    layers, experts, ranks, per = 3, 9, 5, 3
    table, load = random_table(layers, experts, ranks, per, dice), dice.lognormal(0.0, 1.0, (layers, experts))
    live = np.ones(ranks, bool)
    live[dice.integers(0, ranks)] = dice.random() < 0.5
    start = replicas(table, experts, live)
    frozen, least = dice.random((layers, experts)) < 0.2, dice.integers(1, 3, (layers, experts))
    copies, most = int(dice.integers(0, 9)), int(dice.integers(1, 4))
    limits = Constraints(max_copies=copies, max_replicas=most, frozen=frozen, live=live, min_replicas=least)
    changes = even_split_copies(table, load, ranks, limits, goal=np.ones(layers))
    assert changes.copies.sum() <= copies
    for after in states(table, changes):
        assert (after == table)[:, ~np.repeat(live, per)].all(), "a slot of a dead rank was written"
        counts = replicas(after, experts, live)
        assert (counts >= np.minimum(start, least)).all()
        assert (counts <= np.maximum(start, most)).all()
        for layer, expert in np.argwhere(frozen).tolist():
            assert (
                np.flatnonzero(after[layer] == expert).tolist()
                == np.flatnonzero(table[layer] == expert).tolist()
            ), "a frozen expert was touched"


def test_the_same_is_answered_to_the_same() -> None:
    dice = np.random.default_rng(3)
    table, load = random_table(4, 30, 6, 6, dice), dice.lognormal(0.0, 1.0, (4, 30))
    once, again = (even_split_copies(table, load, 6, goal=np.ones(4)) for _ in range(2))
    assert [part.tolist() for part in once] == [part.tolist() for part in again]


def after_one(row: NDArray[np.int16], ranks: int) -> Iterator[tuple[int, NDArray[np.int16]]]:
    """Yield (copies, row) for every legal row that one change produces."""
    per = len(row) // ranks
    for slot in range(len(row)):
        here = row[slot // per * per : slot // per * per + per]
        spare = row[slot] == EMPTY or (row == row[slot]).sum() > 1
        if spare:
            for expert in set(row.tolist()) - set(here.tolist()) - {EMPTY}:
                new = row.copy()
                new[slot] = expert
                yield 1, new
                for old in np.flatnonzero(row == expert):
                    moved = new.copy()
                    moved[old] = EMPTY
                    yield 1, moved
            if row[slot] != EMPTY:
                new = row.copy()
                new[slot] = EMPTY
                yield 0, new
        for other in range((slot // per + 1) * per, len(row)):
            there = row[other // per * per : other // per * per + per]
            if EMPTY not in (row[slot], row[other]) and row[slot] not in there and row[other] not in here:
                new = row.copy()
                new[[slot, other]] = row[[other, slot]]
                yield 2, new


def best_within(row: NDArray[np.int16], load: NDArray[np.float64], ranks: int, budget: int) -> float:
    """Least load of the fullest rank after at most two changes within this budget of copies."""
    found = [row]
    for copies, one in after_one(row, ranks):
        if copies <= budget:
            found.append(one)
            found += [two for more, two in after_one(one, ranks) if copies + more <= budget]
    return float(most_loaded(np.stack(found), np.tile(load, (len(found), 1)), ranks).min())


def test_comes_near_the_best_of_all_pairs_of_changes() -> None:
    part = []
    for seed in range(12):
        dice = np.random.default_rng(seed)
        table, load = random_table(1, 6, 3, 3, dice), dice.lognormal(0.0, 0.7, (1, 6))
        budget = int(dice.integers(1, 4))
        keep, best = most_loaded(table, load, 3)[0], best_within(table[0], load, 3, budget)
        changes = even_split_copies(
            table, load, 3, Constraints(max_copies=budget, target=1.0), goal=np.array([1.0 / best])
        )
        part.append(
            (keep - most_loaded(made(table, changes), load, 3)[0]) / (keep - best)
            if keep > best + 1e-9
            else 1.0
        )
    assert np.mean(part) > 0.85, part
    assert np.median(part) > 0.99, part


@pytest.fixture(scope="module")
def drifting() -> Drifting:
    return Drifting(Case("lognormal", 4, 64, 8, 72, 0), "mix25")


def test_wins_back_what_is_wanted_on_the_next_window_for_a_fraction_of_the_copies(drifting: Drifting) -> None:
    ranks = drifting.case.ranks
    before, anew = (
        full_placement(load, ranks, drifting.case.per_rank) for load in (drifting.before, drifting.now)
    )
    goal = balance(anew, drifting.now, ranks)
    after = made(
        before,
        even_split_copies(before, drifting.now, ranks, goal=goal, noise=LoadNoise(drifting.case.window)),
    )
    keep, most, now = (balance(table, drifting.next, ranks).mean() for table in (before, anew, after))
    assert now >= keep + 0.93 * (most - keep)
    assert copies_between(before, after, ranks) < 0.25 * copies_between(before, anew, ranks)


def test_a_smaller_budget_takes_the_best_of_the_changes(drifting: Drifting) -> None:
    ranks = drifting.case.ranks
    before = full_placement(drifting.before, ranks, drifting.case.per_rank)
    changes = even_split_copies(before, drifting.now, ranks, goal=np.ones(4))
    all_copies = int(changes.copies.sum())
    falls = [most_loaded(before, drifting.now, ranks).sum() - most_loaded(made(before, within(changes, budget)), drifting.now, ranks).sum() for budget in
             (all_copies // 4, all_copies // 2, all_copies)]  # fmt: skip
    assert falls[0] >= 0.25 * falls[2]
    assert falls[0] <= falls[1] <= falls[2]


def test_a_new_sample_of_the_same_demand_copies_nothing() -> None:
    for seed in range(3):
        same = Drifting(Case("zipf", 8, 64, 8, 72, seed), "noise")
        before, anew = (full_placement(load, 8, 9) for load in (same.before, same.now))
        assert not even_split_copies(
            before, same.now, 8, goal=balance(anew, same.now, 8), noise=LoadNoise(same.case.window)
        )


def test_imbalance_that_drowns_in_the_noise_of_a_step_is_left_alone() -> None:
    load = np.array([[0.53, 0.5, 0.47, 0.5, 0.5, 0.5, 0.5, 0.5]]) * 1e9
    table, goal = np.arange(8, dtype=np.int16)[None, :], np.array([1.0])
    assert even_split_copies(table, load, 4, goal=goal, noise=LoadNoise(4e9))
    assert even_split_copies(table, load, 4, goal=goal, noise=LoadNoise(4e9, step=4e5))
    assert not even_split_copies(table, load, 4, goal=goal, noise=LoadNoise(4e9, step=400.0))


def test_one_changed_layer_among_many_is_found() -> None:
    same = Drifting(Case("mild", 8, 64, 8, 72, 0), "noise")
    before, load = full_placement(same.before, 8, 9), same.now.copy()
    load[5] = np.roll(load[5], 1)
    goal = balance(full_placement(load, 8, 9), load, 8)
    assert set(even_split_copies(before, load, 8, goal=goal, noise=LoadNoise(same.case.window)).layer) == {5}


def test_noise_of_a_rank_is_that_of_counts() -> None:
    dice = np.random.default_rng(0)
    shares = np.array([[[0.6, 0.4], [0.7, 0.3]]])
    counts = dice.poisson(np.tile(shares * 500.0, (20_000, 1, 1)))
    between = (counts[::2] - counts[1::2]).sum(axis=2) / 500.0
    assert deviations(shares, np.ones_like(shares), 1000.0)[0] == pytest.approx(between.std(axis=0), rel=0.05)


def test_the_largest_of_normals_is_foretold() -> None:
    dice = np.random.default_rng(1)
    loads = np.array([[1.0, 1.0, 1.0, 0.99], [1.02, 0.98, 1.0, 1.0]])
    drawn = (loads + 0.01 * dice.standard_normal((50_000, 2, 4))).max(axis=2).mean(axis=0)
    assert expected_max(loads, np.array([0.01, 0.01])) == pytest.approx(drawn, abs=2e-4)
    assert expected_most(1) == pytest.approx(0.0, abs=1e-9)


def test_changed_layers_are_told_from_noisy_ones() -> None:
    dice = np.random.default_rng(2)
    loads = 1.0 + 0.01 * dice.standard_normal((50, 16))
    loads[7, 3] += 0.08
    assert np.flatnonzero(changed(loads, np.ones(50), np.full(50, 0.01))).tolist() == [7]
