"""Plans requested by operators: one expert to a rank, a plan from a file, the placement before a plan."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.experts import ExpertId
from fleet.placement import EMPTY, FULL, Placement, Split, linear
from fleet.requests.plans import MigrateExpert
from migration.model.plan import Handover, Plan, planned, replay
from migration.model.plan_log import EnginePlans
from migration.planning.operator_plans import checked, one_expert, plan_to_undo, read, restoring_plan
from migration.planning.staging_capacity import StagingRoom
from tests.migration.model.test_plan_log import aborted, committed
from tests.migration.model.test_plan_log import planned as announced

ROOMY = linear(layers=2, experts=8, ranks=2, slots_per_rank=5)
TIGHT = linear(layers=2, experts=8, ranks=2)
ROOM = StagingRoom(node=np.array([0, 0]), expert_bytes=100)


def placed(rows: list[list[int]], ranks: int = 2, epoch: int = 0, split: Split | None = None) -> Placement:
    return Placement(
        np.array(rows, np.int16), experts=max(map(max, rows)) + 1, ranks=ranks, epoch=epoch, split=split
    )


def asked(
    placement: Placement, wanted: Any = None, room: StagingRoom = ROOM, **fields: Any
) -> tuple[Plan, Placement]:
    plan = one_expert(placement, MigrateExpert(engine="a", **{"layer": 0, **fields}), room, wanted)
    return plan, replay(placement, plan)[-1]


def test_an_expert_comes_into_a_free_slot_and_stays_where_it_was() -> None:
    plan, after = asked(ROOMY, layer=1, expert=2, rank=1)
    assert after.holders(ExpertId(1, 2)) == [0, 1]
    assert (len(plan.handovers), len(plan.copies), plan.bytes) == (1, 1, 100)
    assert plan.reason == "requested: expert 1/2 to rank 1"
    assert after.even
    assert plan.handovers[0].split is None


def test_a_moved_expert_leaves_the_rank_it_was_read_from() -> None:
    plan, after = asked(ROOMY, expert=2, rank=1, move=True)
    assert after.holders(ExpertId(0, 2)) == [1]
    assert plan.steps[0].kind == "move"


def test_without_a_free_slot_the_least_wanted_spare_replica_gives_way() -> None:
    full = placed([[0, 1, 2, 3, 4, 0, 1, 2]])
    assert asked(full, expert=3, rank=1)[1].on_rank(1)[0].tolist() == [4, 3, 1, 2], "of equal ones the lowest"
    wanted = np.array([[[5, 1, 9, 9, 9]]] * 2, np.float32)
    assert asked(full, wanted, expert=3, rank=1)[1].on_rank(1)[0].tolist() == [4, 0, 3, 2]


def test_without_spare_replicas_the_least_wanted_expert_goes_the_other_way_or_the_one_that_is_named() -> None:
    plan, after = asked(TIGHT, expert=2, rank=1)
    assert (plan.steps[0].kind, len(plan.copies)) == ("swap", 2)
    assert (after.holders(ExpertId(0, 2)), after.holders(ExpertId(0, 4))) == ([1], [0])
    wanted = np.zeros((2, 2, 8), np.float32)
    wanted[:, 0, 4:7] = 1
    assert asked(TIGHT, wanted, expert=2, rank=1)[1].holders(ExpertId(0, 7)) == [0]
    assert asked(TIGHT, wanted, expert=2, rank=1, swap=5)[1].holders(ExpertId(0, 5)) == [0]


def test_it_is_read_from_the_rank_that_is_named_or_from_the_nearest() -> None:
    three = placed([[0, 1, EMPTY, 2, 0, EMPTY, 3, 0, EMPTY, 4, 5, EMPTY]], ranks=4)
    room = StagingRoom(node=np.array([0, 0, 1, 1]), expert_bytes=100)
    near, _ = asked(three, room=room, expert=0, rank=3)
    assert (near.copies[0].source, near.copies[0].link) == (7, "same-node")
    named, after = asked(three, room=room, expert=0, rank=3, source=1, move=True)
    assert (named.copies[0].source, named.copies[0].link) == (4, "cross-node")
    assert after.holders(ExpertId(0, 0)) == [0, 2, 3]


def test_shares_of_experts_that_do_not_move_stay_as_they_are() -> None:
    table = np.array([[0, 1, EMPTY, 1, 2, EMPTY]], np.int16)
    split = Split(
        *(
            np.array([row], np.uint16)
            for row in ([FULL, 9, 0, 8, FULL, 0], [FULL, 5, 0, FULL - 5, FULL, 0], [0] * 6)
        )
    )
    uneven = Placement(table, experts=3, ranks=2, split=split)
    _, after = asked(uneven, expert=0, rank=1)
    assert after.split.spill[0].tolist() == [FULL // 2 + 1, 5, 0, FULL - 5, FULL, FULL // 2]
    assert after.split.keep[0].tolist() == [FULL, 9, 0, 8, FULL, FULL]


@pytest.mark.parametrize(
    ("placement", "fields", "words"),
    [
        (ROOMY, {"expert": 2, "rank": 0}, "rank 0 holds expert 0/2 already"),
        (ROOMY, {"expert": 9, "rank": 0}, "engine 'a' has no expert 9; they run from 0 to 7"),
        (ROOMY, {"expert": 2, "rank": 2}, "engine 'a' has no rank 2; they run from 0 to 1"),
        (ROOMY, {"expert": 2, "rank": 1, "layer": 2}, "engine 'a' has no layer 2; they run from 0 to 1"),
        (ROOMY, {"expert": 2, "rank": 1, "source": -1}, "engine 'a' has no rank -1"),
        (ROOMY, {"expert": 2, "rank": 1, "source": 1}, "rank 1 does not hold expert 0/2; it is on rank 0"),
        (
            TIGHT,
            {"expert": 2, "rank": 1, "swap": 3},
            "rank 1 does not hold expert 0/3, so it cannot be swapped",
        ),
        (
            placed([[0, 1, 2, 0]]),
            {"expert": 1, "rank": 1, "swap": 0},
            "rank 0 holds expert 0/0 already; omit swap",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    placement: Placement, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        asked(placement, **fields)


# Plans of files


def test_plans_come_back_from_json_and_are_tried_on_what_is_served() -> None:
    plan, _ = asked(ROOMY, expert=2, rank=1)
    assert read(msgspec.json.encode(plan), ROOMY) == plan
    later = Placement(ROOMY.expert_of_slot, experts=8, ranks=2, epoch=5)
    with pytest.raises(ValueError, match="plan is for epoch 0, the engine serves 5; plan anew"):
        read(msgspec.json.encode(plan), later)
    with pytest.raises(ValueError, match=r"this is no plan .*roost plan --out"):
        read(b"[]", ROOMY)
    for odd, words in (
        ({"id": "a b"}, "an id has 1 to 64 letters"),
        ({"handovers": _heavy(plan)}, "has -1 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            read(msgspec.json.encode(msgspec.structs.replace(plan, **odd)), ROOMY)
    with pytest.raises(ValueError, match="made for"):
        read(msgspec.json.encode(plan), TIGHT)
    with pytest.raises(ValueError, match="does nothing: it is not worth it"):
        checked(ROOMY, planned(ROOMY, refused="it is not worth it"))


def _heavy(plan: Plan) -> tuple[Handover, ...]:
    """The plan's handovers, with a copy of a negative number of bytes."""
    step = plan.steps[0]
    odd = msgspec.structs.replace(step, copies=(msgspec.structs.replace(step.copies[0], bytes=-1),))
    return (msgspec.structs.replace(plan.handovers[0], steps=(odd,)),)


