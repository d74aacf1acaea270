"""The story of one engine's plans, as the log tells it: which ran, what they copied, how they ended, what they really brought. Pure; bounded.

It is the same whether it is heard as it happens or read back by a successor. Times are seconds of one clock that never goes back, unless said
otherwise; what is told a second time changes nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile

from fleet.events import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged, PlanJudged, PlanTold
from migration.loop_state.byte_budget import ByteBudget

MOST_TALES = 32
"""Plans that are remembered of an engine, the last ones."""
MOST_IDS = 1024
"""ids of plans that are remembered of an engine; its log holds no more messages by default"""
MOST_TOLD = 8
"""of them, that are told"""
MOST_DOUBLINGS = 6
"""of the pause after plans that were given up one after another"""
Entry = MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted | PlanJudged


@dataclass(slots=True)
class PlanStory:
    """One plan."""

    planned: MigrationPlanned
    at: float
    """Unix seconds, of its beginning"""
    numbers: set[int] = field(default_factory=set)
    """of its handovers that were committed"""
    copied_bytes: int = 0
    epoch: int = 0
    """the last that it made; 0: none"""
    end: MigrationCommitted | MigrationAborted | None = None
    ended_at: float = 0.0
    judged: PlanJudged | None = None

    @property
    def own(self) -> bool:
        """Whether the planner made it by itself; a rollback of its own names the policy."""
        return self.planned.origin == "planner" or (self.planned.origin == "rollback" and bool(self.planned.policy))

    @property
    def whole(self) -> bool:
        """Whether all of it was done."""
        return isinstance(self.end, MigrationCommitted)

    @property
    def in_vain(self) -> bool:
        """Whether it is over and nothing of it was done: everything is as it was before."""
        return self.end is not None and not self.numbers

    @property
    def undoes(self) -> bool:
        """Whether it is a rollback of the planner's own."""
        return self.own and self.planned.origin == "rollback"

    @property
    def awaits_judgement(self) -> bool:
        """A plan of the planner's own that is over, changed something, and was not judged yet."""
        return self.planned.origin == "planner" and self.end is not None and bool(self.numbers) and self.judged is None

    @property
    def outcome(self) -> str:
        """For people."""
        if self.judged is not None:
            return self.judged.verdict
        match self.end:
            case None:
                return f"under way, {len(self.numbers)} of {self.planned.handovers} handovers done"
            case MigrationAborted() as aborted:
                return f"aborted after {len(self.numbers)} of {self.planned.handovers} handovers: {aborted.reason}"
        return "committed"


class PlanHistory:
    """Of one engine, all of its lives."""

    def __init__(self) -> None:
        self.spending = ByteBudget()
        self.moved_bytes = 0
        """copied by any plan since the log begins, or the service"""
        self._tales: OrderedDict[str, PlanStory] = OrderedDict()
        """by id, the oldest first"""
        self._ids: OrderedDict[str, None] = OrderedDict()
        """of all plans that were heard of: a story that is told again from its beginning does not begin anew"""

    def hear(self, said: Entry, now: float, wall: float) -> bool:
        """One entry of the log, in its order; whether it is news. now, wall: when it was written, on the clock and as Unix seconds."""
        tale = self._tales.get(said.plan)
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
            case PlanJudged() if tale.judged is None:
                tale.judged = said
            case _:
                return False
        return True

    @property
    def last(self) -> PlanStory | None:
        """The newest plan; None: there was none."""
        return next(reversed(self._tales.values()), None)

    @property
    def to_judge(self) -> PlanStory | None:
        """The newest of the planner's own that waits to be judged."""
        return next((tale for tale in reversed(self._tales.values()) if tale.awaits_judgement), None)

    @property
    def to_undo(self) -> PlanStory | None:
        """The newest plan, where it was judged harmful: what followed it was in vain, or was a rollback of our own that was given up on its way."""
        behind = (tale for tale in reversed(self._tales.values()) if not (tale.in_vain or (tale.undoes and isinstance(tale.end, MigrationAborted))))
        newest = next(behind, None)
        return newest if newest is not None and newest.judged is not None and newest.judged.verdict == "harmful" else None

    @property
    def epoch(self) -> int:
        """The last that a plan made; 0: none did."""
        return next((tale.epoch for tale in reversed(self._tales.values()) if tale.numbers), 0)

    def setback(self, seconds: float) -> float:
        """Until when no other plan of the planner's own is tried: so many seconds behind the last that was given up, and twice as many for each that
        was given up right before. -inf: the last was not."""
        failed = list(takewhile(lambda tale: tale.own and isinstance(tale.end, MigrationAborted), reversed(self._tales.values())))
        return failed[0].ended_at + seconds * 2 ** min(len(failed), MOST_DOUBLINGS) if failed else float("-inf")

    def follows(self, tale: PlanStory) -> bool:
        """Whether another plan changed something behind this one."""
        return any(later.numbers for later in takewhile(lambda other: other is not tale, reversed(self._tales.values())))

    def told(self) -> tuple[PlanTold, ...]:
        """The last plans, the newest first."""
        return tuple(_told(tale) for tale in list(reversed(self._tales.values()))[:MOST_TOLD])

    def _begin(self, planned: MigrationPlanned, wall: float) -> None:
        self._tales[planned.plan] = PlanStory(planned, wall)
        self._ids[planned.plan] = None
        while len(self._ids) > MOST_IDS:
            self._ids.popitem(last=False)
        while len(self._tales) > MOST_TALES:
            self._tales.popitem(last=False)

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


def _told(tale: PlanStory) -> PlanTold:
    planned, judged = tale.planned, tale.judged
    return PlanTold(
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
