"""Prometheus families of the router, in the ecosystem's style: base units, labels model, worker_id and
dp_rank; no request ids.

Values that change with every decision are plain numbers (`lazy_counters`) and become a family at a scrape: a
counter of the library costs more than most of what it counts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from fleet.prediction import SOURCES, Tables
from router.health.attempt_failures import AttemptFailure
from router.scheduling.cost import TERMS
from router.scheduling.decision import Decision
from router.telemetry.lazy_counters import Histogram, LazyCounter, VectorSums

_OVERHEAD = (1e-5, 25e-6, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_REGRET = (1e-5, 1e-4, 1e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_KNOWN_MODELS = 256
"""Models with series of their own. Model names come from clients and engines; further ones share the label
"other".
"""
_KNOWN_TENANTS = 1000
"""Tenants with series of their own; others share the label "other"."""
_RANK = ["model", "worker_id", "dp_rank"]
_CLUSTER = ("model", "cluster")
"""labels of a cluster's series; a model has 64 clusters at most"""
_LOADS = (
    ("prefill_tokens", "Outstanding prefill of a rank: prompt tokens booked and not yet computed"),
    ("sequences", "Requests running or waiting on a rank"),
    ("blocks", "KV blocks held by these requests"),
    ("steps", "Expected remaining output tokens of these requests"),
)
"""Load metrics, in the order of a load table's rows."""
RankLabels = tuple[str, int, int]
"""model, worker_id, dp_rank"""
STAGES = ("filter", "overlap", "predict", "score", "book")
"""Stages of a decision that are timed for a sample; "tokenise" and "decide" (the complete decision) are
always timed.
"""
LAPS = 16
"""one in LAPS decisions is in the sample"""


class RankNow(NamedTuple):
    """State of one rank at a scrape: its load as decisions see it ([AMOUNTS]), and the factors of its
    predicted times.
    """

    model: str
    worker_id: int
    rank: int
    load: tuple[int, ...]
    prefill_factor: float
    decode_factor: float
    stated: bool
    """the engine states the speed that the factors correct; otherwise they have no meaning alone"""


