"""Publisher of the home ranks of each engine's requests.

It publishes the homes valid now and, while a plan is under way, those valid from the last epoch of the plan.
"""

import logging
import time

from bus import BusError
from fleet.facts.placements import HomesPublished
from migration.control_loop.context import LoopContext
from migration.engine_state.placement_registry import EngineEntry
from migration.loop_state.engine_loop import EngineLoopState
from migration.loop_state.homes_versions import HomesVersions
from migration.model.engine_view import PlannedHomes

logger = logging.getLogger(__name__)


class HomesPublisher:
    """Used on one event loop, on the leader."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._versions = HomesVersions(time.time_ns() // 1000)  # versions above those of previous leaders
        self._publisher = context.bus.publisher(context.subjects.homes)

    def keep_only(self, worker_ids: set[int]) -> None:
        """Forget engines that are not present."""
        self._versions.keep_only(worker_ids)

    async def now(self, loop: EngineLoopState, entry: EngineEntry, homes: PlannedHomes) -> None:
        """Publish the homes valid for the served placement."""
        loop.homes = homes
        self._context.demand.homes_published(loop.worker_id, homes)
        await self._publish_changed(entry, homes)

    async def after(
        self, loop: EngineLoopState, entry: EngineEntry, homes: PlannedHomes | None, epoch: int
    ) -> None:
        """Publish the homes valid from the last epoch of the plan just accepted. None: the plan has no homes
        of its own."""
        if homes is not None:
            loop.homes_after = homes._replace(epoch=epoch)
            await self._publish_changed(entry, loop.homes_after)

    async def settle(self, loop: EngineLoopState) -> None:
        """Update the homes when a plan has ended.

        After a completed plan its homes become the current ones. After an aborted plan the previous homes are
        published again, under a new version.
        """
        entry, after = self._context.placements.entry(loop.worker_id), loop.homes_after
        if after is None or entry is None or self._context.under_way(loop.engine):
            return
        loop.homes_after = None
        if entry.epoch >= after.epoch:
            loop.homes = after
            self._context.demand.homes_published(loop.worker_id, after)
        else:
            before = (
                after._replace(share=None, clusters=0, note="the plan that they were for was aborted")
                if loop.homes is None
                else loop.homes
            )
            await self.now(loop, entry, before._replace(epoch=entry.epoch))

    async def again(self, loop: EngineLoopState) -> None:
        """Publish the last homes again, for subscribers that missed them."""
        if (homes := self._versions.last(loop.worker_id)) is not None:
            await self._publish(homes)

    async def _publish_changed(self, entry: EngineEntry, homes: PlannedHomes) -> None:
        message = self._versions.next(entry, self._context.demand.model(entry.worker_id), homes)
        self._context.metrics.homes.inc(self._versions.changes)
        self._versions.changes = 0
        await self._publish(message)

    async def _publish(self, homes: HomesPublished) -> None:
        try:
            await self._publisher.publish(homes)
        except BusError as error:
            logger.warning("the homes of engine %s cannot be published: %s", homes.engine, error)
