"""Choose the changes of each handover: as many as every rank's staging room allows, most gain per copy first.
Pure.

The changes of a layer keep their order, and a handover takes a prefix of the layer's remaining changes. So
every change finds the state that it was planned on, and no two changes conflict. A layer pauses only where
every expert has the required number of live replicas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId
from fleet.placement import EMPTY, Placement
from migration.model.constraints import Constraints
from migration.model.placement_changes import NOWHERE, ChangeKind, PlacementChanges


class Unorderable(ValueError):
    """Changes that no series of handovers can make; names the change. `layer`: the layer of that change."""

    def __init__(self, layer: int, detail: str) -> None:
        super().__init__(f"plan: layer {layer}: {detail}")
        self.layer = layer


@dataclass(frozen=True, slots=True, eq=False)
class StagingRoom:
    """Requirements of copies. ValueError names the value out of range."""

    node: NDArray[np.intp]
    """[ranks], numbers from 0."""
    expert_bytes: int
    """Of one expert of one layer, scales included."""
    staging: int | None = None
    """Experts that a rank can receive in one handover; None: the rank's slots in one layer (one spare layer
    block)."""

    def __post_init__(self) -> None:
        if self.staging is not None and self.staging < 1:
            raise ValueError(f"plan: staging must be at least 1 expert per rank, not {self.staging}")
        if self.expert_bytes < 0:
            raise ValueError(f"plan: expert_bytes must not be negative, not {self.expert_bytes}")


class _Group(NamedTuple):
    """Changes of one layer that are made together, mostly a single one.

    Between them an expert has fewer replicas than required.
    """

    changes: tuple[int, ...]
    receives: tuple[int, ...]
    """Ranks, one for each copy."""
    copied: tuple[int, ...]
    """Slots."""
    written: tuple[int, ...]
    """Slots."""
    saves: bool
    """True if some expert had no live holder before."""


def _together(groups: list[_Group]) -> _Group:
    changes, receives, copied, written, saves = zip(*groups, strict=True)
    return _Group(sum(changes, ()), sum(receives, ()), sum(copied, ()), sum(written, ()), any(saves))


@dataclass(slots=True, eq=False)
class _Series:
    """The remaining changes of one layer."""

    groups: list[_Group]
    worth: list[float]
    """Best mean gain per copy of any prefix that begins with this group."""
    at: int = 0


class PendingChanges:
    """The changes that are not yet part of a handover."""

    def __init__(
        self, placement: Placement, changes: PlacementChanges, room: StagingRoom, limits: Constraints
    ) -> None:
        self._ranks = placement.ranks
        self._staging = room.staging or placement.slots_per_rank
        gain: list[float] = changes.gain.tolist()
        self._series = {
            layer: _Series(groups, _worth(groups, gain))
            for layer, groups in _groups(placement, changes, limits)
        }
        all_room = [self._staging] * self._ranks
        for layer, series in self._series.items():
            for group in series.groups:
                if not _fits(group, all_room):
                    detail = (
                        f"{len(group.changes)} changes belong together, and bring a rank more than the"
                        f" {self._staging} experts it can stage"
                    )
                    raise Unorderable(layer, detail)

    @property
    def waiting(self) -> bool:
        return any(series.at < len(series.groups) for series in self._series.values())

    def complete(self) -> NDArray[np.intp]:
        """Layers whose changes are all taken."""
        return np.array(
            [layer for layer, series in self._series.items() if series.at == len(series.groups)], np.intp
        )

    def round(self) -> list[int]:
        """Return the changes of the next handover, in order."""
        left = [self._staging] * self._ranks
        copied: dict[int, set[int]] = {layer: set() for layer in self._series}
        # List scheduling: a heap over layers, by gain per copy of the next group.
        heads = [
            (-series.worth[series.at], layer)
            for layer, series in self._series.items()
            if series.at < len(series.groups)
        ]
        heapify(heads)
        taken: list[int] = []
        while heads:
            _, layer = heappop(heads)
            series = self._series[layer]
            group = series.groups[series.at]
            if not copied[layer].isdisjoint(group.written) or not _fits(group, left):
                # No room, or a source slot was written in this handover: the layer waits for the next one.
                continue
            for rank in group.receives:
                left[rank] -= 1
            copied[layer].update(group.copied)
            taken += group.changes
            series.at += 1
            if series.at < len(series.groups):
                heappush(heads, (-series.worth[series.at], layer))
        return taken


def _fits(group: _Group, left: list[int]) -> bool:
    if len(group.receives) == 1:
        return left[group.receives[0]] > 0
    return all(left[rank] >= group.receives.count(rank) for rank in group.receives)


def _worth(groups: list[_Group], gain: list[float]) -> list[float]:
    """Priority of each group of a series: its gain per copy, raised to that of the best prefix it begins.

    So a small step does not delay a large one behind it. Groups without copies come first, and those that
    save an expert without a live holder.
    """
    runs: list[tuple[float, int, int]] = []
    for group in groups:
        one = inf if group.saves else sum([gain[at] for at in group.changes])
        cost, count = len(group.receives), 1
        # Merge backwards while the later run gains more per copy: the concave hull of gain over copies (pool
        # adjacent violators).
        while runs and one * runs[-1][1] >= runs[-1][0] * cost:
            before = runs.pop()
            one, cost, count = one + before[0], cost + before[1], count + before[2]
        runs.append((one, cost, count))
    return [total / cost if cost else inf for total, cost, count in runs for _ in range(count)]


def _groups(
    placement: Placement, changes: PlacementChanges, limits: Constraints
) -> Iterator[tuple[int, list[_Group]]]:
    """Yield (layer, its changes in groups). Unorderable where a change or the end is not legal."""
    table, per, experts = placement.expert_of_slot, placement.slots_per_rank, placement.experts
    live = np.ones(placement.ranks, bool) if limits.live is None else limits.live
    layer, slot = np.nonzero((table != EMPTY) & live.repeat(per))
    held = np.bincount(layer * experts + table[layer, slot], minlength=len(table) * experts).reshape(
        len(table), experts
    )
    floor = np.minimum(held, 1 if limits.min_replicas is None else limits.min_replicas)
    rows = list(zip(*(part.tolist() for part in changes[:6]), strict=True))
    for one in np.unique(changes.layer).tolist():
        walk = _Walk(one, table[one].tolist(), held[one].tolist(), floor[one].tolist(), live.tolist(), per)
        yield one, walk.groups([(at, rows[at]) for at in np.flatnonzero(changes.layer == one).tolist()])


_Change = tuple[int, int, int, int, int, int]
"""(kind, layer, slot, expert, other slot, other expert)."""


@dataclass(slots=True, eq=False)
class _Walk:
    """Replay of a layer's changes, one after another, which finds the states in which the layer may pause."""

    layer: int
    row: list[int]
    """Expert of each slot after the changes so far."""
    held: list[int]
    """Live replicas of each expert after the changes so far."""
    floor: list[int]
    """Required replicas of each expert wherever the layer pauses."""
    live: list[bool]
    per: int

    def groups(self, changes: list[tuple[int, _Change]]) -> list[_Group]:
        """Split changes [(number, change)] into groups."""
        short: set[int] = set()
        found: list[_Group] = []
        begun: list[_Group] = []
        for number, change in changes:
            made, touched = self._make(number, change)
            begun.append(made)
            for expert in touched:
                (short.add if self.held[expert] < self.floor[expert] else short.discard)(expert)
                if self.held[expert] == 0 < self.floor[expert]:
                    raise self._no(
                        f"change {number} takes the last live replica of expert {self._named(expert)}"
                    )
            if not short:
                found.append(made if len(begun) == 1 else _together(begun))
                begun = []
        if short:
            expert = min(short)
            raise self._no(
                f"its changes leave expert {self._named(expert)} with {self.held[expert]} live replicas; it"
                f" must keep {self.floor[expert]}"
            )
        return found

    def _make(self, number: int, change: _Change) -> tuple[_Group, list[int]]:
        """Write a change into the row; return it, and the experts that lost or gained a replica."""
        _, _, slot, expert, other_slot, other_expert = change
        self._expect(number, change)
        writes = ((slot, expert),) if other_slot == NOWHERE else ((slot, expert), (other_slot, other_expert))
        touched = [one for at, new in writes for one in (self.row[at], new) if one != EMPTY]
        saves = any(new != EMPTY and not self.held[new] for _, new in writes)
        for at, _ in writes:
            if self.row[at] != EMPTY and self.live[at // self.per]:
                self.held[self.row[at]] -= 1
            self.row[at] = EMPTY
        copied = tuple([at for at, new in writes if new != EMPTY])
        for at, new in writes:
            if new != EMPTY:
                self._put(number, at, new)
        receives = tuple([at // self.per for at in copied])
        return _Group((number,), receives, copied, tuple([at for at, _ in writes]), saves), touched

    def _put(self, number: int, slot: int, expert: int) -> None:
        rank = slot // self.per
        if expert in self.row[rank * self.per : (rank + 1) * self.per]:
            raise self._no(
                f"change {number} brings expert {self._named(expert)} to rank {rank}, which holds it"
            )
        if not self.live[rank]:
            raise self._no(
                f"change {number} brings expert {self._named(expert)} to rank {rank}, which is not live"
            )
        self.row[slot] = expert
        self.held[expert] += 1

    def _expect(self, number: int, change: _Change) -> None:
        """Raise Unorderable unless the slots hold what the change was planned on."""
        kind, _, slot, expert, other_slot, other_expert = change
        found = self.row[slot]
        if kind in (ChangeKind.SWAP, ChangeKind.MOVE) and self.row[other_slot] != expert:
            raise self._no(
                f"change {number} takes expert {self._named(expert)} from slot {other_slot}, which holds"
                f" {self.row[other_slot]}"
            )
        if kind == ChangeKind.SWAP and found != other_expert:
            raise self._no(
                f"change {number} takes expert {self._named(other_expert)} from slot {slot}, which holds"
                f" {found}"
            )
        if kind == ChangeKind.DROP and found == EMPTY:
            raise self._no(f"change {number} drops what slot {slot} holds, which is empty")
        if found == expert:
            raise self._no(
                f"change {number} brings expert {self._named(expert)} to slot {slot}, which holds it"
            )

    def _named(self, expert: int) -> str:
        return str(ExpertId(self.layer, expert))

    def _no(self, detail: str) -> Unorderable:
        return Unorderable(self.layer, detail)
