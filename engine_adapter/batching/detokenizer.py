"""Incremental detokenising and stop strings. Pure.

Every state here is a function of the ids fed so far and nothing else. Feeding the ids that a broken stream had emitted therefore
restores it exactly, whatever was held back when it broke.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

_LONGEST_CHARACTER = 8
"""ids after which a window detokeniser stops waiting for the rest of a character: UTF-8 has 4 bytes, one may be one id"""


class Detokenizer(Protocol):
    """Turns ids into text as they come. Never raises, whatever the ids; holds back the bytes of an unfinished character."""

    def feed(self, token: int) -> str: ...

    def finish(self) -> str:
        """What is held back still; an unfinished character becomes U+FFFD."""
        ...


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


def byte_letters() -> dict[str, int]:
    """letter -> byte of the byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), ord("\u00ff") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
