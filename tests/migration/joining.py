"""An engine of two ranks that joins: what tests of the planner's edge begin with."""

from typing import Any

from fleet.events import EngineJoined
from fleet.experts import ModelShape
from fleet.layout import EP
from fleet.placement import Placement, PlacementRecord, linear

SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_intermediate=8)
FIRST = linear(layers=2, experts=8, ranks=2)


def joined(worker_id: int = 1, engine: str = "a", placement: Placement | PlacementRecord | None = FIRST, **fields: Any) -> EngineJoined:
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
    return EngineJoined(engine=engine, worker_id=worker_id, placement=record, **{**plain, **fields})
