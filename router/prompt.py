"""A prompt as the decision sees it: how long it is and which blocks it begins with. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, overload

from fleet.blocks import chain, local_hashes
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

    def chained(self, block_size: int) -> "Chain":
        """u64 sequence hash of each full block"""
        ...

    @property
    def ids(self) -> Sequence[int]:
        """its token ids; none where nobody can tokenise it"""
        ...


class Chain(Sequence[int]):
    """u64 sequence hashes of blocks given by their local ones, each computed when it is first asked for, with all before it."""

    def __init__(self, local: Sequence[int]) -> None:
        self._local = local
        self._chained: list[int] = []

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self._local))
            if step != 1:
                return [self[one] for one in range(start, stop, step)]
            self._reach(stop)
            return self._chained[start:stop]
        if not 0 <= at < len(self._local):
            raise IndexError(f"block {at} of a prompt of {len(self._local)}")
        self._reach(at + 1)
        return self._chained[at]

    def __len__(self) -> int:
        return len(self._local)

    def _reach(self, depth: int) -> None:
        chained = self._chained
        if depth > len(chained):
            parent = chained[-1] if chained else None
            for local in self._local[len(chained) : depth]:
                parent = chain(parent, local)
                chained.append(parent)


class _Hashed(ABC):
    """Hashes are computed once per block size."""

    def __init__(self) -> None:
        self._local: dict[int, list[int]] = {}
        self._chained: dict[int, Chain] = {}

    def hashes(self, block_size: int) -> list[int]:
        if block_size not in self._local:
            self._local[block_size] = self._hash(block_size)
        return self._local[block_size]

    def chained(self, block_size: int) -> Chain:
        if block_size not in self._chained:
            self._chained[block_size] = Chain(self.hashes(block_size))
        return self._chained[block_size]

    @abstractmethod
    def _hash(self, block_size: int) -> list[int]: ...


class TokenPrompt(_Hashed):
    """A prompt known by its ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self._ids = ids

    @property
    def ids(self) -> Sequence[int]:
        return self._ids

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def _hash(self, block_size: int) -> list[int]:
        return local_hashes(self._ids, block_size)


class TextPrompt(_Hashed):
    """A prompt known only as text; BYTES_PER_TOKEN bytes are taken as one token."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self._text = text

    @property
    def ids(self) -> Sequence[int]:
        return ()

    @property
    def tokens(self) -> int:
        return max(1, len(self._text) // BYTES_PER_TOKEN)

    def _hash(self, block_size: int) -> list[int]:
        return text_hashes(self._text, block_size * BYTES_PER_TOKEN)
