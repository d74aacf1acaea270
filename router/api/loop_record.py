"""The automatic control loop, as `GET /v1/loop` returns it, and the request that pauses it."""

import msgspec

from fleet.facts.migrations import LoopFigures
from fleet.requests.control_loop import LayerFigures, PlanSummary


class LoopEngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of the loop for one engine (`fleet.requests.control_loop.EngineLoop`)."""

    engine: str
    epoch: int
    measured: LoopFigures | None = None
    """figures of the last window; None: nothing was measured"""
    layers: LayerFigures | None = None
    at_start: LoopFigures | None = None
    """first measured window of this incarnation of the engine"""
    decided_at: float | None = None
    """Unix seconds; None: no decision yet"""
    decided: str = ""
    """last decision, in one sentence: a plan, or why there is none"""
    next_seconds: float | None = None
    """time until the next planning cycle; None: only on request"""
    plan_discount: float
    """factor on predicted gains, in (0, 1]"""
    spent_bytes: int = 0
    """bytes copied by the planner's own plans in the present budget interval"""
    moved_bytes: int = 0
    """bytes copied since the planner first saw the engine"""
    homes: int = 0
    """clusters that have a home"""
    homes_note: str = ""
    resting: int = 0
    """experts in cooldown: recently moved, or part of a harmful plan"""
    plans: tuple[PlanSummary, ...] = ()
    """last plans, newest first"""


class LoopRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of the automatic control loop, as the planner reports it."""

    policy: str
    automatic: bool
    """automatic planning, as configured"""
    paused: bool
    paused_reason: str = ""
    paused_at: float | None = None
    """Unix seconds"""
    budget_bytes: int
    """most bytes that automatic plans copy for an engine in `budget_seconds`"""
    budget_seconds: float
    cycle_seconds: float
    engines: tuple[LoopEngineRecord, ...] = ()


class PauseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/loop/pause`. paused: False resumes."""

    paused: bool
    reason: str = ""
    """shown to anyone who asks why nothing moves"""
