"""Tracing of popularity shifts: each shift starts a trace, which the reactions to it continue. Free of cost
without a provider.

This module uses only OpenTelemetry's API. The composition root decides where spans go
(`deploy/telemetry/otel.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleet.facts.demand import PopularityShifted

MAX_LAYERS = 64
"""limit of changed layers named in a span"""
MAX_SHIFTS = 1024
"""limit of unsettled shifts whose spans are remembered"""


class ShiftTracing:
    """Spans of shifts: from detection to publication. The span of a shift's end is its child.

    Plans that react to a shift start long after its span has ended. Traces allow that.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """provider: None for the process's own."""
        self._tracer = (trace.get_tracer_provider() if provider is None else provider).get_tracer(
            "roost.tracker"
        )
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[str, SpanContext] = {}
        """by model: span of the shift that has not settled yet"""

    @contextmanager
    def saying(self, shift: PopularityShifted) -> Iterator[PopularityShifted]:
        """Yield the shift with the traceparent of its span. Publish it within the context."""
        context, links = Context(), list[Link]()
        if shift.settled and (begun := self._open.pop(shift.model, None)) is not None:
            context, links = trace.set_span_in_context(trace.NonRecordingSpan(begun), context), [Link(begun)]
        name = "roost.popularity.settled" if shift.settled else "roost.popularity.shift"
        with self._tracer.start_as_current_span(name, context, attributes=_about(shift), links=links) as span:
            if not shift.settled and span.get_span_context().is_valid:
                self._remember(shift.model, span.get_span_context())
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier, trace.set_span_in_context(span, Context()))
            yield msgspec.structs.replace(shift, traceparent=carrier.get("traceparent", ""))

    def _remember(self, model: str, context: SpanContext) -> None:
        self._open[model] = context
        if len(self._open) > MAX_SHIFTS:  # models come and go without notice
            del self._open[next(iter(self._open))]


def _about(shift: PopularityShifted) -> dict[str, str | int | float | tuple[int, ...]]:
    return {
        "roost.model": shift.model,
        "roost.version": shift.version,
        "roost.divergence": shift.divergence,
        "roost.threshold": shift.threshold,
        "roost.layers": shift.layers[:MAX_LAYERS],
    }
