"""Checksums of experts, and the hash of what a cell holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.transfer.checksums import checksums, compare, layout_hash
from engine_adapter.transfer.mapped_memory import laid_out

EXPERT = laid_out(
    [
        ("gate_up", "float32", (6, 8)),
        ("down", "float32", (3, 8)),
        ("gate_up.scale", "float32", (2, 1)),
        ("down.scale", "float32", (1, 1)),
    ]
)
CELL_BYTES = max(one.offset + one.bytes for one in EXPERT)


def a_cell() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, CELL_BYTES, np.uint8)


@given(st.data())
def test_any_changed_byte_is_found_and_its_tensor_named(data: st.DataObject) -> None:
    cell = a_cell()
    expected = checksums(cell, EXPERT)
    hit = data.draw(st.sampled_from(EXPERT))
    cell[hit.offset + data.draw(st.integers(0, hit.bytes - 1))] ^= data.draw(st.integers(1, 255))
    assert compare(EXPERT, expected, checksums(cell, EXPERT)) == (hit.name,)


def test_bytes_between_tensors_do_not_count() -> None:
    cell, gap = a_cell(), EXPERT[2].offset + EXPERT[2].bytes
    expected = checksums(cell, EXPERT)
    cell[gap] ^= 1
    assert gap < EXPERT[3].offset
    assert compare(EXPERT, expected, checksums(cell, EXPERT)) == ()


def test_swapped_halves_are_found() -> None:
    cell = a_cell()
    expected = checksums(cell, EXPERT)
    gate_up = cell[: EXPERT[0].bytes]
    gate_up[:] = np.roll(gate_up, EXPERT[0].bytes // 2)
    assert compare(EXPERT, expected, checksums(cell, EXPERT)) == ("gate_up",)


def test_a_missing_checksum_is_a_difference() -> None:
    found = checksums(a_cell(), EXPERT)
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
    assert layout_hash(changed) != layout_hash(EXPERT)
    assert layout_hash(EXPERT) == layout_hash(tuple(EXPERT))
