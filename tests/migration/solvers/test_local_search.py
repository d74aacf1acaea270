"""Local search on small placements: legal after every step, never worse, and finished when no single change
helps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement
from migration.solvers.local_search import fullest, local_search

EXPERTS, RANKS, PER_RANK = 5, 3, 3


def some(seed: int) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Two layers, each rank with three experts in turn, and a load."""
    dice = np.random.default_rng(seed)
    table = np.array([np.resize(dice.permutation(EXPERTS), RANKS * PER_RANK) for _ in range(2)], np.int16)
    return table, dice.pareto(1.0, (2, EXPERTS)) + 0.01


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100_000), st.integers(1, 3))
def test_it_stays_lawful_and_the_fullest_rank_does_not_get_fuller_by_much(seed: int, most: int) -> None:
    table, load = some(seed)
    least = np.minimum(np.stack([np.bincount(row[row != EMPTY], minlength=EXPERTS) for row in table]), 2)
    after = local_search(table, load, RANKS, least, max(most, 3))
    Placement(after, experts=EXPERTS, ranks=RANKS)
    counts = np.stack([np.bincount(row[row != EMPTY], minlength=EXPERTS) for row in after])
    assert (counts >= least).all()
    assert (fullest(after, load, RANKS) <= 1.05 * fullest(table, load, RANKS)).all()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 100_000))
def test_in_the_end_no_other_expert_in_one_slot_relieves_the_fullest_rank(seed: int) -> None:
    table, load = some(seed)
    after = local_search(table, load, RANKS, np.ones_like(load, np.int64), RANKS)
    for layer, row in enumerate(after):
        now = fullest(row[None], load[[layer]], RANKS)[0]
        for slot in range(len(row)):
            for expert in range(-1, EXPERTS):
                other = row.copy()
                other[slot] = expert
                try:
                    Placement(other[None], experts=EXPERTS, ranks=RANKS)
                except ValueError:
                    continue
                assert fullest(other[None], load[[layer]], RANKS)[0] > now * 0.97


def test_replicas_beyond_the_most_are_not_made() -> None:
    load = np.array([[9.0, 1.0, 1.0]])
    table = np.array([[0, EMPTY, 1, EMPTY, 2, EMPTY]], np.int16)
    least = np.ones((1, 3), np.int64)
    assert (local_search(table, load, 3, least, 2) == 0).sum() == 2
    assert (local_search(table, load, 3, least, 3) == 0).sum() == 3
    assert (local_search(table, load, 3, least, 1) == 0).sum() == 1
