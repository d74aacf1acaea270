"""Publish the changes of a rank's KV cache, and serve snapshots of it.

Sequence numbers reveal lost messages, and readers repair the gap with a snapshot.
"""

import asyncio
import logging
from typing import Literal

from bus import Message
from engine_adapter.batching.kv_snapshot import KvMirror
from engine_adapter.reporting.rank_context import RankContext
from fleet.facts.dynamo_kv import KvChange, KvEvent, RoutedKvEvent
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested

log = logging.getLogger(__name__)
SNAPSHOT_SECONDS = 0.5
"""Lifetime of a cached KV snapshot. It is the reply to all requests within this time that need no later
message."""
SNAPSHOT_SHARE = 20.0
"""Lifetime of a snapshot as a multiple of the time to build it. Even on a slow machine, building snapshots
takes at most a twentieth of the time."""


class KvReports:
    """KV reports of one rank. `publish` must be given every change, in order."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._publisher = context.bus.publisher(context.subjects.kv_events)
        self._mirror = KvMirror(context.about.kv_blocks)
        self._event_id = 0
        # A snapshot must combine the mirror and the sequence number of one moment.
        self._turn = asyncio.Lock()
        self._snapshot: KvSnapshot | None = None
        """The last snapshot. Many routers request one at the same time, and the same object is encoded only
        once (`bus.large_answers`)."""

    async def publish(self, changes: tuple[KvChange | Literal["cleared"], ...]) -> None:
        """Publish changes of the cache as one message."""
        forgotten = self._mirror.forgotten
        async with self._turn:
            for change in changes:
                self._mirror.apply(change)
            await self._publisher.publish(tuple(self._routed(change) for change in changes))
        if self._mirror.forgotten > forgotten:
            log.warning(
                "rank %d stored more KV blocks than the %d it has; snapshots lack %d",
                self._context.rank,
                self._mirror.limit,
                self._mirror.forgotten,
            )

    def _routed(self, change: KvChange | Literal["cleared"]) -> RoutedKvEvent:
        self._event_id += 1
        return RoutedKvEvent(
            worker_id=self._context.worker_id,
            event=KvEvent(event_id=self._event_id, data=change, dp_rank=self._context.rank),
        )

    async def answer(self, request: Message) -> Message:
        """Answer a request for a snapshot."""
        if not isinstance(request, KvSnapshotRequested):
            raise TypeError(f"expected KvSnapshotRequested, got {type(request).__name__}")
        async with self._turn:
            if self._snapshot is None or request.after is None or self._snapshot.sequence < request.after:
                loop = asyncio.get_running_loop()
                began = loop.time()
                self._snapshot = self._snapshot_now()
                seconds = max(SNAPSHOT_SECONDS, SNAPSHOT_SHARE * (loop.time() - began))
                loop.call_later(seconds, self._forget_snapshot, self._snapshot)
            return self._snapshot

    def _snapshot_now(self) -> KvSnapshot:
        return KvSnapshot(
            worker_id=self._context.worker_id,
            rank=self._context.rank,
            publisher_id=self._publisher.publisher_id,
            sequence=self._publisher.sequence - 1,
            events=self._mirror.snapshot(self._context.rank),
        )

    def _forget_snapshot(self, snapshot: KvSnapshot) -> None:
        if self._snapshot is snapshot:
            self._snapshot = None
