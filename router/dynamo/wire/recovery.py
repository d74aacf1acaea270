"""Blocks that a rank holds, as Dynamo's own indexers tell them to a reader that missed events. Pure.

Two forms: the answer of a worker's local indexer (one of `Events`, `TreeDump`, or a reason why there are
none), and the dump of a router's index, a JSON array of the same events.
"""

from typing import Any

import msgspec

from fleet.facts.dynamo_kv import KvEvent, RoutedKvEvent
from router.dynamo.wire.malformed import UNDECODABLE, Malformed

Blocks = dict[tuple[int, int], tuple[KvEvent, ...]]
"""By (worker_id, dp_rank): events that, applied to an empty cache, give the blocks in device memory."""


class IndexerAnswer(msgspec.Struct, frozen=True):
    """Answer of a worker's local indexer. whole: the events start from an empty cache."""

    events: tuple[RoutedKvEvent, ...]
    last_event_id: int
    whole: bool


class _Events(msgspec.Struct, frozen=True):
    events: tuple[RoutedKvEvent, ...]
    last_event_id: int


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one field is set."""

    Events: _Events | None = None
    TreeDump: _Events | None = None
    TooNew: Any = None
    InvalidRange: Any = None
    TreeDumpFailed: Any = None
    Error: Any = None


_DUMP: msgspec.json.Decoder[tuple[RoutedKvEvent, ...]] = msgspec.json.Decoder(tuple[RoutedKvEvent, ...])


def decode_indexer_answer(answer: Any) -> IndexerAnswer:
    """Read the answer of a local indexer, as decoded JSON or msgpack. Malformed if it holds no events; the
    message is the indexer's own reason if it gave one.
    """
    try:
        found = msgspec.convert(answer, _Answer)
    except UNDECODABLE as error:
        raise Malformed(f"answer of a local indexer: {error}") from error
    told, whole = (found.TreeDump, True) if found.TreeDump is not None else (found.Events, False)
    if told is None:
        raise Malformed(f"the local indexer has no events to give: {answer!r:.200}")
    return IndexerAnswer(told.events, told.last_event_id, whole)


def decode_dump(text: bytes | str) -> Blocks:
    """Read the dump of an index. Malformed if it is none."""
    try:
        events = _DUMP.decode(text)
    except UNDECODABLE as error:
        raise Malformed(f"dump of an index: {error}") from error
    return by_rank(events)


def by_rank(events: tuple[RoutedKvEvent, ...]) -> Blocks:
    """Group events by rank, in order. Blocks outside device memory are left out."""
    found: dict[tuple[int, int], list[KvEvent]] = {}
    for one in events:
        if one.storage_tier == "device":
            found.setdefault((one.worker_id, one.event.dp_rank), []).append(one.event)
    return {rank: tuple(held) for rank, held in found.items()}
