"""Experts whose every byte is known: what ranks of the harness load, and what their memory is judged by."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import CellTensor
from engine_adapter.transfer.mapped_memory import laid_out
from fleet.experts import ModelShape
from fleet.placement import Placement

RANKS = 3
SHAPE = ModelShape(
    layers=2,
    experts=6,
    top_k=2,
    hidden=256,
    expert_intermediate=96,
    dtype="float8_e4m3fn",
    heads=6,
    kv_heads=3,
)
"""whose experts and heads RANKS ranks can cut"""
SLOTS = 4
"""per rank and layer: two more than it takes, for replicas; the hole is of as many cells"""
CELLS = (SHAPE.layers + 1) * SLOTS
TENSORS: tuple[CellTensor, ...] = laid_out(
    (("gate_up", "uint8", (2, 96, 256)), ("down", "uint8", (96, 256)), ("scales", "float32", (3, 93)))
)
EXPERT_BYTES = sum(tensor.bytes for tensor in TENSORS)
PART_BYTES = EXPERT_BYTES // RANKS
PART_ROOM = -(-PART_BYTES // 64) * 64
"""bytes from one part of an expert to the next in a cell of a sharded layer"""
POISON = 0xA5


@cache
def content(layer: int, expert: int) -> NDArray[np.uint8]:
    """uint8 [bytes of a cell that are used]: an expert's tensors as they lie in a cell."""
    size = max(one.offset + one.bytes for one in TENSORS)
    return np.frombuffer(np.random.default_rng((layer, expert)).bytes(size), np.uint8)


def lies_there(cell: NDArray[np.uint8], layer: int, expert: int) -> bool:
    """Whether a cell holds an expert to the last bit."""
    known = content(layer, expert)
    return all(
        np.array_equal(cell[one.offset : one.offset + one.bytes], known[one.offset : one.offset + one.bytes])
        for one in TENSORS
    )


@cache
def part(layer: int, expert: int, rank: int) -> NDArray[np.uint8]:
    """uint8 [PART_BYTES]: what a rank has of an expert of a sharded layer. The rank's share of each tensor, of
    RANKS equal ones, and the shares one after another."""
    known = content(layer, expert)
    shares = [known[one.offset : one.offset + one.bytes].reshape(RANKS, -1)[rank] for one in TENSORS]
    return np.concatenate(shares)


def place_of_part(expert: int) -> tuple[int, int]:
    """Which of its layer's slots maps to the cell of a rank's part of an expert, and the byte of that cell at
    which it begins. Parts of RANKS experts share a cell."""
    return expert // RANKS, expert % RANKS * PART_ROOM


def part_lies_there(cell: NDArray[np.uint8], layer: int, expert: int, rank: int) -> bool:
    """Whether the cell of an expert's group holds the rank's part of it to the last bit."""
    _, at = place_of_part(expert)
    return np.array_equal(cell[at : at + PART_BYTES], part(layer, expert, rank))


@contextmanager
def memory_of(pid: int, descriptor: int, cell_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """uint8 [cells, cell_bytes]: the memory of another process itself, to be read and spoilt."""
    opened = os.open(Path(f"/proc/{pid}/fd/{descriptor}"), os.O_RDWR)
    try:
        mapping = mmap.mmap(opened, CELLS * cell_bytes)
    finally:
        os.close(opened)
    yield np.frombuffer(mapping, np.uint8).reshape(CELLS, cell_bytes)
    # the mapping goes with the last array that refers to it


def first_placement() -> Placement:
    """Two experts of each layer on every rank, and of two of the experts a replica; two slots of a rank are
    empty or one."""
    rows = []
    for layer in range(SHAPE.layers):
        row = np.full((RANKS, SLOTS), -1, np.int16)
        for rank in range(RANKS):
            row[rank, :2] = [2 * rank, 2 * rank + 1]
        row[(layer + 1) % RANKS, 2] = 2 * layer  # its first holder is rank `layer`
        rows.append(row.reshape(-1))
    return Placement(np.stack(rows), experts=SHAPE.experts, ranks=RANKS)
