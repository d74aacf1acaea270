"""Parsing of a stream of events: whatever the pieces in which it arrives."""

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from client.event_parser import EventParser, MissedEvents, ReceivedEvent, StreamEnd
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineLeft


def frame(position: int | None, kind: str, message: dict[str, Any], engine: str | None = "e") -> bytes:
    record = {"kind": kind, "engine": engine, "published_at": 5.5, "message": message, "subject": "s"}
    known = "" if position is None else f"id: {position}\n"
    return f"{known}event: {kind}\ndata: {json.dumps(record)}\n\n".encode()


LEFT = {"kind": "EngineLeft", "engine": "e", "worker_id": str(2**64 - 1), "reason": "r: \u2603"}
STREAM = (
    b"retry: 250\nid: 3\n\n"
    + frame(4, "EngineLeft", LEFT)
    + b": alive\n\n"
    + frame(None, "KvMetrics", {"worker_id": str(2**63), "running": 2})
    + b'event: gap\ndata: {"reason": "evicted", "missed": 7}\n\n'
    + frame(12, "FromTheFuture", {"kind": "FromTheFuture", "x": 1}, None)
    + b"id: 15\n: alive\n\n"
    + b'event: end\ndata: {"reason": "the router stops"}\n\n'
)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_every_way_to_cut_the_stream_gives_the_same_events(cuts: list[int]) -> None:
    parser, found = EventParser(), list[Any]()
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        found += parser.feed(STREAM[start:end])
    left, load, gap, unknown, end = found
    assert isinstance(left, ReceivedEvent)
    assert left.message == EngineLeft(engine="e", worker_id=2**64 - 1, reason="r: \u2603")
    assert (left.position, left.kind, left.engine, left.published_at) == (4, "EngineLeft", "e", 5.5)
    assert load.position is None
    assert load.message == KvMetrics(worker_id=2**63, running=2)
    assert gap == MissedEvents("evicted", 7)
    assert (unknown.position, unknown.message, unknown.engine) == (12, None, None)
    assert unknown.record["message"] == {"kind": "FromTheFuture", "x": 1}
    assert end == StreamEnd("the router stops")
    assert (parser.position, parser.retry_seconds) == (15, 0.25)
