"""The migration service's Prometheus families."""

from collections.abc import Mapping, Sequence
from time import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fleet.events import HandoverDescribed, LayerFigures, LoopFigures, MigrationAborted, MigrationCommitted, MigrationStaged, PlanJudged
from migration.engine_state.placement_registry import EngineEntry
from migration.handover.coordinator import HandoverState, Move
from migration.model.plan_record import PlanRecord

_RECORDING = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_THINKING = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_CELLS = ("free", "quarantined", "draining")
_HANDING = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class MigrationMetrics:
    """One registry per service; series of engines that are gone are dropped."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.recorded = Counter("roost_migration_placements_recorded", "Placements written to the log", registry=registry)
        self.recording = Histogram("roost_migration_record_seconds", "From join to stored placement, retries included", buckets=_RECORDING, registry=registry)
        self.retries = Counter("roost_migration_record_retries", "Attempts to record that failed", registry=registry)
        self._rejected = Counter("roost_migration_rejected", "Joins and placements refused, by reason", ["reason"], registry=registry)
        self._epoch = Gauge("roost_migration_epoch", "Placement epoch an engine serves", ["engine"], registry=registry)
        self._plans = Counter("roost_planner_plans", "Plans thought over, by what came of it", ["outcome"], registry=registry)
        self._refusals = Counter("roost_planner_refusals", "Plans that were not worth it or not possible, by reason", ["reason"], registry=registry)
        self.thinking = Histogram("roost_planner_plan_seconds", "What finding a plan took", buckets=_THINKING, registry=registry)
        self.lost = Counter("roost_planner_lost", "Messages that were never heard, by the gaps they left", registry=registry)
        self.homes = Counter("roost_planner_homes_changed", "Times that an engine's homes changed", registry=registry)
        self._figures = {
            name: Gauge(f"roost_planner_{name}", text, ["engine"], registry=registry)
            for name, text in (
                ("gain_seconds", "By which the last plan of the cycle would make a step shorter"),
                ("net_seconds", "What it would gain over the expected lifetime of the demand, less its cost"),
                ("copied_bytes", "Weights that it would copy"),
                ("balance", "Mean over layers of mean / highest load of a rank, of the placement that is served"),
                ("local_share", "Share of (token, k) pairs served where their request lives, of the placement that is served"),
            )
        }
        self._full = Gauge("roost_planner_bus_store_full", "Times that something found no room, by store", ["store"], registry=registry)
        self.stored_bytes = Gauge("roost_planner_stored_bytes", "What is kept of demand", registry=registry)
        self._layers = {
            name: Gauge(f"roost_loop_layer_{name}", text, ["engine", "layer"], registry=registry)
            for name, text in (
                ("balance", "Mean / highest load of a rank of a layer in single steps, measured in the last window"),
                ("remote_ranks", "Distinct other ranks that a token was sent to in a layer, measured in the last window"),
                ("local_share", "Share of (token, k) pairs of a layer served where their request lives, measured in the last window"),
            )
        }
        self._loop = {
            name: Gauge(f"roost_loop_{name}", text, ["engine"], registry=registry)
            for name, text in (
                ("balance", "Mean / highest load of a rank in single steps, mean over layers, measured in the last window"),
                ("remote_ranks", "Distinct other ranks that a token was sent to, mean over layers, measured in the last window"),
                ("local_share", "Share of (token, k) pairs served where their request lives, measured in the last window"),
                ("step_seconds", "What a step took, measured in the last window"),
                ("communication_share", "Share of a step's time that ranks spent sending and waiting for each other, measured in the last window"),
                ("trust", "What the planner takes of the gains that it foretells"),
                ("spent_bytes", "Weights that plans of the planner's own copied within planner.budget_seconds"),
                ("left_bytes", "Weights that they may still copy"),
            )
        }
        self._verdicts = Counter("roost_loop_verdicts", "Plans of the planner's own that were judged, by verdict", ["verdict"], registry=registry)
        self._outcomes = Counter(
            "roost_loop_plans", "Plans that are over, by who had them carried out and how they ended", ["origin", "outcome"], registry=registry
        )
        self._realised = Gauge("roost_loop_realised", "Share of the foretold gain that the last judged plan brought", ["engine"], registry=registry)
        self._paused = Gauge("roost_loop_paused", "1 while the planner makes no plans by itself because somebody paused it", registry=registry)
        self._reloads = Counter("roost_planner_reloads", "Times that settings were read again, by what came of it", ["outcome"], registry=registry)
        self._measured: dict[str, int] = {}
        """layers of the engines that were measured"""
        self._engines: set[str] = set()
        self.leader = Gauge("roost_migration_leader", "1 while this service leads, 0 while it stands by", registry=registry)
        self._ended = Counter("roost_migration_handovers", "Handovers that are over, by outcome and whose fault", ["outcome", "fault"], registry=registry)
        self._bytes = Counter("roost_migration_moved_bytes", "Weights that ranks took over in handovers that were committed", registry=registry)
        self._seconds = Histogram("roost_migration_handover_seconds", "What handovers took, by phase", ["phase"], buckets=_HANDING, registry=registry)
        self._success = Gauge("roost_migration_last_success_timestamp_seconds", "Unix time of the last committed handover", ["engine"], registry=registry)
        self._watchdog = {
            name: Gauge(f"roost_migration_{name}", text, ["engine"], registry=registry)
            for name, text in (
                ("plan_age_seconds", "Since the plan that is under way was taken up; 0: none is"),
                ("handovers_pending", "Handovers that the plan under way has left"),
                ("layers_pending", "Layers that they change"),
                ("commit_overdue", "1 while a decided handover is not served by every rank after planner.commit_seconds"),
            )
        }
        self._cells = Gauge("roost_migration_cells", "Cells of expert memory that serve nothing, of all ranks", ["engine", "state"], registry=registry)
        self._oldest = Gauge("roost_migration_cells_oldest_seconds", "Age of the oldest cell that drains or is in quarantine", ["engine"], registry=registry)

    def bus_full(self, counts: Mapping[str, int]) -> None:
        for store, count in counts.items():
            self._full.labels(store).set(count)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def thought(self, reason: str | None, seconds: float) -> None:
        """Something was thought over. reason: in a word, why there is no plan; None: there is one."""
        self._plans.labels("refused" if reason is not None else "plan").inc()
        if reason is not None:
            self._refusals.labels(reason).inc()
        self.thinking.observe(seconds)

    def unknown(self, reason: str) -> None:
        """Nothing could be thought over."""
        self._plans.labels("unknown").inc()
        self._refusals.labels(reason).inc()

    def figures(self, record: PlanRecord) -> None:
        """What the cycle found of an engine."""
        told = {"gain_seconds": record.gain_seconds, "net_seconds": record.net_seconds, "copied_bytes": float(record.copied_bytes)}
        if record.before is not None:
            told.update(balance=record.before.balance_mean, local_share=record.before.local_share)
        if record.engine in self._engines:
            for name, value in told.items():
                self._figures[name].labels(record.engine).set(value)

    def serving(self, engines: dict[str, EngineEntry]) -> None:
        """The engines that are present, and what they serve."""
        for engine in self._engines - engines.keys():
            for gauge in (self._epoch, self._success, self._oldest, self._realised, *self._figures.values(), *self._watchdog.values(), *self._loop.values()):
                gauge.remove(engine)
            for layer in range(self._measured.pop(engine, 0)):
                for gauge in self._layers.values():
                    gauge.remove(engine, str(layer))
            for state in _CELLS:
                self._cells.remove(engine, state)
        for engine, entry in engines.items():
            self._epoch.labels(engine).set(entry.epoch)
        self._engines = set(engines)

    # What runs by itself

    def measured(self, engine: str, figures: LoopFigures, layers: LayerFigures) -> None:
        """The last window of an engine."""
        if engine not in self._engines:
            return
        told = {"balance": figures.balance, "remote_ranks": figures.remote_ranks, "local_share": figures.local, "step_seconds": figures.step_seconds}
        if figures.communication is not None:
            told["communication_share"] = figures.communication
        for name, value in told.items():
            self._loop[name].labels(engine).set(value)
        self._measured[engine] = len(layers.balance)
        for name, values in (("balance", layers.balance), ("remote_ranks", layers.remote_ranks), ("local_share", layers.local)):
            for layer, value in enumerate(values):
                self._layers[name].labels(engine, str(layer)).set(value)

    def loop(self, engine: str, trust: float, spent: int, left: int) -> None:
        """Where the planner stands with an engine."""
        for name, value in (("trust", trust), ("spent_bytes", spent), ("left_bytes", left)):
            self._set(self._loop[name], engine, value)

    def judged(self, said: PlanJudged) -> None:
        """What a plan really brought."""
        self._verdicts.labels(said.verdict).inc()
        if said.realised is not None:
            self._set(self._realised, said.engine, said.realised)

    def plan_ended(self, origin: str, outcome: str) -> None:
        """A plan is over: committed or aborted."""
        self._outcomes.labels(origin, outcome).inc()

    def paused(self, paused: bool) -> None:
        self._paused.set(float(paused))

    def reloaded(self, outcome: str) -> None:
        """Settings were read again: refused, changed or same."""
        self._reloads.labels(outcome).inc()

    # Plans that are carried out

    def moved(self, after: HandoverState, move: Move, now: float) -> None:
        """A handover made a move."""
        for entry in move.records:
            match entry:
                case MigrationStaged():
                    self._seconds.labels("staging").observe(entry.seconds)
                case MigrationCommitted():
                    self._ended.labels("committed", "").inc()
                    self._bytes.inc(entry.bytes)
                    self._seconds.labels("commit").observe(entry.commit_seconds)
                    self._set(self._success, entry.engine, time())
                case MigrationAborted():
                    self._ended.labels("aborted", entry.fault).inc()
        self.overdue(after.what.engine, after.overdue(now))

    def dropped(self, fault: str) -> None:
        """The rest of a plan was given up with no handover open."""
        self._ended.labels("dropped", fault).inc()

    def overdue(self, engine: str, overdue: bool) -> None:
        self._set(self._watchdog["commit_overdue"], engine, float(overdue))

    def pending(self, engine: str, age: float, handovers: int, layers: int) -> None:
        """The plan of an engine that is under way, or that there is none."""
        for name, value in (("plan_age_seconds", age), ("handovers_pending", handovers), ("layers_pending", layers)):
            self._set(self._watchdog[name], engine, value)

    def cells(self, engine: str, told: Sequence[HandoverDescribed]) -> None:
        """What the ranks of an engine said last."""
        if engine in self._engines:
            for state in _CELLS:
                self._cells.labels(engine, state).set(sum(getattr(said, state) for said in told))
            self._oldest.labels(engine).set(max((said.oldest_seconds for said in told), default=0.0))

    def _set(self, gauge: Gauge, engine: str, value: float) -> None:
        """Only of engines that are present: the series of others are dropped."""
        if engine in self._engines:
            gauge.labels(engine).set(value)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
