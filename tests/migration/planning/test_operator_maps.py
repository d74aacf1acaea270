"""Operators' plans for engines that move their experts themselves: what gives way, and what is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.placement import EMPTY, Placement, repeated
from fleet.requests.plans import MigrateExpert
from migration.model.plan import Plan, planned, replay
from migration.planning.operator_maps import one_expert_of_a_map, requested_map, restoring_map
from migration.planning.operator_plans import one_expert, read
from migration.planning.staging_capacity import StagingRoom

ROOM = StagingRoom(node=np.zeros(2, np.intp), expert_bytes=10)
TABLE = np.array([[0, 1, 2, 3, 4, 2, 3, 5]])
"""Two ranks; experts 2 and 3 are on both."""
SERVED = Placement(TABLE, experts=6, ranks=2, epoch=4)
DEMAND = np.array([[[5.0, 1.0, 9.0, 2.0, 7.0, 3.0]], [[0.0] * 6]])


def asked(placement: Placement = SERVED, demand: Any = DEMAND, **fields: Any) -> Plan:
    request = MigrateExpert(engine="a", **{"layer": 0, "expert": 4, "rank": 0, **fields})
    return one_expert_of_a_map(placement, request, ROOM, demand)


def test_the_least_useful_redundant_copy_gives_way_and_is_named() -> None:
    plan = asked()
    assert replay(SERVED, plan)[-1].expert_of_slot.tolist() == [[0, 1, 2, 4, 4, 2, 3, 5]]
    assert "overwrites the least useful redundant copy, of expert 3, which keeps 1 copy" in plan.reason
    assert [(step.expert, step.evicted) for step in plan.steps] == [(4, 3)]


def test_a_second_copy_on_the_same_rank_is_of_no_use_at_all() -> None:
    twice = Placement(np.array([[0, 1, 2, 2, 4, 3, 3, 5]]), experts=6, ranks=2, duplicates=True)
    plan = asked(twice, expert=5, rank=0)
    assert replay(twice, plan)[-1].expert_of_slot.tolist() == [[0, 1, 2, 5, 4, 3, 3, 5]]


def test_without_a_redundant_copy_the_ranks_swap() -> None:
    table = Placement(np.array([[0, 1, 2, 3, 4, 5]]), experts=6, ranks=2)
    plan = asked(table)
    assert replay(table, plan)[-1].expert_of_slot.tolist() == [[0, 4, 2, 3, 1, 5]]
    assert "swaps with expert 1, which goes to rank 1" in plan.reason
    assert plan.bytes == 20


def test_a_named_expert_is_swapped() -> None:
    plan = asked(swap=0)
    assert replay(SERVED, plan)[-1].expert_of_slot.tolist() == [[4, 1, 2, 3, 0, 2, 3, 5]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"move": True}, "empty slot.*omit --move"),
        ({"expert": 2}, "rank 0 holds expert 0/2 already"),
        ({"source": 0}, "rank 0 does not hold expert 0/4; it is on rank 1"),
        ({"swap": 2}, "rank 1 holds expert 0/2 already.*omit --swap"),
        ({"swap": 5}, "rank 0 does not hold expert 0/5"),
        ({"expert": 9}, "no expert 9"),
        ({"rank": 2}, "no rank 2"),
    ],
)
def test_what_is_not_legal_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        asked(**fields)


@given(seed=st.integers(0, 1 << 16), data=st.data())
def test_every_expert_that_comes_leaves_a_full_map_in_one_handover(seed: int, data: st.DataObject) -> None:
    dice = np.random.default_rng(seed)
    table = dice.permutation(np.concatenate([np.arange(6), dice.integers(0, 6, 6)]))[None]
    served = Placement(table, experts=6, ranks=3, duplicates=True)
    room = StagingRoom(node=np.zeros(3, np.intp), expert_bytes=10)
    expert, rank = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 2))
    request = MigrateExpert(engine="a", layer=0, expert=expert, rank=rank)
    if served.replicas_on_rank[0, rank, expert]:
        with pytest.raises(ValueError, match="already"):
            one_expert_of_a_map(served, request, room)
        return
    plan = one_expert_of_a_map(served, request, room)
    end = replay(served, plan)[-1]
    assert len(plan.handovers) == 1
    assert (end.expert_of_slot != EMPTY).all()
    assert end.replicas_on_rank[0, rank, expert] == 1
    assert repeated(end.expert_of_slot, 3).sum() <= repeated(served.expert_of_slot, 3).sum()


def test_a_rollback_restores_the_map_in_one_handover() -> None:
    served = Placement(np.array([[4, 1, 2, 3, 0, 5, 3, 2]]), experts=6, ranks=2, epoch=5)
    plan = restoring_map(served, SERVED, "p", ROOM)
    end = replay(served, plan)[-1]
    assert len(plan.handovers) == 1
    assert np.array_equal(end.replicas_on_rank, SERVED.replicas_on_rank)
    assert len(plan.copies) == 2
    with pytest.raises(ValueError, match="already"):
        restoring_map(SERVED, SERVED, "p", ROOM)


def test_a_rollback_to_an_initial_map_with_doubles_is_as_near_as_a_plan_may_be() -> None:
    first = Placement(np.array([[0, 1, 2, 0, 3, 4, 5, 3]]), experts=6, ranks=2, duplicates=True)
    end = replay(SERVED, restoring_map(SERVED, first, "p", ROOM))[-1]
    assert not end.duplicates
    assert (end.replicas_on_rank >= first.replicas_on_rank).all()


def test_a_plan_file_of_several_handovers_or_with_an_empty_slot_is_refused() -> None:
    roomy = Placement(np.array([[0, 1, EMPTY, 2, 3, EMPTY]]), experts=4, ranks=2)
    plan = one_expert(
        roomy,
        MigrateExpert(engine="a", layer=0, expert=0, rank=1),
        StagingRoom(node=np.zeros(2, np.intp), expert_bytes=10),
    )
    content = msgspec.json.encode(plan)
    read(content, roomy)
    with pytest.raises(ValueError, match=r"leaves a slot empty; .* plan anew for this engine"):
        read(content, roomy, rearranges=True)
    handover = asked().handovers[0]
    two = planned(SERVED, [handover, msgspec.structs.replace(asked(expert=5).handovers[0], epoch=6)])
    with pytest.raises(ValueError, match=r"2 handovers|holds expert"):
        read(msgspec.json.encode(two), SERVED, rearranges=True)


def test_a_requested_map_is_one_handover_of_the_experts_that_arrive() -> None:
    goal = Placement(np.array([[4, 1, 2, 3, 0, 5, 3, 2]]), experts=6, ranks=2)
    plan = requested_map(SERVED, goal, ROOM)
    end = replay(SERVED, plan)[-1]
    assert np.array_equal(end.replicas_on_rank, goal.replicas_on_rank)
    assert (len(plan.handovers), len(plan.copies)) == (1, 2)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([[0, 1, 2, 3, 4, 2, EMPTY, 5]], "layer 0 slot 6 empty"),
        ([[0, 1, 2, 3, 4, 5, 5, 2]], "twice on a rank"),
        ([[0, 1, 2, 3, 4, 5]], "another engine or configuration"),
        ([[3, 2, 1, 0, 5, 3, 2, 4]], "already"),
    ],
)
def test_a_map_that_cannot_be_served_is_refused(table: list[list[int]], reason: str) -> None:
    goal = Placement(np.array(table), experts=6, ranks=2, duplicates=True)
    with pytest.raises(ValueError, match=reason):
        requested_map(SERVED, goal, ROOM)


def test_a_plan_of_one_map_survives_its_file() -> None:
    plan = asked()
    assert read(msgspec.json.encode(plan), SERVED, rearranges=True) == plan


def test_layers_that_a_plan_does_not_touch_stay_as_the_engine_reported_them() -> None:
    reported = Placement(
        np.array([[0, 1, 2, 3, 4, 2, 3, 5], [0, 1, 2, 0, 3, 4, 5, 3]]), experts=6, ranks=2, duplicates=True
    )
    end = replay(
        reported, one_expert_of_a_map(reported, MigrateExpert(engine="a", layer=0, expert=4, rank=0), ROOM)
    )
    assert (end[-1].expert_of_slot[1] == reported.expert_of_slot[1]).all()
    assert end[-1].duplicates
