"""`GET /v1/events`: fleet events as server-sent events, resumable by id."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable

import msgspec

from bus import BusError
from fleet.completions import ApiError
from fleet.text import read_duration
from router.http.asgi_response import not_ready
from router.http.server_sent_events import written
from router.service import RouterService
from router.sync.fleet_events import (
    MAX_READERS,
    STORED_KINDS,
    TELEMETRY_KINDS,
    EventReader,
    FeedEnd,
    FeedEvent,
    FeedSelection,
    FeedStart,
    FleetEvents,
    Gap,
)

EVENT_KINDS = (*STORED_KINDS, *TELEMETRY_KINDS)
GAP, END = "gap", "end"
"""Names of the events that report missed events, and the end of the stream."""
HEARTBEAT_SECONDS = 10.0
"""Interval of comments while there are no events."""
RETRY_MILLISECONDS = 1000
_PIECE_BYTES = 64 * 1024
"""Events that wait together are sent together, up to this size."""
_POSITION = re.compile(r"[0-9]{1,18}")


def selection(kinds: list[str], engine: str | None) -> FeedSelection:
    """Return the events that a query selects; each text may name several kinds, separated by commas. ApiError
    400 for an unknown kind.
    """
    names = frozenset(name for text in kinds for name in text.split(",") if name)
    for name in sorted(names.difference(EVENT_KINDS)):
        message = f"there is no kind {name[:64]!r} to read here; there are {', '.join(EVENT_KINDS)}"
        raise ApiError(400, message, param="kind", code="invalid_value")
    return FeedSelection(names or frozenset(STORED_KINDS), engine)


def start(last_event_id: str | None, since: str | None) -> FeedStart:
    """Return the first event that a client asks for; the id of the last one that it received takes
    precedence. ApiError 400 for an invalid value.
    """
    if last_event_id:
        if not _POSITION.fullmatch(last_event_id):
            message = (
                f"Last-Event-ID must be the number of an event of this route, not {last_event_id[:64]!r}"
            )
            raise ApiError(400, message, param="Last-Event-ID", code="invalid_value")
        return FeedStart(after=int(last_event_id))
    if since is None:
        return FeedStart()
    try:
        return FeedStart(since=read_duration(since))
    except ValueError as error:
        raise ApiError(400, f"since {error}", param="since", code="invalid_value") from error


async def event_stream(
    service: RouterService, selected: FeedSelection, begin: FeedStart, may_read: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Return the body of the answer. may_read: false once the client has lost its right.

    ApiError 429 when there are too many readers, 503 while the router stops or its bus cannot be read.
    """
    feed = service.events
    if feed is None:
        raise ApiError(503, "this router has no bus, and thus no events", code="no_bus")
    if service.refusing:
        raise not_ready("the router is stopping")
    if feed.reading_now >= MAX_READERS:
        message = f"{MAX_READERS} programs read events from this router already; ask another router"
        raise ApiError(429, message, code="too_many_readers", retry_after=10.0)
    try:
        begin = await feed.start(begin)
    except BusError as error:
        raise ApiError(
            503, f"the log of events cannot be read: {error}", code="not_ready", retry_after=1.0
        ) from error
    return _body(feed, selected, begin, may_read)


async def _body(
    feed: FleetEvents, selected: FeedSelection, begin: FeedStart, may_read: Callable[[], bool]
) -> AsyncIterator[bytes]:
    with feed.reading(selected, begin) as reader:
        yield b"retry: %d\n" % RETRY_MILLISECONDS + (
            b": events follow\n\n" if begin.after is None else b"id: %d\n\n" % begin.after
        )
        ended = False
        while not ended:
            if not may_read():
                yield written(END, msgspec.json.encode({"reason": "the key has lost its right to events"}))
                return
            piece, ended = await _next_piece(reader)
            yield piece


async def _next_piece(reader: EventReader) -> tuple[bytes, bool]:
    """Return the events that are here, or the next one, or a comment after a silence; and whether it is the
    last.
    """
    event: FeedEvent | Gap | FeedEnd | None
    try:
        event = await asyncio.wait_for(reader.next(), HEARTBEAT_SECONDS)
    except TimeoutError:
        position = reader.position
        return b": alive\n\n" if not position else b"id: %d\n: alive\n\n" % position, False
    frames, size = [_frame(event)], 0
    while not isinstance(event, FeedEnd) and size < _PIECE_BYTES and (event := reader.take()) is not None:
        frames.append(_frame(event))
        size += len(frames[-1])
    return b"".join(frames), isinstance(event, FeedEnd)


def _frame(event: FeedEvent | Gap | FeedEnd) -> bytes:
    if isinstance(event, FeedEnd):
        return written(END, msgspec.json.encode({"reason": event.reason}))
    if isinstance(event, Gap):
        return written(GAP, msgspec.json.encode(event._asdict()))
    return written(event.kind, event.record, event.position or None)