def test_what_is_in_no_ranks_memory_cannot_be_brought_while_serving() -> None:
    plan, _ = asked(ROOMY, expert=2, rank=1)
    handover = plan.handovers[0]
    step = msgspec.structs.replace(
        handover.steps[0],
        copies=(msgspec.structs.replace(handover.steps[0].copies[0], source=None, link="checkpoint"),),
    )
    unheld = msgspec.structs.replace(plan, handovers=(msgspec.structs.replace(handover, steps=(step,)),))
    with pytest.raises(ValueError, match="reads expert 2 from storage"):
        checked(ROOMY, unheld)


# Back


def test_the_plan_to_undo_is_the_last_of_which_anything_was_committed() -> None:
    log = [
        announced("p"),
        committed(0, "p"),
        announced("q"),
        committed(0, "q", last=True),
        announced("r"),
        aborted(0, "r"),
    ]
    plans = EnginePlans()
    for entry in log:
        plans.apply(entry)
    assert plan_to_undo(plans).plan == "q"
    assert plan_to_undo(plans, "p").plan == "p"
    with pytest.raises(ValueError, match="no plan 'r' of which anything was committed; there are: q, p"):
        plan_to_undo(plans, "r")
    nothing = EnginePlans()
    for entry in log[-2:]:
        nothing.apply(entry)
    with pytest.raises(ValueError, match="no plan of this engine was ever committed"):
        plan_to_undo(nothing)


