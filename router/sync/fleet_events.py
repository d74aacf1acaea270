"""Fleet events for programs: the stored log from any position on, and the telemetry that this router
receives.

Each reader has a replay of its own, which waits while the reader is slow: of the log it misses only what the
log itself no longer holds. Telemetry is not stored, so a slow reader loses the oldest of it. Either way the
reader gets a `Gap` that says so, and memory is bounded.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple

from bus import Bus, BusError, Received
from bus.protocol.subjects import Subjects
from fleet.facts.demand import PopularityShifted, TrackerHeartbeat
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engines import EngineHeartbeat
from fleet.facts.placements import HomesPublished
from fleet.messages import STORED
from fleet.text import exact_json

log = logging.getLogger(__name__)

STORED_KINDS = tuple(kind.__name__ for kind in STORED)
"""Kinds that have a position in the log, and can be resumed."""
TELEMETRY_KINDS = tuple(
    kind.__name__
    for kind in (
        EngineHeartbeat,
        KvMetrics,
        HomesPublished,
        PopularityShifted,
        TrackerHeartbeat,
    )
)
"""Kinds that a router receives besides, and that hold nothing of a request. They are not stored."""
MAX_READERS = 64
_STORED_WAITING = 8
"""Stored events read ahead for a reader. Each may hold a placement of hundreds of kilobytes."""
_TELEMETRY_WAITING = 4096
"""Telemetry kept for a slow reader: some 2 MB."""


class FeedStart(NamedTuple):
    """First stored event of a reader: behind a position, or of the last `since` seconds; else the next."""

    after: int | None = None
    since: float | None = None


class FeedSelection(NamedTuple):
    """Events that a reader asked for. engine: None means of all engines, and those of none."""

    kinds: frozenset[str] = frozenset(STORED_KINDS)
    engine: str | None = None

    def includes(self, kind: str, engine: str | None) -> bool:
        return kind in self.kinds and self.engine in (None, engine)


class Gap(NamedTuple):
    """Events that a reader misses. missed: their number; None: unknown."""

    reason: str
    missed: int | None = None


class FeedEvent(NamedTuple):
    """One event for a reader. record: JSON, as `roost events --json` prints it, with the engine. position: 0
    for telemetry.
    """

    kind: str
    position: int
    record: bytes


class FeedEnd(NamedTuple):
    """The end of a reader's events."""

    reason: str


