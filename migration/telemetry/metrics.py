"""Prometheus metrics of the migration service."""

from collections.abc import Mapping, Sequence
from time import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fleet.facts.migrations import (
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.requests.control_loop import LayerFigures
from fleet.requests.handovers import HandoverDescribed
from migration.engine_state.placement_registry import EngineEntry
from migration.handover.coordinator import HandoverState, Transition
from migration.model.plan_record import PlanRecord

_RECORD = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_PLAN = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_CELLS = ("free", "quarantined", "draining")
_HANDOVER = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_BY_ENGINE = {
    "roost_migration_epoch": "Placement epoch that the engine serves",
    "roost_migration_last_success_timestamp_seconds": "Unix time of the last committed handover",
    "roost_migration_cells_oldest_seconds": "Age of the oldest cell that is draining or in quarantine",
    "roost_migration_plan_age_seconds": "Seconds since the plan under way was started; 0 without a plan",
    "roost_migration_handovers_pending": "Remaining handovers of the plan under way",
    "roost_migration_layers_pending": "Layers that the remaining handovers change",
    "roost_migration_commit_overdue": (
        "1 while some rank does not serve a decided handover within planner.commit_seconds"
    ),
    "roost_planner_gain_seconds": "Predicted reduction of the step time by the last plan of the cycle",
    "roost_planner_net_seconds": (
        "Predicted gain of the last plan over the expected lifetime of the demand, minus its cost"
    ),
    "roost_planner_copied_bytes": "Bytes of weights that the last plan would copy",
    "roost_planner_balance": (
        "Balance of the served placement: mean over layers of mean / highest rank load"
    ),
    "roost_planner_local_share": (
        "Predicted share of (token, k) pairs served on the rank of their request, for the served placement"
    ),
    "roost_loop_balance": (
        "Measured balance in single steps (mean / highest rank load), mean over layers, in the last window"
    ),
    "roost_loop_remote_ranks": (
        "Measured mean of the distinct other ranks that a token was sent to, over all layers, in the last"
        " window"
    ),
    "roost_loop_local_share": (
        "Measured share of (token, k) pairs served on the rank of their request, in the last window"
    ),
    "roost_loop_step_seconds": "Measured mean step time in the last window",
    "roost_loop_communication_share": (
        "Measured share of the step time spent on communication, including waiting for other ranks, in the"
        " last window"
    ),
    "roost_loop_plan_discount": "Discount factor (0-1) applied to predicted plan gains",
    "roost_loop_spent_bytes": ("Bytes of weights copied by automatic plans within planner.budget_seconds"),
    "roost_loop_left_bytes": "Bytes of weights that automatic plans may still copy",
    "roost_loop_realised": "Share of the predicted gain realised by the last evaluated plan",
}
_BY_LAYER = {
    "balance": "Measured balance of a layer in single steps (mean / highest rank load) in the last window",
    "remote_ranks": (
        "Measured mean of the distinct other ranks that a token was sent to in a layer, in the last window"
    ),
    "local_share": (
        "Measured share of a layer's (token, k) pairs served on the rank of their request, in the last window"
    ),
}


class MigrationMetrics:
    """Metrics in one registry per service. Series of engines that are gone are removed."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.recorded = Counter(
            "roost_migration_placements_recorded", "Placement epochs written to the log", registry=registry
        )
        self.recording = Histogram(
            "roost_migration_record_seconds",
            "Seconds from join to stored placement, including retries",
            buckets=_RECORD,
            registry=registry,
        )
        self.retries = Counter(
            "roost_migration_record_retries", "Failed attempts to record a placement", registry=registry
        )
        self._rejected = Counter(
            "roost_migration_rejected",
            "Rejected joins, placements and reports, by reason",
            ["reason"],
            registry=registry,
        )
        self._by_engine = {
            name: Gauge(name, text, ["engine"], registry=registry) for name, text in _BY_ENGINE.items()
        }
        self._by_layer = {
            name: Gauge(f"roost_loop_layer_{name}", text, ["engine", "layer"], registry=registry)
            for name, text in _BY_LAYER.items()
        }
        self._plans = Counter(
            "roost_planner_plans", "Planning runs, by outcome", ["outcome"], registry=registry
        )
        self._refusals = Counter(
            "roost_planner_refusals",
            "Planning runs without a worthwhile or possible plan, by reason",
            ["reason"],
            registry=registry,
        )
        self._planning_seconds = Histogram(
            "roost_planner_plan_seconds",
            "Duration of planning runs in seconds",
            buckets=_PLAN,
            registry=registry,
        )
        self.lost = Counter(
            "roost_planner_lost", "Lost messages, counted by gaps in sequence numbers", registry=registry
        )
        self.homes = Counter("roost_planner_homes_changed", "Changes of engines' homes", registry=registry)
        self._full = Gauge(
            "roost_planner_bus_store_refusals",
            "Writes rejected because a store of the bus was full, by store",
            ["store"],
            registry=registry,
        )
        self.stored_bytes = Gauge("roost_planner_stored_bytes", "Bytes of stored demand", registry=registry)
        self._verdicts = Counter(
            "roost_loop_verdicts", "Evaluated automatic plans, by verdict", ["verdict"], registry=registry
        )
        self._outcomes = Counter(
            "roost_loop_plans",
            "Completed plans, by origin and outcome",
            ["origin", "outcome"],
            registry=registry,
        )
        self._paused = Gauge(
            "roost_loop_paused", "1 while automatic planning is paused by an operator", registry=registry
        )
        self._reloads = Counter(
            "roost_planner_reloads", "Configuration reloads, by outcome", ["outcome"], registry=registry
        )
        self._measured: dict[str, int] = {}
        """layer count of each measured engine"""
        self._engines: set[str] = set()
        self.leader = Gauge(
            "roost_migration_leader",
            "1 while this service is the leader, 0 while it is on standby",
            registry=registry,
        )
        self._ended = Counter(
            "roost_migration_handovers",
            "Finished handovers, by outcome and fault",
            ["outcome", "fault"],
            registry=registry,
        )
        self._bytes = Counter(
            "roost_migration_moved_bytes", "Bytes of weights copied in committed handovers", registry=registry
        )
        self._seconds = Histogram(
            "roost_migration_handover_seconds",
            "Duration of handovers in seconds, by phase",
            ["phase"],
            buckets=_HANDOVER,
            registry=registry,
        )
        self._cells = Gauge(
            "roost_migration_cells",
            "Cells of expert memory that serve no expert, over all ranks, by state",
            ["engine", "state"],
            registry=registry,
        )

    def store_refusals(self, counts: Mapping[str, int]) -> None:
        for store, count in counts.items():
            self._full.labels(store).set(count)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def planning_run(self, reason: str | None, seconds: float) -> None:
        """Count a planning run. reason: short code for having no plan; None: there is a plan."""
        self._plans.labels("refused" if reason is not None else "plan").inc()
        if reason is not None:
            self._refusals.labels(reason).inc()
        self._planning_seconds.observe(seconds)

    def unknown(self, reason: str) -> None:
        """Count an engine for which planning was impossible."""
        self._plans.labels("unknown").inc()
        self._refusals.labels(reason).inc()

    def figures(self, record: PlanRecord) -> None:
        """Publish the figures of an engine from the last cycle."""
        current = {
            "gain_seconds": record.gain_seconds,
            "net_seconds": record.net_seconds,
            "copied_bytes": float(record.copied_bytes),
        }
        if record.before is not None:
            current.update(balance=record.before.balance_mean, local_share=record.before.local_share)
        self._publish(record.engine, "roost_planner", current)

    def serving(self, engines: dict[str, EngineEntry]) -> None:
        """Publish the epochs of the present engines and remove the series of all others."""
        for engine in self._engines - engines.keys():
            for gauge in self._by_engine.values():
                gauge.remove(engine)
            for layer in range(self._measured.pop(engine, 0)):
                for gauge in self._by_layer.values():
                    gauge.remove(engine, str(layer))
            for state in _CELLS:
                self._cells.remove(engine, state)
        self._engines = set(engines)
        for engine, entry in engines.items():
            self._publish(engine, "roost_migration", {"epoch": entry.epoch})

    # Control loop

    def measured(self, engine: str, figures: LoopFigures, layers: LayerFigures) -> None:
        """Publish the measurements of an engine's last window."""
        if engine not in self._engines:
            return
        current = {
            "balance": figures.balance,
            "remote_ranks": figures.remote_ranks,
            "local_share": figures.local,
            "step_seconds": figures.step_seconds,
        }
        if figures.communication is not None:
            current["communication_share"] = figures.communication
        self._publish(engine, "roost_loop", current)
        self._measured[engine] = len(layers.balance)
        for name, values in (
            ("balance", layers.balance),
            ("remote_ranks", layers.remote_ranks),
            ("local_share", layers.local),
        ):
            for layer, value in enumerate(values):
                self._by_layer[name].labels(engine, str(layer)).set(value)

    def loop(self, engine: str, plan_discount: float, spent: int, left: int) -> None:
        """Publish the control loop's state for an engine."""
        values = {"plan_discount": plan_discount, "spent_bytes": spent, "left_bytes": left}
        self._publish(engine, "roost_loop", values)

    def evaluated(self, message: PlanEvaluated) -> None:
        """Publish the verdict on a plan."""
        self._verdicts.labels(message.verdict).inc()
        if message.realised is not None:
            self._publish(message.engine, "roost_loop", {"realised": message.realised})

    def plan_ended(self, origin: str, outcome: str) -> None:
        """Count a plan that has ended: committed or aborted."""
        self._outcomes.labels(origin, outcome).inc()

    def paused(self, paused: bool) -> None:
        self._paused.set(float(paused))

    def reloaded(self, outcome: str) -> None:
        """Count a reload of the settings: refused, changed or same."""
        self._reloads.labels(outcome).inc()

    # Handovers

    def transition(self, after: HandoverState, transition: Transition, now: float) -> None:
        """Publish the effects of a handover's transition."""
        for entry in transition.records:
            match entry:
                case MigrationStaged():
                    self._seconds.labels("staging").observe(entry.seconds)
                case MigrationCommitted():
                    self._ended.labels("committed", "").inc()
                    self._bytes.inc(entry.bytes)
                    self._seconds.labels("commit").observe(entry.commit_seconds)
                    self._publish(entry.engine, "roost_migration", {"last_success_timestamp_seconds": time()})
                case MigrationAborted():
                    self._ended.labels("aborted", entry.fault).inc()
        self.overdue(after.what.engine, after.overdue(now))

    def dropped(self, fault: str) -> None:
        """Count a plan whose rest was abandoned with no handover open."""
        self._ended.labels("dropped", fault).inc()

    def overdue(self, engine: str, overdue: bool) -> None:
        self._publish(engine, "roost_migration", {"commit_overdue": float(overdue)})

    def pending(self, engine: str, age: float, handovers: int, layers: int) -> None:
        """Publish the progress of an engine's plan; all 0 if there is none."""
        values = {"plan_age_seconds": age, "handovers_pending": handovers, "layers_pending": layers}
        self._publish(engine, "roost_migration", values)

    def cells(self, engine: str, statuses: Sequence[HandoverDescribed]) -> None:
        """Publish the cell counts that the ranks of an engine last reported."""
        if engine in self._engines:
            for state in _CELLS:
                self._cells.labels(engine, state).set(sum(getattr(status, state) for status in statuses))
            oldest = max((status.oldest_seconds for status in statuses), default=0.0)
            self._publish(engine, "roost_migration", {"cells_oldest_seconds": oldest})

    def _publish(self, engine: str, prefix: str, values: Mapping[str, float]) -> None:
        """Set gauges, but only for present engines, because the series of others are removed."""
        if engine in self._engines:
            for name, value in values.items():
                self._by_engine[f"{prefix}_{name}"].labels(engine).set(value)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
