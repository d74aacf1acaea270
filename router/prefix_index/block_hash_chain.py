"""Sequence hashes of a prompt's blocks, computed lazily: most of a prompt that no rank has cached is never
read. Pure.
"""

from array import array
from collections.abc import Sequence
from typing import overload

from fleet.blocks import extend, words
from router import kernels
from router.kernels import Hashes

TOKEN_BYTES = 4


class BlockHashChain(Sequence[int]):
    """u64 sequence hashes of a prompt's full blocks. A hash is computed on first use, with all hashes before
    it.

    prompt: token ids, or bytes, TOKEN_BYTES of which count as a token. size: tokens of a block. seed: of
    local hashes. A slice computes no further than it reads.
    """

    __slots__ = ("_length", "hashes", "prompt", "seed", "size")

    def __init__(self, prompt: list[int] | bytes, size: int, seed: int) -> None:
        self.prompt = prompt
        self.size = size
        self.seed = seed
        self._length = (len(prompt) if isinstance(prompt, list) else len(prompt) // TOKEN_BYTES) // size
        self.hashes: Hashes = array("Q")
        """those computed so far: here, or by a compiled walk along the prompt"""

    def reach(self, depth: int) -> Hashes:
        """Return at least the first `depth` hashes (there are `len(self)`). They belong to the chain and must
        not be changed. OverflowError for an id outside u32.
        """
        known = len(self.hashes)
        if known < depth:
            library = kernels.compiled()
            if library is not None:
                self.hashes = array("Q", library.chain(self.prompt, self.size, self.seed, self.hashes, depth))
            else:
                extend(self.hashes, self._raw(known, depth), TOKEN_BYTES * self.size, self.seed)
        return self.hashes

    def _raw(self, start: int, stop: int) -> bytes:
        """Return the bytes of some blocks."""
        size, prompt = self.size, self.prompt
        if isinstance(prompt, list):
            return words(prompt[start * size : stop * size])
        return prompt[TOKEN_BYTES * start * size : TOKEN_BYTES * stop * size]

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            positions = range(*at.indices(self._length))
            reached = self.reach(max(positions[0], positions[-1]) + 1) if positions else self.hashes
            if positions.step == 1:
                return reached[positions.start : positions.stop].tolist()
            return [reached[one] for one in positions]
        if 0 <= at < len(self.hashes):
            return self.hashes[at]
        if not 0 <= at < self._length:
            raise IndexError(f"block {at} of a prompt of {self._length}")
        return self.reach(at + 1)[at]

    def __len__(self) -> int:
        return self._length
