"""Event messages of Dynamo's workers, from NATS and from ZeroMQ.

NATS carries the envelope itself, ZeroMQ four frames: topic, publisher (8 bytes, big endian), sequence (8
bytes, big endian), and the envelope behind a head of 5 bytes (1, and its length as u32, big endian). The
envelope and its payload are those of Roost's bus.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bus.protocol.codec import Undeliverable, decode, unseal
from bus.protocol.subjects import KV_EVENTS, KV_METRICS
from fleet.facts.dynamo_kv import KvMetrics, RoutedKvEvent
from router.dynamo.wire.malformed import Malformed

_HEAD_BYTES = 5
_VERSION = 1


class PublishedEvents(NamedTuple):
    """One message of a publisher. `sequence` counts its messages from 0."""

    publisher_id: int
    sequence: int
    published_at: float
    """sender's wall clock, seconds"""
    content: tuple[RoutedKvEvent, ...] | KvMetrics


def decode_nats(data: bytes) -> PublishedEvents | None:
    """Decode a message; None: of a topic that routing does not need. Malformed if it cannot be read."""
    try:
        envelope = unseal(data)
        if envelope.topic not in (KV_EVENTS, KV_METRICS):
            return None
        content = decode(envelope.topic, envelope.payload)
    except Undeliverable as error:
        raise Malformed(str(error)) from error
    assert isinstance(content, tuple | KvMetrics)
    return PublishedEvents(envelope.publisher_id, envelope.sequence, envelope.published_at / 1000.0, content)


def decode_zmq(frames: Sequence[bytes]) -> PublishedEvents | None:
    """Decode the frames of a message, like `decode_nats`."""
    if len(frames) != 4:
        raise Malformed(f"a ZeroMQ message of {len(frames)} frames instead of 4")
    head, envelope = frames[3][:_HEAD_BYTES], frames[3][_HEAD_BYTES:]
    if len(head) < _HEAD_BYTES or head[0] != _VERSION or int.from_bytes(head[1:]) != len(envelope):
        raise Malformed(f"a ZeroMQ message whose envelope of {len(envelope)} bytes begins with {head!r}")
    return decode_nats(envelope)
