"""Checksums of experts: one per tensor of a cell, weights and scales alike, so that one wrong byte in a scale of four is as visible as in a weight.

xxh3 reads 30 to 60 GB/s on one core and lets other threads run meanwhile; a whole expert of 16 MiB takes well under a millisecond. It finds damage and
mix-ups (swapped rows, halves, scales), not malice.
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from engine_adapter.engine import CellTensor


def layout_hash(tensors: Sequence[CellTensor]) -> str:
    """What a cell holds, as 32 hex digits: equal for ranks whose cells can be copied into each other's byte by byte. Names, dtypes, shapes, offsets, sizes
    and order count."""
    said = ";".join(f"{one.name}:{one.dtype}:{','.join(map(str, one.shape))}:{one.offset}:{one.bytes}" for one in tensors)
    return xxh3_128_hexdigest(said.encode())


def checksums(cell: NDArray[np.uint8], tensors: Sequence[CellTensor]) -> tuple[int, ...]:
    """u64 of each tensor. cell: uint8 [cell_bytes]. Takes milliseconds where experts are large: not for an event loop."""
    return tuple(xxh3_64_intdigest(cell[one.offset : one.offset + one.bytes].data) for one in tensors)


def compare(tensors: Sequence[CellTensor], promised: Sequence[int], found: Sequence[int]) -> tuple[str, ...]:
    """Names of the tensors that are not what was promised; none: all is well. One that is missing on either side differs."""
    names = [one.name for one in tensors]
    named = zip_longest(names, promised, found)
    return tuple(name or "a tensor that cells here do not have" for name, expected, got in named if name is None or expected is None or expected != got)
