"""Subjects of other systems on a NATS server: received as bytes, without the bus's stores and envelopes."""

import asyncio
from collections import deque
from contextlib import AsyncExitStack

from nats.aio.msg import Msg

from bus.config import BusConfig
from bus.nats.link import Link

_WAITING = 100_000


class ForeignSubjects:
    """Subscription to subjects of another system: created by `open`. Messages beyond a limit are dropped, and
    counted in `dropped`.
    """

    def __init__(self, link: Link) -> None:
        self.dropped = 0
        self._link = link
        self._stack = AsyncExitStack()
        self._waiting: deque[bytes] = deque()
        self._arrived = asyncio.Event()

    @classmethod
    async def open(cls, url: str, *subjects: str, seconds: float = 5.0) -> "ForeignSubjects":
        """Connect and subscribe. BusError if there is no connection in time.

        subjects: may contain wildcards; messages of one subject stay in order.
        """
        link = Link(BusConfig(url=url, connect_seconds=seconds), "roost")
        await link.open()
        found = cls(link)
        for subject in subjects:
            await link.listen(found._stack, subject, found._receive)
        await link.flush()
        return found

    async def _receive(self, message: Msg) -> None:
        if len(self._waiting) < _WAITING:
            self._waiting.append(message.data)
            self._arrived.set()
        else:
            self.dropped += 1

    async def receive(self) -> bytes:
        """Return the next message."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    async def close(self) -> None:
        """End the subscription and the connection."""
        await self._stack.aclose()
        await self._link.close()
