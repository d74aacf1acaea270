"""Values that the parts of one router share."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from bus.protocol.subjects import Subjects
from router.fleet_state.target_table import RankKey, TargetTable
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


class OtherRuntime(Protocol):
    """A runtime other than HTTP, over which a router reaches some of its targets."""

    def without_http(self, table: TargetTable) -> Mapping[RankKey, str]:
        """Return the targets of a table that HTTP does not reach, with the reason."""
        ...

    def headers(self, target: RankKey) -> Mapping[str, str]:
        """Return the headers that name a target to this runtime's own frontend; empty: it is not there."""
        ...
