"""The migration service in its first form: keeps the durable record of which placement each engine serves."""

import asyncio
import logging
import time
from collections.abc import Callable

from bus import Bus, BusError, Received
from bus.subjects import Subjects
from fleet.events import EngineJoined, EngineLeft, PlacementCommitted
from migration.config import MigrationConfig
from migration.ledger import Ledger, Refused
from migration.metrics import MigrationMetrics

logger = logging.getLogger(__name__)


class MigrationService:
    """Runs until cancelled. `ready` is set once the log is read and epoch 0 of every engine present is recorded.

    One such service per namespace: it records each incarnation's epoch 0 exactly once, also across its own restarts, because it
    reads the log before it writes and again whenever it does not know whether a write arrived.
    """

    def __init__(self, bus: Bus, subjects: Subjects, config: MigrationConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.ready = asyncio.Event()
        self.metrics = MigrationMetrics()
        self.ledger = Ledger(config.most_incarnations)
        self._bus = bus
        self._subjects = subjects
        self._config = config
        self._clock = clock

    async def run(self) -> None:
        """Read, then follow. BusError when the bus cannot be reached at the start."""
        await self._read_back(self._subjects.placements())
        async for received in self._bus.replay(self._subjects.membership(), latest=True, follow=False):
            await self._member(received)
        self.ready.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_members(), name="records the placement of engines that join")
            tasks.create_task(self._follow_placements(), name="follows which placements are recorded")

    async def _follow_members(self) -> None:
        async for received in self._bus.replay(self._subjects.membership(), latest=True):
            await self._member(received)

    async def _follow_placements(self) -> None:
        async for received in self._bus.replay(self._subjects.placements(), latest=True):
            self._placement(received)

    async def _read_back(self, subject: str) -> None:
        async for received in self._bus.replay(subject, follow=False):
            self._placement(received)

    def _placement(self, received: Received) -> None:
        try:
            if isinstance(received.message, PlacementCommitted):
                self.ledger.committed(received.message)
            else:
                self._refuse(received, "kind", "is no PlacementCommitted")
        except Refused as refusal:
            self._refuse(received, refusal.fault.value, str(refusal))
        self.metrics.serving(self.ledger.engines())

    async def _member(self, received: Received) -> None:
        match received.message:
            case EngineJoined() | EngineLeft() as said if received.subject != self._subject_of(said.engine):
                self._refuse(received, "engine", f"speaks of engine {said.engine!r}")
            case EngineJoined() as joined:
                try:
                    missing = self.ledger.joined(joined)
                except Refused as refusal:
                    self._refuse(received, refusal.fault.value, str(refusal))
                else:
                    if missing is not None:
                        await self._record(missing)
            case EngineLeft() as left:
                self.ledger.left(left.worker_id)
            case _:
                self._refuse(received, "kind", "is neither EngineJoined nor EngineLeft")
        self.metrics.serving(self.ledger.engines())

    def _subject_of(self, engine: str) -> str | None:
        """Where an engine of this name is spoken of; None: no engine can have this name."""
        try:
            return self._subjects.membership(engine)
        except ValueError:
            return None

    async def _record(self, committed: PlacementCommitted) -> None:
        """Write an epoch to the log, once. A write whose answer is lost may have arrived: the log is read before it is repeated."""
        subject, began = self._subjects.placements(committed.engine), self._clock()
        while self.ledger.entry(committed.worker_id) is None:
            try:
                await self._bus.record(subject, committed)
                self.ledger.committed(committed)
            except BusError as error:
                self.metrics.retries.inc()
                logger.warning("epoch %d of engine %s is not recorded yet: %s", committed.placement.epoch, committed.engine, error)
                await self._find_out(subject)
            else:
                self.metrics.recorded.inc()
                self.metrics.recording.observe(self._clock() - began)
                logger.info("recorded epoch %d of engine %s (worker %d)", committed.placement.epoch, committed.engine, committed.worker_id)

    async def _find_out(self, subject: str) -> None:
        """Read what is stored, once the bus can be read again."""
        while True:
            await asyncio.sleep(self._config.retry_seconds)
            try:
                return await self._read_back(subject)
            except BusError as error:
                logger.warning("%s cannot be read: %s", subject, error)

    def _refuse(self, received: Received, reason: str, detail: str) -> None:
        self.metrics.rejected(reason)
        logger.warning("refused a %s on %s: %s", type(received.message).__name__, received.subject, detail)
