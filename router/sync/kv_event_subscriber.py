"""Consistency of the KV index with the ranks: apply their events in order, detect gaps, and repair gaps by a
snapshot.

A rank's publisher numbers its events. Three things reveal a missed event: a jump in the numbers, an unknown
publisher that did not begin at 0, and a block whose parent is unknown. Then the rank is asked for a snapshot.
Events that arrive meanwhile are held back, and those that the snapshot does not contain are applied after it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bus import Bus, BusError, Received
from bus.keyed_queue import RetryQueue
from bus.protocol.subjects import Subjects
from fleet.facts.dynamo_kv import KvEvent, RoutedKvEvent
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested
from router.fleet_state.target_table import RankKey
from router.prefix_index.kv_event_index import BadKvEvent, KvEventIndex, OrphanBlock
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)

_SLICE = 1024
"""Blocks of a snapshot that are applied before the event loop gets a turn, rounded up to complete events."""
_FIRST_PAUSE_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 5.0
_SNAPSHOT_SECONDS = 5.0
_MAX_RANKS = 65_536
_BAD_EVENT_SECONDS = 1.0
"""Pause before requesting a snapshot from a rank that sent an invalid event. A rank that sends nothing else
then costs one snapshot a second, not one per message.
"""
_LATE_BLOCKS = 65_536
_ALL_LATE_BLOCKS = 1_048_576
"""Limits of the blocks in held-back messages, for one rank and for all ranks (some 250 MB); beyond them,
another snapshot is cheaper.
"""
_ASKING = 4
"""Concurrent snapshot requests."""

Batch = tuple[RoutedKvEvent, ...]
Snapshots = Callable[[KvSnapshotRequested], Awaitable[KvSnapshot]]
"""Asks a rank of another runtime for a snapshot. BusError when there is none yet."""


@dataclass(slots=True)
class _Feed:
    """Feed of one rank. `late`: messages held back until a snapshot arrives; None: the feed is in step.
    `blocks`: size of these messages.

    KV events depend on one another, so only the message with exactly the `next` number is acceptable
    (`bus.protocol.sequence` is laxer).
    """

    engine: str
    snapshots: Snapshots | None = None
    """None: the engine answers on the bus"""
    publisher_id: int | None = None
    next: int = 0
    late: deque[tuple[int, int, Batch]] | None = field(default_factory=deque)
    blocks: int = 0
    epoch: int = 0
    """that of the last event or snapshot (`RoutedKvEvent.epoch`)"""
    least_epoch: int = 0
    """snapshots of older epochs are not used"""

    @property
    def missed(self) -> int:
        """Number of the message before the first one held back: a snapshot must contain it. -1: none is held
        back.
        """
        return self.late[0][1] - 1 if self.late else -1


class KvEventSubscriber:
    """KV event feeds, one per rank that reports KV events."""

    def __init__(
        self,
        index: KvEventIndex,
        bus: Bus,
        subjects: Subjects,
        metrics: RouterMetrics,
        applied: Callable[[RankKey], None] = lambda _: None,
    ) -> None:
        """applied: called with a rank after its events were applied."""
        self._index = index
        self._applied = applied
        self._bus = bus
        self._subjects = subjects
        self._metrics = metrics
        self._feeds: dict[RankKey, _Feed] = {}
        self._due: RetryQueue[RankKey] = RetryQueue(
            self._repair, _MAX_RANKS, _FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS
        )
        self.late_blocks = 0

    def add(self, rank: RankKey, engine: str, snapshots: Snapshots | None = None) -> None:
        """Add a rank of an engine that joined, and request a snapshot of the blocks it already holds.

        snapshots: of an engine that does not answer on the bus.
        """
        if rank not in self._feeds:
            self._feeds[rank] = _Feed(engine, snapshots)
            self._ask(rank, "joined")

    def forget_worker(self, worker_id: int) -> None:
        for rank in [rank for rank in self._feeds if rank[0] == worker_id]:
            self.late_blocks -= self._feeds.pop(rank).blocks

    def restart(self, worker_id: int, epoch: int) -> None:
        """Forget what the ranks of a worker held before an epoch, in which its attention changed.

        A rank whose events are of that epoch already keeps its blocks; the others are asked for a snapshot.
        """
        for rank, feed in self._feeds.items():
            if rank[0] == worker_id and epoch > feed.least_epoch:
                feed.least_epoch = epoch
                if feed.epoch < epoch or feed.late is not None:
                    feed.late = deque() if feed.late is None else feed.late
                    self._index.clear(rank)
                    self._ask(rank, "attention")

    def in_step(self, rank: RankKey) -> bool:
        """True when the index contains all events that the rank has sent."""
        feed = self._feeds.get(rank)
        return feed is not None and feed.late is None

    def receive(self, received: Received) -> None:
        """Process a message of the kv-events subject. Ranks that have not joined are ignored: their join
        requests a snapshot.
        """
        batch = received.message
        if not isinstance(batch, tuple) or not batch:
            return
        rank = (batch[0].worker_id, batch[0].event.dp_rank)
        if any((one.worker_id, one.event.dp_rank) != rank for one in batch):
            log.warning(
                "kv-events message %d of publisher %d mixes ranks; it is not used",
                received.sequence,
                received.publisher_id,
            )
            self._metrics.bus_refused.inc()
            return
        feed = self._feeds.get(rank)
        if feed is not None:
            self._take(rank, feed, received.publisher_id, received.sequence, batch)

    def out_of_step(self) -> list[RankKey]:
        """Ranks that wait for a snapshot."""
        return [rank for rank, feed in self._feeds.items() if feed.late is not None]

    async def run(self) -> None:
        """Repair feeds until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for turn in range(_ASKING):
                tasks.create_task(
                    self._due.run(), name=f"repairs KV feeds by snapshots ({turn + 1} of {_ASKING})"
                )

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
        """Hold back a message until a snapshot arrives. Messages dropped for lack of room leave a gap in the
        numbers, which is then detected.
        """
        blocks = sum(_blocks(one.event) for one in batch)
        if feed.blocks + blocks > _LATE_BLOCKS or self.late_blocks + blocks > _ALL_LATE_BLOCKS:
            self._let_go(feed)
        feed.late = deque() if feed.late is None else feed.late
        feed.late.append((publisher_id, sequence, batch))
        feed.blocks += blocks
        self.late_blocks += blocks

    def _let_go(self, feed: _Feed) -> deque[tuple[int, int, Batch]]:
        """Clear and return the messages held back."""
        late, feed.late = feed.late or deque(), None
        self.late_blocks -= feed.blocks
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
            log.warning(
                "a KV event is invalid, and the events after it in the message are skipped: %s; asking for a"
                " snapshot",
                error,
            )
            self._metrics.bus_refused.inc()
            feed.late = deque()
            self._metrics.kv_snapshots.labels("bad_event").inc()
            self._due.ask_later(rank, _BAD_EVENT_SECONDS)
        else:
            feed.epoch = batch[-1].epoch
            self._metrics.kv_events.inc(len(batch))
            self._applied(rank)

    def _lost(
        self, rank: RankKey, feed: _Feed, reason: str, publisher_id: int, sequence: int, batch: Batch
    ) -> None:
        log.info(
            "KV events of worker %d rank %d: %s at message %d, expected %d; asking for a snapshot",
            *rank,
            reason,
            sequence,
            feed.next,
        )
        self._wait(feed, publisher_id, sequence, batch)
        self._ask(rank, reason)

    def _ask(self, rank: RankKey, reason: str) -> None:
        self._metrics.kv_snapshots.labels(reason).inc()
        self._due.ask(rank)

    async def _repair(self, rank: RankKey) -> bool:
        """Request a snapshot if the rank waits for one. False when there is none yet."""
        feed = self._feeds.get(rank)
        if feed is None or feed.late is None:
            return True
        try:
            await self._snapshot(rank, feed)
        except (BusError, OrphanBlock, BadKvEvent) as error:
            log.info("no snapshot of worker %d rank %d yet: %s", *rank, error)
            return False
        return True

    async def _snapshot(self, rank: RankKey, feed: _Feed) -> None:
        """Request and apply a snapshot. BusError when there is none; OrphanBlock or BadKvEvent when it is
        inconsistent.
        """
        request = KvSnapshotRequested(worker_id=rank[0], rank=rank[1], after=feed.missed)
        answer = (
            await self._bus.request(
                self._subjects.kv_snapshot(feed.engine, *rank), request, _SNAPSHOT_SECONDS
            )
            if feed.snapshots is None
            else await feed.snapshots(request)
        )
        if not isinstance(answer, KvSnapshot) or (answer.worker_id, answer.rank) != rank:
            raise BusError(
                f"asked worker {rank[0]} rank {rank[1]} for a snapshot and got a {type(answer).__name__} of"
                " something else"
            )
        if self._feeds.get(rank) is not feed:
            return  # forgotten during the request
        self._index.clear(rank)
        for part in _sliced(answer.events):
            _check_epoch(rank, feed, answer)
            self._index.follow(rank, part)
            await asyncio.sleep(0)
            if self._feeds.get(rank) is not feed:
                return
        _check_epoch(rank, feed, answer)
        self._resume(rank, feed, answer)

    def _resume(self, rank: RankKey, feed: _Feed, answer: KvSnapshot) -> None:
        """Continue after the snapshot, and process the messages held back as if they arrived now."""
        feed.publisher_id, feed.next, feed.epoch = answer.publisher_id, answer.sequence + 1, answer.epoch
        self._applied(rank)
        for publisher_id, sequence, batch in self._let_go(feed):
            if publisher_id == answer.publisher_id:
                self._take(rank, feed, publisher_id, sequence, batch)


def _check_epoch(rank: RankKey, feed: _Feed, answer: KvSnapshot) -> None:
    """Raise BusError for a snapshot of before the rank's attention changed, perhaps while it is applied."""
    if answer.epoch < feed.least_epoch:
        raise BusError(
            f"the snapshot of worker {rank[0]} rank {rank[1]} is of epoch {answer.epoch}, before its"
            f" attention changed in epoch {feed.least_epoch}"
        )


def _sliced(events: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    """Yield the events in order, some _SLICE blocks at a time."""
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
    """Return the cost of an event in room and time: itself, and the blocks it names."""
    change = event.data
    if isinstance(change, str):
        return 1
    stored = 0 if change.stored is None else len(change.stored.blocks)
    return 1 + stored + (0 if change.removed is None else len(change.removed.block_hashes))
