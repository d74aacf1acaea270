"""A prompt as used in a decision: its length and its leading blocks. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import xxhash

from fleet.blocks import SEED, words
from router.prefix_index.block_hash_chain import TOKEN_BYTES, BlockHashChain

BYTES_PER_TOKEN = TOKEN_BYTES
"""Typical for English text; used where no tokenizer is known."""


class Prompt(Protocol):
    @property
    def tokens(self) -> int:
        """length in tokens (an estimate without a tokenizer)"""
        ...

    def chained(self, block_size: int) -> BlockHashChain:
        """u64 sequence hash of each full block"""
        ...

    @property
    def ids(self) -> Sequence[int]:
        """token ids; empty without a tokenizer"""
        ...


class _Blocked(ABC):
    """Chains are cached per block size. seed: of local hashes, derived from the request's salt by
    `fleet.blocks.salted_seed`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chained: dict[int, BlockHashChain] = {}

    def chained(self, block_size: int) -> BlockHashChain:
        found = self._chained.get(block_size)
        if found is None:
            found = self._chained[block_size] = self._chain(block_size)
        return found

    @abstractmethod
    def _chain(self, block_size: int) -> BlockHashChain: ...


class TokenPrompt(_Blocked):
    """A prompt known by its ids."""

    def __init__(self, ids: Sequence[int], seed: int = SEED) -> None:
        super().__init__(seed)
        self.ids = ids
        self.tokens = len(ids)

    def with_ids(self, ids: Sequence[int]) -> "TokenPrompt":
        """Return a prompt of other ids, hashed alike."""
        return TokenPrompt(ids, self._seed)

    def _chain(self, block_size: int) -> BlockHashChain:
        ids = self.ids
        return BlockHashChain(ids if isinstance(ids, list) else words(ids), block_size, self._seed)


class TextPrompt(_Blocked):
    """A prompt known only as text. BYTES_PER_TOKEN bytes count as one token."""

    def __init__(self, text: bytes, model: str, seed: int = SEED, size: int | None = None) -> None:
        """model: separates the blocks of models, since the models of one server share no prefix. size: bytes
        of the entire prompt if `text` holds only its beginning.
        """
        super().__init__(seed)
        self._text = text
        self.ids: Sequence[int] = ()
        self.tokens = max(1, (len(text) if size is None else size) // BYTES_PER_TOKEN)
        self._scope = xxhash.xxh3_64_digest(model.encode())

    def _chain(self, block_size: int) -> BlockHashChain:
        return BlockHashChain(self._scope + self._text, block_size, self._seed)
