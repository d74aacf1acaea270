"""Lead from the present placement towards a goal, with the copies first that make most tokens local. Pure.

Changes of a layer build on one another. A rank takes up the expert of most worth in an empty slot, or in
place of the expert of least worth that the target does not have there and other ranks hold too. Where no rank
can give anything up, two ranks exchange. Every state between is legal, so any prefix of the changes may be
carried out. The series is cut where nothing more is gained, at the budget, and where a rank would become too
full.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, SlotTable
from fleet.placement import EMPTY
from migration import kernels
from migration.model.constraints import UNLIMITED, Constraints
from migration.model.placement_changes import NONE, NOWHERE, ChangeKind, PlacementChanges, made, taken, within
from migration.solvers.load_cap import held_of, level
from migration.solvers.locality_placement import LocalityProblem
from migration.solvers.split_weights import DemandPull

_WHOLE = 0.98
"""Part of the most that a layer's series gains at which it may end; later changes level ranks, and are
kept."""
_LOOK = 4
"""Experts of a rank to examine for an exchange."""
_Row = tuple[int, int, int, int, int]
"""(kind, slot, expert, other slot, other expert)."""
_Option = tuple[float, int, int | None]
"""(gain, expert, the expert that makes room for it; None: a slot is free)."""


def ordered_diff(
    table: SlotTable,
    target: SlotTable,
    demand: NDArray[Any],
    room: LocalityProblem,
    limits: Constraints = UNLIMITED,
) -> PlacementChanges:
    """Return the changes, layer by layer, best first; together they lead to the target as far as limits and
    gains allow.

    table, target: int16 [layers, ranks * slots]. demand: [ranks, layers, experts] pairs per second by the
    rank that serves their requests. gain: pairs per second that become local, times `room.prices` (1 where
    there is one node, and by default). A layer's fullest rank may become as full as `room.balance` allows, or
    as it was. ValueError when shapes contradict each other.
    """
    if (
        table.shape != target.shape
        or table.shape[1] != room.ranks * room.slots
        or demand.shape[:2] != (room.ranks, len(table))
    ):
        raise ValueError(
            f"toward: tables {table.shape} and {target.shape} and demand {demand.shape} do not fit"
            f" {room.ranks} ranks of {room.slots} slots"
        )
    missing, extra = _apart(table, target, demand.shape[2], room, limits)
    layers = np.flatnonzero(missing.any(axis=(1, 2)))
    if not len(layers):
        return NONE
    found = _series(_problem(table, missing, extra, layers, demand, room, limits))
    series = _changes(np.repeat(layers, found.changes), found)
    fullness = _Fullness(table, layers, demand, room)
    keep = _gaining(found)
    # The last changes of a series may level the ranks, at a loss: without them the layer would be too full.
    unlevel = np.isin(series.layer, fullness.exceeded(taken(series, keep), layers[_worthwhile(found)]))
    changes = taken(series, keep | unlevel)
    return _levelled(changes if limits.max_copies is None else within(changes, limits.max_copies), fullness)


def _gaining(found: "_Series") -> BoolArray:
    """bool [n]: the changes up to the last point of each layer's series that has nearly all of its gain."""
    keep, end = np.zeros(len(found.gain), bool), 0
    for count in found.changes.tolist():
        begin, end = end, end + count
        reached = np.cumsum([0.0, *found.gain[begin:end]])  # not monotone
        keep[begin : begin + int(np.flatnonzero(reached >= reached.max() * _WHOLE)[-1])] = True
    return keep


def _worthwhile(found: "_Series") -> BoolArray:
    """bool [layers]: layers whose whole series gains."""
    ends = np.cumsum(found.changes)
    sums = np.cumsum([0.0, *found.gain])
    return np.asarray(sums[ends] > sums[ends - found.changes])


