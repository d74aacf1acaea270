"""Requests of operators to move experts and to change the layout: make a plan, start it and confirm, or
refuse with a reason."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import msgspec

from bus import Bus, BusError, Message
from bus.protocol.subjects import Subjects
from fleet.facts.migrations import MigrationPlanned, Origin
from fleet.facts.placements import PlacementCommitted
from fleet.layout import KV_PAGE_SECONDS, KV_ROUND_PAGES, head_groups, kv_units_read
from fleet.placement import Placement
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import (
    ApplyMap,
    ApplyPlan,
    KvMove,
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
from migration.model.cost_model import LinkSpeeds
from migration.model.plan import PART_LINKS, Plan
from migration.model.plan_log import PlanRun
from migration.planning.layout_switch import Switch, attention_refusal, switch, turning_refusal
from migration.planning.operator_maps import one_expert_of_a_map, requested_map, restoring_map
from migration.planning.operator_plans import one_expert, plan_to_undo, read, restoring_plan
from migration.planning.staging_capacity import StagingRoom

ASK_SECONDS = 2.0
"""Time limit for the answer of a rank; the request is then refused."""


class RankFull(ValueError):
    """Error: a rank has no free cell for another expert. It may have one later."""


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
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._placements = placements
        self._demand = demand
        self._executor = conductor
        self._config = config
        self._clock = clock

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new link speeds and another byte budget from now on."""
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
            self._check_legal(
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

    def _check_legal(self, entry: EngineEntry, *, turns: bool, attends: bool) -> None:
        """Raise ValueError if an engine cannot turn layers over, or change its attention, as a plan does."""
        if not turns and not attends:
            return
        joined, placement = entry.joined, entry.placement
        if joined is None or joined.shape is None:
            raise ValueError(f"the join of engine {entry.engine!r} is not known yet; try again")
        reason = turns and turning_refusal(
            joined.shape, placement.attention, placement.ranks, joined.unshardable, joined.tp_refusal
        )
        if reason:
            raise ValueError(f"engine {entry.engine!r} cannot turn layers over: {reason}")
        reason = attends and attention_refusal(joined.shape, placement.ranks, joined.tp_refusal)
        if reason:
            raise ValueError(f"engine {entry.engine!r} cannot change its attention: {reason}")

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
                room = self._room(entry, statuses)
                return _Made(await asyncio.to_thread(make, entry.placement, request, room, demand))
            case ApplyMap():
                if not entry.rearranges:
                    raise ValueError(
                        f"engine {entry.engine!r} does not move its experts itself, and takes plans instead"
                        " of whole maps: roost plan"
                    )
                goal = Placement.from_record(request.placement)
                room = self._room(entry, statuses)
                return _Made(await asyncio.to_thread(requested_map, entry.placement, goal, room))
            case ApplyPlan():
                plan = await asyncio.to_thread(
                    read, request.plan, entry.placement, rearranges=entry.rearranges
                )
                return _Made(plan)
            case SetLayout():
                turns = set(request.sharded) != set(entry.placement.sharded)
                attends = request.attention != entry.placement.attention
                self._check_legal(entry, turns=turns or not attends, attends=attends)
                room = self._room(entry, statuses, receives=turns)
                found = await asyncio.to_thread(
                    switch, entry.placement, request.sharded, room, attention=request.attention
                )
                return _Made(found.plan, switch=self._estimate(entry, found, room))
        planned = plan_to_undo(self._executor.log.plans.engines[entry.engine], request.plan)
        goal = await self.before(planned)
        return _Made(await self.undoing(entry, planned, goal, statuses), "rollback")

    def _estimate(self, entry: EngineEntry, found: Switch, room: StagingRoom) -> SwitchEstimate:
        """Estimate the cost of a switch of layout."""
        plans, config = self._executor.log.plans.engines[entry.engine], self._config
        speed = plans.read_speed
        links = LinkSpeeds(
            same_node=speed or config.rank_bytes_per_second,
            cross_node=speed or config.node_bytes_per_second,
        )
        parts = [moved for step in found.plan.steps for moved in step.parts]
        sizes = [handover.bytes for handover in found.plan.handovers]
        wait = plans.spending.wait(self._clock(), sizes, config.budget_bytes, config.budget_seconds)
        return SwitchEstimate(
            bytes_by_link={
                link: sum(moved.bytes for moved in parts if moved.link == link) for link in PART_LINKS
            },
            seconds=found.seconds(room.node, links),
            budget_seconds=wait if config.budget_bytes else None,
            measured=bool(speed),
            cells=found.cells,
            free=room.staging or 0,
            kv=self._kv_move(entry, found.plan, links),
        )

    def _kv_move(self, entry: EngineEntry, plan: Plan, links: LinkSpeeds) -> KvMove | None:
        """Estimate the KV that ranks read as a plan changes the attention. None: it does not, or too little
        is reported."""
        joined, after = entry.joined, plan.attention
        if after is None or joined is None or joined.shape is None or not joined.kv_block_bytes:
            return None
        use = self._demand.kv_use(entry.worker_id, entry.targets)
        if use is None:
            return None
        ranks, pages = entry.placement.ranks, sum(use.pages)
        groups = head_groups(ranks, joined.shape.kv_heads)
        unit = joined.kv_block_bytes // groups
        sizes = kv_units_read(use.pages, after, ranks, groups) * unit
        last = kv_units_read(use.running, after, ranks, groups) * unit
        return KvMove(
            pages=pages,
            bytes=int(sizes.sum()),
            rounds=1 + -(-max(use.pages) // KV_ROUND_PAGES),
            seconds=float(sizes.max()) / links.same_node,
            pause_seconds=float(last.max()) / links.same_node + KV_PAGE_SECONDS * pages,
        )

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
        room = self._room(entry, statuses, receives=receives)
        return await asyncio.to_thread(make, entry.placement, goal, planned.plan, room)

    def _room(
        self, entry: EngineEntry, statuses: Sequence[HandoverDescribed], *, receives: bool = True
    ) -> StagingRoom:
        """Return the staging capacity of an engine. receives: ranks are to receive experts.

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
        if not receives:
            return StagingRoom(node=node, expert_bytes=shape.expert_bytes)
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
