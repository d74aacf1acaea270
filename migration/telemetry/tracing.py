"""OpenTelemetry traces of plans. Disabled without a provider.

Each plan has one trace: the span of the plan, a child span for each handover, which is also linked to it, and
one for the verdict. If a plan responds to something (a demand shift, a harmful plan), its span is a child of
that cause, in the same trace. A plan started by a coordinator that died continues below the span which that
coordinator never ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleet.facts.migrations import (
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    PlanEvaluated,
)
from fleet.handover import CoordinatorEvent
from fleet.layout import AttentionKind, layer_ranges
from migration.handover.coordinator import HandoverSpec, HandoverState, Transition
from migration.model.plan import Plan

Provider = TracerProvider
"""For callers that pass a provider without importing OpenTelemetry."""

MAX_EXPERTS = 256
"""Limit on the arrivals listed in a handover's span; its events list all."""
Attributes = dict[str, str | int | float]
_EVENTS = {
    CoordinatorEvent.ALL_STAGED: "decided",
    CoordinatorEvent.FAILED: "given up",
    CoordinatorEvent.ALL_SERVING: "flipped",
    CoordinatorEvent.ALL_REFUSED: "refused by all",
    CoordinatorEvent.ALL_ABORTED: "aborted",
    CoordinatorEvent.ENGINE_GONE: "engine gone",
}


class MigrationTracing:
    """Tracer of a real provider. `create` returns None if spans would be discarded."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("roost.migration")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def create(cls, provider: TracerProvider | None = None) -> "MigrationTracing | None":
        """Create the tracer with the given provider or the process's own. Returns None if that is a no-op."""
        provider = trace.get_tracer_provider() if provider is None else provider
        return (
            None
            if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
            else cls(provider)
        )

    def plan(self, engine: str, plan: Plan, origin: str, parent: str = "") -> "PlanTrace":
        """Start the span of a plan. parent: traceparent of the cause; without a valid one the plan starts a
        new trace."""
        about: Attributes = {
            "roost.plan": plan.id,
            "roost.engine": engine,
            "roost.origin": origin,
            "roost.bytes": plan.bytes,
        }
        about |= {"roost.handovers": len(plan.handovers), "roost.epoch.base": plan.base_epoch}
        about |= _turned(plan.turned("shard"), plan.turned("gather"), plan.attention)
        return PlanTrace(self, self.span("roost.plan", about, self._context(parent)))

    def resumed(self, planned: MigrationPlanned) -> "PlanTrace":
        """Start the span of a plan resumed from a previous coordinator."""
        about: Attributes = {
            "roost.plan": planned.plan,
            "roost.engine": planned.engine,
            "roost.origin": planned.origin,
            "roost.bytes": planned.bytes,
        }
        about |= _turned(planned.to_sharded, planned.to_whole, planned.attention)
        return PlanTrace(
            self,
            self.span(
                "roost.plan.resumed",
                about,
                self._context(planned.traceparent),
                self._links(planned.traceparent),
            ),
        )

    def evaluated(self, verdict: PlanEvaluated, parent: str) -> None:
        """Record the verdict on a plan. parent: traceparent of the plan, whose span ended long ago."""
        about: Attributes = {
            "roost.plan": verdict.plan,
            "roost.engine": verdict.engine,
            "roost.epoch": verdict.epoch,
            "roost.verdict": verdict.verdict,
        }
        about |= {"roost.plan_discount": verdict.plan_discount, "roost.reason": verdict.reason}
        if verdict.realised is not None:
            about["roost.realised"] = verdict.realised
        for when in ("predicted_before", "predicted_after", "measured_before", "measured_after"):
            about |= _figures(when.replace("_", "."), getattr(verdict, when))
        self.span("roost.plan.evaluated", about, self._context(parent), self._links(parent)).end()

    def span(
        self, name: str, about: Mapping[str, str | int | float], below: Context, links: Sequence[Link] = ()
    ) -> Span:
        """Start a span. below: context of the parent."""
        return self._tracer.start_span(name, below, attributes=dict(about), links=links)

    def traceparent(self, span: Span) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span, Context()))
        return carrier.get("traceparent", "")

    def _context(self, traceparent: str) -> Context:
        return self._propagator.extract({"traceparent": traceparent}, Context())

    def _links(self, traceparent: str) -> tuple[Link, ...]:
        context = trace.get_current_span(self._context(traceparent)).get_span_context()
        return (Link(context),) if context.is_valid else ()


