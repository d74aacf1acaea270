"""Between text and token ids: the checkpoint's tokenizer, incremental detokenising, stop strings.

Every state here is a function of the ids fed so far and nothing else. Feeding the ids that a broken stream had emitted therefore
restores it exactly, whatever was held back when it broke.
"""

import codecs
import io
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

_ARCHIVED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ARCHIVE_TIME = (1980, 1, 1, 0, 0, 0)
"""fixed, so that equal tokenizers make equal archives"""
_LONGEST_CHARACTER = 8
"""ids after which a window detokeniser stops waiting for the rest of a character: UTF-8 has 4 bytes, one may be one id"""


class Detokenizer(Protocol):
    """Turns ids into text as they come. Never raises, whatever the ids; holds back the bytes of an unfinished character."""

    def feed(self, token: int) -> str: ...

    def finish(self) -> str:
        """What is held back still; an unfinished character becomes U+FFFD."""
        ...


class CheckpointTokenizer:
    """The tokenizer of a checkpoint folder. OSError or ValueError when a file is missing or unusable; the text names it."""

    def __init__(self, folder: Path) -> None:
        definition = _read_json(folder / "tokenizer.json")
        self._tokenizer = _tokenizer(folder / "tokenizer.json")
        config = _read_json(folder / "config.json")
        self.vocabulary: int = config.get("vocab_size") or self._tokenizer.get_vocab_size(with_added_tokens=True)
        """ids run from 0 to this, exclusive: the model's rows, which may exceed the tokenizer's entries"""
        self.eos = _eos(folder, config)
        self._special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self._bytes = _token_bytes(self._tokenizer, self.vocabulary) if _is_byte_level(definition.get("decoder")) else None
        self.archive = _archive(folder)
        """zip of tokenizer.json, tokenizer_config.json and the chat template if it has a file of its own"""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer itself puts around a prompt."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokeniser; exact for byte-level tokenizers, by a moving window for others."""
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, self._special)
        return WindowDetokenizer(self._tokenizer)

    def piece(self, token: int) -> str:
        r"""How log-probabilities name a token: its text, or `bytes:\xe2...` when it is no text by itself (OpenAI's form)."""
        if self._bytes is None or token in self._special:
            spelt: str | None = self._tokenizer.id_to_token(token)
            return (spelt or "").replace("\u2581", " ")
        raw = self._bytes[token] if token < len(self._bytes) else b""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: exactly the text of decoding all ids at once, in constant time per id."""

    def __init__(self, token_bytes: Sequence[bytes], special: set[int]) -> None:
        self._bytes = token_bytes
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._special or token >= len(self._bytes):
            return ""
        return self._decoder.decode(self._bytes[token])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: what a new id adds to the text of the last few ids. Waits for the rest of a character a few ids long."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._said = 0
        """ids of the window whose text is out"""

    def feed(self, token: int) -> str:
        self._window.append(token)
        before, after = self._decode(self._window[: self._said]), self._decode(self._window)
        waiting = len(self._window) - self._said
        if waiting < _LONGEST_CHARACTER and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._window = self._window[-waiting:]
        self._said = waiting
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._decode(self._window[: self._said]), self._decode(self._window)
        self._said = len(self._window)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class StopStrings:
    """Cuts a text at the first stop string to complete, and never lets a part of one out.

    Per stop string one Knuth-Morris-Pratt automaton: its state is the length of the longest end of the text that begins the stop
    string, so the longest state is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """What may be shown of the text so far and was not yet; nothing more once `matched`."""
        if not self._stops:
            return text
        if self.matched:
            return ""
        tail = self._held + text
        for index, letter in enumerate(text, start=len(self._held) + 1):
            longest = self._step(letter)
            if longest:
                self.matched = True
                self._held = ""
                return tail[: index - longest]
        keep = len(tail) - max(self._states)
        self._held = tail[keep:]
        return tail[:keep]

    def finish(self) -> str:
        """The text ends here: what was held back, as it turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, letter: str) -> int:
        """Length of the longest stop string that ends with this letter, 0 if none does."""
        longest = 0
        for number, (stop, failure) in enumerate(self._stops):
            state = self._states[number]
            while state and stop[state] != letter:
                state = failure[state - 1]
            state += stop[state] == letter
            if state == len(stop):
                longest = max(longest, state)
                state = failure[state - 1]
            self._states[number] = state
        return longest


class TextStream:
    """One answer's text as its ids come."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self.decoded = 0
        """characters decoded so far, also those held back: where the next token's text begins"""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; the text ends before it."""
        return self._stops.matched

    def feed(self, token: int) -> str:
        """The text that this id lets out."""
        text = self._detokenizer.feed(token)
        self.decoded += len(text)
        return self._stops.feed(text) if text else ""

    def finish(self) -> str:
        """The answer ends here: whatever is held back and no part of a stop string."""
        return self._stops.feed(self._detokenizer.finish()) + self._stops.finish()

    def resume(self, emitted: Iterable[int]) -> None:
        """Restore the state behind ids that were emitted before, their text included."""
        for token in emitted:
            self.feed(token)


def _failure_table(stop: str) -> list[int]:
    """For each length - 1 of a beginning of `stop`: the longest shorter beginning that also ends it."""
    table = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = table[state - 1]
        state += stop[state] == stop[index]
        table[index] = state
    return table


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON object ({error}); fetch the checkpoint again") from error


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path}: not a tokenizer ({error}); fetch the checkpoint again") from error


def _eos(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end an answer: generation_config.json's, else config.json's."""
    generation = folder / "generation_config.json"
    chosen = _read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = config.get("eos_token_id") if chosen is None else chosen
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _token_bytes(tokenizer: Tokenizer, vocabulary: int) -> list[bytes]:
    """Bytes of every id, as the ByteLevel decoder has them: letters of its alphabet are bytes, any other token is its own UTF-8."""
    letters = byte_letters()
    spelt = (tokenizer.id_to_token(token) or "" for token in range(max(vocabulary, tokenizer.get_vocab_size(with_added_tokens=True))))
    return [bytes(letters[letter] for letter in token) if all(letter in letters for letter in token) else token.encode() for token in spelt]


def byte_letters() -> dict[str, int]:
    """letter -> byte of the byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), ord("\u00ff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _archive(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _ARCHIVED:
            if (folder / name).exists():
                archive.writestr(zipfile.ZipInfo(name, _ARCHIVE_TIME), (folder / name).read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()
