"""A shift of popularity is the first span of a trace: what is done about it goes on below it. Off without a provider, at no cost.

Only OpenTelemetry's API is used here; whether spans go anywhere is the composition root's choice (`deploy/telemetry/otel.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fleet.events import PopularityShifted

MOST_LAYERS = 64
"""of those that moved, that a span names"""
MOST_SHIFTS = 1024
"""that have not settled, whose spans are remembered"""


class ShiftTracing:
    """Spans of shifts: of one that is noticed, from then until it is said; below it, of its end. Plans come when it has long ended, which
    traces allow."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """provider: None for the process's own."""
        self._tracer = (trace.get_tracer_provider() if provider is None else provider).get_tracer("roost.tracker")
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[str, SpanContext] = {}
        """by model: the span of the shift that has not settled yet"""

    @contextmanager
    def saying(self, shift: PopularityShifted) -> Iterator[PopularityShifted]:
        """Say, within this, what is yielded: the shift with the traceparent of its span."""
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
        if len(self._open) > MOST_SHIFTS:  # models come and go, and nobody says that one went
            del self._open[next(iter(self._open))]


def _about(shift: PopularityShifted) -> dict[str, str | int | float | tuple[int, ...]]:
    return {
        "roost.model": shift.model,
        "roost.version": shift.version,
        "roost.divergence": shift.divergence,
        "roost.threshold": shift.threshold,
        "roost.layers": shift.layers[:MOST_LAYERS],
    }
