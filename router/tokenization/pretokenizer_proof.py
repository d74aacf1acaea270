r"""Proof that a tokenizer cuts a text before every space that follows a visible character, regardless of the
context. Such tokenizers are recognised by their structure.

Claim. Let a text be xy, where x does not end with whitespace and y begins with " " (U+0020). Then the
pre-tokens of xy are those of x followed by those of y.

Proof for a pattern whose alternatives are all in `_ALTERNATIVES`, with `\s+` among them:
1. Within a match, a space that is not the first character is matched only by a class or repetition of
   whitespace, so the preceding character of the match is whitespace, too. Hence no match reaches from x into
   y.
2. No alternative looks behind or is anchored, and a lookahead follows only whitespace, never the end of x.
   Hence a match within x succeeds or fails alike if x is followed by " " or by nothing, because y's space is
   rejected as the end is.
3. Text that no alternative matches stays a pre-token of its own up to the next match, and the space is always
   matched by `\s+`.

So a cut is made between x and y, and y is matched as if it stood alone. A pattern without `\s+`, or one that
cuts digits, satisfies (1) and (2): it cuts within x and y as if they were separate, but perhaps not between
them. In a sequence this keeps the claim true for every other member, whose pieces still end with x and begin
with y or span both.

NFC changes x and y as if they were separate: a space composes with nothing before it, only whitespace becomes
whitespace, and nothing becomes U+0020. Added tokens are found first, and none that could reach from x into y
is allowed. Byte-level BPE encodes each pre-token independently; with all 256 bytes in the vocabulary its ids
are lossless.
"""

import re
from array import array
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import msgspec
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from router.tokenization.word_cache import WORD

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_ENDINGS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_ALTERNATIVES = (
    # GPT-2
    *_ENDINGS.split("|"),
    r" ?\p{L}+",
    r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+",
    r"\s+(?!\S)",
    r"\s+",
    # Llama-3, Qwen2 and GPT-4
    f"(?i:{_ENDINGS})",
    f"(?:{_ANY_ENDINGS})",
    _BEFORE + r"\p{L}+",
    _BEFORE + r"[\p{L}\p{M}]+",
    r"\p{N}",
    r"\p{N}+",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    # o200k, and Mistral's without endings
    *(
        f"{_BEFORE}{word}{ending}"
        for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
        for ending in ("", f"(?i:{_ENDINGS})?", f"(?:{_ANY_ENDINGS})?")
    ),
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    # DeepSeek-V3
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
)
_ONE = "|".join(re.escape(one) for one in sorted(_ALTERNATIVES, key=len, reverse=True))
_KNOWN = re.compile(f"(?:{_ONE})(?:\\|(?:{_ONE}))*")
_ENDS_IN_SPACES = r"|\s+"
_SNIPPETS = (
    "a",
    "word",
    "Word",
    "WORD",
    "camelCase",
    "ABc",
    "it's",
    "'s",
    "'S",
    "we'LL",
    "don't'",
    "'",
    "x'",
    "1",
    "12345",
    "a1",
    "1a",
    "3.14",
    "½",
    "é",
    "e\u0301",
    "\u0301",
    "\u200d",
    "👩\u200d🚀",
    "漢字",
    "カナ",
    "ǅ",
    chr(0x17F),
    "ß",
    "\u1e9b\u0323",
    "\u212a",
    "{",
    "}",
    "):",
    "//",
    "...",
    "<|",
    "\\",
    '"',
    "_",
    "~",
    "!",
    "a/",
    ",\n",
    "",
    " ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "x\n",
    "\n x",
    "\u3000",
    "\u00a0",
    "\u2028",
    "\x85",
    "x\u2003",
    "\x00",
    "\ufffd",
    "\x7f",
    "words " * 3,
    "q" * 70,
)
"""Texts that pre-tokenizers treat in special ways. Probes put single spaces between every two of them."""


