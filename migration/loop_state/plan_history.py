"""History of one engine's plans from the log: execution, copied bytes, outcome and verdict. Pure; bounded.

The result is the same for live events and for a replay by a successor. Times are seconds of a monotonic
clock, unless stated otherwise. Repeated entries change nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile

from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.requests.control_loop import PlanSummary
from migration.loop_state.byte_budget import ByteBudget

MOST_TALES = 32
"""Limit on the remembered plans of an engine; the newest are kept."""
MOST_IDS = 1024
"""limit on the remembered plan ids of an engine; by default its log holds at most this many messages"""
MOST_TOLD = 8
"""limit on the plans included in reports"""
MOST_DOUBLINGS = 6
"""limit on the doublings of the pause after consecutive aborted plans"""
Entry = MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted | PlanEvaluated


@dataclass(slots=True)
class PlanStory:
    """History of one plan."""

    planned: MigrationPlanned
    at: float
    """start time, Unix seconds"""
    numbers: set[int] = field(default_factory=set)
    """numbers of its committed handovers"""
    copied_bytes: int = 0
    epoch: int = 0
    """last epoch that it created; 0: none"""
    end: MigrationCommitted | MigrationAborted | None = None
    ended_at: float = 0.0
    judged: PlanEvaluated | None = None

    @property
    def own(self) -> bool:
        """True if the planner started the plan automatically. Its own rollbacks name the policy."""
        return self.planned.origin == "planner" or (
            self.planned.origin == "rollback" and bool(self.planned.policy)
        )

    @property
    def whole(self) -> bool:
        """True if all handovers were committed."""
        return isinstance(self.end, MigrationCommitted)

    @property
    def in_vain(self) -> bool:
        """True if the plan has ended without any committed handover, so that nothing has changed."""
        return self.end is not None and not self.numbers

    @property
    def undoes(self) -> bool:
        """True if the plan is an automatic rollback."""
        return self.own and self.planned.origin == "rollback"

    @property
    def awaits_judgement(self) -> bool:
        """True if this is an automatic plan that has ended, changed something, and was not evaluated yet."""
        return (
            self.planned.origin == "planner"
            and self.end is not None
            and bool(self.numbers)
            and self.judged is None
        )

    @property
    def outcome(self) -> str:
        """Outcome in words, for people."""
        if self.judged is not None:
            return self.judged.verdict
        match self.end:
            case None:
                return f"under way, {len(self.numbers)} of {self.planned.handovers} handovers done"
            case MigrationAborted() as aborted:
                return (
                    f"aborted after {len(self.numbers)} of {self.planned.handovers} handovers:"
                    f" {aborted.reason}"
                )
        return "committed"


class PlanHistory:
    """History of the plans of one engine, over all its incarnations."""

    def __init__(self) -> None:
        self.spending = ByteBudget()
        self.moved_bytes = 0
        """bytes copied by any plan since the start of the log or of the service"""
        self._plans: OrderedDict[str, PlanStory] = OrderedDict()
        """by id, oldest first"""
        self._ids: OrderedDict[str, None] = OrderedDict()
        """ids of all known plans, so that replaying the log does not start a plan again"""

    def hear(self, said: Entry, now: float, wall: float) -> bool:
        """Apply one log entry, in order. Returns True if it is new.

        now, wall: time at which the entry was written, on the monotonic clock and in Unix seconds.
        """
        tale = self._plans.get(said.plan)
        if isinstance(said, MigrationPlanned):
            if said.plan in self._ids:
                return False
            self._begin(said, wall)
            return True
        if tale is None:
            return False
        match said:
            case MigrationCommitted() if said.number not in tale.numbers:
                self._committed(tale, said, now)
            case MigrationAborted() if tale.end is None:
                tale.end, tale.ended_at = said, now
            case PlanEvaluated() if tale.judged is None:
                tale.judged = said
            case _:
                return False
        return True

    @property
    def last(self) -> PlanStory | None:
        """Newest plan; None: there was none."""
        return next(reversed(self._plans.values()), None)

    @property
    def to_judge(self) -> PlanStory | None:
        """Newest automatic plan that has not been evaluated yet."""
        return next((tale for tale in reversed(self._plans.values()) if tale.awaits_judgement), None)

    @property
    def to_undo(self) -> PlanStory | None:
        """Newest plan, if its verdict is harmful.

        Later plans are skipped if they changed nothing, or if they are automatic rollbacks that were aborted.
        """
        behind = (
            tale
            for tale in reversed(self._plans.values())
            if not (tale.in_vain or (tale.undoes and isinstance(tale.end, MigrationAborted)))
        )
        newest = next(behind, None)
        return (
            newest
            if newest is not None and newest.judged is not None and newest.judged.verdict == "harmful"
            else None
        )

    @property
    def epoch(self) -> int:
        """Last epoch that a plan created; 0: none."""
        return next((tale.epoch for tale in reversed(self._plans.values()) if tale.numbers), 0)

    def setback(self, seconds: float) -> float:
        """Return the time before which no further automatic plan is started; -inf: no restriction.

        The pause follows the last aborted plan. It lasts `seconds`, doubled for each directly preceding
        aborted plan.
        """
        failed = list(
            takewhile(
                lambda tale: tale.own and isinstance(tale.end, MigrationAborted),
                reversed(self._plans.values()),
            )
        )
        return (
            failed[0].ended_at + seconds * 2 ** min(len(failed), MOST_DOUBLINGS) if failed else float("-inf")
        )

    def follows(self, tale: PlanStory) -> bool:
        """Return True if a later plan changed something after this one."""
        return any(
            later.numbers
            for later in takewhile(lambda other: other is not tale, reversed(self._plans.values()))
        )

    def told(self) -> tuple[PlanSummary, ...]:
        """Return the last plans, newest first."""
        return tuple(_report(tale) for tale in list(reversed(self._plans.values()))[:MOST_TOLD])

    def _begin(self, planned: MigrationPlanned, wall: float) -> None:
        self._plans[planned.plan] = PlanStory(planned, wall)
        self._ids[planned.plan] = None
        while len(self._ids) > MOST_IDS:
            self._ids.popitem(last=False)
        while len(self._plans) > MOST_TALES:
            self._plans.popitem(last=False)

    def _committed(self, tale: PlanStory, said: MigrationCommitted, now: float) -> None:
        tale.numbers.add(said.number)
        copied = max(said.bytes, 0)
        tale.copied_bytes += copied
        tale.epoch = max(tale.epoch, said.epoch)
        self.moved_bytes += copied
        if tale.own:
            self.spending.spend(now, copied)
        if said.last:
            tale.end, tale.ended_at = said, now


def _report(tale: PlanStory) -> PlanSummary:
    planned, judged = tale.planned, tale.judged
    return PlanSummary(
        plan=planned.plan,
        origin=planned.origin,
        policy=planned.policy,
        at=tale.at,
        outcome=tale.outcome,
        copies=planned.copies,
        bytes=planned.bytes,
        predicted_before=planned.before,
        predicted_after=planned.after,
        measured_before=None if judged is None else judged.measured_before,
        measured_after=None if judged is None else judged.measured_after,
    )
