"""Store of the control loop's persistent state (`migration.loop_state.persistent_state`). Only the leader
writes it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from bus import Bus, BusError, ClaimLost
from migration.loop_state.persistent_state import EngineMemory, LoopMemory, decoded

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Attempts of one write while others change the key in between."""


class StateStore:
    """Used on one event loop, on the leader.

    until_leading: waits until no other service can be the leader.
    """

    def __init__(self, bus: Bus, key: str, until_leading: Callable[[], Awaitable[None]]) -> None:
        self.memory = LoopMemory()
        """current state, including changes not written yet"""
        self._bus = bus
        self._key = key
        self._until_leading = until_leading
        self._revision: int | None = None
        self._written: LoopMemory | None = self.memory
        """stored value; None: unknown"""
        self._base = self.memory
        """last known stored value; the changes since then are the difference from it"""
        self._unanswered: set[bytes] = set()
        """own values sent since then that may have been stored"""
        self._writing = asyncio.Lock()

    async def read(self) -> None:
        """Read the state left by a predecessor. Invalid data is replaced at the next write.

        Raises BusError if it cannot be read.
        """
        claim = await self._bus.read_claim(self._key)
        if claim is None:
            return
        self._revision = claim.revision
        if (found := _decoded(claim.value)) is not None:
            self.memory = self._written = self._base = found

    async def pause(self, paused: bool, reason: str, at: float) -> None:
        """Pause or resume. Takes effect once it is durable. Raises BusError if it could not be stored."""
        before = self.memory
        self.memory = before.with_pause(paused, reason, at)
        try:
            async with self._writing:
                await self._write()
        except BusError:
            self.memory = self.memory.with_pause_of(before)
            raise

    def change(self, engine: str, memory: EngineMemory) -> None:
        """Replace the state of one engine; `keep` writes it."""
        self.memory = self.memory.with_engine(engine, memory)

    async def keep(self) -> None:
        """Write changes now or, if the bus is unavailable, at the next call."""
        if self.memory is self._written:
            return
        try:
            async with self._writing:
                await self._write()
        except BusError as error:
            logger.warning("the state of the control loop is not stored yet: %s", error)

    async def check(self) -> None:
        """Check that the state is still stored, because a server may have lost its store. If not, the next
        `keep` writes it."""
        try:
            claim = await self._bus.read_claim(self._key)
        except BusError as error:
            logger.debug("the state of the control loop cannot be read: %s", error)
            return
        if (
            self._revision is not None
            and (claim is None or claim.revision != self._revision)
            and not self._writing.locked()
        ):
            logger.warning(
                "the stored state of the control loop is gone or was changed by another service; it is"
                " written again"
            )
            self._written = None

    async def _write(self) -> None:
        """Write the state. Raises BusError if it is not known to be stored.

        While another service is the leader, this waits until it is cancelled with the other tasks of the
        leader.
        """
        for _ in range(ATTEMPTS):
            await self._until_leading()
            memory, self._written = self.memory, None
            value = msgspec.json.encode(memory)
            mine = {*self._unanswered}
            self._unanswered.add(value)
            try:
                self._revision = await self._bus.claim(self._key, value, self._revision)
            except ClaimLost:
                # a lost answer, a server that lost its store, or another leader, earlier or later
                await self._until_leading()  # a later leader: its writes must not be touched
                await self._take_over(mine)
            else:
                self._written = self._base = memory
                self._unanswered.clear()
                return
        raise ClaimLost(f"{self._key!r} was changed {ATTEMPTS} times while it was being written")

    async def _take_over(self, mine: set[bytes]) -> None:
        """Read the stored state and merge changes by others since it was last known. mine: values written by
        this service."""
        claim = await self._bus.read_claim(self._key)
        self._revision = None if claim is None else claim.revision
        found = None if claim is None or claim.value in mine else _decoded(claim.value)
        if found is not None:
            logger.warning(
                "the stored state of the control loop was changed by another leader; its changes are kept"
            )
            self.memory = self.memory.with_changes(self._base, found)
            self._base = found
        self._unanswered.clear()


def _decoded(value: bytes) -> LoopMemory | None:
    """Decode a state. Returns None, with a log line, for invalid data; parts that are dropped are logged."""
    try:
        restored = decoded(value)
    except ValueError as error:
        logger.warning(
            "the stored state of the control loop cannot be decoded; starting with an empty state, not"
            " paused: %s",
            error,
        )
        return None
    for what in restored.dropped:
        logger.warning("a part of the stored state of the control loop is invalid and is dropped: %s", what)
    return restored.memory
