"""OpenTelemetry SDK setup for one process; imported only if spans are exported
(`deploy.telemetry.tracing_config` decides)."""

import fcntl
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)

log = logging.getLogger(__name__)

MAX_SPAN_FILE_BYTES = 256 * 1024 * 1024
FLUSH_SECONDS = 2.0
"""time limit for sending the last spans at stop"""
FILE_SECONDS = 0.2
"""longest time before a finished span is in the file"""


@contextmanager
def exporting(service: str, selected: Sequence[str], file: Path | None) -> Iterator[None]:
    """Set the process's tracer provider; at the end send the remaining spans, for at most FLUSH_SECONDS.

    service: name of this process, overridden by OTEL_SERVICE_NAME. selected: "otlp", "otlp_grpc",
    "console".
    """
    provider = _provider(service, selected, file)
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        # The SDK's own flush has no time limit while a collector is away. Its threads die with the process.
        flush = threading.Thread(target=provider.shutdown, name="send the last spans", daemon=True)
        flush.start()
        flush.join(FLUSH_SECONDS)
        if flush.is_alive():
            log.warning("the last spans could not be sent within %.0f s and are lost", FLUSH_SECONDS)


def _provider(service: str, selected: Sequence[str], file: Path | None) -> TracerProvider:
    stated = OTELResourceDetector().detect().attributes.get(SERVICE_NAME)
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: stated or service}), shutdown_on_exit=False
    )
    if "otlp" in selected:
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if "otlp_grpc" in selected:
        provider.add_span_processor(BatchSpanProcessor(_over_grpc()))
    if "console" in selected:
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
    if file is not None:
        provider.add_span_processor(
            BatchSpanProcessor(SpanFile(file), schedule_delay_millis=FILE_SECONDS * 1000)
        )
    return provider


def _over_grpc() -> SpanExporter:
    """Return the exporter for port 4317 of most collectors. Loaded on demand: gRPC takes 20 MB and its own
    threads."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

    return OverGrpc()


class SpanFile(SpanExporter):
    """Append spans to a file, one JSON object per line. Several processes may share the file: a batch is one
    write.

    A file beyond `most_bytes` is moved aside (`FILE.old`, which replaces an older one), and a new one is
    started.

    Fields: service, trace_id, span_id, parent_id (hex), name, kind, start_ns and end_ns (unix time), ms,
    status, attributes, links (to spans of other traces), events.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_SPAN_FILE_BYTES) -> None:
        """Open the file. Raises OSError if it cannot be written."""
        self._path, self._max_bytes = path, max_bytes
        self._file = path.open("ab", buffering=0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._rotate()
        self._file.write(
            "".join(json.dumps(as_record(span), ensure_ascii=False) + "\n" for span in spans).encode()
        )
        return SpanExportResult.SUCCESS

    def _rotate(self) -> None:
        """Start a new file when this one is full, or reopen the one that another process has started."""
        if self._is_current():
            if os.fstat(self._file.fileno()).st_size <= self._max_bytes:
                return
            # locks this very file: one process moves it; the others then find that it was moved
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._is_current():
                self._path.replace(self._path.with_name(f"{self._path.name}.old"))
        following = self._path.open("ab", buffering=0)
        self._file.close()
        self._file = following

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def shutdown(self) -> None:
        self._file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def as_record(span: ReadableSpan) -> dict[str, Any]:
    """Return one span as it is written to a span file."""
    context, start, end = span.get_span_context(), span.start_time or 0, span.end_time or 0
    return {
        "service": span.resource.attributes.get(SERVICE_NAME),
        "trace_id": trace.format_trace_id(context.trace_id) if context else None,
        "span_id": trace.format_span_id(context.span_id) if context else None,
        "parent_id": trace.format_span_id(span.parent.span_id) if span.parent else None,
        "name": span.name,
        "kind": span.kind.name.lower(),
        "start_ns": start,
        "end_ns": end,
        "ms": (end - start) / 1e6,
        "status": span.status.status_code.name.lower(),
        "attributes": dict(span.attributes or {}),
        "links": [
            {
                "trace_id": trace.format_trace_id(to.context.trace_id),
                "span_id": trace.format_span_id(to.context.span_id),
            }
            for to in span.links
        ],
        "events": [
            {"name": event.name, "at_ns": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
    }
