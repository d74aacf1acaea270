"""The memory that holds a rank's experts: equal cells in one mapping, more of them than there are slots.

A cell holds one expert: 3I rows of H values, contiguous (I gate rows, I up rows, then the down projection stored I-major ([I, H]), so that a
tensor-parallel shard of each of the three is contiguous too), then its ballast if there is any. A slot is *in* a cell; a new epoch puts slots
into other cells, and moves no bytes. At first the slots of layer 0 are in the first cells, those of layer 1 behind them, and so on; the cells of
one layer more, the *hole*, are free: room for experts on their way in.

Cells begin at multiples of 64 bytes: matrix products may add up in another order where their operands lie otherwise.
"""

import os
import weakref
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.checkpoint import RUN_DTYPES, Checkpoint, ExpertWeights
from engine_adapter.engine import CellTensor
from engine_adapter.transfer.mapped_memory import mapped
from fleet.experts import ModelShape
from fleet.placement import EMPTY, Placement

_ALIGNED = 64
_PARTS = ("gate", "up", "down")


class Arena:
    """Expert memory of one rank (`engine_adapter.engine.ExpertMemory`): (layers + 1) * slots cells, all zero and all touched."""

    def __init__(self, shape: ModelShape, slots: int, ballast_bytes: int = 0) -> None:
        """slots: per layer. ballast_bytes: further bytes of every expert, that nothing computes with. ValueError for impossible numbers; OSError when
        the system has no such memory."""
        if slots < 1 or ballast_bytes < 0:
            raise ValueError(f"arena: a rank needs at least 1 slot per layer, not {slots}, and no less than 0 bytes of ballast, not {ballast_bytes}")
        self.shape = shape
        self.slots = slots
        self.ballast_bytes = ballast_bytes
        self.cells = (shape.layers + 1) * slots
        self.cell_bytes = -(-(shape.expert_bytes + ballast_bytes) // _ALIGNED) * _ALIGNED
        self.descriptor, self._memory = _shared_memory(self.nbytes)
        if self.descriptor >= 0:
            weakref.finalize(self, os.close, self.descriptor)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole mapping."""
        return self.cells * self.cell_bytes

    @property
    def base(self) -> int:
        """Address of cell 0."""
        return int(self._memory.ctypes.data)

    @cached_property
    def tensors(self) -> tuple[CellTensor, ...]:
        """gate, up and down, each [I, H], and the ballast where there is any."""
        rows = (self.shape.expert_intermediate, self.shape.hidden)
        each = self.shape.expert_bytes // len(_PARTS)
        weights = tuple(CellTensor(name, self.shape.dtype, rows, at * each, each) for at, name in enumerate(_PARTS))
        if not self.ballast_bytes:
            return weights
        return (*weights, CellTensor("ballast", "uint8", (self.ballast_bytes,), self.shape.expert_bytes, self.ballast_bytes))

    def first_cells(self) -> NDArray[np.int32]:
        """int32 [layers, slots]: where slots are at first."""
        return np.arange(self.shape.layers * self.slots, dtype=np.int32).reshape(self.shape.layers, self.slots)

    def cell(self, number: int) -> NDArray[np.uint8]:
        """uint8 [cell_bytes]: the memory itself; what is written there is what the engine computes with. IndexError when there is no such cell."""
        if not 0 <= number < self.cells:
            raise IndexError(f"arena: cell {number}; there are cells 0 to {self.cells - 1}")
        return self._memory[number * self.cell_bytes : (number + 1) * self.cell_bytes]

    def gate_up(self, cell: int) -> torch.Tensor:
        """[2I, H], gate rows before up rows: a view, no copy."""
        return self._weights(cell)[: 2 * self.shape.expert_intermediate]

    def down(self, cell: int) -> torch.Tensor:
        """[I, H] (I-major: activations @ down): a view, no copy."""
        return self._weights(cell)[2 * self.shape.expert_intermediate :]

    def load_expert(self, cell: int, weights: ExpertWeights) -> None:
        """Copy an expert, as checkpoints store it (down is [H, I]), into a cell."""
        rows, width = self._weights(cell), self.shape.expert_intermediate
        rows[:width].copy_(weights.gate)
        rows[width : 2 * width].copy_(weights.up)
        rows[2 * width :].copy_(weights.down.t())

    def load_ballast(self, cell: int, layer: int, expert: int) -> None:
        """Fill an expert's ballast: bytes that differ from expert to expert, and are the same on every rank."""
        begin = self.shape.expert_bytes
        ballast = np.random.default_rng((layer, expert)).bytes(self.ballast_bytes)
        self.cell(cell)[begin : begin + self.ballast_bytes] = np.frombuffer(ballast, np.uint8)

    def _weights(self, cell: int) -> torch.Tensor:
        """[3I, H]"""
        rows = torch.from_numpy(self.cell(cell)[: self.shape.expert_bytes]).view(RUN_DTYPES[self.shape.dtype])
        return rows.view(3 * self.shape.expert_intermediate, self.shape.hidden)


def _shared_memory(size: int) -> tuple[int, NDArray[np.uint8]]:
    """A memory file and uint8 [size] in the mapping of it, zeroed and touched; -1 and plain memory where the system has no such files."""
    if hasattr(os, "memfd_create"):
        return mapped("roost-experts", size)
    memory = torch.zeros(size, dtype=torch.uint8).numpy()  # torch's memory is aligned, NumPy's is not
    memory[:] = 0
    return -1, memory


def load_arena(checkpoint: Checkpoint, placement: Placement, rank: int, dtype: str, ballast_bytes: int = 0) -> Arena:
    """The arena of a rank, with the experts that the placement gives it; nobody else's are read. CheckpointError as for `Checkpoint.tensor`.

    ValueError when the placement is of another model.
    """
    shape = checkpoint.config.shape(dtype)
    if (placement.layers, placement.experts) != (shape.layers, shape.experts):
        raise ValueError(f"arena: {placement!r} does not fit a model of {shape.layers} layers x {shape.experts} experts")
    arena = Arena(shape, placement.slots_per_rank, ballast_bytes)
    for cell, layer, expert in _held(placement, rank):
        arena.load_expert(cell, checkpoint.expert(layer, expert, RUN_DTYPES[dtype]))
        arena.load_ballast(cell, layer, expert)
    return arena


def _held(placement: Placement, rank: int) -> Iterator[tuple[int, int, int]]:
    """(cell, layer, expert) of what a rank holds at first."""
    mine = placement.on_rank(rank)
    for layer, slot in np.argwhere(mine != EMPTY).tolist():
        yield layer * placement.slots_per_rank + slot, layer, int(mine[layer, slot])
