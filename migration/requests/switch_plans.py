"""Plans of switches of layout, what they cost, and whether they are legal."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleet.layout import KV_PAGE_SECONDS, KV_ROUND_PAGES, AttentionKind, head_groups, kv_units_read
from fleet.placement import Placement
from fleet.requests.handovers import HandoverDescribed
from fleet.requests.plans import KvMove, SwitchEstimate
from migration.config import MigrationConfig
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry
from migration.execution.executor import PlanExecutor
from migration.model.cost_model import LinkSpeeds
from migration.model.plan import PART_LINKS, Plan
from migration.planning.layout_switch import Switch, attention_refusal, switch, turning_refusal
from migration.planning.staging_capacity import StagingRoom


class RankFull(ValueError):
    """Error: a rank has no free cell for another expert. It may have one later."""


class PlannedSwitch(NamedTuple):
    """A plan that changes the layout, and its estimated cost."""

    plan: Plan
    estimate: SwitchEstimate


class SwitchPlans:
    """Used on one event loop, on the leader. clock: monotonic seconds."""

    def __init__(
        self,
        config: MigrationConfig,
        demand: DemandWindows,
        executor: PlanExecutor,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._demand = demand
        self._executor = executor
        self._clock = clock

    def reconfigure(self, config: MigrationConfig) -> None:
        """Use new link speeds and another byte budget from now on."""
        self._config = config

    async def plan(
        self,
        entry: EngineEntry,
        sharded: Sequence[int],
        attention: AttentionKind,
        statuses: Sequence[HandoverDescribed],
        goal: Placement | None = None,
    ) -> PlannedSwitch:
        """Plan the switch after which exactly these layers are sharded, and this is the attention. Raises
        ValueError with the reason if there is none.

        goal: gives layers that become whole their experts; None: each rank gets an even share, in order.
        """
        turns = set(sharded) != set(entry.placement.sharded)
        attends = attention != entry.placement.attention
        self.check_legal(entry, turns=turns or not attends, attends=attends)
        room = self.room(entry, statuses, receives=turns)
        found = await asyncio.to_thread(
            switch, entry.placement, sharded, room, attention=attention, goal=goal
        )
        return PlannedSwitch(found.plan, self._estimate(entry, found, room))

    def check_legal(self, entry: EngineEntry, *, turns: bool, attends: bool) -> None:
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

    def room(
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
