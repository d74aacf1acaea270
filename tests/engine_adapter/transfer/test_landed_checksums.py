"""Checksums that are computed while bytes land are those of the landed cells."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.transfer.checksums import checksums, piece_checksums
from engine_adapter.transfer.landed_checksums import LandedChecksums, ReadPart
from engine_adapter.transfer.mapped_memory import MappedCells, laid_out
from engine_adapter.transfer.parts import CellFormat
from fleet.sharding import ALL_PARTS

TENSORS = laid_out([("up", "uint8", (3, 50)), ("down", "uint8", (6, 8)), ("scale", "<f4", (3,))])


def filled() -> MappedCells:
    memory = MappedCells(TENSORS, 4, parts=3)
    for cell in range(4):
        memory.cell(cell)[:] = np.random.default_rng(cell).integers(0, 256, memory.cell_bytes, np.uint8)
    return memory


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), unique_by=lambda one: one[:2]),
    st.lists(st.integers(0, 3), unique=True),
    st.lists(st.integers(0, 2000), max_size=8),
)
def test_whole_experts_and_pieces_of_either_form_have_their_checksums(
    pieces: list[tuple[int, int, bool]], whole: list[int], steps: list[int]
) -> None:
    with closing(filled()) as memory:
        form = CellFormat.of(memory)
        parts = [ReadPart(*one) for one in pieces] + [
            ReadPart(cell, ALL_PARTS, sharded=False) for cell in whole
        ]
        found = LandedChecksums(memory, form, parts)
        read = [
            pull
            for part in parts
            for pull in form.pulls(0, min(part.piece, 2), part.cell, part.piece, sharded=part.sharded)
        ]
        assert found.bytes == sum(pull.bytes for pull in read)
        for step in steps:
            found.advance(min(step, found.bytes))
        found.advance(found.bytes)
        for cell, piece, sharded in parts:
            expected = (
                checksums(memory.cell(cell), form)
                if piece == ALL_PARTS
                else piece_checksums(memory.cell(cell), form, piece, sharded=sharded)
            )
            assert found.of(cell, piece) == expected


def test_bytes_that_have_not_landed_are_not_hashed_before_they_have() -> None:
    with closing(filled()) as memory:
        form = CellFormat.of(memory)
        found = LandedChecksums(memory, form, [ReadPart(cell, ALL_PARTS, sharded=False) for cell in (0, 1)])
        arriving = memory.cell(1)[100:].copy()
        memory.cell(1)[100:] = 0
        found.advance(form.whole_bytes + 100)
        assert found.of(0, ALL_PARTS) == checksums(memory.cell(0), form)
        assert found.of(1, ALL_PARTS) is None
        memory.cell(1)[100:] = arriving
        found.advance(found.bytes)
        assert found.of(1, ALL_PARTS) == checksums(memory.cell(1), form)
        assert found.of(2, ALL_PARTS) is None, "it is of another read"


def test_reports_that_overtake_one_another_do_no_harm() -> None:
    with closing(filled()) as memory, ThreadPoolExecutor(4) as threads:
        form = CellFormat.of(memory)
        for _ in range(20):
            found = LandedChecksums(
                memory, form, [ReadPart(cell, ALL_PARTS, sharded=False) for cell in range(4)]
            )
            list(threads.map(found.advance, range(found.bytes, 0, -37)))
            assert all(found.of(cell, ALL_PARTS) == checksums(memory.cell(cell), form) for cell in range(4))
