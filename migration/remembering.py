"""Keeps what the migration service must not forget (`migration.steering`) under its key. Only who leads writes it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from bus import Bus, BusError, ClaimLost
from migration.steering import LoopMemory

logger = logging.getLogger(__name__)


class Remembering:
    """Used on one event loop, while leading. standing: waits until nobody else can lead."""

    def __init__(self, bus: Bus, key: str, standing: Callable[[], Awaitable[None]]) -> None:
        self.memory = LoopMemory()
        """as it holds; what could not be written yet included"""
        self._bus = bus
        self._key = key
        self._standing = standing
        self._revision: int | None = None
        self._written: LoopMemory | None = self.memory
        """what stands under the key; None: nobody knows"""
        self._writing = asyncio.Lock()

    async def read(self) -> None:
        """What a predecessor left. BusError when it cannot be read; what stands there and is no memory is replaced at the next write."""
        claim = await self._bus.read_claim(self._key)
        if claim is None:
            return
        self._revision = claim.revision
        try:
            self.memory = self._written = msgspec.json.decode(claim.value, type=LoopMemory)
        except msgspec.DecodeError as error:
            logger.warning("what is stored of the loop cannot be read, and begins anew, not paused: %s", error)

    async def steer(self, paused: bool, reason: str, at: float) -> None:
        """Pause, or go on: it holds once it is durable. BusError: it does not."""
        before = self.memory
        self.memory = before.steered(paused, reason, at)
        try:
            async with self._writing:
                await self._write()
        except BusError:
            self.memory = msgspec.structs.replace(self.memory, paused=before.paused, paused_reason=before.paused_reason, paused_at=before.paused_at)
            raise

    async def keep(self, memory: LoopMemory | None = None) -> None:
        """This holds from now on (None: what holds); it is written now, or, where the bus is away, the next time."""
        self.memory = self.memory if memory is None else memory
        if self.memory is self._written:
            return
        try:
            async with self._writing:
                await self._write()
        except BusError as error:
            logger.warning("what is to be remembered of the loop is not stored yet: %s", error)

    async def check(self) -> None:
        """See that it is still there: a server may have lost its store. What is not is written at the next `keep`."""
        try:
            claim = await self._bus.read_claim(self._key)
        except BusError as error:
            logger.debug("what is to be remembered of the loop cannot be read: %s", error)
            return
        if self._revision is not None and (claim is None or claim.revision != self._revision) and not self._writing.locked():
            logger.warning("what was stored of the loop is gone or was changed by somebody else; it is written again")
            self._written = None

    async def _write(self) -> None:
        """BusError when it is not known to be stored."""
        await self._standing()
        memory, self._written = self.memory, None
        value = msgspec.json.encode(memory)
        try:
            self._revision = await self._bus.claim(self._key, value, self._revision)
        except ClaimLost:  # an answer that was lost, a server that lost its store, or somebody who led before us and was slow
            now = await self._bus.read_claim(self._key)
            self._revision = await self._bus.claim(self._key, value, None if now is None else now.revision)
        self._written = memory
