"""Units for copies of other ranks' pages, in reserved pages of a page cache."""

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import KvCache


class TargetPool:
    """Units of the pages that one cache reserves. A page is reserved for the first of its units that is
    taken, and is free again when all of them are given back."""

    def __init__(self, cache: KvCache, units: NDArray[np.int32], *, rank: int | None, headroom: int) -> None:
        """units: of each page, [pages, G] on `rank`, or, if rank is None, [pages, P], one on each rank.
        headroom: pages that stay obtainable for requests."""
        self._cache = cache
        self._units = units
        self._rank = rank
        self._headroom = self._required = headroom
        self._spare: dict[int, dict[int, int]] = {}
        """By rank: units that are reserved and not taken, and their pages."""
        self._taken: dict[tuple[int, int], int] = {}
        """Page of each taken unit, by rank and unit."""
        self._taken_of: dict[int, int] = {}
        """Number of taken units of each reserved page."""

    def reserve_less(self, lacking: int) -> None:
        """Leave this many more pages to requests than they can obtain now, or none but the headroom."""
        self._required = max(self._headroom, self._cache.obtainable + lacking if lacking else 0)

    @property
    def short(self) -> bool:
        """True if requests can obtain fewer pages than they are left."""
        return self._cache.obtainable < self._required

    def take(self, rank: int, *, evict: bool) -> int | None:
        """Take a unit of this rank. None if there is no page for it. evict: a kept page may be evicted for
        it."""
        if not self._spare.get(rank) and not self._reserve(evict):
            return None
        unit, page = self._spare[rank].popitem()
        self._taken[rank, unit] = page
        self._taken_of[page] += 1
        return unit

    def give(self, rank: int, unit: int) -> None:
        """Give a unit back."""
        page = self._taken.pop((rank, unit))
        self._spare[rank][unit] = page
        self._taken_of[page] -= 1
        if not self._taken_of[page]:
            del self._taken_of[page]
            for owner, one in self._of_page(page):
                del self._spare[owner][one]
            self._cache.unreserve(page)

    def _reserve(self, evict: bool) -> bool:
        if self._cache.obtainable <= self._required:
            return False
        page = self._cache.reserve(evict=evict)
        if page is None:
            return False
        for rank, unit in self._of_page(page):
            self._spare.setdefault(rank, {})[unit] = page
        self._taken_of[page] = 0
        return True

    def _of_page(self, page: int) -> list[tuple[int, int]]:
        """Return rank and number of the page's units."""
        row = self._units[page].tolist()
        return list(enumerate(row)) if self._rank is None else [(self._rank, unit) for unit in row]
