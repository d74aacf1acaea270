"""Control loop state of one engine: due times, plan under way, last decision. Pure; times are arguments."""

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from fleet.facts.migrations import LoopFigures
from fleet.requests.control_loop import EngineLoop
from migration.config import MigrationConfig
from migration.handover.handover_messages import Grounds
from migration.loop_state.dispatch_windows import DispatchWindow
from migration.loop_state.plan_history import changed_since, paused_until, summaries, to_evaluate, to_undo
from migration.loop_state.verdict import StepPrices
from migration.model.engine_view import PlannedHomes
from migration.model.plan_log import EnginePlans, PlanRun
from migration.model.plan_record import Measures, PlanRecord
from migration.model.sampling_noise import expected_most

SHIFT_SECONDS = 5.0
"""Minimum interval between planning runs triggered by demand shifts."""
MAX_ROLLBACK_ATTEMPTS = 6
"""Rollback attempts for a harmful plan. The delay starts at one cycle and doubles."""
SHIFT_WINDOWS = 3.0
"""Number of windows after a demand shift during which plans count as a response to it."""


@dataclass(slots=True)
class DemandShift:
    """Shift of the demand."""

    at: float
    traceparent: str


@dataclass(slots=True)
class Rollback:
    """Rollback of a harmful plan."""

    plan: str
    tries: int = 0
    """failed attempts"""
    at: float = float("-inf")
    """time of the next attempt"""
    over: bool = False
    """True if the rollback is under way or will not be attempted again"""
    trouble: str = ""
    """reason why the plan is not rolled back; empty: it is"""

    def begun(self) -> None:
        """Note that the rollback is under way."""
        self.over, self.trouble = True, ""

    def never(self, why: str) -> None:
        """Note that the rollback will not be attempted."""
        self.over, self.trouble = True, f"plan {self.plan} did harm, and was not rolled back: {why}"

    def failed(self, why: str, now: float, cycle_seconds: float) -> None:
        """Note a failed attempt and schedule the next, with exponential backoff."""
        self.tries += 1
        if self.tries >= MAX_ROLLBACK_ATTEMPTS:
            return self.never(f"{why}; gave up after {self.tries} attempts; use roost rollback")
        self.over, self.at = False, now + cycle_seconds * 2 ** (self.tries - 1)
        self.trouble = f"plan {self.plan} did harm, and is not rolled back yet: {why}"
        return None


@dataclass(slots=True)
class EngineLoopState:
    """Control loop state of one engine. `now` is seconds of a monotonic clock."""

    engine: str
    worker_id: int
    next_at: float
    """latest time of the next planning run"""
    plans: EnginePlans
    decided: str = ""
    decided_at: float | None = None
    """Unix seconds"""
    shift: DemandShift | None = None
    early_at: float = float("-inf")
    """last planning run triggered by a shift"""
    homes: PlannedHomes | None = None
    """homes valid for the served placement"""
    homes_after: PlannedHomes | None = None
    """homes valid from the end of the plan under way"""
    rollback: Rollback | None = None
    """rollback of the last harmful plan"""
    switch_at: float = float("inf")
    """time of a switch of layout that the policy asks for; inf: it asks for none"""
    single_layers: str = ""
    """what the last planning run found about the forms of single layers"""
    retry_at: float = float("-inf")
    """failed actions are not retried before this time"""

    def decide(self, sentence: str, wall: float) -> None:
        """Set the last decision, with its time in Unix seconds."""
        self.decided, self.decided_at = sentence, wall

    @property
    def sentence(self) -> str:
        """Last decision, preceded by the unresolved trouble with a harmful plan."""
        harmful = to_undo(self.plans)
        trouble = "" if harmful is None else self.rollback_of(harmful).trouble
        return f"{trouble}; {self.decided}".removesuffix("; ") if trouble else self.decided

    @property
    def to_undo(self) -> PlanRun | None:
        """Harmful plan that is to be rolled back."""
        harmful = to_undo(self.plans)
        return None if harmful is None or self.rollback_of(harmful).over else harmful

    def rollback_of(self, harmful: PlanRun) -> Rollback:
        """Return the rollback state of a harmful plan."""
        if self.rollback is None or self.rollback.plan != harmful.plan:
            self.rollback = Rollback(harmful.plan)
        return self.rollback

    def rollback_at(self) -> float:
        """Return the time of the next rollback attempt; inf: none is due."""
        harmful = self.to_undo
        return float("inf") if harmful is None else self.rollback_of(harmful).at

    def shifted(self, shift: DemandShift) -> None:
        """Schedule an early planning run. Shifts within SHIFT_SECONDS are merged."""
        if self.shift is None or shift.at - self.shift.at > SHIFT_SECONDS:
            self.shift = shift
        self.next_at = min(self.next_at, max(shift.at, self.early_at + SHIFT_SECONDS))

    def pending_shift(self, now: float, config: MigrationConfig) -> DemandShift | None:
        """Return the shift that a plan made now would respond to; None: it is an ordinary plan of the
        cycle."""
        if self.shift is not None and now - self.shift.at >= SHIFT_WINDOWS * config.window_seconds:
            self.shift = None
        return self.shift

    def schedule(self, now: float, again: float | None, config: MigrationConfig) -> None:
        """Schedule the next planning run.

        again: seconds from the shift until there are windows to plan from; None: the regular cycle suffices.
        """
        self.next_at = now + config.cycle_seconds
        if self.shift is not None:
            self.early_at = now
            if again is not None:
                self.next_at = min(self.next_at, max(self.shift.at + again, now + SHIFT_SECONDS))

    def evaluate_at(self, config: MigrationConfig) -> float:
        """Return the time at which the last automatic plan is to be evaluated; inf: there is none."""
        run = to_evaluate(self.plans)
        if run is None:
            return float("inf")
        if changed_since(self.plans, run) or run.planned.worker_id != self.worker_id:
            return run.ended_at
        last = self.plans.last
        if last is not None and last.end is None:
            return float("inf")  # a plan under way may still change something; its end wakes the loop
        return run.ended_at + config.settle_seconds + config.evaluation_seconds

    def due(self, config: MigrationConfig) -> float:
        """Return the time of the next action."""
        actions = self.next_at, self.evaluate_at(config), self.rollback_at(), self.switch_at
        return max(min(actions), self.retry_at)

    def left_bytes(self, now: float, config: MigrationConfig) -> int:
        """Return the bytes that a plan may copy now."""
        return self.plans.spending.left(now, config.budget_bytes, config.budget_seconds)


