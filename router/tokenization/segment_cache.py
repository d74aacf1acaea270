"""Segment cache: token ids of conversations by segments. A text is cut before its special tokens, and known
segments are not encoded again.

Exact if the tokenizer finds its special tokens in the raw text, before it normalizes and splits the rest.
Text after such a token is then encoded independently of the text before it. A segment begins with its special
token, so its text is never mistaken for the beginning of the text. `tokenizer` proves this for each
vocabulary before relying on it.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import msgspec

from router.tokenization.word_cache import WordCache

MAX_SEGMENTS = 4096
"""A text with more is encoded as a whole: it is not a conversation, and the many single calls would cost more
than they save.
"""
_ENTRY_BYTES = 256
"""Overhead of the cache per entry: key, links, the array's head."""
_LARGEST_SHARE = 4
"""An entry larger than the budget divided by this is not kept, since it would evict all others."""
_WORDS_SHARE = 4
"""Words get at most the budget divided by this."""


class Segments(msgspec.Struct, frozen=True):
    """A text in segments, in order; `ids`: u32 arrays, None where they are not known yet."""

    texts: list[str]
    ids: "list[array[int] | None]"

    @property
    def unknown(self) -> int:
        """Number of characters still to be encoded."""
        return sum(len(text) for text, ids in zip(self.texts, self.ids, strict=True) if ids is None)


class Cutter:
    """Cuts texts before special tokens.

    found: every token that the tokenizer finds in raw text; the leftmost wins, then the longest, as in the
    tokenizer. at: those of them to cut at.
    """

    def __init__(self, found: Collection[str], at: Collection[str]) -> None:
        """ValueError without tokens to cut at."""
        if not at or not all(found):
            raise ValueError("a cutter needs tokens to cut at, and none that is empty")
        self._pattern = re.compile(
            "|".join(re.escape(token) for token in sorted(found, key=lambda token: (-len(token), token)))
        )
        self._at = None if set(found) == set(at) else frozenset(at)

    def cut(self, text: str) -> list[str]:
        """Return segments whose concatenation is the text. All but the first begin with a special token. None
        is empty.
        """
        borders = [0]
        for match in self._pattern.finditer(text):
            if self._at is None or match[0] in self._at:
                borders.append(match.start())
                if len(borders) > MAX_SEGMENTS:
                    return [text]
        borders.append(len(text))
        return [text[start:end] for start, end in pairwise(borders) if start < end]


class SegmentCache:
    """State: ids of texts, least recently used first, at most `budget` bytes of texts and ids together.
    Thread-safe.

    `owner` separates the vocabularies that share the budget. A `scope` separates callers, so that none can
    learn from the time of a lookup what others sent. `words` is part of the budget, at most a quarter; texts
    make room for words.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: OrderedDict[tuple[int, str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.words = WordCache(budget // _WORDS_SHARE)
        self.bytes = 0
        """of texts and their ids, without words"""
        self.known_characters = self.new_characters = 0
        """of all texts looked up: characters with known ids (by text or by words), and encoded characters"""

    def look_up(self, owner: int, texts: Sequence[str], scope: str = "") -> Segments:
        """Return each text with its ids, if they are known."""
        found: list[array[int] | None] = []
        with self._lock:
            for text in texts:
                key = (owner, scope, text)
                ids = self._kept.get(key)
                if ids is not None:
                    self.known_characters += len(text)
                    self._kept.move_to_end(key)
                found.append(ids)
        return Segments(list(texts), found)

    def count(self, known: int, new: int) -> None:
        """Count the characters of texts not found as a whole: those of known words, and those encoded."""
        with self._lock:
            self.known_characters += known
            self.new_characters += new

    def keep(self, owner: int, made: "Iterable[tuple[str, array[int]]]", scope: str = "") -> None:
        """Store new ids. The least recently used ones are evicted."""
        with self._lock:
            for text, ids in made:
                size = _size(text, ids)
                if size * _LARGEST_SHARE > self._budget or (owner, scope, text) in self._kept:
                    continue
                self._kept[owner, scope, text] = ids
                self.bytes += size
            while self._kept and self.bytes + self.words.bytes > self._budget:
                (_, _, text), ids = self._kept.popitem(last=False)
                self.bytes -= _size(text, ids)

    def forget(self, owner: int) -> None:
        """Drop the entries of a vocabulary that is gone."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == owner]:
                self.bytes -= _size(key[2], self._kept.pop(key))
        self.words.forget(owner)

    def __len__(self) -> int:
        return len(self._kept)


def _size(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + ids.itemsize * len(ids) + _ENTRY_BYTES
