"""Lost ranks: surviving experts are served at once, lost ones are loaded, and a lack of slots is reported."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.placement import EMPTY, Placement, linear
from migration.model.constraints import Constraints
from migration.model.placement_changes import ChangeKind, made
from migration.model.plan import planned, replay
from migration.planning.handover_batching import ordered
from migration.planning.rank_loss import critical, recover
from migration.planning.sentences import recovery_summary
from migration.planning.staging_capacity import StagingRoom


def filled(dice: np.random.Generator, layers: int, experts: int, ranks: int, per: int) -> Placement:
    """A linear placement, with further replicas in the remaining slots."""
    table = linear(layers=layers, experts=experts, ranks=ranks, slots_per_rank=per).expert_of_slot.copy()
    for row in table.reshape(layers, ranks, per):
        for rank, slot in np.argwhere(row == EMPTY):
            free = np.setdiff1d(np.arange(experts), row[rank])
            row[rank, slot] = dice.choice(np.append(free, EMPTY))
    return Placement(table, experts=experts, ranks=ranks, epoch=2)


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 5), per=st.integers(1, 4), share=st.floats(0.3, 1.0), seed=st.integers(0, 10_000))
def test_every_expert_that_fits_has_a_live_holder_in_the_end_and_every_state_before_is_legal(
    ranks: int, per: int, share: float, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    experts = max(1, int(share * ranks * per))
    start = filled(dice, 2, experts, ranks, per)
    dead = np.zeros(ranks, bool)
    dead[dice.choice(ranks, dice.integers(1, ranks), replace=False)] = True
    load, node = dice.random((2, experts)), np.arange(ranks) // 2
    least = critical(load, experts // 3)

    found = recover(start, dead, load, node, least)
    plan = planned(
        start, ordered(start, found.changes, StagingRoom(node, 10), limits=Constraints(live=~dead))
    )
    epochs = replay(start, plan)

    last = epochs[-1] if epochs else start
    assert np.array_equal(last.expert_of_slot, found.table)
    assert np.array_equal(made(start.expert_of_slot, found.changes), found.table)
    holders = last.replicas_on_rank[:, ~dead].sum(axis=1)
    room = int((~dead).sum()) * per
    assert ((holders == 0).sum(axis=1) == max(0, experts - room)).all()
    assert found.missing.tolist() == [max(0, experts - room)] * 2
    assert found.possible == (experts <= room)
    assert found.lost.tolist() == np.argwhere(start.replicas_on_rank[:, ~dead].sum(axis=1) == 0).tolist()
    short = (holders > 0) & (holders < least)
    assert found.short.tolist() == np.argwhere(short).tolist()
    if found.possible:
        assert not last.replicas_on_rank[:, dead].any()
    for copy in plan.copies:
        assert copy.source is None or not dead[copy.source // per]
        assert not dead[copy.slot // per]


def test_what_survives_elsewhere_needs_no_bytes() -> None:
    start = Placement(np.array([[0, 1, 1, 0]]), experts=2, ranks=2)
    found = recover(start, np.array([True, False]), np.ones((1, 2)), np.zeros(2, np.intp))
    assert [ChangeKind(kind) for kind in found.changes.kind] == [ChangeKind.DROP, ChangeKind.DROP]
    assert found.table.tolist() == [[EMPTY, EMPTY, 1, 0]]
    assert recovery_summary(found) == "every expert has a live holder"


def test_the_most_wanted_of_the_lost_is_loaded_first_and_a_spare_replica_gives_way() -> None:
    start = Placement(np.array([[0, 1, 2, 3, 2, 3, EMPTY, 4]]), experts=5, ranks=4)
    found = recover(
        start,
        np.array([True, False, False, False]),
        np.array([[1.0, 5.0, 3.0, 2.0, 1.0]]),
        np.zeros(4, np.intp),
    )
    moves = [
        (int(slot), int(expert))
        for kind, slot, expert in zip(
            found.changes.kind, found.changes.slot, found.changes.expert, strict=True
        )
        if kind == ChangeKind.MOVE
    ]
    assert moves == [(6, 1), (3, 0)]
    assert (found.lost.tolist(), found.possible) == ([[0, 0], [0, 1]], True)
    assert (
        recovery_summary(found)
        == "2 experts of 1 layers have no live holder; all of them are loaded from storage"
    )


def test_a_second_holder_goes_to_a_node_that_has_none() -> None:
    start = Placement(np.array([[0, EMPTY, 1, EMPTY, 2, EMPTY, 0, EMPTY]]), experts=3, ranks=4)
    found = recover(
        start,
        np.array([False, False, False, True]),
        np.array([[5.0, 9.0, 9.0]]),
        np.array([0, 0, 1, 1]),
        np.array([[2, 1, 1]]),
        max_copies=0,
    )
    assert found.table.tolist() == [[0, EMPTY, 1, EMPTY, 2, 0, EMPTY, EMPTY]]


def test_the_survivors_are_evened_out_and_what_nobody_holds_comes_before_that() -> None:
    dice = np.random.default_rng(4)
    start, load, node = filled(dice, 6, 24, 6, 6), dice.random((6, 24)) ** 3, np.zeros(6, np.intp)
    dead = np.arange(6) == 2
    plain, found = (recover(start, dead, load, node, max_copies=most) for most in (0, None))
    worst = []
    for one in (plain, found):
        each = load / np.maximum((one.table[:, :, None] == np.arange(24)).sum(axis=1), 1)
        served = np.where(
            one.table == EMPTY,
            0.0,
            np.take_along_axis(each, np.where(one.table == EMPTY, 0, one.table).astype(np.intp), axis=1),
        )
        worst.append(served.reshape(6, 6, -1).sum(axis=2).max(axis=1).mean() / (load.sum(axis=1).mean() / 5))
    assert worst[1] < 1.1 < worst[0]
    series = ordered(start, found.changes, StagingRoom(node, 10, staging=3), limits=Constraints(live=~dead))
    stored = [[copy.source is None for step in handover.steps for copy in step.copies] for handover in series]
    assert stored[0] == sorted(stored[0], reverse=True)
    assert any(stored[0])
    assert not any(stored[-1])
    assert (
        recover(start, dead, load, node, max_copies=3).changes.copies.sum() <= plain.changes.copies.sum() + 3
    )


def test_a_second_holder_that_must_be_is_given_up_for_an_expert_that_has_none() -> None:
    start = Placement(np.array([[0, 1, 0, 2, 3, EMPTY]]), experts=4, ranks=3)
    found = recover(
        start, np.array([False, False, True]), np.ones((1, 4)), np.zeros(3, np.intp), np.array([[2, 1, 1, 1]])
    )
    assert found.possible
    assert found.short.tolist() == [[0, 0]]
    assert "1 have fewer holders than they must" in recovery_summary(found)


def test_too_few_slots_are_told_and_the_most_wanted_are_saved() -> None:
    start = Placement(np.array([[0, 1, 2, 3]]), experts=4, ranks=2)
    found = recover(start, np.array([True, False]), np.array([[1.0, 2.0, 3.0, 4.0]]), np.zeros(2, np.intp))
    assert (found.possible, found.missing.tolist(), len(found.changes.kind)) == (False, [2], 0)
    assert "lack 2 slots, 2 of them in layer 0" in recovery_summary(found)


def test_the_hottest_experts_of_each_layer_are_critical() -> None:
    assert critical(np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0]]), 2).tolist() == [[2, 1, 2], [2, 2, 1]]
    with pytest.raises(ValueError, match="choose 0 to 3"):
        critical(np.ones((1, 3)), 4)


def test_what_is_held_twice_stays_critical_until_others_are_wanted_clearly_more_in_both_windows() -> None:
    load, later = np.array([[10.0, 9.0, 8.0, 1.0]]), np.array([[20.0, 10.0, 18.0, 2.0]])
    assert critical(load, 2, np.array([[1, 1, 1, 1]])).tolist() == [[2, 2, 1, 1]]
    assert critical(load, 2, np.array([[1, 1, 2, 1]])).tolist() == [[2, 1, 2, 1]], (
        "it is wanted nearly as much"
    )
    assert critical(load, 2, np.array([[1, 1, 1, 2]])).tolist() == [[2, 2, 1, 1]], "it is wanted clearly less"
    assert critical(np.array([[10.0, 9.0, 6.0, 1.0]]), 2, np.array([[1, 1, 2, 1]])).tolist() == [[2, 2, 1, 1]]
    assert critical(np.array([[10.0, 9.0, 6.0, 1.0]]), 2, np.array([[1, 1, 2, 1]]), later).tolist() == [
        [2, 1, 2, 1]
    ], "but not in the other window"
    assert critical(load, 3, np.array([[3, 2, 2, 2]])).sum() == 4 + 3, "never more than so many"


def test_a_second_holder_takes_no_place_of_experts_that_rest_but_lost_experts_do() -> None:
    start = Placement(np.array([[0, 1, 2, 0, 3, 1]]), experts=4, ranks=2)
    alive, node, load, least = (
        np.zeros(2, bool),
        np.zeros(2, np.intp),
        np.array([[4.0, 3.0, 9.0, 1.0]]),
        np.array([[1, 1, 2, 1]]),
    )
    rests = np.array([[False, True, False, False]])
    assert recover(start, alive, load, node, least, max_copies=0).table.tolist() == [[0, 1, 2, 0, 3, 2]]
    assert recover(start, alive, load, node, least, max_copies=0, frozen=rests).table.tolist() == [
        [0, 1, 2, 2, 3, 1]
    ]
    assert not recover(start, alive, load, node, least, frozen=np.ones((1, 4), bool)).changes
    lost = recover(start, np.array([True, False]), load, node, frozen=np.ones((1, 4), bool))
    assert lost.lost.tolist() == [[0, 2]]
    assert lost.missing.tolist() == [1]
    apart = Placement(np.array([[0, 1, 2, 3, 0, 1]]), experts=4, ranks=2)
    assert recover(
        apart, np.array([True, False]), load, node, frozen=np.ones((1, 4), bool)
    ).missing.tolist() == [1]


def test_layers_in_which_nothing_is_missing_are_left_alone() -> None:
    start = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY], [0, 1, EMPTY, 2, 3, EMPTY]]), experts=4, ranks=2)
    load, least = np.array([[9.0, 9.0, 1.0, 1.0]] * 2), np.array([[1, 1, 1, 1], [2, 1, 1, 1]])
    found = recover(start, np.zeros(2, bool), load, np.zeros(2, np.intp), least)
    assert set(found.changes.layer.tolist()) == {1}


def test_arguments_that_do_not_fit_are_refused() -> None:
    start = linear(layers=1, experts=2, ranks=2)
    with pytest.raises(ValueError, match="all ranks are dead"):
        recover(start, np.ones(2, bool), np.ones((1, 2)), np.zeros(2, np.intp))
    with pytest.raises(ValueError, match="the placement has 2 ranks"):
        recover(start, np.zeros(3, bool), np.ones((1, 2)), np.zeros(2, np.intp))
