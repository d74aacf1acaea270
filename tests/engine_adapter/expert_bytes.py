"""The bytes that expert memory must hold, cut by hand from the tensors of a checkpoint's file."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from engine_adapter.engine import ExpertMemory
from fleet.placement import EMPTY, Placement

ALIGNMENT = 64
"""bytes at whose multiples the parts of a group begin"""


class ExpertBytes:
    """All experts of a checkpoint of one file, in fp32."""

    def __init__(self, folder: Path) -> None:
        self._tensors = load_file(folder / "model.safetensors")

    def _projections(self, layer: int, expert: int) -> list[NDArray[np.float32]]:
        """gate, up and down, each [I, H]."""
        gate, up, down = (
            self._tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]
            .to(torch.float32)
            .numpy()
            for name in ("gate", "up", "down")
        )
        return [gate, up, down.T]

    def expert(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """A whole expert: uint8 [bytes]."""
        return np.concatenate(self._projections(layer, expert)).reshape(-1).view(np.uint8)

    def part(self, layer: int, expert: int, part: int, parts: int) -> NDArray[np.uint8]:
        """The same rows of gate, up and down: uint8 [bytes]."""
        each = self._projections(layer, expert)
        width = len(each[0]) // parts
        rows = [rows[part * width : (part + 1) * width] for rows in each]
        return np.concatenate(rows).reshape(-1).view(np.uint8)

    def check(self, placement: Placement, rank: int, memory: ExpertMemory, cells: NDArray[np.int32]) -> None:
        """Every cell that a rank serves from holds what the placement says. cells: int32 [layers, slots]."""
        for layer in range(placement.layers):
            if layer in placement.sharded:
                self._check_groups(placement, layer, rank, memory, cells[layer])
            else:
                for slot, expert in enumerate(placement.on_rank(rank)[layer].tolist()):
                    if expert != EMPTY:
                        known = self.expert(layer, expert)
                        found = memory.cell(int(cells[layer, slot]))[: len(known)]
                        assert np.array_equal(found, known), f"rank {rank}: expert {layer}/{expert}"

    def _check_groups(
        self, placement: Placement, layer: int, rank: int, memory: ExpertMemory, cells: NDArray[np.int32]
    ) -> None:
        ranks = placement.ranks
        for expert in range(placement.experts):
            known = self.part(layer, expert, rank, ranks)
            begin = expert % ranks * (-(-len(known) // ALIGNMENT) * ALIGNMENT)
            found = memory.cell(int(cells[expert // ranks]))[begin : begin + len(known)]
            assert np.array_equal(found, known), f"rank {rank}: its part of expert {layer}/{expert}"
