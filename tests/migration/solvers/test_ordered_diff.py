"""Changes towards a placement: every intermediate state is legal, gains are correct, limits are kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.rig.placements.popularity import by_rank, domains
from fleet.placement import Placement, linear
from migration.model.constraints import Constraints
from migration.model.placement_changes import made, taken
from migration.solvers.load_cap import held_of, level
from migration.solvers.locality_placement import LocalityPrices, LocalityProblem, locality_placement, worth_of
from migration.solvers.ordered_diff import ordered_diff
from migration.solvers.split_weights import DemandPull

RANKS, EXPERTS, SLOTS, LAYERS = 4, 12, 5, 2
ROOM = LocalityProblem(np.zeros(RANKS, np.intp), SLOTS, balance=0.5)


def tables(
    seed: int, room: LocalityProblem = ROOM
) -> tuple[NDArray[np.int16], NDArray[np.int16], NDArray[np.float64]]:
    """A placement for one demand, one for another, and the other demand."""
    dice = np.random.default_rng(seed)
    first, second = (
        100.0 * by_rank(domains("zipf", RANKS, 0.8, LAYERS, EXPERTS, dice), RANKS, 0.0) for _ in range(2)
    )
    begun = (
        linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS).expert_of_slot
        if seed % 2
        else locality_placement(first, room).table
    )
    return begun, locality_placement(second, room).table, second


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_every_state_between_is_legal_and_gains_add_up(seed: int, nodes: bool) -> None:
    room = (
        LocalityProblem(np.arange(RANKS) // 2, SLOTS, LocalityPrices(1.0, 2.0), balance=0.5)
        if nodes
        else ROOM
    )
    table, target, demand = tables(seed, room)
    changes = ordered_diff(table, target, demand, room)
    for upto in range(len(changes.kind) + 1):
        Placement(made(table, taken(changes, np.arange(upto))), experts=EXPERTS, ranks=RANKS)
    worth, after = worth_of(demand, room), made(table, changes)
    unit = demand.sum(axis=(0, 2)) * (sum(room.prices) if nodes else 1.0)
    won = [(worth.of(held_of(one, RANKS, EXPERTS)) * unit).sum() for one in (table, after, target)]
    assert changes.gain.sum() == pytest.approx(won[1] - won[0])
    assert won[1] >= won[0]
    if won[2] > won[0]:
        assert won[1] - won[0] >= 0.8 * (won[2] - won[0])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_a_level_target_is_reached_although_the_last_changes_only_level_the_ranks(seed: int) -> None:
    dice = np.random.default_rng(seed)
    room = LocalityProblem(np.zeros(RANKS, np.intp), 10)
    first, second = (dice.gamma(1.0, 100.0, (RANKS, 4, 32)) for _ in range(2))
    table, goal = locality_placement(first, room).table, locality_placement(second, room)
    after, worth = made(table, ordered_diff(table, goal.table, second, room)), worth_of(second, room)
    won = [worth.of(held_of(one, RANKS, 32)) for one in (table, after, goal.table)]
    fullest = level(goal.table, DemandPull(second, RANKS, room.node, None)).load.max(axis=1)
    fits = fullest <= 1.0 / room.balance
    assert fits.any()
    assert ((won[1] - won[0]) >= 0.95 * (won[2] - won[0]))[fits].all()


def test_the_budget_is_kept_and_the_best_copies_come_first() -> None:
    table, target, demand = tables(4)
    whole = ordered_diff(table, target, demand, ROOM)
    few = ordered_diff(table, target, demand, ROOM, Constraints(max_copies=6))
    assert 0 < few.copies.sum() <= 6
    assert few.gain.sum() / few.copies.sum() >= whole.gain.sum() / whole.copies.sum()
    assert not ordered_diff(table, target, demand, ROOM, Constraints(max_copies=0))


def test_nothing_is_done_for_a_target_that_is_there_or_wins_nothing() -> None:
    for seed in range(6):
        table, target, demand = tables(seed)
        worth, unit = worth_of(demand, ROOM), demand.sum(axis=(0, 2))
        there, back = ((worth.of(held_of(one, RANKS, EXPERTS)) * unit).sum() for one in (target, table))
        assert back < there  # the way back wins nothing
        assert not ordered_diff(target, target, demand, ROOM)
        assert not ordered_diff(target, table, demand, ROOM)


def test_what_rests_is_not_touched_and_dead_ranks_get_nothing() -> None:
    table, target, demand = tables(6)
    frozen = np.zeros((LAYERS, EXPERTS), bool)
    frozen[:, ::2] = True
    resting = ordered_diff(table, target, demand, ROOM, Constraints(frozen=frozen))
    assert resting
    before, after = (held_of(one, RANKS, EXPERTS) for one in (table, made(table, resting)))
    assert np.array_equal(before[:, :, ::2], after[:, :, ::2])
    live = np.array([True, False, True, True])
    changes = ordered_diff(table, target, demand, ROOM, Constraints(live=live))
    slots = np.concatenate([changes.slot, changes.other_slot[changes.other_slot >= 0]])
    assert (slots // SLOTS != 1).all()
    alive = (
        held_of(table, RANKS, EXPERTS)[:, live].sum(axis=1),
        held_of(made(table, changes), RANKS, EXPERTS)[:, live].sum(axis=1),
    )
    assert (alive[1][alive[0] > 0] > 0).all()


def test_experts_that_must_survive_keep_so_many_holders() -> None:
    table, target, demand = tables(8)
    least = held_of(table, RANKS, EXPERTS).sum(axis=1)
    after = made(table, ordered_diff(table, target, demand, ROOM, Constraints(min_replicas=least)))
    assert (held_of(after, RANKS, EXPERTS).sum(axis=1) >= least).all()


def test_a_rank_that_would_be_too_full_is_spared() -> None:
    room = LocalityProblem(np.zeros(2, np.intp), 3, balance=0.9)
    table = np.array([[0, 1, -1, 2, 3, -1]], np.int16)
    target = np.array([[2, 3, -1, 0, 1, -1]], np.int16)
    demand = np.zeros((2, 1, 4))
    demand[0, 0], demand[1, 0] = [0, 30, 10, 10], [10, 10, 30, 0]
    assert ordered_diff(table, np.array([[0, 1, 2, 3, -1, -1]], np.int16), demand, room).copies.sum() <= 1
    changes = ordered_diff(table, target, demand, room)
    held = [held_of(one, 2, 4)[0] for one in (table, made(table, changes))]
    full = [
        (demand.sum(axis=(0, 1)) / one.sum(axis=0) * one).sum(axis=1).max() for one in held
    ]  # replicas share evenly
    assert full[1] <= max(full[0], demand.sum() / 2 / room.balance)
    local = [(demand[:, 0] * one).sum() for one in held]
    assert changes.gain.sum() == local[1] - local[0] > 0


def test_shapes_that_contradict_each_other_are_refused() -> None:
    table, target, demand = tables(1)
    with pytest.raises(ValueError, match="toward"):
        ordered_diff(table[:1], target, demand, ROOM)
