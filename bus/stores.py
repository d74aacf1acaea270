"""Stores that were found full: counted, and told to the log."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

STORES = ("log", "claims", "blobs", "parcels", "answers")
"""What is kept for a bus: the durable log, the claims, blobs, contents of passing messages, and (in memory) answers that are fetched in parts."""
AGAIN_SECONDS = 60.0
"""The log repeats an alarm about one store after this time."""


class FullStores(Mapping[str, int]):
    """How often something found no room since the start, by store. Every store is present from the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, float] = {}
        self._clock = clock

    def note(self, store: str, error: Exception) -> None:
        """Count it, and log an error now and then."""
        self._counts[store] += 1
        now = self._clock()
        if now - self._logged.get(store, float("-inf")) >= AGAIN_SECONDS:
            self._logged[store] = now
            logger.error("ALARM: the store for %s is full, %d times so far: %s", store, self._counts[store], error)

    def __getitem__(self, store: str) -> int:
        if store not in STORES:
            raise KeyError(store)
        return self._counts[store]

    def __iter__(self) -> Iterator[str]:
        return iter(STORES)

    def __len__(self) -> int:
        return len(STORES)

    def __repr__(self) -> str:
        return f"<FullStores {dict(self)}>"
