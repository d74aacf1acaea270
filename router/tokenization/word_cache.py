"""Word cache: token ids by words. A text is cut before spaces, and known words are not encoded again.

Exact for tokenizers that cut before every space after a visible character in any context, and encode the
pieces independently; `pretokenizer_proof` establishes this for a tokenizer. The ids of a text are then those
of its words in order. Words that were not adjacent may be joined and encoded together; their ids are
separated by the number of bytes that every id stands for.
"""

import re
import sys
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import cast

_VISIBLE = "!-~\u00a1-\u167f\u1681-\u180d\u180f-\u1fff\u3001-\U0010ffff"
"""Characters that are not whitespace in any edition of Unicode, and do not become whitespace by NFC."""
WORD = re.compile(f".[^ ]*(?:(?<![{_VISIBLE}]) [^ ]*)*", re.DOTALL)
"""Text from one cut to the next. A word contains spaces only where no visible character precedes them."""
_HEAD = 256
"""Characters whose words serve to estimate the share of known words in a text."""
_MAX_UNKNOWN = 1 / 3
"""Largest share of unknown ones among these words. Beyond, the text is encoded as a whole, which then takes
no longer.
"""
_MAX_WORD = 64
"""Characters. Longer words are not expected to recur."""
_MAX_LEARNT = 32
"""Most words stored from one text, to limit the cost of texts whose words never recur."""
_ENTRY_BYTES = 112
"""Overhead of a dictionary per entry."""
_ID_BYTES = 32

Ids = tuple[int, ...]


class WordCache:
    """State: ids of words by vocabulary, at most `budget` bytes, in two generations. Thread-safe.

    Words found in the old generation move to the young one. When the young generation reaches half the budget
    it becomes the old one, and words that were only in the old one are dropped. This approximates LRU without
    any work per known word.
    """

    def __init__(self, budget: int) -> None:
        self._half = budget // 2
        self._young: dict[int, dict[str, Ids]] = {}
        self._old: dict[int, dict[str, Ids]] = {}
        self._young_bytes = self._old_bytes = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        return self._young_bytes + self._old_bytes

    def find(self, owner: int, words: Sequence[str]) -> list[Ids | None]:
        """Return each word's ids, None where they are not known. `owner` separates vocabularies."""
        found: list[Ids | None] = list(map(self._young.get(owner, {}).get, words))
        old = self._old.get(owner)
        if old and None in found:
            again: list[tuple[str, Ids]] = []
            for at, word in enumerate(words):
                if found[at] is None and (ids := old.get(word)) is not None:
                    found[at] = ids
                    again.append((word, ids))
            self.keep(owner, again)
        return found

    def keep(self, owner: int, made: Iterable[tuple[str, Ids]]) -> None:
        """Store words, except very long ones."""
        with self._lock:
            for word, ids in made:
                size = _size(word, ids)
                if len(word) > _MAX_WORD or size > self._half or word in self._young.get(owner, ()):
                    continue
                if self._young_bytes + size > self._half:
                    self._old, self._old_bytes = self._young, self._young_bytes
                    self._young, self._young_bytes = {}, 0
                self._young.setdefault(owner, {})[word] = ids
                self._young_bytes += size

    def forget(self, owner: int) -> None:
        """Drop the entries of a vocabulary that is gone."""
        with self._lock:
            self._young_bytes -= sum(_size(*entry) for entry in self._young.pop(owner, {}).items())
            self._old_bytes -= sum(_size(*entry) for entry in self._old.pop(owner, {}).items())

    def __len__(self) -> int:
        return sum(len(words) for generation in (self._young, self._old) for words in generation.values())


class WordEncoder:
    """Encodes texts of one vocabulary, and looks up known words.

    encode: the tokenizer, returning the ids of a text without additions. sizes: UTF-8 bytes that each id
    stands for. unchanged: returns True if the tokenizer's normalizer does not change a text; called only for
    non-ASCII texts.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        sizes: "array[int]",
        unchanged: Callable[[str], bool],
        kept: WordCache,
        owner: int,
    ) -> None:
        self._encode = encode
        self._sizes = sizes
        self._unchanged = unchanged
        self._kept = kept
        self._owner = owner

    def ids(self, text: str) -> tuple[list[int], int]:
        """Return the ids of a text, and the number of characters that had to be encoded."""
        if len(text) > 2 * _HEAD and self._is_new(head := WORD.findall(text, 0, _HEAD)[:-1]):
            ids = self._encode(text)
            self._split_ids(ids, head)
            return ids, len(text)
        words = WORD.findall(text)
        if len(words) == 1 and len(text) > _MAX_WORD:
            return self._encode(text), len(text)
        found = self._kept.find(self._owner, words)
        if None not in found:
            return list(chain.from_iterable(cast("list[Ids]", found))), 0
        unknown = [word for word, known in zip(words, found, strict=True) if known is None]
        joined = "".join(unknown)
        ids = self._encode(joined)
        made = self._split_ids(ids, unknown)
        if made is None:
            return self._encode(text), len(text)
        new = iter(made)
        return list(chain.from_iterable(next(new) if known is None else known for known in found)), len(
            joined
        )

    def _is_new(self, words: list[str]) -> bool:
        """Return True if most of these words are unknown, so that looking up the rest would not pay."""
        return self._kept.find(self._owner, words).count(None) > len(words) * _MAX_UNKNOWN

    def _split_ids(self, ids: list[int], words: list[str]) -> list[Ids] | None:
        """Return the ids of each word at the beginning of a text, and store some; None if normalizing changed
        a length.
        """
        lengths = self._lengths(words)
        if lengths is None:
            return None
        ends = list(accumulate(map(self._sizes.__getitem__, ids[: sum(lengths)])))
        made: list[Ids] = []
        begin = 0
        for length in accumulate(lengths):
            end = bisect_left(ends, length, begin) + 1
            if end > len(ends) or ends[end - 1] != length:
                return None
            made.append(tuple(ids[begin:end]))
            begin = end
        self._kept.keep(self._owner, zip(words[:_MAX_LEARNT], made, strict=False))
        return made

    def _lengths(self, words: list[str]) -> list[int] | None:
        """Return the lengths in UTF-8 bytes; None if normalizing changes one."""
        joined = "".join(words)
        if joined.isascii():
            return [len(word) for word in words]
        return [len(word.encode()) for word in words] if self._unchanged(joined) else None


def _size(word: str, ids: Ids) -> int:
    return sys.getsizeof(word) + sys.getsizeof(ids) + _ID_BYTES * len(ids) + _ENTRY_BYTES
