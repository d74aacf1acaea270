"""Answers of the simulated engine: words that depend only on the prompt, the seed and the position. Includes
their tokenizer. Pure.

A token ID is a byte, a word with the space before it, or a prefix of one. Every prefix of a word is an ID
with its own merge. So encoding an answer gives the IDs it was made of, and the next turn of a conversation
finds its prefix in the KV cache.
"""

import struct
from array import array
from collections.abc import Sequence
from math import log

import msgspec
import xxhash
from tokenizers import Tokenizer

from engine_adapter.batching.detokenizer import ByteDetokenizer, byte_letters
from engine_adapter.batching.tokenizer_archive import archived

WORDS = (
    "the a of to and in it is on by at as we or if no so up roost bird nest wing flock perch owl heron crane"
    " finch robin swift raven eagle wren dove stork gull tern lark river stone cloud forest valley island"
    " harbour bridge tower garden window market kitchen lantern ladder engine signal letter number small"
    " quiet early late warm cold bright heavy simple open hidden narrow gentle ancient silver golden green"
    " goes comes rests waits learns carries gathers follows answers listens returns builds keeps finds sends"
    " brings moves turns slowly often always seldom together again before after under over between beyond"
    " because until while where there"
).split()
END = "<|end|>"
VOCABULARY = 131_072
"""Valid token IDs in a prompt. IDs beyond the tokenizer's entries have no text and otherwise work like any
other."""
TEMPLATE = (
    "{%- for message in messages -%}{{ message['role'] + ': ' }}{%- if message['content'] is string -%}{{"
    " message['content'] }}{%- else -%}{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor"
    " -%}{%- endif -%}{{ '\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant:' }}{%-"
    " endif -%}"
)
_STREAM = 0x73696D
"""xxh3 seed of all draws in this module."""
_KEY = struct.Struct("<QQ")
_SENTENCE = 11
"""Approximate number of words per sentence."""


class WordTokenizer:
    """Tokenizer of the simulated engine. `archive` is for routers."""

    def __init__(self) -> None:
        definition = msgspec.json.encode(_definition())
        settings = msgspec.json.encode(
            {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
        )
        self._tokenizer = Tokenizer.from_str(definition.decode())
        letters = byte_letters()
        spelt = _vocabulary()
        self._bytes = [
            b"" if token == END else bytes(letters[letter] for letter in token)
            for token in sorted(spelt, key=spelt.__getitem__)
        ]
        self.end: int = spelt[END]
        self.words = array("I", [spelt["\u0120" + word] for word in WORDS])
        self.full_stop: int = spelt["."]
        self.archive = archived({"tokenizer.json": definition, "tokenizer_config.json": settings})

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of a text."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def piece(self, token: int) -> str:
        """Return the text of a token ID, for log-probabilities."""
        return self._bytes[token].decode("utf-8", "backslashreplace") if token < len(self._bytes) else ""

    def detokenizer(self) -> ByteDetokenizer:
        """Create an exact incremental detokenizer."""
        return ByteDetokenizer(self._bytes, {self.end})


class Script:
    """The answer to one prompt. Every token is a function of (prompt IDs, seed, position), so any rank can
    continue an interrupted answer."""

    def __init__(self, tokenizer: WordTokenizer, prompt: Sequence[int], seed: int, mean_tokens: int) -> None:
        """prompt: the client's own IDs, without the output that a continuation carries. mean_tokens: mean
        length of answers with an end. 0: answers never end."""
        self._tokenizer = tokenizer
        self._start = len(prompt)
        self._key = xxhash.xxh3_64_intdigest(
            array("I", prompt).tobytes(), (seed ^ _STREAM) & 0xFFFFFFFFFFFFFFFF
        )
        self._end = self._start + _length(self._key, mean_tokens) if mean_tokens else None

    def token(self, position: int) -> int:
        """Return the token ID at a position, counted from the start of the prompt."""
        if self._end is not None and position >= self._end:
            return self._tokenizer.end
        drawn = xxhash.xxh3_64_intdigest(_KEY.pack(self._key, position), _STREAM)
        if position > self._start and (drawn >> 40) % _SENTENCE == 0:
            return self._tokenizer.full_stop
        words = self._tokenizer.words
        return words[drawn % len(words)]


def _length(key: int, mean: int) -> int:
    """Tokens before the end, exponentially distributed, at least one."""
    chance = ((xxhash.xxh3_64_intdigest(_KEY.pack(key, 0), ~_STREAM & 0xFFFFFFFF) >> 11) + 1) * 2.0**-53
    return max(1, round(-mean * log(chance)))


def _beginnings() -> list[tuple[str, str]]:
    """Merges: (prefix, next letter) of every word with its space, shorter prefixes first."""
    spelt = ["\u0120" + word for word in WORDS]
    steps = {
        (word[:length], word[length]): None
        for length in range(1, max(map(len, spelt)))
        for word in spelt
        if len(word) > length
    }
    return list(steps)


def _vocabulary() -> dict[str, int]:
    ids = dict(byte_letters())
    for before, letter in _beginnings():
        ids.setdefault(before + letter, len(ids))
    ids[END] = len(ids)
    return ids


def _definition() -> dict[str, object]:
    """Content of tokenizer.json for a byte-level BPE."""
    ids = _vocabulary()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {
        "id": ids.pop(END),
        "content": END,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    merges = [[before, letter] for before, letter in _beginnings()]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "vocab": ids,
        "merges": merges,
        "ignore_merges": False,
        "byte_fallback": False,
    }
    return {
        "version": "1.0",
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
