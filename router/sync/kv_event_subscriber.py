"""Keeps the KV index true to what ranks say: applies their events in order, notices gaps, and repairs them by a snapshot.

A rank's events are numbered by its publisher. A jump in the numbers, an unknown publisher that did not begin at 0, and a
block behind an unknown parent all mean that something was missed. Then the rank is asked for a snapshot; events that
arrive meanwhile wait, and those the snapshot does not contain are applied after it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bus import Bus, BusError, Received
from bus.protocol.subjects import Subjects
from fleet.events import KvEvent, KvSnapshot, KvSnapshotRequested, RoutedKvEvent
from router.fleet_state.target_table import RankKey
from router.keyed_queue import KeyedQueue
from router.prefix_index.kv_event_index import BadKvEvent, KvEventIndex, OrphanBlock
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)

_SLICE = 1024
"""Blocks of a snapshot that are applied before the event loop turns, and what the last event has more."""
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_SNAPSHOT_SECONDS = 5.0
_BAD_EVENT_SECONDS = 1.0
"""Pause before a rank that sent nonsense is asked for a snapshot: should it send nothing else, that is one snapshot a second, not one a message."""
_LATE_BLOCKS = 65_536
_ALL_LATE_BLOCKS = 1_048_576
"""Blocks named by messages that wait for one rank's snapshot, and for those of all ranks (some 250 MB); with more, another snapshot is cheaper."""
_ASKING = 4
"""Snapshots asked for at once."""

Batch = tuple[RoutedKvEvent, ...]


@dataclass(slots=True)
class _Feed:
    """One rank's feed. `late`: messages that wait for a snapshot; None: the feed is in step. `blocks`: what they count, with their events.

    KV events depend on one another, so only the message with exactly the `next` number will do (`bus.protocol.sequence` is laxer).
    """

    engine: str
    publisher_id: int | None = None
    next: int = 0
    late: deque[tuple[int, int, Batch]] | None = field(default_factory=deque)
    blocks: int = 0
    pause: float = _FIRST_PAUSE_SECONDS

    @property
    def missed(self) -> int:
        """The message before the first one that waits: a snapshot must contain it. -1: none waits."""
        return self.late[0][1] - 1 if self.late else -1


