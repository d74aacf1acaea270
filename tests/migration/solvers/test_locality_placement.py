"""Placement by the origin of tokens: against brute force, the linear programme, and its own guarantees."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.rig.placements.popularity import by_rank, domains
from fleet.dispatch import loads
from fleet.placement import Placement, linear
from fleet.timing import EngineSpeed
from migration.model.placement_changes import copies_between
from migration.solvers.holder_value import held_by_worth
from migration.solvers.load_cap import held_of, table_of
from migration.solvers.locality_placement import (
    LocalityPrices,
    LocalityProblem,
    bound,
    locality_placement,
    measured,
    placed,
    worth_of,
)
from migration.solvers.pairwise_exchange import exchange_experts

FLAT8 = np.zeros(8, np.intp)


def demand_of(
    skew: str, special: float, ranks: int, layers: int, experts: int, seed: int, leak: float = 0.0
) -> NDArray[np.float64]:
    dice = np.random.default_rng(seed)
    return by_rank(domains(skew, min(ranks, 8), special, layers, experts, dice), ranks, leak)


def best_by_brute_force(worth: NDArray[np.float64], slots: int, most: int) -> float:
    """Try every expert on each of the seven sets of ranks. worth: [3, experts]."""
    sets = np.array([chosen for chosen in itertools.product((0, 1), repeat=3) if 0 < sum(chosen) <= most])
    ways = np.array(list(itertools.product(range(len(sets)), repeat=worth.shape[1])))
    held = sets[ways]  # [ways, experts, ranks]
    value = np.einsum("wer,re->w", held, worth)
    return float(value[(held.sum(axis=1) <= slots).all(axis=1)].max())


@pytest.mark.parametrize(("slots", "most"), [(2, 1), (3, 2)])
def test_three_ranks_and_six_experts_are_placed_as_brute_force_would(slots: int, most: int) -> None:
    demand = demand_of("zipf", 0.7, 3, 3, 6, slots)
    room = LocalityProblem(np.zeros(3, np.intp), slots, most=most)
    worth = worth_of(demand, room)
    exact = np.array([best_by_brute_force(own, slots, most) for own in worth.own])
    assert bound(demand, room)[1] == pytest.approx(exact)
    reached = worth.of(placed(worth, room))
    assert (reached <= exact + 1e-9).all()
    assert (reached >= 0.98 * exact).all()


@pytest.mark.parametrize("skew", ["mild", "topheavy", "zipf", "lognormal"])
@pytest.mark.parametrize("most", [3, None])
def test_within_a_point_of_the_linear_programme_at_the_balance_asked_for(skew: str, most: int | None) -> None:
    demand = demand_of(skew, 0.5, 8, 4, 64, 5, leak=0.3)
    room = LocalityProblem(FLAT8, 12, most=most)
    found = locality_placement(demand, room)
    layers, optimum = bound(demand, room)
    assert (found.saved[layers] <= optimum + 1e-9).all()
    assert found.saved[layers].mean() >= optimum.mean() - 0.01
    assert found.balance.min() >= 0.949


def test_small_layers_too() -> None:
    demand = demand_of("topheavy", 1.0, 4, 6, 12, 3)
    room = LocalityProblem(np.zeros(4, np.intp), 5, most=3, balance=0.5)
    assert locality_placement(demand, room).saved.mean() >= bound(demand, room)[1].mean() - 0.01


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 999),
    st.sampled_from([(3, 6, 3), (4, 12, 4), (6, 10, 2)]),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_placement_is_legal(seed: int, size: tuple[int, int, int], most: int, nodes: bool) -> None:
    ranks, experts, slots = size
    demand = np.random.default_rng(seed).exponential(size=(ranks, 2, experts)) * np.random.default_rng(
        seed + 1
    ).integers(0, 2, (ranks, 2, experts))
    room = LocalityProblem(
        np.arange(ranks) // 2 if nodes else np.zeros(ranks, np.intp),
        slots,
        LocalityPrices(1.0, 2.0),
        most,
        balance=0.9,
    )
    found = locality_placement(demand, room)
    placement = Placement(found.table, experts=experts, ranks=ranks, split=found.split)
    assert placement.replicas_on_rank.sum(axis=1).max() <= most
    load = loads(placement, demand, room.node)
    assert load.sum(axis=1) == pytest.approx(demand.sum(axis=(0, 2)))
    assert ((found.local >= 0) & (found.local <= found.near + 1e-9) & (found.near <= 1 + 1e-9)).all()


def test_the_same_demand_everywhere_leaves_all_but_one_rank_s_part_remote() -> None:
    demand = demand_of("topheavy", 0.0, 8, 3, 64, 1)
    assert locality_placement(demand, LocalityProblem(FLAT8, 8, balance=0.5)).local == pytest.approx(1 / 8)


def test_a_placement_it_made_itself_is_left_as_it_is() -> None:
    demand = demand_of("topheavy", 0.5, 8, 4, 64, 2)
    room = LocalityProblem(FLAT8, 12)
    first = locality_placement(demand, room)
    again = locality_placement(demand, room, first.table)
    assert copies_between(first.table, again.table, 8) <= 0.02 * first.table.size
    assert np.array_equal(locality_placement(demand, room).table, first.table)


def test_nodes_come_first_where_their_link_costs_more() -> None:
    demand, node = demand_of("topheavy", 0.5, 8, 4, 64, 4), np.arange(8) // 2
    flat, wide = (
        locality_placement(demand, LocalityProblem(FLAT8, 10)),
        locality_placement(demand, LocalityProblem(node, 10, LocalityPrices(1.0, 4.0))),
    )
    room = LocalityProblem(node, 10, LocalityPrices(1.0, 4.0))
    assert wide.near.mean() > measured(flat.table, None, demand, room).near.mean() + 0.03
    assert wide.saved.mean() >= bound(demand, room)[1].mean() - 0.01
    assert wide.balance.min() >= 0.949


def test_experts_stay_where_they_must() -> None:
    demand = demand_of("zipf", 1.0, 4, 2, 16, 6)
    home = np.zeros((2, 4, 16), bool)
    home[:, :2, :8] = home[:, 2:, 8:] = True
    found = locality_placement(demand, LocalityProblem(np.zeros(4, np.intp), 6, balance=0.6, home=home))
    assert (held_of(found.table, 4, 16) & home).any(axis=1).all()


def test_exchanges_never_lose_worth() -> None:
    room = LocalityProblem(np.arange(8) // 4, 10, LocalityPrices(1.0, 1.0), 3)
    worth = worth_of(demand_of("zipf", 0.5, 8, 4, 64, 8), room)
    held = held_by_worth(worth, 10, 3)
    assert (worth.of(exchange_experts(worth, held, 10, 3)) >= worth.of(held) - 1e-9).all()
    assert np.array_equal(held_of(table_of(held, 10), 8, 64), held)


def test_a_pair_costs_what_its_destination_costs_less_what_its_token_sends_there_anyway() -> None:
    speed = EngineSpeed(dispatch=2e-6, dispatch_node=1e-5)
    one = LocalityPrices.of(speed, 1, np.arange(8) // 2)
    assert one == LocalityPrices(2e-6, 1e-5)
    several = LocalityPrices.of(speed, 8, np.arange(8) // 2)
    assert several.rank / several.node > one.rank / one.node
    assert LocalityPrices.of(speed, 8, FLAT8).node == 0.0
    assert (
        LocalityPrices.of(EngineSpeed(dispatch=0.0), 8, FLAT8)
        == LocalityPrices.of(speed, 8, np.zeros(1, np.intp))
        == LocalityPrices(1.0, 0.0)
    )


def test_what_does_not_fit_is_refused() -> None:
    demand = np.ones((2, 1, 8))
    with pytest.raises(ValueError, match="do not fit"):
        locality_placement(demand, LocalityProblem(np.zeros(2, np.intp), 3))
    home = np.zeros((1, 2, 8), bool)
    home[:, 0] = True
    with pytest.raises(ValueError, match="where they must be"):
        locality_placement(demand, LocalityProblem(np.zeros(2, np.intp), 5, home=home))
    for wrong in ({"slots": 0}, {"most": 0}, {"balance": 0.0}, {"prices": LocalityPrices(0.0, 0.0)}):
        with pytest.raises(ValueError, match="locality"):
            LocalityProblem(**{"node": np.zeros(2, np.intp), "slots": 4} | wrong)


def test_one_rank_serves_all_and_no_demand_is_no_error() -> None:
    alone = locality_placement(np.ones((1, 2, 6)), LocalityProblem(np.zeros(1, np.intp), 8))
    assert alone.local == pytest.approx(1.0)
    idle = locality_placement(
        np.zeros((4, 2, 16)), LocalityProblem(np.arange(4) // 2, 5, LocalityPrices(1.0, 1.0))
    )
    assert (idle.balance == 1.0).all()
    assert (idle.saved == 0.0).all()


def test_any_placement_can_be_measured() -> None:
    demand = demand_of("mild", 0.5, 4, 2, 16, 0)
    table = linear(layers=2, experts=16, ranks=4).expert_of_slot
    found = measured(table, None, demand, LocalityProblem(np.zeros(4, np.intp), 4))
    assert found.local == pytest.approx(
        [
            demand[np.arange(4), layer].reshape(4, 4, 4)[np.arange(4), np.arange(4)].sum() / 4
            for layer in range(2)
        ]
    )
