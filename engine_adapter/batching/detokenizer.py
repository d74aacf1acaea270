"""Incremental detokenization and stop strings. Pure.

All state is a function of the IDs fed so far. So feeding the IDs that a broken stream had emitted restores it
exactly, including text that was held back at the break.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

_LONGEST_CHARACTER = 8
"""IDs after which a window detokenizer stops waiting for the rest of a character. UTF-8 has up to 4 bytes,
and one byte may be one ID."""


class PendingIds(msgspec.Struct, frozen=True, array_like=True):
    """IDs and bytes that a detokenizer holds back."""

    pending: bytes = b""
    """Bytes of an unfinished character."""
    window: tuple[int, ...] = ()
    emitted: int = 0


class TextState(msgspec.Struct, frozen=True, array_like=True):
    """State of a `TextStream`, for another process to continue with."""

    ids: PendingIds
    stops: tuple[int, ...]
    """Letters of each stop string that the text ends with."""
    held: str
    matched: bool
    decoded: int


class Detokenizer(Protocol):
    """Convert IDs to text incrementally. Never raises, whatever the IDs. Holds back the bytes of an
    unfinished character."""

    @property
    def state(self) -> PendingIds: ...

    def restore(self, state: PendingIds) -> None:
        """Continue from the state of another detokenizer of the same tokenizer."""
        ...

    def feed(self, token: int) -> str: ...

    def finish(self) -> str:
        """Return the text still held back. An unfinished character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """Detokenizer for tokenizers whose tokens are byte strings. Gives exactly the text of decoding all IDs at
    once, in constant time per ID."""

    def __init__(self, token_bytes: Sequence[bytes], special: set[int]) -> None:
        self._bytes = token_bytes
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def state(self) -> PendingIds:
        return PendingIds(pending=self._decoder.getstate()[0])

    def restore(self, state: PendingIds) -> None:
        self._decoder.setstate((state.pending, 0))

    def feed(self, token: int) -> str:
        if token in self._special or token >= len(self._bytes):
            return ""
        return self._decoder.decode(self._bytes[token])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for all other tokenizers: emits what a new ID adds to the text of the last few IDs. Waits a
    few IDs for the rest of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0
        """IDs of the window whose text has been emitted."""

    @property
    def state(self) -> PendingIds:
        return PendingIds(window=tuple(self._window), emitted=self._emitted)

    def restore(self, state: PendingIds) -> None:
        self._window, self._emitted = list(state.window), state.emitted

    def feed(self, token: int) -> str:
        self._window.append(token)
        before, after = self._decode(self._window[: self._emitted]), self._decode(self._window)
        waiting = len(self._window) - self._emitted
        if waiting < _LONGEST_CHARACTER and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._window = self._window[-waiting:]
        self._emitted = waiting
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._decode(self._window[: self._emitted]), self._decode(self._window)
        self._emitted = len(self._window)
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class StopStrings:
    """Cut a text at the first complete stop string, and never emit a part of one.

    Each stop string has one Knuth-Morris-Pratt automaton. Its state is the length of the longest suffix of
    the text that is a prefix of the stop string. So the largest state is exactly the length of text to hold
    back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""
        self.matched = False

    @property
    def state(self) -> tuple[tuple[int, ...], str]:
        """Letters of each stop string that the text ends with, and the text held back."""
        return tuple(self._states), self._held

    def restore(self, states: Sequence[int], held: str, matched: bool) -> None:
        """Continue from the state of another cut of the same stop strings."""
        self._states, self._held, self.matched = list(states), held, matched

    def feed(self, text: str) -> str:
        """Add text and return what can be emitted now. Returns nothing after a match."""
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
        """End the text. Return the held-back text, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, letter: str) -> int:
        """Length of the longest stop string that ends with this letter. 0 if there is none."""
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
    """Incremental text of one answer."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self.decoded = 0
        """Characters decoded so far, including held-back ones. This is the offset of the next token's
        text."""

    @property
    def stopped(self) -> bool:
        """True once a stop string was found. The text ends before it."""
        return self._stops.matched

    def feed(self, token: int) -> str:
        """Add a token ID and return the text that can be emitted now."""
        text = self._detokenizer.feed(token)
        self.decoded += len(text)
        return self._stops.feed(text) if text else ""

    @property
    def state(self) -> TextState:
        """State after the IDs fed so far."""
        stops, held = self._stops.state
        return TextState(self._detokenizer.state, stops, held, self._stops.matched, self.decoded)

    def restore(self, state: TextState) -> None:
        """Continue from the state of another stream with the same tokenizer and stop strings."""
        self._detokenizer.restore(state.ids)
        self._stops.restore(state.stops, state.held, state.matched)
        self.decoded = state.decoded

    def finish(self) -> str:
        """End the answer. Return the held-back text that is not part of a stop string."""
        return self._stops.feed(self._detokenizer.finish()) + self._stops.finish()

    def resume(self, emitted: Iterable[int]) -> None:
        """Restore the state after IDs that were emitted before. Their text is discarded."""
        for token in emitted:
            self.feed(token)


def _failure_table(stop: str) -> list[int]:
    """KMP failure table of `stop`: for each prefix, at index length - 1, the length of its longest proper
    prefix that is also its suffix."""
    table = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = table[state - 1]
        state += stop[state] == stop[index]
        table[index] = state
    return table


def byte_letters() -> dict[str, int]:
    """Byte-level alphabet, letter -> byte. Printable Latin-1 characters stand for themselves. The other bytes
    map to U+0100 and above, in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\u00a1"), ord("\u00ac") + 1),
        *range(ord("\u00ae"), ord("\u00ff") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
