"""Series that the parts of a fleet expose."""

from migration.telemetry.metrics import MigrationMetrics
from router.telemetry.metrics import RouterMetrics
from tracker.metrics import TrackerMetrics


def series() -> set[str]:
    """Names of all series that a fleet exposes."""
    found = {"up"}
    for part in (RouterMetrics(), MigrationMetrics(), TrackerMetrics()):
        for line in part.exposition().decode().splitlines():
            if line.startswith("# TYPE"):
                _, _, name, kind = line.split()
                ends = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
                found |= {f"{name}{end}" for end in ends.get(kind, ("",))}
    return found
