"""Keyed work for background tasks: each key waits at most once, in FIFO order, and the number of keys is
bounded.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class KeyedQueue(Generic[Key]):
    """FIFO queue of distinct keys. Adding a key that already waits changes nothing. `refused` counts keys
    beyond the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._some = asyncio.Event()
        self.refused = 0

    def ask(self, key: Key) -> None:
        if key not in self._waiting and len(self._waiting) >= self._limit:
            self.refused += 1
            return
        self._waiting[key] = None
        self._some.set()

    async def next(self) -> Key:
        """Return the key that waited longest; it may be added again from now on."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._waiting)
