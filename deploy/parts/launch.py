"""Run one part as this process. A part is imported only when it runs: a tracker must not load an engine's
libraries."""

import importlib
from collections.abc import Mapping
from typing import Any

from deploy.configuration_loader import Configuration
from deploy.process import FINAL, print_error, run, set_up_logging
from deploy.sections import UpConfig
from deploy.telemetry.tracing_config import TracingConfig, TracingError, tracing

SERVICES = {
    "rank": "roost-engine",
    "simulated": "roost-engine",
    "static_backend": "roost-plain",
    "vllm": "roost-vllm",
    "sglang": "roost-sglang",
}
"""OpenTelemetry service names of parts that are not called by their own"""


def set_up_logging_of(settings: Configuration) -> None:
    """Set up this process's logging. Raises OSError if the access log cannot be opened."""
    up = settings.part(UpConfig)
    set_up_logging(up.log_level, up.log_format, up.access_log)


def run_part(name: str, settings: Configuration, environment: Mapping[str, str], *arguments: Any) -> int:
    """Run `serve` of the module `deploy.parts.<name>` until it ends or is stopped. Returns the exit
    status."""
    service = SERVICES.get(name, f"roost-{name}")
    part = importlib.import_module(f"deploy.parts.{name}")
    try:
        set_up_logging_of(settings)
    except OSError as error:
        print_error(f"access_log {settings.part(UpConfig).access_log}: {error.strerror}")
        return FINAL
    try:
        with tracing(service, settings.part(TracingConfig), environment):
            return run(part.serve(*arguments), expected=part.EXPECTED, final=getattr(part, "FINAL", ()))
    except TracingError as error:
        print_error(str(error))
        return FINAL
