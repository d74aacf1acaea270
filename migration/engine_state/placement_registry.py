"""Registry of the placement and epoch that each engine serves. Pure.

The engine determines its first epoch and announces it in EngineJoined; the migration service records it here.
Every later epoch comes from the migration service. An *incarnation* is one run of an engine, identified by
its worker_id. A restarted engine gets a new worker_id. It starts with the last epoch decided for its previous
incarnation, or at epoch 0 if that placement does not fit.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum

from fleet.facts.engines import EngineJoined
from fleet.facts.placements import PlacementCommitted
from fleet.layout import AttentionLayout, Layout
from fleet.placement import Placement, PlacementRecord
from fleet.sharding import turned


class PlacementFault(StrEnum):
    """Reason for rejecting an event or a request."""

    PLACEMENT = "placement"
    """the placement violates an invariant, or its bytes do not fit"""
    SHAPE = "shape"
    """it does not fit the model or the previous placement"""
    LAYOUT = "layout"
    CONTRADICTION = "contradiction"
    """different placement under a known epoch, or different engine or model than the one that joined"""
    UNKNOWN = "unknown"
    """the engine is not present"""
    STALE = "stale"
    """newer data is known"""
    DEMAND = "demand"
    """the demand is invalid or missing"""
    CLUSTERS = "clusters"
    """the clusters are invalid or have another shape"""
    CAPACITY = "capacity"
    """the storage limit is exceeded"""


class InvalidPlacementEvent(ValueError):
    """Error: invalid event from an engine or from the log."""

    def __init__(self, fault: PlacementFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Newest known placement of one incarnation."""

    engine: str
    worker_id: int
    placement: Placement
    joined: EngineJoined | None = None
    """None: not read yet; the log may be ahead"""

    @property
    def epoch(self) -> int:
        return self.placement.epoch

    @property
    def layout(self) -> Layout:
        """Layout of the epoch."""
        return self.placement.layout

    @property
    def targets(self) -> int:
        """Targets of requests: as many as ranks, or fewer where several ranks are one target."""
        if not self.layout.targets_are_ranks:
            return 1
        return self.placement.ranks if self.joined is None else len(self.joined.urls)

    @property
    def rearranges(self) -> bool:
        """True if the engine moves its experts itself."""
        return self.joined is not None and self.joined.rearranges


class PlacementRegistry:
    """Entries by incarnation. Bounded: the incarnations that have been gone longest are forgotten first."""

    def __init__(self, max_incarnations: int = 1024) -> None:
        self._max_incarnations = max_incarnations
        self._entries: OrderedDict[int, EngineEntry] = OrderedDict()
        self._present: dict[str, int] = {}
        """worker_id of each present engine, by name"""
        self._joined: dict[int, EngineJoined] = {}
        """by worker_id; of present engines"""

    def entry(self, worker_id: int) -> EngineEntry | None:
        """Return the placement of an incarnation; None: nothing was recorded for it."""
        return self._entries.get(worker_id)

    def engine_of(self, worker_id: int) -> str | None:
        """Return the engine of a known incarnation."""
        entry = self._entries.get(worker_id)
        return (
            entry.engine
            if entry is not None
            else next((engine for engine, present in self._present.items() if present == worker_id), None)
        )

    def present(self, engine: str) -> bool:
        """Return True if an engine of this name has joined and not left."""
        return engine in self._present

    def newest(self) -> dict[str, EngineEntry]:
        """Return the newest entry of each engine, by name, including engines that are not present."""
        return {entry.engine: entry for entry in self._entries.values()}

    def engines(self) -> dict[str, EngineEntry]:
        """Return the entries of the present engines, by name, without engines that announced no experts."""
        return {
            engine: self._entries[worker_id]
            for engine, worker_id in self._present.items()
            if worker_id in self._entries
        }

    def joined(self, joined: EngineJoined) -> PlacementCommitted | None:
        """Add a present engine. Returns the first epoch that must be recorded for it; None: nothing is to be
        recorded.

        A repeated join changes nothing and returns the same record until `committed` has seen it. Raises
        InvalidPlacementEvent if the placement is invalid; the engine then counts as present without a
        placement.
        """
        self._present[joined.engine] = joined.worker_id
        while len(self._present) > self._max_incarnations:
            del self._present[next(iter(self._present))]
        if joined.served is None:
            return None
        placement = _checked_join(joined, joined.served)
        self._joined = {one: self._joined[one] for one in self._present.values() if one in self._joined}
        self._joined[joined.worker_id] = joined
        known = self._entries.get(joined.worker_id)
        if known is not None:
            _agree(known, placement)
            self._entries[joined.worker_id] = replace(known, joined=joined)
            return None
        return PlacementCommitted(
            engine=joined.engine,
            worker_id=joined.worker_id,
            attention=AttentionLayout(kind=placement.attention),
            placement=joined.served,
        )

    def left(self, worker_id: int) -> None:
        """Mark an incarnation as gone; its entry stays readable for some time."""
        for engine, present in list(self._present.items()):
            if present == worker_id:
                del self._present[engine]

    def committed(self, committed: PlacementCommitted) -> bool:
        """Apply a log entry. Returns True if it is new; older epochs and repetitions are not.

        Raises InvalidPlacementEvent if it contradicts a known placement.
        """
        try:
            placement = Placement.from_record(committed.served)
        except ValueError as error:
            raise InvalidPlacementEvent(
                PlacementFault.PLACEMENT, f"engine {committed.engine!r}: {error}"
            ) from error
        known = self._entries.get(committed.worker_id)
        if known is not None:
            _agree(known, placement)
            if placement.epoch <= known.epoch:
                return False
            _check_turn(known, placement)
        self._entries[committed.worker_id] = EngineEntry(
            committed.engine,
            committed.worker_id,
            placement,
            self._joined.get(committed.worker_id),
        )
        self._entries.move_to_end(committed.worker_id)
        self._forget()
        return True

    def _forget(self) -> None:
        present = set(self._present.values())
        for worker_id in [worker_id for worker_id in self._entries if worker_id not in present]:
            if len(self._entries) <= self._max_incarnations:
                return
            del self._entries[worker_id]