def _apart(
    table: SlotTable, target: SlotTable, experts: int, room: LocalityProblem, limits: Constraints
) -> tuple[BoolArray, BoolArray]:
    """Return (missing, extra), bool [layers, ranks, experts]: only in the target, and only in the table."""
    have, want = held_of(table, room.ranks, experts), held_of(target, room.ranks, experts)
    missing, extra = want & ~have, have & ~want
    if limits.frozen is not None:
        missing, extra = missing & ~limits.frozen[:, None], extra & ~limits.frozen[:, None]
    if limits.live is not None:
        missing, extra = missing & limits.live[:, None], extra & limits.live[:, None]
    return missing, extra


class _Problem(NamedTuple):
    """Layers that differ from the target. First axis: layers, unless stated otherwise."""

    table: SlotTable
    """int16 [layers, slots]."""
    own: FloatArray
    """float64 [ranks, layers, experts]: worth of a replica to its own rank."""
    shared: FloatArray
    """float64 [nodes, layers, experts]: worth of a node's first replica to the node."""
    node: NDArray[np.intp]
    """[ranks]."""
    missing: BoolArray
    """[layers, ranks, experts]: only in the target."""
    extra: BoolArray
    """[layers, ranks, experts]: only in the table."""
    least: NDArray[np.int64]
    """[layers, experts]: replicas that must stay."""
    live: NDArray[np.bool_] | None
    """[ranks]."""


class _Series(NamedTuple):
    """Changes of all layers, one layer after the other."""

    rows: NDArray[np.int64]
    """[n, 5]: as `_Row`."""
    gain: FloatArray
    """[n]."""
    changes: NDArray[np.int64]
    """[layers]: number of a layer's changes."""


def _problem(
    table: SlotTable,
    missing: BoolArray,
    extra: BoolArray,
    layers: NDArray[np.intp],
    demand: NDArray[Any],
    room: LocalityProblem,
    limits: Constraints,
) -> _Problem:
    nodes = int(room.node.max()) + 1
    rank, node = room.prices if nodes > 1 else (1.0, 0.0)
    demand = demand[:, layers]
    least = np.asarray(1 if limits.min_replicas is None else limits.min_replicas[layers], np.int64)
    return _Problem(
        table[layers],
        np.ascontiguousarray(rank * np.asarray(demand, np.float64)),
        np.stack([node * demand[room.node == at].sum(axis=0, dtype=np.float64) for at in range(nodes)]),
        room.node,
        missing[layers],
        extra[layers],
        np.array(np.broadcast_to(least, (len(layers), demand.shape[2]))),
        limits.live,
    )


def _series(problem: _Problem) -> _Series:
    """Return each layer's changes, best first."""
    library = kernels.compiled()
    if library is None:
        return _series_in_python(problem)
    most = int(np.count_nonzero(problem.missing))
    found = _Series(np.empty((most, 5), np.int64), np.empty(most), np.empty(len(problem.table), np.int64))
    library.ordered_series(
        kernels.plain(problem.table),
        *(kernels.plain(part) for part in problem[1:7]),
        None if problem.live is None else kernels.plain(problem.live),
        len(problem.table),
        _LOOK,
        *found,
    )
    count = int(found.changes.sum())
    return found._replace(rows=found.rows[:count], gain=found.gain[:count])


def _series_in_python(problem: _Problem) -> _Series:
    series = [
        _Layer(
            problem.table[layer],
            _Value(problem.own[:, layer], problem.shared[:, layer], problem.node),
            problem.missing[layer],
            problem.extra[layer],
            problem.least[layer],
            problem.live,
        ).rows()
        for layer in range(len(problem.table))
    ]
    return _Series(
        np.array([row for rows in series for _, row in rows], np.int64).reshape(-1, 5),
        np.array([gain for rows in series for gain, _ in rows]),
        np.array([len(rows) for rows in series]),
    )


class _Value:
    """Worth of replicas in one layer. own: [ranks, experts]; shared: [nodes, experts]."""

    def __init__(self, own: FloatArray, shared: FloatArray, node: NDArray[np.intp]) -> None:
        self._own: list[list[float]] = own.tolist()
        self._shared: list[list[float]] = shared.tolist()
        self._node: list[int] = node.tolist()
        self._near = [[0] * shared.shape[1] for _ in range(len(shared))]

    def count(self, rank: int, expert: int, by: int) -> None:
        """Record that a replica came, or went."""
        self._near[self._node[rank]][expert] += by

    def win(self, rank: int, expert: int) -> float:
        """Return the worth of one more replica."""
        at = self._node[rank]
        return self._own[rank][expert] + (0.0 if self._near[at][expert] else self._shared[at][expert])

    def lose(self, rank: int, expert: int) -> float:
        """Return the worth of the present replica."""
        at = self._node[rank]
        return self._own[rank][expert] + (self._shared[at][expert] if self._near[at][expert] == 1 else 0.0)


