"""A prompt as the decision sees it: how long it is and which blocks it begins with. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from fleet.blocks import local_hashes, sequence_hashes
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

    def chained(self, block_size: int) -> list[int]:
        """u64 sequence hash of each full block"""
        ...


class _Hashed(ABC):
    """Hashes are computed once per block size."""

    def __init__(self) -> None:
        self._local: dict[int, list[int]] = {}
        self._chained: dict[int, list[int]] = {}

    def hashes(self, block_size: int) -> list[int]:
        if block_size not in self._local:
            self._local[block_size] = self._hash(block_size)
        return self._local[block_size]

    def chained(self, block_size: int) -> list[int]:
        if block_size not in self._chained:
            self._chained[block_size] = sequence_hashes(self.hashes(block_size))
        return self._chained[block_size]

    @abstractmethod
    def _hash(self, block_size: int) -> list[int]: ...


class TokenPrompt(_Hashed):
    """A prompt known by its ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self.ids = ids

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def _hash(self, block_size: int) -> list[int]:
        return local_hashes(self.ids, block_size)


class TextPrompt(_Hashed):
    """A prompt known only as text; BYTES_PER_TOKEN bytes are taken as one token."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self._text = text

    @property
    def tokens(self) -> int:
        return max(1, len(self._text) // BYTES_PER_TOKEN)

    def _hash(self, block_size: int) -> list[int]:
        return text_hashes(self._text, block_size * BYTES_PER_TOKEN)
