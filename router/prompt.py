"""A prompt as the decision sees it: how long it is and which blocks it begins with. Pure."""

from collections.abc import Sequence
from typing import Protocol

from fleet.blocks import local_hashes
from router.prefixes import text_hashes

BYTES_PER_TOKEN = 4
"""English text under the usual vocabularies; used where no tokenizer is known."""


class Prompt(Protocol):
    @property
    def tokens(self) -> int:
        """its length, in tokens (a guess where nobody can tokenise it)"""
        ...

    def hashes(self, block_size: int) -> list[int]:
        """u64 local hash of each full block"""
        ...


class TokenPrompt:
    """A prompt known by its ids. Hashes are computed once per block size."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self._hashes: dict[int, list[int]] = {}

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def hashes(self, block_size: int) -> list[int]:
        if block_size not in self._hashes:
            self._hashes[block_size] = local_hashes(self.ids, block_size)
        return self._hashes[block_size]


class TextPrompt:
    """A prompt known only as text; BYTES_PER_TOKEN bytes are taken as one token."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._hashes: dict[int, list[int]] = {}

    @property
    def tokens(self) -> int:
        return max(1, len(self._text) // BYTES_PER_TOKEN)

    def hashes(self, block_size: int) -> list[int]:
        if block_size not in self._hashes:
            self._hashes[block_size] = text_hashes(self._text, block_size * BYTES_PER_TOKEN)
        return self._hashes[block_size]
