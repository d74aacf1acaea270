"""The router's Prometheus families, in Dynamo's style: base units, labels model, worker_id and dp_rank; no request ids."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from fleet.prediction import SOURCES
from router.course import Failure
from router.decision import Decision

_OVERHEAD = (25e-6, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_KNOWN_MODELS = 256
"""Model names come from clients and engines; series beyond so many share the label "other"."""


class RouterMetrics:
    """One registry per router; label children are looked up once."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("roost_router_requests", "Requests by outcome", ["model", "outcome"], registry=registry)
        self._decisions = Counter("roost_router_decisions", "Decisions by chosen rank", ["model", "worker_id", "dp_rank"], registry=registry)
        self._retries = Counter("roost_router_retries", "Attempts that failed, by how", ["cause"], registry=registry)
        self.ttft = Histogram("roost_router_time_to_first_token_seconds", "From request to first token", ["model"], buckets=_LATENCY, registry=registry)
        self.duration = Histogram("roost_router_request_seconds", "From request to end of answer", ["model"], buckets=_LATENCY, registry=registry)
        self._overhead = Histogram("roost_router_overhead_seconds", "Time spent deciding, by stage", ["stage"], buckets=_OVERHEAD, registry=registry)
        self.prompt = Counter("roost_router_prompt_tokens", "Prompt tokens routed", ["model"], registry=registry)
        self.cached = Counter("roost_router_cached_tokens", "Prompt tokens believed cached where they were routed", ["model"], registry=registry)
        self.output = Counter("roost_router_output_tokens", "Tokens sent to clients", ["model"], registry=registry)
        self.lost = Counter("roost_router_overlap_blocks_lost", "Cached blocks passed by because another term weighed more", ["model"], registry=registry)
        self.engines_live = Gauge("roost_router_engines_live", "Engines that requests are routed to", registry=registry)
        self.in_flight = Gauge("roost_router_requests_in_flight", "Requests being answered", registry=registry)
        self.kv_events = Counter("roost_router_kv_events_applied", "KV events applied to the index", registry=registry)
        self.kv_snapshots = Counter("roost_router_kv_snapshots", "Snapshots asked for, by reason", ["reason"], registry=registry)
        self.bus_refused = Counter("roost_router_bus_messages_refused", "Messages that made no sense to the router", registry=registry)
        self.bus_dropped = Gauge("roost_router_bus_messages_dropped", "Messages dropped because the router read too slowly", registry=registry)
        self._predictions = Counter("roost_router_predictions", "Booked decisions by the source that foretold most", ["source"], registry=registry)
        self.outcomes_published = Counter("roost_router_outcomes_published", "Finished requests told to the tracker", registry=registry)
        self.outcomes_dropped = Counter("roost_router_outcomes_dropped", "Finished requests that could not be told", registry=registry)
        self._routings = Counter(
            "roost_router_foreign_routings", "Answers of engines that named their experts, by what became of it", ["outcome"], registry=registry
        )
        self.tables_asked = Counter("roost_router_tables_gaps", "Prediction tables asked for anew because a change was missed", registry=registry)
        self._gain = Gauge("roost_router_prediction_gain", "What the expert term is multiplied with", ["model"], registry=registry)
        self._tables_version = Gauge("roost_router_tables_version", "Version of the prediction tables", ["model"], registry=registry)
        self._tables_age = Gauge("roost_router_tables_age_seconds", "Since prediction tables were taken last", ["model"], registry=registry)
        self._tables_bytes = Gauge("roost_router_tables_bytes", "Memory of the prediction tables", ["model"], registry=registry)
        self._sources = {source: self._predictions.labels(source) for source in (*SOURCES, "mix", "none")}
        self._replicas: set[str] = set()
        self.tokenise = self._overhead.labels("tokenise")
        self.deciding = self._overhead.labels("decide")
        self._unknown = _ModelSeries(self, "other")
        self._models: dict[str, _ModelSeries] = {}
        self._ranks: dict[tuple[str, int, int], Counter] = {}

    def routings(self, outcome: str) -> None:
        """One answer that named its experts: told, bad (no such array), empty (nothing was computed), dropped (too many wait), too_long."""
        self._routings.labels(outcome).inc()

    def decided(self, decision: Decision, seconds: float) -> None:
        """One decision that was booked."""
        series = self._series(decision.ask.model)
        self._rank(series.label, *decision.target.key).inc()
        series.prompt.inc(decision.ask.prompt_tokens)
        series.cached.inc(decision.cached_tokens)
        lost = int(decision.overlap_blocks.max()) - int(decision.overlap_blocks[decision.chosen])
        if lost:
            series.lost.inc(lost)
        self._sources["none" if decision.outlook is None else decision.outlook.forecast.best].inc()
        self.deciding.observe(seconds)

    def failed(self, how: Failure) -> None:
        self._retries.labels(how.value).inc()

    def finished(self, model: str, outcome: str, output_tokens: int, first_token_seconds: float | None, seconds: float) -> None:
        """One request, however it ended. The name of a model that was never routed is not kept as a label."""
        series = self._models.get(model) or self._unknown
        series.outcome(outcome).inc()
        if first_token_seconds is not None:
            series.ttft.observe(first_token_seconds)
            series.duration.observe(seconds)
            series.output.inc(output_tokens)

    def forget_worker(self, worker_id: int) -> None:
        """Drop the series of an engine that is gone."""
        for model, worker, rank in [key for key in self._ranks if key[1] == worker_id]:
            del self._ranks[model, worker, rank]
            self._decisions.remove(model, str(worker), str(rank))

    def replica(self, model: str, version: int, gain: float, stored_bytes: int, age_seconds: float) -> None:
        """How the copy of one model's prediction tables stands."""
        self._replicas.add(model)
        for gauge, value in self._about_tables(version, gain, stored_bytes, age_seconds):
            gauge.labels(model).set(value)

    def forget_replicas(self, kept: set[str]) -> None:
        """Drop the series of models that nobody serves any more."""
        for model in self._replicas - kept:
            for gauge, _ in self._about_tables():
                gauge.remove(model)
        self._replicas &= kept

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _about_tables(self, version: float = 0, gain: float = 0, stored_bytes: float = 0, age: float = 0) -> tuple[tuple[Gauge, float], ...]:
        return ((self._tables_version, version), (self._gain, gain), (self._tables_bytes, stored_bytes), (self._tables_age, age))

    def _rank(self, model: str, worker_id: int, rank: int) -> Counter:
        key = (model, worker_id, rank)
        if key not in self._ranks:
            self._ranks[key] = self._decisions.labels(model, str(worker_id), str(rank))
        return self._ranks[key]

    def _series(self, model: str) -> "_ModelSeries":
        if model not in self._models:
            if len(self._models) >= _KNOWN_MODELS:
                return self._unknown
            self._models[model] = _ModelSeries(self, model)
        return self._models[model]


class _ModelSeries:
    """The children of one model's label, looked up once."""

    def __init__(self, families: RouterMetrics, label: str) -> None:
        self.label = label
        self.ttft = families.ttft.labels(label)
        self.duration = families.duration.labels(label)
        self.prompt = families.prompt.labels(label)
        self.cached = families.cached.labels(label)
        self.output = families.output.labels(label)
        self.lost = families.lost.labels(label)
        self._requests = families.requests
        self._outcomes: dict[str, Counter] = {}

    def outcome(self, outcome: str) -> Counter:
        if outcome not in self._outcomes:
            self._outcomes[outcome] = self._requests.labels(self.label, outcome)
        return self._outcomes[outcome]
