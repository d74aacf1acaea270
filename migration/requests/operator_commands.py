"""Requests of operators to move experts and to change the layout: make a plan, start it and confirm, or
refuse with a reason."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, get_args

import msgspec

from bus import Bus, BusError, Message
from bus.protocol.subjects import Subjects
from fleet.facts.migrations import MigrationPlanned, Origin
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import (
    ApplyMap,
    ApplyPlan,
    MigrateExpert,
    MigrationAccepted,
    RollBack,
    SetLayout,
    SwitchEstimate,
)
from fleet.requests.refusal import RequestRefused
from migration.config import MigrationConfig
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, PlacementRegistry
from migration.execution.executor import PlanExecutor
from migration.execution.handover_driver import Unfit
from migration.handover.handover_messages import accepted
from migration.model.plan import Plan
from migration.model.plan_log import PlanRun
from migration.planning.operator_maps import one_expert_of_a_map, requested_map, restoring_map
from migration.planning.operator_plans import one_expert, plan_to_undo, read, restoring_plan
from migration.requests.switch_plans import SwitchPlans

ASK_SECONDS = 2.0
"""Time limit for the answer of a rank; the request is then refused."""


Order = MigrateExpert | ApplyMap | ApplyPlan | RollBack | SetLayout


class _Made(NamedTuple):
    """A plan that an operator requested."""

    plan: Plan
    origin: Origin = "operator"
    switch: SwitchEstimate | None = None
    """of a switch of layout"""


class OperatorCommands:
    """Used on one event loop, on the leader. clock: monotonic seconds."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: MigrationConfig,
        placements: PlacementRegistry,
        demand: DemandWindows,
        conductor: PlanExecutor,
        switches: SwitchPlans,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._placements = placements
        self._demand = demand
        self._executor = conductor
        self._config = config
        self._switches = switches

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use another byte budget from now on."""
        self._config = config

    async def answer(self, message: Message) -> Message:
        """Answer a request from the bus."""
        if not isinstance(message, Order):
            kinds = ", ".join(kind.__name__ for kind in get_args(Order))
            return RequestRefused(
                reason=f"a {type(message).__name__} is no request for this subject; send one of {kinds}"
            )
        try:
            dry_run = isinstance(message, MigrateExpert | ApplyMap | SetLayout) and message.dry_run
            turns = isinstance(message, ApplyPlan | RollBack | SetLayout)
            entry = self.present(message.engine) if turns else self.movable(message.engine)
            waiting = self._replaceable(entry.engine, message)
            if waiting is not None and _ends(message, waiting, entry.placement):
                return await self._end(entry, waiting, dry_run=dry_run)
            statuses = await self._executor.survey(entry, ASK_SECONDS)
            made = await self._plan(entry, message, statuses)
            self._switches.check_legal(
                entry,
                turns=any(step.turns for step in made.plan.steps),
                attends=made.plan.attention is not None,
            )
            if dry_run:
                return _replacing(accepted(entry, made.plan, made.switch), waiting)
            paced = isinstance(message, SetLayout) and not message.now
            if paced and not self._config.budget_bytes:
                return RequestRefused(
                    reason="planner.budget_bytes is 0, so that nothing moves within it; use --now"
                )
            answer = await self._executor.accept(
                entry,
                made.plan,
                made.origin,
                paced=paced,
                switch=made.switch,
                replaces="" if waiting is None else waiting.plan,
            )
            return _replacing(answer, waiting)
        except (ValueError, Unfit, BusError) as error:
            return RequestRefused(reason=str(error))

    def _replaceable(self, engine: str, request: Order) -> PlanRun | None:
        """Return the plan that waits for the byte budget, and that a request may replace. None: there is
        none. Raises ExecutorBusy if the engine has another plan under way."""
        waiting = self._executor.waiting(engine) if isinstance(request, SetLayout | RollBack) else None
        if waiting is None:
            self._executor.refuse_second(engine)
        return waiting

    async def _end(self, entry: EngineEntry, waiting: PlanRun, *, dry_run: bool) -> MigrationAccepted:
        """End a waiting plan, since nothing else is left to do, and confirm."""
        if not dry_run:
            await self._executor.end_waiting(entry.engine, waiting.plan, "ended by an operator")
        return MigrationAccepted(
            engine=entry.engine,
            worker_id=entry.worker_id,
            plan=waiting.plan,
            handovers=0,
            copies=0,
            bytes=0,
            what=(f"{_progress(waiting)} ends, and nothing else changes",),
        )

    def movable(self, engine: str) -> EngineEntry:
        """Return an engine with whole layers, whose experts can be moved. Raises ValueError if there is none
        of this name."""
        entry = self.present(engine)
        if not len(entry.placement.whole):
            raise ValueError(
                f"all layers of engine {engine!r} are sharded, so that every rank holds a part of each"
                " expert; make layers whole before moving experts (roost layout)"
            )
        return entry

    def present(self, engine: str) -> EngineEntry:
        """Return an engine with experts. Raises ValueError if there is none of this name."""
        entry = self._placements.engines().get(engine)
        if entry is None:
            raise ValueError(
                f"no engine {engine!r} with experts is present; there are:"
                f" {', '.join(sorted(self._placements.engines())) or 'none'}"
            )
        return entry

    async def _plan(
        self,
        entry: EngineEntry,
        request: Order,
        statuses: Sequence[HandoverDescribed],
    ) -> _Made:
        """Make the requested plan. Raises ValueError with the reason if there is none."""
        match request:
            case MigrateExpert():
                demand = self._demand.reported_rates(entry.worker_id)
                make = one_expert_of_a_map if entry.rearranges else one_expert
                room = self._switches.room(entry, statuses)
                return _Made(await asyncio.to_thread(make, entry.placement, request, room, demand))
            case ApplyMap():
                if not entry.rearranges:
                    raise ValueError(
                        f"engine {entry.engine!r} does not move its experts itself, and takes plans instead"
                        " of whole maps: roost plan"
                    )
                goal = Placement.from_record(request.placement)
                room = self._switches.room(entry, statuses)
                return _Made(await asyncio.to_thread(requested_map, entry.placement, goal, room))
            case ApplyPlan():
                plan = await asyncio.to_thread(
                    read, request.plan, entry.placement, rearranges=entry.rearranges
                )
                return _Made(plan)
            case SetLayout():
                made = await self._switches.plan(entry, request.sharded, request.attention, statuses)
                return _Made(made.plan, switch=made.estimate)
        planned = plan_to_undo(self._executor.log.plans.engines[entry.engine], request.plan)
        goal = await self.before(planned)
        return _Made(await self.undoing(entry, planned, goal, statuses), "rollback")

    async def undoing(
        self,
        entry: EngineEntry,
        planned: MigrationPlanned,
        goal: Placement,
        statuses: Sequence[HandoverDescribed],
    ) -> Plan:
        """Make the plan that restores the placement before another plan. Raises ValueError if there is
        none."""
        make = restoring_map if entry.rearranges else restoring_plan
        receives = bool(len(entry.placement.whole) or len(goal.whole))
        room = self._switches.room(entry, statuses, receives=receives)
        return await asyncio.to_thread(make, entry.placement, goal, planned.plan, room)

    async def before(self, planned: MigrationPlanned) -> Placement:
        """Return the placement that a plan started from.

        Raises BusError if the log cannot be read, and ValueError if the log does not reach back that far.
        """
        async for received in self._bus.replay(self._subjects.placements(planned.engine), follow=False):
            event = received.message
            if isinstance(event, PlacementCommitted) and (event.worker_id, event.placement.epoch) == (
                planned.worker_id,
                planned.base_epoch,
            ):
                return Placement.from_record(event.served)
        raise ValueError(
            f"epoch {planned.base_epoch} of engine {planned.engine!r}, before plan {planned.plan}, is not"
            " stored any more"
        )


def _ends(request: Order, waiting: PlanRun, placement: Placement) -> bool:
    """Return True if a request asks for nothing but the end of a waiting plan: for the layout that is served,
    or to roll back a plan that has changed nothing yet."""
    match request:
        case SetLayout():
            return (request.attention, request.sharded) == (placement.attention, placement.sharded)
        case RollBack():
            return not waiting.progress.numbers and request.plan in ("", waiting.plan)
    return False


def _progress(waiting: PlanRun) -> str:
    done, all_ = len(waiting.progress.numbers), waiting.planned.handovers
    return f"plan {waiting.plan}, which waits for the byte budget after {done} of {all_} handovers,"


def _replacing(answer: MigrationAccepted, waiting: PlanRun | None) -> MigrationAccepted:
    """Add that a waiting plan is replaced."""
    if waiting is None:
        return answer
    return msgspec.structs.replace(answer, what=(f"{_progress(waiting)} is replaced", *answer.what))
