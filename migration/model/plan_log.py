"""What the log says of plans: which one of each engine has no end yet, and how far it is. Pure; bounded; repetitions change nothing."""

from collections import OrderedDict
from dataclasses import dataclass, field

from fleet.events import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged

Entry = MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted
MOST_IDS = 1024
"""ids of plans that are remembered of an engine; its log holds no more messages by default"""


@dataclass(slots=True)
class PlanRun:
    """The newest plan of an engine."""

    planned: MigrationPlanned
    next: int = 0
    """number of the handover that comes after those that were committed"""
    staged: MigrationStaged | None = None
    """the last that was staged"""
    end: MigrationCommitted | MigrationAborted | None = None
    entries: set[tuple[str, int, int]] = field(default_factory=set)
    """(kind, number, handover) of what was recorded; as many as the plan has handovers, twice"""


class PlanLog:
    """Of one namespace."""

    def __init__(self) -> None:
        self._courses: dict[str, PlanRun] = {}
        self._ids: dict[str, OrderedDict[str, str]] = {}
        """by engine and id: the blob in which a plan is stored; empty: in none"""
        self._seconds: dict[str, dict[str, MigrationPlanned]] = {}
        """by engine and id: plans that were recorded while another was under way, by somebody who thought to lead"""

    def heard(self, said: Entry) -> bool:
        """One entry of the log, in its order; whether it is news."""
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
        if isinstance(said, MigrationAborted) and self._seconds.get(said.engine, {}).pop(said.plan, None) is not None:
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
        """Whether the log says this already."""
        if isinstance(entry, MigrationPlanned):
            return entry.plan in self._ids.get(entry.engine, ())
        if entry.plan in self._seconds.get(entry.engine, {}):
            return False
        course = self._courses.get(entry.engine)
        return course is not None and course.planned.plan == entry.plan and _named(entry) in course.entries

    def course(self, engine: str) -> PlanRun | None:
        """Of the newest plan; None: there was none."""
        return self._courses.get(engine)

    def under_way(self, engine: str) -> PlanRun | None:
        """The plan that has no end yet."""
        course = self._courses.get(engine)
        return course if course is not None and course.end is None else None

    def second(self, engine: str) -> MigrationPlanned | None:
        """A plan that was recorded while another was under way, and has no end yet."""
        return next(iter(self._seconds.get(engine, {}).values()), None)

    def known(self) -> tuple[str, ...]:
        """Engines that had a plan."""
        return tuple(self._courses)

    def engines(self) -> tuple[str, ...]:
        """Those whose newest plan has no end yet."""
        return tuple(engine for engine, course in self._courses.items() if course.end is None)

    def over(self, engine: str) -> dict[str, str]:
        """Plans of an engine that have an end and are stored nevertheless: their blobs, by id."""
        course = self.under_way(engine)
        open_ = {*self._seconds.get(engine, ()), *(() if course is None else (course.planned.plan,))}
        return {plan: blob for plan, blob in self._ids.get(engine, {}).items() if blob and plan not in open_}

    def dropped(self, engine: str, plan: str) -> None:
        """A plan of an engine is stored no more."""
        if plan in self._ids.get(engine, ()):
            self._ids[engine][plan] = ""

    def unused(self, engine: str, plan: str) -> str:
        """An id that no plan of the engine had before: this one, or with a number behind it."""
        ids, name, nth = self._ids.get(engine, OrderedDict[str, str]()), plan, 1
        while name in ids:
            nth += 1
            name = f"{plan}-{nth}"
        return name


def _named(entry: MigrationStaged | MigrationCommitted | MigrationAborted) -> tuple[str, int, int]:
    return type(entry).__name__, entry.number, entry.handover
