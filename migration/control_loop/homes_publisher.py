"""Publisher of the home ranks of each engine's requests.

It publishes the homes valid now and, while a plan is under way, those valid from the last epoch of the plan.
"""

import logging
import time

import msgspec

from bus import BusError
from fleet.facts.placements import HomesPublished
from migration.control_loop.context import LoopContext
from migration.engine_state.placement_registry import EngineEntry
from migration.loop_state.engine_loop import EngineLoopState
from migration.model.engine_view import PlannedHomes

logger = logging.getLogger(__name__)


class HomesPublisher:
    """Used on one event loop, on the leader."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._version = time.time_ns() // 1000  # above the versions of previous leaders
        self._published: dict[int, HomesPublished] = {}
        self._publisher = context.bus.publisher(context.subjects.homes)

    def keep_only(self, worker_ids: set[int]) -> None:
        """Forget engines that are not present."""
        for worker_id in self._published.keys() - worker_ids:
            del self._published[worker_id]

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
        if (homes := self._published.get(loop.worker_id)) is not None:
            await self._publish(homes)

    async def _publish_changed(self, entry: EngineEntry, homes: PlannedHomes) -> None:
        """Publish the homes of an engine. Unchanged homes keep their version; others get a version above all
        previous ones."""
        before = self._published.get(entry.worker_id)
        message = HomesPublished(
            engine=entry.engine,
            worker_id=entry.worker_id,
            model=self._context.demand.model(entry.worker_id),
            version=self._version if before is None else before.version,
            epoch=homes.epoch,
            clusters=homes.clusters,
            count=0 if homes.share is None else len(homes.share),
            ranks=entry.targets,
            homes=b"" if homes.share is None else homes.share.astype("<f4").tobytes(),
            reason=homes.note,
        )
        if before is None or msgspec.structs.replace(before, reason=message.reason) != message:
            message = msgspec.structs.replace(message, version=self._version)
            self._version += 1
            self._context.metrics.homes.inc()
        self._published[entry.worker_id] = message
        await self._publish(message)

    async def _publish(self, homes: HomesPublished) -> None:
        try:
            await self._publisher.publish(homes)
        except BusError as error:
            logger.warning("the homes of engine %s cannot be published: %s", homes.engine, error)
