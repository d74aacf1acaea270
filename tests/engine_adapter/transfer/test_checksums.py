"""Checksums of experts, and the hash of what a cell holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.transfer.checksums import checksums, compare, layout_hash, piece_checksums
from engine_adapter.transfer.mapped_memory import laid_out
from engine_adapter.transfer.parts import CellFormat

EXPERT = laid_out(
    [
        ("gate_up", "float32", (6, 8)),
        ("down", "float32", (3, 8)),
        ("gate_up.scale", "float32", (2, 1)),
        ("down.scale", "float32", (1, 1)),
    ]
)
FORM = CellFormat(EXPERT, 1)
CELL_BYTES = max(one.offset + one.bytes for one in EXPERT)


def a_cell() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, CELL_BYTES, np.uint8)


@given(st.data())
def test_any_changed_byte_is_found_and_its_tensor_named(data: st.DataObject) -> None:
    cell = a_cell()
    expected = checksums(cell, FORM)
    hit = data.draw(st.sampled_from(EXPERT))
    cell[hit.offset + data.draw(st.integers(0, hit.bytes - 1))] ^= data.draw(st.integers(1, 255))
    assert compare(EXPERT, expected, checksums(cell, FORM)) == (hit.name,)


def test_bytes_between_tensors_do_not_count() -> None:
    cell, gap = a_cell(), EXPERT[2].offset + EXPERT[2].bytes
    expected = checksums(cell, FORM)
    cell[gap] ^= 1
    assert gap < EXPERT[3].offset
    assert compare(EXPERT, expected, checksums(cell, FORM)) == ()


def test_swapped_halves_are_found() -> None:
    cell = a_cell()
    expected = checksums(cell, FORM)
    gate_up = cell[: EXPERT[0].bytes]
    gate_up[:] = np.roll(gate_up, EXPERT[0].bytes // 2)
    assert compare(EXPERT, expected, checksums(cell, FORM)) == ("gate_up",)


def test_a_missing_checksum_is_a_difference() -> None:
    found = checksums(a_cell(), FORM)
    assert compare(EXPERT, found[:3], found) == ("down.scale",)
    assert len(compare(EXPERT, (*found, 1), found)) == 1


@pytest.mark.parametrize(
    "changed",
    [
        EXPERT[:3],
        (EXPERT[1], EXPERT[0], *EXPERT[2:]),
        (EXPERT[0]._replace(dtype="int32"), *EXPERT[1:]),
        (EXPERT[0]._replace(shape=(8, 6)), *EXPERT[1:]),
        (EXPERT[0]._replace(name="up_gate"), *EXPERT[1:]),
        (*EXPERT[:3], EXPERT[3]._replace(offset=EXPERT[3].offset + 64)),
    ],
)
def test_cells_that_hold_something_else_have_another_hash(changed: tuple) -> None:
    assert layout_hash(CellFormat(changed, 1)) != layout_hash(FORM)
    assert layout_hash(FORM) == layout_hash(CellFormat(tuple(EXPERT), 1))


def test_cells_of_another_number_of_parts_have_another_hash() -> None:
    halves = (EXPERT[0], EXPERT[2])
    assert layout_hash(CellFormat(halves, 2)) != layout_hash(CellFormat(halves, 1))


@given(st.integers(0, 2), st.integers(0, 2), st.data())
def test_a_changed_byte_is_found_in_its_part_and_its_tensor_of_either_form(
    tensor: int, piece: int, data: st.DataObject
) -> None:
    form = CellFormat(
        laid_out([("up", "uint8", (3, 8)), ("down", "uint8", (6, 8)), ("scale", "<f4", (3,))]), 3
    )
    sharded = data.draw(st.booleans())
    cell = np.random.default_rng(1).integers(0, 256, form.least_bytes, np.uint8)
    before = checksums(cell, form, sharded=sharded)
    offset, size = form.ranges(piece, sharded=sharded)[tensor]
    cell[offset + data.draw(st.integers(0, size - 1))] ^= 1
    after = checksums(cell, form, sharded=sharded)
    assert compare(form.tensors, before, after, 3) == (f"{form.tensors[tensor].name} part {piece}",)
    for other in range(3):
        same = piece_checksums(cell, form, other, sharded=sharded) == before[other::3]
        assert same == (other != piece)


def test_a_group_of_fewer_pieces_has_no_checksums_of_the_others() -> None:
    form = CellFormat(laid_out([("up", "uint8", (3, 8)), ("scale", "<f4", (3,))]), 3)
    cell = np.random.default_rng(1).integers(0, 256, form.least_bytes, np.uint8)
    every = checksums(cell, form, sharded=True)
    assert checksums(cell, form, sharded=True, pieces=2) == (*every[:2], 0, *every[3:5], 0)
