"""The blocks of a prompt by sequence hash, hashed only as far as somebody asks: most of a prompt that nobody has cached is never looked at. Pure."""

from collections.abc import Callable, Sequence
from typing import overload

from fleet.blocks import extend


class Chain(Sequence[int]):
    """u64 sequence hashes of a prompt's full blocks, each made when it is first asked for, with all before it.

    raw(start, stop): the bytes of some of its blocks, `width` each. Iterating, and a slice, reach no further than they are read.
    """

    __slots__ = ("_chained", "_length", "_raw", "_width")

    def __init__(self, raw: Callable[[int, int], bytes], width: int, length: int) -> None:
        self._raw = raw
        self._width = width
        self._length = length
        self._chained: list[int] = []

    def reach(self, depth: int) -> list[int]:
        """At least the first `depth` hashes (there are `len(self)`); the list is the chain's own: not to be changed."""
        chained = self._chained
        if depth > len(chained):
            extend(chained, self._raw(len(chained), depth), self._width)
        return chained

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            wanted = range(*at.indices(self._length))
            reached = self.reach(max(wanted[0], wanted[-1]) + 1) if wanted else []
            return reached[wanted.start : wanted.stop] if wanted.step == 1 else [reached[one] for one in wanted]
        if not 0 <= at < self._length:
            raise IndexError(f"block {at} of a prompt of {self._length}")
        return self.reach(at + 1)[at]

    def __len__(self) -> int:
        return self._length
