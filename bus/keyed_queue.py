"""Keyed work for background tasks, and requests for what is missing.

Parts keep replicas of what others publish: tables, clusters, KV caches, bookings. A replica listens, keeps
the newest, and requests what it missed. `RetryQueue` sends these requests, and repeats those that failed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class KeyedQueue(Generic[Key]):
    """FIFO queue of at most `limit` distinct keys. Adding a key that already waits changes nothing; further
    keys are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: OrderedDict[Key, None] = OrderedDict()
        self._some = asyncio.Event()

    def ask(self, key: Key) -> None:
        if key in self._waiting or len(self._waiting) < self._limit:
            self._waiting[key] = None
            self._some.set()

    def ask_later(self, key: Key, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, KeyedQueue.ask, self, key)

    async def next(self) -> Key:
        """Return the key that waited longest; it may be added again from now on."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._waiting)


class RetryQueue(KeyedQueue[Key]):
    """Requests by key, repeated with exponential backoff until they succeed.

    request: sends the request of a key; True: nothing of this key is missing now. The pause after a failure
    doubles from `first_seconds` to `longest_seconds`; `ask` starts over with the first.
    """

    def __init__(
        self,
        request: Callable[[Key], Awaitable[bool]],
        limit: int,
        first_seconds: float,
        longest_seconds: float,
    ) -> None:
        super().__init__(limit)
        self._request = request
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._pauses: dict[Key, float] = {}
        """next pause of keys whose last request failed"""

    def ask(self, key: Key) -> None:
        self._pauses.pop(key, None)
        super().ask(key)

    async def run(self) -> None:
        """Send requests, one at a time, until cancelled. Several tasks may do so."""
        while True:
            key = await self.next()
            if await self._request(key):
                self._pauses.pop(key, None)
                continue
            pause = self._pauses.get(key, self._first_seconds)
            self._pauses[key] = min(2 * pause, self._longest_seconds)
            self.ask_later(key, pause)
