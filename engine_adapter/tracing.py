"""Spans of a request's time inside a rank: queue, prefill, decode, as children of the caller's `traceparent`.

Only OpenTelemetry's API is used here; whether spans go anywhere is the composition root's choice (`deploy/tracing.py`). The spans
are made after the fact, from the moments the step thread noted anyway, so that a request which is not traced costs one check.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine_adapter.embedded.answers import Outcome

Attributes = Mapping[str, str | int]


class EngineTracing:
    """Makes the engine spans of one rank."""

    def __init__(self, *, engine: str, rank: int, model: str) -> None:
        self._tracer = trace.get_tracer("roost.engine")
        self._propagator = TraceContextTextMapPropagator()
        self._about: dict[str, str | int] = {"roost.engine": engine, "roost.rank": rank, "gen_ai.request.model": model}

    def record(self, traceparent: str | None, outcome: Outcome) -> None:
        """Say how a finished request spent its time. Nothing happens without a `traceparent`, or when nobody records."""
        moments = outcome.moments
        if traceparent is None or not moments.admitted:
            return
        queue: Attributes = {"roost.preemptions": outcome.preemptions}
        prefill: Attributes = {"gen_ai.usage.input_tokens": outcome.prompt_tokens, "roost.cached_tokens": outcome.cached_tokens}
        decode: Attributes = {"gen_ai.usage.output_tokens": outcome.completion_tokens, "roost.finish_reason": outcome.reason}
        context = self._propagator.extract({"traceparent": traceparent})
        for name, begin, end, attributes in (
            ("queue", moments.submitted, moments.admitted, queue),
            ("prefill", moments.admitted, moments.first_token, prefill),
            ("decode", moments.first_token, moments.finished, decode),
        ):
            span = self._tracer.start_span(f"roost.engine.{name}", context, start_time=begin)
            if not span.is_recording():
                return
            span.set_attributes({**self._about, **attributes})
            span.end(end)


class NoTracing:
    """Tracing switched off."""

    def record(self, traceparent: str | None, outcome: Outcome) -> None:
        """Do nothing."""
