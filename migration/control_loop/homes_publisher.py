"""Publisher of the home ranks of each engine's requests.

It publishes the homes valid now and, while a plan is under way, those valid from the last epoch of the plan.
"""

import logging
import time
from collections.abc import Callable

from bus import Bus, BusError
from bus.protocol.subjects import Subjects
from fleet.facts.placements import HomesPublished
from migration.engine_state.demand_windows import DemandWindows
from migration.engine_state.placement_registry import EngineEntry, PlacementRegistry
from migration.loop_state.engine_loop import EngineLoopState
from migration.loop_state.homes_versions import HomesVersions
from migration.model.engine_view import PlannedHomes
from migration.telemetry.metrics import MigrationMetrics

logger = logging.getLogger(__name__)


class HomesPublisher:
    """Used on one event loop, on the leader. under_way: returns True if an engine has an unfinished plan."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        ledger: PlacementRegistry,
        watch: DemandWindows,
        metrics: MigrationMetrics,
        under_way: Callable[[str], bool],
    ) -> None:
        self._ledger = ledger
        self._watch = watch
        self._metrics = metrics
        self._under_way = under_way
        self._versions = HomesVersions(time.time_ns() // 1000)  # versions above those of previous leaders
        self._publisher = bus.publisher(subjects.homes)

    def keep_only(self, worker_ids: set[int]) -> None:
        """Forget engines that are not present."""
        self._versions.keep_only(worker_ids)

    async def now(self, pilot: EngineLoopState, entry: EngineEntry, homes: PlannedHomes) -> None:
        """Publish the homes valid for the served placement."""
        pilot.homes = homes
        self._watch.housed(pilot.worker_id, homes)
        await self._publish_changed(entry, homes)

    async def after(
        self, pilot: EngineLoopState, entry: EngineEntry, homes: PlannedHomes | None, epoch: int
    ) -> None:
        """Publish the homes valid from the last epoch of the plan just accepted. None: the plan has no homes
        of its own."""
        if homes is not None:
            pilot.homes_after = homes._replace(epoch=epoch)
            await self._publish_changed(entry, pilot.homes_after)

    async def settle(self, pilot: EngineLoopState) -> None:
        """Update the homes when a plan has ended.

        After a completed plan its homes become the current ones. After an aborted plan the previous homes are
        published again, under a new version.
        """
        entry, after = self._ledger.entry(pilot.worker_id), pilot.homes_after
        if after is None or entry is None or self._under_way(pilot.engine):
            return
        pilot.homes_after = None
        if entry.epoch >= after.epoch:
            pilot.homes = after
            self._watch.housed(pilot.worker_id, after)
        else:
            before = (
                after._replace(share=None, clusters=0, note="the plan that they were for was aborted")
                if pilot.homes is None
                else pilot.homes
            )
            await self.now(pilot, entry, before._replace(epoch=entry.epoch))

    async def again(self, pilot: EngineLoopState) -> None:
        """Publish the last homes again, for subscribers that missed them."""
        if (homes := self._versions.last(pilot.worker_id)) is not None:
            await self._publish(homes)

    async def _publish_changed(self, entry: EngineEntry, homes: PlannedHomes) -> None:
        message = self._versions.said(entry, self._watch.model(entry.worker_id), homes)
        self._metrics.homes.inc(self._versions.changes)
        self._versions.changes = 0
        await self._publish(message)

    async def _publish(self, homes: HomesPublished) -> None:
        try:
            await self._publisher.publish(homes)
        except BusError as error:
            logger.warning("the homes of engine %s cannot be published: %s", homes.engine, error)
