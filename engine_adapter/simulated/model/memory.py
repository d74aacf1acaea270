"""Expert memory of a simulated rank: real but small cells, whose words identify the expert in them. Pure
NumPy.

So moves between ranks are real copies with checksums, and a misplaced expert is detected before it is served.
Only the duration for the expert's real size is simulated (`link_model`).
"""

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import CellTensor
from fleet.placement import EMPTY, Placement

CELL_BYTES = 64
TENSORS = (CellTensor("weights", "uint64", (6,), 0, 48), CellTensor("scales", "uint64", (2,), 48, 16))
_WORDS = CELL_BYTES // 8
_SEED = np.uint64(0x9E3779B97F4A7C15)


class SimulatedCells:
    """Cells of one rank (`engine_adapter.engine.ExpertMemory`): those of its slots, layer by layer, and as
    many extra cells as a layer has slots."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self.tensors = TENSORS
        self.cell_bytes = CELL_BYTES
        self.descriptor = -1
        self.cells = (placement.layers + 1) * placement.slots_per_rank
        self._words = np.zeros((self.cells, _WORDS), np.uint64)
        self._bytes: NDArray[np.uint8] = self._words.view(np.uint8)
        self._experts = placement.experts
        held = placement.on_rank(rank)
        self._words[: held.size] = self._expected(held)

    @property
    def base(self) -> int:
        return int(self._words.ctypes.data)

    def cell(self, number: int) -> NDArray[np.uint8]:
        if not 0 <= number < self.cells:
            raise IndexError(f"cell {number} of {self.cells}")
        cell: NDArray[np.uint8] = self._bytes[number]
        return cell

    def misplaced(self, held: NDArray[np.int16], cells: NDArray[np.int32]) -> tuple[int, int] | None:
        """Return (layer, slot) of the first slot whose cell does not hold its expert. None: all do. held,
        cells: [layers, slots_per_rank]. EMPTY slots may hold anything."""
        wrong = (self._words[cells.ravel()] != self._expected(held)).any(axis=1) & (held.ravel() != EMPTY)
        return None if not wrong.any() else divmod(int(wrong.argmax()), held.shape[1])

    def _expected(self, held: NDArray[np.int16]) -> NDArray[np.uint64]:
        """Expected content of each slot's cell, uint64 [layers * slots, words]. Zeros for empty slots."""
        layers = np.arange(len(held), dtype=np.uint64)[:, None]
        name = (layers * np.uint64(self._experts) + held.clip(0).astype(np.uint64) + np.uint64(1)).ravel()
        words = (name[:, None] * _SEED) ^ (np.arange(1, _WORDS + 1, dtype=np.uint64) * _SEED >> np.uint64(7))
        return np.where(held.ravel()[:, None] != EMPTY, words, np.uint64(0))
