"""Record a rank's spans: queue, prefill and decode as children of the request's `traceparent`; pull, verify
and prepare as children of the handover's.

This module uses only OpenTelemetry's API. The composition root decides whether spans are exported
(`deploy/telemetry/otel.py`). The spans are created afterwards from timestamps that the step thread takes
anyway, so a request without a trace costs one check.
"""

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_adapter.serving.generation import GenerationOutcome

Attributes = dict[str, str | int]


class EngineTracing:
    """Record the request spans of one rank."""

    def __init__(self, *, engine: str, rank: int, model: str) -> None:
        self._tracer = trace.get_tracer("roost.engine")
        self._propagator = TraceContextTextMapPropagator()
        self._about: Attributes = {"roost.engine": engine, "roost.rank": rank, "gen_ai.request.model": model}

    def record(self, traceparent: str | None, outcome: GenerationOutcome | None) -> None:
        """Record the spans of a finished request up to the stage in which it ended. That stage's span carries
        `roost.outcome`.

        Do nothing without a `traceparent`, without an outcome (the request never reached the engine), or when
        spans are not recorded.
        """
        if traceparent is None or outcome is None:
            return
        context = self._propagator.extract({"traceparent": traceparent})
        for name, begin, end, attributes in _stages(outcome):
            span = self._tracer.start_span(f"roost.engine.{name}", context, start_time=begin)
            if not span.is_recording():
                return
            span.set_attributes(self._about | attributes)
            if not end:
                _end(span, outcome)
                return
            span.end(end)


class HandoverTracing:
    """Record the spans of one rank's part in handovers."""

    def __init__(self, *, engine: str, rank: int) -> None:
        self._tracer = trace.get_tracer("roost.engine")
        self._propagator = TraceContextTextMapPropagator()
        self._about: Attributes = {"roost.engine": engine, "roost.rank": rank}

    def stage(self, traceparent: str, name: str, began: int, attributes: Attributes, failure: str) -> None:
        """Record a stage of staging that ended now. began: wall clock in nanoseconds. failure: empty on
        success."""
        context = self._propagator.extract({"traceparent": traceparent})
        span = self._tracer.start_span(f"roost.handover.{name}", context, start_time=began)
        if not span.is_recording():
            return
        span.set_attributes(self._about | attributes)
        if failure:
            span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        span.end()


def _stages(outcome: GenerationOutcome) -> tuple[tuple[str, int, int, Attributes], ...]:
    """Return (name, begin, end, attributes) of the three stages. end 0: the request ended in this stage."""
    moments = outcome.moments
    queue: Attributes = {"roost.preemptions": outcome.preemptions}
    prefill: Attributes = {
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "roost.cached_tokens": outcome.cached_tokens,
    }
    decode: Attributes = {"gen_ai.usage.output_tokens": outcome.completion_tokens}
    return (
        ("queue", moments.submitted, moments.admitted, queue),
        ("prefill", moments.admitted, moments.first_token, prefill),
        ("decode", moments.first_token, 0, decode),
    )


def _end(span: trace.Span, outcome: GenerationOutcome) -> None:
    span.set_attribute("roost.outcome", outcome.reason)
    if outcome.reason == "failed":
        span.set_attribute("error.type", type(outcome.failure).__name__)
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(outcome.failure)))
    span.end(outcome.moments.finished)
