"""Server-sent events of `GET /v1/events`, parsed from arriving bytes. Pure."""

from dataclasses import dataclass
from typing import Any

import msgspec

from fleet.event import Event
from fleet.facts.dynamo_kv import KvMetrics
from fleet.messages import AnyEvent

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Largest event; that of the bus itself."""
GAP, END = "gap", "end"


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """One event of the fleet."""

    position: int | None
    """place in the fleet's log, from which `after` resumes; None: telemetry, which is not stored"""
    kind: str
    engine: str | None
    """None: it is about no engine"""
    published_at: float
    """sender's wall clock, Unix seconds"""
    message: Event | KvMetrics | None
    """its fields, by the types of `fleet.facts`; None: a kind or form that this version does not know"""
    record: dict[str, Any]
    """everything that arrived, as decoded from JSON; 64-bit ids are text"""


@dataclass(frozen=True, slots=True)
class MissedEvents:
    """Events that will not arrive: the log no longer holds them, or this reader was too slow."""

    reason: str
    missed: int | None
    """their number; None: unknown"""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Last event of a stream that the router ended."""

    reason: str


class _Record(msgspec.Struct, frozen=True):
    kind: str
    published_at: float
    message: msgspec.Raw
    engine: str | None = None


class _Missed(msgspec.Struct, frozen=True):
    reason: str = ""
    missed: int | None = None


class EventParser:
    """Parses a stream piece by piece. position: id of the last event that was complete; None before any."""

    def __init__(self, position: int | None = None) -> None:
        self.position = position
        self.retry_seconds: float | None = None
        """pause before reconnecting, as the router asks for; None: not said"""
        self._rest = b""

    def feed(self, data: bytes) -> list[ReceivedEvent | MissedEvents | StreamEnd]:
        """Return the events that are complete now. ValueError for one that is too long or no JSON."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event exceeds {MAX_EVENT_BYTES} bytes")
        return [event for block in blocks if (event := self._block(block)) is not None]

    def _block(self, block: bytes) -> ReceivedEvent | MissedEvents | StreamEnd | None:
        """Return the event of a block; None: it has only an id, a comment, or a time to wait."""
        name, data, position = "", b"", None
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"id" and value.isdigit():
                position = int(value)
            elif field == b"event":
                name = value.decode("utf-8", "replace")
            elif field == b"data":
                data = value
            elif field == b"retry" and value.isdigit():
                self.retry_seconds = int(value) / 1000.0
        if position is not None:
            self.position = position
        return _event(name, data, position) if name and data else None


def _event(name: str, data: bytes, position: int | None) -> ReceivedEvent | MissedEvents | StreamEnd:
    if name == GAP:
        gap = msgspec.json.decode(data, type=_Missed)
        return MissedEvents(gap.reason, gap.missed)
    if name == END:
        return StreamEnd(msgspec.json.decode(data, type=_Missed).reason)
    found = msgspec.json.decode(data, type=_Record)
    return ReceivedEvent(
        position,
        found.kind,
        found.engine,
        found.published_at,
        _message(found.kind, bytes(found.message)),
        msgspec.json.decode(data),
    )


def _message(kind: str, data: bytes) -> Event | KvMetrics | None:
    """Decode a message; 64-bit ids arrive as text, which only the lax mode takes for integers."""
    try:
        if kind == KvMetrics.__name__:
            return msgspec.json.decode(data, type=KvMetrics, strict=False)
        message: Event = msgspec.json.decode(data, type=AnyEvent, strict=False)
    except msgspec.ValidationError:
        return None
    return message
