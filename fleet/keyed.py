"""Index of a set-associative table over flat arrays, for tables with a fixed number of bytes. Pure.

A key's set follows from its bits. Its row may be in any way of the set. Eviction from a full set is up to the
table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import KeyArray

_MIX = 0x9E3779B97F4A7C15
"""2^64 / golden ratio (Knuth, The Art of Computer Programming 3, 6.4: multiplicative hashing)."""
_MASK = (1 << 64) - 1


class KeySets:
    """Keys of sets x ways slots; 0 marks an empty slot and is not a valid key. `keys`: uint64 [slots],
    written by the owning table.
    """

    def __init__(self, sets: int, ways: int) -> None:
        self.sets = sets
        self.ways = ways
        self._bytes = bytearray(8 * sets * ways)  # single keys are searched in bytes: numpy has more overhead
        self.keys: KeyArray = np.frombuffer(self._bytes, "<u8")

    def slot(self, key: int) -> int:
        """Return the slot of a key, -1 if absent."""
        if not 0 < key <= _MASK:
            return -1
        width = 8 * self.ways
        start = ((((key * _MIX) & _MASK) >> 32) * self.sets >> 32) * width
        encoded, end = key.to_bytes(8, "little"), start + width
        at = self._bytes.find(encoded, start, end)
        while at >= 0 and at & 7:
            at = self._bytes.find(encoded, at + 1, end)
        return at >> 3 if at >= 0 else -1

    def places(self, keys: KeyArray) -> NDArray[np.int64]:
        """Return the candidate slots of keys [n]: int64 [n, ways]."""
        mixed = (keys * np.uint64(_MIX)) >> np.uint64(32)
        first = ((mixed * np.uint64(self.sets)) >> np.uint64(32)).astype(np.int64) * self.ways
        return np.asarray(first[:, None] + np.arange(self.ways))

    def held(self) -> list[int]:
        """Return the keys in the table."""
        held: list[int] = self.keys[self.keys != 0].tolist()
        return held


class KeyedTable(Mapping[int, bytes]):
    """Rows in the slots of a `KeySets`, as a mapping from keys to bytes. The table that derives from it
    writes keys and rows, evicts, and counts the filled slots.
    """

    def __init__(self, index: KeySets, rows: memoryview, stride: int, width: int) -> None:
        """rows: `stride` bytes per slot, of which the first `width` are the row of its key."""
        self._index = index
        self._keys = index.keys
        self._row_bytes = rows
        self._stride = stride
        self._width = width
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    def __iter__(self) -> Iterator[int]:
        return iter(self._index.held())

    def __getitem__(self, key: int) -> bytes:
        found: bytes | None = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: int, default: Any = None) -> Any:
        """Return the row of a key; does not count as use."""
        slot = self._index.slot(key)
        start = slot * self._stride
        return default if slot < 0 else self._row_bytes[start : start + self._width].tobytes()
