"""The tracker's Prometheus families."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class TrackerMetrics:
    """One registry per tracker; series of models that are no longer followed are dropped."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.reports = Counter("roost_tracker_reports", "Reports of activated experts taken into account", registry=registry)
        self._rejected = Counter("roost_tracker_rejected", "Reports and joins refused, by reason", ["reason"], registry=registry)
        self.duplicates = Counter("roost_tracker_duplicates", "Reports heard twice and ignored", registry=registry)
        self.lost = Counter("roost_tracker_lost", "Reports that were missing when a later one came", registry=registry)
        self.published = Counter("roost_tracker_published", "Profiles and demands published", registry=registry)
        self.ranks = Gauge("roost_tracker_ranks", "Ranks whose demand is followed", registry=registry)
        self._age = Gauge("roost_tracker_profile_age_seconds", "Time since the last report for a model", ["model"], registry=registry)
        self._bus = Gauge("roost_tracker_bus_rejected", "Messages the bus could not read, by reason", ["reason"], registry=registry)
        self.dropped = Gauge("roost_tracker_bus_dropped", "Messages dropped because the tracker read too slowly", registry=registry)
        self._models: set[str] = set()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def bus_rejected(self, reason: str, count: int) -> None:
        self._bus.labels(reason).set(count)

    def ages(self, ages: dict[str, float | None]) -> None:
        """Seconds since the last report, per model; None: no report yet, no series."""
        present = {model: age for model, age in ages.items() if age is not None}
        for model in self._models - present.keys():
            self._age.remove(model)
        for model, age in present.items():
            self._age.labels(model).set(age)
        self._models = set(present)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