def why_not(tokenizer: Tokenizer) -> str | None:
    """Return the reason why a tokenizer is not proven to cut before spaces; None if it is."""
    model = tokenizer.model
    if (
        not isinstance(model, models.BPE)
        or model.dropout
        or model.unk_token
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
    ):
        return "its model is not plain byte-level BPE"
    if model.byte_fallback or any(
        model.token_to_id(byte) is None for byte in pre_tokenizers.ByteLevel.alphabet()
    ):
        return "its vocabulary does not have every byte"
    if not (tokenizer.normalizer is None or isinstance(tokenizer.normalizer, normalizers.NFC)):
        return "its normalizer may change spaces"
    unchanged = leaves_unchanged(tokenizer)
    for token in tokenizer.get_added_tokens_decoder().values():
        if (
            token.lstrip
            or token.rstrip
            or token.single_word
            or re.search(r"\S ", token.content)
            or not unchanged(token.content)
        ):
            return f"its token {token.content!r} may reach across a space or be written in more than one way"
    return (
        None
        if _cuts(tokenizer.pre_tokenizer)
        else "its pre-tokenizer is none of those known to cut before spaces"
    )


def byte_sizes(tokenizer: Tokenizer) -> "array[int]":
    """Return the UTF-8 bytes that each id of a byte-level vocabulary stands for; ids without a token: 0."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    sizes = array("I", bytes(4 * (max([*vocabulary.values(), *added], default=-1) + 1)))
    for token, at in vocabulary.items():
        sizes[at] = len(token)
    for at, found in added.items():
        sizes[at] = len(found.content.encode())
    return sizes


def leaves_unchanged(tokenizer: Tokenizer) -> Callable[[str], bool]:
    """Return a function that is true for texts that the tokenizer's normalizer does not change."""
    normalizer = tokenizer.normalizer
    if normalizer is None:
        return lambda text: True
    return lambda text: bool(normalizer.normalize_str(text) == text)


def first_wrong(
    encode: Callable[[str], list[int]], sizes: "array[int]", unchanged: Callable[[str], bool]
) -> str | None:
    """Return a probe whose ids differ if it is encoded word by word, or whose ids do not stand for its number
    of bytes; None without such a probe.
    """
    words: dict[str, list[int]] = {}
    for text in _probes():
        ids = encode(text)
        cut = WORD.findall(text)
        for word in cut:
            if word not in words:
                words[word] = encode(word)
        if [one for word in cut for one in words[word]] != ids or (
            unchanged(text) and sum(sizes[one] for one in ids) != len(text.encode())
        ):
            return text
    return None


def _probes() -> list[str]:
    """Return every two snippets next to each other, one row per snippet."""
    return [" ".join(one for pair in product((snippet,), _SNIPPETS) for one in pair) for snippet in _SNIPPETS]


def _cuts(pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> bool:
    """Return True if the last member maps characters to bytes, and it or one before it has a pattern that is
    proven to cut.
    """
    if pre_tokenizer is None:
        return False
    state = msgspec.json.decode(pre_tokenizer.__getstate__(), type=dict[str, Any])
    *first, last = state.get("pretokenizers") or [state]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") is not False:
        return False
    patterns = [_pattern(member) for member in first]
    return None not in patterns and (
        last.get("use_regex") is True or any(f"|{pattern}".endswith(_ENDS_IN_SPACES) for pattern in patterns)
    )


def _pattern(member: Mapping[str, Any]) -> str | None:
    """Return the pattern that a member of a sequence isolates, if it is a known one."""
    if member.get("type") == "Digits":
        return r"\p{N}" if member.get("individual_digits") is True else r"\p{N}+"
    pattern = member.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if (
        member.get("type") != "Split"
        or member.get("behavior") != "Isolated"
        or member.get("invert") is not False
    ):
        return None
    return regex if isinstance(regex, str) and _KNOWN.fullmatch(regex) else None
