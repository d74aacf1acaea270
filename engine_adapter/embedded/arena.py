"""Arena: the expert memory of a rank, cells of equal size in one mapping. There are more cells than slots.

In a whole layer a cell holds one expert: 3I rows of H values, contiguous. These are I gate rows, I up rows,
and the down projection stored I-major ([I, H]), so that a part of each for one of P ranks is contiguous too.
The ballast follows, if there is any. In a sharded layer a cell holds a group: this rank's parts of P experts,
each of 3I/P rows in the same order (`fleet.sharding`, `engine_adapter.transfer.parts`). Each slot maps to a
cell. A new epoch maps slots to other cells and moves no bytes. Initially the slots of layer 0 map to the
first cells, those of layer 1 to the next, and so on. The cells of one or more extra layers, the *hole*, are
free for what comes in.

Cells, and parts in groups, begin at multiples of 64 bytes, because matrix products may sum in another order
when the alignment of their operands differs.
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
from fleet.sharding import contents

_PROJECTIONS = ("gate", "up", "down")
_BALLAST = "ballast"
_SMALL_NUMBERS = np.uint8(0x3F)
"""Mask of bytes of which no float32 or bfloat16 is 2 or more."""


def unshardable(shape: ModelShape, ranks: int, ballast_bytes: int = 0) -> str:
    """Return why the experts of a layer cannot be cut into parts for these ranks; empty: they can.

    ballast_bytes: as in `Arena`.
    """
    if refusal := sharding_refusal(shape, ranks):
        return refusal
    if ballast_bytes % ranks:
        return (
            f"the {ballast_bytes} bytes of ballast of an expert (ballast_bytes) do not divide into parts for"
            f" {ranks} ranks"
        )
    return ""


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
        self.parts = 1 if unshardable(shape, ranks, ballast_bytes) else ranks
        self.format = CellFormat(self.tensors, self.parts)
        # Rounded up, so that the weights of every cell begin aligned wherever the expert moves.
        self.cell_bytes = -(-self.format.least_bytes // ALIGNED) * ALIGNED
        self.descriptor, self._memory = map_or_allocate("roost-experts", self.nbytes)
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
        each = self.shape.expert_bytes // len(_PROJECTIONS)
        weights = tuple(
            CellTensor(name, self.shape.dtype, rows, at * each, each) for at, name in enumerate(_PROJECTIONS)
        )
        if not self.ballast_bytes:
            return weights
        return (
            *weights,
            CellTensor(_BALLAST, "uint8", (self.ballast_bytes,), self.shape.expert_bytes, self.ballast_bytes),
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
        """[2I, H] of a whole layer's cell, gate rows before up rows. A view, not a copy."""
        return self._rows(cell)[: 2 * self.shape.expert_intermediate]

    def down(self, cell: int) -> torch.Tensor:
        """[I, H] of a whole layer's cell (I-major: activations @ down). A view, not a copy."""
        return self._rows(cell)[2 * self.shape.expert_intermediate :]

    def part_gate_up(self, cell: int, piece: int) -> torch.Tensor:
        """[2I/P, H] of a sharded layer's cell, gate rows before up rows: of the group's expert number
        `piece`. A view, not a copy."""
        return self._rows(cell, piece)[: 2 * self._part_width]

    def part_down(self, cell: int, piece: int) -> torch.Tensor:
        """[I/P, H] of a sharded layer's cell (I-major): of the group's expert number `piece`. A view, not a
        copy."""
        return self._rows(cell, piece)[2 * self._part_width :]

    def load_expert(self, cell: int, weights: ExpertWeights) -> None:
        """Copy an expert in checkpoint layout (down is [H, I]) into a whole layer's cell."""
        self._load(self._rows(cell), weights, slice(None))

    def load_part(self, cell: int, piece: int, weights: ExpertWeights, part: int) -> None:
        """Copy a part of an expert in checkpoint layout into a sharded layer's cell, as the group's expert
        number `piece`. part: 0 to P - 1."""
        width = self._part_width
        self._load(self._rows(cell, piece), weights, slice(part * width, (part + 1) * width))

    def _load(self, rows: torch.Tensor, weights: ExpertWeights, taken: slice) -> None:
        """taken: which of the I intermediate rows."""
        # The down projection is transposed once here, so that a step multiplies without a transposition and a
        # part of it is one block.
        gate, up, down = rows.chunk(len(_PROJECTIONS))
        gate.copy_(weights.gate[taken])
        up.copy_(weights.up[taken])
        down.copy_(weights.down.t()[taken])

    def load_ballast(self, cell: int, layer: int, expert: int) -> None:
        """Fill an expert's ballast in a whole layer's cell with bytes that differ between experts and are the
        same on every rank."""
        begin = self.shape.expert_bytes
        self.cell(cell)[begin : begin + self.ballast_bytes] = self._ballast(layer, expert)

    def load_part_ballast(self, cell: int, piece: int, layer: int, expert: int, part: int) -> None:
        """Fill the ballast of a part in a sharded layer's cell with its share of these bytes."""
        if self.ballast_bytes:
            begin, size = self.format.ranges(piece, sharded=True)[-1]
            self.cell(cell)[begin : begin + size] = self._ballast(layer, expert)[part * size :][:size]

    def _ballast(self, layer: int, expert: int) -> NDArray[np.uint8]:
        drawn = np.random.default_rng((layer, expert)).bytes(self.ballast_bytes)
        # Small numbers if read as weights, in whichever dtype: on scratch, a layer is computed in a form in
        # which it does not lie in memory.
        return np.frombuffer(drawn, np.uint8) & _SMALL_NUMBERS

    @property
    def _part_width(self) -> int:
        """Intermediate rows of a part."""
        return self.shape.expert_intermediate // self.parts

    def _rows(self, cell: int, piece: int | None = None) -> torch.Tensor:
        """Weights of a cell, [3I, H]; of a piece of a sharded layer's cell, [3I/P, H]."""
        begin = 0 if piece is None else self.format.ranges(piece, sharded=True)[0].offset
        size = self.shape.expert_bytes // (1 if piece is None else self.parts)
        values = torch.from_numpy(self.cell(cell)[begin : begin + size]).view(RUN_DTYPES[self.shape.dtype])
        return values.view(-1, self.shape.hidden)


