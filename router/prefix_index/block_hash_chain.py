"""The blocks of a prompt by sequence hash, hashed only as far as somebody asks: most of a prompt that nobody has cached is never looked at. Pure."""

from array import array
from collections.abc import Callable, Sequence
from typing import overload

import xxhash

from fleet.blocks import SEED, extend

RUN = 32
"""Blocks that are remembered together."""
AHEAD = 8
"""Known runs that are taken at once: so many may be read in vain."""
MOST_RUNS = 32_768
"""Some 15 MB: 16 million tokens in blocks of 16."""


class HashRuns:
    """Hashes of runs of RUN blocks that were made before, by what they follow, their bytes and their salt: beginnings of prompts come again and again, and
    one digest of a whole run costs less than two of each block. State: at most MOST_RUNS; those not asked for lately go first."""

    def __init__(self, most: int = MOST_RUNS) -> None:
        self._most = most // 2
        self._young: dict[int, array[int]] = {}
        self._old: dict[int, array[int]] = {}

    def get(self, key: int) -> "array[int] | None":
        found = self._young.get(key)
        if found is None and (found := self._old.pop(key, None)) is not None:
            self.put(key, found)
        return found

    def put(self, key: int, hashes: "array[int]") -> None:
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[key] = hashes

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class BlockHashChain(Sequence[int]):
    """u64 sequence hashes of a prompt's full blocks, each made when it is first asked for, with all before it.

    raw(start, stop): the bytes of some of its blocks, `width` each. seed: of their local hashes. A slice reaches no further than it reads.
    """

    __slots__ = ("_asked", "_chained", "_key", "_length", "_raw", "_run", "_seed", "_width")

    def __init__(self, raw: Callable[[int, int], bytes], width: int, length: int, seed: int = SEED) -> None:
        self._raw = raw
        self._seed = seed
        self._width = width
        self._length = length
        self._chained: list[int] = []
        self._asked, self._key, self._run = -1, 0, b""
        """first block of the run that was looked for last, its key and its bytes"""

    def reach(self, depth: int, runs: HashRuns | None = None) -> list[int]:
        """At least the first `depth` hashes (there are `len(self)`), more where `runs` knows them; the list is the chain's own: not to be changed."""
        chained = self._chained
        while len(chained) < depth:
            if runs is None or depth % RUN == 1:  # one block decides whether the run behind it is worth reading
                extend(chained, self._raw(len(chained), depth), self._width, self._seed)
            else:
                self._go_on(depth, runs)
        return chained

    def _go_on(self, depth: int, runs: HashRuns) -> None:
        """To `depth` or the end of a run. Runs that are known are taken whole, some at once; one that is finished is remembered."""
        chained, width = self._chained, self._width
        start = len(chained) // RUN * RUN
        if start + RUN > self._length:
            extend(chained, self._raw(len(chained), depth), width, self._seed)
            return
        if self._asked != start and self._take(start, runs):
            return
        stop = min(depth, start + RUN)
        extend(chained, self._run[(len(chained) - start) * width : (stop - start) * width], width, self._seed)
        if stop == start + RUN:
            runs.put(self._key, array("Q", chained[start:]))

    def _take(self, start: int, runs: HashRuns) -> bool:
        """The run that begins at a block and, behind the first, some more, as far as they are known. Returns whether there was any."""
        chained, raw = self._chained, self._raw
        ahead = AHEAD if start else 1
        for at in range(start, min(start + ahead * RUN, self._length - RUN + 1), RUN):
            self._asked, self._run = at, raw(at, at + RUN)
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
            wanted = range(*at.indices(self._length))
            reached = self.reach(max(wanted[0], wanted[-1]) + 1) if wanted else []
            return reached[wanted.start : wanted.stop] if wanted.step == 1 else [reached[one] for one in wanted]
        if 0 <= at < len(self._chained):
            return self._chained[at]
        if not 0 <= at < self._length:
            raise IndexError(f"block {at} of a prompt of {self._length}")
        return self.reach(at + 1)[at]

    def __len__(self) -> int:
        return self._length
