"""Arena: the expert memory of a rank, cells of equal size in one mapping. There are more cells than slots.

A cell holds one expert: 3I rows of H values, contiguous. These are I gate rows, I up rows, and the down
projection stored I-major ([I, H]), so that a part of each for one of several ranks is contiguous too. The
ballast follows, if there is any. A cell is large enough for a group of such parts too
(`engine_adapter.transfer.parts`). Each slot maps to a cell. A new epoch maps slots to other cells and moves
no bytes. Initially the slots of layer 0 map to the first cells, those of layer 1 to the next, and so on. The
cells of one or more extra layers, the *hole*, are free for what comes in.

Cells begin at multiples of 64 bytes, because matrix products may sum in another order when the alignment of
their operands differs.
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
from engine_adapter.transfer.parts import CellFormat
from fleet.experts import ModelShape
from fleet.layout import ALIGNED, sharding_refusal
from fleet.placement import EMPTY, Placement

_PARTS = ("gate", "up", "down")


class Arena:
    """Expert memory of one rank (`engine_adapter.engine.ExpertMemory`): (layers + spare_layers) * slots
    cells, zeroed, with every page allocated."""

    def __init__(
        self,
        shape: ModelShape,
        slots: int,
        ballast_bytes: int = 0,
        *,
        ranks: int = 1,
        spare_layers: int = 1,
    ) -> None:
        """slots: slots per layer. ballast_bytes: padding bytes of every expert, never computed with. ranks:
        of the engine; an expert has as many parts, if it can be cut. spare_layers: layers whose cells are
        free. ValueError for invalid numbers. OSError when the system has too little memory."""
        if slots < 1 or ballast_bytes < 0 or spare_layers < 1:
            raise ValueError(
                f"arena: a rank needs at least 1 slot per layer, not {slots}, at least 0 bytes of ballast,"
                f" not {ballast_bytes}, and at least 1 spare layer, not {spare_layers}"
            )
        self.shape = shape
        self.slots = slots
        self.ballast_bytes = ballast_bytes
        self.cells = (shape.layers + spare_layers) * slots
        self.parts = 1 if sharding_refusal(shape, ranks) or ballast_bytes % ranks else ranks
        # Rounded up, so that the weights of every cell begin aligned wherever the expert moves.
        self.cell_bytes = -(-CellFormat(self.tensors, self.parts).least_bytes // ALIGNED) * ALIGNED
        self.descriptor, self._memory = _shared_memory(self.nbytes)
        # Readers of other ranks open the file by this descriptor's number, so it stays open with the arena.
        if self.descriptor >= 0:
            weakref.finalize(self, os.close, self.descriptor)

    @property
    def nbytes(self) -> int:
        """Size of the whole mapping in bytes."""
        return self.cells * self.cell_bytes

    @property
    def base(self) -> int:
        """Address of cell 0."""
        return int(self._memory.ctypes.data)

    @cached_property
    def tensors(self) -> tuple[CellTensor, ...]:
        """Tensors of a cell: gate, up and down, each [I, H], and the ballast if there is any."""
        rows = (self.shape.expert_intermediate, self.shape.hidden)
        each = self.shape.expert_bytes // len(_PARTS)
        weights = tuple(
            CellTensor(name, self.shape.dtype, rows, at * each, each) for at, name in enumerate(_PARTS)
        )
        if not self.ballast_bytes:
            return weights
        return (
            *weights,
            CellTensor(
                "ballast", "uint8", (self.ballast_bytes,), self.shape.expert_bytes, self.ballast_bytes
            ),
        )

    def first_cells(self) -> NDArray[np.int32]:
        """int32 [layers, slots]: the initial cell of each slot."""
        return np.arange(self.shape.layers * self.slots, dtype=np.int32).reshape(
            self.shape.layers, self.slots
        )

    def cell(self, number: int) -> NDArray[np.uint8]:
        """Return a view of the cell's memory, uint8 [cell_bytes]. The engine computes with this memory.
        IndexError when there is no such cell."""
        if not 0 <= number < self.cells:
            raise IndexError(f"arena: cell {number}; there are cells 0 to {self.cells - 1}")
        return self._memory[number * self.cell_bytes : (number + 1) * self.cell_bytes]

    def gate_up(self, cell: int) -> torch.Tensor:
        """[2I, H], gate rows before up rows. A view, not a copy."""
        return self._weights(cell)[: 2 * self.shape.expert_intermediate]

    def down(self, cell: int) -> torch.Tensor:
        """[I, H] (I-major: activations @ down). A view, not a copy."""
        return self._weights(cell)[2 * self.shape.expert_intermediate :]

    def load_expert(self, cell: int, weights: ExpertWeights) -> None:
        """Copy an expert in checkpoint layout (down is [H, I]) into a cell."""
        rows, width = self._weights(cell), self.shape.expert_intermediate
        # The down projection is transposed once here, so that a step multiplies without a transposition and a
        # shard over I is one block.
        rows[:width].copy_(weights.gate)
        rows[width : 2 * width].copy_(weights.up)
        rows[2 * width :].copy_(weights.down.t())

    def load_ballast(self, cell: int, layer: int, expert: int) -> None:
        """Fill an expert's ballast with bytes that differ between experts and are the same on every rank."""
        begin = self.shape.expert_bytes
        ballast = np.random.default_rng((layer, expert)).bytes(self.ballast_bytes)
        self.cell(cell)[begin : begin + self.ballast_bytes] = np.frombuffer(ballast, np.uint8)

    def _weights(self, cell: int) -> torch.Tensor:
        """Weights of a cell, [3I, H]."""
        rows = torch.from_numpy(self.cell(cell)[: self.shape.expert_bytes]).view(RUN_DTYPES[self.shape.dtype])
        return rows.view(3 * self.shape.expert_intermediate, self.shape.hidden)


