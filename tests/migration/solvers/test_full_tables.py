"""Tables without empty slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.placement import EMPTY, Placement, repeated
from migration.model.placement_changes import ChangeKind, made
from migration.solvers.even_split_copies import even_split_copies
from migration.solvers.full_tables import arrivals, completed, in_place

SIZES = st.sampled_from([(2, 4, 6), (2, 5, 6), (3, 4, 8), (4, 3, 9), (1, 5, 5)])
"""(ranks, slots per rank, experts)"""
SEEDS = st.integers(0, 1 << 16)


def reported(dice: np.random.Generator, ranks: int, per: int, experts: int) -> np.ndarray:
    """A layer as an engine may report it: every expert, the rest at random, also twice on a rank."""
    rest = dice.integers(0, experts, ranks * per - experts)
    return dice.permutation(np.concatenate([np.arange(experts), rest])).astype(np.int16)[None]


@given(seed=SEEDS, size=SIZES)
def test_a_completed_table_is_legal_and_leaves_the_first_copies_where_they_are(
    seed: int, size: tuple[int, int, int]
) -> None:
    ranks, _, experts = size
    dice = np.random.default_rng(seed)
    table = reported(dice, *size)
    extra = repeated(table, ranks)
    found = completed(table, dice.random((1, experts)), ranks)
    Placement(found, experts=experts, ranks=ranks)
    assert (found != EMPTY).all()
    assert (found[~extra] == table[~extra]).all()


def test_an_empty_slot_gets_the_expert_of_most_load_per_replica_that_is_not_on_the_rank() -> None:
    table = np.array([[0, 1, EMPTY, 2, 0, EMPTY]], np.int16)
    assert completed(table, np.array([[10.0, 4.0, 5.0]]), 2).tolist() == [[0, 1, 2, 2, 0, 1]]


def test_a_rank_with_more_slots_than_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="a rank has 3 slots and a layer 2 experts"):
        completed(np.array([[0, 1, 0, 1, 0, 1]], np.int16), np.ones((1, 2)), 2)


@given(seed=SEEDS, size=SIZES)
def test_only_experts_that_arrive_change_slots(seed: int, size: tuple[int, int, int]) -> None:
    ranks, per, experts = size
    dice = np.random.default_rng(seed)
    before = reported(dice, *size)
    after = completed(reported(dice, *size), dice.random((1, experts)), ranks)
    found = in_place(before, after, ranks)
    for rank in range(ranks):
        part = slice(rank * per, (rank + 1) * per)
        assert sorted(found[0, part]) == sorted(after[0, part])
        come = set(after[0, part].tolist()) - set(before[0, part].tolist())
        assert set(found[0, part][arrivals(before, found, ranks)[0, part]].tolist()) == come
    assert ((found != before) == arrivals(before, found, ranks)).all()


@given(seed=SEEDS, size=SIZES)
def test_a_search_over_a_full_table_never_empties_a_slot(seed: int, size: tuple[int, int, int]) -> None:
    ranks, _, experts = size
    dice = np.random.default_rng(seed)
    load = dice.dirichlet(np.full(experts, 0.4), 1)
    start = completed(reported(dice, *size), load, ranks)
    changes = even_split_copies(start, load, ranks, goal=np.ones(1), full=True)
    assert set(changes.kind.tolist()) <= {ChangeKind.REPLICATE, ChangeKind.SWAP}
    for end in range(len(changes.kind) + 1):
        first = made(
            start, changes._replace(**{name: part[:end] for name, part in changes._asdict().items()})
        )
        assert (first != EMPTY).all()
        Placement(first, experts=experts, ranks=ranks)
