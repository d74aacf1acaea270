"""Checksums of reads, computed while their bytes land.

A read reports how many of its bytes have landed, in the order of its ranges. So the bytes are hashed on one
core while the next ones are copied on another, or at least while they are in the processor's caches.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from xxhash import xxh3_64

from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.parts import ByteRange, CellFormat
from fleet.sharding import ALL_PARTS


class ReadPart(NamedTuple):
    """A part of a read: a piece of a cell, or all of it."""

    cell: int
    piece: int
    """ALL_PARTS: all pieces of the cell."""
    sharded: bool
    """The cell is for a sharded layer."""


@dataclass(slots=True)
class _Range:
    """Bytes with a checksum of their own."""

    begin: int
    """Bytes of the read before them."""
    cell: int
    at: ByteRange
    hashed: int = 0
    sum: xxh3_64 = field(default_factory=xxh3_64)


class LandedChecksums:
    """Checksums of one read. `advance` runs on threads; it may be called from several."""

    def __init__(self, memory: ExpertMemory, form: CellFormat, parts: Iterable[ReadPart]) -> None:
        """parts: in the order in which they are read (`CellFormat.pulls`)."""
        self._memory = memory
        self._ranges: list[_Range] = []
        self._of: dict[tuple[int, int], list[_Range]] = {}
        self._next = 0
        """First range that is not hashed to its end."""
        self._lock = threading.Lock()
        self.bytes = 0
        """Of the whole read."""
        for part in parts:
            self._add(form, part)

    def _add(self, form: CellFormat, part: ReadPart) -> None:
        if part.piece == ALL_PARTS:
            # Row by row [tensors, parts], as `checksums` has them; in this order they land.
            pieces = [form.ranges(piece, sharded=False) for piece in range(form.parts)]
            places = [piece[tensor] for tensor in range(len(form.tensors)) for piece in pieces]
            begins, size = [place.offset for place in places], form.whole_bytes
        else:
            places = list(form.ranges(part.piece, sharded=part.sharded))
            begins = [sum(place.bytes for place in places[:number]) for number in range(len(places))]
            size = sum(place.bytes for place in places)
        ranges = [
            _Range(self.bytes + begin, part.cell, place) for begin, place in zip(begins, places, strict=True)
        ]
        self._of[part.cell, part.piece] = ranges
        self._ranges += ranges
        self.bytes += size

    def advance(self, landed: int) -> None:
        """Hash what has landed: the first `landed` bytes of the read."""
        with self._lock:
            while self._next < len(self._ranges):
                one = self._ranges[self._next]
                upto = min(landed - one.begin, one.at.bytes)
                if upto > one.hashed:
                    begin, end = one.at.offset + one.hashed, one.at.offset + upto
                    one.sum.update(self._memory.cell(one.cell)[begin:end].data)
                    one.hashed = upto
                if one.hashed < one.at.bytes:
                    return
                self._next += 1

    def of(self, cell: int, piece: int) -> tuple[int, ...] | None:
        """Return the checksums of a part. None: it is not of this read, or not hashed to its end."""
        ranges = self._of.get((cell, piece))
        if ranges is None or any(one.hashed < one.at.bytes for one in ranges):
            return None
        return tuple(one.sum.intdigest() for one in ranges)
