"""Replica selection for all experts of a token together: against an exhaustive search, and within the
shares."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.dispatch import Chooser, reached, shares
from fleet.placement import Placement, linear
from tests.fleet.splits import random_split, random_table


@st.composite
def asked(draw: st.DrawFn, most: int = 5) -> tuple[Placement, NDArray[np.int64], NDArray[np.int64]]:
    """Return a placement of one machine, tokens' homes [n] and their experts [n, k]."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(2, 10))
    table = random_table(dice, 1, ranks, experts, draw(st.integers(0, 4)))
    split = random_split(dice, table, experts, nodes=False) if draw(st.booleans()) else None
    tokens, k = draw(st.integers(0, 12)), draw(st.integers(1, min(experts, most)))
    chosen = np.array([dice.permutation(experts)[:k] for _ in range(tokens)], np.int64).reshape(tokens, k)
    return (
        Placement(table, experts=experts, ranks=ranks, split=split),
        dice.integers(0, ranks, tokens),
        chosen,
    )


def both(
    placement: Placement, home: NDArray[np.int64], experts: NDArray[np.int64], turn: int = 3
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slots by split and by cover, [n, k] each."""
    chooser = Chooser(placement, range(placement.ranks), np.zeros(placement.ranks, np.intp))
    wanted = home[:, None] * placement.experts + experts
    return chooser.choose(0, wanted.ravel(), turn).reshape(wanted.shape), chooser.cover(0, wanted, turn)


@given(asked())
@settings(max_examples=80, deadline=None)
def test_each_pair_goes_to_a_holder_with_a_share_and_no_token_reaches_more_ranks_than_by_the_split(case):
    placement, home, experts = case
    split, cover = both(placement, home, experts)
    assert (placement.expert_of_slot[0, cover] == experts).all()
    part = np.stack(
        [shares(placement, rank, np.zeros(placement.ranks, np.intp))[0] for rank in range(placement.ranks)]
    )
    assert (part[home[:, None], cover] > 0).all()
    by_split, by_cover = (reached(slots // placement.slots_per_rank, home) for slots in (split, cover))
    assert (by_cover <= by_split).all()
    assert (cover[by_cover == by_split] == split[by_cover == by_split]).all()


def least(placement: Placement, home: int, experts: NDArray[np.int64]) -> int:
    """Return the minimum number of other ranks that a token reaches, by exhaustive search."""
    part = shares(placement, home, np.zeros(placement.ranks, np.intp))[0]
    held = [
        np.flatnonzero((placement.expert_of_slot[0] == expert) & (part > 0)) // placement.slots_per_rank
        for expert in experts
    ]
    return min(len({*ranks} - {home}) for ranks in product(*(one.tolist() for one in held)))


@given(asked(most=3))
@settings(max_examples=60, deadline=None)
def test_up_to_three_experts_reach_the_fewest_ranks_possible(case):
    placement, home, experts = case
    found = reached(both(placement, home, experts)[1] // placement.slots_per_rank, home)
    assert found.tolist() == [least(placement, int(at), one) for at, one in zip(home, experts, strict=True)]


@given(asked(), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_a_token_is_served_alike_in_any_company_of_the_same_turns(case, seed):
    placement, home, experts = case
    chooser = Chooser(placement, range(placement.ranks), np.zeros(placement.ranks, np.intp))
    wanted = home[:, None] * placement.experts + experts
    turns = np.random.default_rng(seed).integers(0, 1000, placement.ranks * placement.experts)
    together = chooser.cover(0, wanted, turns)
    assert together.tolist() == chooser.cover(0, wanted, turns).tolist()
    for at in range(len(wanted)):
        before = turns + np.bincount(wanted[:at].ravel(), minlength=len(turns))
        assert chooser.cover(0, wanted[at : at + 1], before)[0].tolist() == together[at].tolist()


def test_own_replicas_cost_nothing_and_one_rank_that_has_the_rest_is_enough():
    """Rank 0 holds 0; rank 1: 1, 2; rank 2: 2, 3; rank 3: 1, 3, 2. Rank 0's tokens for 1, 2, 3 need rank 3
    alone.
    """
    placement = Placement(np.array([[0, -1, -1, 1, 2, -1, 2, 3, -1, 1, 3, 2]]), experts=4, ranks=4)
    for turn in range(8):
        split, cover = both(placement, np.array([0]), np.array([[0, 1, 2, 3]]), turn)
        assert (cover[0] // 3).tolist() == [0, 3, 3, 3]
        one = both(placement, np.array([0]), np.array([[1]]), turn)
        assert one[0].tolist() == one[1].tolist()
        assert split[0, 0] == cover[0, 0] == 0


def test_among_equals_all_replicas_take_their_part():
    placement = Placement(np.array([[-1, -1, 0, 1, 0, 1, 0, 1]]), experts=2, ranks=4)
    found = both(placement, np.zeros(300, np.int64), np.tile([0, 1], (300, 1)))[1]
    assert (found[:, 0] // 2 == found[:, 1] // 2).all()
    assert np.bincount(found[:, 0] // 2, minlength=4)[1:].min() > 60


def test_where_there_is_no_choice_nothing_is_chosen():
    placement = linear(layers=1, experts=6, ranks=3)
    split, cover = both(placement, np.array([1, 2]), np.array([[0, 5], [3, 1]]))
    assert split.tolist() == cover.tolist() == [[0, 5], [3, 1]]
