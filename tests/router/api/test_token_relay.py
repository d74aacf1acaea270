"""A relay passes on what the stream itself would have passed on, or leaves it alone."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from fleet.completions import Choice
from fleet.completions.token_frames import PieceEnd, TokenPiece
from router.api.token_relay import TokenRelay
from router.openai_api.completion_state import CompletionState
from router.openai_api.request_schema import RequestDecoder, sampling
from router.openai_api.response_format import ChatFormat, ResponseHead, StreamedResponse

SETTINGS = sampling(
    RequestDecoder().chat(b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'), 1
)
PIECES = st.builds(
    TokenPiece,
    st.just(1),
    st.lists(st.integers(0, 2**33), max_size=3),
    st.text(),
    st.sampled_from([None, None, None, PieceEnd(finish_reason="stop")]),
)


class Client:
    """Takes pieces of the body, or not."""

    def __init__(self) -> None:
        self.body = b""
        self.reads = True

    @property
    def write_now(self) -> Callable[[bytes], object] | None:
        return self._write if self.reads else None

    def _write(self, chunk: bytes) -> None:
        size, _, rest = chunk.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2
        self.body += rest[:-2]


def state() -> CompletionState:
    return CompletionState(0, [1], SETTINGS, 12, 5, "m")


def answer() -> StreamedResponse:
    made = StreamedResponse(ChatFormat(), ResponseHead(id="a", model="m", created=1), include_usage=False)
    made.add(0, Choice(text="first"))
    return made


@given(pieces=st.lists(st.tuples(PIECES, st.booleans())))
def test_a_relay_does_as_the_stream_or_nothing(pieces: list[tuple[TokenPiece, bool]]) -> None:
    client, relayed, usual, expected = Client(), state(), state(), b""
    around = answer().around(0)
    assert around is not None
    relay = TokenRelay(relayed, around, client)
    relay.until = relayed.max_tokens
    for at, (piece, client.reads) in enumerate(pieces):
        if relay.take(piece, float(at)):
            assert piece.end is None
            usual.add(piece.token_ids, piece.text)
            expected += answer().add_tokens(0, piece.token_ids, piece.text)
            assert relay.heard_at == at
        else:
            assert (
                piece.end is not None
                or len(usual.emitted) + len(piece.token_ids) > relay.until
                or any(one >= 2**32 for one in piece.token_ids)
                or (not client.reads and piece.text)
            )
        assert (client.body, relayed.emitted, relayed.sent) == (expected, usual.emitted, usual.sent)


def test_a_closed_relay_takes_nothing() -> None:
    client, one = Client(), state()
    relay = TokenRelay(one, (b"<", b">"), client)
    assert not relay.take(TokenPiece(1, [5], "a"), 1.0)
    assert (client.body, list(one.emitted)) == (b"", [])
