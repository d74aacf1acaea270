"""Counts and logs of writes rejected by full stores."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

STORES = ("log", "claims", "blobs", "parcels", "answers")
"""Stores of a bus: durable log, claims, blobs, contents of passing messages, and (in memory) answers fetched
in parts.
"""
AGAIN_SECONDS = 60.0
"""Interval between repeated alarms about one store in the log."""


class StoreRefusals(Mapping[str, int]):
    """Number of writes rejected for lack of room since the start, by store. Every store is present from the
    start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}
        self._clock = clock

    def count(self, store: str, error: Exception) -> None:
        """Count a rejected write, and log an error at most once per interval."""
        self._counts[store] += 1
        now = self._clock()
        if now - self._logged.get(store, float("-inf")) >= AGAIN_SECONDS:
            self._logged[store] = now
            logger.error(
                "ALARM: the store for %s is full, %d times so far: %s", store, self._counts[store], error
            )

    def __getitem__(self, store: str) -> int:
        if store not in STORES:
            raise KeyError(store)
        return self._counts[store]

    def __iter__(self) -> Iterator[str]:
        return iter(STORES)

    def __len__(self) -> int:
        return len(STORES)

    def __repr__(self) -> str:
        return f"<StoreRefusals {dict(self)}>"
