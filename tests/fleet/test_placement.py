"""Placement: invariants are checked at birth, and epoch 0 is linear."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.experts import ExpertId
from fleet.placement import EMPTY, Placement, linear


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """A legal placement with random order, replicas and empty slots."""
    layers, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    slots = -(-experts // ranks) + draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table = np.full((layers, ranks, slots), EMPTY, np.int16)
    for layer in range(layers):
        for at, expert in enumerate(rng.permutation(experts)):
            table[layer, at % ranks, at // ranks] = expert
        for rank in range(ranks):
            absent = [e for e in range(experts) if e not in table[layer, rank]]
            free = np.flatnonzero(table[layer, rank] == EMPTY)
            copies = rng.integers(0, min(len(absent), len(free)) + 1)
            table[layer, rank, free[:copies]] = rng.permutation(absent)[:copies]
    return Placement(table.reshape(layers, -1), experts=experts, ranks=ranks, epoch=draw(st.integers(0, 1000)))


@given(placements())
def test_a_placement_survives_the_wire(placement: Placement) -> None:
    assert Placement.from_record(placement.record()) == placement


@given(placements())
def test_inverse_maps_agree_with_the_slots(placement: Placement) -> None:
    for layer in range(placement.layers):
        for expert in range(placement.experts):
            seen = {int(slot) // placement.slots_per_rank for slot in np.flatnonzero(placement.expert_of_slot[layer] == expert)}
            assert placement.holders(ExpertId(layer, expert)) == sorted(seen)
    assert np.allclose(placement.share.sum(axis=1), 1.0)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 8))
def test_linear_placement_is_contiguous_balanced_and_complete(layers: int, experts: int, ranks: int) -> None:
    placement = linear(layers=layers, experts=experts, ranks=ranks)
    held = [placement.on_rank(rank)[0] for rank in range(ranks)]
    sizes = [int((block != EMPTY).sum()) for block in held]
    assert [int(e) for block in held for e in block if e != EMPTY] == list(range(experts))
    assert max(sizes) - min(sizes) <= 1
    assert placement.epoch == 0


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 2, 3, 4, 9]], "names expert 9"),
        ([[0, 1, 2, 3, 4, -2]], "names expert -2"),
        ([[0, 0, 1, 2, 3, 4]], "rank 0 holds expert 0/0 more than once"),
        ([[0, 1, 2, 3, 4, -1]], "expert 0/5 has no replica"),
        ([[0, 1, 2, 3, 4]], "with 2 ranks"),
    ],
)
def test_an_illegal_placement_is_refused_and_the_offender_named(slots: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(np.array(slots), experts=6, ranks=2)


def test_truncated_wire_bytes_are_refused() -> None:
    record = linear(layers=2, experts=4, ranks=2).record()
    damaged = type(record)(**{**{f: getattr(record, f) for f in record.__struct_fields__}, "slots": record.slots[:-1]})
    with pytest.raises(ValueError, match="bytes of slots"):
        Placement.from_record(damaged)


def test_a_placement_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        linear(layers=1, experts=2, ranks=1).expert_of_slot[0, 0] = 1
