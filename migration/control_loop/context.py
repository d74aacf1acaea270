"""Parts of the migration service that the control loop works with."""

from collections.abc import Callable
from dataclasses import dataclass

from bus import Bus
from bus.protocol.subjects import Subjects
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, PlacementRegistry
from migration.execution.executor import PlanExecutor
from migration.execution.leader_lease import LeaderLease
from migration.loop_state.dispatch_windows import DispatchWindow, DispatchWindows
from migration.model.plan_log import EnginePlans
from migration.requests.operator_commands import OperatorCommands
from migration.requests.plan_queries import PlanQueries
from migration.requests.switch_plans import SwitchPlans
from migration.telemetry.metrics import MigrationMetrics
from migration.telemetry.tracing import MigrationTracing


@dataclass(frozen=True, slots=True)
class LoopContext:
    """Used on one event loop, on the leader. clock: monotonic seconds; wall: Unix seconds."""

    bus: Bus
    subjects: Subjects
    placements: PlacementRegistry
    demand: DemandWindows
    dispatch: DispatchWindows
    plan_queries: PlanQueries
    executor: PlanExecutor
    commands: OperatorCommands
    switches: SwitchPlans
    lead: LeaderLease
    metrics: MigrationMetrics
    tracing: MigrationTracing | None
    clock: Callable[[], float]
    wall: Callable[[], float]

    def plans(self, engine: str) -> EnginePlans:
        """Return the plans of an engine, from the log."""
        return self.executor.log.plans.engines[engine]

    def under_way(self, engine: str) -> bool:
        """Return True if an engine has an unfinished plan, or is just starting one."""
        return self.executor.busy(engine) is not None

    def measured(
        self,
        entry: EngineEntry,
        *,
        epoch: int | None = None,
        seconds: float | None = None,
        since: float | None = None,
    ) -> DispatchWindow | None:
        """Return recent measurements of an engine; see `DispatchWindows.window`."""
        return self.dispatch.window(entry.worker_id, self.clock(), epoch=epoch, seconds=seconds, since=since)
