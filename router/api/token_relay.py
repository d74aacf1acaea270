"""The usual token of a stream, passed on where it arrives."""

import msgspec

from fleet.completions.token_frames import TokenPiece
from router.http.asgi_response import WriteNow
from router.openai_api.completion_state import CompletionState

_ENCODER = msgspec.json.Encoder()


class TokenRelay:
    """Passes pieces of one choice on to its client, while nothing else has to be done for them.

    It holds all that this takes: when the next token of a stream arrives, its memory is cold, so what a token
    costs is the number of objects that are read for it.
    """

    __slots__ = ("_after", "_before", "_emitted", "_sent", "_write_now", "heard_at", "until")

    def __init__(self, state: CompletionState, around: tuple[bytes, bytes], write_now: WriteNow) -> None:
        """around: bytes of a chunk before and after its text."""
        self._emitted, self._sent = state.emitted, state.sent
        self._before, self._after = around
        self._write_now = write_now
        self.until = -1
        """number of emitted tokens up to which pieces are taken; -1: none is"""
        self.heard_at = 0.0
        """loop time of the last piece"""

    def take(self, piece: TokenPiece, now: float) -> bool:
        """Pass a piece on. False, with nothing done: it ends the answer, comes after `until`, has ids that
        are none, or the client reads too slowly.
        """
        ids, emitted = piece.token_ids, self._emitted
        had = len(emitted)
        if piece.end is not None or had + len(ids) > self.until:
            return False
        try:
            emitted.extend(ids)
        except OverflowError:
            del emitted[had:]
            return False
        text = piece.text
        if text:
            if not self._write_now(b"%b%b%b" % (self._before, _ENCODER.encode(text), self._after)):
                del emitted[had:]
                return False
            self._sent += text.encode("utf-8", "surrogatepass")
        self.heard_at = now
        return True
