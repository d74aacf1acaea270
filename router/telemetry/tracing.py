"""One trace per request: a server span, a decision span, and one client span per attempt. GenAI conventions;
off without a provider.

Numbers of 64 unsigned bits are recorded as text, because OpenTelemetry's integers are signed.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleet.completions import MAX_NAME, shortened
from fleet.redaction import without_secrets
from router.prediction.predictor import LayerExperts, PredictionRecord
from router.scheduling.cost import TERMS
from router.scheduling.decision import Decision
from router.scheduling.decision_record import Candidate, DecisionRecord

Provider = TracerProvider
"""Alias for callers that pass a provider on without importing OpenTelemetry."""
Value = str | bool | int | float | Sequence[str] | Sequence[float]

RouteInterface = Literal["nats", "library"]
"""Interface other than HTTP over which a decision is requested."""
MAX_CANDIDATES = 32
"""Candidates recorded in a span, cheapest first; the decision's record has all of them."""


class RouterTracing:
    """Tracer of a real provider. `create` returns None for a no-op provider, so that disabled tracing costs
    nothing.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("roost.router")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def create(cls, provider: TracerProvider | None = None) -> "RouterTracing | None":
        """Use the given provider, or the process's own. None when that is a no-op."""
        provider = trace.get_tracer_provider() if provider is None else provider
        return (
            None
            if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
            else cls(provider)
        )

    def request(
        self, operation: str, path: str, headers: Mapping[str, str], start_ns: int, *, trusted: bool = True
    ) -> "RequestTrace":
        """Begin a trace, or continue the trace in the client's `traceparent`.

        An untrusted client gets a new trace, sampled by the router's settings, with a link to the trace that
        it named.
        """
        parent = self._propagator.extract(headers, context=Context())
        links = []
        if not trusted:
            links, parent = [trace.Link(trace.get_current_span(parent).get_span_context())], Context()
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "roost",
            "http.request.method": "POST",
            "url.path": path,
        }
        span = self._tracer.start_span(
            operation, parent, SpanKind.SERVER, attributes, links, start_time=start_ns
        )
        return RequestTrace(self, span, operation)

    def route_request(
        self, interface: RouteInterface, path: str, traceparent: str, start_ns: int
    ) -> "RequestTrace":
        """Begin a trace for a decision requested over NATS or by a program. path: of the equivalent HTTP
        route.
        """
        parent = self._propagator.extract({"traceparent": traceparent}, context=Context())
        attributes = {
            "gen_ai.operation.name": "route",
            "gen_ai.provider.name": "roost",
            "roost.interface": interface,
            "url.path": path,
        }
        kind = SpanKind.SERVER if interface == "nats" else SpanKind.INTERNAL
        return RequestTrace(
            self, self._tracer.start_span("route", parent, kind, attributes, start_time=start_ns), "route"
        )

    def child(self, name: str, within: Context, kind: SpanKind, start_ns: int | None = None) -> Span:
        return self._tracer.start_span(name, within, kind, start_time=start_ns)

    def headers(self, span: Span) -> dict[str, str]:
        """Return the `traceparent` and `tracestate` headers that make a span the parent of later ones."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span, otel_context.Context()))
        return carrier


class RequestTrace:
    """Spans of one request."""

    def __init__(self, tracing: RouterTracing, span: Span, operation: str) -> None:
        self._tracing = tracing
        self._span = span
        self._operation = operation
        self._within = trace.set_span_in_context(span, Context())

    @property
    def id(self) -> str:
        """Id of the trace, 32 hexadecimal digits."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def decoded(self, model: str, settings: Mapping[str, Value | None]) -> None:
        """Record the request once it is decoded; settings are names below `gen_ai.request.`."""
        model = shortened(model, MAX_NAME)
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attribute("gen_ai.request.model", model)
        for name, value in settings.items():
            if value is not None:
                self._span.set_attribute(f"gen_ai.request.{name}", value)

    def queued(self, priority: str, start_ns: int, end_ns: int, refused: str | None) -> None:
        """Record the wait for admission as a span of its own. refused: why it failed."""
        span = self._tracing.child("roost.queue", self._within, SpanKind.INTERNAL, start_ns)
        span.set_attribute("roost.priority", priority)
        if refused is not None:
            span.set_attribute("error.type", refused)
            span.set_status(Status(StatusCode.ERROR, refused))
        span.end(end_ns)

    def decided(self, decision: Decision, start_ns: int, end_ns: int) -> None:
        """Record the decision as a span of its own: one event per candidate with its terms in milliseconds,
        cheapest first.
        """
        span = self._tracing.child("roost.decide", self._within, SpanKind.INTERNAL, start_ns)
        if span.is_recording():
            record = decision.record(MAX_CANDIDATES)
            span.set_attributes(_decision_attributes(decision, record))
            for candidate in record.candidates:
                span.add_event("roost.candidate", _candidate_attributes(candidate), timestamp=end_ns)
        span.end(end_ns)

    def attempt(self, decision: Decision) -> "AttemptTrace":
        """Begin the span of one attempt at the chosen rank."""
        span = self._tracing.child("roost.forward", self._within, SpanKind.CLIENT)
        worker_id, rank = decision.target.key
        span.set_attributes(
            {
                "roost.decision.id": decision.id,
                "roost.attempt": decision.ask.attempt,
                "roost.chosen": decision.target.name,
                "roost.worker_id": str(worker_id),
                "roost.dp_rank": rank,
                "url.full": without_secrets(decision.target.url),
            }
        )
        return AttemptTrace(span, self._tracing.headers(span))

    def end(self, posix_ns: int, status: int, outcome: str, attributes: Mapping[str, Value | None]) -> None:
        """End the request's span as of a time in nanoseconds since 1970; attributes that are None are
        omitted.
        """
        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("roost.outcome", outcome)
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)
        if status >= 500 or outcome not in ("answered", "refused"):
            self._span.set_attribute("error.type", outcome if status < 500 else str(status))
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end(posix_ns)


