"""A relay passes on whole events unchanged, or leaves them alone."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from router import kernels
from router.passthrough.event_relay import EventRelay


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = b'data: {"choices":[{"delta":{"content":" word"}}]}\n\n'


class Body:
    """Body of a response, which keeps what is written; its client may read too slowly for any."""

    def __init__(self, *, reads: bool) -> None:
        self.written: list[bytes] = []
        self.write_now: Callable[[bytes], object] | None = self.written.append if reads else None


@pytest.fixture(params=["compiled", "python"], autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    with kernels.python_form() if request.param == "python" else nullcontext():
        yield


def relayed(data: bytes, *, until: int = 100, reads: bool = True) -> tuple[bool, list[bytes], EventRelay]:
    body = Body(reads=reads)
    relay = EventRelay(body)
    relay.until = until
    return relay.take(data, 5.0), body.written, relay


@pytest.mark.parametrize("size", [0, 8, 247, 248, 4087, 100_000])
def test_a_chunk_of_whole_events_passes_unchanged(size: int) -> None:
    data = chunk(b"data: %b\n\n" % (b"x" * size))
    taken, written, relay = relayed(data)
    assert (taken, written, relay.events, relay.heard_at) == (True, [data], 1, 5.0)


def test_events_are_counted() -> None:
    assert relayed(chunk(EVENT + EVENT), until=2)[2].events == 2
    assert not relayed(chunk(EVENT + EVENT), until=1)[0]


def test_chunks_that_arrive_together_pass_together() -> None:
    data = chunk(EVENT + EVENT) + chunk(EVENT) + b"%X\r\n%b\r\n" % (len(EVENT), EVENT)
    taken, written, relay = relayed(data)
    assert (taken, written, relay.events) == (True, [data], 4)


def test_events_that_state_no_usage_pass() -> None:
    for null in (b'"usage":null', b'"usage": null'):
        assert relayed(chunk(b"data: {%b}\n\n" % null))[0]


@pytest.mark.parametrize(
    "data",
    [
        chunk(EVENT)[:-1],
        chunk(EVENT) + b"1",
        chunk(EVENT) + chunk(EVENT)[:-2],
        chunk(EVENT) + chunk(b"no event"),
        chunk(EVENT) + b"0\r\n\r\n",
        chunk(EVENT + b'data: {"usage":null,"last":{"usage":{"prompt_tokens":1}}}\n\n'),
        chunk(EVENT) + chunk(b"data: [DONE]\n\n"),
        chunk(EVENT[:-1]),
        b"%X;a\r\n%b\r\n" % (len(EVENT), EVENT),
        EVENT,
        chunk(b"\n"),
        b"0" * 5 + chunk(EVENT),
        chunk(b"data: %b\n\n" % (b"x" * (1 << 20))),
        chunk(EVENT + b'data: {"usage":{"prompt_tokens":1}}\n\n'),
        chunk(EVENT + b"data: [DONE]\n\n"),
        b"",
        b"0\r\n\r\n",
    ],
)
def test_anything_else_is_left_alone(data: bytes) -> None:
    taken, written, relay = relayed(data)
    assert (taken, written, relay.events, relay.heard_at) == (False, [], 0, 0.0)


def test_a_chunk_for_a_client_that_reads_too_slowly_is_left_alone() -> None:
    taken, _, relay = relayed(chunk(EVENT), reads=False)
    assert (taken, relay.events) == (False, 0)
