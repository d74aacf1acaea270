"""Values that the parts of one router share."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bus.protocol.subjects import Subjects
from router.scheduling.scheduler import Scheduler
from router.telemetry.metrics import RouterMetrics


@dataclass(frozen=True, slots=True)
class RouterContext:
    """Shared parts of one router. clock: seconds, monotonic."""

    subjects: Subjects
    scheduler: Scheduler
    metrics: RouterMetrics
    threads: ThreadPoolExecutor
    clock: Callable[[], float]