class KvEventSubscriber:
    """One feed per rank that reports KV events."""

    def __init__(self, index: KvEventIndex, bus: Bus, subjects: Subjects, metrics: RouterMetrics) -> None:
        self._index = index
        self._bus = bus
        self._subjects = subjects
        self._metrics = metrics
        self._feeds: dict[RankKey, _Feed] = {}
        self._due: KeyedQueue[RankKey] = KeyedQueue(65_536)
        self._late_blocks = 0

    def add(self, rank: RankKey, engine: str) -> None:
        """A rank of the engine of that name joined: what it holds already is asked for."""
        if rank not in self._feeds:
            self._feeds[rank] = _Feed(engine)
            self._ask(rank, "joined")

    def forget_worker(self, worker_id: int) -> None:
        for rank in [rank for rank in self._feeds if rank[0] == worker_id]:
            self._late_blocks -= self._feeds.pop(rank).blocks

    def in_step(self, rank: RankKey) -> bool:
        """Whether the index knows all that the rank has said so far."""
        feed = self._feeds.get(rank)
        return feed is not None and feed.late is None

    def hear(self, received: Received) -> None:
        """One message of the kv-events subject. Ranks that have not joined are not listened to: their join asks for a snapshot."""
        batch = received.message
        if not isinstance(batch, tuple) or not batch:
            return
        rank = (batch[0].worker_id, batch[0].event.dp_rank)
        if any((one.worker_id, one.event.dp_rank) != rank for one in batch):
            log.warning("kv-events message %d of publisher %d mixes ranks; it is not used", received.sequence, received.publisher_id)
            self._metrics.bus_refused.inc()
            return
        feed = self._feeds.get(rank)
        if feed is not None:
            self._take(rank, feed, received.publisher_id, received.sequence, batch)

    def out_of_step(self) -> list[RankKey]:
        """Ranks whose snapshot is waited for."""
        return [rank for rank, feed in self._feeds.items() if feed.late is not None]

    async def run(self) -> None:
        """Repair feeds until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for turn in range(_ASKING):
                tasks.create_task(self._repair(), name=f"repairs KV feeds by snapshots ({turn + 1} of {_ASKING})")

    def _take(self, rank: RankKey, feed: _Feed, publisher_id: int, sequence: int, batch: Batch) -> None:
        if feed.late is not None:
            self._wait(feed, publisher_id, sequence, batch)
            return
        if publisher_id != feed.publisher_id:
            self._lost(rank, feed, "new_publisher", publisher_id, sequence, batch)
        elif sequence > feed.next:
            self._lost(rank, feed, "gap", publisher_id, sequence, batch)
        elif sequence == feed.next:
            feed.next += 1
            self._apply(rank, feed, batch)

    def _wait(self, feed: _Feed, publisher_id: int, sequence: int, batch: Batch) -> None:
        """Until a snapshot has come. What is dropped for want of room leaves a gap in the numbers, which the snapshot will show."""
        blocks = sum(_blocks(one.event) for one in batch)
        if feed.blocks + blocks > _LATE_BLOCKS or self._late_blocks + blocks > _ALL_LATE_BLOCKS:
            self._let_go(feed)
        feed.late = deque() if feed.late is None else feed.late
        feed.late.append((publisher_id, sequence, batch))
        feed.blocks += blocks
        self._late_blocks += blocks

    def _let_go(self, feed: _Feed) -> deque[tuple[int, int, Batch]]:
        """Nothing waits any more; returns what did."""
        late, feed.late = feed.late or deque(), None
        self._late_blocks -= feed.blocks
        feed.blocks = 0
        return late

    def _apply(self, rank: RankKey, feed: _Feed, batch: Batch) -> None:
        try:
            self._index.apply(batch)
        except OrphanBlock as error:
            log.info("%s; asking for a snapshot", error)
            feed.late = deque()
            self._ask(rank, "orphan")
        except BadKvEvent as error:
            log.warning("a KV event cannot be used, and those behind it are left out: %s; asking for a snapshot", error)
            self._metrics.bus_refused.inc()
            feed.late = deque()
            self._metrics.kv_snapshots.labels("bad_event").inc()
            asyncio.get_running_loop().call_later(_BAD_EVENT_SECONDS, self._due.ask, rank)
        else:
            self._metrics.kv_events.inc(len(batch))

    def _lost(self, rank: RankKey, feed: _Feed, reason: str, publisher_id: int, sequence: int, batch: Batch) -> None:
        log.info("KV events of worker %d rank %d: %s at message %d, expected %d; asking for a snapshot", *rank, reason, sequence, feed.next)
        self._wait(feed, publisher_id, sequence, batch)
        self._ask(rank, reason)

    def _ask(self, rank: RankKey, reason: str) -> None:
        self._metrics.kv_snapshots.labels(reason).inc()
        self._due.ask(rank)

    async def _repair(self) -> None:
        while True:
            rank = await self._due.next()
            feed = self._feeds.get(rank)
            if feed is None or feed.late is None:
                continue
            try:
                await self._snapshot(rank, feed)
            except (BusError, OrphanBlock, BadKvEvent) as error:
                log.info("no snapshot of worker %d rank %d yet: %s", *rank, error)
                asyncio.get_running_loop().call_later(feed.pause, self._due.ask, rank)
                feed.pause = min(2 * feed.pause, _LONGEST_PAUSE_SECONDS)

    async def _snapshot(self, rank: RankKey, feed: _Feed) -> None:
        """BusError when it cannot be had; OrphanBlock or BadKvEvent when it is inconsistent."""
        request = KvSnapshotRequested(worker_id=rank[0], rank=rank[1], after=feed.missed)
        answer = await self._bus.request(self._subjects.kv_snapshot(feed.engine, *rank), request, _SNAPSHOT_SECONDS)
        if not isinstance(answer, KvSnapshot) or (answer.worker_id, answer.rank) != rank:
            raise BusError(f"asked worker {rank[0]} rank {rank[1]} for a snapshot and got a {type(answer).__name__} of something else")
        if self._feeds.get(rank) is not feed:
            return  # forgotten while we asked
        self._index.clear(rank)
        for part in _sliced(answer.events):
            self._index.follow(rank, part)
            await asyncio.sleep(0)
            if self._feeds.get(rank) is not feed:
                return
        self._resume(rank, feed, answer)

    def _resume(self, rank: RankKey, feed: _Feed, answer: KvSnapshot) -> None:
        """In step again as of the snapshot; what waited is heard now, as if it arrived now."""
        feed.publisher_id, feed.next, feed.pause = answer.publisher_id, answer.sequence + 1, _FIRST_PAUSE_SECONDS
        for publisher_id, sequence, batch in self._let_go(feed):
            if publisher_id == answer.publisher_id:
                self._take(rank, feed, publisher_id, sequence, batch)


def _sliced(events: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    """In order, some _SLICE blocks at a time."""
    part: list[KvEvent] = []
    blocks = 0
    for event in events:
        part.append(event)
        blocks += _blocks(event)
        if blocks >= _SLICE:
            yield part
            part, blocks = [], 0
    if part:
        yield part


def _blocks(event: KvEvent) -> int:
    """What an event takes room and time by: itself, and the blocks it names."""
    change = event.data
    if isinstance(change, str):
        return 1
    stored = 0 if change.stored is None else len(change.stored.blocks)
    return 1 + stored + (0 if change.removed is None else len(change.removed.block_hashes))
