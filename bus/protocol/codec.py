"""Message encoding: Dynamo's five-field envelope around a msgpack payload. Pure; no input can be fatal.

Envelope: a msgpack map {publisher_id u64, sequence u64, published_at u64 (ms since the epoch), topic str,
payload bin}; the payload is msgpack again. Topic `kv-events` carries an array of RoutedKvEvent, `kv_metrics`
a KvMetrics (both in Dynamo's own format), `roost-blob` a reference to a payload in the blob store, every
other topic the tagged union. Answers too large for one message are sent in parts (`bus.large_answers`):
topics `roost-parts`, `roost-part-wanted`, `roost-part`, `roost-no-part`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash

from bus import BusError, Message
from bus.protocol.subjects import KV_EVENTS, KV_METRICS
from fleet.event import Event
from fleet.facts.dynamo_kv import KvMetrics, RoutedKvEvent
from fleet.messages import AnyEvent

BLOB_TOPIC = "roost-blob"
"""Reserved topic: the payload is a BlobReference."""
LARGE = 512_000
"""Bytes. A larger payload is sent through the blob store, or, in an answer, in parts."""
PARTS_TOPIC = "roost-parts"
"""Reserved topic: the payload is a PartsOffer."""
PART_REQUEST_TOPIC = "roost-part-wanted"
"""Reserved topic: the payload is a PartRequest."""
PART_TOPIC = "roost-part"
"""Reserved topic: the payload is the raw content of a part."""
NO_PART_TOPIC = "roost-no-part"
"""Reserved topic: this publisher does not have the answer of which a part was requested."""
PART_BYTES = LARGE
"""Length of every part of an answer except the last."""
WIRE_BYTES = 1_048_576
"""Largest envelope that is accepted: the servers' default max_payload."""
PAYLOAD_BYTES = 64 * 1024 * 1024
"""Largest payload that may be sent through the blob store or in parts."""

RENAMED_KINDS = {"PlanJudged": "PlanEvaluated", "SteerLoop": "SetLoopState"}
"""Kinds of older versions, and their present names. Stored logs hold them, and older clients send them."""
RENAMED_FIELDS = {
    "PlanEvaluated": {"trust": "plan_discount"},
    "LoopDescribed": {"trust": "plan_discount"},
}
"""By present kind: required fields of older versions, at any depth, and their present names."""

T = TypeVar("T")
Unsigned = Annotated[int, msgspec.Meta(ge=0)]


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Wrapper of every message on the wire. Field names and order are Dynamo's."""

    publisher_id: Unsigned
    sequence: Unsigned
    published_at: Unsigned
    """milliseconds since the epoch, sender's clock"""
    topic: str
    payload: bytes


class BlobReference(msgspec.Struct, frozen=True, kw_only=True):
    """Replaces a payload that is too large for an envelope."""

    topic: str
    digest: str
    """sha256 (hex) of the payload"""
    size: Unsigned


class PartsOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Replaces an answer that is to be fetched in parts from the publisher of the envelope."""

    topic: str
    answer: Unsigned
    """the publisher's number of the answer"""
    size: Unsigned
    """bytes of the payload"""
    parts: Unsigned
    checksum: str
    """`checksum` of the payload"""


class PartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for one part of an answer."""

    publisher_id: Unsigned
    """publisher of the offer; other servers of the subject do not have it"""
    answer: Unsigned
    part: Unsigned
    """from 0"""


class RejectionReason(StrEnum):
    """Reason why a message was not delivered."""

    OVERSIZE = "oversize"
    ENVELOPE = "envelope"
    """bytes that are not an envelope"""
    KIND = "kind"
    """tag unknown to this version"""
    PAYLOAD = "payload"
    """known message type with missing, malformed or invalid fields"""
    BLOB = "blob"
    """reference to content that is missing or damaged"""
    SPEAKER = "speaker"
    """message of one engine on another engine's subject"""