class EngineStanding(NamedTuple):
    """Engine state from other components.

    Epoch, recent measurements, first measurements, discount factor on predictions, number of experts in
    cooldown, and what the plan under way waits for (`HandoverDescribed.pending`).
    """

    epoch: int
    window: DispatchWindow | None
    at_start: LoopFigures | None
    plan_discount: float
    resting: int
    pending: str = ""


def described(
    loop: EngineLoopState, standing: EngineStanding, config: MigrationConfig, now: float
) -> EngineLoop:
    """Return the report on an engine."""
    homes, window = loop.homes, standing.window
    return EngineLoop(
        engine=loop.engine,
        worker_id=loop.worker_id,
        epoch=standing.epoch,
        measured=None if window is None else window.measured.figures,
        layers=None if window is None else window.layers,
        at_start=standing.at_start,
        decided_at=loop.decided_at,
        decided=loop.sentence,
        next_seconds=max(loop.due(config) - now, 0.0),
        plan_discount=standing.plan_discount,
        spent_bytes=loop.plans.spending.within(now, config.budget_seconds),
        moved_bytes=loop.plans.moved_bytes,
        homes=0 if homes is None or homes.share is None else int(homes.share.any(axis=1).sum()),
        homes_note="" if homes is None else homes.note,
        resting=standing.resting,
        plans=summaries(loop.plans, standing.pending),
    )


def withheld(
    loop: EngineLoopState,
    record: PlanRecord,
    config: MigrationConfig,
    paused: str | None,
    answers: DemandShift | None,
    now: float,
) -> str:
    """Return the reason for not carrying out a plan that pays; empty: carry it out.

    paused: reason for the pause; None: not paused. answers: shift that the plan responds to.
    """
    if reason := forbidden(loop, config, paused, now, urgent=answers is not None):
        return reason
    if to_evaluate(loop.plans) is not None and answers is None:
        return "the plan before it is not evaluated yet"
    if not record.next_window:
        return "it was evaluated on the window that it was made from; it waits for the next"
    return ""


def forbidden(
    loop: EngineLoopState, config: MigrationConfig, paused: str | None, now: float, *, urgent: bool = False
) -> str:
    """Return the reason for not carrying out any automatic plan or switch of layout; empty: there is none.

    paused: as for `withheld`. urgent: it does not wait for the rollback of a harmful plan.
    """
    if not config.automatic:
        return "planner.automatic is off: carry it out with roost plan --apply"
    if paused is not None:
        return f"it is paused{f' ({paused})' if paused else ''}: roost migration resume"
    if (harmful := loop.to_undo) is not None and not urgent:
        return f"plan {harmful.plan}, which did harm, is to be rolled back first"
    if (rest := paused_until(loop.plans, config.cycle_seconds) - now) > 0:
        return f"the last plan was aborted, and the next waits {rest:.0f} s"
    return ""


def step_balance(placed: float, ceiling: float | None) -> float:
    """Return the balance of single steps, as it would be measured, from the balance of a placement over a
    window.

    The imbalance of the placement and the sampling noise of a step combine like independent deviations.
    ceiling: upper bound from sampling noise; None: unknown.
    """
    if ceiling is None or not placed:
        return placed
    return float(1.0 / (1.0 + ((1.0 / placed - 1.0) ** 2 + (1.0 / ceiling - 1.0) ** 2) ** 0.5))


def predicted_figures(measures: Measures, ceiling: float | None) -> LoopFigures:
    """Return the predicted figures of a placement from a plan's record, in terms of what will be measured."""
    return LoopFigures(
        remote_ranks=measures.remote_ranks,
        local=measures.local_share,
        balance=step_balance(measures.balance_mean, ceiling),
        step_seconds=measures.step_seconds,
    )


def grounds(record: PlanRecord, traceparent: str) -> Grounds:
    """Return the planner's reason and predictions for a plan."""
    before, after = (
        None if measures is None else predicted_figures(measures, record.step_ceiling)
        for measures in (record.before, record.after)
    )
    return Grounds(record.policy, before, after, traceparent)


def prices(record: PlanRecord, ranks: int, top_k: int) -> StepPrices | None:
    """Return the step prices that the plan was computed with; None: it was not computed.

    The prices are the seconds of a step for an even load of the experts, and per distinct remote rank.
    """
    if record.before is None:
        return None
    figures = predicted_figures(record.before, record.step_ceiling)
    remote = record.before.dispatch_seconds / figures.remote_ranks if figures.remote_ranks else 0.0
    return StepPrices(
        experts=record.before.expert_seconds * figures.balance,
        remote=remote,
        chance=expected_most(ranks) * sqrt(ranks / top_k),
    )
