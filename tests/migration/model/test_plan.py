"""Plans: ordering of changes, execution step by step, and the changes between two tables."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.arrays import SlotTable
from fleet.placement import EMPTY, FULL, Placement, Split, even_split
from migration.model.constraints import Constraints
from migration.model.placement_changes import (
    NOWHERE,
    ChangeKind,
    PlacementChanges,
    copies_between,
    joined,
    made,
    taken,
)
from migration.model.plan import Handover, Inapplicable, Plan, PlanCause, applied, planned, replay
from migration.planning.handover_batching import ordered, transfers
from migration.planning.staging_capacity import StagingRoom, Unorderable
from migration.solvers.table_diff import between, shortened

EXPERT_BYTES = 10


def changes(*rows: tuple[int, int, int, int, int, int, float]) -> PlacementChanges:
    """Make changes from (kind, layer, slot, expert, other slot, other expert, gain)."""
    types = (np.uint8, np.int32, np.int32, np.int16, np.int32, np.int16, np.float64)
    return PlacementChanges._make(
        np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)
    )


def replicate(layer: int, slot: int, expert: int, gain: float = 0.0) -> PlacementChanges:
    return changes((ChangeKind.REPLICATE, layer, slot, expert, NOWHERE, EMPTY, gain))


def swap(
    layer: int, slot: int, expert: int, other_slot: int, other_expert: int, gain: float = 0.0
) -> PlacementChanges:
    return changes((ChangeKind.SWAP, layer, slot, expert, other_slot, other_expert, gain))


def move(layer: int, slot: int, expert: int, other_slot: int, gain: float = 0.0) -> PlacementChanges:
    return changes((ChangeKind.MOVE, layer, slot, expert, other_slot, EMPTY, gain))


def drop(layer: int, slot: int) -> PlacementChanges:
    return changes((ChangeKind.DROP, layer, slot, EMPTY, NOWHERE, EMPTY, 0.0))


def placement(*rows: list[int], ranks: int, experts: int, epoch: int = 7) -> Placement:
    return Placement(np.array(rows), experts=experts, ranks=ranks, epoch=epoch)


def room(ranks: int, staging: int | None = None, per_node: int = 2) -> StagingRoom:
    return StagingRoom(np.arange(ranks) // per_node, EXPERT_BYTES, staging)


def random_table(dice: np.random.Generator, layers: int, experts: int, ranks: int, per: int) -> SlotTable:
    """Return a table with every expert at least once and never twice on a rank; other slots are filled at
    random."""
    table = np.full((layers, ranks, per), EMPTY, np.int16)
    for row in table:
        for expert in dice.permutation(experts):
            rank = dice.choice([rank for rank in range(ranks) if (row[rank] == EMPTY).any()])
            row[rank, dice.choice(np.flatnonzero(row[rank] == EMPTY))] = expert
        for rank, slot in np.argwhere(row == EMPTY):
            free = np.setdiff1d(np.arange(experts), row[rank])
            if len(free) and dice.random() < 0.6:
                row[rank, slot] = dice.choice(free)
    return table.reshape(layers, -1)


def random_changes(
    dice: np.random.Generator, table: SlotTable, ranks: int, experts: int, count: int
) -> PlacementChanges:
    """Return changes that are legal one after another, from a number of random attempts."""
    table, per, found = table.copy(), table.shape[1] // ranks, list[PlacementChanges]()
    for _ in range(count):
        layer, kind = int(dice.integers(len(table))), ChangeKind(int(dice.integers(4)))
        slot, other = (int(at) for at in dice.integers(table.shape[1], size=2))
        there = int(table[layer, slot])
        wanted = (
            int(dice.integers(experts))
            if kind == ChangeKind.REPLICATE
            else EMPTY
            if kind == ChangeKind.DROP
            else int(table[layer, other])
        )
        if (
            there == wanted
            or (kind == ChangeKind.SWAP and there == EMPTY)
            or (
                kind in (ChangeKind.SWAP, ChangeKind.MOVE)
                and (wanted == EMPTY or slot // per == other // per)
            )
        ):
            continue
        second = (
            (other, there if kind == ChangeKind.SWAP else EMPTY)
            if kind in (ChangeKind.SWAP, ChangeKind.MOVE)
            else (NOWHERE, EMPTY)
        )
        one = changes((kind, layer, slot, wanted, *second, float(dice.random())))
        after = made(table, one)
        if legal(after[[layer]], ranks, experts):
            table = after
            found.append(one)
    return joined(found)


def legal(table: SlotTable, ranks: int, experts: int) -> bool:
    try:
        Placement(table, experts=experts, ranks=ranks)
    except ValueError:
        return False
    return True


def holders(table: SlotTable, experts: int) -> NDArray[np.int64]:
    """[layers, experts]"""
    return np.asarray((table[:, :, None] == np.arange(experts)).sum(axis=1))


shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10_000)).flatmap(
    lambda of: st.tuples(
        st.just(of[0]), st.integers(1, of[1] * of[2]), st.just(of[1]), st.just(of[2]), st.just(of[3])
    )
)
"""(layers, experts, ranks, slots per rank, seed)"""


@settings(max_examples=30, deadline=None)
@given(shape=shapes, staging=st.integers(2, 4), weighted=st.booleans())
def test_any_legal_changes_become_handovers_that_are_legal_one_after_another_and_end_where_the_changes_do(
    shape: tuple[int, int, int, int, int], staging: int, weighted: bool
) -> None:
    layers, experts, ranks, per, seed = shape
    dice = np.random.default_rng(seed)
    table = random_table(dice, layers, experts, ranks, per)
    wanted = random_changes(dice, table, ranks, experts, 25)
    end = made(table, wanted)
    start = Placement(table, experts=experts, ranks=ranks, epoch=3)
    split = random_split(dice, end, experts) if weighted else None

    plan = planned(start, ordered(start, wanted, room(ranks, staging), split=split))
    epochs = replay(start, plan)

    assert [one.epoch for one in epochs] == list(range(4, 4 + len(epochs)))
    last = epochs[-1] if epochs else start
    assert np.array_equal(last.expert_of_slot, end)
    assert all(map(np.array_equal, last.split, even_split(end, experts) if split is None else split))
    assert plan.bytes == EXPERT_BYTES * int(wanted.copies.sum()) == sum(copy.bytes for copy in plan.copies)
    for before, handover in zip([start, *epochs], plan.handovers, strict=False):
        received = np.bincount(
            [copy.slot // per for step in handover.steps for copy in step.copies], minlength=ranks
        )
        assert received.max(initial=0) <= staging
        for step in handover.steps:
            assert step.why
            for copy in step.copies:
                holders = np.flatnonzero(before.expert_of_slot[step.layer] == copy.expert) // per
                near = bool((holders // 2 == copy.slot // per // 2).any())
                assert copy.link == ("same-node" if near else "cross-node")
                assert copy.source is not None
                assert copy.source // per in holders


@settings(max_examples=15, deadline=None)
@given(shape=shapes)
def test_experts_keep_the_live_holders_that_they_must_after_every_handover(
    shape: tuple[int, int, int, int, int],
) -> None:
    layers, experts, ranks, per, seed = shape
    dice = np.random.default_rng(seed)
    table = random_table(dice, layers, experts, ranks, per)
    wanted = random_changes(dice, table, ranks, experts, 25)
    start = Placement(table, experts=experts, ranks=ranks)
    last = Placement(made(table, wanted), experts=experts, ranks=ranks)
    count = np.minimum(start.replicas_on_rank.sum(axis=1), last.replicas_on_rank.sum(axis=1))
    least = np.minimum(count, dice.integers(1, 3, count.shape))
    plan = planned(start, ordered(start, wanted, room(ranks, 100), limits=Constraints(min_replicas=least)))
    for placement_of_epoch in replay(start, plan):
        assert (placement_of_epoch.replicas_on_rank.sum(axis=1) >= least).all()


def random_split(dice: np.random.Generator, table: SlotTable, experts: int) -> Split:
    keep, spill, near = (np.zeros(table.shape, np.uint16) for _ in range(3))
    for layer in range(len(table)):
        for expert in range(experts):
            at = np.flatnonzero(table[layer] == expert)
            cuts = np.sort(dice.integers(0, FULL + 1, len(at) - 1))
            spill[layer, at] = np.diff(np.concatenate([[0], cuts, [FULL]]))
            keep[layer, at] = dice.integers(0, FULL + 1, len(at))
            near[layer, at] = dice.integers(0, FULL + 1, len(at))
    return Split(keep, spill, near)


@settings(max_examples=30, deadline=None)
@given(shape=shapes)
def test_between_two_tables_every_state_is_legal_and_nearly_nothing_is_copied_in_vain(
    shape: tuple[int, int, int, int, int],
) -> None:
    layers, experts, ranks, per, seed = shape
    dice = np.random.default_rng(seed)
    before, after = (random_table(dice, layers, experts, ranks, per) for _ in range(2))
    found = between(before, after, ranks)
    table = before
    most = np.maximum(holders(before, experts), holders(after, experts))
    for at in range(len(found.kind)):
        table = made(table, taken(found, np.array([at])))
        assert legal(table, ranks, experts)
        assert (holders(table, experts) <= most).all()
    assert np.array_equal(
        np.sort(table.reshape(layers, ranks, per), axis=2), np.sort(after.reshape(layers, ranks, per), axis=2)
    )
    stays = (before == after) & (before != EMPTY)
    assert np.array_equal(table[stays], after[stays])
    assert (
        copies_between(before, after, ranks)
        <= int(found.copies.sum())
        <= 2 * copies_between(before, after, ranks)
    )


@settings(max_examples=20, deadline=None)
@given(shape=shapes)
def test_shortened_changes_lead_to_the_same_and_copy_no_more(shape: tuple[int, int, int, int, int]) -> None:
    layers, experts, ranks, per, seed = shape
    dice = np.random.default_rng(seed)
    table = random_table(dice, layers, experts, ranks, per)
    wanted = random_changes(dice, table, ranks, experts, 40)
    found = shortened(table, wanted, ranks)
    ends = [np.sort(made(table, one).reshape(layers, ranks, per), axis=2) for one in (wanted, found)]
    assert np.array_equal(ends[0], ends[1])
    assert int(found.copies.sum()) <= int(wanted.copies.sum())
    stays = np.isin(np.arange(layers), found.layer)
    assert found.gain.sum() == pytest.approx(np.bincount(wanted.layer, wanted.gain, layers)[stays].sum())
    start = Placement(table, experts=experts, ranks=ranks)
    replay(start, planned(start, ordered(start, found, room(ranks))))


def test_a_replica_that_later_changes_take_back_is_not_copied() -> None:
    table = np.array([[0, EMPTY, 1, EMPTY]], np.int16)
    to_and_fro = joined([replicate(0, 1, 1), drop(0, 1), replicate(0, 3, 0, 2.0)])
    found = shortened(table, to_and_fro, 2)
    assert [
        (ChangeKind(kind), int(expert)) for kind, expert in zip(found.kind, found.expert, strict=True)
    ] == [(ChangeKind.REPLICATE, 0)]


def test_with_a_spare_slot_nothing_is_copied_in_vain() -> None:
    ring = placement([0, 1, 2, 0], ranks=4, experts=3)
    after = np.array([[2, 0, 1, 0]], np.int16)
    assert (
        int(between(ring.expert_of_slot, after, 4).copies.sum())
        == copies_between(ring.expert_of_slot, after, 4)
        == 3
    )


def test_a_ring_of_experts_without_another_holder_is_turned_by_swaps() -> None:
    found = between(np.array([[0, 1, 2]], np.int16), np.array([[2, 0, 1]], np.int16), 3)
    assert [ChangeKind(kind) for kind in found.kind] == [ChangeKind.SWAP, ChangeKind.SWAP]


def test_experts_that_only_change_slots_inside_their_rank_are_left_alone() -> None:
    assert not between(np.array([[0, 1, 2, 3]], np.int16), np.array([[1, 0, 3, 2]], np.int16), 2)


def test_a_layers_gain_is_shared_out_over_its_copies() -> None:
    found = between(
        np.array([[0, 1, 2], [0, 1, 2]], np.int16),
        np.array([[2, 0, 1], [0, 1, 2]], np.int16),
        3,
        np.array([8.0, 1.0]),
    )
    assert found.gain.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(("before", "after"), [([0, 1], [0, 0]), ([0, 0], [0, 1]), ([0, 1], [0, 1, 2])])
def test_tables_that_lack_an_expert_or_differ_in_shape_cannot_be_compared(
    before: list[int], after: list[int]
) -> None:
    with pytest.raises(ValueError, match="difference"):
        between(np.array([before], np.int16), np.array([after], np.int16), 2)


def test_a_copy_comes_from_the_same_node_and_from_whom_gave_least() -> None:
    start = placement([0, 1, 0, 2, 0, 3, 4, 5], [0, 1, 0, 2, 0, 3, 4, 5], ranks=4, experts=6)
    dear = placement([0, 6, 0, 1, 0, 2, EMPTY, 3, EMPTY, 4, EMPTY, 5], ranks=6, experts=7)
    (handover,) = ordered(start, swap(0, 7, 1, 1, 5), room(4))
    assert [(copy.source, copy.link) for copy in handover.steps[0].copies] == [
        (1, "cross-node"),
        (7, "cross-node"),
    ]
    (handover,) = ordered(dear, joined([replicate(0, slot, 0) for slot in (6, 8, 10)]), room(6, per_node=4))
    copies = [copy for step in handover.steps for copy in step.copies]
    assert [copy.link for copy in copies] == ["same-node", "cross-node", "cross-node"]
    assert len({copy.source for copy in copies}) == 3


def test_of_two_ranks_on_two_nodes_the_one_that_holds_an_expert_is_its_source() -> None:
    before = placement([1, 0, EMPTY, EMPTY], ranks=2, experts=2)
    both = joined([replicate(0, 2, 0), replicate(0, 3, 1)])
    (handover,) = ordered(before, both, room(2, per_node=1))
    assert [copy.source for step in handover.steps for copy in step.copies] == [1, 0]
    assert applied(before, handover).replicas_on_rank.all()


def test_a_dead_holder_is_no_source_and_what_nobody_else_holds_comes_from_the_checkpoint() -> None:
    start = placement([0, 1, 0, EMPTY, 2, EMPTY], ranks=3, experts=3)
    live = np.array([False, True, True])
    (handover,) = ordered(
        start, joined([replicate(0, 5, 0), move(0, 3, 1, 1)]), room(3), limits=Constraints(live=live)
    )
    assert [(copy.source, copy.link) for step in handover.steps for copy in step.copies] == [
        (2, "cross-node"),
        (None, "checkpoint"),
    ]


def test_what_gains_most_per_copy_comes_first_and_each_handover_fills_the_staging_room() -> None:
    start = placement(*[[0, EMPTY, 1, EMPTY]] * 3, ranks=2, experts=2)
    wanted = joined([replicate(layer, 3, 0, gain) for layer, gain in ((0, 1.0), (1, 3.0), (2, 2.0))])
    series = ordered(start, wanted, room(2, staging=2))
    assert [[step.layer for step in handover.steps] for handover in series] == [[1, 2], [0]]


def test_a_small_gain_before_a_large_one_of_its_layer_is_not_put_off() -> None:
    start = placement([0, EMPTY, EMPTY, 1], [0, EMPTY, EMPTY, 1], ranks=2, experts=2)
    wanted = joined([replicate(0, 2, 0, 2.0), replicate(1, 1, 1, 0.0), replicate(1, 2, 0, 9.0)])
    first, second = ordered(start, wanted, room(2, staging=1))
    assert [step.layer for step in first.steps] == [1, 1]
    assert [step.layer for step in second.steps] == [0]


def test_layers_that_are_only_shared_out_anew_come_first_and_copy_nothing() -> None:
    start = placement([0, 1, 1, 0], [0, 1, 1, EMPTY], ranks=2, experts=2)
    end = made(start.expert_of_slot, replicate(1, 3, 0))
    even = even_split(end, 2)
    spill = even.spill.copy()
    spill[0] = [FULL, FULL, 0, 0]
    spill[1, [0, 3]] = [1, FULL - 1]
    split = Split(even.keep, spill, even.near)
    first, second = ordered(start, replicate(1, 3, 0), room(2), split=split, reweighted=np.array([0.5, 0.0]))
    assert [(step.kind, step.layer, step.gain, step.bytes) for step in first.steps] == [
        ("reweight", 0, 0.5, 0)
    ]
    assert [step.kind for step in second.steps] == ["replicate"]
    between_them, last = replay(start, planned(start, (first, second)))
    assert np.array_equal(between_them.split.spill[1], start.split.spill[1])
    assert np.array_equal(last.split.spill, spill)


def test_an_expert_that_must_keep_two_holders_has_them_after_every_handover() -> None:
    start = placement([0, 1, 0, 2, 3, EMPTY], ranks=3, experts=4)
    there_and_back = joined([replicate(0, 0, 3), replicate(0, 5, 0)])
    least = np.array([[2, 1, 1, 1]])
    series = ordered(start, there_and_back, room(3, staging=1), limits=Constraints(min_replicas=least))
    assert [len(handover.steps) for handover in series] == [2]
    with pytest.raises(Unorderable, match="must keep 2"):
        ordered(start, taken(there_and_back, np.array([0])), room(3), limits=Constraints(min_replicas=least))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (replicate(0, 0, 1), "last live replica of expert 0/0"),
        (replicate(0, 3, 1), "which holds it"),
        (move(0, 1, 2, 0), "which holds 0"),
        (swap(0, 0, 1, 2, 5), "which holds 0"),
        (drop(0, 1), "is empty"),
    ],
)
def test_changes_that_are_not_legal_are_named(wrong: PlacementChanges, why: str) -> None:
    with pytest.raises(Unorderable, match=why):
        ordered(placement([0, EMPTY, 1, EMPTY], ranks=2, experts=2), wrong, room(2))


def test_nothing_is_put_on_a_rank_that_is_not_live() -> None:
    with pytest.raises(Unorderable, match="not live"):
        ordered(
            placement([0, EMPTY, 1, EMPTY], ranks=2, experts=2),
            replicate(0, 3, 0),
            room(2),
            limits=Constraints(live=np.array([True, False])),
        )


def plan_of_one() -> tuple[Placement, Plan]:
    start = placement([0, EMPTY, 1, 0], ranks=2, experts=2)
    return start, planned(start, ordered(start, replicate(0, 1, 1), room(2)))


def test_a_plan_survives_being_written_down_and_equal_plans_have_equal_ids() -> None:
    start, plan = plan_of_one()
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan == plan_of_one()[1]
    later = Placement(start.expert_of_slot, experts=2, ranks=2, epoch=8)
    assert planned(later, ordered(later, replicate(0, 1, 1), room(2))).id != plan.id
    assert planned(start, name="mine").id == "mine"


@pytest.mark.parametrize(
    ("rows", "epoch", "cause"),
    [
        ([0, EMPTY, 1, 0], 8, PlanCause.EPOCH),
        ([0, 1, 1, 0], 7, PlanCause.SLOT),
        ([0, EMPTY, 0, 1], 7, PlanCause.SOURCE),
        ([1, EMPTY, 1, 0], 7, PlanCause.DUPLICATE),
    ],
)
def test_a_plan_that_meets_another_placement_is_refused_with_the_cause(
    rows: list[int], epoch: int, cause: PlanCause
) -> None:
    _, plan = plan_of_one()
    with pytest.raises(Inapplicable, match="plan") as refused:
        replay(placement(rows, ranks=2, experts=2, epoch=epoch), plan)
    assert refused.value.cause == cause


def test_a_plan_for_another_shape_is_refused() -> None:
    _, plan = plan_of_one()
    with pytest.raises(Inapplicable) as refused:
        replay(placement([0, 1, EMPTY, 1, 0, EMPTY], ranks=2, experts=2), plan)
    assert refused.value.cause == PlanCause.SHAPE


def changed(step: dict[str, Any]) -> Handover:
    _, plan = plan_of_one()
    (handover,) = plan.handovers
    return msgspec.structs.replace(handover, steps=(msgspec.structs.replace(handover.steps[0], **step),))


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        ({"layer": 4}, PlanCause.SHAPE),
        ({"slot": 9}, PlanCause.SHAPE),
        ({"expert": None}, PlanCause.SHAPE),
        ({"copies": ()}, PlanCause.COPY),
        ({"kind": "drop", "slot": 0, "expert": 0}, PlanCause.COPY),
        ({"kind": "drop", "slot": 2, "expert": 1, "copies": ()}, PlanCause.PLACEMENT),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(step: dict[str, Any], cause: PlanCause) -> None:
    start, _ = plan_of_one()
    with pytest.raises(Inapplicable) as refused:
        applied(start, changed(step))
    assert refused.value.cause == cause


def test_transfers_say_who_sends_what_to_whom_in_which_handover() -> None:
    start = placement([0, EMPTY, 1, EMPTY], [0, EMPTY, 1, EMPTY], ranks=2, experts=2)
    series = ordered(
        start,
        joined([replicate(0, 1, 1, 2.0), replicate(1, 1, 1, 1.0), replicate(1, 3, 0)]),
        room(2, staging=1),
    )
    found = transfers(series, 2)
    told: list[NDArray[Any]] = [found.handover, found.source, found.destination, found.bytes]
    assert [part.tolist() for part in told] == [[0, 1, 1], [1, 1, 0], [0, 0, 1], [10.0, 10.0, 10.0]]
