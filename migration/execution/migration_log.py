"""What is durable of plans and handovers: the log, written once in effect; the key of each engine's open handover; the plans themselves.

Nothing is known of a write whose answer was lost, so what is stored is read before it is repeated.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from bus import BlobLost, Bus, BusError, Claim, ClaimLost, StoreFull
from bus.protocol.subjects import Subjects
from fleet.events import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged, PlacementCommitted
from migration.engine_state.placement_registry import PlacementRegistry
from migration.handover.coordinator import OpenHandover
from migration.model.plan import Plan
from migration.model.plan_log import PlanLog

logger = logging.getLogger(__name__)

MOST_PLAN_BYTES = 16 * 1024 * 1024
"""JSON of the largest plan that is kept"""

Recorded = MigrationPlanned | MigrationStaged | PlacementCommitted | MigrationCommitted | MigrationAborted


class Superseded(Exception):
    """Somebody else has changed what is durable of an engine's handover; look again."""


class Withdrawn(ValueError):
    """What was to be begun is not wanted any more."""


class OpenPlans(NamedTuple):
    """What stands under an engine's key."""

    open: OpenHandover | None
    """None: nothing yet, or nothing that can be read"""
    revision: int | None


class MigrationLog:
    """Used on one event loop. committed: told of every placement that was recorded. retry: seconds between attempts. standing: waits until nobody else
    can lead, so that what was interrupted by an outage is not gone on with by somebody who was replaced meanwhile."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        ledger: PlacementRegistry,
        committed: Callable[[PlacementCommitted], None],
        retry: float,
        standing: Callable[[], Awaitable[None]],
    ) -> None:
        self.chronicle = PlanLog()
        self._bus = bus
        self._subjects = subjects
        self._ledger = ledger
        self._committed = committed
        self._retry = retry
        self._standing = standing

    # The log

    async def read(self, engine: str = "*") -> None:
        """Read what is stored of plans. BusError when it cannot be read."""
        async for received in self._bus.replay(self._subjects.migrations(engine), follow=False):
            if isinstance(received.message, MigrationPlanned | MigrationStaged | MigrationCommitted | MigrationAborted):
                self.chronicle.heard(received.message)

    async def record(self, entry: Recorded, still: Callable[[], bool] | None = None) -> None:
        """Write an entry, unless it is there; until it is. still: asked right before each attempt; Withdrawn once it is false."""
        subject = (self._subjects.placements if isinstance(entry, PlacementCommitted) else self._subjects.migrations)(entry.engine)
        while not self._has(entry):
            await self._standing()
            if still is not None and not still():
                raise Withdrawn("it was called off at the last moment (roost migration pause, or planner.automatic)")
            try:
                await self._bus.record(subject, entry)
            except BusError as error:
                logger.warning("a %s of engine %s is not recorded yet: %s", type(entry).__name__, entry.engine, error)
                await self._find_out(entry)
            else:
                return self._heard(entry)
        return None

    def _has(self, entry: Recorded) -> bool:
        if not isinstance(entry, PlacementCommitted):
            return self.chronicle.has(entry)
        known = self._ledger.entry(entry.worker_id)
        return known is not None and known.epoch >= entry.placement.epoch

    def _heard(self, entry: Recorded) -> None:
        if isinstance(entry, PlacementCommitted):
            self._committed(entry)
        else:
            self.chronicle.heard(entry)

    async def _find_out(self, entry: Recorded) -> None:
        """Read what is stored, once the bus can be read again."""
        while True:
            await asyncio.sleep(self._retry)
            try:
                if not isinstance(entry, PlacementCommitted):
                    return await self.read(entry.engine)
                async for received in self._bus.replay(self._subjects.placements(entry.engine), follow=False):
                    if isinstance(received.message, PlacementCommitted):
                        self._committed(received.message)
            except BusError as error:
                logger.warning("the log of engine %s cannot be read: %s", entry.engine, error)
            else:
                return None

    # The key

    async def look(self, engine: str) -> OpenPlans:
        """What is durable of an engine's handover. BusError when it cannot be read."""
        claim = await self._bus.read_claim(self._subjects.handover_key(engine))
        if claim is None:
            return OpenPlans(None, None)
        try:
            return OpenPlans(msgspec.json.decode(claim.value, type=OpenHandover), claim.revision)
        except msgspec.DecodeError as error:
            logger.warning("what is stored of the handover of engine %s cannot be read, and is written anew: %s", engine, error)
            return OpenPlans(None, claim.revision)

    async def keep(self, engine: str, state: OpenHandover, revision: int | None) -> int:
        """Make a state durable in the place of a revision; the new one. Superseded when that is not there any more. Waits for the bus."""
        key, value = self._subjects.handover_key(engine), msgspec.json.encode(state)
        while True:
            await self._standing()
            try:
                return await self._bus.claim(key, value, revision)
            except BusError as error:
                lost = isinstance(error, ClaimLost)
                if not lost:
                    logger.warning("the handover of engine %s is not stored yet: %s", engine, error)
            now = await self._claim_of(key, at_once=lost)
            if now is not None and now.value == value:
                return now.revision
            if now is None:
                revision = None  # the server has lost its store
            elif now.revision != revision:
                raise Superseded(f"the handover of engine {engine!r} was changed by somebody else at revision {now.revision}")

    async def _claim_of(self, key: str, *, at_once: bool) -> Claim | None:
        while True:
            if not at_once:
                await asyncio.sleep(self._retry)
            try:
                return await self._bus.read_claim(key)
            except BusError as error:
                at_once = False
                logger.warning("%s cannot be read: %s", key, error)

    # Plans

    async def store(self, plan: Plan) -> str:
        """The digest under which a plan is kept; empty: there is no room for it, and a successor cannot go on with it. BusError when the bus fails.

        Equal plans of engines that are alike are two blobs, so that the first that is over does not drop that of the other.
        """
        content = await asyncio.to_thread(msgspec.json.encode, {"copy": secrets.token_hex(8), **msgspec.structs.asdict(plan)})
        if len(content) > MOST_PLAN_BYTES:
            logger.warning("plan %s is not kept, with %d bytes of JSON: no other migration service can go on with it", plan.id, len(content))
            return ""
        try:
            return await self._bus.put_blob(content)
        except StoreFull as error:
            logger.warning("plan %s is not kept: no other migration service can go on with it: %s", plan.id, error)
            return ""

    async def plan(self, digest: str) -> Plan:
        """A plan that was stored. BlobLost when it is not there (any more), or is none; BusError when the bus fails."""
        try:
            return await asyncio.to_thread(msgspec.json.decode, await self._bus.get_blob(digest), type=Plan)
        except msgspec.DecodeError as error:
            raise BlobLost(f"blob {digest} is no plan: {error}") from error

    async def forget(self, digest: str) -> None:
        """Give the room of a plan back that was stored, and is needed no more. What cannot be reached is left there."""
        try:
            if digest:
                await self._bus.drop_blob(digest)
        except BusError as error:
            logger.warning("a plan that is not carried out is still stored: %s", error)

    async def clear(self, engine: str) -> None:
        """Give the room of an engine's plans back that are over: nobody reads them any more (a rollback is made of placements). What cannot be reached
        is tried again when the next one is over."""
        try:
            for plan, digest in self.chronicle.over(engine).items():
                await self._bus.drop_blob(digest)
                self.chronicle.dropped(engine, plan)
        except BusError as error:
            logger.warning("plans of engine %s that are over are still stored: %s", engine, error)
