"""Empty slots: the experts that fill them, and those that never do."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.placement import EMPTY, Placement, linear
from migration.model.constraints import Constraints
from migration.model.placement_changes import ChangeKind, made
from migration.solvers.fill_empty_slots import filled

LAYERS, EXPERTS, RANKS = 2, 6, 3


def test_each_rank_gets_what_its_own_requests_want_most_of_what_it_lacks() -> None:
    table = linear(layers=1, experts=4, ranks=2, slots_per_rank=3).expert_of_slot
    demand = np.array([[[1.0, 1.0, 2.0, 5.0]], [[9.0, 1.0, 1.0, 1.0]]])
    changes = filled(table, demand, 2)
    assert made(table, changes).tolist() == [[0, 1, 3, 2, 3, 0]]
    np.testing.assert_allclose(changes.gain, [5 / 21, 9 / 21])


@given(st.integers(0, 1 << 32), st.integers(2, 4), st.integers(1, 3), st.booleans())
@settings(max_examples=30)
def test_what_is_full_stays_and_limits_hold(seed: int, slots: int, most: int, bounded: bool) -> None:
    dice = np.random.default_rng(seed)
    placement = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS, slots_per_rank=slots)
    frozen, live = dice.random((LAYERS, EXPERTS)) < 0.3, np.array([True, True, False])
    limits = Constraints(max_replicas=most, frozen=frozen, live=live) if bounded else Constraints()
    table = placement.expert_of_slot
    changes = filled(table, dice.random((RANKS, LAYERS, EXPERTS)), RANKS, limits)
    after = made(table, changes)
    assert (after[table != EMPTY] == table[table != EMPTY]).all()
    found = Placement(after, experts=EXPERTS, ranks=RANKS)
    assert set(changes.kind.tolist()) <= {ChangeKind.REPLICATE}
    if bounded:
        counts = found.replicas_on_rank.sum(axis=1)
        assert (counts <= most).all()
        assert (counts[frozen] == 1).all()
        assert (after.reshape(LAYERS, RANKS, slots)[:, 2] == table.reshape(LAYERS, RANKS, slots)[:, 2]).all()
    else:
        assert (after != EMPTY).all(), "there is something for every slot"
