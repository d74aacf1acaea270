"""Publish the changes of a rank's KV cache, and serve snapshots of it.

Sequence numbers reveal lost messages, and readers repair the gap with a snapshot. Both name the epoch in
which the cache was last cleared, so that readers can tell blocks of before a change of attention from those
after.
"""

import asyncio
import logging
from typing import Literal

from bus import Message
from engine_adapter.batching.kv_snapshot import KvMirror
from engine_adapter.engine import EngineDescription
from engine_adapter.reporting.rank_context import RankContext
from fleet.facts.dynamo_kv import KvChange, KvEvent, RoutedKvEvent
from fleet.layout import head_groups
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

    def __init__(self, context: RankContext, epoch: int) -> None:
        """epoch: the served one."""
        self._context = context
        self._publisher = context.bus.publisher(context.subjects.kv_events)
        self._mirror = KvMirror(_most_blocks(context.about))
        self._event_id = 0
        self._epoch = epoch
        """epoch in which the cache was last cleared"""
        # A snapshot must combine the mirror and the sequence number of one moment.
        self._turn = asyncio.Lock()
        self._snapshot: KvSnapshot | None = None
        """The last snapshot. Many routers request one at the same time, and the same object is encoded only
        once (`bus.large_answers`)."""

    async def publish(self, changes: tuple[KvChange | Literal["cleared"], ...], epoch: int) -> None:
        """Publish changes of the cache as one message. epoch: the served one, no older than the changes."""
        forgotten = self._mirror.forgotten
        async with self._turn:
            for change in changes:
                self._mirror.apply(change)
            await self._publisher.publish(tuple(self._routed(change, epoch) for change in changes))
        if self._mirror.forgotten > forgotten:
            log.warning(
                "rank %d stored more KV blocks than the %d it has; snapshots lack %d",
                self._context.rank,
                self._mirror.limit,
                self._mirror.forgotten,
            )

    def _routed(self, change: KvChange | Literal["cleared"], epoch: int) -> RoutedKvEvent:
        self._event_id += 1
        if isinstance(change, str):
            self._epoch, self._snapshot = epoch, None
        return RoutedKvEvent(
            worker_id=self._context.worker_id,
            event=KvEvent(event_id=self._event_id, data=change, dp_rank=self._context.rank),
            epoch=self._epoch,
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
            epoch=self._epoch,
        )

    def _forget_snapshot(self, snapshot: KvSnapshot) -> None:
        if self._snapshot is snapshot:
            self._snapshot = None


def _most_blocks(about: EngineDescription) -> int:
    """Return the most blocks that a rank reports: its own, or those of the engine, for which rank 0 speaks
    under tensor-parallel attention."""
    if about.tp_refusal or about.shape is None:
        return about.kv_blocks
    return about.kv_blocks * head_groups(about.ranks, about.shape.kv_heads)
