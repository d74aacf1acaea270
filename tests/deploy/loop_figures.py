"""What a planner could say of its loop, for tests of what is shown of it."""

from typing import Any

import msgspec

from fleet.facts.migrations import LoopFigures
from fleet.requests.control_loop import EngineLoop, LayerFigures, LoopDescribed, PlanSummary

NOW = 1_700_000_000.0
START = LoopFigures(remote_ranks=1.969, local=0.312, balance=0.93, step_seconds=0.0102, tokens=9000)
PREDICTED = LoopFigures(remote_ranks=1.43, local=0.59, balance=0.92, step_seconds=0.00905)
MEASURED = LoopFigures(remote_ranks=1.442, local=0.581, balance=0.912, step_seconds=0.0091, tokens=8000)
LAYERS = LayerFigures(
    balance=tuple(0.85 + 0.002 * layer for layer in range(58)),
    remote_ranks=(1.5,) * 57 + (float("nan"),),
    local=(0.6,) * 58,
)
KEPT = PlanSummary(
    plan="1f3a5c7e90abcdef",
    origin="planner",
    policy="roost",
    at=NOW - 200,
    outcome="kept",
    copies=12,
    bytes=3_400_000,
    predicted_before=START,
    predicted_after=PREDICTED,
    measured_before=START,
    measured_after=MEASURED,
)
ABORTED = msgspec.structs.replace(
    KEPT,
    plan="0000000000000001",
    outcome="aborted: rank 1 has no free cell, wait until reads have settled",
    measured_after=None,
)
_NOTHING: dict[str, None] = dict.fromkeys(
    ("predicted_before", "predicted_after", "measured_before", "measured_after")
)
ROLLBACK = msgspec.structs.replace(
    KEPT, plan="0000000000000002", origin="rollback", outcome="committed", **_NOTHING
)
ENGINE = EngineLoop(
    engine="engine-0",
    worker_id=7,
    epoch=5,
    measured=MEASURED,
    layers=LAYERS,
    at_start=START,
    decided_at=NOW - 12,
    decided=(
        "no plan: nothing is to be gained beyond what chance does; the best that was found makes a step 0.1 %"
        " shorter"
    ),
    next_seconds=18.0,
    plan_discount=0.85,
    spent_bytes=12_300_000,
    moved_bytes=40_000_000,
    homes=9,
    homes_note="requests of 9 clusters can be foretold well enough",
    resting=3,
    plans=(ABORTED, KEPT, ROLLBACK, KEPT, KEPT, KEPT),
)


def loop(*engines: EngineLoop, **fields: Any) -> LoopDescribed:
    plain: dict[str, Any] = {"policy": "roost", "automatic": True, "paused": False}
    return LoopDescribed(
        **{
            **plain,
            "budget_bytes": 32_000_000_000,
            "budget_seconds": 900.0,
            "cycle_seconds": 30.0,
            "engines": engines,
            **fields,
        }
    )
