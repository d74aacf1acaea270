"""The tracker's Prometheus families."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class TrackerMetrics:
    """One registry per tracker; series of models that are no longer followed are dropped."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.reports = Counter("roost_tracker_reports", "Reports of activated experts taken into account", registry=registry)
        self.imports = Counter("roost_tracker_imports", "Imported counts taken into account", registry=registry)
        self.profiled = Counter("roost_tracker_profiled", "Requests that ranks said the profile of", registry=registry)
        self.finished = Counter("roost_tracker_finished", "Requests that routers said the outcome of", registry=registry)
        self._rejected = Counter("roost_tracker_rejected", "What was heard and refused, by reason", ["reason"], registry=registry)
        self.duplicates = Counter("roost_tracker_duplicates", "Messages heard twice and ignored", registry=registry)
        self.lost = Counter("roost_tracker_lost", "Reports that were missing when a later one came", registry=registry)
        self.published = Counter("roost_tracker_published", "Profiles, demands, clusters, tables and shifts published", registry=registry)
        self.shifts = Counter("roost_tracker_shifts", "Shifts of popularity that were noticed", registry=registry)
        self.refits = Histogram("roost_tracker_refit_seconds", "Time to fit the clusters of a model anew", buckets=SECONDS, registry=registry)
        self._saves = Counter("roost_tracker_saves", "Times the state was written, by outcome", ["outcome"], registry=registry)
        self.state_bytes = Gauge("roost_tracker_state_bytes", "Size of the state file when it was last written", registry=registry)
        self.ranks = Gauge("roost_tracker_ranks", "Ranks whose demand is followed", registry=registry)
        self.window_bytes = Gauge("roost_tracker_window_bytes", "Bytes of all windows and placements", registry=registry)
        self._bus = Gauge("roost_tracker_bus_rejected", "Messages the bus could not read, by reason", ["reason"], registry=registry)
        self._full = Gauge("roost_tracker_bus_store_full", "Times that something found no room, by store", ["store"], registry=registry)
        self.dropped = Gauge("roost_tracker_bus_dropped", "Messages dropped because the tracker read too slowly", registry=registry)
        self._by_model = {
            name: Gauge(f"roost_tracker_{name}", text, ["model"], registry=registry)
            for name, text in {
                "profile_age_seconds": "Time since the last report for a model",
                "stored_bytes": "Bytes of what was learnt of a model: samples, clusters and tables",
                "stored_blocks": "KV blocks whose prefix has a signature",
                "clusters": "Kinds of requests that are told apart",
                "outcomes": "Requests whose prediction was compared with what they did",
                "gain": "What the router multiplies its expert term with",
                "recall": "Share of the most popular experts' mass that was predicted",
                "prior_recall": "The same for the traffic's mix",
                "divergence": "Divergence of the fast from the slow profile, nats",
                "shifted": "1 while popularity is shifted",
            }.items()
        }
        self._told: dict[str, dict[str, float]] = {}

    def saved(self, outcome: str) -> None:
        self._saves.labels(outcome).inc()

    def rejected(self, reason: str, count: int = 1) -> None:
        self._rejected.labels(reason).inc(count)

    def bus_rejected(self, reason: str, count: int) -> None:
        self._bus.labels(reason).set(count)

    def bus_full(self, store: str, count: int) -> None:
        self._full.labels(store).set(count)

    def models(self, values: Mapping[str, Mapping[str, float | None]]) -> None:
        """Values of the families by model; what is None, or no longer there, has no series."""
        told = {model: {name: value for name, value in of_one.items() if value is not None} for model, of_one in values.items()}
        for model, before in self._told.items():
            for name in before.keys() - told.get(model, {}).keys():
                self._by_model[name].remove(model)
        for model, of_one in told.items():
            for name, value in of_one.items():
                self._by_model[name].labels(model).set(value)
        self._told = told

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
