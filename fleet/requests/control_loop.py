"""Requests to the migration service about its automatic control loop."""

import msgspec

from fleet.event import Event
from fleet.facts.migrations import LoopFigures, Origin


class SetLoopState(Event, frozen=True, kw_only=True):
    """Request to the migration service: plan automatically, or (paused) only on request. The setting survives
    restarts of the service. Answered with `LoopDescribed`.
    """

    paused: bool
    reason: str = ""
    """reason, for later readers"""


class DescribeLoop(Event, frozen=True, kw_only=True):
    """Request to the migration service: describe the state of the automatic control loop. Answered with
    `LoopDescribed`.
    """


class LayerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures per layer, [layers] each, measured in the last window."""

    balance: tuple[float, ...]
    remote_ranks: tuple[float, ...]
    local: tuple[float, ...]


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a plan, for display."""

    plan: str
    origin: Origin
    policy: str
    at: float
    """start time, Unix seconds"""
    outcome: str
    """under way, committed, aborted (with the reason), kept, harmful, ..."""
    copies: int
    bytes: int
    predicted_before: LoopFigures | None = None
    predicted_after: LoopFigures | None = None
    measured_before: LoopFigures | None = None
    measured_after: LoopFigures | None = None


class EngineLoop(msgspec.Struct, frozen=True, kw_only=True):
    """State of the automatic control loop for one engine."""

    engine: str
    worker_id: int
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
    """bytes copied since the service first saw the engine"""
    homes: int = 0
    """clusters that have a home"""
    homes_note: str = ""
    resting: int = 0
    """experts in cooldown: recently moved, or part of a harmful plan"""
    plans: tuple[PlanSummary, ...] = ()
    """last plans, newest first"""


class LoopDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeLoop` and `SetLoopState`."""

    policy: str
    automatic: bool
    """automatic planning, as configured"""
    paused: bool
    paused_reason: str = ""
    paused_at: float | None = None
    """Unix seconds"""
    budget_bytes: int
    budget_seconds: float
    cycle_seconds: float
    engines: tuple[EngineLoop, ...] = ()
    protocol: int = 0
    """`fleet.event.PROTOCOL` of the planner; 0: older"""
