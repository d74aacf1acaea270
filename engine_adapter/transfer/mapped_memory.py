"""Cells in memory of their own: an `ExpertMemory` that needs no engine. Also the way to get memory that other processes of the machine can map.

The memory is of a file without a name (memfd), which goes with the last process that has it open or mapped: nothing is left behind, however one ends.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import CellTensor

TENSOR_ALIGNMENT = 64
CELL_ALIGNMENT = 4096


def laid_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[CellTensor, ...]:
    """Tensors (name, NumPy dtype, shape) one behind another, each at a multiple of TENSOR_ALIGNMENT bytes."""
    placed: list[CellTensor] = []
    offset = 0
    for name, dtype, shape in tensors:
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        placed.append(CellTensor(name, dtype, shape, offset, size))
        offset += -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    return tuple(placed)


def mapped(name: str, size: int) -> tuple[int, NDArray[np.uint8]]:
    """A file without a path and its memory: (descriptor, uint8 [size]), zeros, every page there already. The descriptor is the caller's to close; the memory
    goes when nothing refers to the array any more. Its size is sealed: whoever maps it can rely on it. OSError when there is not so much."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    memory[:: mmap.PAGESIZE] = 0  # pages that were never written cost their first reader or writer ten times the time
    return descriptor, memory


class MappedCells:
    """An `ExpertMemory` of so many cells, each with these tensors, and zeros everywhere."""

    def __init__(self, tensors: tuple[CellTensor, ...], cells: int) -> None:
        if not tensors or cells < 1:
            raise ValueError(f"cells: {cells} of {len(tensors)} tensors: there must be at least one of each")
        self.tensors = tensors
        self.cells = cells
        self.cell_bytes = -(-max(one.offset + one.bytes for one in tensors) // CELL_ALIGNMENT) * CELL_ALIGNMENT
        self.descriptor, self._memory = mapped("roost-experts", cells * self.cell_bytes)

    @property
    def base(self) -> int:
        return int(self._memory.ctypes.data)

    def cell(self, number: int) -> NDArray[np.uint8]:
        """uint8 [cell_bytes]: the memory itself. IndexError when there is no such cell."""
        if not 0 <= number < self.cells:
            raise IndexError(f"cell {number} of {self.cells}")
        return self._memory[number * self.cell_bytes : (number + 1) * self.cell_bytes]

    def close(self) -> None:
        """No process can map it from now on; those that have it keep it, as does every array handed out."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
