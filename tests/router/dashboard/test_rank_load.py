"""Expected load of ranks, against the general computation of `fleet.dispatch`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.dispatch import loads
from fleet.placement import EMPTY, FULL, Placement, Split, linear, with_rows, with_slots
from router.dashboard.views.rank_load import expected_load


def random_placement(chance: np.random.Generator, ranks: int, experts: int, layers: int) -> Placement:
    """Every expert on one rank, some on more, with a random split."""
    slots = -(-experts // ranks) + 2
    table = with_slots(linear(layers=layers, experts=experts, ranks=ranks), slots).expert_of_slot.copy()
    for layer in range(layers):
        for rank in range(ranks):
            own = table[layer, rank * slots : (rank + 1) * slots]
            for free in np.flatnonzero(own == EMPTY):
                more = np.setdiff1d(np.arange(experts), own)
                if len(more) and chance.random() < 0.7:
                    own[free] = chance.choice(more)
    spill = np.zeros(table.shape, np.uint16)
    for layer in range(layers):
        for expert in range(experts):
            held = np.flatnonzero(table[layer] == expert)
            ends = np.sort(chance.integers(0, FULL + 1, len(held) - 1))
            spill[layer, held] = np.diff(np.concatenate([[0], ends, [FULL]]))
    filled = table != EMPTY
    keep = np.where(filled, chance.integers(0, FULL + 1, table.shape), 0).astype(np.uint16)
    near = np.where(filled, chance.integers(0, FULL + 1, table.shape), 0).astype(np.uint16)
    return Placement(table, experts=experts, ranks=ranks, split=Split(keep, spill, near))


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 6), experts=st.integers(6, 12))
def test_the_load_is_that_of_ranks_whose_requests_are_alike(seed: int, ranks: int, experts: int) -> None:
    chance = np.random.default_rng(seed)
    placement = random_placement(chance, ranks, experts, layers=2)
    profile = chance.dirichlet(np.ones(experts), 2)
    weights = chance.dirichlet(np.ones(ranks))
    node = np.sort(chance.integers(0, 3, ranks))
    node = np.unique(node, return_inverse=True)[1]
    exact = loads(placement, weights[:, None, None] * profile[None], node)
    np.testing.assert_allclose(expected_load(placement, profile, weights, node), ranks * exact, atol=1e-9)


def test_a_sharded_layer_loads_all_ranks_alike() -> None:
    placement = with_rows(linear(layers=2, experts=4, ranks=2), {1: None}, epoch=1)
    profile = np.array([[0.7, 0.1, 0.1, 0.1]] * 2)
    load = expected_load(placement, profile, np.full(2, 0.5), np.zeros(2, np.intp))
    np.testing.assert_allclose(load, [[1.6, 0.4], [1.0, 1.0]])


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        expected_load(
            linear(layers=2, experts=4, ranks=2), np.ones((2, 3)), np.full(2, 0.5), np.zeros(2, np.intp)
        )
