"""What is stored about engines, as it is stored, and orders that lead to more of it."""

import asyncio
from dataclasses import dataclass, field

import msgspec

from bus import Bus, BusError, Declined
from bus.protocol.subjects import Subjects
from fleet.facts.engines import EngineJoined
from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.facts.placements import PlacementCommitted
from fleet.layout import AttentionKind
from fleet.placement import Placement
from fleet.requests.plans import ApplyPlan, MigrationAccepted, SetLayout
from migration.model.plan import Plan

Ended = MigrationCommitted | MigrationAborted
Published = MigrationPlanned | MigrationStaged | Ended | PlanEvaluated


@dataclass
class History:
    """What is stored about one engine, in order."""

    placements: list[PlacementCommitted] = field(default_factory=list)
    joins: list[EngineJoined] = field(default_factory=list)
    migrations: list[Published] = field(default_factory=list)

    def of(self, plan: str) -> list[Published]:
        return [one for one in self.migrations if one.plan == plan]

    def end_of(self, plan: str) -> Ended | None:
        """What ended a plan; None: it goes on."""
        ends = [
            one
            for one in self.of(plan)
            if isinstance(one, MigrationAborted) or (isinstance(one, MigrationCommitted) and one.last)
        ]
        return ends[-1] if ends else None

    @property
    def latest(self) -> Placement:
        """On record as served by the present life, or by the one before. IndexError when nothing is.

        What a dead life had been about to serve may be recorded behind what the present one began with.
        """
        present = [one for one in self.placements if self.joins and one.worker_id == self.joins[-1].worker_id]
        return Placement.from_record((present or self.placements)[-1].served)

    @property
    def known(self) -> bool:
        """Whether what the present life serves is on record."""
        return bool(self.joins) and any(one.worker_id == self.joins[-1].worker_id for one in self.placements)


class Records:
    """What is stored, by engine, while `follow` runs."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus = bus
        self.subjects = subjects
        self.histories: dict[str, History] = {}

    async def follow(self) -> None:
        """Read for ever."""
        async with asyncio.TaskGroup() as tasks:
            for subject in (
                self.subjects.placements(),
                self.subjects.migrations(),
                self.subjects.membership(),
            ):
                tasks.create_task(self._remember(subject), name=f"remembers {subject}")

    async def _remember(self, subject: str) -> None:
        async for received in self.bus.replay(subject):
            messages = received.message
            match messages:
                case PlacementCommitted():
                    self.history(messages.engine).placements.append(messages)
                case EngineJoined():
                    self.history(messages.engine).joins.append(messages)
                case (
                    MigrationPlanned()
                    | MigrationStaged()
                    | MigrationCommitted()
                    | MigrationAborted()
                    | PlanEvaluated()
                ):
                    self.history(messages.engine).migrations.append(messages)

    def history(self, engine: str) -> History:
        return self.histories.setdefault(engine, History())

    async def order(self, engine: str, plan: Plan, seconds: float = 20.0, *, patiently: bool = True) -> None:
        """Have a plan carried out; asked again while nobody answers. patiently: and while it is declined.
        Declined when it is refused; BusError when nobody takes it."""
        deadline = asyncio.get_running_loop().time() + seconds
        request = ApplyPlan(engine=engine, plan=msgspec.json.encode(plan))
        unanswered = False
        while True:
            try:
                answer = await self.bus.request(self.subjects.migrate, request, 1.0)
            except Declined as refusal:
                if unanswered and self.history(engine).of(plan.id):
                    return  # it was accepted, and the answer lost
                if not patiently or asyncio.get_running_loop().time() > deadline:
                    raise refusal from None
            except BusError:
                unanswered = True
                if asyncio.get_running_loop().time() > deadline:
                    raise
            else:
                assert isinstance(answer, MigrationAccepted), answer
                assert answer.plan == plan.id, answer
                return
            await asyncio.sleep(0.05)

    async def switch(
        self,
        engine: str,
        sharded: tuple[int, ...],
        attention: AttentionKind = "dp",
        seconds: float = 20.0,
    ) -> str:
        """Have layers turned over until exactly these are sharded, and the attention changed: the plan's id.
        Asked again while nobody answers, and while it is declined. Declined, BusError: until the end."""
        history, deadline = self.history(engine), asyncio.get_running_loop().time() + seconds
        known = {one.plan for one in history.migrations}
        request = SetLayout(engine=engine, sharded=sharded, attention=attention, now=True)
        while True:
            try:
                answer = await self.bus.request(self.subjects.migrate, request, 5.0)
            except BusError:
                begun = [one.plan for one in history.migrations if isinstance(one, MigrationPlanned)]
                if begun and begun[-1] not in known:
                    return begun[-1]  # it was accepted, and the answer lost
                if asyncio.get_running_loop().time() > deadline:
                    raise
            else:
                assert isinstance(answer, MigrationAccepted), answer
                return answer.plan
            await asyncio.sleep(0.05)
