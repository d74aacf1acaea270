"""Engines that send heartbeats but whose join event has expired from the log. Pure; bounded."""

from collections import OrderedDict
from dataclasses import dataclass

FIRST_SECONDS = 1.0
"""Delay before the first request: a join event that was just stored may still be arriving."""
MAX_SECONDS = 3600.0


@dataclass(slots=True)
class _UnknownEngine:
    next: float
    """earliest time of the next request"""
    pause: float


class UnknownEngines:
    """Schedule of requests to unknown engines to identify themselves.

    The first request follows shortly after the first heartbeat. The interval then doubles up to an hour,
    while heartbeats arrive.
    """

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._engines: OrderedDict[int, _UnknownEngine] = OrderedDict()

    def due(self, worker_id: int, now: float) -> bool:
        """Record a heartbeat. Returns True if the engine must be asked now, and counts it as asked.

        Of more than `limit` engines, the one seen first is forgotten.
        """
        engine = self._engines.get(worker_id)
        if engine is None:
            self._engines[worker_id] = _UnknownEngine(now + FIRST_SECONDS, FIRST_SECONDS)
            if len(self._engines) > self._limit:
                self._engines.popitem(last=False)
            return False
        if now < engine.next:
            return False
        engine.pause = min(2 * engine.pause, MAX_SECONDS)
        engine.next = now + engine.pause
        return True