class Undeliverable(Exception):
    """A message that cannot be delivered. The receiving bus counts and drops it."""

    def __init__(self, reason: RejectionReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Rejections(Mapping[str, int]):
    """Number of rejected incoming messages, by reason. Every reason is present from the start."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, reason: RejectionReason) -> None:
        self._counts[reason.value] += 1

    def __getitem__(self, reason: str) -> int:
        return self._counts[RejectionReason(reason).value]

    def __iter__(self) -> Iterator[str]:
        return (reason.value for reason in RejectionReason)

    def __len__(self) -> int:
        return len(RejectionReason)

    def __repr__(self) -> str:
        return f"<Rejected {dict(self)}>"


class _Tag(msgspec.Struct, frozen=True):
    kind: str


_ENVELOPE: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
_REFERENCE: msgspec.msgpack.Decoder[BlobReference] = msgspec.msgpack.Decoder(BlobReference)
_OFFER: msgspec.msgpack.Decoder[PartsOffer] = msgspec.msgpack.Decoder(PartsOffer)
_EVENT: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
_KV_EVENTS: msgspec.msgpack.Decoder[tuple[RoutedKvEvent, ...]] = msgspec.msgpack.Decoder(
    tuple[RoutedKvEvent, ...]
)
_KV_METRICS: msgspec.msgpack.Decoder[KvMetrics] = msgspec.msgpack.Decoder(KvMetrics)
_TAG: msgspec.msgpack.Decoder[_Tag] = msgspec.msgpack.Decoder(_Tag)
_KINDS = frozenset(kind.__name__ for kind in Event.__subclasses__())

_UNDECODABLE = (ValueError, RecursionError, OverflowError, MemoryError)
"""All exceptions that msgspec raises for hostile bytes. Its own errors and bad UTF-8 are ValueErrors."""


def topic_of(subject: str) -> str:
    """Return the topic of a subject: the token after the component (or endpoint) name; the last token of any
    other form.
    """
    tokens = subject.split(".")
    if tokens[0] == "namespace":
        at = 6 if tokens[4:5] == ["endpoint"] else 4
        if len(tokens) > at:
            return tokens[at]
    return tokens[-1]


def encode(topic: str, message: Message) -> bytes:
    """Encode the payload of a message. BusError if the message does not belong on the topic or cannot be
    encoded.
    """
    if _form(message) != (topic if topic in (KV_EVENTS, KV_METRICS) else "event"):
        raise BusError(
            f"a {type(message).__name__} cannot be sent on topic {topic!r}: kv-events takes a tuple of"
            " RoutedKvEvent, kv_metrics KvMetrics"
        )
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise BusError(f"a {type(message).__name__} cannot be encoded: {error}") from error


def _form(message: Message) -> str:
    if isinstance(message, tuple):
        return KV_EVENTS
    return KV_METRICS if isinstance(message, KvMetrics) else "event"


def seal(publisher_id: int, sequence: int, published_at: float, topic: str, payload: bytes) -> bytes:
    """Encode an envelope. published_at: seconds since the epoch."""
    envelope = Envelope(
        publisher_id=publisher_id,
        sequence=sequence,
        published_at=max(0, int(published_at * 1000)),
        topic=topic,
        payload=payload,
    )
    return msgspec.msgpack.encode(envelope)


def unseal(raw: bytes) -> Envelope:
    """Decode an envelope. Undeliverable if it is too large or malformed."""
    if len(raw) > WIRE_BYTES:
        raise Undeliverable(RejectionReason.OVERSIZE, f"{len(raw)} bytes; at most {WIRE_BYTES} are read")
    return _read(_ENVELOPE, raw, RejectionReason.ENVELOPE)


def reference(topic: str, digest: str, payload: bytes) -> bytes:
    """Encode a reference to content stored under `digest`, to be sent with BLOB_TOPIC.

    BusError if the content exceeds PAYLOAD_BYTES.
    """
    if len(payload) > PAYLOAD_BYTES:
        raise BusError(
            f"a message of {len(payload)} bytes on {topic!r}: at most {PAYLOAD_BYTES} can be sent; reduce it,"
            " or put a blob and send its digest"
        )
    return msgspec.msgpack.encode(BlobReference(topic=topic, digest=digest, size=len(payload)))


def referred(envelope: Envelope) -> BlobReference | None:
    """Return the reference in an envelope, or None if it carries its own payload.

    Undeliverable if the reference is malformed or the content too large.
    """
    if envelope.topic != BLOB_TOPIC:
        return None
    found = _read(_REFERENCE, envelope.payload, RejectionReason.PAYLOAD)
    if found.size > PAYLOAD_BYTES:
        raise Undeliverable(
            RejectionReason.OVERSIZE, f"refers to {found.size} bytes; at most {PAYLOAD_BYTES} are read"
        )
    return found


def checksum(payload: bytes | bytearray) -> str:
    """Return a checksum that detects damage, not forgery: a sender of parts could as well send another
    answer.
    """
    return xxhash.xxh3_128_hexdigest(payload)


def parts_offered(envelope: Envelope) -> PartsOffer | None:
    """Return the offer in an answer, or None if it carries its own payload. Undeliverable if it is malformed
    or too large.
    """
    if envelope.topic != PARTS_TOPIC:
        return None
    offer = _read(_OFFER, envelope.payload, RejectionReason.PAYLOAD)
    if offer.size > PAYLOAD_BYTES:
        raise Undeliverable(
            RejectionReason.OVERSIZE, f"offers {offer.size} bytes; at most {PAYLOAD_BYTES} are read"
        )
    if offer.parts != -(-offer.size // PART_BYTES):
        raise Undeliverable(
            RejectionReason.PAYLOAD, f"offers {offer.size} bytes in {offer.parts} parts of {PART_BYTES}"
        )
    return offer


def decode(topic: str, payload: bytes) -> Message:
    """Decode a payload. Unknown fields are ignored. Undeliverable, with the reason, if it is not a
    message."""
    if topic == KV_EVENTS:
        return _read(_KV_EVENTS, payload, RejectionReason.PAYLOAD)
    if topic == KV_METRICS:
        return _read(_KV_METRICS, payload, RejectionReason.PAYLOAD)
    try:
        return _EVENT.decode(payload)
    except _UNDECODABLE as error:
        renamed = _renamed(payload)
        if renamed is not None:
            return decode(topic, renamed)
        raise Undeliverable(*_fault(payload, error)) from error


def _renamed(payload: bytes) -> bytes | None:
    """Return a message of an older version under its present names; None if it has no old names."""
    try:
        kind = _TAG.decode(payload).kind
        present = RENAMED_KINDS.get(kind, kind)
        if present == kind and present not in RENAMED_FIELDS:
            return None
        old = msgspec.msgpack.decode(payload, type=dict[str, Any])
        new = _with_fields(old, RENAMED_FIELDS.get(present, {})) | {"kind": present}
        return None if new == old else msgspec.msgpack.encode(new)
    except _UNDECODABLE:
        return None


def _with_fields(value: Any, renamed: Mapping[str, str]) -> Any:
    """Return a decoded value with these fields renamed at any depth."""
    if isinstance(value, dict):
        return {renamed.get(name, name): _with_fields(one, renamed) for name, one in value.items()}
    return [_with_fields(one, renamed) for one in value] if isinstance(value, list) else value


def _fault(payload: bytes, error: BaseException) -> tuple[RejectionReason, str]:
    """Distinguish an unknown kind (a newer sender) from a malformed message."""
    try:
        kind = _TAG.decode(payload).kind
    except _UNDECODABLE:
        return RejectionReason.PAYLOAD, str(error)
    return (
        (RejectionReason.PAYLOAD, f"{kind}: {error}")
        if kind in _KINDS
        else (RejectionReason.KIND, f"unknown kind {kind!r:.80}")
    )


def _read(decoder: "msgspec.msgpack.Decoder[T]", raw: bytes, reason: RejectionReason) -> T:
    try:
        return decoder.decode(raw)
    except _UNDECODABLE as error:
        raise Undeliverable(reason, str(error)) from error