class PlanTrace:
    """Span of a plan."""

    def __init__(self, tracing: MigrationTracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self.traceparent = tracing.traceparent(span)

    def handover(self, what: HandoverSpec) -> "HandoverTrace":
        """Start the span of the next handover."""
        about: Attributes = {
            "roost.plan": what.plan,
            "roost.engine": what.engine,
            "roost.worker_id": str(what.worker_id),
            "roost.handover": what.handover,
            "roost.number": what.number,
            "roost.epoch": what.epoch,
            "roost.copies": what.copied,
            "roost.bytes": what.bytes,
        }
        below = trace.set_span_in_context(self._span, Context())
        span = self._tracing.span("roost.handover", about, below, (Link(self._span.get_span_context()),))
        if what.arrivals:
            span.set_attribute(
                "roost.experts",
                [
                    f"{one.layer}/{one.expert}: {one.source} -> {one.rank}"
                    for one in what.arrivals[:MAX_EXPERTS]
                ],
            )
        span.add_event("proposed")
        return HandoverTrace(span, self._tracing.traceparent(span))

    def end(self, end: MigrationCommitted | MigrationAborted | None) -> None:
        """End the span of the plan."""
        _end(self._span, end)


class HandoverTrace:
    """Span of a handover. Its `traceparent` is sent with the proposal."""

    def __init__(self, span: Span, traceparent: str) -> None:
        self._span = span
        self._traceparent = traceparent

    def carried_by(self, what: HandoverSpec) -> HandoverSpec:
        """Return the handover description with this span as the parent of the ranks' spans."""
        return replace(what, traceparent=self._traceparent)

    def transition(self, handover: HandoverState, transition: Transition) -> None:
        """Record a transition that was carried out."""
        if transition.event is CoordinatorEvent.ALL_STAGED:
            self._span.add_event("staged")
        self._span.add_event(_EVENTS.get(transition.event, str(transition.event)))
        given_up = transition.event in (CoordinatorEvent.FAILED, CoordinatorEvent.ALL_REFUSED)
        if given_up and (failure := handover.failure) is not None:
            self._span.set_attribute("roost.fault", failure.fault)
        ends = [
            entry for entry in transition.records if isinstance(entry, MigrationCommitted | MigrationAborted)
        ]
        if ends:
            _end(self._span, ends[-1])


def _turned(
    to_sharded: tuple[int, ...], to_whole: tuple[int, ...], attention: AttentionKind | None
) -> Attributes:
    """Return the layers that a plan turns over, as text, and the attention that it leads to; nothing where
    there are none."""
    both = (("roost.to_sharded", to_sharded), ("roost.to_whole", to_whole))
    about: Attributes = {name: layer_ranges(layers) for name, layers in both if layers}
    return about if attention is None else {**about, "roost.attention": attention}


def _figures(prefix: str, figures: LoopFigures | None) -> Attributes:
    if figures is None:
        return {}
    names = ("remote_ranks", "local", "balance", "step_seconds")
    return {f"roost.{prefix}.{name}": getattr(figures, name) for name in names}


def _end(span: Span, end: MigrationCommitted | MigrationAborted | None) -> None:
    match end:
        case MigrationCommitted():
            span.set_attribute("roost.outcome", "committed")
        case MigrationAborted():
            span.set_attributes({"roost.outcome": "aborted", "error.type": end.fault})
            span.set_status(Status(StatusCode.ERROR, end.reason))
    span.end()