class _Rank(NamedTuple):
    """One rank's part of a layer."""

    free: list[int]
    """Empty slots."""
    missing: list[int]
    """Experts to take up, most worth last."""
    extra: list[int]
    """Experts that may leave, least worth first."""


class _Layer:
    """One layer on its way to the target."""

    def __init__(
        self,
        row: SlotTable,
        value: _Value,
        missing: BoolArray,
        extra: BoolArray,
        least: NDArray[Any],
        live: NDArray[np.bool_] | None,
    ) -> None:
        ranks = len(missing)
        per = len(row) // ranks
        self._value, self._least = value, least.tolist()
        self._slot = {
            (slot // per, expert): slot for slot, expert in enumerate(row.tolist()) if expert != EMPTY
        }
        self._count = [0] * missing.shape[1]
        for rank, expert in self._slot:
            value.count(rank, expert, 1)
            self._count[expert] += live is None or bool(live[rank])
        self._ranks = [self._rank(row, per, rank, missing[rank], extra[rank]) for rank in range(ranks)]
        self._extra_on: dict[int, set[int]] = {}
        for rank, part in enumerate(self._ranks):
            for expert in part.extra:
                self._extra_on.setdefault(expert, set()).add(rank)

    def _rank(self, row: SlotTable, per: int, rank: int, missing: BoolArray, extra: BoolArray) -> _Rank:
        free = [slot for slot in range(rank * per, (rank + 1) * per) if row[slot] == EMPTY]
        take = sorted(
            np.flatnonzero(missing).tolist(), key=lambda expert: (self._value.win(rank, expert), -expert)
        )
        return _Rank(
            free[::-1],
            take,
            sorted(
                np.flatnonzero(extra).tolist(), key=lambda expert: (self._value.lose(rank, expert), -expert)
            ),
        )

    def rows(self) -> list[tuple[float, _Row]]:
        """Return (gain, change) in order."""
        rows: list[tuple[float, _Row]] = []
        options = {
            rank: option for rank in range(len(self._ranks)) if (option := self._option(rank)) is not None
        }
        while True:
            if options:
                rank = max(options, key=lambda at: (options[at][0], -at))
                row, touched = self._taken_up(rank, options[rank])
            else:
                exchanged = self._exchanged()
                if exchanged is None:
                    return rows
                row, touched = exchanged
            rows.append(row)
            # Only ranks whose options this change touched are evaluated again.
            for rank in touched:
                option = self._option(rank)
                if option is None:
                    options.pop(rank, None)
                else:
                    options[rank] = option

    def _option(self, rank: int) -> _Option | None:
        """Return the next expert that a rank would take up, and the expert that it replaces."""
        part = self._ranks[rank]
        if not part.missing:
            return None
        expert = part.missing[-1]
        worth = self._value.win(rank, expert)
        if part.free:
            return worth, expert, None
        for other in part.extra:
            if self._count[other] > self._least[other]:
                return worth - self._value.lose(rank, other), expert, other
        return None

    def _taken_up(self, rank: int, option: _Option) -> tuple[tuple[float, _Row], set[int]]:
        _, expert, other = option
        part = self._ranks[rank]
        gain = self._value.win(rank, expert) - (0.0 if other is None else self._value.lose(rank, other))
        part.missing.pop()
        slot = part.free.pop() if other is None else self._gone(rank, other)
        self._come(rank, expert, slot)
        touched = (
            {rank}
            | self._extra_on.get(expert, set())
            | (set() if other is None else self._extra_on.get(other, set()))
        )
        return (gain, (int(ChangeKind.REPLICATE), slot, expert, NOWHERE, EMPTY)), touched

    def _come(self, rank: int, expert: int, slot: int) -> None:
        self._slot[rank, expert] = slot
        self._count[expert] += 1
        self._value.count(rank, expert, 1)

    def _gone(self, rank: int, expert: int) -> int:
        self._ranks[rank].extra.remove(expert)
        self._extra_on[expert].discard(rank)
        self._count[expert] -= 1
        self._value.count(rank, expert, -1)
        return self._slot.pop((rank, expert))

    def _exchanged(self) -> tuple[tuple[float, _Row], set[int]] | None:
        """Make the best exchange of two extras, one of which the other's rank wants.

        Only the few most and least missing experts are examined.
        """
        value, best = self._value, None
        for rank, part in enumerate(self._ranks):
            for expert in part.missing[-_LOOK:]:
                for other in sorted(self._extra_on.get(expert, ())):
                    missing = self._ranks[other].missing
                    # Prefer to give back an expert that the other rank wants too; otherwise any extra that it
                    # lacks.
                    backs = [back for back in part.extra if back in missing][-_LOOK:] or [
                        back for back in part.extra if (other, back) not in self._slot
                    ][:_LOOK]
                    for back in backs:
                        gain = (
                            value.win(rank, expert)
                            + value.win(other, back)
                            - value.lose(rank, back)
                            - value.lose(other, expert)
                        )
                        if best is None or gain > best[0]:
                            best = gain, rank, expert, other, back
        if best is None:
            return None
        gain, rank, expert, other, back = best
        slot, theirs = self._gone(rank, back), self._gone(other, expert)
        self._come(rank, expert, slot)
        self._come(other, back, theirs)
        self._ranks[rank].missing.remove(expert)
        if back in self._ranks[other].missing:
            self._ranks[other].missing.remove(back)
        else:
            self._ranks[other].extra.append(back)
            self._extra_on[back].add(other)
        return (gain, (int(ChangeKind.SWAP), slot, expert, theirs, back)), {rank, other}


def _changes(layer: NDArray[np.intp], series: _Series) -> PlacementChanges:
    kind, slot, expert, other_slot, other_expert = series.rows.T
    return PlacementChanges(
        kind.astype(np.uint8),
        layer.astype(np.int32),
        slot.astype(np.int32),
        expert.astype(np.int16),
        other_slot.astype(np.int32),
        other_expert.astype(np.int16),
        series.gain,
    )


class _Fullness:
    """Load of the fullest rank of each layer under the weights that level it best."""

    def __init__(
        self, table: SlotTable, layers: NDArray[np.intp], demand: NDArray[Any], room: LocalityProblem
    ) -> None:
        """layers: those that may change."""
        self._table = table
        self._wants = DemandPull(demand, room.ranks, room.node, None)
        self._allowed = np.full(len(table), np.inf)
        """[layers]: as full as the required balance allows, or as it was"""
        self._allowed[layers] = np.maximum(1.0 / room.balance, self._fullest(table, layers)) * (1.0 + 1e-3)

    def exceeded(self, changes: PlacementChanges, layers: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return those of some layers in which a rank is too full after the changes."""
        if not len(layers):
            return layers
        return layers[self._fullest(made(self._table, changes), layers) > self._allowed[layers]]

    def _fullest(self, table: SlotTable, layers: NDArray[np.intp]) -> FloatArray:
        return np.asarray(level(table[layers], self._wants.some(layers)).load.max(axis=1))


def _levelled(changes: PlacementChanges, fullness: _Fullness) -> PlacementChanges:
    """Cut the ends of layers' series that make a rank too full for any weights: by a quarter until none
    does."""
    over = np.unique(changes.layer).astype(np.intp)
    while len(over):
        # Only layers whose series was cut are evaluated again.
        over = fullness.exceeded(changes, over)
        keep = np.ones(len(changes.kind), bool)
        for layer in over.tolist():
            members = np.flatnonzero(changes.layer == layer)
            keep[members[3 * len(members) // 4 :]] = False
        changes = taken(changes, keep)
    return changes
