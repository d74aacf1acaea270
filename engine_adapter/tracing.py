"""Spans of a request's time inside a rank: queue, prefill, decode, as children of the caller's `traceparent`; and of what a handover's staging
consists of on a rank: pull, verify, prepare, as children of the handover's.

Only OpenTelemetry's API is used here; whether spans go anywhere is the composition root's choice (`deploy/telemetry/otel.py`). The spans
are made after the fact, from the moments the step thread noted anyway, so that a request which is not traced costs one check.
"""

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_adapter.serving.generation import GenerationOutcome

Attributes = dict[str, str | int]


class EngineTracing:
    """Makes the engine spans of one rank."""

    def __init__(self, *, engine: str, rank: int, model: str) -> None:
        self._tracer = trace.get_tracer("roost.engine")
        self._propagator = TraceContextTextMapPropagator()
        self._about: Attributes = {"roost.engine": engine, "roost.rank": rank, "gen_ai.request.model": model}

    def record(self, traceparent: str | None, outcome: GenerationOutcome | None) -> None:
        """Say how a request spent its time, as far as it came: `roost.outcome` is on the span in which it ended.

        Nothing happens without a `traceparent` or an outcome (the engine never had the request), or when nobody records.
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
    """Makes the spans of one rank's part in handovers."""

    def __init__(self, *, engine: str, rank: int) -> None:
        self._tracer = trace.get_tracer("roost.engine")
        self._propagator = TraceContextTextMapPropagator()
        self._about: Attributes = {"roost.engine": engine, "roost.rank": rank}

    def stage(self, traceparent: str, name: str, began: int, attributes: Attributes, failure: str) -> None:
        """A part of staging that ended now. began: nanoseconds of the wall clock; failure: empty where it went well."""
        context = self._propagator.extract({"traceparent": traceparent})
        span = self._tracer.start_span(f"roost.handover.{name}", context, start_time=began)
        if not span.is_recording():
            return
        span.set_attributes(self._about | attributes)
        if failure:
            span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        span.end()


def _stages(outcome: GenerationOutcome) -> tuple[tuple[str, int, int, Attributes], ...]:
    """(name, begin, end, attributes) of the three stages; end 0: the request ended in this one."""
    moments = outcome.moments
    queue: Attributes = {"roost.preemptions": outcome.preemptions}
    prefill: Attributes = {"gen_ai.usage.input_tokens": outcome.prompt_tokens, "roost.cached_tokens": outcome.cached_tokens}
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
