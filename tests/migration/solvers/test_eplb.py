"""EPLB against its published example, a direct rewriting of its description, and as a placement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement
from migration.solvers.eplb import (
    as_placement,
    eplb_global,
    eplb_hierarchical,
    packed,
    raw_shares,
    replicated,
)


def test_it_gives_the_placement_that_its_description_prints() -> None:
    load = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    raw = eplb_hierarchical(load, slots=16, groups=4, nodes=2, ranks=8)
    assert raw.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_the_most_loaded_replica_is_halved_first_and_of_equals_the_first() -> None:
    of_replica, counts = replicated(np.array([[6.0, 6.0, 1.0]]), 6)
    assert of_replica.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert counts.tolist() == [[3, 2, 1]]


def test_the_heaviest_goes_to_the_lightest_pack_that_has_room() -> None:
    pack, place = packed(np.array([[1.0, 9.0, 2.0, 3.0]]), 2)
    assert pack.tolist() == [[0, 0, 1, 1]]
    assert place.tolist() == [[1, 0, 1, 0]]


def by_hand(load: list[float], slots: int, ranks: int) -> list[list[int]]:
    """One layer, in plain Python."""
    experts = list(range(len(load)))
    while len(experts) < slots:
        experts.append(max(range(len(load)), key=lambda one: (load[one] / experts.count(one), -one)))
    weight = [load[one] / experts.count(one) for one in experts]
    packs: list[list[int]] = [[] for _ in range(ranks)]
    carried = [0.0] * ranks
    for item in sorted(range(slots), key=lambda one: (-weight[one], one)):
        rank = min(
            (rank for rank in range(ranks) if len(packs[rank]) < slots // ranks),
            key=lambda rank: (carried[rank], rank),
        )
        packs[rank].append(experts[item])
        carried[rank] += weight[item]
    return packs


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=8), st.integers(2, 3), st.integers(0, 3))
def test_the_global_variant_is_its_description(load: list[int], ranks: int, spare: int) -> None:
    per_rank = -(-len(load) // ranks) + spare
    if per_rank == 1:
        return
    raw = eplb_global(np.array([load], float), ranks * per_rank, ranks)
    assert raw.reshape(ranks, per_rank).tolist() == by_hand(
        [float(one) for one in load], ranks * per_rank, ranks
    )


def even_loads(table: NDArray[np.integer], load: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    loads = np.zeros((len(table), ranks))
    for layer, row in enumerate(table.tolist()):
        for slot, expert in enumerate(row):
            loads[layer, slot * ranks // len(row)] += (
                load[layer, expert] / row.count(expert) if expert != EMPTY else 0.0
            )
    return loads


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(6, 3, 4), (8, 2, 6), (5, 4, 2)]))
def test_as_a_placement_it_is_lawful_and_its_shares_balance_as_the_raw_map(
    seed: int, shape: tuple[int, int, int]
) -> None:
    experts, ranks, per_rank = shape
    load = np.random.default_rng(seed).pareto(1.0, (3, experts)) + 0.01
    raw = eplb_global(load, ranks * per_rank, ranks)
    table = as_placement(raw, ranks)
    Placement(table, experts=experts, ranks=ranks)
    shares = raw_shares(raw, ranks)
    served = (
        np.where(table == EMPTY, 0.0, np.take_along_axis(load, np.maximum(table, 0).astype(np.intp), axis=1))
        * shares
    )
    np.testing.assert_allclose(served.reshape(3, ranks, -1).sum(axis=2), even_loads(raw, load, ranks))


def test_a_duplicate_leaves_an_empty_slot() -> None:
    assert as_placement(np.array([[0, 0, 1, 2]]), 2).tolist() == [[0, EMPTY, 1, 2]]


@pytest.mark.parametrize(
    ("slots", "groups", "nodes", "ranks", "named"),
    [
        (16, 5, 1, 4, "12 experts .* 5 groups"),
        (16, 4, 3, 4, "4 groups .* 3 nodes"),
        (16, 4, 4, 6, "6 ranks .* 4 nodes"),
        (18, 4, 2, 4, "18 slots .* 4 ranks"),
        (8, 1, 1, 4, "8 slots do not hold 12"),
    ],
)
def test_what_does_not_divide_is_refused(slots: int, groups: int, nodes: int, ranks: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        eplb_hierarchical(np.ones((1, 12)), slots, groups, nodes, ranks)
