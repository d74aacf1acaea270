"""View *Loop*: whether it runs, what it decided for each engine, and the timeline of its plans."""

from collections.abc import Sequence

import msgspec

from fleet.facts.migrations import LoopFigures
from fleet.requests.control_loop import EngineLoop, LoopDescribed, PlanSummary
from router.dashboard.views.plan_timeline import PlanBar, PlanState


class LoopSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """State of the whole loop."""

    policy: str
    automatic: bool
    paused: bool
    paused_reason: str
    paused_at: float | None
    """Unix seconds"""
    budget_bytes: int
    """for each engine"""
    budget_seconds: float
    cycle_seconds: float


class EngineDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """State of the loop for one engine."""

    engine: str
    epoch: int
    decided: str
    decided_at: float | None
    on_request: bool
    """it is planned on request only"""
    plan_discount: float
    """factor on predicted gains, in (0, 1]"""
    spent_bytes: int
    """in the present budget interval"""
    moved_bytes: int
    homes: int
    """clusters that have a home"""
    homes_note: str
    resting: int
    """experts in cooldown"""
    measured: LoopFigures | None
    at_start: LoopFigures | None


class LoopPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page."""

    silence: str
    """why the planner's state is unknown, or was last known some time ago; empty: it answers"""
    loop: LoopSwitch | None
    """None: not known yet"""
    engines: list[EngineDecisions]
    """by name"""
    plans: list[PlanBar]
    """newest first"""
    history_seconds: float
    """length of the timeline when the page was opened; older plans come from the planner's summaries, without
    their handovers
    """


def loop_picture(
    described: LoopDescribed | None, silence: str, bars: Sequence[PlanBar], history_seconds: float
) -> LoopPicture:
    """Return the page from the planner's last answer and the timeline of the log."""
    engines = sorted(() if described is None else described.engines, key=lambda one: one.engine)
    known = {(one.engine, one.plan) for one in bars}
    older = [
        _summarised(engine.engine, plan)
        for engine in engines
        for plan in engine.plans
        if (engine.engine, plan.plan) not in known
    ]
    return LoopPicture(
        silence=silence,
        loop=None if described is None else _switch(described),
        engines=[_decisions(one) for one in engines],
        plans=sorted((*bars, *older), key=lambda one: -one.at),
        history_seconds=history_seconds,
    )


def _switch(described: LoopDescribed) -> LoopSwitch:
    return LoopSwitch(
        policy=described.policy,
        automatic=described.automatic,
        paused=described.paused,
        paused_reason=described.paused_reason,
        paused_at=described.paused_at,
        budget_bytes=described.budget_bytes,
        budget_seconds=described.budget_seconds,
        cycle_seconds=described.cycle_seconds,
    )


def _decisions(one: EngineLoop) -> EngineDecisions:
    return EngineDecisions(
        engine=one.engine,
        epoch=one.epoch,
        decided=one.decided,
        decided_at=one.decided_at,
        on_request=one.next_seconds is None,
        plan_discount=one.plan_discount,
        spent_bytes=one.spent_bytes,
        moved_bytes=one.moved_bytes,
        homes=one.homes,
        homes_note=one.homes_note,
        resting=one.resting,
        measured=one.measured,
        at_start=one.at_start,
    )


def _summarised(engine: str, plan: PlanSummary) -> PlanBar:
    """Return a plan that began before the timeline."""
    state, verdict = _outcome(plan.outcome)
    return PlanBar(
        engine=engine,
        plan=plan.plan,
        origin=plan.origin,
        policy=plan.policy,
        at=plan.at,
        reason="",
        handovers=0,
        copies=plan.copies,
        bytes=plan.bytes,
        counts=plan.origin == "planner",
        state=state,
        fault=plan.outcome if state == "aborted" else "",
        verdict=verdict,
        predicted_before=plan.predicted_before,
        predicted_after=plan.predicted_after,
        measured_before=plan.measured_before,
        measured_after=plan.measured_after,
    )


def _outcome(text: str) -> tuple[PlanState, str]:
    """Return state and verdict of a summary's outcome."""
    if text in ("kept", "harmful", "unknown"):
        return "committed", text
    if text.startswith("aborted"):
        return "aborted", ""
    return ("under way" if text.startswith("under way") else "committed"), ""
