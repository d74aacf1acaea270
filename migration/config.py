"""Settings of the migration service; read once at the composition root."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """ValueError names the field that is out of range."""

    retry_seconds: float = 1.0
    """pause before recording is tried again when the bus could not do it"""
    most_incarnations: int = 1024
    """incarnations of engines whose placement is remembered; those longest gone are forgotten first"""
    metrics_address: str | None = None
    """HOST:PORT of GET /metrics and /health; None: no HTTP"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "metrics_address" and not 0 < value < float("inf"):
                raise ValueError(f"planner.{field.name} must be finite and above 0, not {value}")