def map_or_allocate(name: str, size: int) -> tuple[int, NDArray[np.uint8]]:
    """Create a memory file and map it as uint8 [size], zeroed, with every page allocated. Return descriptor
    -1 and plain memory where the system lacks memfd. OSError when the system has too little memory."""
    # A file can be mapped by the other ranks of the machine. Without one, NIXL still reads plain memory.
    if hasattr(os, "memfd_create"):
        return mapped(name, size)
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
    """Load the arena of a rank with the experts of its slots, and with its parts of those of sharded layers.
    Other experts are not read. CheckpointError as for `Checkpoint.tensor`.

    ValueError when the placement is of another model, or has sharded layers whose experts cannot be cut.
    """
    shape = checkpoint.config.shape(dtype)
    if (placement.layers, placement.experts) != (shape.layers, shape.experts):
        raise ValueError(
            f"arena: {placement!r} does not fit a model of {shape.layers} layers x {shape.experts} experts"
        )
    if placement.sharded and (refusal := unshardable(shape, placement.ranks, ballast_bytes)):
        raise ValueError(f"arena: {placement!r} has sharded layers, but {refusal}")
    arena = Arena(
        shape, placement.slots_per_rank, ballast_bytes, ranks=placement.ranks, spare_layers=spare_layers
    )
    for (layer, slot), number in np.ndenumerate(arena.first_cells()):
        cell = int(number)
        for expert, piece in _experts_in(placement, rank, layer, slot):
            weights = checkpoint.expert(layer, expert, RUN_DTYPES[dtype])
            if piece is None:
                arena.load_expert(cell, weights)
                arena.load_ballast(cell, layer, expert)
            else:
                arena.load_part(cell, piece, weights, rank)
                arena.load_part_ballast(cell, piece, layer, expert, rank)
    return arena


def _experts_in(placement: Placement, rank: int, layer: int, slot: int) -> Iterator[tuple[int, int | None]]:
    """Iterate over (expert, its number in the group) of a rank's slot. In a whole layer there is at most one
    expert, and no group."""
    held = int(contents(placement, rank)[layer, slot])
    if held == EMPTY:
        return
    if layer not in placement.sharded:
        yield held, None
        return
    for piece in range(placement.ranks):
        if (expert := held * placement.ranks + piece) < placement.experts:
            yield expert, piece
