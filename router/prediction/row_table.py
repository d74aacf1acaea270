"""Rows of a prediction table by key, in a fixed number of bytes: a set-associative table over flat arrays.
Pure.

A key's set follows from its bits, and the row may be in any of the set's WAYS. If a set is full, the row
written longest ago is evicted, and among equals the one with the most tokens of evidence, so that the end of
a prefix goes before its beginning. A table is sized for about the existing number of rows; `grown` builds a
larger one, until the budget is reached.
"""

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import ByteArray, KeyArray
from fleet.keyed import KeyedTable, KeySets
from fleet.prediction import ROW, STRIDE, longest_known
from fleet.signatures import PACKED
from router import kernels
from router.prefix_index.block_hash_chain import BlockHashChain

WAYS = 16
SLOT = 8 + ROW + 2
"""Bytes of one slot: key, row, and age."""
_YOUNGEST = (1 << 16) - 1
_MIN_SETS = 64
_ROOM = 3
"""Slots per row, if the budget allows it. Then hardly a set in 100,000 overflows."""
_SLICE = 2048


class RowTable(KeyedTable):
    """At most `budget` bytes, at least one set. Key 0 is not a key. ROW bytes per row, as built by
    `fleet.prediction.row`.

    expected: number of rows that will come.
    """

    def __init__(self, budget: int, expected: int = 0) -> None:
        self._budget = budget
        self._max_sets = max(1, budget // (SLOT * WAYS))
        self._sets = min(self._max_sets, max(_MIN_SETS, -(-_ROOM * expected // WAYS)))
        slots = self._sets * WAYS
        self._rows: ByteArray = np.zeros((slots, ROW), np.uint8)
        super().__init__(KeySets(self._sets, WAYS), self._rows.reshape(-1).data, ROW, ROW)
        self._tokens: NDArray[np.uint32] = self._rows[:, PACKED:].view("<u4")[:, 0]
        self._written = np.zeros(slots, np.uint16)
        self._now = 0

    @property
    def nbytes(self) -> int:
        """Filled or not."""
        return SLOT * WAYS * self._sets

    def get(self, key: int, default: Any = None) -> Any:
        """Return the row of a key; does not count as use."""
        library = kernels.compiled()
        if library is None:
            return super().get(key, default)
        found = library.keyed_row(key, self._keys, self._row_bytes, WAYS, ROW, ROW)
        return default if found is None else found

    def longest_known(self, prefix: BlockHashChain, guess: int) -> tuple[int, bytes | None]:
        """Return what `fleet.prediction.longest_known` does of the blocks of a prompt."""
        library = kernels.compiled()
        if library is None:
            return longest_known(self, prefix, guess)
        hashes, blocks, row = library.longest_known(
            prefix.prompt,
            prefix.size,
            prefix.seed,
            prefix.hashes,
            self._keys,
            self._row_bytes,
            WAYS,
            ROW,
            ROW,
            guess,
            STRIDE,
        )
        prefix.hashes = array("Q", hashes)
        return blocks, row

    def crowded_by(self, more: int) -> bool:
        """Return True if `more` additional rows need a larger table, and the budget allows one."""
        return _ROOM * (self._filled + more) > self._sets * WAYS and self._sets < self._max_sets

    def grown(self, more: int) -> "RowTable":
        """Return a table of the same rows with room for `more`, and for as many again. Takes about a second
        for a million rows.
        """
        new = RowTable(self._budget, 2 * (self._filled + more))
        slots = np.flatnonzero(self._keys)
        slots = slots[np.argsort(self._written[slots], kind="stable")]
        for start in range(0, len(slots), _SLICE):
            part = slots[start : start + _SLICE]
            new.put(self._keys[part], self._rows[part])
        return new

    def put(self, keys: KeyArray, rows: ByteArray) -> None:
        """Store rows [n, ROW] of keys [n]; later ones replace earlier ones. A row without evidence removes
        its key.
        """
        keys, rows = _last_of_each(keys, rows)
        self._pass_time()
        # [n, WAYS]: the slots that may hold each key. A key is in at most one of them.
        ways = self._index.places(keys)
        hits = self._keys[ways] == keys[:, None]
        known = hits.any(axis=1)
        slots = ways[np.arange(len(keys)), hits.argmax(axis=1)]
        empty = ~rows[:, PACKED:].any(axis=1)
        self._write(slots[known & ~empty], keys[known & ~empty], rows[known & ~empty])
        self._keys[slots[known & empty]] = 0
        self._filled -= int((known & empty).sum())
        self._add(keys[~known & ~empty], rows[~known & ~empty], ways[~known & ~empty])

    def _add(self, keys: KeyArray, rows: ByteArray, ways: NDArray[np.int64]) -> None:
        """Add new keys [n] with their possible ways [n, WAYS], one per set at a time."""
        # Fancy assignment would let new keys of one set take the same way. So each round adds the first key
        # of every set; rounds are few, since keys spread over the sets.
        while len(keys):
            _, first = np.unique(ways[:, 0], return_index=True)
            taken = ways[first]
            held = self._keys[taken]
            slots = taken[np.arange(len(first)), self._weakest(taken, held)]
            self._filled += int((self._keys[slots] == 0).sum())
            self._write(slots, keys[first], rows[first])
            left = np.ones(len(keys), np.bool_)
            left[first] = False
            keys, rows, ways = keys[left], rows[left], ways[left]

    def _weakest(self, ways: NDArray[np.int64], held: KeyArray) -> NDArray[np.intp]:
        """Return the way of each set that a new row replaces, [n]."""
        # One number orders the ways: age in the high bits, then fewer tokens of evidence as worth more.
        worth = self._written[ways].astype(np.int64) << 32
        worth += 0xFFFFFFFF - self._tokens[ways].astype(np.int64)
        worth[held == 0] = -1
        return np.asarray(worth.argmin(axis=1), np.intp)

    def _write(self, slots: NDArray[np.int64], keys: KeyArray, rows: ByteArray) -> None:
        self._keys[slots], self._rows[slots], self._written[slots] = keys, rows, self._now

    def _pass_time(self) -> None:
        """Advance the age. Each `put` is an age. When ages are used up, those older than half of them become
        equal.
        """
        if self._now == _YOUNGEST:
            half = np.uint16(_YOUNGEST // 2)
            np.maximum(self._written, half, out=self._written)
            self._written -= half
            self._now -= int(half)
        self._now += 1


def _last_of_each(keys: KeyArray, rows: ByteArray) -> tuple[KeyArray, ByteArray]:
    """Remove duplicates and key 0."""
    found, back = np.unique(keys[::-1], return_index=True)
    last = len(keys) - 1 - back[found != 0]
    return keys[last], rows[last]
