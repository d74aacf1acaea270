"""Frames that arrive as one chunk, and those that do not."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.completions.token_frames import TokenPiece, encode
from router.upstream.http_client import HttpClient
from router.upstream.token_frames import RankFrames

PIECES = st.builds(TokenPiece, st.integers(1, 2), st.lists(st.integers(0, 2**17)), st.text())


class Answer:
    """Keeps its pieces; its relay takes those with text."""

    heard_at = 0.0

    def __init__(self) -> None:
        self.pieces: list[TokenPiece] = []
        self.relayed: list[TokenPiece] = []

    def piece(self, piece: TokenPiece) -> None:
        self.pieces.append(piece)

    def frames_lost(self, why: str) -> None: ...

    def take(self, piece: TokenPiece, now: float) -> bool:
        if piece.text:
            self.relayed.append(piece)
        return bool(piece.text)


def opened() -> tuple[RankFrames, Answer]:
    client: Any = SimpleNamespace(loop=SimpleNamespace(time=lambda: 1.0))
    frames, answer = RankFrames(cast(HttpClient, client), "http://rank", 1.0, 10_000), Answer()
    frames.name = "frames"
    joined = frames.join(answer, [])
    assert joined == (1, b"frames/1")
    return frames, answer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@given(st.lists(PIECES))
def test_a_frame_that_is_a_chunk_is_delivered(pieces: list[TokenPiece]) -> None:
    frames, answer = opened()
    frames.relay(1, answer)
    assert frames.take(chunk(encode(pieces)), 2.0)
    mine = [piece for piece in pieces if piece.number == 1]
    assert answer.relayed == [piece for piece in mine if piece.text]
    assert answer.pieces == [piece for piece in mine if not piece.text]


def test_pieces_come_to_their_answer_once_it_has_no_relay() -> None:
    frames, answer = opened()
    frames.relay(1, answer)
    frames.relay(1, None)
    assert frames.take(chunk(encode([TokenPiece(1, [1], "a")])), 2.0)
    assert (len(answer.relayed), len(answer.pieces)) == (0, 1)


FRAME = encode([TokenPiece(1, [1], "a")])


@pytest.mark.parametrize(
    "data",
    [
        chunk(FRAME)[:-1],
        chunk(FRAME) + b"5",
        chunk(FRAME) + chunk(FRAME),
        chunk(FRAME + FRAME),
        chunk(FRAME[:-1]),
        chunk(b"[[1,[2],\n"),
        b"0" + chunk(FRAME),
        chunk(b" " * 10_000 + FRAME),
        chunk(b"\n"),
        FRAME,
        b"",
        b"0\r\n\r\n",
    ],
)
def test_anything_else_is_left_to_the_parser(data: bytes) -> None:
    frames, answer = opened()
    assert not frames.take(data, 2.0)
    assert answer.pieces == []
