"""Checksums of experts: one per tensor and part, weights and scales alike. A wrong byte in a 4-byte scale is
thus as visible as one in a large weight, and a part keeps its checksums when its layer changes its form.

xxh3 reads 30 to 60 GB/s on one core and releases the GIL. A whole expert of 16 MiB takes well under a
millisecond. The checksums detect damage and mix-ups (swapped rows, halves, scales), not malice.
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from engine_adapter.engine import CellTensor
from engine_adapter.transfer.parts import CellFormat


def layout_hash(form: CellFormat) -> str:
    """Hash the format of a cell, as 32 hex digits. Ranks with equal hashes can copy between cells byte by
    byte. The hash covers names, dtypes, shapes, offsets, sizes and order of the tensors, and the number of
    parts."""
    text = ";".join(
        f"{one.name}:{one.dtype}:{','.join(map(str, one.shape))}:{one.offset}:{one.bytes}"
        for one in form.tensors
    )
    return xxh3_128_hexdigest(f"{form.parts}|{text}".encode())


def piece_checksums(
    cell: NDArray[np.uint8], form: CellFormat, piece: int, *, sharded: bool
) -> tuple[int, ...]:
    """Return the u64 checksum of each tensor of a piece. cell: uint8 [cell_bytes]. Takes milliseconds for
    large experts, so do not call it on an event loop."""
    return tuple(
        xxh3_64_intdigest(cell[offset : offset + size].data)
        for offset, size in form.ranges(piece, sharded=sharded)
    )


def checksums(
    cell: NDArray[np.uint8], form: CellFormat, *, sharded: bool = False, pieces: int | None = None
) -> tuple[int, ...]:
    """Return the checksums of a whole cell, [tensors, parts] row by row. pieces: pieces that the cell holds,
    the first ones; 0 stands for the others. None: all. Otherwise as `piece_checksums`."""
    filled = form.parts if pieces is None else pieces
    columns = [piece_checksums(cell, form, piece, sharded=sharded) for piece in range(filled)]
    columns += [(0,) * len(form.tensors)] * (form.parts - filled)
    return tuple(one for row in zip(*columns, strict=True) for one in row)


def compare(
    tensors: Sequence[CellTensor], expected: Sequence[int], found: Sequence[int], parts: int = 1
) -> tuple[str, ...]:
    """Return the names of the tensors whose checksums differ. Empty if all match. A tensor missing on either
    side counts as different. parts: checksums per tensor; more than one: the parts are named too."""
    names = [
        one.name if parts == 1 else f"{one.name} part {part}" for one in tensors for part in range(parts)
    ]
    named = zip_longest(names, expected, found)
    return tuple(
        name or "a tensor that cells here do not have"
        for name, expected, got in named
        if name is None or expected is None or expected != got
    )
