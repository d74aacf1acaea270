"""The memory that holds a rank's experts: one allocation, a fixed slot for every expert, and one spare layer block.

An expert slot is 3I rows of H values, contiguous: I gate rows, I up rows, then the down projection stored I-major ([I, H]), so that a
tensor-parallel shard of each of the three is contiguous too. Layer blocks follow one another; the last one, the *hole*, belongs to no
layer: it is staging room for experts on their way in.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.embedded.checkpoint import RUN_DTYPES, Checkpoint, ExpertWeights
from fleet.experts import ModelShape
from fleet.placement import EMPTY, Placement


class Arena:
    """Expert memory of one rank: `layers + 1` blocks of `slots` expert slots in one allocation, zeroed.

    Views are per layer block: offsets shared across the whole arena make grouped matmuls ten times slower.
    """

    def __init__(self, shape: ModelShape, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"arena: a rank needs at least 1 slot per layer, not {slots}")
        self.shape = shape
        self.slots = slots
        self._memory = torch.zeros((shape.layers + 1, slots, 3 * shape.expert_intermediate, shape.hidden), dtype=RUN_DTYPES[shape.dtype])

    @property
    def hole(self) -> torch.Tensor:
        """[slots, 3I, H]: the spare layer block."""
        return self._memory[self.shape.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole allocation."""
        return self._memory.nbytes

    def gate_up(self, layer: int) -> torch.Tensor:
        """[slots, 2I, H], gate rows before up rows: a strided view, no copy."""
        return self._memory[layer, :, : 2 * self.shape.expert_intermediate]

    def down(self, layer: int) -> torch.Tensor:
        """[slots, I, H] (I-major: activations @ down): a strided view, no copy."""
        return self._memory[layer, :, 2 * self.shape.expert_intermediate :]

    def load_expert(self, layer: int, slot: int, weights: ExpertWeights) -> None:
        """Copy an expert, as checkpoints store it (down is [H, I]), into a slot."""
        rows = self._memory[layer, slot]
        width = self.shape.expert_intermediate
        rows[:width].copy_(weights.gate)
        rows[width : 2 * width].copy_(weights.up)
        rows[2 * width :].copy_(weights.down.t())

    def slot_bytes(self, layer: int, slot: int) -> NDArray[np.uint8]:
        """uint8 [bytes of one expert]: a slot's own memory, contiguous; what is written there is what the engine computes with."""
        memory: NDArray[np.uint8] = self._memory[layer, slot].view(torch.uint8).view(-1).numpy()
        return memory


def load_arena(checkpoint: Checkpoint, placement: Placement, rank: int, dtype: str) -> Arena:
    """The arena of a rank, with the experts that the placement gives it; nobody else's are read. CheckpointError as for `Checkpoint.tensor`.

    ValueError when the placement is of another model.
    """
    shape = checkpoint.config.shape(dtype)
    if (placement.layers, placement.experts) != (shape.layers, shape.experts):
        raise ValueError(f"arena: {placement!r} does not fit a model of {shape.layers} layers x {shape.experts} experts")
    arena = Arena(shape, placement.slots_per_rank)
    for layer, experts in enumerate(placement.on_rank(rank).tolist()):
        for slot, expert in enumerate(experts):
            if expert != EMPTY:
                arena.load_expert(layer, slot, checkpoint.expert(layer, expert, RUN_DTYPES[dtype]))
    return arena
