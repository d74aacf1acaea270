"""Sequence hashes of a prompt's blocks, computed lazily: most of a prompt that no rank has cached is never
read. Pure.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import overload

import xxhash

from fleet.blocks import SEED, extend

RUN = 32
"""Blocks cached together."""
AHEAD = 8
"""Known runs taken at once; up to this number may be read in vain."""
MAX_RUNS = 32_768
"""About 15 MB: 16 million tokens in blocks of 16."""


class HashRuns:
    """Cache of the hashes of runs of RUN blocks, keyed by the preceding hash, their bytes and their salt.
    Prompts often begin alike, and one digest of an entire run costs less than two of each block. State: at
    most MAX_RUNS, the least recently used evicted first.
    """

    def __init__(self, limit: int = MAX_RUNS) -> None:
        self._max_generation = limit // 2
        self._young: dict[int, array[int]] = {}
        self._old: dict[int, array[int]] = {}

    def get(self, key: int) -> "array[int] | None":
        found = self._young.get(key)
        if found is None and (found := self._old.pop(key, None)) is not None:
            self.put(key, found)
        return found

    def put(self, key: int, hashes: "array[int]") -> None:
        if len(self._young) >= self._max_generation:
            self._old, self._young = self._young, {}
        self._young[key] = hashes

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class BlockHashChain(Sequence[int]):
    """u64 sequence hashes of a prompt's full blocks. A hash is computed on first use, with all hashes before
    it.

    raw(start, stop): the bytes of some of its blocks, `width` each. seed: of their local hashes. A slice
    computes no further than it reads.
    """

    __slots__ = ("_chained", "_key", "_length", "_looked_up", "_raw", "_run", "_seed", "_width")

    def __init__(self, raw: Callable[[int, int], bytes], width: int, length: int, seed: int = SEED) -> None:
        self._raw = raw
        self._seed = seed
        self._width = width
        self._length = length
        self._chained: list[int] = []
        self._looked_up, self._key, self._run = -1, 0, b""
        """first block of the run that was looked up last, its key and its bytes"""

    @property
    def computed(self) -> int:
        """Number of hashes computed so far."""
        return len(self._chained)

    def reach(self, depth: int, runs: HashRuns | None = None) -> list[int]:
        """Return at least the first `depth` hashes (there are `len(self)`), more if `runs` knows them. The
        list belongs to the chain and must not be changed.
        """
        chained = self._chained
        while len(chained) < depth:
            if runs is None or depth % RUN == 1:  # one block decides if the run after it is worth reading
                extend(chained, self._raw(len(chained), depth), self._width, self._seed)
            else:
                self._extend_run(depth, runs)
        return chained

    def _extend_run(self, depth: int, runs: HashRuns) -> None:
        """Extend the chain to `depth` or to the end of a run. Known runs are taken as a whole, some at once;
        a finished run is cached.
        """
        chained, width = self._chained, self._width
        start = len(chained) // RUN * RUN
        if start + RUN > self._length:
            extend(chained, self._raw(len(chained), depth), width, self._seed)
            return
        if self._looked_up != start and self._take(start, runs):
            return
        stop = min(depth, start + RUN)
        extend(chained, self._run[(len(chained) - start) * width : (stop - start) * width], width, self._seed)
        if stop == start + RUN:
            runs.put(self._key, array("Q", chained[start:]))

    def _take(self, start: int, runs: HashRuns) -> bool:
        """Take the run that begins at a block and, after the first, further known ones. Return False if there
        was none.
        """
        chained, raw = self._chained, self._raw
        # The first run alone decides if the prompt begins like a known one; then more are read at once.
        ahead = AHEAD if start else 1
        for at in range(start, min(start + ahead * RUN, self._length - RUN + 1), RUN):
            self._looked_up, self._run = at, raw(at, at + RUN)
            self._key = xxhash.xxh3_128_intdigest(self._run, (chained[at - 1] if at else 0) ^ self._seed)
            known = runs.get(self._key)
            if known is None:
                return at > start
            chained[at:] = known
        return True

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            positions = range(*at.indices(self._length))
            reached = self.reach(max(positions[0], positions[-1]) + 1) if positions else []
            return (
                reached[positions.start : positions.stop]
                if positions.step == 1
                else [reached[one] for one in positions]
            )
        if 0 <= at < len(self._chained):
            return self._chained[at]
        if not 0 <= at < self._length:
            raise IndexError(f"block {at} of a prompt of {self._length}")
        return self.reach(at + 1)[at]

    def __len__(self) -> int:
        return self._length
