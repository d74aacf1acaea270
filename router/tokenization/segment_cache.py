"""Token ids of conversations by segments: a text is cut before its special tokens, and what was seen before is not encoded again.

Exact where the tokenizer finds its special tokens in the raw text, before it normalises and splits the rest: then what stands behind one is
encoded without regard to what stood before it. A segment begins with its special token, so that its text is never taken for the beginning
of the whole. `tokenizer` proves this for each vocabulary before it relies on it.
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

MOST_SEGMENTS = 4096
"""A text with more is encoded whole: it is no conversation, and so many single calls would cost more than they spare."""
_ENTRY_BYTES = 256
"""of the cache's own, per entry: key, links, the array's head"""
_LARGEST_SHARE = 4
"""An entry larger than the budget over this is not kept: it would push out everybody else's."""
_WORDS_SHARE = 4
"""Words have at most the budget over this."""


class Segments(msgspec.Struct, frozen=True):
    """A text in segments, in order; `ids` u32 arrays, None where they have yet to be made."""

    texts: list[str]
    ids: "list[array[int] | None]"

    @property
    def unknown(self) -> int:
        """Characters that have yet to be encoded."""
        return sum(len(text) for text, ids in zip(self.texts, self.ids, strict=True) if ids is None)


class Cutter:
    """Cuts texts before special tokens.

    found: every token that the tokenizer finds in raw text; the longest of those that begin leftmost counts, as in the tokenizer.
    at: those of them to cut at.
    """

    def __init__(self, found: Collection[str], at: Collection[str]) -> None:
        """ValueError when there is nothing to cut at."""
        if not at or not all(found):
            raise ValueError("a cutter needs tokens to cut at, and none that is empty")
        self._pattern = re.compile("|".join(re.escape(token) for token in sorted(found, key=lambda token: (-len(token), token))))
        self._at = None if set(found) == set(at) else frozenset(at)

    def cut(self, text: str) -> list[str]:
        """Segments whose concatenation is the text; all but the first begin with a special token. None is empty."""
        borders = [0]
        for match in self._pattern.finditer(text):
            if self._at is None or match[0] in self._at:
                borders.append(match.start())
                if len(borders) > MOST_SEGMENTS:
                    return [text]
        borders.append(len(text))
        return [text[start:end] for start, end in pairwise(borders) if start < end]


class SegmentCache:
    """State: ids of texts, least recently used first, at most `budget` bytes of both together. Any thread may call.

    `owner` tells the vocabularies apart that share the budget; a `scope`, the callers who may learn from a look-up's time what others sent.
    `words` are part of it, a quarter at most; texts make room for them.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: OrderedDict[tuple[int, str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.words = WordCache(budget // _WORDS_SHARE)
        self.bytes = 0
        """of texts and their ids, without words"""
        self.known_characters = self.new_characters = 0
        """of all texts that were looked up: those whose ids were known, by text or by words, and those that were encoded"""

    def look_up(self, owner: int, texts: Sequence[str], scope: str = "") -> Segments:
        """Each text with its ids, where they are known."""
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
        """Characters of texts that were not known themselves: of known words, and encoded."""
        with self._lock:
            self.known_characters += known
            self.new_characters += new

    def keep(self, owner: int, made: "Iterable[tuple[str, array[int]]]", scope: str = "") -> None:
        """Remember ids that were made; the least recently used ones go."""
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
        """Drop what belongs to a vocabulary that is gone."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == owner]:
                self.bytes -= _size(key[2], self._kept.pop(key))
        self.words.forget(owner)

    def __len__(self) -> int:
        return len(self._kept)


def _size(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + ids.itemsize * len(ids) + _ENTRY_BYTES