class EventReader:
    """Events of one reader, which `next` gives one by one."""

    def __init__(self, selection: FeedSelection, position: int | None) -> None:
        """Start without events. position: that of the last stored event before the first; None: unknown."""
        self.selection = selection
        self._read = position
        """position of the last stored event that is waiting, was given to the reader, or is not selected"""
        self._stored: deque[FeedEvent | Gap] = deque()
        self._telemetry: deque[FeedEvent] = deque()
        self._dropped = 0
        self._end: FeedEnd | None = None
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def position(self) -> int | None:
        """Position behind which the reader may resume; None: unknown, or stored events wait for it."""
        return None if self._stored else self._read

    async def next(self) -> FeedEvent | Gap | FeedEnd:
        """Return the next event. After a `FeedEnd` there is none."""
        while (event := self.take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return event

    def take(self) -> FeedEvent | Gap | FeedEnd | None:
        """Return the next event if it is here already."""
        if self._stored:
            self._room.set()
            return self._stored.popleft()
        if self._dropped:
            missed, self._dropped = self._dropped, 0
            return Gap("this reader is slower than the telemetry; the oldest was dropped", missed)
        return self._telemetry.popleft() if self._telemetry else self._end

    def offer(self, event: FeedEvent) -> None:
        """Add telemetry; drop the oldest without room."""
        if len(self._telemetry) == _TELEMETRY_WAITING:
            self._telemetry.popleft()
            self._dropped += 1
        self._telemetry.append(event)
        self._changed.set()

    async def add(self, event: FeedEvent | Gap) -> None:
        """Add a stored event, or a gap before one; wait for room."""
        while len(self._stored) >= _STORED_WAITING:
            self._room.clear()
            await self._room.wait()
        self._stored.append(event)
        self._changed.set()

    def gap_before(self, position: int) -> Gap | None:
        """Return the gap between the last stored event and the one at a position, if there is one."""
        last = self._read
        if last is None or position == last + 1:
            return None
        if position <= last:
            return Gap("the server lost its log; these events are from its new beginning")
        reason = "the log no longer holds these events, or this version cannot read them"
        return Gap(reason, position - last - 1)

    def read_up_to(self, position: int) -> None:
        """Record that the log was read up to a position, and what is selected of it was added."""
        self._read = position

    def end(self, reason: str) -> None:
        """End the events behind those that wait already."""
        self._end = FeedEnd(reason)
        self._changed.set()


class FleetEvents:
    """Readers of one router. engine_of: name of the engine of a worker_id, if known."""

    def __init__(self, bus: Bus, subjects: Subjects, engine_of: Callable[[int], str | None]) -> None:
        self._bus = bus
        self._subjects = subjects
        self._engine_of = engine_of
        self._readers: set[EventReader] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._closed: str | None = None

    @property
    def reading_now(self) -> int:
        """Number of readers."""
        return len(self._readers)

    def heard(self, received: Received) -> None:
        """Give telemetry to the readers that selected it."""
        if not self._readers:
            return
        kind, engine = type(received.message).__name__, self._engine(received.message)
        readers = [reader for reader in self._readers if reader.selection.includes(kind, engine)]
        if readers and kind in TELEMETRY_KINDS:
            event = feed_event(received, engine)
            for reader in readers:
                reader.offer(event)

    async def start(self, start: FeedStart) -> FeedStart:
        """Return a start with the position of the log's end filled in where none is given. BusError."""
        if start.after is None and start.since is None:
            return FeedStart(after=await self._bus.last_position())
        return start

    @contextmanager
    def reading(self, selection: FeedSelection, start: FeedStart) -> Iterator[EventReader]:
        """Read events while the context lasts. start: a result of `start`."""
        reader = EventReader(selection, start.after)
        if self._closed is not None:
            reader.end(self._closed)
        pump = asyncio.create_task(self._pump(reader, start), name="reads stored events for a program")
        self._readers.add(reader)
        self._pumps.add(pump)

        def ended(pump: asyncio.Task[None]) -> None:
            self._pumps.discard(pump)
            if not pump.cancelled() and (error := pump.exception()) is not None:
                log.error("the reading of stored events failed", exc_info=error)
                reader.end("this router failed to read stored events; its log says why")

        pump.add_done_callback(ended)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            pump.cancel()

    def close(self, reason: str) -> None:
        """End all readers, now and later."""
        self._closed = reason
        for reader in self._readers:
            reader.end(reason)

    async def _pump(self, reader: EventReader, start: FeedStart) -> None:
        replay = self._bus.replay(self._subjects.everything, after=start.after or 0, since=start.since)
        try:
            async with aclosing(replay):  # type: ignore[type-var]
                async for received in replay:
                    if (gap := reader.gap_before(received.position)) is not None:
                        await reader.add(gap)
                    engine = self._engine(received.message)
                    if reader.selection.includes(type(received.message).__name__, engine):
                        await reader.add(feed_event(received, engine))
                    reader.read_up_to(received.position)
        except BusError as error:
            log.warning("stored events cannot be read: %s", error)
            reader.end(f"stored events cannot be read: {error}")
        else:
            reader.end("the bus was closed")

    def _engine(self, message: Any) -> str | None:
        """Return the engine that a message is about; None: no engine, or an unknown one."""
        named: str | None = getattr(message, "engine", None)
        return named or self._engine_of(getattr(message, "worker_id", -1))


def feed_event(received: Received, engine: str | None) -> FeedEvent:
    """Return a received message as an event."""
    kind = type(received.message).__name__
    record = {
        "kind": kind,
        "engine": engine,
        "subject": received.subject,
        "publisher_id": str(received.publisher_id),
        "sequence": received.sequence,
        "published_at": received.published_at,
        "message": received.message,
    }
    return FeedEvent(kind, received.position, exact_json(record))
