"""Requests to an engine for its description and its KV cache."""

from fleet.event import Event
from fleet.facts.dynamo_kv import KvEvent


class DescribeEngine(Event, frozen=True, kw_only=True):
    """Request to one engine for its `EngineJoined`."""

    worker_id: int


class KvSnapshotRequested(Event, frozen=True, kw_only=True):
    """Request to one rank for a snapshot of its KV cache and the sequence number of its last kv-events
    message.
    """

    worker_id: int
    rank: int
    after: int | None = None
    """a recent snapshot suffices if it includes the kv-events message of this number (-1: any); None: the
    present state
    """


class KvSnapshot(Event, frozen=True, kw_only=True):
    """Answer to `KvSnapshotRequested`: `events`, applied to an empty cache, give the state after message
    `sequence` of `publisher_id`.
    """

    worker_id: int
    rank: int
    publisher_id: int
    sequence: int
    """last kv-events message included; -1: none was sent yet"""
    events: tuple[KvEvent, ...]
