"""Which changes a handover takes: as many as every rank has staging room for, what gains most per copy first. Pure.

The changes of a layer keep their order, and a handover takes a beginning of what is left of it; so a change finds what it was planned on, and no
two of them can be in each other's way. A layer rests only where every expert has the live replicas that it must keep.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ExpertId
from fleet.placement import EMPTY, Placement
from migration.changes import NOWHERE, Changes, Kind
from migration.limits import Limits


class Unorderable(ValueError):
    """Changes that no series of handovers can make; names the change. `layer`: in which it is."""

    def __init__(self, layer: int, detail: str) -> None:
        super().__init__(f"plan: layer {layer}: {detail}")
        self.layer = layer


@dataclass(frozen=True, slots=True, eq=False)
class Room:
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


@dataclass(slots=True, eq=False)
class _Series:
    """What is left of one layer's changes."""

    groups: list[_Group]
    worth: list[float]
    """best mean gain per copy of any run that begins with this group"""
    at: int = 0


class Queue:
    """The changes that are yet to be made."""

    def __init__(self, placement: Placement, changes: Changes, room: Room, limits: Limits) -> None:
        self._ranks = placement.ranks
        self._staging = room.staging or placement.slots_per_rank
        checked = _Checked(placement, changes, limits)
        self._series: dict[int, _Series] = {}
        for layer in np.unique(changes.layer).tolist():
            groups = checked.groups(layer, np.flatnonzero(changes.layer == layer).tolist())
            self._fits_ever(layer, groups)
            self._series[layer] = _Series(
                groups, _worth([float(changes.gain[group.changes].sum()) for group in groups], [len(group.receives) for group in groups])
            )

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

    def _fits_ever(self, layer: int, groups: list[_Group]) -> None:
        for group in groups:
            if not _fits(group, [self._staging] * self._ranks):
                raise Unorderable(layer, f"{len(group.changes)} changes belong together, and bring a rank more than the {self._staging} experts it can stage")


def _fits(group: _Group, left: list[int]) -> bool:
    if len(group.receives) == 1:
        return left[group.receives[0]] > 0
    return all(left[rank] >= group.receives.count(rank) for rank in group.receives)


def _worth(gain: list[float], copies: list[int]) -> list[float]:
    """Of each group of a series: a small step before a large one is not put off. What copies nothing comes first."""
    runs: list[tuple[float, int, int]] = []
    for one, cost in zip(gain, copies, strict=True):
        count = 1
        while runs and one * runs[-1][1] >= runs[-1][0] * cost:
            before = runs.pop()
            one, cost, count = one + before[0], cost + before[1], count + before[2]
        runs.append((one, cost, count))
    return [total / cost if cost else np.inf for total, cost, count in runs for _ in range(count)]


class _Checked:
    """Walks through the changes of a layer, as they would be made one after another, and says where the layer may rest."""

    def __init__(self, placement: Placement, changes: Changes, limits: Limits) -> None:
        self._per = placement.slots_per_rank
        self._table = placement.expert_of_slot
        self._live = [True] * placement.ranks if limits.live is None else limits.live.tolist()
        self._least = limits.least_replicas
        self._experts = placement.experts
        self._rows = list(zip(*(part.tolist() for part in changes[:6]), strict=True))

    def groups(self, layer: int, members: list[int]) -> list[_Group]:
        """Unorderable where a change is not legal, or the end is not."""
        row = self._table[layer].tolist()
        held = [0] * self._experts
        for slot, expert in enumerate(row):
            if expert != EMPTY and self._live[slot // self._per]:
                held[expert] += 1
        least = [1] * self._experts if self._least is None else self._least[layer].tolist()
        floor = [min(has, must) for has, must in zip(held, least, strict=True)]
        short: set[int] = set()
        found: list[_Group] = []
        together = _Group([], [], set(), set())
        for member in members:
            for expert in self._make(layer, row, held, member, together):
                (short.add if held[expert] < floor[expert] else short.discard)(expert)
                if held[expert] == 0 < floor[expert]:
                    raise Unorderable(layer, f"change {member} takes the last live replica of expert {ExpertId(layer, expert)}")
            if not short:
                found.append(together)
                together = _Group([], [], set(), set())
        if short:
            expert = min(short)
            raise Unorderable(layer, f"its changes leave expert {ExpertId(layer, expert)} with {held[expert]} live replicas; it must keep {floor[expert]}")
        return found

    def _make(self, layer: int, row: list[int], held: list[int], member: int, group: _Group) -> list[int]:
        """Write a change into the row; returns the experts that lost a replica, or got one."""
        _, _, slot, expert, other_slot, other_expert = self._rows[member]
        self._expect(layer, row, member)
        writes = ((slot, expert),) if other_slot == NOWHERE else ((slot, expert), (other_slot, other_expert))
        touched = [one for at, new in writes for one in (row[at], new) if one != EMPTY]
        for at, _ in writes:
            if row[at] != EMPTY and self._live[at // self._per]:
                held[row[at]] -= 1
            row[at] = EMPTY
        for at, new in writes:
            if new != EMPTY:
                self._put(layer, row, held, member, at, new)
                group.receives.append(at // self._per)
                group.copied.add(at)
        group.changes.append(member)
        group.written.update(at for at, _ in writes)
        return touched

    def _put(self, layer: int, row: list[int], held: list[int], member: int, slot: int, expert: int) -> None:
        rank = slot // self._per
        if expert in row[rank * self._per : (rank + 1) * self._per]:
            raise Unorderable(layer, f"change {member} brings expert {ExpertId(layer, expert)} to rank {rank}, which holds it")
        if not self._live[rank]:
            raise Unorderable(layer, f"change {member} brings expert {ExpertId(layer, expert)} to rank {rank}, which is not live")
        row[slot] = expert
        held[expert] += 1

    def _expect(self, layer: int, row: list[int], member: int) -> None:
        """A change finds in its slots what it was planned on."""
        kind, _, slot, expert, other_slot, other_expert = self._rows[member]
        if kind in (Kind.SWAP, Kind.MOVE) and row[other_slot] != expert:
            raise Unorderable(layer, f"change {member} takes expert {ExpertId(layer, expert)} from slot {other_slot}, which holds {row[other_slot]}")
        if kind == Kind.SWAP and row[slot] != other_expert:
            raise Unorderable(layer, f"change {member} takes expert {ExpertId(layer, other_expert)} from slot {slot}, which holds {row[slot]}")
        if kind == Kind.DROP and row[slot] == EMPTY:
            raise Unorderable(layer, f"change {member} drops what slot {slot} holds, which is empty")
        if row[slot] == expert:
            raise Unorderable(layer, f"change {member} brings expert {ExpertId(layer, expert)} to slot {slot}, which holds it")
