"""Which placement each engine serves, at which epoch. Pure.

The first epoch of a life is the engine's own (it says it in EngineJoined) and is recorded here; every later epoch is ours. An *incarnation* is
one life of an engine, named by its worker_id: a restarted engine begins, under a new one, with the last epoch that was decided for the one before,
or, where that does not fit it, at epoch 0.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from fleet.events import EngineJoined, PlacementCommitted
from fleet.layout import Layout
from fleet.placement import Placement, PlacementRecord


class PlacementFault(StrEnum):
    """Why something that was said was refused."""

    PLACEMENT = "placement"
    """it breaks an invariant, or its bytes do not fit"""
    SHAPE = "shape"
    """it does not fit the model, or the placement before"""
    LAYOUT = "layout"
    CONTRADICTION = "contradiction"
    """another placement than the one known under this epoch, or another engine or model than the one that joined"""
    UNKNOWN = "unknown"
    """it is about an engine that is not there"""
    STALE = "stale"
    """something newer is known"""
    DEMAND = "demand"
    """a demand that cannot be, or that is missing"""
    CLUSTERS = "clusters"
    """clusters that cannot be, or are of another shape"""
    CAPACITY = "capacity"
    """more than may be kept"""


class InvalidPlacementEvent(ValueError):
    """What an engine or the log says cannot be."""

    def __init__(self, fault: PlacementFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """The newest placement known of one incarnation."""

    engine: str
    worker_id: int
    layout: Layout
    placement: Placement

    @property
    def epoch(self) -> int:
        return self.placement.epoch


class PlacementRegistry:
    """Entries by incarnation; bounded, those that are gone for longest are forgotten first."""

    def __init__(self, most_incarnations: int = 1024) -> None:
        self._most = most_incarnations
        self._entries: OrderedDict[int, EngineEntry] = OrderedDict()
        self._present: dict[str, int] = {}
        """worker_id of each engine that has joined and not left, by name"""

    def entry(self, worker_id: int) -> EngineEntry | None:
        """What an incarnation serves; None: nothing was recorded for it."""
        return self._entries.get(worker_id)

    def engine_of(self, worker_id: int) -> str | None:
        """The engine of an incarnation that is known."""
        entry = self._entries.get(worker_id)
        return entry.engine if entry is not None else next((engine for engine, present in self._present.items() if present == worker_id), None)

    def present(self, engine: str) -> bool:
        """Whether an engine of this name has joined and not left."""
        return engine in self._present

    def newest(self) -> dict[str, EngineEntry]:
        """The entry that was made last of each engine, by name, whether it is present or not."""
        return {entry.engine: entry for entry in self._entries.values()}

    def engines(self) -> dict[str, EngineEntry]:
        """What the engines that are present serve, by name; without those that say nothing of experts."""
        return {engine: self._entries[worker_id] for engine, worker_id in self._present.items() if worker_id in self._entries}

    def joined(self, joined: EngineJoined) -> PlacementCommitted | None:
        """An engine is there: returns the first epoch that must be recorded for it, or None when there is nothing (more) to record.

        Hearing the same join again changes nothing, and asks for the same record until `committed` has seen it. Refused when its
        placement cannot be; the engine then counts as present without one.
        """
        self._present[joined.engine] = joined.worker_id
        while len(self._present) > self._most:
            del self._present[next(iter(self._present))]
        if joined.placement is None:
            return None
        layout, placement = _checked_join(joined, joined.placement)
        known = self._entries.get(joined.worker_id)
        if known is not None:
            _agree(known, placement)
            return None
        return PlacementCommitted(engine=joined.engine, worker_id=joined.worker_id, layout=layout, placement=joined.placement)

    def left(self, worker_id: int) -> None:
        """An incarnation is gone; its entry stays readable for a while."""
        for engine, present in list(self._present.items()):
            if present == worker_id:
                del self._present[engine]

    def committed(self, committed: PlacementCommitted) -> bool:
        """What the log says: whether it is news. Older epochs and repetitions are none. Refused when it contradicts what is known."""
        try:
            placement = Placement.from_record(committed.placement)
        except ValueError as error:
            raise InvalidPlacementEvent(PlacementFault.PLACEMENT, f"engine {committed.engine!r}: {error}") from error
        known = self._entries.get(committed.worker_id)
        if known is not None:
            _agree(known, placement)
            if placement.epoch <= known.epoch:
                return False
        self._entries[committed.worker_id] = EngineEntry(committed.engine, committed.worker_id, committed.layout, placement)
        self._entries.move_to_end(committed.worker_id)
        self._forget()
        return True

    def _forget(self) -> None:
        present = set(self._present.values())
        for worker_id in [worker_id for worker_id in self._entries if worker_id not in present]:
            if len(self._entries) <= self._most:
                return
            del self._entries[worker_id]


def _checked_join(joined: EngineJoined, record: PlacementRecord) -> tuple[Layout, Placement]:
    """Layout and placement of a join; Refused when they contradict each other, the model or the number of ranks."""
    name = f"engine {joined.engine!r}"
    if joined.shape is None or joined.layout is None:
        raise InvalidPlacementEvent(
            PlacementFault.SHAPE, f"{name} states a placement but no {'shape' if joined.shape is None else 'layout'}; its agent must state both"
        )
    try:
        joined.layout.check(joined.shape)
    except ValueError as error:
        raise InvalidPlacementEvent(PlacementFault.LAYOUT, f"{name}: {error}") from error
    try:
        placement = Placement.from_record(record)
    except ValueError as error:
        raise InvalidPlacementEvent(PlacementFault.PLACEMENT, f"{name}: {error}") from error
    wanted = (joined.shape.layers, joined.shape.experts, len(joined.urls) if joined.layout.targets_are_ranks else placement.ranks)
    stated = (placement.layers, placement.experts, placement.ranks)
    if stated != wanted:
        raise InvalidPlacementEvent(PlacementFault.SHAPE, f"{name}: placement of (layers, experts, ranks) {stated}; its model and URLs have {wanted}")
    return joined.layout, placement


def _agree(known: EngineEntry, placement: Placement) -> None:
    """Placements of one incarnation have one shape, and one epoch is one placement."""
    before = known.placement
    if (before.layers, before.experts, before.ranks) != (placement.layers, placement.experts, placement.ranks):
        raise InvalidPlacementEvent(
            PlacementFault.SHAPE, f"worker {known.worker_id} of engine {known.engine!r} serves {before}; it cannot go over to {placement}"
        )
    if before.epoch == placement.epoch and before != placement:
        raise InvalidPlacementEvent(
            PlacementFault.CONTRADICTION, f"worker {known.worker_id} of engine {known.engine!r} serves another placement at epoch {placement.epoch}"
        )
