"""One engine as the service that plans by itself sees it: when to think, what is under way, what was decided last. Pure; times are arguments."""

from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from fleet.events import EngineLoop, LoopFigures
from migration.config import MigrationConfig
from migration.handover.handover_messages import Grounds
from migration.loop_state.dispatch_windows import DispatchWindow
from migration.loop_state.plan_history import PlanHistory, PlanStory
from migration.loop_state.verdict import StepPrices
from migration.model.engine_view import PlannedHomes
from migration.model.plan_record import Measures, PlanRecord
from migration.model.sampling_noise import expected_most

SHIFT_SECONDS = 5.0
"""Between two thoughts because popularity shifted there lie at least so many."""
MOST_UNDOINGS = 6
"""A plan that did harm is tried to be rolled back so many times, each time after twice as long; the first pause is a cycle."""
SHIFT_LASTS = 3.0
"""A plan counts as the answer to a shift for so many windows."""


@dataclass(slots=True)
class DemandShift:
    """That what is wanted is not what it was."""

    at: float
    traceparent: str


@dataclass(slots=True)
class Rollback:
    """What was done about a plan that did harm."""

    plan: str
    tries: int = 0
    """that failed"""
    at: float = float("-inf")
    """when to try again"""
    over: bool = False
    """it is being rolled back, or is not going to be"""
    trouble: str = ""
    """why it was not; empty: it is"""

    def begun(self) -> None:
        """It is being rolled back."""
        self.over, self.trouble = True, ""

    def never(self, why: str) -> None:
        """It is not going to be."""
        self.over, self.trouble = True, f"plan {self.plan} did harm, and was not rolled back: {why}"

    def failed(self, why: str, now: float, cycle_seconds: float) -> None:
        """It could not be, this time. It is tried again, ever less often."""
        self.tries += 1
        if self.tries >= MOST_UNDOINGS:
            return self.never(f"{why}; after {self.tries} attempts it is left to you: roost rollback")
        self.over, self.at = False, now + cycle_seconds * 2 ** (self.tries - 1)
        self.trouble = f"plan {self.plan} did harm, and is not rolled back yet: {why}"
        return None


@dataclass(slots=True)
class EngineLoopState:
    """`now` is seconds of one clock that never goes back."""

    engine: str
    worker_id: int
    next_at: float
    """when to think again, at the latest"""
    annals: PlanHistory
    decided: str = ""
    decided_at: float | None = None
    """Unix seconds"""
    shift: DemandShift | None = None
    hurried_at: float = float("-inf")
    """the last thought because of a shift"""
    homes: PlannedHomes | None = None
    """that hold with what is served now"""
    homes_after: PlannedHomes | None = None
    """that hold from the end of the plan under way on"""
    undoing: Rollback | None = None
    """of the last plan that did harm"""
    retry_at: float = float("-inf")
    """before then, what failed is not tried again"""

    def told(self, sentence: str, wall: float) -> None:
        """What was decided, at a time in Unix seconds."""
        self.decided, self.decided_at = sentence, wall

    @property
    def sentence(self) -> str:
        """What was decided last; before it what is left of the last plan, where that did harm."""
        harmful = self.annals.to_undo
        trouble = "" if harmful is None else self.undoing_of(harmful).trouble
        return f"{trouble}; {self.decided}".removesuffix("; ") if trouble else self.decided

    @property
    def to_undo(self) -> PlanStory | None:
        """A plan that did harm, and that is to be undone."""
        harmful = self.annals.to_undo
        return None if harmful is None or self.undoing_of(harmful).over else harmful

    def undoing_of(self, harmful: PlanStory) -> Rollback:
        """What was done about it."""
        if self.undoing is None or self.undoing.plan != harmful.planned.plan:
            self.undoing = Rollback(harmful.planned.plan)
        return self.undoing

    def undo_at(self) -> float:
        """When a plan that did harm is to be undone; inf: none is."""
        harmful = self.to_undo
        return float("inf") if harmful is None else self.undoing_of(harmful).at

    def shifted(self, shift: DemandShift) -> None:
        """Think about it soon. Shifts at the same time are one."""
        if self.shift is None or shift.at - self.shift.at > SHIFT_SECONDS:
            self.shift = shift
        self.next_at = min(self.next_at, max(shift.at, self.hurried_at + SHIFT_SECONDS))

    def settled(self) -> None:
        """What was to be done about a shift is done, or need not be done any more."""
        self.shift = None

    def answers(self, now: float, config: MigrationConfig) -> DemandShift | None:
        """The shift that a plan made now would answer; None: it would be one of the cycle's."""
        if self.shift is not None and now - self.shift.at >= SHIFT_LASTS * config.window_seconds:
            self.settled()
        return self.shift

    def rested(self, now: float, again: float | None, config: MigrationConfig) -> None:
        """A thought is over. again: seconds from the shift until there are windows to plan from; None: the cycle's pace will do."""
        self.next_at = now + config.cycle_seconds
        if self.shift is not None:
            self.hurried_at = now
            if again is not None:
                self.next_at = min(self.next_at, max(self.shift.at + again, now + SHIFT_SECONDS))

    def judge_at(self, config: MigrationConfig) -> float:
        """When the last plan of the planner's own is to be judged; inf: none is."""
        tale = self.annals.to_judge
        if tale is None:
            return float("inf")
        if self.annals.follows(tale) or tale.planned.worker_id != self.worker_id:
            return tale.ended_at
        last = self.annals.last
        if last is not None and last.end is None:
            return float("inf")  # what somebody has begun may yet change something; its end is news
        return tale.ended_at + config.settle_seconds + config.judge_seconds

    def due(self, config: MigrationConfig) -> float:
        """When something is to be done next."""
        return max(min(self.next_at, self.judge_at(config), self.undo_at()), self.retry_at)

    def left_bytes(self, now: float, config: MigrationConfig) -> int:
        """What a plan may copy at this moment."""
        return self.annals.spending.left(now, config.budget_bytes, config.budget_seconds)


