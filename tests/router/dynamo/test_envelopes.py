"""Messages of Dynamo's workers are read from ZeroMQ and NATS alike."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.facts.dynamo_kv import KvChange, KvEvent, KvMetrics, KvRemoved, RoutedKvEvent
from router.dynamo.envelopes import decode_nats, decode_zmq
from router.dynamo.wire.malformed import Malformed
from tests.router.dynamo.recorded import MESSAGES, WORKER, mutated

U64 = st.integers(0, 2**64 - 1)


def test_every_recorded_message_is_read() -> None:
    found = [decode_zmq(frames) for frames in MESSAGES]
    assert all(one is not None for one in found)
    loads = [one.content for one in found if one is not None and isinstance(one.content, KvMetrics)]
    assert [(one.worker_id, one.dp_rank, one.active_decode_blocks) for one in loads] == [
        (WORKER, 0, 3),
        (WORKER, 1, 4),
    ]
    events = [one for one in found if one is not None and isinstance(one.content, tuple)]
    assert [one.sequence for one in events] == [0, 1, 2, 0, 1, 2]


def test_the_envelope_is_the_same_over_nats() -> None:
    for frames in MESSAGES:
        assert decode_nats(frames[3][5:]) == decode_zmq(frames)


@given(publisher=U64, sequence=U64, worker=U64, blocks=st.lists(U64, max_size=5))
def test_whatever_a_worker_sends_comes_back(
    publisher: int, sequence: int, worker: int, blocks: list[int]
) -> None:
    event = KvEvent(event_id=1, data=KvChange(removed=KvRemoved(block_hashes=tuple(blocks))), dp_rank=3)
    content = (RoutedKvEvent(worker_id=worker, event=event),)
    envelope = msgspec.msgpack.encode(
        {
            "publisher_id": publisher,
            "sequence": sequence,
            "published_at": 1_700_000_000_000,
            "topic": "kv-events",
            "payload": msgspec.msgpack.encode(content),
        }
    )
    found = decode_zmq([b"kv-events", b"", b"", b"\x01" + len(envelope).to_bytes(4) + envelope])
    assert found is not None
    assert (found.publisher_id, found.sequence, found.content) == (publisher, sequence, content)


def test_messages_on_other_topics_are_left_out() -> None:
    envelope = {"publisher_id": 1, "sequence": 0, "published_at": 0, "topic": "other", "payload": b"?"}
    assert decode_nats(msgspec.msgpack.encode(envelope)) is None


@pytest.mark.parametrize(
    "frames", [[], [b"kv-events"], [b""] * 4, [b"", b"", b"", b"\x02\x00\x00\x00\x00"], [b""] * 9]
)
def test_other_frames_are_malformed(frames: list[bytes]) -> None:
    with pytest.raises(Malformed):
        decode_zmq(frames)


def test_a_thousand_mutations_are_read_or_malformed() -> None:
    chance, malformed = random.Random(3), 0
    for _ in range(1000):
        frames = list(chance.choice(MESSAGES))
        at = chance.randrange(4)
        frames[at] = mutated(frames[at], chance)
        try:
            decode_zmq(frames)
        except Malformed:
            malformed += 1
    assert 0 < malformed < 1000
