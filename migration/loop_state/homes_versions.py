"""Version and content of the homes published last for each engine. Pure; one entry per present engine."""

import msgspec

from fleet.facts.placements import HomesPublished
from migration.engine_state.placement_registry import EngineEntry
from migration.model.engine_view import PlannedHomes


class HomesVersions:
    """Homes that differ from the last published ones get a version above all previous versions."""

    def __init__(self, first_version: int) -> None:
        self._version = first_version
        self._published: dict[int, HomesPublished] = {}
        self.changes = 0

    def next(self, entry: EngineEntry, model: str, homes: PlannedHomes) -> HomesPublished:
        """Return the message to publish for an engine now. Unchanged homes keep their version."""
        message = HomesPublished(
            engine=entry.engine,
            worker_id=entry.worker_id,
            model=model,
            version=0,
            epoch=homes.epoch,
            clusters=homes.clusters,
            count=0 if homes.share is None else len(homes.share),
            ranks=entry.placement.ranks,
            homes=b"" if homes.share is None else homes.share.astype("<f4").tobytes(),
            reason=homes.note,
        )
        before = self._published.get(entry.worker_id)
        if (
            before is not None
            and msgspec.structs.replace(before, version=0, reason=message.reason) == message
        ):
            version = before.version
        else:
            version, self._version, self.changes = self._version, self._version + 1, self.changes + 1
        self._published[entry.worker_id] = msgspec.structs.replace(message, version=version)
        return self._published[entry.worker_id]

    def last(self, worker_id: int) -> HomesPublished | None:
        """Return the message published last for an engine; None: none."""
        return self._published.get(worker_id)

    def keep_only(self, worker_ids: set[int]) -> None:
        """Forget engines that are not present."""
        for worker_id in self._published.keys() - worker_ids:
            del self._published[worker_id]
