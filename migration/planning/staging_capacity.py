"""Which changes a handover takes: as many as every rank has staging room for, what gains most per copy first. Pure.

The changes of a layer keep their order, and a handover takes a beginning of what is left of it; so a change finds what it was planned on, and no
two of them can be in each other's way. A layer rests only where every expert has the live replicas that it must keep.
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
    """Changes that no series of handovers can make; names the change. `layer`: in which it is."""

    def __init__(self, layer: int, detail: str) -> None:
        super().__init__(f"plan: layer {layer}: {detail}")
        self.layer = layer


@dataclass(frozen=True, slots=True, eq=False)
class StagingRoom:
    """What copies need. ValueError names what is out of range."""

    node: NDArray[np.intp]
    """[ranks], numbers from 0"""
    expert_bytes: int
    """of one expert of one layer, scales included"""
    staging: int | None = None
    """experts that a rank can take in one handover; None: as many as a rank has slots in a layer (one spare layer block)"""

    def __post_init__(self) -> None:
        if self.staging is not None and self.staging < 1:
            raise ValueError(f"plan: staging must be at least 1 expert per rank, not {self.staging}")
        if self.expert_bytes < 0:
            raise ValueError(f"plan: expert_bytes must not be negative, not {self.expert_bytes}")


class _Group(NamedTuple):
    """Changes of one layer that are made together, as between them an expert has fewer replicas than it must keep. Mostly a single one."""

    changes: list[int]
    receives: list[int]
    """ranks, one for each copy"""
    copied: set[int]
    """slots"""
    written: set[int]
    saved: set[int]
    """experts that had no live holder before"""


@dataclass(slots=True, eq=False)
class _Series:
    """What is left of one layer's changes."""

    groups: list[_Group]
    worth: list[float]
    """best mean gain per copy of any run that begins with this group"""
    at: int = 0


class PendingChanges:
    """The changes that are yet to be made."""

    def __init__(self, placement: Placement, changes: PlacementChanges, room: StagingRoom, limits: Constraints) -> None:
        self._ranks = placement.ranks
        self._staging = room.staging or placement.slots_per_rank
        self._series = {layer: _Series(groups, _worth(groups, changes.gain)) for layer, groups in _groups(placement, changes, limits)}
        for layer, series in self._series.items():
            for group in series.groups:
                if not _fits(group, [self._staging] * self._ranks):
                    told = f"{len(group.changes)} changes belong together, and bring a rank more than the {self._staging} experts it can stage"
                    raise Unorderable(layer, told)

    @property
    def waiting(self) -> bool:
        return any(series.at < len(series.groups) for series in self._series.values())

    def complete(self) -> NDArray[np.intp]:
        """Layers whose changes are all taken."""
        return np.array([layer for layer, series in self._series.items() if series.at == len(series.groups)], np.intp)

    def round(self) -> list[int]:
        """The changes of the next handover, in order."""
        left = [self._staging] * self._ranks
        copied: dict[int, set[int]] = {layer: set() for layer in self._series}
        heads = [(-series.worth[series.at], layer) for layer, series in self._series.items() if series.at < len(series.groups)]
        heapify(heads)
        taken: list[int] = []
        while heads:
            _, layer = heappop(heads)
            series = self._series[layer]
            group = series.groups[series.at]
            if group.written & copied[layer] or not _fits(group, left):
                continue  # the layer waits for the next handover
            for rank in group.receives:
                left[rank] -= 1
            copied[layer] |= group.copied
            taken += group.changes
            series.at += 1
            if series.at < len(series.groups):
                heappush(heads, (-series.worth[series.at], layer))
        return taken


def _fits(group: _Group, left: list[int]) -> bool:
    if len(group.receives) == 1:
        return left[group.receives[0]] > 0
    return all(left[rank] >= group.receives.count(rank) for rank in group.receives)


def _worth(groups: list[_Group], gain: NDArray[np.float64]) -> list[float]:
    """Of each group of a series: a small step before a large one is not put off. What copies nothing comes first, and what nobody else holds."""
    runs: list[tuple[float, int, int]] = []
    for group in groups:
        one = inf if group.saved else sum(float(gain[at]) for at in group.changes)
        cost, count = len(group.receives), 1
        while runs and one * runs[-1][1] >= runs[-1][0] * cost:
            before = runs.pop()
            one, cost, count = one + before[0], cost + before[1], count + before[2]
        runs.append((one, cost, count))
    return [total / cost if cost else inf for total, cost, count in runs for _ in range(count)]