def _shared_memory(size: int) -> tuple[int, NDArray[np.uint8]]:
    """Create a memory file and map it as uint8 [size], zeroed, with every page allocated. Return descriptor
    -1 and plain memory where the system lacks memfd."""
    # A file can be mapped by the other ranks of the machine. Without one, NIXL still reads plain memory.
    if hasattr(os, "memfd_create"):
        return mapped("roost-experts", size)
    memory = torch.zeros(size, dtype=torch.uint8).numpy()  # Torch aligns its memory, NumPy does not.
    memory[:] = 0
    return -1, memory


def load_arena(
    checkpoint: Checkpoint,
    placement: Placement,
    rank: int,
    dtype: str,
    ballast_bytes: int = 0,
    spare_layers: int = 1,
) -> Arena:
    """Load the arena of a rank with the experts of its slots. Other experts are not read. CheckpointError as
    for `Checkpoint.tensor`.

    ValueError when the placement is of another model.
    """
    shape = checkpoint.config.shape(dtype)
    if (placement.layers, placement.experts) != (shape.layers, shape.experts):
        raise ValueError(
            f"arena: {placement!r} does not fit a model of {shape.layers} layers x {shape.experts} experts"
        )
    arena = Arena(
        shape, placement.slots_per_rank, ballast_bytes, ranks=placement.ranks, spare_layers=spare_layers
    )
    for cell, layer, expert in _held(placement, rank):
        arena.load_expert(cell, checkpoint.expert(layer, expert, RUN_DTYPES[dtype]))
        arena.load_ballast(cell, layer, expert)
    return arena


def _held(placement: Placement, rank: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the (cell, layer, expert) triples that a rank holds initially."""
    mine = placement.on_rank(rank)
    for layer, slot in np.argwhere(mine != EMPTY).tolist():
        yield layer * placement.slots_per_rank + slot, layer, int(mine[layer, slot])
