"""The router's Prometheus families, in the ecosystem's style: base units, labels model, worker_id and dp_rank; no request ids.

What is counted with every decision is kept as plain numbers (`tallies`) and becomes a family when somebody looks: a library counter costs
more than most of what it counts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from fleet.prediction import SOURCES, Tables
from router.openai_api.completion_state import AttemptFailure
from router.scheduling.cost import TERMS
from router.scheduling.decision import Decision
from router.telemetry.lazy_counters import Histogram, LazyCounter, VectorSums

_OVERHEAD = (1e-5, 25e-6, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LAG = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_REGRET = (1e-5, 1e-4, 1e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_KNOWN_MODELS = 256
"""Model names come from clients and engines; series beyond so many share the label "other"."""
_KNOWN_TENANTS = 1000
"""Tenants with series of their own; others share the label "other"."""
_RANK = ["model", "worker_id", "dp_rank"]
_CLUSTER = ("model", "cluster")
"""a model has 64 at most"""
_LOADS = (
    ("prefill_tokens", "Prompt tokens promised to a rank and not yet computed"),
    ("sequences", "Requests running or waiting on a rank"),
    ("blocks", "KV blocks they hold"),
    ("steps", "Tokens they are expected to emit yet"),
)
"""In the order of a load table's rows."""
RankLabels = tuple[str, int, int]
"""model, worker_id, dp_rank"""
STAGES = ("filter", "overlap", "predict", "score", "book")
"""Parts of a decision that are timed now and then; "tokenise" and "decide", the whole of it, are always timed."""
LAPS = 16
"""one in so many decisions"""


class RankNow(NamedTuple):
    """One rank when the metrics are read: its load as decisions see it ([AMOUNTS]), and what its predicted times are multiplied with."""

    model: str
    worker_id: int
    rank: int
    load: tuple[int, ...]
    prefill_factor: float
    decode_factor: float
    stated: bool
    """it states the speed that the factors correct; else they mean nothing alone"""


