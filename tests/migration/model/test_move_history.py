"""Moved experts cool down, and moves are not undone on the same evidence."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement, linear, with_rows
from migration.model.engine_view import Demand
from migration.model.move_history import NEVER, SIGNIFICANT, MoveHistory, differs
from migration.model.placement_changes import NOWHERE, ChangeKind, PlacementChanges, joined

WORKER = 5


def placement(row: list[int], epoch: int, layers: int = 1) -> Placement:
    return Placement(np.array([row] * layers), experts=3, ranks=2, epoch=epoch)


def counts(*shares: float, pairs: float = 10_000.0) -> NDArray[np.float32]:
    """float32 [1, 1, experts]"""
    return np.array([[shares]], np.float32) * np.float32(pairs)


def change(
    kind: ChangeKind, slot: int, expert: int, other: int = NOWHERE, other_expert: int = EMPTY
) -> PlacementChanges:
    return PlacementChanges._make(
        np.array([part]) for part in (int(kind), 0, slot, expert, other, other_expert, 1.0)
    )


BEFORE, AFTER = [0, 1, 2, EMPTY], [0, 1, 2, 0]
"""expert 0 was replicated to rank 1"""
BACK = change(ChangeKind.DROP, 3, EMPTY)


def replicated(demand: NDArray[np.float32] | None) -> MoveHistory:
    return MoveHistory.begin(WORKER, placement(BEFORE, 0)).committed(
        placement(AFTER, 1), "plan", 100.0, demand
    )


def test_an_expert_that_was_moved_rests_and_its_layer_for_another_while() -> None:
    history = MoveHistory.begin(WORKER, placement(BEFORE, 0, layers=2)).committed(
        Placement(np.array([AFTER, BEFORE]), experts=3, ranks=2, epoch=1), "plan", 100.0
    )
    assert history.moved.tolist() == [[100.0, NEVER, NEVER], [NEVER] * 3]
    assert history.frozen(150.0, 60.0).tolist() == [[True, False, False], [False] * 3]
    assert history.frozen(150.0, 60.0, 60.0).tolist() == [[True] * 3, [False] * 3]
    assert not history.frozen(161.0, 60.0, 60.0).any()


def test_changing_slots_inside_a_rank_is_no_move() -> None:
    history = MoveHistory.begin(WORKER, placement([0, 1, 2, EMPTY], 0)).committed(
        placement([1, 0, EMPTY, 2], 1), "plan", 100.0
    )
    assert (history.moved == NEVER).all()


def test_what_the_last_plan_did_is_not_undone_on_the_same_demand() -> None:
    history = replicated(counts(0.5, 0.25, 0.25))
    assert not history.without_reversals(BACK, counts(0.5, 0.25, 0.25))
    assert not history.without_reversals(BACK, counts(0.505, 0.245, 0.25))
    assert history.without_reversals(BACK, counts(0.2, 0.55, 0.25))


def test_new_demand_for_what_comes_instead_is_evidence_too() -> None:
    history = replicated(counts(0.5, 0.25, 0.25))
    instead = change(ChangeKind.REPLICATE, 3, 1)
    assert not history.without_reversals(instead, counts(0.5, 0.25, 0.25))
    assert history.without_reversals(instead, counts(0.5, 0.35, 0.15))


def test_what_builds_on_a_dropped_change_is_dropped_with_it() -> None:
    history = replicated(counts(0.5, 0.25, 0.25))
    both = joined([BACK, change(ChangeKind.REPLICATE, 3, 1)])
    assert not history.without_reversals(both, counts(0.5, 0.25, 0.25))


def test_what_the_last_plan_did_not_touch_is_free() -> None:
    history = replicated(counts(0.5, 0.25, 0.25))
    assert history.without_reversals(change(ChangeKind.SWAP, 1, 2, 2, 1), counts(0.5, 0.25, 0.25))


def test_a_rank_whose_own_demand_changed_is_evidence_though_the_sum_did_not() -> None:
    by_rank = np.array([[[4000, 500, 500]], [[500, 4000, 500]]], np.float32)
    history = replicated(by_rank)
    assert not history.without_reversals(BACK, by_rank)
    assert history.without_reversals(BACK, by_rank[::-1])


def test_handovers_of_one_plan_count_as_one_and_those_of_another_begin_anew() -> None:
    history = replicated(counts(0.5, 0.25, 0.25))
    later = history.committed(placement([0, EMPTY, 2, 1], 2), "plan", 110.0)
    assert np.array_equal(later.base, placement(BEFORE, 0).expert_of_slot)
    assert later.demand is history.demand
    other = later.committed(placement(AFTER, 3), "other", 120.0)
    assert np.array_equal(other.base, later.table)
    assert other.demand is None


def test_after_a_restart_the_first_demand_seen_is_the_evidence() -> None:
    history = replicated(None)
    assert not history.without_reversals(BACK, counts(0.2, 0.55, 0.25))
    history = history.seen(counts(0.5, 0.25, 0.25))
    assert history.without_reversals(BACK, counts(0.2, 0.55, 0.25))
    assert history.seen(counts(0.2, 0.55, 0.25)) is history


def test_an_epoch_that_is_known_changes_nothing_and_another_shape_is_refused() -> None:
    history = replicated(None)
    assert history.committed(placement(BEFORE, 1), "other", 200.0) is history
    with pytest.raises(ValueError, match="begin anew"):
        history.committed(Placement(np.array([[0, 1, 2]]), experts=3, ranks=1, epoch=2), None, 200.0)


def test_an_epoch_of_no_plan_leaves_nothing_to_be_undone() -> None:
    history = MoveHistory.begin(WORKER, placement(BEFORE, 0)).committed(placement(AFTER, 1), None, 100.0)
    assert history.without_reversals(BACK, counts(0.5, 0.25, 0.25))


def test_two_samples_of_one_demand_hardly_ever_differ() -> None:
    dice = np.random.default_rng(0)
    truth = dice.random((50, 200))
    one, other = dice.poisson(truth * 300), dice.poisson(truth * 100)
    assert differs(one, other, 2.0).mean() == pytest.approx(0.045, abs=0.01)
    assert differs(one, other, SIGNIFICANT).mean() < 1e-3
    assert differs(one, dice.poisson(truth[:, ::-1] * 100), SIGNIFICANT).mean() > 0.4


def test_the_evidence_of_a_demand_is_counts_of_the_pairs_behind_it() -> None:
    demand = Demand.of(np.array([[[1.0, 3.0]], [[0.0, 0.0]]]), np.array([8.0, 0.0]))
    assert demand.evidence.tolist() == [[[2.0, 6.0]], [[0.0, 0.0]]]
    assert demand.evidence_of(np.array([0])).tolist() == [[2.0, 6.0]]


def test_experts_that_did_harm_rest_until_their_time_also_while_others_are_moved() -> None:
    cells = np.zeros((1, 4), bool)
    cells[0, 2] = True
    history = (
        MoveHistory.begin(1, linear(layers=1, experts=4, ranks=2)).harmed(cells, 100.0).harmed(cells, 50.0)
    )
    moved = Placement(np.array([[1, 0, 2, 3]], np.int16), experts=4, ranks=2, epoch=1)
    later = history.committed(moved, "p", 10.0)
    np.testing.assert_array_equal(later.frozen(99.0, 1.0), cells)
    assert not later.frozen(100.0, 1.0).any()
    with pytest.raises(ValueError, match="are to rest"):
        history.harmed(np.ones((2, 4), bool), 1.0)


def test_a_layer_that_turns_over_neither_rests_nor_is_there_anything_to_undo() -> None:
    before = placement(BEFORE, 0, layers=2)
    history = MoveHistory.begin(WORKER, before).committed(
        with_rows(before, {0: None, 1: np.array(AFTER)}, epoch=1), "there", 100.0, counts(1, 1, 1)
    )
    assert history.moved.tolist() == [[NEVER] * 3, [100.0, NEVER, NEVER]]
    back = history.committed(placement(AFTER, 2, layers=2), "back", 200.0, counts(1, 1, 1))
    assert back.moved.tolist() == history.moved.tolist()
    assert back.without_reversals(BACK, counts(1, 1, 1)).kind.tolist() == [ChangeKind.DROP]
