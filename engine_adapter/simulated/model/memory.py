"""Expert memory of a simulated rank: real but small cells, whose words identify the part of an expert in
them. Pure NumPy.

So moves between ranks are real copies with checksums, and a misplaced expert is detected before it is served.
Only the duration for the expert's real size is simulated (`link_model`).
"""

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import CellTensor
from fleet.arrays import IntArray
from fleet.placement import EMPTY, Placement
from fleet.sharding import contents

_WEIGHTS, _SCALES = 6, 2
"""Words of a part. A part fills 64 bytes, so parts lie in a sharded layer without gaps."""
_WORDS = _WEIGHTS + _SCALES
_SEED = np.uint64(0x9E3779B97F4A7C15)


class SimulatedCells:
    """Cells of one rank (`engine_adapter.engine.ExpertMemory`): those of its slots, layer by layer, and as
    many more as spare_layers layers have slots. parts: 1 or the number of ranks."""

    def __init__(self, placement: Placement, rank: int, parts: int = 1, spare_layers: int = 1) -> None:
        self.parts = parts
        self.tensors = (
            CellTensor("weights", "uint64", (parts, _WEIGHTS), 0, 8 * _WEIGHTS * parts),
            CellTensor("scales", "uint64", (parts, _SCALES), 8 * _WEIGHTS * parts, 8 * _SCALES * parts),
        )
        self.cell_bytes = 8 * _WORDS * parts
        self.descriptor = -1
        self.cells = (placement.layers + spare_layers) * placement.slots_per_rank
        self._rank = rank
        self._words = np.zeros((self.cells, parts * _WORDS), np.uint64)
        self._bytes: NDArray[np.uint8] = self._words.view(np.uint8)
        expected = self._expected(placement)
        self._words[: len(expected)] = expected

    @property
    def base(self) -> int:
        return int(self._words.ctypes.data)

    def cell(self, number: int) -> NDArray[np.uint8]:
        if not 0 <= number < self.cells:
            raise IndexError(f"cell {number} of {self.cells}")
        cell: NDArray[np.uint8] = self._bytes[number]
        return cell

    def misplaced(self, placement: Placement, cells: NDArray[np.int32]) -> tuple[int, int] | None:
        """Return (layer, slot) of the first slot whose cell does not hold its expert, or its group of a
        sharded layer. None: all do. cells: [layers, slots_per_rank]. Empty slots may hold anything, as may
        the rest of a group of fewer experts."""
        expected = self._expected(placement)
        wrong = ((self._words[cells.ravel()] != expected) & (expected != 0)).any(axis=1)
        return None if not wrong.any() else divmod(int(wrong.argmax()), placement.slots_per_rank)

    def _expected(self, placement: Placement) -> NDArray[np.uint64]:
        """Return the content of each slot's cell, uint64 [layers * slots, words]. 0: anything."""
        held = contents(placement, self._rank)
        pieces = np.arange(self.parts)
        is_sharded = np.zeros((placement.layers, 1, 1), bool)
        if self.parts > 1:
            is_sharded[list(placement.sharded)] = True
        number = held[:, :, None].astype(np.int64)
        # A whole cell holds all parts of one expert; a group's cell holds this rank's part of several.
        expert = np.where(is_sharded, number * self.parts + pieces, number)
        part = np.where(is_sharded, self._rank, pieces)
        words = self._words_of(np.arange(placement.layers)[:, None, None], expert, part, placement.experts)
        exists = (number != EMPTY) & (expert < placement.experts)
        words = np.where(exists[..., None], words, np.uint64(0)).reshape(-1, self.parts, _WORDS)
        if self.parts == 1:
            return words.reshape(len(words), -1)
        whole = np.concatenate(
            [words[:, :, :_WEIGHTS].reshape(len(words), -1), words[:, :, _WEIGHTS:].reshape(len(words), -1)],
            axis=1,
        )
        grouped = np.broadcast_to(is_sharded[:, :, 0], held.shape).reshape(-1, 1)
        return np.where(grouped, words.reshape(len(words), -1), whole)

    def _words_of(
        self, layer: IntArray, expert: IntArray, part: IntArray, experts: int
    ) -> NDArray[np.uint64]:
        """Return words that identify a part, none of them 0: uint64 [..., words]. experts: of a layer."""
        name = ((layer * experts + expert) * self.parts + part + 1).astype(np.uint64)
        return name[..., None] * _SEED ^ np.arange(1, _WORDS + 1, dtype=np.uint64) * _SEED >> np.uint64(7)