def _groups(placement: Placement, changes: PlacementChanges, limits: Constraints) -> Iterator[tuple[int, list[_Group]]]:
    """(layer, its changes in groups). Unorderable where a change is not legal, or the end is not."""
    table, per, experts = placement.expert_of_slot, placement.slots_per_rank, placement.experts
    live = np.ones(placement.ranks, bool) if limits.live is None else limits.live
    layer, slot = np.nonzero((table != EMPTY) & live.repeat(per))
    held = np.bincount(layer * experts + table[layer, slot], minlength=len(table) * experts).reshape(len(table), experts)
    floor = np.minimum(held, 1 if limits.least_replicas is None else limits.least_replicas)
    rows = list(zip(*(part.tolist() for part in changes[:6]), strict=True))
    for one in np.unique(changes.layer).tolist():
        walk = _Walk(one, table[one].tolist(), held[one].tolist(), floor[one].tolist(), live.tolist(), per)
        yield one, walk.groups([(at, rows[at]) for at in np.flatnonzero(changes.layer == one).tolist()])


_Change = tuple[int, int, int, int, int, int]
"""kind, layer, slot, expert, other slot, other expert"""


@dataclass(slots=True, eq=False)
class _Walk:
    """Goes through the changes of a layer, as they would be made one after another, and says where the layer may rest."""

    layer: int
    row: list[int]
    """expert of each slot, as the changes so far leave it"""
    held: list[int]
    """live replicas of each expert, likewise"""
    floor: list[int]
    """and as many must there be wherever the layer rests"""
    live: list[bool]
    per: int

    def groups(self, changes: list[tuple[int, _Change]]) -> list[_Group]:
        """changes: (number, change)"""
        short: set[int] = set()
        found: list[_Group] = []
        together = _Group([], [], set(), set(), set())
        for number, change in changes:
            for expert in self._make(number, change, together):
                (short.add if self.held[expert] < self.floor[expert] else short.discard)(expert)
                if self.held[expert] == 0 < self.floor[expert]:
                    raise self._no(f"change {number} takes the last live replica of expert {self._named(expert)}")
            if not short:
                found.append(together)
                together = _Group([], [], set(), set(), set())
        if short:
            expert = min(short)
            raise self._no(f"its changes leave expert {self._named(expert)} with {self.held[expert]} live replicas; it must keep {self.floor[expert]}")
        return found

    def _make(self, number: int, change: _Change, group: _Group) -> list[int]:
        """Write a change into the row; returns the experts that lost a replica, or got one."""
        _, _, slot, expert, other_slot, other_expert = change
        self._expect(number, change)
        writes = ((slot, expert),) if other_slot == NOWHERE else ((slot, expert), (other_slot, other_expert))
        touched = [one for at, new in writes for one in (self.row[at], new) if one != EMPTY]
        group.saved.update(new for _, new in writes if new != EMPTY and not self.held[new])
        for at, _ in writes:
            if self.row[at] != EMPTY and self.live[at // self.per]:
                self.held[self.row[at]] -= 1
            self.row[at] = EMPTY
            group.written.add(at)
        for at, new in writes:
            if new != EMPTY:
                self._put(number, at, new)
                group.receives.append(at // self.per)
                group.copied.add(at)
        group.changes.append(number)
        return touched

    def _put(self, number: int, slot: int, expert: int) -> None:
        rank = slot // self.per
        if expert in self.row[rank * self.per : (rank + 1) * self.per]:
            raise self._no(f"change {number} brings expert {self._named(expert)} to rank {rank}, which holds it")
        if not self.live[rank]:
            raise self._no(f"change {number} brings expert {self._named(expert)} to rank {rank}, which is not live")
        self.row[slot] = expert
        self.held[expert] += 1

    def _expect(self, number: int, change: _Change) -> None:
        """A change finds in its slots what it was planned on."""
        kind, _, slot, expert, other_slot, other_expert = change
        found = self.row[slot]
        if kind in (ChangeKind.SWAP, ChangeKind.MOVE) and self.row[other_slot] != expert:
            raise self._no(f"change {number} takes expert {self._named(expert)} from slot {other_slot}, which holds {self.row[other_slot]}")
        if kind == ChangeKind.SWAP and found != other_expert:
            raise self._no(f"change {number} takes expert {self._named(other_expert)} from slot {slot}, which holds {found}")
        if kind == ChangeKind.DROP and found == EMPTY:
            raise self._no(f"change {number} drops what slot {slot} holds, which is empty")
        if found == expert:
            raise self._no(f"change {number} brings expert {self._named(expert)} to slot {slot}, which holds it")

    def _named(self, expert: int) -> str:
        return str(ExpertId(self.layer, expert))

    def _no(self, detail: str) -> Unorderable:
        return Unorderable(self.layer, detail)
