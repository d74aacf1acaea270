"""A copy budget takes a prefix of each layer's series, best gain per copy first."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from migration.model.placement_changes import (
    COPIES,
    ChangeKind,
    PlacementChanges,
    copies_between,
    copies_by_layer,
    within,
)


def changes(rows: list[tuple[ChangeKind, int, float]]) -> PlacementChanges:
    """Make changes from (kind, layer, gain); their slots identify them."""
    kind, layer, gain = (np.array(part) for part in zip(*rows, strict=True))
    nothing = np.full(len(rows), -1)
    return PlacementChanges(
        kind.astype(np.uint8),
        layer.astype(np.int32),
        np.arange(len(rows), dtype=np.int32),
        nothing,
        nothing,
        nothing,
        gain.astype(np.float64),
    )


series = st.lists(
    st.tuples(st.sampled_from(ChangeKind), st.integers(0, 2), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(rows=series, most=st.integers(0, 12))
def test_no_change_is_made_without_those_of_its_layer_before_it(
    rows: list[tuple[ChangeKind, int, float]], most: int
) -> None:
    planned = changes(rows)
    found = within(planned, most)
    assert found.copies.sum() <= most
    for layer in range(3):
        of_layer = planned.slot[planned.layer == layer].tolist()
        chosen = found.slot[found.layer == layer].tolist()
        assert chosen == of_layer[: len(chosen)]


def test_a_drop_waits_for_the_copy_that_makes_it_legal() -> None:
    found = within(
        changes([(ChangeKind.REPLICATE, 0, 1.0), (ChangeKind.DROP, 0, 0.0), (ChangeKind.REPLICATE, 1, 2.0)]),
        1,
    )
    assert found.slot.tolist() == [2]


def test_a_small_step_before_a_large_one_is_not_lost() -> None:
    found = within(
        changes(
            [(ChangeKind.REPLICATE, 0, 1.0), (ChangeKind.REPLICATE, 1, 0.0), (ChangeKind.REPLICATE, 1, 9.0)]
        ),
        2,
    )
    assert found.slot.tolist() == [1, 2]


def test_what_fits_is_taken_whole() -> None:
    planned = changes([(ChangeKind.SWAP, 0, 1.0), (ChangeKind.MOVE, 1, -1.0)])
    assert within(planned, int(COPIES[[ChangeKind.SWAP, ChangeKind.MOVE]].sum())) is planned


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_copies_of_layers_add_up_to_those_between_two_tables(seed: int) -> None:
    dice = np.random.default_rng(seed)
    before, after = (
        np.stack([np.where(dice.random(12) < 0.2, -1, dice.permutation(12)) for _ in range(3)]).astype(
            np.int16
        )
        for _ in range(2)
    )
    assert copies_by_layer(before, after, 4).sum() == copies_between(before, after, 4)
