"""Builders for tests of the migration service: an engine of two ranks that joins, and the running service."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any

from bus import Bus
from bus.protocol.subjects import Subjects
from fleet.experts import ModelShape
from fleet.facts.engines import EngineJoined
from fleet.layout import EP
from fleet.placement import Placement, PlacementRecord, linear
from migration.config import MigrationConfig
from migration.service import MigrationService
from tests.layouts import stated

SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_intermediate=8)
FIRST = linear(layers=2, experts=8, ranks=2)


def joined(
    worker_id: int = 1,
    engine: str = "a",
    placement: Placement | PlacementRecord | None = FIRST,
    **fields: Any,
) -> EngineJoined:
    record = placement.record() if isinstance(placement, Placement) else placement
    plain: dict[str, Any] = {
        "model": "m",
        "node": "n",
        "urls": ("http://x", "http://y"),
        "block_size": 16,
        "kv_blocks": 8,
        "max_context": 512,
        "max_batch_tokens": 256,
        "shape": SHAPE,
        "layout": EP,
    }
    return EngineJoined(
        engine=engine, worker_id=worker_id, **stated({"placement": record, **plain, **fields})
    )


@asynccontextmanager
async def leading(
    bus: Bus, config: MigrationConfig, planning_executor: Executor | None = None
) -> AsyncIterator[MigrationService]:
    """Run a service as the leader or on standby, and stop it at the end. planning_executor: runs planning
    runs."""
    service = MigrationService(
        bus, Subjects(), config, clock=asyncio.get_running_loop().time, planning_executor=planning_executor
    )
    running = asyncio.create_task(service.run())
    try:
        await asyncio.wait_for(service.ready.wait(), 20)
        yield service
    finally:
        assert not running.done(), running
        running.cancel()
        await asyncio.wait([running], timeout=5)
        assert running.cancelled()
