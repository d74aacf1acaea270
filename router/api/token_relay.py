"""The usual token of a stream, passed on where it arrives."""

import msgspec

from fleet.completions.token_frames import TokenPiece
from router.http.asgi_response import ChunkedBody
from router.openai_api.completion_state import CompletionState

_ENCODER = msgspec.json.Encoder()


class TokenRelay:
    """Passes pieces of one choice on to its client, while nothing else has to be done for them.

    It holds all that this takes: when the next token of a stream arrives, its memory is cold, so what a token
    costs is the number of objects that are read for it.
    """

    __slots__ = ("_after", "_around", "_before", "_body", "_emitted", "_sent", "heard_at", "until")

    def __init__(self, state: CompletionState, around: tuple[bytes, bytes], body: ChunkedBody) -> None:
        """around: bytes of a piece of the body before and after its text."""
        self._emitted, self._sent = state.emitted, state.sent
        self._before, self._after = around[0], around[1] + b"\r\n"
        self._around = len(around[0]) + len(around[1])
        self._body = body
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
            shown = _ENCODER.encode(text)
            size = self._around + len(shown)
            write = self._body.write_now
            if write is None:
                del emitted[had:]
                return False
            write(b"%x\r\n%b%b%b" % (size, self._before, shown, self._after))
            self._sent += text.encode("utf-8", "surrogatepass")
        self.heard_at = now
        return True
