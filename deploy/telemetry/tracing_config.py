"""Destination of spans: the standard OTEL_* variables, and a file of JSON lines. Off by default.

Off means no SDK: the parts' tracers are the API's no-ops, and the SDK is not loaded. Tracing is on if a span
file is set (`tracing.spans`, --spans), OTEL_TRACES_EXPORTER names an exporter, or an OTLP endpoint is set.
The SDK itself reads sampler, resource, headers, batching and the rest from their OTEL_* variables.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Roost's only setting for spans; everything else is in OpenTelemetry's OTEL_* variables."""

    spans: Path | None = None
    """file to which every finished span is appended, one JSON object per line"""


class TracingError(Exception):
    """Unsupported value of a tracing variable; the text names the variable and the possible values."""


_OTLP = {"http/protobuf": "otlp", "grpc": "otlp_grpc"}
"""Exporter of each OTLP protocol; OpenTelemetry for Python has none for http/json."""


def exporters(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the exporters that the standard variables select: any of "otlp", "otlp_grpc" and "console".
    Raises TracingError for others.

    Without OTEL_TRACES_EXPORTER, an OTLP endpoint selects OTLP; without either there is none. OTLP uses HTTP
    unless OTEL_EXPORTER_OTLP_PROTOCOL (or ..._TRACES_PROTOCOL) says grpc.
    """
    stated = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if not stated and any(environment.get(name) for name in _ENDPOINTS):
        stated = "otlp"
    named = tuple(dict.fromkeys(name.strip().lower() for name in stated.split(",") if name.strip()))
    for name in named:
        if name not in ("otlp", "console", "none"):
            raise TracingError(
                f"OTEL_TRACES_EXPORTER={stated}: {name!r} is not known; use otlp, console or none"
            )
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if "otlp" in named and protocol not in _OTLP:
        raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: Roost sends {' or '.join(_OTLP)}")
    return tuple(_OTLP[protocol] if name == "otlp" else name for name in named if name != "none")


@contextmanager
def tracing(service: str, config: TracingConfig, environment: Mapping[str, str]) -> Iterator[None]:
    """Create this process's tracer provider, if tracing is on. At the end send the last spans, in bounded
    time.

    service: the name of this process, overridden by OTEL_SERVICE_NAME. Raises TracingError as `exporters`
    does.
    """
    selected = exporters(environment)
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or (not selected and config.spans is None):
        yield
        return
    from deploy.telemetry.otel import exporting  # loads the SDK, so it is imported only for exports

    with exporting(service, selected, config.spans):
        yield
