"""The pieces of a cell, in both forms of a layer: a piece that goes to the other form and back is what it
was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_adapter.engine import CellTensor
from engine_adapter.transfer.mapped_memory import laid_out
from engine_adapter.transfer.parts import ByteRange, CellFormat
from engine_adapter.transfer.port import Pull
from fleet.sharding import ALL_PARTS

Cell = NDArray[np.uint8]


@st.composite
def forms(draw: st.DrawFn) -> CellFormat:
    parts = draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    tensors = laid_out([(f"t{at}", "uint8", (parts, size)) for at, size in enumerate(rows)])
    return CellFormat(tensors, parts)


def copied(pulls: tuple[Pull, ...], source: Cell, cell: Cell) -> None:
    for _, source_offset, _, offset, size in pulls:
        cell[offset : offset + size] = source[source_offset : source_offset + size]


@given(forms(), st.booleans())
def test_pieces_do_not_overlap_lie_within_the_cell_and_cover_every_weight(
    form: CellFormat, sharded: bool
) -> None:
    used = np.zeros(form.least_bytes, int)
    for piece in range(form.parts):
        for offset, size in form.ranges(piece, sharded=sharded):
            assert offset + size <= form.least_bytes
            used[offset : offset + size] += 1
    assert used.max() == 1
    assert used.sum() == sum(one.bytes for one in form.tensors)


@given(forms(), st.integers(0, 99), st.data())
def test_an_expert_that_is_cut_and_put_together_again_is_the_same(
    form: CellFormat, seed: int, data: st.DataObject
) -> None:
    """Each part goes into the group's cell of another rank, at the expert's position there."""
    dice = np.random.default_rng(seed)
    expert = dice.integers(0, 256, form.least_bytes, np.uint8)
    position = data.draw(st.integers(0, form.parts - 1))
    ranks = [dice.integers(0, 256, form.least_bytes, np.uint8) for _ in range(form.parts)]
    back = np.zeros(form.least_bytes, np.uint8)
    for part, group in enumerate(ranks):
        copied(form.pulls(0, part, 0, position, sharded=True), expert, group)
        copied(form.pulls(0, position, 0, part, sharded=False), group, back)
    for one in form.tensors:
        assert (
            back[one.offset : one.offset + one.bytes] == expert[one.offset : one.offset + one.bytes]
        ).all()


def test_a_part_of_a_group_begins_at_a_multiple_of_64_its_tensors_one_after_another() -> None:
    tensors = (CellTensor("up", "uint8", (2, 40), 0, 80), CellTensor("down", "uint8", (2, 30), 128, 60))
    form = CellFormat(tensors, 2)
    assert form.stride == 128
    assert form.least_bytes == 256
    assert form.ranges(1, sharded=True) == (ByteRange(128, 40), ByteRange(168, 30))
    assert form.ranges(1, sharded=False) == (ByteRange(40, 40), ByteRange(158, 30))


def test_a_whole_expert_is_one_range() -> None:
    form = CellFormat(laid_out([("up", "uint8", (2, 8)), ("down", "uint8", (2, 8))]), 2)
    assert form.pulls(3, ALL_PARTS, 4, ALL_PARTS, sharded=False) == (Pull(3, 0, 4, 0, 80),)


@given(forms())
def test_where_experts_are_not_cut_both_forms_are_one(form: CellFormat) -> None:
    one = CellFormat(form.tensors, 1)
    assert one.ranges(0, sharded=True) == one.ranges(0, sharded=False)
    assert one.least_bytes == one.whole_bytes


def test_what_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor scale of 4 bytes does not divide into 3 equal parts"):
        CellFormat(laid_out([("up", "uint8", (3,)), ("scale", "<f4", (1,))]), 3)
    with pytest.raises(ValueError, match="at least 1"):
        CellFormat(laid_out([("up", "uint8", (3,))]), 0)
    with pytest.raises(IndexError, match="piece 3 of a cell of 3"):
        CellFormat(laid_out([("up", "uint8", (3,))]), 3).ranges(3, sharded=False)
