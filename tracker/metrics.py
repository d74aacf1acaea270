"""The tracker's Prometheus metrics."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class TrackerMetrics:
    """Metrics of one tracker, in its own registry. Series of models that are no longer tracked are
    removed."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.reports = Counter(
            "roost_tracker_reports", "Accepted reports of expert activations", registry=registry
        )
        self.imports = Counter(
            "roost_tracker_imports", "Accepted imports of activation counts", registry=registry
        )
        self.profiled = Counter(
            "roost_tracker_profiled", "Request profiles received from ranks", registry=registry
        )
        self.finished = Counter(
            "roost_tracker_finished", "Request outcomes received from routers", registry=registry
        )
        self._rejected = Counter(
            "roost_tracker_rejected",
            "Rejected messages and reports, by reason",
            ["reason"],
            registry=registry,
        )
        self.duplicates = Counter(
            "roost_tracker_duplicates", "Duplicate messages, ignored", registry=registry
        )
        self.lost = Counter(
            "roost_tracker_lost", "Reports missing when a later one arrived", registry=registry
        )
        self.published = Counter(
            "roost_tracker_published",
            "Profiles, demands, clusters, tables and shifts published",
            registry=registry,
        )
        self.shifts = Counter("roost_tracker_shifts", "Popularity shifts detected", registry=registry)
        self.refits = Histogram(
            "roost_tracker_refit_seconds",
            "Time to refit the clusters of a model",
            buckets=SECONDS,
            registry=registry,
        )
        self._saves = Counter(
            "roost_tracker_saves", "Writes of the state file, by outcome", ["outcome"], registry=registry
        )
        self.state_bytes = Gauge(
            "roost_tracker_state_bytes", "Size of the state file at the last write", registry=registry
        )
        self.ranks = Gauge("roost_tracker_ranks", "Ranks whose demand is tracked", registry=registry)
        self.window_bytes = Gauge(
            "roost_tracker_window_bytes",
            "Memory of all decay windows and placements, bytes",
            registry=registry,
        )
        self._bus = Gauge(
            "roost_tracker_bus_rejected",
            "Messages that the bus could not decode, by reason",
            ["reason"],
            registry=registry,
        )
        self._store_refusals = Gauge(
            "roost_tracker_bus_store_refusals",
            "Writes rejected by full stores, by store",
            ["store"],
            registry=registry,
        )
        self.dropped = Gauge(
            "roost_tracker_bus_dropped",
            "Messages dropped because the tracker was too slow",
            registry=registry,
        )
        self._by_model = {
            name: Gauge(f"roost_tracker_{name}", text, ["model"], registry=registry)
            for name, text in {
                "profile_age_seconds": "Time since the last report for a model",
                "stored_bytes": "Memory of what was learnt about a model (samples, clusters, tables), bytes",
                "stored_blocks": "KV blocks with a prefix signature",
                "clusters": "Clusters in use",
                "outcomes": "Requests whose prediction was compared with the measured activations",
                "gain": "Factor on the router's expert-locality term",
                "recall": "Share of the mass of the most popular experts that was predicted",
                "prior_recall": "The same share for the traffic mix",
                "divergence": "Divergence of the fast from the slow profile, nats",
                "shifted": "1 while a popularity shift has not settled",
            }.items()
        }
        self._present: dict[str, dict[str, float]] = {}

    def saved(self, outcome: str) -> None:
        self._saves.labels(outcome).inc()

    def rejected(self, reason: str, count: int = 1) -> None:
        self._rejected.labels(reason).inc(count)

    def bus_rejected(self, reason: str, count: int) -> None:
        self._bus.labels(reason).set(count)

    def store_refusals(self, store: str, count: int) -> None:
        self._store_refusals.labels(store).set(count)

    def models(self, values: Mapping[str, Mapping[str, float | None]]) -> None:
        """Set the gauges by model. Values that are None, and models no longer present, have no series."""
        present = {
            model: {name: value for name, value in of_one.items() if value is not None}
            for model, of_one in values.items()
        }
        for model, before in self._present.items():
            for name in before.keys() - present.get(model, {}).keys():
                self._by_model[name].remove(model)
        for model, of_one in present.items():
            for name, value in of_one.items():
                self._by_model[name].labels(model).set(value)
        self._present = present

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
