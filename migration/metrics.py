"""The migration service's Prometheus families."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from migration.ledger import Entry
from migration.record import PlanRecord

_RECORDING = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_THINKING = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


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
        self.stored_bytes = Gauge("roost_planner_stored_bytes", "What is kept of demand", registry=registry)
        self._engines: set[str] = set()

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

    def serving(self, engines: dict[str, Entry]) -> None:
        """The engines that are present, and what they serve."""
        for engine in self._engines - engines.keys():
            for gauge in (self._epoch, *self._figures.values()):
                gauge.remove(engine)
        for engine, entry in engines.items():
            self._epoch.labels(engine).set(entry.epoch)
        self._engines = set(engines)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