class AttemptTrace:
    """Span of one attempt. `headers` propagate it upstream."""

    def __init__(self, span: Span, headers: dict[str, str]) -> None:
        self._span = span
        self.headers = headers

    def first_token(self) -> None:
        self._span.add_event("roost.first_token")

    def end(self, failure: str | None) -> None:
        if failure is not None:
            self._span.set_attribute("error.type", failure)
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


def _candidate_attributes(candidate: Candidate) -> dict[str, Value]:
    predicted = {
        "roost.remote_ranks": candidate.remote_ranks,
        "roost.remote_nodes": candidate.remote_nodes,
        "roost.local_share": candidate.local_share,
        "roost.added_experts": candidate.added_experts,
    }
    return {
        **{name: value for name, value in predicted.items() if value is not None},
        "roost.candidate": f"{candidate.engine}/{candidate.rank}",
        "roost.worker_id": candidate.worker_id,
        "roost.score": candidate.score,
        **{
            f"roost.term.{term}_ms": value
            for term in TERMS
            if (value := getattr(candidate.terms_ms, term)) is not None
        },
        "roost.speed": candidate.speed,
        "roost.overlap_blocks": candidate.overlap_blocks,
        "roost.uncached_tokens": candidate.uncached_tokens,
    }


def _decision_attributes(decision: Decision, record: DecisionRecord) -> dict[str, Value]:
    found: dict[str, Value] = {
        "roost.decision.id": record.id,
        "roost.chosen": record.chosen,
        "roost.policy": record.policy,
        "roost.unit": record.unit,
        "roost.why": record.why,
        "roost.score": float(decision.score[decision.chosen]),
        "roost.tied": record.tied,
        "roost.dialect": record.dialect,
        "roost.hashed": record.hashed,
        "roost.candidates": len(decision.at),
        "roost.prompt_tokens": record.prompt_tokens,
        "roost.expected_output_tokens": record.expected_output_tokens,
        "roost.attempt": record.attempt,
        "roost.epoch.view": record.epochs.view,
        "roost.epoch.placement": [
            f"{engine}:{epoch}" for engine, epoch in record.epochs.placement.items() if epoch is not None
        ],
        "roost.excluded": [
            f"{out.engine}/{out.rank}: {out.reason}" for out in record.excluded[:MAX_CANDIDATES]
        ],
        "roost.ignored": [
            f"{out.engine}/{out.rank}: {out.reason}" for out in record.ignored[:MAX_CANDIDATES]
        ],
    }
    notes = sorted({candidate.experts_note for candidate in record.candidates if candidate.experts_note})
    optional: dict[str, Value | None] = {
        "roost.runner_up": record.runner_up,
        "roost.margin": record.margin,
        "roost.if_gone": record.if_gone,
        "roost.without": (
            [f"{term}:{name}" for term, name in record.without.items() if name != record.chosen] or None
        ),
        "roost.session_rank": record.session_rank,
        "roost.home_ranks": record.home_ranks or None,
        "roost.homes_note": record.homes_note,
        "roost.epoch.prices": (
            [f"{engine}:{epoch}" for engine, epoch in record.epochs.prices.items() if epoch is not None]
            or None
        ),
        "roost.epoch.homes": (
            [
                f"{engine}:{homes.epoch} (version {homes.version})"
                for engine, homes in record.epochs.homes.items()
            ]
            or None
        ),
        "roost.epoch.tables": record.epochs.tables,
        "roost.epoch.clusters": record.epochs.clusters,
        "roost.replaces": record.replaces,
        "roost.cause": record.cause,
        "roost.experts_note": notes or None,
    }
    if record.prediction is not None:
        optional |= _prediction_attributes(record.prediction)
    return found | {name: value for name, value in optional.items() if value is not None}


def _prediction_attributes(record: PredictionRecord) -> dict[str, Value | None]:
    return {
        "roost.prediction.clusters": [f"{one.cluster}:{one.weight:.3f}" for one in record.clusters],
        "roost.prediction.known_blocks": record.known_blocks,
        "roost.prediction.prefix": record.prefix,
        "roost.prediction.sources": (
            [
                f"{one.source}: {one.evidence_tokens:g} tokens, confidence {one.confidence:.3f}"
                for one in record.sources
            ]
            or None
        ),
        "roost.prediction.experts": [_experts_of(one) for one in record.experts] or None,
        "roost.prediction.best": record.best,
        "roost.prediction.confidence": record.confidence,
        "roost.prediction.gain": record.gain,
    }


def _experts_of(one: LayerExperts) -> str:
    """Format as text, because OpenTelemetry has no lists of lists."""
    return f"{one.layer}: " + ", ".join(
        f"{expert} {share:.1%}" for expert, share in zip(one.experts, one.shares, strict=True)
    )
