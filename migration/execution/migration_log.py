"""Durable state of plans and handovers: the log, the key of each engine's open handover, and the stored
plans.

Log entries are written exactly once in effect. If the result of a write is unknown, the store is read before
the write is repeated.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from bus import BlobLost, Bus, BusError, Claim, ClaimLost, StoreFull
from bus.protocol.subjects import Subjects
from fleet.facts.placements import PlacementCommitted
from migration.engine_state.placement_registry import PlacementRegistry
from migration.handover.coordinator import OpenHandover
from migration.model.plan import Plan
from migration.model.plan_log import PlanEntry, PlanLog

logger = logging.getLogger(__name__)

MAX_PLAN_BYTES = 16 * 1024 * 1024
"""limit on the JSON of a stored plan"""

Recorded = PlanEntry | PlacementCommitted


class Superseded(Exception):
    """Error: another service changed the durable state of an engine's handover. Read it again."""


class Withdrawn(ValueError):
    """Error: the plan was withdrawn before it was started."""


class StoredHandover(NamedTuple):
    """Handover stored under an engine's key, and the revision of that key."""

    open: OpenHandover | None
    """None: nothing is stored yet, or it cannot be read"""
    revision: int | None


class MigrationLog:
    """The only reader of the log of plans in this process. Used on one event loop.

    Every entry, of this service or another, is applied to `plans` exactly once; then the observers are called
    in order.

    committed: called with every recorded placement. retry: seconds between attempts. until_leading: waits
    until no other service can be the leader, so that a replaced service does not resume work after an
    outage. clock: monotonic seconds; wall: Unix seconds.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        placements: PlacementRegistry,
        committed: Callable[[PlacementCommitted], None],
        retry: float,
        until_leading: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.plans = PlanLog()
        self.observers: list[Callable[[PlanEntry], None]] = []
        """called with every entry that is new"""
        self._bus = bus
        self._subjects = subjects
        self._placements = placements
        self._committed = committed
        self._retry = retry
        self._until_leading = until_leading
        self._clock = clock
        self._wall = wall

    # Log entries

    async def read(self, engine: str = "*", *, follow: bool = False) -> None:
        """Read the log of plans; follow: then wait for new entries. Raises BusError if it cannot be read."""
        async for received in self._bus.replay(self._subjects.migrations(engine), follow=follow):
            if isinstance(received.message, PlanEntry):
                self._apply(received.message, received.published_at)

    async def write(self, entry: Recorded) -> None:
        """Write an entry, and apply it. Raises BusError if it is not known to be stored."""
        placement = isinstance(entry, PlacementCommitted)
        subject = (self._subjects.placements if placement else self._subjects.migrations)(entry.engine)
        await self._bus.record(subject, entry)
        if isinstance(entry, PlacementCommitted):
            self._committed(entry)
        else:
            self._apply(entry, self._wall())

    def _apply(self, entry: PlanEntry, published_at: float) -> None:
        # a publisher whose clock is ahead of ours must not set times in the future
        wall = self._wall()
        at = min(published_at, wall)
        if self.plans.apply(entry, self._clock() - (wall - at), at):
            for observer in self.observers:
                try:
                    observer(entry)
                except Exception:  # the entry is stored: neither its writer nor the other observers failed
                    logger.exception("an observer failed on a %s", type(entry).__name__)

    async def record(self, entry: Recorded, still: Callable[[], bool] | None = None) -> None:
        """Write an entry, unless it exists, and retry until it is stored.

        still: called right before each attempt. Raises Withdrawn once it returns False.
        """
        while True:
            await self._until_leading()
            # Only now: another service may have led meanwhile, and a placement behind a later one would be
            # taken for what the engine serves.
            if self._has(entry):
                return None
            if still is not None and not still():
                raise Withdrawn(
                    "it was withdrawn at the last moment (roost migration pause, or planner.automatic)"
                )
            try:
                return await self.write(entry)
            except BusError as error:
                logger.warning(
                    "a %s of engine %s is not recorded yet: %s", type(entry).__name__, entry.engine, error
                )
                await self._find_out(entry)

    def _has(self, entry: Recorded) -> bool:
        if not isinstance(entry, PlacementCommitted):
            return self.plans.has(entry)
        known = self._placements.entry(entry.worker_id)
        return known is not None and known.epoch >= entry.placement.epoch

    async def _find_out(self, entry: Recorded) -> None:
        """Read the log, once the bus is available again."""
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

    # Open handovers

    async def look(self, engine: str) -> StoredHandover:
        """Return the durable state of an engine's handover. Raises BusError if it cannot be read."""
        claim = await self._bus.read_claim(self._subjects.handover_key(engine))
        if claim is None:
            return StoredHandover(None, None)
        try:
            return StoredHandover(msgspec.json.decode(claim.value, type=OpenHandover), claim.revision)
        except msgspec.DecodeError as error:
            logger.warning(
                "the stored handover of engine %s cannot be decoded, and is replaced: %s", engine, error
            )
            return StoredHandover(None, claim.revision)

    async def keep(self, engine: str, state: OpenHandover, revision: int | None) -> int:
        """Replace a revision of the durable state and return the new revision. Waits for the bus.

        Raises Superseded if the stored revision is another one.
        """
        key, value = self._subjects.handover_key(engine), msgspec.json.encode(state)
        while True:
            await self._until_leading()
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
                raise Superseded(
                    f"the handover of engine {engine!r} was changed by another service at revision"
                    f" {now.revision}"
                )

    async def _claim_of(self, key: str, *, at_once: bool) -> Claim | None:
        while True:
            if not at_once:
                await asyncio.sleep(self._retry)
            try:
                return await self._bus.read_claim(key)
            except BusError as error:
                at_once = False
                logger.warning("%s cannot be read: %s", key, error)

    # Stored plans

    async def store(self, plan: Plan) -> str:
        """Store a plan and return its digest; empty: there is no space, and a successor cannot resume the
        plan.

        Equal plans of different engines are stored as separate blobs. Deleting one then does not delete the
        other. Raises BusError if the bus fails.
        """
        content = await asyncio.to_thread(
            msgspec.json.encode, {"copy": secrets.token_hex(8), **msgspec.structs.asdict(plan)}
        )
        if len(content) > MAX_PLAN_BYTES:
            logger.warning(
                "plan %s is not stored, because it has %d bytes of JSON: no other migration service can"
                " resume it",
                plan.id,
                len(content),
            )
            return ""
        try:
            return await self._bus.put_blob(content)
        except StoreFull as error:
            logger.warning(
                "plan %s is not stored: no other migration service can resume it: %s", plan.id, error
            )
            return ""

    async def plan(self, digest: str) -> Plan:
        """Return a stored plan. Raises BlobLost if it is missing or invalid, and BusError if the bus
        fails."""
        try:
            return await asyncio.to_thread(msgspec.json.decode, await self._bus.get_blob(digest), type=Plan)
        except msgspec.DecodeError as error:
            raise BlobLost(f"blob {digest} is no plan: {error}") from error

    async def forget(self, digest: str) -> None:
        """Delete a stored plan that was not started. On a bus error it stays stored."""
        try:
            if digest:
                await self._bus.drop_blob(digest)
        except BusError as error:
            logger.warning("a plan that was not started is still stored: %s", error)

    async def clear(self, engine: str) -> None:
        """Delete an engine's finished plans, which are not read any more (a rollback is computed from
        placements).

        On a bus error this is retried when the next plan ends.
        """
        try:
            for run in self.plans.engines[engine].finished:
                await self._bus.drop_blob(run.planned.blob)
                run.stored = False
        except BusError as error:
            logger.warning("finished plans of engine %s are still stored: %s", engine, error)
