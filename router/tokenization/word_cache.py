"""Token ids by words: a text is cut before spaces, and words that were seen before are not encoded again.

Exact for tokenizers that cut before every space behind a visible character themselves, whatever else stands around, and encode what
lies between two cuts by itself; `splits` says of which that is proven. Then the ids of a text are those of its words in order, words that were
not adjacent may be joined and encoded together, and the ids of each are told apart by how many bytes every id stands for.
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
"""Characters of which none is whitespace in any edition of Unicode, nor becomes whitespace by NFC."""
WORD = re.compile(f".[^ ]*(?:(?<![{_VISIBLE}]) [^ ]*)*", re.DOTALL)
"""From one place to cut at to the next: spaces are inside of a word only where no visible character stands before them."""
_HEAD = 256
"""Characters from whose words it is guessed how many of a text are known."""
_MOST_UNKNOWN = 1 / 3
"""Of those words; with more the text is encoded whole, which then takes no longer."""
_LONGEST = 64
"""Characters; a longer word is none that comes again."""
_MOST_LEARNT = 32
"""Words that are kept of one text: texts of words that never come again are not to cost much."""
_ENTRY_BYTES = 112
"""of a dictionary, per entry"""
_ID_BYTES = 32

Ids = tuple[int, ...]


class WordCache:
    """State: ids of words by vocabulary, at most `budget` bytes, in two generations. Any thread may call.

    What is found in the old generation moves to the young one. When that has its half, it becomes the old one, and the words that were in
    the old one alone are forgotten: nearly the least recently used ones, without any work per word that is known.
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
        """Each word's ids, None where they are not known. `owner` tells vocabularies apart."""
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
        """Remember words; very long ones are not kept."""
        with self._lock:
            for word, ids in made:
                size = _size(word, ids)
                if len(word) > _LONGEST or size > self._half or word in self._young.get(owner, ()):
                    continue
                if self._young_bytes + size > self._half:
                    self._old, self._old_bytes = self._young, self._young_bytes
                    self._young, self._young_bytes = {}, 0
                self._young.setdefault(owner, {})[word] = ids
                self._young_bytes += size

    def forget(self, owner: int) -> None:
        """Drop what belongs to a vocabulary that is gone."""
        with self._lock:
            self._young_bytes -= sum(_size(*entry) for entry in self._young.pop(owner, {}).items())
            self._old_bytes -= sum(_size(*entry) for entry in self._old.pop(owner, {}).items())

    def __len__(self) -> int:
        return sum(len(words) for generation in (self._young, self._old) for words in generation.values())


class WordEncoder:
    """Encodes texts of one vocabulary, known words by looking them up.

    encode: the tokenizer, ids of a text without anything added. sizes: UTF-8 bytes that each id stands for.
    unchanged: whether the tokenizer's normaliser leaves a text as it is; it is asked only about what is not ASCII.
    """

    def __init__(self, encode: Callable[[str], list[int]], sizes: "array[int]", unchanged: Callable[[str], bool], kept: WordCache, owner: int) -> None:
        self._encode = encode
        self._sizes = sizes
        self._unchanged = unchanged
        self._kept = kept
        self._owner = owner

    def ids(self, text: str) -> tuple[list[int], int]:
        """The ids of a text, and how many of its characters had to be encoded."""
        if len(text) > 2 * _HEAD and self._is_new(head := WORD.findall(text, 0, _HEAD)[:-1]):
            ids = self._encode(text)
            self._told_apart(ids, head)
            return ids, len(text)
        words = WORD.findall(text)
        if len(words) == 1 and len(text) > _LONGEST:
            return self._encode(text), len(text)
        found = self._kept.find(self._owner, words)
        if None not in found:
            return list(chain.from_iterable(cast("list[Ids]", found))), 0
        unknown = [word for word, known in zip(words, found, strict=True) if known is None]
        joined = "".join(unknown)
        ids = self._encode(joined)
        made = self._told_apart(ids, unknown)
        if made is None:
            return self._encode(text), len(text)
        new = iter(made)
        return list(chain.from_iterable(next(new) if known is None else known for known in found)), len(joined)

    def _is_new(self, words: list[str]) -> bool:
        """So many of the words are not known that looking up the rest would not pay."""
        return self._kept.find(self._owner, words).count(None) > len(words) * _MOST_UNKNOWN

    def _told_apart(self, ids: list[int], words: list[str]) -> list[Ids] | None:
        """The ids of each of the words with which a text begins, and keeps some; None when normalising has changed their lengths."""
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
        self._kept.keep(self._owner, zip(words[:_MOST_LEARNT], made, strict=False))
        return made

    def _lengths(self, words: list[str]) -> list[int] | None:
        """In UTF-8 bytes; None when normalising changes one."""
        joined = "".join(words)
        if joined.isascii():
            return [len(word) for word in words]
        return [len(word.encode()) for word in words] if self._unchanged(joined) else None


def _size(word: str, ids: Ids) -> int:
    return sys.getsizeof(word) + sys.getsizeof(ids) + _ID_BYTES * len(ids) + _ENTRY_BYTES
