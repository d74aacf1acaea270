"""Requests of operators to move experts: make a plan, start it and confirm, or refuse with a reason."""

import asyncio
from collections.abc import Sequence

from bus import Bus, BusError, Message
from bus.protocol.subjects import Subjects
from fleet.facts.migrations import MigrationPlanned, Origin
from fleet.facts.placements import PlacementCommitted
from fleet.placement import Placement
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import ApplyMap, ApplyPlan, MigrateExpert, RollBack
from fleet.requests.refusal import RequestRefused
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, PlacementRegistry
from migration.execution.executor import PlanExecutor
from migration.execution.handover_driver import Unfit
from migration.handover.handover_messages import accepted
from migration.model.plan import Plan
from migration.planning.operator_maps import one_expert_of_a_map, requested_map, restoring_map
from migration.planning.operator_plans import one_expert, plan_to_undo, read, restoring_plan
from migration.planning.staging_capacity import StagingRoom

ASK_SECONDS = 2.0
"""Time limit for the answer of a rank; the request is then refused."""


class RankFull(ValueError):
    """Error: a rank has no free cell for another expert. It may have one later."""


class OperatorCommands:
    """Used on one event loop, on the leader."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        placements: PlacementRegistry,
        demand: DemandWindows,
        conductor: PlanExecutor,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._placements = placements
        self._demand = demand
        self._executor = conductor

    async def answer(self, message: Message) -> Message:
        """Answer a request from the bus."""
        if not isinstance(message, MigrateExpert | ApplyMap | ApplyPlan | RollBack):
            kinds = ", ".join(kind.__name__ for kind in (MigrateExpert, ApplyMap, ApplyPlan, RollBack))
            return RequestRefused(
                reason=f"a {type(message).__name__} is no request for this subject; send one of {kinds}"
            )
        try:
            entry = self.movable(message.engine)
            self._executor.refuse_second(entry.engine)
            statuses = await self._executor.survey(entry, ASK_SECONDS)
            plan, origin = await self._plan(entry, message, statuses)
            if isinstance(message, MigrateExpert | ApplyMap) and message.dry_run:
                return accepted(entry, plan)
            return await self._executor.accept(entry, plan, origin)
        except (ValueError, Unfit, BusError) as error:
            return RequestRefused(reason=str(error))

    def movable(self, engine: str) -> EngineEntry:
        """Return an engine whose experts can be moved. Raises ValueError if there is none of this name."""
        entry = self._placements.engines().get(engine)
        if entry is None:
            raise ValueError(
                f"no engine {engine!r} with experts is present; there are:"
                f" {', '.join(sorted(self._placements.engines())) or 'none'}"
            )
        if entry.layout.sharded:
            raise ValueError(
                f"engine {engine!r} holds experts sharded over its ranks ({entry.layout}); they can move"
                " under expert parallelism only"
            )
        return entry

    async def _plan(
        self,
        entry: EngineEntry,
        request: MigrateExpert | ApplyMap | ApplyPlan | RollBack,
        statuses: Sequence[HandoverDescribed],
    ) -> tuple[Plan, Origin]:
        """Make the requested plan. Raises ValueError with the reason if there is none."""
        match request:
            case MigrateExpert():
                demand = self._demand.reported_rates(entry.worker_id)
                make = one_expert_of_a_map if entry.rearranges else one_expert
                room = self._room(entry, statuses)
                return await asyncio.to_thread(make, entry.placement, request, room, demand), "operator"
            case ApplyMap():
                if not entry.rearranges:
                    raise ValueError(
                        f"engine {entry.engine!r} does not move its experts itself, and takes plans instead"
                        " of whole maps: roost plan"
                    )
                goal = Placement.from_record(request.placement)
                room = self._room(entry, statuses)
                return await asyncio.to_thread(requested_map, entry.placement, goal, room), "operator"
            case ApplyPlan():
                plan = await asyncio.to_thread(
                    read, request.plan, entry.placement, rearranges=entry.rearranges
                )
                return plan, "operator"
        planned = plan_to_undo(self._executor.log.plans.engines[entry.engine], request.plan)
        return await self.undoing(entry, planned, await self.before(planned), statuses), "rollback"

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
        return await asyncio.to_thread(make, entry.placement, goal, planned.plan, self._room(entry, statuses))

    def _room(self, entry: EngineEntry, statuses: Sequence[HandoverDescribed]) -> StagingRoom:
        """Return the staging capacity of an engine.

        Raises RankFull if a rank has no free cell, and ValueError if the engine is not tracked.
        """
        machines = self._demand.machines(entry.worker_id)
        if machines is None:
            raise ValueError(
                f"engine {entry.engine!r} is not tracked: its demand exceeds planner.max_cells; raise it"
            )
        shape, node = machines
        if entry.rearranges:
            return StagingRoom(node=node, expert_bytes=shape.expert_bytes)
        least = min(statuses, key=lambda status: status.free)
        if least.free < 1:
            held = f"{least.quarantined} are in quarantine, {least.draining} drain"
            raise RankFull(
                f"rank {least.rank} has no free cell to bring an expert into: {held}; wait until they settle,"
                " or restart the engine"
            )
        return StagingRoom(node=node, expert_bytes=shape.expert_bytes, staging=least.free)

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
                return Placement.from_record(event.placement)
        raise ValueError(
            f"epoch {planned.base_epoch} of engine {planned.engine!r}, before plan {planned.plan}, is not"
            " stored any more"
        )
