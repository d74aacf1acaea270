"""Pieces of a cell: the bytes of each part of an expert, in both forms of a layer. Pure.

Where experts can be cut, an engine of P ranks cuts each into P parts (`fleet.sharding`), and a cell of either
form consists of P *pieces*:

- In a whole layer, a cell holds one expert, and piece p is part p of it: the p-th of P equal ranges of every
  tensor.
- In a sharded layer, a cell holds a group, and piece i is the rank's part of the group's i-th expert. It
  begins at i times the *stride*, its tensors one after another. The stride is the size of a part, rounded up
  to a multiple of `ALIGNED`.

Where experts cannot be cut, and in an engine of one rank, P is 1, the forms coincide, and a cell is one
piece.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from engine_adapter.engine import CellTensor, ExpertMemory
from engine_adapter.transfer.port import Pull
from fleet.layout import ALIGNED
from fleet.sharding import ALL_PARTS


class ByteRange(NamedTuple):
    """A range of a cell's bytes."""

    offset: int
    bytes: int


@dataclass(frozen=True)
class CellFormat:
    """Tensors of an expert and the number of its parts. ValueError when a tensor does not divide into the
    parts."""

    tensors: tuple[CellTensor, ...]
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"cells: experts of {self.parts} parts; there must be at least 1")
        odd = next((one for one in self.tensors if one.bytes % self.parts), None)
        if odd is not None:
            raise ValueError(
                f"cells: tensor {odd.name} of {odd.bytes} bytes does not divide into {self.parts} equal parts"
            )

    @classmethod
    def of(cls, memory: ExpertMemory) -> "CellFormat":
        """Return the format of a memory's cells."""
        return cls(tuple(memory.tensors), memory.parts)

    @cached_property
    def whole_bytes(self) -> int:
        """Bytes of an expert in a whole layer, from the start of its cell to the end of its last tensor."""
        return max(one.offset + one.bytes for one in self.tensors)

    @cached_property
    def stride(self) -> int:
        """Bytes from one piece to the next in a sharded layer."""
        return -(-sum(one.bytes // self.parts for one in self.tensors) // ALIGNED) * ALIGNED

    @property
    def least_bytes(self) -> int:
        """Bytes that a cell needs so that it can hold either form."""
        return self.whole_bytes if self.parts == 1 else max(self.whole_bytes, self.parts * self.stride)

    def ranges(self, piece: int, *, sharded: bool) -> tuple[ByteRange, ...]:
        """Return the bytes of a piece, one range per tensor. sharded: the form of the cell's layer.
        IndexError when there is no such piece."""
        if not 0 <= piece < self.parts:
            raise IndexError(f"piece {piece} of a cell of {self.parts}")
        return (self._in_groups if sharded and self.parts > 1 else self._in_experts)[piece]

    @cached_property
    def _in_experts(self) -> tuple[tuple[ByteRange, ...], ...]:
        """Ranges by piece in whole layers."""
        sizes = [one.bytes // self.parts for one in self.tensors]
        return tuple(
            tuple(
                ByteRange(one.offset + piece * size, size)
                for one, size in zip(self.tensors, sizes, strict=True)
            )
            for piece in range(self.parts)
        )

    @cached_property
    def _in_groups(self) -> tuple[tuple[ByteRange, ...], ...]:
        """Ranges by piece in sharded layers."""
        sizes = [one.bytes // self.parts for one in self.tensors]
        begins = list(accumulate(sizes, initial=0))[:-1]
        return tuple(
            tuple(ByteRange(piece * self.stride + at, size) for at, size in zip(begins, sizes, strict=True))
            for piece in range(self.parts)
        )

    def pulls(
        self, source: int, source_piece: int, cell: int, piece: int, *, sharded: bool
    ) -> tuple[Pull, ...]:
        """Return the reads that bring one piece from cell `source` of a layer in one form into `cell` of the
        layer in the other. sharded: the form that it is read into. ALL_PARTS for both pieces: a whole expert,
        whose layer is whole before and after."""
        if piece == ALL_PARTS:
            return (Pull(source, 0, cell, 0, self.whole_bytes),)
        theirs = self.ranges(source_piece, sharded=not sharded)
        return tuple(
            Pull(source, there.offset, cell, here.offset, here.bytes)
            for there, here in zip(theirs, self.ranges(piece, sharded=sharded), strict=True)
        )
