"""Fleet state as seen on the bus: joined engines, their ranks' load, their epochs and running plans."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from bus import Bus, Message
from bus.joins import verified_members
from bus.protocol.subjects import Subjects
from deploy.client.last_plan_entry import before_verdicts
from fleet.facts.dynamo_kv import KvMetrics
from fleet.facts.engine_kinds import stated_abilities
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft, RankDrained
from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.layout import Layout

LISTEN_SECONDS = 1.5
"""Listening time; longer than the interval of heartbeats and load reports."""


@dataclass(slots=True)
class EngineNow:
    """State of one engine that has joined and not left."""

    joined: EngineJoined
    heartbeat: EngineHeartbeat | None = None
    load: dict[int, KvMetrics] = field(default_factory=dict)
    """by rank"""
    drains: dict[int | None, str] = field(default_factory=dict)
    """reason of a drain, by rank, or (None) of the whole engine"""

    migrating: str = ""
    """id of the running plan; empty: none"""
    committed: Layout | None = None
    """layout of the last recorded epoch; None: that of the join"""

    @property
    def layout(self) -> Layout | None:
        """Layout of the served epoch; None: the engine reports no experts."""
        return self.joined.layout if self.committed is None else self.committed

    @property
    def targets(self) -> int:
        """Number of targets of requests."""
        return len(self.joined.urls) // self.joined.shared_ranks(self.layout)

    @property
    def loads(self) -> dict[int, KvMetrics]:
        """Return the last load of each target, by rank: of rank 0 alone where it speaks for all ranks."""
        if self.joined.shared_ranks(self.layout) == 1:
            return self.load
        return {rank: load for rank, load in self.load.items() if rank == 0}

    def drained(self, rank: int) -> str | None:
        """Return the reason why a rank is drained; None: it is not."""
        return self.drains.get(None, self.drains.get(rank))

    def apply(self, message: Message) -> None:
        """Apply a message about this incarnation: heartbeat, load, drain, or progress of a plan."""
        match message:
            case EngineHeartbeat():
                self.heartbeat = message
            case KvMetrics() if 0 <= message.dp_rank < len(self.joined.urls):
                self.load[message.dp_rank] = message
            case RankDrained(draining=True):
                self.drains[message.rank] = message.reason
            case RankDrained():
                self.drains.pop(message.rank, None)
            case PlacementCommitted():
                self.committed = message.layout
            case MigrationPlanned() | MigrationStaged() | MigrationCommitted(last=False):
                self.migrating = message.plan
            case MigrationCommitted() | MigrationAborted():
                self.migrating = ""

    @property
    def complete(self) -> bool:
        """Return whether a heartbeat and the load of every rank have arrived."""
        return self.heartbeat is not None and (
            not self.joined.capabilities.load or len(self.loads) == self.targets
        )


async def engines_now(bus: Bus, subjects: Subjects) -> tuple[list[EngineNow], dict[str, int]]:
    """Return the engines by name. Waits for a message from each, for at most LISTEN_SECONDS."""
    async with AsyncExitStack() as stack:
        reports = await stack.enter_async_context(bus.subscribe(subjects.heartbeats(), subjects.kv_metrics))
        engines = await members(bus, subjects)
        await note_plans(bus, subjects, engines)
        try:
            async with asyncio.timeout(LISTEN_SECONDS):
                async for received in reports:
                    _apply(engines, received.message)
                    if all(engine.complete for engine in engines):
                        break
        except TimeoutError:
            pass  # engines without a message are shown as silent
        return engines, dict(bus.rejected)


async def members(bus: Bus, subjects: Subjects) -> list[EngineNow]:
    """Return the joined engines by name, with their drains; their load is not known yet."""
    last: dict[str, EngineJoined | EngineLeft] = {}
    async for received in verified_members(
        bus, subjects, bus.replay(subjects.membership(), latest=True, follow=False)
    ):
        if isinstance(received.message, EngineJoined | EngineLeft):
            last[received.message.engine] = received.message
    found = [EngineNow(joined) for _, joined in sorted(last.items()) if isinstance(joined, EngineJoined)]
    for subject in (subjects.drains(), subjects.placements()):
        async for received in bus.replay(subject, latest=True, follow=False):
            _apply(found, received.message)
    return found


async def note_plans(bus: Bus, subjects: Subjects, engines: Sequence[EngineNow]) -> None:
    """Set `migrating` from the last log entry of each engine's plans. Verdicts on earlier plans are
    skipped."""
    workers = {engine.joined.worker_id for engine in engines}
    stored = [received async for received in bus.replay(subjects.migrations(), latest=True, follow=False)]
    here = (received for received in stored if getattr(received.message, "worker_id", None) in workers)
    for message in await asyncio.gather(*(before_verdicts(bus, newest) for newest in here)):
        if message is not None:
            _apply(engines, message)


def _apply(engines: Iterable[EngineNow], message: Message) -> None:
    """Apply a message to the engine that it is about."""
    worker_id = getattr(message, "worker_id", None)
    for engine in engines:
        if engine.joined.worker_id == worker_id:
            engine.apply(message)


def as_record(engine: EngineNow) -> dict[str, Any]:
    """Convert to a JSON record."""
    joined = engine.joined
    ranks = [
        {
            "rank": rank,
            "url": url,
            "running": load.running if (load := engine.loads.get(rank)) else None,
            "waiting": load.waiting if load else None,
            "prefill_tokens": load.active_prefill_tokens if load else None,
            "used_blocks": load.kv_used_blocks if load else None,
            "draining": engine.drained(rank),
        }
        for rank, url in enumerate(joined.urls)
    ]
    return {
        "engine": joined.engine,
        "worker_id": str(joined.worker_id),
        "kind": joined.engine_kind or None,
        "model": joined.model,
        "node": joined.node,
        "alive": engine.heartbeat is not None,
        "epoch": engine.heartbeat.epoch if engine.heartbeat else None,
        "migrating": engine.migrating or None,
        "layout": engine.layout,
        "block_size": joined.block_size,
        "kv_blocks": joined.kv_blocks,
        "targets": engine.targets,
        "target_kv_blocks": joined.target_kv_blocks(engine.layout),
        "max_context": joined.max_context,
        "weights_digest": joined.weights_digest,
        "capabilities": joined.capabilities,
        "abilities": stated_abilities(joined),
        "ranks": ranks,
    }
