"""The router's Prometheus families, in Dynamo's style: base units, labels model, worker_id and dp_rank; no request ids."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

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
        self._requests = Counter("roost_router_requests", "Requests by outcome", ["model", "outcome"], registry=registry)
        self._decisions = Counter("roost_router_decisions", "Decisions by chosen rank", ["model", "worker_id", "dp_rank"], registry=registry)
        self._retries = Counter("roost_router_retries", "Attempts that failed, by how", ["cause"], registry=registry)
        self._ttft = Histogram("roost_router_time_to_first_token_seconds", "From request to first token", ["model"], buckets=_LATENCY, registry=registry)
        self._duration = Histogram("roost_router_request_seconds", "From request to end of answer", ["model"], buckets=_LATENCY, registry=registry)
        self._overhead = Histogram("roost_router_overhead_seconds", "Time spent deciding, by stage", ["stage"], buckets=_OVERHEAD, registry=registry)
        self._prompt = Counter("roost_router_prompt_tokens", "Prompt tokens routed", ["model"], registry=registry)
        self._cached = Counter("roost_router_cached_tokens", "Prompt tokens believed cached where they were routed", ["model"], registry=registry)
        self._output = Counter("roost_router_output_tokens", "Tokens sent to clients", ["model"], registry=registry)
        self._lost = Counter(
            "roost_router_overlap_blocks_lost", "Cached blocks passed by because another term weighed more", ["model"], registry=registry
        )
        self.engines_live = Gauge("roost_router_engines_live", "Engines that requests are routed to", registry=registry)
        self.in_flight = Gauge("roost_router_requests_in_flight", "Requests being answered", registry=registry)
        self.kv_events = Counter("roost_router_kv_events_applied", "KV events applied to the index", registry=registry)
        self.kv_snapshots = Counter("roost_router_kv_snapshots", "Snapshots asked for, by reason", ["reason"], registry=registry)
        self.bus_refused = Counter("roost_router_bus_messages_refused", "Messages that made no sense to the router", registry=registry)
        self.bus_dropped = Gauge("roost_router_bus_messages_dropped", "Messages dropped because the router read too slowly", registry=registry)
        self.tokenise = self._overhead.labels("tokenise")
        self.deciding = self._overhead.labels("decide")
        self._models: set[str] = set()
        self._ranks: set[tuple[str, str, str]] = set()

    def decided(self, decision: Decision, seconds: float) -> None:
        """One decision that was booked."""
        model = self._model(decision.ask.model)
        worker, rank = decision.target.key
        labels = (model, str(worker), str(rank))
        self._ranks.add(labels)
        self._decisions.labels(*labels).inc()
        self._prompt.labels(model).inc(decision.ask.prompt_tokens)
        self._cached.labels(model).inc(decision.cached_tokens)
        lost = int(decision.overlap_blocks.max()) - int(decision.overlap_blocks[decision.chosen])
        if lost:
            self._lost.labels(model).inc(lost)
        self.deciding.observe(seconds)

    def failed(self, how: Failure) -> None:
        self._retries.labels(how.value).inc()

    def finished(self, model: str, outcome: str, output_tokens: int, first_token_seconds: float | None, seconds: float) -> None:
        """One request, however it ended. An unknown model's name is not kept as a label."""
        label = model if model in self._models else "unknown"
        self._requests.labels(label, outcome).inc()
        if first_token_seconds is not None:
            self._ttft.labels(label).observe(first_token_seconds)
            self._duration.labels(label).observe(seconds)
            self._output.labels(label).inc(output_tokens)

    def forget_worker(self, worker_id: int) -> None:
        """Drop the series of an engine that is gone."""
        for labels in [labels for labels in self._ranks if labels[1] == str(worker_id)]:
            self._ranks.discard(labels)
            self._decisions.remove(*labels)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _model(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= _KNOWN_MODELS:
                return "other"
            self._models.add(model)
        return model
