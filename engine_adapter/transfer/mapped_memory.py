"""Cells in a mapping of their own: an `ExpertMemory` without an engine, and memory that other processes of
the machine can map.

The memory belongs to an anonymous file (memfd). The kernel frees it with the last process that has it open or
mapped, so no crash leaves anything behind.
"""

import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import CellTensor
from engine_adapter.transfer.parts import CellFormat

TENSOR_ALIGNMENT = 64
CELL_ALIGNMENT = 4096


def laid_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[CellTensor, ...]:
    """Lay out tensors (name, NumPy dtype, shape) one after another, each at a multiple of TENSOR_ALIGNMENT
    bytes."""
    placed: list[CellTensor] = []
    offset = 0
    for name, dtype, shape in tensors:
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        placed.append(CellTensor(name, dtype, shape, offset, size))
        offset += -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    return tuple(placed)


def mapped(name: str, size: int) -> tuple[int, NDArray[np.uint8]]:
    """Create an anonymous file and map it: (descriptor, uint8 [size]), zeroed and with every page allocated.
    The caller closes the descriptor. The memory is freed with the last reference to the array. The file's
    size is sealed, so any process can map it safely. OSError when memory is insufficient."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # A reader of a file that shrinks is killed (SIGBUS). So readers demand the seals, and no one can lift
        # them again.
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    memory[:: mmap.PAGESIZE] = 0  # Without this, the first access to each page takes ten times as long.
    return descriptor, memory


class MappedCells:
    """An `ExpertMemory` with this number of cells, for experts of these tensors and parts. All bytes start at
    zero."""

    def __init__(self, tensors: tuple[CellTensor, ...], cells: int, parts: int = 1) -> None:
        if not tensors or cells < 1:
            raise ValueError(f"cells: {cells} of {len(tensors)} tensors: there must be at least one of each")
        self.tensors = tensors
        self.cells = cells
        self.parts = parts
        # Whole pages: a read that lands never touches a page of another cell.
        self.cell_bytes = -(-CellFormat(tensors, parts).least_bytes // CELL_ALIGNMENT) * CELL_ALIGNMENT
        self.descriptor, self._memory = mapped("roost-experts", cells * self.cell_bytes)

    @property
    def base(self) -> int:
        return int(self._memory.ctypes.data)

    def cell(self, number: int) -> NDArray[np.uint8]:
        if not 0 <= number < self.cells:
            raise IndexError(f"cell {number} of {self.cells}")
        return self._memory[number * self.cell_bytes : (number + 1) * self.cell_bytes]

    def close(self) -> None:
        """Prevent new mappings by other processes. Existing mappings and arrays stay valid."""
        # Our own mapping needs no descriptor. Others reach the memory only through /proc/PID/fd.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
