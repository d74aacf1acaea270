"""Token frames: the tokens of all streams between one router and one rank, together, once a step.

A router opens one connection per rank (`GET PATH`), whose answer never ends: one line of JSON per frame, a
list of `TokenPiece`. Its head names the connection in `HEADER`. A completion request with the header
`HEADER: connection/number` may be answered over it: then the response has `HEADER` as well, its body stays
empty, and it ends after the answer's last piece. Closing it cancels the request, as always. A rank that knows
no token frames, or not this connection, ignores the header and streams events.
"""

import msgspec

from fleet.completions import Usage

PATH = "/v1/token_frames"
HEADER = "x-roost-token-frames"


class PieceEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """End of an answer: its finish reason and usage, or the error that ended it early."""

    finish_reason: str | None = None
    usage: Usage | None = None
    error: str = ""


class TokenPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Growth of one answer."""

    number: int
    """number of the answer, chosen by the router"""
    token_ids: list[int]
    text: str
    end: PieceEnd | None = None


_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[list[TokenPiece]] = msgspec.json.Decoder(list[TokenPiece])


def encode(pieces: list[TokenPiece]) -> bytes:
    """Encode a frame."""
    return _ENCODER.encode(pieces) + b"\n"


def decode(line: bytes) -> list[TokenPiece]:
    """Decode a frame without its line end. ValueError if it is none."""
    return _DECODER.decode(line)


class FrameReader:
    """Decodes arriving bytes. ValueError for bytes that are no frame, or a frame longer than `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._rest = b""
        self._max_bytes = max_bytes

    @property
    def between_frames(self) -> bool:
        """True when no frame has begun."""
        return not self._rest

    def feed(self, data: bytes) -> list[list[TokenPiece]]:
        """Return the frames that are now complete."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a token frame exceeds {self._max_bytes} bytes")
        return list(map(decode, lines))


def named(header: str | None) -> tuple[str, int] | None:
    """Return (connection, number) of a request's header; None without a header of that form."""
    connection, slash, number = (header or "").partition("/")
    return (connection, int(number)) if slash and number.isascii() and number.isdigit() else None
