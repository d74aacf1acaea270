"""Fold of the log of plans: progress, copied bytes, outcome and verdict of every plan, by engine. Pure;
bounded; idempotent.

The result is the same for live entries and for a replay by a successor.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from migration.model.byte_budget import ByteBudget

ProgressEntry = MigrationStaged | MigrationCommitted | MigrationAborted
PlanEntry = MigrationPlanned | ProgressEntry | PlanEvaluated
MAX_PLANS = 1024
"""Limit on the remembered plans of an engine. By default its log holds at most this many messages."""


@dataclass(slots=True)
class RunProgress:
    """Progress of one plan, folded from its entries."""

    next: int = 0
    """number of the next handover, after the committed ones"""
    numbers: set[int] = field(default_factory=set)
    """numbers of the committed handovers"""
    copies: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0
    """duration of the committed handovers, each from the proposal to the last flip"""
    epoch: int = 0
    """last epoch that the plan created; 0: none"""
    staged: MigrationStaged | None = None
    """last staged handover"""
    end: MigrationCommitted | MigrationAborted | None = None
    entries: set[tuple[str, int, int]] = field(default_factory=set)
    """(kind, number, handover) of the applied entries; at most two per handover of the plan"""

    def apply(self, entry: ProgressEntry) -> bool:
        """Apply one entry of this plan. Returns True if it is new."""
        if self.has(entry):
            return False
        self.entries.add(_key(entry))
        match entry:
            case MigrationStaged():
                self.staged = entry
            case MigrationCommitted():
                self._committed(entry)
            case MigrationAborted():
                self.end = self.end or entry
        return True

    def has(self, entry: ProgressEntry) -> bool:
        """Return True if this entry was applied before."""
        return _key(entry) in self.entries

    @property
    def committed(self) -> bool:
        """True if all handovers were committed."""
        return isinstance(self.end, MigrationCommitted)

    @property
    def aborted(self) -> MigrationAborted | None:
        """Entry that aborted the plan; None: it was not aborted."""
        return self.end if isinstance(self.end, MigrationAborted) else None

    def _committed(self, entry: MigrationCommitted) -> None:
        self.next = max(self.next, entry.number + 1)
        if entry.number not in self.numbers:
            self.numbers.add(entry.number)
            self.copies += entry.copies
            self.copied_bytes += max(entry.bytes, 0)
            self.seconds += entry.seconds
            self.epoch = max(self.epoch, entry.epoch)
            if entry.last:
                self.end = entry


@dataclass(slots=True)
class PlanRun:
    """Execution of one plan, and its verdict."""

    planned: MigrationPlanned
    at: float
    """start time, Unix seconds"""
    second: bool = False
    """True if it was recorded while another plan was under way, by a service that wrongly believed it was the
    leader"""
    progress: RunProgress = field(default_factory=RunProgress)
    ended_at: float = 0.0
    """monotonic seconds"""
    evaluated: PlanEvaluated | None = None
    evaluated_at: float = 0.0
    """Unix seconds"""
    stored: bool = True
    """False once the blob of the plan was deleted"""

    @property
    def plan(self) -> str:
        return self.planned.plan

    @property
    def end(self) -> MigrationCommitted | MigrationAborted | None:
        return self.progress.end

    @property
    def own(self) -> bool:
        """True if the planner started the plan automatically. Its own rollbacks name the policy."""
        return self.planned.origin == "planner" or self.undoes

    @property
    def undoes(self) -> bool:
        """True if the plan is an automatic rollback."""
        return self.planned.origin == "rollback" and bool(self.planned.policy)

    @property
    def switches_layout(self) -> bool:
        """True if the plan changes the form of layers, or the attention."""
        planned = self.planned
        return bool(planned.to_sharded or planned.to_whole or planned.attention is not None)

    @property
    def changed_nothing(self) -> bool:
        """True if the plan has ended without any committed handover."""
        return self.end is not None and not self.progress.numbers

    @property
    def awaits_evaluation(self) -> bool:
        """True if this is an automatic plan that has ended, changed something, and was not evaluated yet."""
        return (
            self.planned.origin == "planner"
            and self.end is not None
            and bool(self.progress.numbers)
            and self.evaluated is None
        )

    @property
    def outcome(self) -> str:
        """Outcome in words, for people."""
        if self.evaluated is not None:
            return self.evaluated.verdict
        done = f"{len(self.progress.numbers)} of {self.planned.handovers} handovers"
        match self.end:
            case None:
                return f"under way, {done} done"
            case MigrationAborted() as aborted:
                return f"aborted after {done}: {aborted.reason}"
        return "committed"


class EnginePlans:
    """Plans of one engine, over all its incarnations."""

    def __init__(self) -> None:
        self.runs: OrderedDict[str, PlanRun] = OrderedDict()
        """by id, oldest first"""
        self.spending = ByteBudget()
        """bytes copied by plans within the byte budget: automatic ones, and paced ones of operators"""
        self.moved_bytes = 0
        """bytes copied by any plan since the start of the log or of the service"""

    def apply(self, entry: PlanEntry, now: float = 0.0, wall: float = 0.0) -> bool:
        """Apply one log entry, in order. Returns True if it is new.

        now, wall: time at which the entry was written, on the monotonic clock and in Unix seconds.
        """
        run = self.runs.get(entry.plan)
        if isinstance(entry, MigrationPlanned):
            return run is None and self._begin(entry, wall)
        if run is None:
            return False
        if isinstance(entry, PlanEvaluated):
            if run.evaluated is not None:
                return False
            run.evaluated, run.evaluated_at = entry, wall
            return True
        copied, end = run.progress.copied_bytes, run.end
        if not run.progress.apply(entry):
            return False
        copied = run.progress.copied_bytes - copied
        self.moved_bytes += copied
        if run.own or run.planned.paced:
            self.spending.spend(now, copied)
        if run.end is not end:
            run.ended_at = now
        return True

    def _begin(self, planned: MigrationPlanned, wall: float) -> bool:
        if (current := self.current) is not None and current.end is not None:
            current.progress.staged = None  # large; needed until the next plan
        self.runs[planned.plan] = PlanRun(planned, wall, second=self.under_way is not None)
        if len(self.runs) > MAX_PLANS:
            oldest = next((run.plan for run in self.runs.values() if run.end is not None), planned.plan)
            del self.runs[oldest]
        return True

    def has(self, entry: PlanEntry) -> bool:
        """Return True if the log already contains this entry."""
        run = self.runs.get(entry.plan)
        match entry:
            case MigrationPlanned():
                return run is not None
            case PlanEvaluated():
                return run is not None and run.evaluated is not None
        return run is not None and run.progress.has(entry)

    @property
    def last(self) -> PlanRun | None:
        """Newest plan; None: there was none."""
        return next(reversed(self.runs.values()), None)

    @property
    def current(self) -> PlanRun | None:
        """Newest plan that was recorded while no other was under way; None: there was none."""
        return next((run for run in reversed(self.runs.values()) if not run.second), None)

    @property
    def under_way(self) -> PlanRun | None:
        """Plan that is carried out and has not ended yet."""
        current = self.current
        return current if current is not None and current.end is None else None

    @property
    def second(self) -> PlanRun | None:
        """Plan that was recorded while another was under way and has not ended yet."""
        return next((run for run in self.runs.values() if run.second and run.end is None), None)

    @property
    def finished(self) -> list[PlanRun]:
        """Plans that have ended but whose blobs are still stored."""
        return [run for run in self.runs.values() if run.end is not None and run.stored and run.planned.blob]

    @property
    def read_speed(self) -> float:
        """Bytes per second that a rank read from another in the last staged handover; 0: not known."""
        staged = next(
            (run.progress.staged for run in reversed(self.runs.values()) if run.progress.staged), None
        )
        pulls = [pull for pull in (() if staged is None else staged.pulls) if pull.transfer != "local"]
        seconds = sum(pull.seconds for pull in pulls)
        return sum(pull.bytes for pull in pulls) / seconds if seconds > 0 else 0.0

    def unused(self, plan: str) -> str:
        """Return an id that no plan has used: this one, or this one with a numeric suffix."""
        name, nth = plan, 1
        while name in self.runs:
            nth += 1
            name = f"{plan}-{nth}"
        return name


class PlanLog:
    """Plans of the engines of one namespace."""

    def __init__(self) -> None:
        self.engines = defaultdict[str, EnginePlans](EnginePlans)
        """by name"""

    def apply(self, entry: PlanEntry, now: float = 0.0, wall: float = 0.0) -> bool:
        """Apply one log entry, in order; see `EnginePlans.apply`."""
        return self.engines[entry.engine].apply(entry, now, wall)

    def has(self, entry: PlanEntry) -> bool:
        """Return True if the log already contains this entry."""
        return self.engines[entry.engine].has(entry)

    @property
    def busy(self) -> tuple[str, ...]:
        """Engines with a plan under way."""
        return tuple(name for name, plans in self.engines.items() if plans.under_way is not None)

    def trim(self, limit: int, present: Collection[str]) -> None:
        """Forget the oldest engines beyond a limit, except present ones and those with a plan under way."""
        kept = {*present, *self.busy}
        gone = [name for name in self.engines if name not in kept]
        for name in gone[: max(len(self.engines) - limit, 0)]:
            del self.engines[name]


def _key(entry: ProgressEntry) -> tuple[str, int, int]:
    return type(entry).__name__, entry.number, entry.handover