def test_an_engine_of_another_shape_cannot_go_back() -> None:
    with pytest.raises(ValueError, match="was restarted with another configuration"):
        restoring_plan(TIGHT, ROOMY, "p", ROOM)
    with pytest.raises(ValueError, match="serves what it served before plan p already"):
        restoring_plan(ROOMY, ROOMY, "p", ROOM)


def _legal(
    chance: np.random.Generator, ranks: int, per: int, layers: int, experts: int, epoch: int
) -> Placement:
    rows = []
    for _ in range(layers):
        row = np.full((ranks, per), EMPTY)
        for expert in chance.permutation(experts):
            free = [rank for rank in range(ranks) if (row[rank] == EMPTY).any()]
            rank = int(chance.choice(free))
            row[rank, int(chance.choice(np.flatnonzero(row[rank] == EMPTY)))] = expert
        for _ in range(int(chance.integers(0, ranks * per))):
            rank, expert = int(chance.integers(ranks)), int(chance.integers(experts))
            empty = np.flatnonzero(row[rank] == EMPTY)
            if len(empty) and expert not in row[rank]:
                row[rank, int(empty[0])] = expert
        rows.append(row.reshape(-1))
    table = np.array(rows, np.int16)
    return Placement(
        table,
        experts=experts,
        ranks=ranks,
        epoch=epoch,
        split=_weighted(chance, table, experts) if chance.random() < 0.7 else None,
    )


def _weighted(chance: np.random.Generator, table: np.ndarray[Any, Any], experts: int) -> Split:
    spill, filled = np.zeros(table.shape, np.uint16), table != EMPTY
    for layer in range(len(table)):
        for expert in range(experts):
            (slots,) = np.nonzero(table[layer] == expert)
            cuts = np.sort(chance.integers(0, FULL + 1, len(slots) - 1))
            spill[layer, slots] = np.diff([0, *cuts, FULL])
    return Split(
        np.where(filled, chance.integers(0, FULL, table.shape), 0).astype(np.uint16),
        spill,
        np.zeros(table.shape, np.uint16),
    )


def _shares(placement: Placement) -> list[tuple[int, int, int, int, int]]:
    """(layer, rank, expert, keep, spill) of every replica, wherever in its rank it lies."""
    layer, slot = np.nonzero(placement.expert_of_slot != EMPTY)
    parts = (placement.expert_of_slot, placement.split.keep, placement.split.spill)
    return sorted(
        zip(
            layer.tolist(),
            (slot // placement.slots_per_rank).tolist(),
            *(part[layer, slot].tolist() for part in parts),
            strict=True,
        )
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), ranks=st.integers(2, 4), staging=st.integers(2, 4))
def test_back_leads_to_what_every_rank_held_and_how_it_was_shared(
    seed: int, ranks: int, staging: int
) -> None:
    chance = np.random.default_rng(seed)
    now, goal = (_legal(chance, ranks, 4, 2, 3 * ranks, epoch) for epoch in (6, 3))
    plan = restoring_plan(
        now, goal, "p", StagingRoom(node=np.zeros(ranks, np.intp), expert_bytes=10, staging=staging)
    )
    end = replay(now, plan)[-1]
    assert (end.replicas_on_rank == goal.replicas_on_rank).all()
    if not goal.even:
        assert _shares(end) == _shares(goal)
    assert end.epoch == 6 + len(plan.handovers)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), move=st.booleans())
def test_any_expert_that_can_come_to_a_rank_comes_and_nothing_else_is_lost(seed: int, move: bool) -> None:
    chance = np.random.default_rng(seed)
    now = _legal(chance, 3, 4, 2, 9, 2)
    layer, expert, rank = int(chance.integers(2)), int(chance.integers(9)), int(chance.integers(3))
    holders = now.holders(ExpertId(layer, expert))
    if rank in holders:
        return
    plan = one_expert(
        now,
        MigrateExpert(engine="a", layer=layer, expert=expert, rank=rank, move=move),
        StagingRoom(node=np.zeros(3, np.intp), expert_bytes=10),
    )
    after = replay(now, plan)[-1]
    assert rank in after.holders(ExpertId(layer, expert))
    assert move or plan.steps[0].kind == "swap" or set(holders) < set(after.holders(ExpertId(layer, expert)))
    assert (after.expert_of_slot[1 - layer] == now.expert_of_slot[1 - layer]).all()
    assert all(
        (part[1 - layer] == before[1 - layer]).all()
        for part, before in zip(after.split, now.split, strict=True)
    )