class RouterMetrics:
    """Metrics of one router in a registry of their own; label children are looked up once."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lazy = _LazyFamilies()
        self._registry.register(self._lazy)
        self._models: dict[str, _ModelSeries] = {}
        self._replicas: set[str] = set()
        self._about_requests()
        self._about_decisions()
        self._about_feedback()
        self._about_waiting()
        self._about_bodies()
        self._about_failures()
        self._about_listening()
        self._about_others()
        self._about_prediction()
        self.ranks: Callable[[], Iterable[RankNow]] = tuple
        """called at each scrape"""
        self._registry.register(_Ranks(self))
        ProcessCollector(registry=self._registry)
        self.dropped_lines: Callable[[], Mapping[str, int]] = dict
        """number of log lines dropped, by logger; called at each scrape"""
        self._registry.register(_DroppedLines(self))
        self._unknown = _ModelSeries(self, "other")

    def _about_requests(self) -> None:
        """Define the metrics of requests and answers."""
        self._requests = self._lazy_counter("requests", "Requests by outcome", "model", "outcome")
        self.before_exposition: Callable[[], object] = dict
        """called first by `exposition`: counts what is yet to be counted"""
        self.in_flight = 0
        self._in_flight = self._lazy_counter("requests_in_flight", "Requests being answered", goes_down=True)
        self.loop_lag = self._histogram(
            "loop_lag_seconds", "Delay of event loop wake-ups, sampled four times a second", _LAG
        ).labels()
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From request to first token", _LATENCY, "model"
        )
        text = "Mean time between the tokens of a choice after its first, per request"
        self.tpot = self._histogram("time_per_output_token_seconds", text, _BETWEEN_TOKENS, "model")
        self.duration = self._histogram("request_seconds", "From request to end of answer", _LATENCY, "model")
        self.output = self._lazy_counter("output_tokens", "Tokens sent to clients", "model")
        self._characters = self._lazy_counter(
            "conversation_characters",
            "Characters of conversations, by whether their token ids were cached",
            "ids",
        )
        self._tenant_requests = self._lazy_counter(
            "tenant_requests",
            "Requests by tenant and outcome; other: tenants without a key",
            "tenant",
            "outcome",
        )
        self._tenant_tokens = self._lazy_counter(
            "tenant_tokens",
            "Tokens of a tenant's requests: prompt, cached (of the prompt), output",
            "tenant",
            "kind",
        )
        self._shared_cache = self._counter(
            "shared_cache_requests",
            "Requests with a cache salt at an engine that does not isolate tenants",
            "model",
        )
        self._tenants: frozenset[str] = frozenset()
        self.cached_reported = self._counter(
            "cached_tokens_reported", "Prompt tokens that engines reported as cached", "model"
        )

    def _about_decisions(self) -> None:
        """Define the metrics of decisions: choice, cost and overhead."""
        self._decisions = self._lazy_counter("decisions", "Decisions by chosen rank", *_RANK)
        self._prompt = self._lazy_counter("prompt_tokens", "Prompt tokens routed", "model")
        self._cached = self._lazy_counter(
            "cached_tokens", "Prompt tokens expected to be cached at the chosen rank", "model"
        )
        self._lost = self._lazy_counter(
            "overlap_blocks_lost", "Cached blocks forgone because another cost term outweighed them", "model"
        )
        self.prompts_differ = self._counter(
            "prompts_differ", "Prompts of which the engine made other token ids than the router", "model"
        )
        text = "Weighted cost of the chosen rank, by term, for ranks of known speed"
        self._terms = VectorSums("roost_router_term_seconds", text, "model", "term", TERMS, unit=1e-3)
        self._lazy.sums.append(self._terms)
        self._overhead = self._histogram(
            "overhead_seconds", "Time spent deciding, by stage", _OVERHEAD, "stage"
        )
        self.tokenise = self._overhead.labels("tokenise")
        self.deciding = self._overhead.labels("decide")
        self._stages = {stage: self._overhead.labels(stage) for stage in STAGES}
        self._laps = 0

    def _about_feedback(self) -> None:
        """Define the metrics that compare predictions with observations."""
        regret = self._histogram(
            "regret_seconds",
            "Cost of the choice above the best one, both at the observed state",
            _REGRET,
            "model",
        )
        self.compared = (
            regret,
            self._histogram(
                "predicted_first_token_seconds",
                "From decision to first token, as predicted",
                _LATENCY,
                "model",
            ),
            self._histogram(
                "observed_first_token_seconds",
                "From decision to first token, as observed, of the same requests",
                _LATENCY,
                "model",
            ),
            self._histogram(
                "locality_predicted",
                "Share of routed pairs that the chosen rank was expected to serve locally",
                _SHARES,
                "model",
            ),
            self._histogram(
                "locality_observed",
                "Share of routed pairs that the chosen rank served locally, of the same requests",
                _SHARES,
                "model",
            ),
        )
        self._profiles = self._counter(
            "profiles_received", "Request profiles received from ranks, by outcome", "outcome"
        )

    def _about_waiting(self) -> None:
        """Define the metrics of the wait queue."""
        self._queued = self._gauge("queue_requests", "Requests in the wait queue", "class")
        self._queue_wait = self._histogram(
            "queue_wait_seconds",
            "Time in the wait queue, of requests that were not admitted at once",
            _LATENCY,
            "class",
        )
        self._refused = self._counter(
            "refused", "Requests refused for lack of capacity, by class and error code", "class", "code"
        )

    def _about_bodies(self) -> None:
        """Define the metrics of body memory and of the worker processes for large bodies."""
        self._bodies_bytes = self._gauge("bodies_bytes", "Memory held by the bodies of open requests")
        self._large_bodies = self._gauge(
            "large_bodies_waiting", "Large bodies that wait for a worker process"
        )
        self._bodies_counted = self._lazy_counter(
            "bodies",
            "Bodies refused for lack of memory; worker processes started, and died during a task",
            "event",
        )

    def _about_failures(self) -> None:
        self._retries = self._counter("retries", "Failed attempts, by cause", "cause")
        self.retries_refused = self._counter(
            "retries_refused", "Failures passed on to clients because the retry budget was exhausted"
        )
        self._in_panic = self._counter(
            "decisions_in_panic",
            "Decisions that ignored circuit breakers and outlier ejection because no other rank remained",
        )
        self.breakers_opened = self._counter(
            "breakers_opened", "Circuit breakers opened after consecutive failures of a rank"
        )
        self.reloads = self._counter("config_reloads", "Reloads of the settings, by outcome", "outcome")
        self._connections_cut = self._lazy_counter(
            "connections_cut", "Client connections closed because they exceeded a limit, by cause", "cause"
        )
        self._rank_excluded = self._lazy_counter(
            "rank_excluded",
            "1 while a rank is excluded from new requests, by cause",
            *_RANK,
            "cause",
            goes_down=True,
        )

    def _about_listening(self) -> None:
        """Define the metrics of messages on the bus."""
        self.engines_live = self._gauge("engines_live", "Engines that requests are routed to")
        self.kv_events = self._counter("kv_events_applied", "KV events applied to the index")
        self.kv_snapshots = self._counter("kv_snapshots", "KV snapshots requested, by reason", "reason")
        self.bus_refused = self._counter("bus_messages_refused", "Invalid messages received")
        self.bus_dropped = self._gauge(
            "bus_messages_dropped", "Messages dropped because the router consumed them too slowly"
        )
        self.store_refusals = self._gauge(
            "bus_store_refusals", "Writes refused because a store was full, by store", "store"
        )
        self.outcomes_published = self._counter(
            "outcomes_published", "Finished requests reported to the tracker"
        )
        self.outcomes_dropped = self._counter(
            "outcomes_dropped", "Finished requests that could not be reported"
        )
        self._routings = self._counter(
            "foreign_routings", "Answers of engines that contain their expert routing, by outcome", "outcome"
        )

    def _about_others(self) -> None:
        """Define the metrics of other routers, and of other data planes that use this one."""
        self._peers = self._gauge("peers", "Other routers that are alive")
        self._peer_bookings = self._gauge("peer_bookings", "Open bookings of other routers, replicated here")
        self._peer_bookings_over = self._lazy_counter(
            "peer_bookings_not_ended",
            "Bookings of other routers that expired, or could not be stored",
            "cause",
        )
        self.peer_gaps = self._counter(
            "peer_gaps", "Missed messages of other routers, each repaired by a request"
        )
        self.bus_silent = self._gauge(
            "bus_silent",
            "1 while the bus delivers nothing, so that missing heartbeats say nothing about engines",
        )
        self._reservations = self._gauge("reservations_open", "Open reservations of other data planes")
        self._reservations_over = self._lazy_counter(
            "reservations_ended", "Ended reservations of other data planes, by how they ended", "how"
        )

    def _about_prediction(self) -> None:
        """Define the metrics of predictions, and of the tables that they come from."""
        self._predictions = self._lazy_counter(
            "predictions", "Booked decisions by the source with the largest share of the prediction", "source"
        )
        for source in (*SOURCES, "mix", "none"):
            self._predictions.values[source,] = 0
        self.table_requests = self._counter(
            "tables_gaps", "Prediction tables requested again because a delta was missed"
        )
        self._gain = self._gauge("prediction_calibration", "Calibration factor of the expert term", "model")
        self._cluster_gain = self._lazy_counter(
            "prediction_cluster_calibration",
            "Calibration factor of the expert term, per cluster",
            *_CLUSTER,
            goes_down=True,
        )
        self._by_cluster = (
            self._lazy_counter(
                "cluster_requests",
                "Requests with a profile from their rank, by their heaviest predicted cluster",
                *_CLUSTER,
            ),
            self._lazy_counter(
                "cluster_local_predicted",
                "Sum over these requests of the predicted share of locally served pairs",
                *_CLUSTER,
            ),
            self._lazy_counter(
                "cluster_local_observed",
                "Sum over these requests of the observed share of locally served pairs",
                *_CLUSTER,
            ),
        )
        self._homes = self._lazy_counter(
            "homes", "Booked decisions by whether the request was routed to its home", "model", "outcome"
        )
        self._tables_version = self._gauge("tables_version", "Version of the prediction tables", "model")
        self._tables_age = self._gauge(
            "tables_age_seconds", "Time since the last update of the prediction tables", "model"
        )
        self._tables_bytes = self._gauge("tables_bytes", "Memory of the prediction tables", "model")

    # Events

    def connection_cut(self, cause: str) -> None:
        """Count a client connection that was closed because it exceeded a limit."""
        self._connections_cut.values[cause,] += 1

    def decided(self, decision: Decision, seconds: float) -> None:
        """Count a booked decision."""
        label, chosen = self._series(decision.ask.model).label, decision.choice.chosen
        self._decisions.values[label, *decision.target.key] += 1
        self._prompt.values[label,] += decision.ask.prompt_tokens
        self._cached.values[label,] += decision.cached_tokens
        overlap = decision.overlap_blocks
        lost = int(overlap[overlap.argmax()] - overlap[chosen])
        if lost:
            self._lost.values[label,] += lost
        self._predictions.values[
            "none" if decision.prediction is None else decision.prediction.request.best,
        ] += 1
        self._homes.values[label, decision.home_outcome] += 1
        if decision.shared_cache:
            self._shared_cache.labels(label).inc()
        if decision.ignored:
            self._in_panic.inc()
        if decision.is_measured(chosen):
            self._terms.add(label, decision.scores.terms[:, chosen])
        self.deciding.observe(seconds)

    def lap(self) -> Callable[[str], None] | None:
        """Return a callback for the end of each of the STAGES, for one decision of LAPS; None for the
        others."""
        self._laps += 1
        if self._laps % LAPS:
            return None
        began = perf_counter()

        def done(stage: str) -> None:
            nonlocal began
            now = perf_counter()
            self._stages[stage].observe(now - began)
            began = now

        return done

    def first_token(self, model: str, predicted_seconds: float, observed_seconds: float) -> None:
        """Observe a first token. Both numbers count from the decision, of the same request."""
        series = self._series(model)
        series.predicted_first.observe(predicted_seconds)
        series.observed_first.observe(observed_seconds)

    def locality(self, model: str, cluster: int, predicted: float, observed: float) -> None:
        """Observe the shares of one request's routed pairs, 0..1. cluster: its heaviest predicted cluster."""
        series = self._series(model)
        for counter, value in zip(self._by_cluster, (1.0, predicted, observed), strict=True):
            counter.values[series.label, cluster] += value
        series.predicted_local.observe(predicted)
        series.observed_local.observe(observed)

    def regret(self, model: str, seconds: float) -> None:
        """Observe the regret of one decision, re-priced at the observed state."""
        self._series(model).regret.observe(seconds)

    def profiled(self, outcome: str, count: int = 1) -> None:
        """Count request profiles from ranks: ours, unknown (another router's, or too old), unread (too many
        arrived).
        """
        self._profiles.labels(outcome).inc(count)

    def queued(self, priority: str) -> None:
        """Count a request of this class that enters the wait queue."""
        self._queued.labels(priority).inc()

    def dequeued(self, priority: str, seconds: float) -> None:
        """Count a request of this class that leaves the wait queue, in any way."""
        self._queued.labels(priority).dec()
        self._queue_wait.labels(priority).observe(seconds)

    def refused(self, priority: str, code: str) -> None:
        """Count a refused request of this class."""
        self._refused.labels(priority, code).inc()

    def characters(self, known: int, new: int) -> None:
        """Set the totals over all conversations so far."""
        self._characters.values["known",], self._characters.values["new",] = known, new

    def failed(self, how: AttemptFailure) -> None:
        self._retries.labels(how.value).inc()

    def finished(self, model: str, outcome: str) -> None:
        """Count one request with its outcome. The name of a model that was never routed is not kept as a
        label.
        """
        self._requests.values[self._known(model).label, outcome] += 1

    def answered(
        self,
        model: str,
        output_tokens: int,
        seconds: float,
        first_token_seconds: float | None,
        seconds_per_token: float | None,
        cached_tokens: int,
    ) -> None:
        """Observe one answer, or the part of it that arrived. None: unknown, because the answer was not
        streamed or too short.
        """
        series = self._known(model)
        series.duration.observe(seconds)
        self.output.values[series.label,] += output_tokens
        if first_token_seconds is not None:
            series.ttft.observe(first_token_seconds)
        if seconds_per_token is not None:
            series.tpot.observe(seconds_per_token)
        if cached_tokens:
            series.cached_reported.inc(cached_tokens)

    def _known(self, model: str) -> "_ModelSeries":
        return self._models.get(model) or self._unknown

    def know_tenants(self, names: frozenset[str]) -> None:
        """Set the tenants with series of their own: those with a key, the first _KNOWN_TENANTS by name."""
        self._tenants = names if len(names) <= _KNOWN_TENANTS else frozenset(sorted(names)[:_KNOWN_TENANTS])

    def finished_for(
        self, tenant: str, outcome: str, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """Count one request of a tenant with its outcome. Requests without a key belong to no tenant."""
        if not tenant:
            return
        name = tenant if tenant in self._tenants else "other"
        self._tenant_requests.values[name, outcome] += 1
        for kind, tokens in (("prompt", prompt_tokens), ("cached", cached_tokens), ("output", output_tokens)):
            self._tenant_tokens.values[name, kind] += tokens

    def rank_excluded(self, ranks: Mapping[RankLabels, str]) -> None:
        """Set the ranks that are excluded from new requests, and the cause of each; all others are
        cleared."""
        self._rank_excluded.values = defaultdict(
            float, {(*labels, cause): 1 for labels, cause in ranks.items()}
        )

    def peers(self, routers: int, bookings: int, expired: int, refused: int) -> None:
        """Set the numbers of other routers and of their bookings; the last two count from the start."""
        self._peers.set(routers)
        self._peer_bookings.set(bookings)
        self._peer_bookings_over.values = defaultdict(float, {("expired",): expired, ("refused",): refused})

    def bodies(self, held: int, refused: int, waiting: int, started: int, died: int) -> None:
        """Set the memory held by bodies and the large ones that wait; refused bodies and processes count from
        the start.
        """
        self._bodies_bytes.set(held)
        self._large_bodies.set(waiting)
        for event, count in (("refused", refused), ("process_started", started), ("process_died", died)):
            self._bodies_counted.values[event,] = count

    def reservations(self, is_open: int, released: int, expired: int) -> None:
        """Set the number of open reservations of other data planes; the last two count from the start."""
        self._reservations.set(is_open)
        self._reservations_over.values = defaultdict(float, {("released",): released, ("expired",): expired})

    def routings(self, outcome: str) -> None:
        """Count an answer that contains its expert routing: told (reported), bad (no such array), empty
        (nothing was computed), dropped (the queue was full), too_long.
        """
        self._routings.labels(outcome).inc()

    def replica(self, model: str, tables: Tables, stored_bytes: int, age_seconds: float) -> None:
        """Set the metrics of the replica of one model's prediction tables."""
        self._replicas.add(model)
        version, gain = tables.version, tables.gain
        for cluster, value in enumerate([] if tables.gains is None else tables.gains.tolist()):
            self._cluster_gain.values[model, cluster] = value
        for gauge, value in self._about_tables(version, gain, stored_bytes, age_seconds):
            gauge.labels(model).set(value)

    # Removal of series

    def forget_worker(self, worker_id: int) -> None:
        """Remove the series of an engine that has left."""
        for key in [key for key in self._decisions.values if key[1] == worker_id]:
            del self._decisions.values[key]

    def forget_replicas(self, kept: set[str]) -> None:
        """Remove the series of models that are no longer served."""
        for model in self._replicas - kept:
            for gauge, _ in self._about_tables():
                gauge.remove(model)
            for counter in (self._cluster_gain, *self._by_cluster):
                for key in [key for key in counter.values if key[0] == model]:
                    del counter.values[key]
        self._replicas &= kept

    def exposition(self) -> bytes:
        self.before_exposition()
        self._in_flight.values[()] = self.in_flight
        return generate_latest(self._registry)

    def _about_tables(
        self, version: float = 0, gain: float = 0, stored_bytes: float = 0, age: float = 0
    ) -> tuple[tuple[Gauge, float], ...]:
        return (
            (self._tables_version, version),
            (self._gain, gain),
            (self._tables_bytes, stored_bytes),
            (self._tables_age, age),
        )

    def _series(self, model: str) -> "_ModelSeries":
        series = self._models.get(model)
        if series is None:
            if len(self._models) >= _KNOWN_MODELS:
                return self._unknown
            series = self._models[model] = _ModelSeries(self, model)
        return series

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"roost_router_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"roost_router_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        self._lazy.histograms.append(Histogram(f"roost_router_{name}", text, bounds, labels))
        return self._lazy.histograms[-1]

    def _lazy_counter(self, name: str, text: str, *labels: str, goes_down: bool = False) -> LazyCounter:
        self._lazy.counters.append(LazyCounter(f"roost_router_{name}", text, labels, goes_down=goes_down))
        return self._lazy.counters[-1]


class _ModelSeries:
    """Children of one model's label, looked up once."""

    def __init__(self, families: RouterMetrics, label: str) -> None:
        self.label = label
        self.ttft = families.ttft.labels(label)
        self.tpot = families.tpot.labels(label)
        self.duration = families.duration.labels(label)
        families.output.values[label,] += 0
        self.cached_reported = families.cached_reported.labels(label)
        self.regret, self.predicted_first, self.observed_first, self.predicted_local, self.observed_local = (
            family.labels(label) for family in families.compared
        )


class _LazyFamilies(Collector):
    """Exporter of the plain numbers as families."""

    def __init__(self) -> None:
        self.counters: list[LazyCounter] = []
        self.histograms: list[Histogram] = []
        self.sums: list[VectorSums] = []

    def collect(self) -> Iterator[Metric]:
        for counter in self.counters:
            family = (GaugeMetricFamily if counter.goes_down else CounterMetricFamily)(
                counter.name, counter.text, labels=counter.labels
            )
            for labels, value in counter.values.items():
                family.add_metric([str(label) for label in labels], value)
            yield family
        for histogram in self.histograms:
            buckets = HistogramMetricFamily(histogram.name, histogram.text, labels=histogram.names)
            for values, spread in histogram.spreads.items():
                buckets.add_metric(values, spread.cumulative, spread.sum)
            yield buckets
        for sums in self.sums:
            summary = SummaryMetricFamily(sums.name, sums.text, labels=sums.names)
            for names, count, total in sums.rows():
                summary.add_metric(names, count, total)
            yield summary


class _Ranks(Collector):
    """State of the ranks at a scrape: those that can be chosen now, and no others."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        loads = [GaugeMetricFamily(f"roost_router_rank_{name}", text, labels=_RANK) for name, text in _LOADS]
        factors = GaugeMetricFamily(
            "roost_router_speed_factor", "Measured over modelled seconds", labels=[*_RANK, "of"]
        )
        for rank in self._metrics.ranks():
            labels = [rank.model, str(rank.worker_id), str(rank.rank)]
            for family, amount in zip(loads, rank.load, strict=True):
                family.add_metric(labels, amount)
            if rank.stated:
                factors.add_metric([*labels, "prefill"], rank.prefill_factor)
                factors.add_metric([*labels, "decode"], rank.decode_factor)
        yield from loads
        yield factors


class _DroppedLines(Collector):
    """Log lines that were dropped because their reader was too slow."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "roost_router_log_lines_dropped",
            "Log lines dropped because their reader was too slow, by logger",
            labels=["logger"],
        )
        for name, lines in self._metrics.dropped_lines().items():
            family.add_metric([name], lines)
        yield family
