"""A relay passes on whole events unchanged, or leaves them alone."""

import pytest

from router.passthrough.event_relay import EventRelay


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = b'data: {"choices":[{"delta":{"content":" word"}}]}\n\n'


def relayed(data: bytes, *, until: int = 100, reads: bool = True) -> tuple[bool, list[bytes], EventRelay]:
    written: list[bytes] = []

    def write_chunk(data: bytes) -> bool:
        written.extend([data] if reads else [])
        return reads

    relay = EventRelay(write_chunk)
    relay.until = until
    return relay.take(data, 5.0), written, relay


@pytest.mark.parametrize("size", [8, 247, 248, 249, 4087])
def test_a_chunk_of_whole_events_passes_unchanged(size: int) -> None:
    data = chunk(b"data: %b\n\n" % (b"x" * size))
    taken, written, relay = relayed(data)
    assert (taken, written, relay.events, relay.heard_at) == (True, [data], 1, 5.0)


def test_events_are_counted() -> None:
    assert relayed(chunk(EVENT + EVENT), until=2)[2].events == 2
    assert not relayed(chunk(EVENT + EVENT), until=1)[0]


@pytest.mark.parametrize(
    "data",
    [
        chunk(EVENT)[:-1],
        chunk(EVENT) + b"1",
        chunk(EVENT) + chunk(EVENT),
        chunk(EVENT[:-1]),
        b"0" + chunk(EVENT),
        b"%X;a\r\n%b\r\n" % (len(EVENT), EVENT),
        EVENT,
        chunk(b"\n\n"),
        chunk(b"data: %b\n\n" % (b"x" * 5000)),
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
