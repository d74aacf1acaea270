"""Groups of experts on nodes: the expectation against sampling, and the conditions under which one node per
group pays."""

import msgspec
import numpy as np
import pytest

from benchmarks.rig.placements.popularity import by_rank, domains
from fleet.experts import ModelShape
from fleet.placement import linear
from fleet.timing import EngineSpeed
from migration.model.cost_model import CostTerms, traffic
from migration.model.grouped_routing import draws_of, expected_nodes, node_draws
from migration.planning.group_affinity import group_homes, keep_groups
from migration.solvers.locality_placement import LocalityPrices, LocalityProblem, locality_placement

SHAPE = ModelShape(
    layers=4, experts=64, top_k=4, hidden=8, expert_intermediate=8, groups=8, groups_per_token=2
)


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("together", [True, False])
def test_distinct_nodes_are_those_of_sampled_tokens(nodes: int, together: bool) -> None:
    dice = np.random.default_rng(nodes)
    size = SHAPE.experts // SHAPE.groups
    node = (
        np.arange(SHAPE.experts) // (SHAPE.experts // nodes) if together else np.arange(SHAPE.experts) % nodes
    )
    found = []
    for _ in range(3000):
        groups = dice.permutation(SHAPE.groups)[: SHAPE.groups_per_token]
        experts = dice.permutation((groups[:, None] * size + np.arange(size)).ravel())[: SHAPE.top_k]
        found.append(len(set(node[experts].tolist())))
    assert expected_nodes(SHAPE, nodes, together=together) == pytest.approx(np.mean(found), abs=0.05)


def test_deepseek_s_gate_reaches_fewer_nodes_when_its_groups_are_whole() -> None:
    shape = ModelShape(
        layers=58, experts=256, top_k=8, hidden=7168, expert_intermediate=2048, groups=8, groups_per_token=4
    )
    assert expected_nodes(shape, 8, together=True) == pytest.approx(3.63, abs=0.01)
    assert expected_nodes(shape, 8, together=False) == pytest.approx(5.33, abs=0.06)
    assert expected_nodes(shape, 2, together=False) - expected_nodes(shape, 2, together=True) < 0.1


def test_groups_are_kept_where_sending_is_dear_and_not_where_computing_is() -> None:
    dice = np.random.default_rng(1)
    demand = by_rank(domains("mild", 1, 0.0, 4, 64, dice), 16, 0.0)
    room = LocalityProblem(np.arange(16) // 4, 5, LocalityPrices(1.0, 5.0))
    kept = keep_groups(SHAPE, EngineSpeed(dispatch=1e-7, dispatch_node=1e-5, expert_pair=1e-8), demand, room)
    assert kept.keep
    assert kept.together < kept.apart
    assert kept.home is not None
    found = locality_placement(demand, LocalityProblem(room.node, 5, room.prices, home=kept.home))
    nodes = {
        (group, int(slot) // 5 // 4)
        for slot, expert in enumerate(found.table[0])
        if expert >= 0
        for group in [int(expert) // 8]
    }
    assert {group for group, _ in nodes} == set(range(8))
    skewed = by_rank(domains("zipf", 1, 0.0, 4, 64, dice), 16, 0.0)
    dear = keep_groups(
        SHAPE,
        EngineSpeed(dispatch=1e-9, dispatch_node=1e-9, expert_pair=1e-5),
        skewed,
        LocalityProblem(room.node, 4, room.prices),
    )
    assert dear.home is None or dear.together <= dear.apart


def test_a_placement_with_whole_groups_is_judged_by_the_nodes_they_reach() -> None:
    node, demand = np.arange(8) // 2, np.ones((8, 4, 64))
    whole = linear(layers=4, experts=64, ranks=8)
    spread = np.stack([np.arange(64).reshape(8, 8).T.ravel()] * 4).astype(np.int16)
    speed = EngineSpeed(dispatch_node=1e-6)
    for placement, together in ((whole, True), (type(whole)(spread, experts=64, ranks=8), False)):
        found = traffic(placement, demand, CostTerms(speed, node, 4, step_tokens=8.0, shape=SHAPE))
        assert found.nodes_out.sum(axis=1) / 8.0 == pytest.approx(
            np.full(4, expected_nodes(SHAPE, 4, together=together) * 0.75)
        )
    assert draws_of(SHAPE, np.ones((1, 3, 64), bool)) == pytest.approx(node_draws(SHAPE, 3, together=False))
    plain = msgspec.structs.replace(SHAPE, groups=1, groups_per_token=1)
    free = [
        traffic(whole, demand, CostTerms(speed, node, 4, step_tokens=8.0, shape=shape)).nodes_out
        for shape in (plain, None)
    ]
    assert np.array_equal(*free)


def test_a_group_s_home_is_one_node_and_nodes_take_as_many() -> None:
    demand = by_rank(domains("topheavy", 4, 0.5, 3, 64, np.random.default_rng(0)), 8, 0.0)
    home = group_homes(demand, LocalityProblem(np.arange(8) // 2, 10), 8)
    by_node = home.reshape(3, 4, 2, 8, 8)
    assert (by_node.all(axis=(2, 4)).sum(axis=1) == 1).all()
    assert (by_node.all(axis=(2, 4)).sum(axis=2) == 2).all()


def test_gates_without_groups_and_nodes_that_do_not_divide_them_are_left_alone() -> None:
    demand, room = np.ones((6, 1, 64)), LocalityProblem(np.arange(6) // 2, 12, LocalityPrices(1.0, 1.0))
    assert keep_groups(SHAPE, EngineSpeed(), demand, room).home is None
    plain = msgspec.structs.replace(SHAPE, groups=1, groups_per_token=1)
    assert keep_groups(plain, EngineSpeed(), demand, room).home is None
    with pytest.raises(ValueError, match="do not divide"):
        expected_nodes(SHAPE, 3, together=True)


def test_a_shape_says_its_groups_only_where_it_has_them() -> None:
    plain = ModelShape(layers=1, experts=8, top_k=2, hidden=4, expert_intermediate=4)
    assert b"groups" not in msgspec.msgpack.encode(plain)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SHAPE), type=ModelShape) == SHAPE
    for wrong in (
        {"groups": 3},
        {"groups": 4, "groups_per_token": 5},
        {"groups": 8, "groups_per_token": 1, "top_k": 2},
        {"groups_per_token": 0},
    ):
        with pytest.raises(ValueError, match="group"):
            msgspec.structs.replace(plain, **wrong).__post_init__()