def _checked_join(joined: EngineJoined, record: PlacementRecord) -> Placement:
    """Return the validated placement of a join.

    Raises InvalidPlacementEvent if they contradict each other, the model or the number of ranks.
    """
    name = f"engine {joined.engine!r}"
    if joined.shape is None or joined.attention is None:
        raise InvalidPlacementEvent(
            PlacementFault.SHAPE,
            f"{name} states a placement but no {'shape' if joined.shape is None else 'layout'}; its agent"
            " must state both",
        )
    try:
        placement = Placement.from_record(record)
    except ValueError as error:
        raise InvalidPlacementEvent(PlacementFault.PLACEMENT, f"{name}: {error}") from error
    if placement.attention != joined.attention.kind:
        raise InvalidPlacementEvent(
            PlacementFault.LAYOUT,
            f"{name} states {joined.attention.kind} attention, and {placement.attention} in its placement;"
            " its agent must state the same in both",
        )
    layout = placement.layout
    try:
        layout.check(joined.shape, placement.ranks)
    except ValueError as error:
        raise InvalidPlacementEvent(PlacementFault.LAYOUT, f"{name}: {error}") from error
    targets = len(joined.urls)
    # An engine that moves its experts itself may have several ranks behind each target.
    own_ranks = layout.targets_are_ranks and not (joined.rearranges and placement.ranks % targets == 0)
    expected = (joined.shape.layers, joined.shape.experts, targets if own_ranks else placement.ranks)
    stated = (placement.layers, placement.experts, placement.ranks)
    if stated != expected:
        raise InvalidPlacementEvent(
            PlacementFault.SHAPE,
            f"{name}: placement of (layers, experts, ranks) {stated}; its model and URLs have {expected}",
        )
    return placement


def _check_turn(known: EngineEntry, placement: Placement) -> None:
    """Check that the engine turns layers over if the next placement has layers of another form, and changes
    its attention if that is another."""
    layers = turned(known.placement, placement)
    if layers and known.joined is not None and known.joined.unshardable:
        raise InvalidPlacementEvent(
            PlacementFault.LAYOUT,
            f"engine {known.engine!r}: epoch {placement.epoch} changes the form of layers {list(layers)}, but"
            f" {known.joined.unshardable}",
        )
    if (
        placement.attention != known.placement.attention
        and known.joined is not None
        and known.joined.tp_refusal
    ):
        raise InvalidPlacementEvent(
            PlacementFault.LAYOUT,
            f"engine {known.engine!r}: epoch {placement.epoch} changes its attention to"
            f" {placement.attention}, but {known.joined.tp_refusal}",
        )


def _agree(known: EngineEntry, placement: Placement) -> None:
    """Check that all placements of an incarnation have one shape, and that one epoch has one placement."""
    before = known.placement
    if (before.layers, before.experts, before.ranks) != (
        placement.layers,
        placement.experts,
        placement.ranks,
    ):
        raise InvalidPlacementEvent(
            PlacementFault.SHAPE,
            f"worker {known.worker_id} of engine {known.engine!r} serves {before}; it cannot change to"
            f" {placement}",
        )
    if before.epoch == placement.epoch and before != placement:
        raise InvalidPlacementEvent(
            PlacementFault.CONTRADICTION,
            f"worker {known.worker_id} of engine {known.engine!r} serves another placement at epoch"
            f" {placement.epoch}",
        )
