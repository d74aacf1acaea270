"""Homes from alternating routing and placement: compared with exact half steps and brute force, and stable
over time."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import linprog

from benchmarks.rig.placements.popularity import domains, load
from fleet.arrays import SlotTable
from fleet.placement import linear
from migration.planning.cluster_homes import ClusterTraffic, chained, homes, laid_onto, routed
from migration.planning.findings import FindingCode, Infeasible
from migration.solvers.load_cap import held_of, split_under
from migration.solvers.locality_placement import LocalityProblem, locality_placement, measured

LAYERS, EXPERTS, RANKS = 4, 32, 4
ROOM = LocalityProblem(np.zeros(RANKS, np.intp), 10, balance=0.9)


def traffic(special: float, clusters: int = 8, seed: int = 0, leak: float = 0.0) -> ClusterTraffic:
    """Clusters of four domains, each slightly different from its domain."""
    dice = np.random.default_rng(seed)
    kinds = domains("topheavy", 4, special, LAYERS, EXPERTS, dice)
    own = special > 0
    profiles = np.stack(
        [
            0.8 * kinds[at % 4] + 0.2 * (load("topheavy", LAYERS, EXPERTS, dice) if own else kinds[at % 4])
            for at in range(clusters)
        ]
    )
    return ClusterTraffic(profiles, dice.dirichlet(np.full(clusters, 5.0)), leak)


def best_alternation(given: ClusterTraffic, room: LocalityProblem, seed: int) -> float:
    """Alternate both halves by exact linear programmes, from a random start; return the final local share."""
    start = np.random.default_rng(seed).dirichlet(np.ones(room.ranks), len(given.shares))
    reached, where = 0.0, start
    for _ in range(8):
        demand = given.demand(where)
        held = np.stack([_placed(demand[:, layer], room.slots) for layer in range(LAYERS)])
        local = (
            given.profiles.reshape(len(given.shares), -1)
            @ held.transpose(1, 0, 2).reshape(room.ranks, -1).T
            / LAYERS
        )
        where = routed(local, given.shares, given.room_for(room.ranks))
        reached = max(reached, float((given.demand(where).transpose(1, 0, 2) * held).sum() / LAYERS))
    return reached


def _placed(demand: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """[ranks, experts]: replicas of the linear programme."""
    ranks, experts = demand.shape
    each, full = np.kron(np.ones((1, ranks)), np.eye(experts)), np.kron(np.eye(ranks), np.ones((1, experts)))
    limits = np.r_[np.full(ranks, slots), -np.ones(experts)]
    return linprog(
        -demand.ravel(), A_ub=np.vstack([full, -each]), b_ub=limits, bounds=(0, 1), method="highs"
    ).x.reshape(demand.shape)


def saved_now(given: ClusterTraffic, share: NDArray[np.float64], table: SlotTable) -> float:
    """Return the saving by homes under a placement that is there already."""
    demand = given.demand(share)
    split = split_under(table, demand, RANKS, ROOM.node, 1.0 / ROOM.balance)
    return float(measured(table, split, demand, ROOM).saved.mean())


@pytest.mark.parametrize("leak", [0.0, 0.3])
def test_joint_homes_come_within_a_point_of_the_best_alternation_of_exact_halves(leak: float) -> None:
    given = traffic(0.6, leak=leak)
    _, placed = homes(given, ROOM)
    assert placed.saved.mean() >= max(best_alternation(given, ROOM, seed) for seed in range(4)) - 0.01
    assert placed.balance.min() >= 0.89


def test_together_they_save_what_neither_does_alone() -> None:
    given = traffic(0.8)
    _, placed = homes(given, ROOM)
    placement_alone = locality_placement(given.demand(np.zeros((8, RANKS))), ROOM).saved.mean()
    assert placed.saved.mean() > placement_alone + 0.05


def test_homogeneous_traffic_gets_no_homes() -> None:
    with pytest.raises(Infeasible) as refused:
        homes(traffic(0.0), ROOM)
    assert refused.value.finding.code is FindingCode.HOMES_SAVE_TOO_LITTLE


def test_one_cluster_has_no_place_of_its_own() -> None:
    given = traffic(0.5)
    alone = ClusterTraffic(given.profiles, np.eye(8)[0])
    with pytest.raises(Infeasible) as refused:
        homes(alone, ROOM)
    assert refused.value.finding.code is FindingCode.SINGLE_CLUSTER


def test_homes_fit_their_ranks_and_unused_clusters_have_none() -> None:
    given = traffic(0.5)
    shares = np.where(np.arange(8) == 3, 0.0, given.shares)
    capacity = np.array([0.4, 0.3, 0.2, 0.2])
    found, _ = homes(ClusterTraffic(given.profiles, shares, 0.1, capacity), ROOM)
    assert found.sum(axis=1) == pytest.approx((np.arange(8) != 3) * 1.0)
    assert (shares / shares.sum() @ found <= capacity + 1e-6).all()


def test_homes_of_before_are_kept_unless_others_are_clearly_better() -> None:
    given = traffic(0.6)
    first, placed = homes(given, ROOM)
    again, still = homes(given, ROOM, before=first, present=placed.table)
    assert again is first
    assert still.saved.mean() == pytest.approx(placed.saved.mean(), abs=1e-3)
    assert saved_now(given, first, placed.table) == pytest.approx(placed.saved.mean(), abs=1e-3)
    regrouped = ClusterTraffic(given.profiles[[0, 4, 1, 5, 2, 6, 3, 7]], given.shares)
    other, better = homes(regrouped, ROOM, before=first, present=placed.table)
    assert not np.array_equal(other, first)
    assert better.saved.mean() > saved_now(regrouped, first, placed.table) + 0.005


def test_ranks_are_renamed_to_where_experts_are_already() -> None:
    given = traffic(0.9)
    first, placed = homes(given, ROOM)
    turned = np.roll(placed.table.reshape(LAYERS, RANKS, -1), 1, axis=1).reshape(LAYERS, -1)
    found, renamed = homes(given, ROOM, present=turned)
    assert np.allclose(found, np.roll(first, 1, axis=1), atol=0.3)
    had, have = (held_of(table, RANKS, EXPERTS) for table in (turned, renamed.table))
    assert (have & ~had).sum() < 0.25 * have.sum()


def test_only_like_ranks_and_nodes_take_each_others_place() -> None:
    found, held = np.eye(4), np.eye(4, dtype=bool)[None]
    present = held[:, [2, 3, 1, 0]]
    room = LocalityProblem(np.array([0, 0, 1, 1]), 1)
    assert laid_onto(found, held, present, room, np.full(4, 0.25)).argmax(axis=0).tolist() == [2, 3, 1, 0]
    uneven = laid_onto(found, held, present, room, np.array([0.4, 0.3, 0.2, 0.1]))
    assert np.array_equal(uneven, found)


def test_routing_is_exact_and_chains_lay_shares_along_ranks() -> None:
    dice = np.random.default_rng(1)
    value = dice.random((3, 3))
    found = routed(value, np.full(3, 1 / 3), np.full(3, 1 / 3))
    assert (found * value).sum() == pytest.approx(
        max(sum(value[at, to] for at, to in enumerate(order)) for order in itertools.permutations(range(3)))
    )
    given = traffic(0.5)
    row = chained(given, RANKS)
    assert given.shares @ row == pytest.approx(np.full(RANKS, 1 / RANKS))
    assert row.sum(axis=1) == pytest.approx(np.ones(8))


def test_demand_of_clusters_without_a_home_is_the_same_everywhere() -> None:
    given = traffic(0.5, leak=0.2)
    even = given.demand(np.zeros((8, RANKS)))
    assert np.ptp(even, axis=0) == pytest.approx(np.zeros((LAYERS, EXPERTS)))
    assert even.sum(axis=(0, 2)) == pytest.approx(np.ones(LAYERS))
    table = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS, slots_per_rank=10).expert_of_slot
    assert saved_now(given, np.zeros((8, RANKS)), table) > 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="leak"):
        traffic(0.5, leak=1.5)
    with pytest.raises(ValueError, match="capacity adds up"):
        ClusterTraffic(np.ones((1, 1, 2)), np.ones(1), capacity=np.full(2, 0.4))
    with pytest.raises(ValueError, match="shares"):
        ClusterTraffic(np.ones((1, 1, 2)), np.ones(2))


def test_clusters_of_any_share_find_homes_though_requests_fill_the_ranks_to_the_brim() -> None:
    """Shares are float32 and may be tiny: rounding must not make the capacity seem too small."""
    for seed in range(12):
        dice = np.random.default_rng(seed)
        shares = dice.dirichlet(np.full(5, 0.3)).astype(np.float32)
        shares[0] = 10.0 ** -dice.uniform(3, 12)
        found = routed(dice.random((5, 4)), shares, np.full(4, 0.25))
        assert ((shares / shares.sum()) @ found).max() <= 0.25 + 1e-5