class EngineStanding(NamedTuple):
    """What others know of an engine: its epoch, what was measured lately and in the beginning, what is taken of predictions, how many experts rest."""

    epoch: int
    window: DispatchWindow | None
    at_start: LoopFigures | None
    trust: float
    resting: int


def story(pilot: EngineLoopState, standing: EngineStanding, config: MigrationConfig, now: float) -> EngineLoop:
    """What is done with an engine, for whoever asks."""
    homes, window = pilot.homes, standing.window
    return EngineLoop(
        engine=pilot.engine,
        worker_id=pilot.worker_id,
        epoch=standing.epoch,
        measured=None if window is None else window.measured.figures,
        layers=None if window is None else window.layers,
        at_start=standing.at_start,
        decided_at=pilot.decided_at,
        decided=pilot.sentence,
        next_seconds=max(pilot.due(config) - now, 0.0),
        trust=standing.trust,
        spent_bytes=pilot.annals.spending.within(now, config.budget_seconds),
        moved_bytes=pilot.annals.moved_bytes,
        homes=0 if homes is None or homes.share is None else int(homes.share.any(axis=1).sum()),
        homes_note="" if homes is None else homes.note,
        resting=standing.resting,
        plans=pilot.annals.told(),
    )


def withheld(pilot: EngineLoopState, record: PlanRecord, config: MigrationConfig, paused: str | None, answers: DemandShift | None, now: float) -> str:
    """Why a plan that pays is not carried out now; empty: it is. paused: why; None: it is not. answers: the shift that it is the answer to."""
    if not config.automatic:
        return "planner.automatic is off: carry it out with roost plan --apply"
    if paused is not None:
        return f"it is paused{f' ({paused})' if paused else ''}: roost migration resume"
    if (harmful := pilot.to_undo) is not None and answers is None:
        return f"plan {harmful.planned.plan}, which did harm, is to be rolled back first"
    if pilot.annals.to_judge is not None and answers is None:
        return "the plan before it is not judged yet"
    if (rest := pilot.annals.setback(config.cycle_seconds) - now) > 0:
        return f"the last plan was given up, and the next waits {rest:.0f} s"
    if not record.next_window:
        return "it is judged on the very window it was made from; it waits for the next"
    return ""


def step_balance(placed: float, ceiling: float | None) -> float:
    """Balance of single steps, as it is measured, of a placement that is balanced like this over a window: what the placement and what the chance of so
    few tokens leave uneven add up as independent deviations do. ceiling: what chance leaves at best; None: nobody knows."""
    if ceiling is None or not placed:
        return placed
    return float(1.0 / (1.0 + ((1.0 / placed - 1.0) ** 2 + (1.0 / ceiling - 1.0) ** 2) ** 0.5))


def foretold(measures: Measures, ceiling: float | None) -> LoopFigures:
    """What a plan's record says of a placement, as it will be measured."""
    return LoopFigures(
        remote_ranks=measures.remote_ranks,
        local=measures.local_share,
        balance=step_balance(measures.balance_mean, ceiling),
        step_seconds=measures.step_seconds,
    )


def grounds(record: PlanRecord, traceparent: str) -> Grounds:
    """Why the planner has a plan carried out."""
    before, after = (None if told is None else foretold(told, record.step_ceiling) for told in (record.before, record.after))
    return Grounds(record.policy, before, after, traceparent)


def prices(record: PlanRecord, ranks: int, top_k: int) -> StepPrices | None:
    """What the plan was reckoned with: seconds of a step for an even load of the experts, and by distinct remote rank. None: it was not reckoned."""
    if record.before is None:
        return None
    told = foretold(record.before, record.step_ceiling)
    remote = record.before.dispatch_seconds / told.remote_ranks if told.remote_ranks else 0.0
    return StepPrices(experts=record.before.expert_seconds * told.balance, remote=remote, chance=expected_most(ranks) * sqrt(ranks / top_k))