class RouterMetrics:
    """One registry per router; label children are looked up once."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._tallies = _Tallies()
        self._registry.register(self._tallies)
        self._models: dict[str, _ModelSeries] = {}
        self._replicas: set[str] = set()
        self._about_requests()
        self._about_decisions()
        self._about_hindsight()
        self._about_waiting()
        self._about_bodies()
        self._about_failures()
        self._about_listening()
        self._about_others()
        self._about_prediction()
        self.ranks: Callable[[], Iterable[RankNow]] = tuple
        """asked when the metrics are read"""
        self._registry.register(_Ranks(self))
        ProcessCollector(registry=self._registry)
        self.dropped_lines: Callable[[], Mapping[str, int]] = dict
        """log lines that were dropped, by logger; asked when the metrics are read"""
        self._registry.register(_DroppedLines(self))
        self._unknown = _ModelSeries(self, "other")

    def _about_requests(self) -> None:
        """What clients asked for and got."""
        self._requests = self._tally("requests", "Requests by outcome", "model", "outcome")
        self.in_flight = 0
        self._in_flight = self._tally("requests_in_flight", "Requests being answered", goes_down=True)
        self.loop_lag = self._histogram("loop_lag_seconds", "How late the event loop wakes what it was to wake, sampled four times a second", _LAG).labels()
        self.ttft = self._histogram("time_to_first_token_seconds", "From request to first token", _LATENCY, "model")
        text = "Between the tokens of a choice after its first, mean of a request"
        self.tpot = self._histogram("time_per_output_token_seconds", text, _BETWEEN_TOKENS, "model")
        self.duration = self._histogram("request_seconds", "From request to end of answer", _LATENCY, "model")
        self.output = self._tally("output_tokens", "Tokens sent to clients", "model")
        self._characters = self._tally("conversation_characters", "Characters of conversations, by whether their token ids were known already", "ids")
        self._tenant_requests = self._tally("tenant_requests", "Requests by tenant and outcome; other: tenants without a key", "tenant", "outcome")
        self._tenant_tokens = self._tally("tenant_tokens", "Tokens of a tenant's requests: prompt, cached (of the prompt), output", "tenant", "kind")
        self._shared_cache = self._counter("shared_cache_requests", "Requests with a cache salt at an engine that does not isolate tenants", "model")
        self._tenants: frozenset[str] = frozenset()
        self.cached_reported = self._counter("cached_tokens_reported", "Prompt tokens that engines said they had cached", "model")

    def _about_decisions(self) -> None:
        """What was chosen, at what price, and how long choosing took."""
        self._decisions = self._tally("decisions", "Decisions by chosen rank", *_RANK)
        self._prompt = self._tally("prompt_tokens", "Prompt tokens routed", "model")
        self._cached = self._tally("cached_tokens", "Prompt tokens believed cached where they were routed", "model")
        self._lost = self._tally("overlap_blocks_lost", "Cached blocks passed by because another term weighed more", "model")
        text = "Price of the chosen rank, by term, weighted, where its speed is known"
        self._terms = VectorSums("roost_router_term_seconds", text, "model", "term", TERMS, unit=1e-3)
        self._tallies.sums.append(self._terms)
        self._overhead = self._histogram("overhead_seconds", "Time spent deciding, by stage", _OVERHEAD, "stage")
        self.tokenise = self._overhead.labels("tokenise")
        self.deciding = self._overhead.labels("decide")
        self._stages = {stage: self._overhead.labels(stage) for stage in STAGES}
        self._laps = 0

    def _about_hindsight(self) -> None:
        """What decisions expected, against what came true."""
        regret = self._histogram("regret_seconds", "Price of the choice above the best one, both at what came true", _REGRET, "model")
        self.in_hindsight = (
            regret,
            self._histogram("predicted_first_token_seconds", "From decision to first token, as predicted", _LATENCY, "model"),
            self._histogram("observed_first_token_seconds", "The same of the same requests, as it was", _LATENCY, "model"),
            self._histogram("locality_predicted", "Share of routed pairs that the chosen rank is expected to serve itself", _SHARES, "model"),
            self._histogram("locality_observed", "The same of the same requests, as it was", _SHARES, "model"),
        )
        self._profiles = self._counter("profiles_heard", "What ranks said of requests, by what became of it", "outcome")

    def _about_waiting(self) -> None:
        """Requests that found no room."""
        self._queued = self._gauge("queue_requests", "Requests that wait for a place", "class")
        self._queue_wait = self._histogram("queue_wait_seconds", "Wait for a place, of those that did not get one at once", _LATENCY, "class")
        self._refused = self._counter("refused", "Requests refused for want of a place, by class and the answer's code", "class", "code")

    def _about_bodies(self) -> None:
        """Memory of bodies, and the processes that read large ones."""
        self._bodies_bytes = self._gauge("bodies_bytes", "Memory that the bodies of open requests take")
        self._large_bodies = self._gauge("large_bodies_waiting", "Large bodies that wait for a process to read them")
        self._bodies_counted = self._tally("bodies", "Bodies refused for want of memory; processes for large ones started, and died in the middle", "event")

    def _about_failures(self) -> None:
        self._retries = self._counter("retries", "Attempts that failed, by how", "cause")
        self.retries_refused = self._counter("retries_refused", "Failures passed on because too many requests were tried again already")
        self.in_panic = self._counter("decisions_in_panic", "Decisions that did not heed breakers and outliers because no other rank was left")
        self.breakers_opened = self._counter("breakers_opened", "Ranks left alone after failures in a row")
        self.reloads = self._counter("config_reloads", "Times that settings were read again, by what became of them", "outcome")
        self._connections_cut = self._tally("connections_cut", "Connections of clients that exceeded a limit, by cause", "cause")
        self._left_alone = self._tally("rank_left_alone", "1: no new requests are sent to this rank, and why", *_RANK, "cause", goes_down=True)

    def _about_listening(self) -> None:
        """What comes over the bus, and what goes."""
        self.engines_live = self._gauge("engines_live", "Engines that requests are routed to")
        self.kv_events = self._counter("kv_events_applied", "KV events applied to the index")
        self.kv_snapshots = self._counter("kv_snapshots", "Snapshots asked for, by reason", "reason")
        self.bus_refused = self._counter("bus_messages_refused", "Messages that made no sense to the router")
        self.bus_dropped = self._gauge("bus_messages_dropped", "Messages dropped because the router read too slowly")
        self.bus_full = self._gauge("bus_store_full", "Times that something found no room, by store", "store")
        self.outcomes_published = self._counter("outcomes_published", "Finished requests told to the tracker")
        self.outcomes_dropped = self._counter("outcomes_dropped", "Finished requests that could not be told")
        self._routings = self._counter("foreign_routings", "Answers of engines that named their experts, by what became of it", "outcome")

    def _about_others(self) -> None:
        """Other routers, and other data planes that ask this one."""
        self._peers = self._gauge("peers", "Other routers that are heard")
        self._peer_bookings = self._gauge("peer_bookings", "Requests booked by other routers, counted here")
        self._peer_bookings_over = self._tally("peer_bookings_not_ended", "Bookings of other routers that ran out, or could not be counted", "cause")
        self.peer_gaps = self._counter("peer_gaps", "Messages of other routers that were missed, and made this one ask")
        self.bus_silent = self._gauge("bus_silent", "1: the bus carries nothing at present, so silence of engines says nothing")
        self._reservations = self._gauge("reservations_open", "Requests that other data planes have reserved here and not released")
        self._reservations_over = self._tally("reservations_ended", "Reservations of other data planes that are over, by how", "how")

    def _about_prediction(self) -> None:
        """What is foretold, and how the tables stand that it is foretold from."""
        self._predictions = self._tally("predictions", "Booked decisions by the source that foretold most", "source")
        for source in (*SOURCES, "mix", "none"):
            self._predictions.values[source,] = 0
        self.tables_asked = self._counter("tables_gaps", "Prediction tables asked for anew because a change was missed")
        self._gain = self._gauge("prediction_gain", "What the expert term is multiplied with", "model")
        self._cluster_gain = self._tally("prediction_cluster_gain", "The same for requests of one cluster", *_CLUSTER, goes_down=True)
        self._by_cluster = (
            self._tally("cluster_requests", "Requests that ranks told of, by the cluster they were foretold to be of most", *_CLUSTER),
            self._tally("cluster_local_predicted", "Sum of their shares of pairs that the chosen rank was expected to serve itself", *_CLUSTER),
            self._tally("cluster_local_observed", "Sum of the shares that it did serve itself", *_CLUSTER),
        )
        self._homes = self._tally("homes", "Booked decisions by whether the request went home", "model", "outcome")
        self._tables_version = self._gauge("tables_version", "Version of the prediction tables", "model")
        self._tables_age = self._gauge("tables_age_seconds", "Since prediction tables were taken last", "model")
        self._tables_bytes = self._gauge("tables_bytes", "Memory of the prediction tables", "model")

    # What happens

    def connection_cut(self, cause: str) -> None:
        """A client's connection was cut because it exceeded a limit."""
        self._connections_cut.values[cause,] += 1

    def decided(self, decision: Decision, seconds: float) -> None:
        """One decision that was booked."""
        label, chosen = self._series(decision.ask.model).label, decision.choice.chosen
        self._decisions.values[label, *decision.target.key] += 1
        self._prompt.values[label,] += decision.ask.prompt_tokens
        self._cached.values[label,] += decision.cached_tokens
        overlap = decision.overlap_blocks
        lost = int(overlap[overlap.argmax()] - overlap[chosen])
        if lost:
            self._lost.values[label,] += lost
        self._predictions.values["none" if decision.outlook is None else decision.outlook.forecast.best,] += 1
        self._homes.values[label, decision.homecoming] += 1
        if decision.shared_cache:
            self._shared_cache.labels(label).inc()
        if decision.is_measured(chosen):
            self._terms.add(label, decision.scores.terms[:, chosen])
        self.deciding.observe(seconds)

    def lap(self) -> Callable[[str], None] | None:
        """For one decision of LAPS: to be told when each of its STAGES is done. None for the others."""
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
        """One first token, from the decision on; both numbers are of the same request."""
        series = self._series(model)
        series.predicted_first.observe(predicted_seconds)
        series.observed_first.observe(observed_seconds)

    def locality(self, model: str, cluster: int, predicted: float, observed: float) -> None:
        """Shares of one request's routed pairs, 0..1. cluster: that it was foretold to be of most."""
        series = self._series(model)
        for tally, value in zip(self._by_cluster, (1.0, predicted, observed), strict=True):
            tally.values[series.label, cluster] += value
        series.predicted_local.observe(predicted)
        series.observed_local.observe(observed)

    def regret(self, model: str, seconds: float) -> None:
        """One decision, re-priced when its truth was known."""
        self._series(model).regret.observe(seconds)

    def profiled(self, outcome: str, count: int = 1) -> None:
        """What ranks said of requests: ours, unknown (another router's, or too old), unread (too many came)."""
        self._profiles.labels(outcome).inc(count)

    def queued(self, priority: str) -> None:
        """A request of this class begins to wait."""
        self._queued.labels(priority).inc()

    def dequeued(self, priority: str, seconds: float) -> None:
        """Its wait is over, however."""
        self._queued.labels(priority).dec()
        self._queue_wait.labels(priority).observe(seconds)

    def refused(self, priority: str, code: str) -> None:
        """A request of this class got no place."""
        self._refused.labels(priority, code).inc()

    def characters(self, known: int, new: int) -> None:
        """Of all conversations so far."""
        self._characters.values["known",], self._characters.values["new",] = known, new

    def failed(self, how: AttemptFailure) -> None:
        self._retries.labels(how.value).inc()

    def finished(self, model: str, outcome: str) -> None:
        """One request, however it ended. The name of a model that was never routed is not kept as a label."""
        self._requests.values[self._known(model).label, outcome] += 1

    def answered(
        self, model: str, output_tokens: int, seconds: float, first_token_seconds: float | None, seconds_per_token: float | None, cached_tokens: int
    ) -> None:
        """One answer, or the part of it that came. None: not known, because the answer came as a whole or was too short."""
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
        """Tenants that have series of their own from now on: those with a key, the first _KNOWN_TENANTS by name."""
        self._tenants = names if len(names) <= _KNOWN_TENANTS else frozenset(sorted(names)[:_KNOWN_TENANTS])

    def finished_for(self, tenant: str, outcome: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """One request of a tenant, however it ended. Requests without a key belong to none."""
        if not tenant:
            return
        name = tenant if tenant in self._tenants else "other"
        self._tenant_requests.values[name, outcome] += 1
        for kind, tokens in (("prompt", prompt_tokens), ("cached", cached_tokens), ("output", output_tokens)):
            self._tenant_tokens.values[name, kind] += tokens

    def left_alone(self, ranks: Mapping[RankLabels, str]) -> None:
        """The ranks that get no new requests now, and why; those not named get some."""
        self._left_alone.values = defaultdict(float, {(*labels, cause): 1 for labels, cause in ranks.items()})

    def peers(self, routers: int, bookings: int, expired: int, refused: int) -> None:
        """How other routers and what they booked stand; the last two count from the start."""
        self._peers.set(routers)
        self._peer_bookings.set(bookings)
        self._peer_bookings_over.values = defaultdict(float, {("expired",): expired, ("refused",): refused})

    def bodies(self, held: int, refused: int, waiting: int, started: int, died: int) -> None:
        """How the bodies of requests stand: bytes held, large ones that wait; refused bodies and processes count from the start."""
        self._bodies_bytes.set(held)
        self._large_bodies.set(waiting)
        for event, count in (("refused", refused), ("process_started", started), ("process_died", died)):
            self._bodies_counted.values[event,] = count

    def reservations(self, is_open: int, released: int, expired: int) -> None:
        """How reservations of other data planes stand; the last two count from the start."""
        self._reservations.set(is_open)
        self._reservations_over.values = defaultdict(float, {("released",): released, ("expired",): expired})

    def routings(self, outcome: str) -> None:
        """One answer that named its experts: told, bad (no such array), empty (nothing was computed), dropped (too many wait), too_long."""
        self._routings.labels(outcome).inc()

    def replica(self, model: str, tables: Tables, stored_bytes: int, age_seconds: float) -> None:
        """How the copy of one model's prediction tables stands."""
        self._replicas.add(model)
        version, gain = tables.version, tables.gain
        for cluster, value in enumerate([] if tables.gains is None else tables.gains.tolist()):
            self._cluster_gain.values[model, cluster] = value
        for gauge, value in self._about_tables(version, gain, stored_bytes, age_seconds):
            gauge.labels(model).set(value)

    # What is over

    def forget_worker(self, worker_id: int) -> None:
        """Drop the series of an engine that is gone."""
        for key in [key for key in self._decisions.values if key[1] == worker_id]:
            del self._decisions.values[key]

    def forget_replicas(self, kept: set[str]) -> None:
        """Drop the series of models that nobody serves any more."""
        for model in self._replicas - kept:
            for gauge, _ in self._about_tables():
                gauge.remove(model)
            for tally in (self._cluster_gain, *self._by_cluster):
                for key in [key for key in tally.values if key[0] == model]:
                    del tally.values[key]
        self._replicas &= kept

    def exposition(self) -> bytes:
        self._in_flight.values[()] = self.in_flight
        return generate_latest(self._registry)

    def _about_tables(self, version: float = 0, gain: float = 0, stored_bytes: float = 0, age: float = 0) -> tuple[tuple[Gauge, float], ...]:
        return ((self._tables_version, version), (self._gain, gain), (self._tables_bytes, stored_bytes), (self._tables_age, age))

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
        self._tallies.histograms.append(Histogram(f"roost_router_{name}", text, bounds, labels))
        return self._tallies.histograms[-1]

    def _tally(self, name: str, text: str, *labels: str, goes_down: bool = False) -> LazyCounter:
        self._tallies.tallies.append(LazyCounter(f"roost_router_{name}", text, labels, goes_down=goes_down))
        return self._tallies.tallies[-1]


class _ModelSeries:
    """The children of one model's label, looked up once."""

    def __init__(self, families: RouterMetrics, label: str) -> None:
        self.label = label
        self.ttft = families.ttft.labels(label)
        self.tpot = families.tpot.labels(label)
        self.duration = families.duration.labels(label)
        families.output.values[label,] += 0
        self.cached_reported = families.cached_reported.labels(label)
        self.regret, self.predicted_first, self.observed_first, self.predicted_local, self.observed_local = (
            family.labels(label) for family in families.in_hindsight
        )


class _Tallies(Collector):
    """What is counted as plain numbers, as families."""

    def __init__(self) -> None:
        self.tallies: list[LazyCounter] = []
        self.histograms: list[Histogram] = []
        self.sums: list[VectorSums] = []

    def collect(self) -> Iterator[Metric]:
        for tally in self.tallies:
            family = (GaugeMetricFamily if tally.goes_down else CounterMetricFamily)(tally.name, tally.text, labels=tally.labels)
            for labels, value in tally.values.items():
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
    """How ranks stand when somebody looks: those that can be chosen now, and no others."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        loads = [GaugeMetricFamily(f"roost_router_rank_{name}", text, labels=_RANK) for name, text in _LOADS]
        factors = GaugeMetricFamily("roost_router_speed_factor", "Measured over modelled seconds", labels=[*_RANK, "of"])
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
    """Log lines that nobody read."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("roost_router_log_lines_dropped", "Log lines dropped because nobody read them, by logger", labels=["logger"])
        for name, lines in self._metrics.dropped_lines().items():
            family.add_metric([name], lines)
        yield family
