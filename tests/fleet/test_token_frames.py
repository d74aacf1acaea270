"""The wire form of token frames."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.completions import Usage
from fleet.completions.token_frames import FrameReader, PieceEnd, TokenPiece, encode, named

ENDS = st.sampled_from(
    [
        None,
        PieceEnd(finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)),
        PieceEnd(error="lost\nit"),
    ]
)
PIECES = st.builds(TokenPiece, st.integers(0, 2**40), st.lists(st.integers(0, 2**17)), st.text(), ENDS)


@given(frames=st.lists(st.lists(PIECES)), cuts=st.lists(st.integers(0, 500)))
def test_frames_are_read_as_they_were_written_wherever_they_are_cut(
    frames: list[list[TokenPiece]], cuts: list[int]
) -> None:
    data, reader, found = b"".join(map(encode, frames)), FrameReader(10**6), []
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in pairwise(edges):
        found += reader.feed(data[begin:end])
    assert found == frames


def test_bytes_that_are_no_frame_are_refused() -> None:
    with pytest.raises(ValueError, match=r"truncated|malformed"):
        FrameReader(100).feed(b"[[1,[2],\n")
    with pytest.raises(ValueError, match="exceeds 100 bytes"):
        FrameReader(100).feed(b"[" * 101)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("abc/12", ("abc", 12)),
        ("abc/", None),
        ("abc", None),
        ("", None),
        (None, None),
        ("a/-1", None),
        ("a/\u00b2", None),
    ],
)
def test_a_header_names_a_connection_and_a_number_or_is_ignored(
    header: str | None, found: tuple[str, int] | None
) -> None:
    assert named(header) == found
