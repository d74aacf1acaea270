"""Lower bound on the number of tokens of a text, without tokenizing it: no token stands for more bytes than
the longest one of the vocabulary.

The bound holds for lossless tokenizers: byte-level BPE with every byte that UTF-8 uses, whose pre-tokenizers
only cut, whose added tokens strip no spaces around them, and whose normalizer is none or NFC. NFC shortens a
text at most to a third in UTF-8 (U+212A, 3 bytes, becomes K).
"""

from typing import Any

import msgspec
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

_NFC_SHRINKS = 3
_CUTTING = frozenset({"Split", "Digits", "Punctuation", "ByteLevel"})
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most UTF-8 bytes of a text that one id can stand for; None if there is no limit."""
    model, normalizer = tokenizer.model, tokenizer.normalizer
    if (
        not isinstance(model, models.BPE)
        or model.unk_token
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
    ):
        return None
    if not (normalizer is None or isinstance(normalizer, normalizers.NFC)) or not _only_cuts(
        tokenizer.pre_tokenizer
    ):
        return None
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    found_raw = {token.content for token in added if not token.normalized}
    if any(char not in vocabulary and text not in found_raw for text, char in _bytes()):
        return None
    longest = max(*map(len, vocabulary), *(len(token.content.encode()) for token in added), 1)
    return longest if normalizer is None else longest * _NFC_SHRINKS


def _only_cuts(pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> bool:
    """Return True if the last member maps characters to bytes and the members before it remove nothing."""
    if pre_tokenizer is None:
        return False
    described = msgspec.json.decode(pre_tokenizer.__getstate__(), type=dict[str, Any])
    members = described.get("pretokenizers") or [described]
    if any(member.get("type") not in _CUTTING or member.get("behavior") == "Removed" for member in members):
        return False
    return bool(members[-1].get("type") == "ByteLevel")


def _bytes() -> list[tuple[str, str]]:
    """Return each byte that occurs in UTF-8: the text that it is alone ("" for a part of a character), and
    its character in a byte-level vocabulary.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [
        (chr(byte) if byte < 0x80 else "", chars[byte]) for byte in range(256) if byte not in _NEVER_IN_UTF8
    ]
