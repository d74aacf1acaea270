"""The searches for swaps and for locality find the same in both forms, bit for bit."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from migration import kernels
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_placement import full_placement
from migration.solvers.holder_value import HolderValue, filled, held_by_worth
from migration.solvers.load_cap import held_of, levelled
from migration.solvers.locality_placement import LocalityPrices, LocalityProblem, locality_placement
from migration.solvers.ordered_diff import ordered_diff
from migration.solvers.pairwise_exchange import exchange_experts
from tests.migration.kernels.cases import Case, cases


@settings(max_examples=60, deadline=None)
@given(cases(by_rank=False), st.booleans())
def test_few_copies_with_even_shares_are_the_same(case: Case, full: bool) -> None:
    table, load = case.table, case.demand
    full = full and bool((table >= 0).all()) and case.limits.live is None
    goal = np.full(len(table), 0.97)

    def found() -> list[NDArray[np.generic]]:
        return list(
            even_split_copies(table, load, case.ranks, case.limits, goal=goal, node=case.node, full=full)
        )

    with kernels.python_form():
        expected = found()
    assert all(np.array_equal(one, two) for one, two in zip(found(), expected, strict=True))


@settings(max_examples=60, deadline=None)
@given(cases(by_rank=True), st.sampled_from([0.8, 0.955, 1.0]), st.integers(1, 4), st.booleans())
def test_placements_for_locality_are_the_same(case: Case, balance: float, most: int, stay: bool) -> None:
    node = np.zeros(case.ranks, np.intp) if case.node is None else case.node
    room = LocalityProblem(
        node, case.table.shape[1] // case.ranks, LocalityPrices(1.0, 1.5), most=most, balance=balance
    )
    present = case.table if stay else None
    with kernels.python_form():
        expected = locality_placement(case.demand, room, present)
    found = locality_placement(case.demand, room, present)
    assert np.array_equal(found.table, expected.table)
    assert all(np.array_equal(one, two) for one, two in zip(found.split, expected.split, strict=True))


@settings(max_examples=60, deadline=None)
@given(cases(by_rank=True), st.integers(0, 2**32), st.booleans())
def test_placements_by_worth_are_the_same_where_experts_have_homes(case: Case, seed: int, ties: bool) -> None:
    dice, per = np.random.default_rng(seed), case.table.shape[1] // case.ranks
    held = held_of(case.table, case.ranks, case.experts)
    home = held | (dice.random(held.shape) < 0.3)
    own = case.demand.transpose(1, 0, 2).round(1) if ties else case.demand.transpose(1, 0, 2)
    several = case.node is not None
    node = case.node if case.node is not None else np.zeros(case.ranks, np.intp)
    shared = dice.random((len(held), int(node.max()) + 1 if several else 1, case.experts)) * several
    worth = HolderValue(own, shared, node)

    def found() -> list[NDArray[np.generic]]:
        kept = filled(worth, held, per, case.ranks, home)
        moved = exchange_experts(worth, kept, per, case.ranks, home)
        table = levelled(case.table, case.demand, worth, 1.05, case.ranks, home)
        with suppress(ValueError):  # the experts do not fit where they must be
            return [kept, moved, table, held_by_worth(worth, per, case.ranks, home)]
        return [kept, moved, table]

    with kernels.python_form():
        expected = found()
    assert all(np.array_equal(one, two) for one, two in zip(found(), expected, strict=True))


@settings(max_examples=100, deadline=None)
@given(cases(by_rank=True), st.booleans(), st.integers(0, 2**32))
def test_changes_towards_a_placement_are_the_same(case: Case, ties: bool, seed: int) -> None:
    node = np.zeros(case.ranks, np.intp) if case.node is None else case.node
    room = LocalityProblem(node, case.table.shape[1] // case.ranks, LocalityPrices(1.0, 1.5), balance=0.8)
    demand = case.demand.round(1) if ties else case.demand
    # Of equal worth, or made for the demand: without gains there would be exchanges alone.
    other = np.random.default_rng(seed).permutation(case.experts).astype(np.int16)
    shuffled = np.where(case.table < 0, case.table, other[case.table]).astype(np.int16)
    for target in (locality_placement(demand, room).table, shuffled):
        with kernels.python_form():
            expected = ordered_diff(case.table, target, demand, room, case.limits)
        found = ordered_diff(case.table, target, demand, room, case.limits)
        assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 8, 12]), st.integers(1, 10), st.sampled_from([0.3, 3.0]))
def test_sets_are_spread_over_nodes_alike(seed: int, ranks: int, slots: int, even: float) -> None:
    dice = np.random.default_rng(seed)
    load = dice.gamma(even, size=(3, int(dice.integers(max(1, ranks * slots // 2), ranks * slots + 1))))
    node = np.sort(dice.integers(0, 3, ranks))
    with kernels.python_form():
        expected = full_placement(load, ranks, slots, node=node, max_replicas=2)
    assert np.array_equal(full_placement(load, ranks, slots, node=node, max_replicas=2), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 40),
    st.integers(1, 7),
    st.sampled_from([0.3, 3.0, 1e9]),
    st.booleans(),
)
def test_ranks_trade_alike(seed: int, ranks: int, slots: int, even: float, some: bool) -> None:
    dice = np.random.default_rng(seed)
    load = dice.gamma(even, size=(3, int(dice.integers(1, ranks * slots + 1)))).round(1 if even > 1 else 9)
    most = int(dice.integers(1, ranks + 1)) if some else None
    with kernels.python_form():
        expected = full_placement(load, ranks, slots, max_replicas=most)
    assert np.array_equal(full_placement(load, ranks, slots, max_replicas=most), expected)


def test_the_forms_agree_on_full_placements_of_many_ranks() -> None:
    load = np.random.default_rng(2).gamma(0.3, size=(3, 256))
    for ranks, slots in ((256, 2), (64, 5)):
        with kernels.python_form():
            expected = full_placement(load, ranks, slots)
        assert np.array_equal(full_placement(load, ranks, slots), expected)


def test_trades_of_experts_that_do_not_exist_are_refused() -> None:
    library = kernels.compiled()
    if library is None:
        pytest.skip("no library")
    held, expert, rounds = np.zeros((2, 3), bool), np.zeros((2, 1), np.intp), np.ones(1, np.int64)
    rest = np.zeros((2, 1), np.float32), np.zeros(2), held
    with pytest.raises(ValueError, match="no such expert"):
        library.placement_traded(expert + 3, *rest, rounds, 2, False)
    with pytest.raises(ValueError, match="no such number of ranks"):
        library.placement_traded(expert, *rest, rounds + 1, 2, False)
    with pytest.raises(ValueError, match="differ in length"):
        library.placement_traded(expert[:1], *rest, rounds, 2, False)


def test_the_forms_agree_on_a_placement_of_full_size() -> None:
    dice = np.random.default_rng(0)
    before, now = dice.gamma(0.3, size=(2, 6, 256))
    table = full_placement(before, 32, 9)
    goal = np.full(6, 0.99)
    with kernels.python_form():
        expected = even_split_copies(table, now, 32, goal=goal)
    found = even_split_copies(table, now, 32, goal=goal)
    assert len(found.layer) > 20
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))


def test_the_forms_agree_where_ranks_hold_many_experts() -> None:
    dice = np.random.default_rng(1)
    demand = dice.gamma(0.3, size=(4, 3, 64)).round(1)
    room = LocalityProblem(np.array([0, 0, 1, 1]), 24, LocalityPrices(1.0, 1.5), balance=0.9)
    with kernels.python_form():
        expected = locality_placement(demand, room)
    assert np.array_equal(locality_placement(demand, room).table, expected.table)


def test_the_forms_agree_on_placements_for_locality_of_many_ranks() -> None:
    dice = np.random.default_rng(3)
    demand = dice.gamma(0.3, size=(40, 3, 120)).round(1)
    for most, balance in ((None, 0.97), (3, 0.9)):
        room = LocalityProblem(np.arange(40) // 8, 4, LocalityPrices(1.0, 1.5), most=most, balance=balance)
        with kernels.python_form():
            expected = locality_placement(demand, room)
        assert np.array_equal(locality_placement(demand, room).table, expected.table)


def test_experts_that_do_not_fit_are_refused_by_both_forms() -> None:
    worth = HolderValue(np.ones((1, 2, 4)), np.zeros((1, 1, 4)), np.zeros(2, np.intp))
    home = np.zeros((1, 2, 4), bool)
    home[:, 0] = True
    with pytest.raises(ValueError, match="4 experts do not fit"):
        held_by_worth(worth, 2, 2, home)
    with kernels.python_form(), pytest.raises(ValueError, match="4 experts do not fit"):
        held_by_worth(worth, 2, 2, home)
