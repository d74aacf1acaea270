"""Whether and where spans go: the standard OTEL_* variables, and a file of JSON lines. Off by default.

Off means no SDK at all: the parts' tracers are then the API's no-ops, and nothing of the SDK is loaded. On when a span file is
set (`tracing.spans`, --spans), when OTEL_TRACES_EXPORTER names an exporter, or when an OTLP endpoint is set. Sampler, resource,
headers, batching and the rest are read from their OTEL_* variables by the SDK itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Roost's own setting about spans; everything else is OpenTelemetry's OTEL_* variables."""

    spans: Path | None = None
    """file that every finished span is appended to, one JSON object per line"""


class TracingError(Exception):
    """The tracing variables ask for something that cannot be done; the text names the variable and what is possible."""


_OTLP = {"http/protobuf": "otlp", "grpc": "otlp_grpc"}
"""The exporter of each protocol of OTLP; http/json is not among OpenTelemetry's for Python."""


def exporters(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The exporters that the standard variables ask for: any of "otlp", "otlp_grpc" and "console". TracingError for others.

    Without OTEL_TRACES_EXPORTER an OTLP endpoint asks for OTLP; without either there is none. OTLP is sent over HTTP
    unless OTEL_EXPORTER_OTLP_PROTOCOL (or ..._TRACES_PROTOCOL) says grpc.
    """
    stated = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if not stated and any(environment.get(name) for name in _ENDPOINTS):
        stated = "otlp"
    named = tuple(dict.fromkeys(name.strip().lower() for name in stated.split(",") if name.strip()))
    for name in named:
        if name not in ("otlp", "console", "none"):
            raise TracingError(f"OTEL_TRACES_EXPORTER={stated}: {name!r} is not known; use otlp, console or none")
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if "otlp" in named and protocol not in _OTLP:
        raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: Roost sends {' or '.join(_OTLP)}")
    return tuple(_OTLP[protocol] if name == "otlp" else name for name in named if name != "none")


@contextmanager
def tracing(service: str, config: TracingConfig, environment: Mapping[str, str]) -> Iterator[None]:
    """Make this process's tracer provider, if any is asked for, and send the last spans at the end, within a bound.

    service: the name of this process, unless OTEL_SERVICE_NAME says another. TracingError as `exporters`.
    """
    wanted = exporters(environment)
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or (not wanted and config.spans is None):
        yield
        return
    from deploy.telemetry.otel import exporting  # the SDK is loaded only when something is exported

    with exporting(service, wanted, config.spans):
        yield
