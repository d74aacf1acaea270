"""Where rows lie by key: the index of a set-associative table over flat arrays, for tables of a fixed number of bytes. Pure.

A key's set follows from its bits, and its row may lie in any of the set's ways. What makes room in a full set is the table's own affair.
"""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
_MIX = 0x9E3779B97F4A7C15
"""2^64 / golden ratio (Knuth, The Art of Computer Programming 3, 6.4: multiplicative hashing)."""
_MASK = (1 << 64) - 1


class KeySets:
    """The keys of sets x ways slots; 0 marks an empty slot and is no key. `keys`: uint64 [slots], written by the table that owns it."""

    def __init__(self, sets: int, ways: int) -> None:
        self.sets = sets
        self.ways = ways
        self._bytes = bytearray(8 * sets * ways)  # one key is searched in these bytes: numpy takes longer to begin than to find
        self.keys: Keys = np.frombuffer(self._bytes, "<u8")

    def slot(self, key: int) -> int:
        """Where one key lies, -1 for nowhere."""
        if not 0 < key <= _MASK:
            return -1
        width = 8 * self.ways
        start = ((((key * _MIX) & _MASK) >> 32) * self.sets >> 32) * width
        wanted, end = key.to_bytes(8, "little"), start + width
        at = self._bytes.find(wanted, start, end)
        while at >= 0 and at & 7:
            at = self._bytes.find(wanted, at + 1, end)
        return at >> 3 if at >= 0 else -1

    def places(self, keys: Keys) -> NDArray[np.int64]:
        """int64 [n, ways]: the slots that keys [n] may lie in."""
        mixed = (keys * np.uint64(_MIX)) >> np.uint64(32)
        first = ((mixed * np.uint64(self.sets)) >> np.uint64(32)).astype(np.int64) * self.ways
        return np.asarray(first[:, None] + np.arange(self.ways))

    def held(self) -> list[int]:
        """The keys there are."""
        held: list[int] = self.keys[self.keys != 0].tolist()
        return held
