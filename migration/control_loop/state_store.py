"""Keeps what the migration service must not forget (`migration.loop_state.persistent_state`) under its key. Only who leads writes it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from bus import Bus, BusError, ClaimLost
from migration.loop_state.persistent_state import LoopMemory

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Times that one write is tried while others change the key in between."""


class StateStore:
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
        self._base = self.memory
        """what stood under the key when it was last known: what differs from it was changed since"""
        self._unanswered: set[bytes] = set()
        """values of our own that were sent since, and may have been stored"""
        self._writing = asyncio.Lock()

    async def read(self) -> None:
        """What a predecessor left. BusError when it cannot be read; what stands there and is no memory is replaced at the next write."""
        claim = await self._bus.read_claim(self._key)
        if claim is None:
            return
        self._revision = claim.revision
        if (found := _decoded(claim.value)) is not None:
            self.memory = self._written = self._base = found

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
        """BusError when it is not known to be stored. While somebody else leads, it waits, and is cancelled with everything that leading does."""
        for _ in range(ATTEMPTS):
            await self._standing()
            memory, self._written = self.memory, None
            value = msgspec.json.encode(memory)
            mine = {*self._unanswered}
            self._unanswered.add(value)
            try:
                self._revision = await self._bus.claim(self._key, value, self._revision)
            except ClaimLost:  # an answer that was lost, a server that lost its store, or another leader, before us or after us
                await self._standing()  # after us: what it wrote must not be touched
                await self._take_over(mine)
            else:
                self._written = self._base = memory
                self._unanswered.clear()
                return
        raise ClaimLost(f"{self._key!r} was changed {ATTEMPTS} times while it was being written")

    async def _take_over(self, mine: set[bytes]) -> None:
        """See what stands under the key, and keep what somebody else changed there since it was last known. mine: values that are our own."""
        claim = await self._bus.read_claim(self._key)
        self._revision = None if claim is None else claim.revision
        found = None if claim is None or claim.value in mine else _decoded(claim.value)
        if found is not None:
            logger.warning("what is stored of the loop was changed by another leader; its changes are kept")
            self.memory = self.memory.with_changes(self._base, found)
            self._base = found
        self._unanswered.clear()


def _decoded(value: bytes) -> LoopMemory | None:
    """None, and a line in the log, for what cannot be read."""
    try:
        return msgspec.json.decode(value, type=LoopMemory)
    except msgspec.DecodeError as error:
        logger.warning("what is stored of the loop cannot be read, and begins anew, not paused: %s", error)
        return None
