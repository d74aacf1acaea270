"""Assignment of sets of experts to ranks, against all permutations; experts that stay keep their slots."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.arrays import SlotTable
from fleet.placement import EMPTY
from migration.model.placement_changes import copies_between
from migration.solvers.rank_relabelling import arranged, relabelled

NODE = np.array([0, 0, 1, 1])


def tables(seed: int) -> tuple[SlotTable, SlotTable]:
    """Two placements of 6 experts, each held twice, on 4 ranks of 3 slots, two layers; the first with an
    empty slot in each layer."""
    dice = np.random.default_rng(seed)
    before, after = (
        np.array([np.concatenate([dice.permutation(6), dice.permutation(6)]) for _ in range(2)], np.int16)
        for _ in range(2)
    )
    before[[0, 1], dice.integers(0, 12, 2)] = EMPTY
    return before, after


def sets(row: SlotTable, ranks: int) -> list[set[int]]:
    return [set(part) - {EMPTY} for part in row.reshape(ranks, -1).tolist()]


def least_copies(before: SlotTable, after: SlotTable, ranks: int, allowed: list[tuple[int, ...]]) -> int:
    total = 0
    for old, new in zip(before, after, strict=True):
        olds, news = sets(old, ranks), sets(new, ranks)
        total += min(
            sum(len(news[source] - olds[rank]) for rank, source in enumerate(order)) for order in allowed
        )
    return total


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100_000))
def test_no_other_way_to_give_sets_to_ranks_copies_less(seed: int) -> None:
    before, after = tables(seed)
    result = relabelled(before, after, 4)
    assert copies_between(before, result, 4) == least_copies(before, after, 4, list(permutations(range(4))))
    for new, given_out in zip(after, result, strict=True):
        assert sorted(map(sorted, sets(new, 4))) == sorted(map(sorted, sets(given_out, 4)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100_000))
def test_sets_that_shared_a_node_share_one_still(seed: int) -> None:
    before, after = tables(seed)
    result = relabelled(before, after, 4, NODE)
    for new, given_out in zip(after, result, strict=True):
        wanted, found = (
            sorted(tuple(sorted(map(sorted, sets(row, 4)[at : at + 2]))) for at in (0, 2))
            for row in (new, given_out)
        )
        assert wanted == found


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100_000))
def test_nodes_of_other_sizes_keep_their_sets(seed: int) -> None:
    dice = np.random.default_rng(seed)
    before, after = (np.stack([dice.permutation(12) for _ in range(2)]).astype(np.int16) for _ in range(2))
    result = relabelled(before, after, 6, np.array([2, 0, 1, 0, 3, 0]))
    nodes = {(1, 3, 5): 3, (0,): 1, (2,): 1, (4,): 1}
    for new, given_out in zip(after, result, strict=True):
        wanted, found = (sets(row, 6) for row in (new, given_out))
        for ranks, size in nodes.items():
            mine = sorted(map(sorted, (found[rank] for rank in ranks)))
            alike = [other for other in nodes if len(other) == size]
            assert mine in [sorted(map(sorted, (wanted[rank] for rank in other))) for other in alike]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100_000), st.booleans())
def test_what_a_rank_keeps_stays_in_its_slot_and_nothing_is_lost(seed: int, ranks_too: bool) -> None:
    before, after = tables(seed)
    result = relabelled(before, after, 4) if ranks_too else arranged(before, after, 4)
    for old, new in zip(before.reshape(-1, 3), result.reshape(-1, 3), strict=True):
        for slot, expert in enumerate(old.tolist()):
            if expert != EMPTY and expert in new.tolist():
                assert new[slot] == expert
    if not ranks_too:
        assert [sets(row, 4) for row in after] == [sets(row, 4) for row in result]


def test_a_set_with_most_of_its_experts_across_the_link_stays_there() -> None:
    before = np.array([[0, 1, 2, 3, 4, 5, 6, 7]], np.int16)
    after = np.array([[4, 7, 6, 5, 0, 3, 2, 1]], np.int16)
    assert relabelled(before, after, 4, NODE).tolist() == [[0, 3, 2, 1, 4, 7, 6, 5]]


def test_a_layer_that_is_the_same_is_left_as_it_is() -> None:
    before = np.array([[0, 1, 2, EMPTY], [0, 1, 2, 0]], np.int16)
    after = np.array([[0, 1, 2, EMPTY], [2, 0, 0, 1]], np.int16)
    assert relabelled(before, after, 2).tolist() == [[0, 1, 2, EMPTY], [0, 1, 2, 0]]


def test_tables_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 4\) and \(1, 6\) on 2 ranks"):
        arranged(np.zeros((1, 4), np.int16), np.zeros((1, 6), np.int16), 2)
