"""The migration service's Prometheus families."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from migration.ledger import Entry

_RECORDING = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class MigrationMetrics:
    """One registry per service; series of engines that are gone are dropped."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.recorded = Counter("roost_migration_placements_recorded", "Placements written to the log", registry=registry)
        self.recording = Histogram("roost_migration_record_seconds", "From join to stored placement, retries included", buckets=_RECORDING, registry=registry)
        self.retries = Counter("roost_migration_record_retries", "Attempts to record that failed", registry=registry)
        self._rejected = Counter("roost_migration_rejected", "Joins and placements refused, by reason", ["reason"], registry=registry)
        self._epoch = Gauge("roost_migration_epoch", "Placement epoch an engine serves", ["engine"], registry=registry)
        self._engines: set[str] = set()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def serving(self, engines: dict[str, Entry]) -> None:
        """The engines that are present, and what they serve."""
        for engine in self._engines - engines.keys():
            self._epoch.remove(engine)
        for engine, entry in engines.items():
            self._epoch.labels(engine).set(entry.epoch)
        self._engines = set(engines)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
