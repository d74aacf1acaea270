"""Fold of the migration log: the unfinished plan of each engine and its progress. Pure; bounded;
idempotent."""

from collections import OrderedDict
from dataclasses import dataclass, field

from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged

Entry = MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted
MOST_IDS = 1024
"""plan ids remembered per engine; by default its log holds at most this many messages"""


@dataclass(slots=True)
class PlanRun:
    """Progress of the newest plan of an engine."""

    planned: MigrationPlanned
    next: int = 0
    """number of the next handover, after the committed ones"""
    staged: MigrationStaged | None = None
    """the last staged handover"""
    end: MigrationCommitted | MigrationAborted | None = None
    entries: set[tuple[str, int, int]] = field(default_factory=set)
    """(kind, number, handover) of the recorded entries; at most two per handover of the plan"""


class PlanLog:
    """Plans of the engines of one namespace."""

    def __init__(self) -> None:
        self._courses: dict[str, PlanRun] = {}
        self._ids: dict[str, OrderedDict[str, str]] = {}
        """by engine and id: blob that stores the plan; empty: none"""
        self._seconds: dict[str, dict[str, MigrationPlanned]] = {}
        """by engine and id: plans recorded while another was under way, by a service that wrongly believed it
        was the leader"""

    def heard(self, said: Entry) -> bool:
        """Process one log entry, in order. Returns True if it is new."""
        if self.has(said):
            return False
        if isinstance(said, MigrationPlanned):
            ids = self._ids.setdefault(said.engine, OrderedDict())
            ids[said.plan] = said.blob
            while len(ids) > MOST_IDS:
                ids.popitem(last=False)
            if self.under_way(said.engine) is None:
                self._courses[said.engine] = PlanRun(said)
            else:
                self._seconds.setdefault(said.engine, {})[said.plan] = said
            return True
        if (
            isinstance(said, MigrationAborted)
            and self._seconds.get(said.engine, {}).pop(said.plan, None) is not None
        ):
            return True
        course = self._courses.get(said.engine)
        if course is None or course.planned.plan != said.plan:
            return False
        course.entries.add(_named(said))
        match said:
            case MigrationStaged():
                course.staged = said
            case MigrationCommitted():
                course.next = max(course.next, said.number + 1)
                course.end = said if said.last else course.end
            case MigrationAborted():
                course.end = said
        return True

    def has(self, entry: Entry) -> bool:
        """Return True if the log already contains this entry."""
        if isinstance(entry, MigrationPlanned):
            return entry.plan in self._ids.get(entry.engine, ())
        if entry.plan in self._seconds.get(entry.engine, {}):
            return False
        course = self._courses.get(entry.engine)
        return course is not None and course.planned.plan == entry.plan and _named(entry) in course.entries

    def course(self, engine: str) -> PlanRun | None:
        """Return the newest plan of an engine; None: there was none."""
        return self._courses.get(engine)

    def under_way(self, engine: str) -> PlanRun | None:
        """Return the plan of an engine that has not ended yet."""
        course = self._courses.get(engine)
        return course if course is not None and course.end is None else None

    def second(self, engine: str) -> MigrationPlanned | None:
        """Return a plan that was recorded while another was under way and has not ended yet."""
        return next(iter(self._seconds.get(engine, {}).values()), None)

    def known(self) -> tuple[str, ...]:
        """Return the engines that had a plan."""
        return tuple(self._courses)

    def engines(self) -> tuple[str, ...]:
        """Return the engines whose newest plan has not ended yet."""
        return tuple(engine for engine, course in self._courses.items() if course.end is None)

    def over(self, engine: str) -> dict[str, str]:
        """Return the blobs, by plan id, of an engine's plans that have ended but are still stored."""
        course = self.under_way(engine)
        open_ = {*self._seconds.get(engine, ()), *(() if course is None else (course.planned.plan,))}
        return {plan: blob for plan, blob in self._ids.get(engine, {}).items() if blob and plan not in open_}

    def dropped(self, engine: str, plan: str) -> None:
        """Note that the blob of a plan was deleted."""
        if plan in self._ids.get(engine, ()):
            self._ids[engine][plan] = ""

    def unused(self, engine: str, plan: str) -> str:
        """Return an id that no plan of the engine has used: this one, or this one with a numeric suffix."""
        ids, name, nth = self._ids.get(engine, OrderedDict[str, str]()), plan, 1
        while name in ids:
            nth += 1
            name = f"{plan}-{nth}"
        return name


def _named(entry: MigrationStaged | MigrationCommitted | MigrationAborted) -> tuple[str, int, int]:
    return type(entry).__name__, entry.number, entry.handover
