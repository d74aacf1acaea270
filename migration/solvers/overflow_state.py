"""State of layers whose load cannot flow off: what each element serves, and the effect of a further replica.
Pure.

`migration.solvers.overflow_copies` searches with it. Loads are in units of their layer's mean rank load.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from fleet.arrays import BoolArray, FloatArray, IndexArray, SlotTable
from fleet.placement import EMPTY
from migration import kernels
from migration.model.constraints import Constraints
from migration.model.placement_changes import NOWHERE
from migration.solvers.split_weights import SplitResult

HOMELESS = 0.2
"""Cost of a unit of displaced load, in units of excess, that must flow on from the ranks that a replaced
replica leaves it to."""
_STILL = 1e-4
"""Load of a slot, in mean rank loads, up to which nothing can flow off through it."""


@dataclass(slots=True)
class OverflowRanks:
    """The a layers being processed. An *element* is a slot whose expert has several replicas, or an empty
    one; at most m per layer.

    Rank number `ranks` and expert number `experts` are placeholders: unused elements belong to both, and
    empty slots to that expert.
    """

    dead: BoolArray
    """[ranks + 1], for all layers; the placeholder counts as dead."""
    layer: IndexArray
    origin: SlotTable
    """[a, slots]: initial table; an expert does not return to a rank that it was removed from."""
    table: SlotTable
    """[a, slots]."""
    load: FloatArray
    """[a, experts + 1], in mean rank loads."""
    cap: FloatArray
    """[a]."""
    replicas: NDArray[np.int64]
    """[a, experts + 1]: live holders."""
    least: NDArray[np.int64]
    """[a, experts + 1]: an expert with at most this number of live holders keeps them."""
    most: NDArray[np.int64]
    """[a, experts + 1]: an expert with this number of live holders gets no further one."""
    alone: FloatArray
    """[a, ranks + 1]: load of experts that are in no element."""
    slot: IndexArray
    """[a, m]; NOWHERE: unused."""
    rank: IndexArray
    """[a, m]."""
    expert: IndexArray
    """[a, m]."""
    served: FloatArray
    """[a, m]."""
    new: BoolArray
    """[a, m]: copied by this plan."""
    harm: FloatArray
    """[a, m]: shortfall of copies into the slot against their promise; halved with each copy of the layer."""
    fails: IndexArray
    """[a]: failed rounds since the last copy."""

    def taken(self, which: BoolArray) -> "OverflowRanks":
        """Return the state of some of the layers."""
        return (
            self
            if which.all()
            else OverflowRanks(self.dead, *(getattr(self, part.name)[which] for part in fields(self)[1:]))
        )

    def loads(self) -> FloatArray:
        """[a, ranks + 1]."""
        return np.asarray(self.alone + summed(self.served, self.rank, len(self.dead)))

    def excess(self) -> FloatArray:
        """[a]: load above the cap."""
        return total(over(self.loads(), self.cap, self.dead))


def total(values: FloatArray) -> FloatArray:
    """[a]: sums of rows [a, n]. The compiled loops add in numpy's order: in halves, and eight sums side by
    side."""
    return np.asarray(values.sum(axis=1))


def over(loads: FloatArray, cap: FloatArray, dead: BoolArray) -> FloatArray:
    """[a, ranks + 1]: load above the cap."""
    return np.asarray(np.where(dead, 0.0, np.maximum(loads - cap[:, None], 0.0)))


def summed(values: FloatArray, place: IndexArray, places: int) -> FloatArray:
    """[a, places]: values [a, m] added up by place [a, m]."""
    rows = len(values)
    return np.asarray(
        np.bincount(
            (place + places * np.arange(rows)[:, None]).ravel(), values.ravel(), rows * places
        ).reshape(rows, places),
        np.float64,
    )


def overflow_ranks(
    table: SlotTable,
    load: FloatArray,
    parts: SplitResult,
    served: FloatArray,
    cap: FloatArray,
    limits: Constraints,
    node: NDArray[np.intp] | None,
) -> OverflowRanks:
    layers, slots = table.shape
    experts, ranks = load.shape[1], len(parts.alone) // layers
    rank = np.arange(slots) // (slots // ranks)
    dead = np.append(np.zeros(ranks, bool) if limits.live is None else ~limits.live, True)
    # Elements: slots of shared experts, and empty slots of live ranks.
    free = np.flatnonzero((table == EMPTY) & ~dead[rank])
    position = np.sort(np.concatenate([parts.slot, free]))
    # Left-align each layer's elements in a rectangle; unused columns hold placeholders.
    layer, slot = np.divmod(position, slots)
    column = np.arange(len(position)) - np.searchsorted(layer, np.arange(layers))[layer]
    width = int(column.max(initial=-1)) + 1
    shape = (layers, width)
    flat = np.zeros(table.size)
    flat[parts.slot] = served
    slots_at, ranks_at, experts_at, served_at = (
        np.full(shape, NOWHERE, np.intp),
        np.full(shape, ranks),
        np.full(shape, experts),
        np.zeros(shape),
    )
    slots_at[layer, column] = slot
    ranks_at[layer, column] = rank[slot]
    experts_at[layer, column] = np.where(table[layer, slot] == EMPTY, experts, table[layer, slot])
    served_at[layer, column] = flat[position]
    # Only live holders count as replicas.
    held = (table != EMPTY) & ~dead[rank]
    replicas = np.bincount(
        (np.arange(layers)[:, None] * (experts + 1) + table)[held], minlength=layers * (experts + 1)
    ).reshape(layers, experts + 1)
    least, most = _bounds(replicas, ranks - int(dead[:-1].sum()), limits, node)
    padded = np.pad(load, ((0, 0), (0, 1)))
    alone = np.pad(parts.alone.reshape(layers, ranks), ((0, 0), (0, 1)))
    new, harm, fails = np.zeros(shape, bool), np.zeros(shape), np.zeros(layers, np.intp)
    return OverflowRanks(
        dead,
        np.arange(layers),
        table,
        table.copy(),
        padded,
        cap,
        replicas,
        least,
        most,
        alone,
        slots_at,
        ranks_at,
        experts_at,
        served_at,
        new,
        harm,
        fails,
    )


def _bounds(
    replicas: NDArray[np.int64], ranks: int, limits: Constraints, node: NDArray[np.intp] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (least, most) live holders [layers, experts + 1].

    For the placeholder both are such that an empty slot can always be replaced and is never copied. Where
    there are several nodes, replicas of experts that must keep more than one stay where they are: they may be
    spread on purpose.
    """
    least, most = (
        np.ones_like(replicas),
        np.full_like(replicas, ranks if limits.max_replicas is None else min(ranks, limits.max_replicas)),
    )
    if limits.min_replicas is not None:
        spread = node is not None and int(node.max()) > 0
        least[:, :-1] = np.where(
            spread & (limits.min_replicas > 1), replicas[:, :-1], np.maximum(limits.min_replicas, 1)
        )
    if limits.frozen is not None:
        least[:, :-1] = np.where(limits.frozen, replicas[:, :-1], least[:, :-1])
        most[:, :-1] = np.where(limits.frozen, 0, most[:, :-1])
    least[:, -1], most[:, -1] = -1, 0
    return least, most


class OverflowView(NamedTuple):
    """Derived quantities: [a, m] of elements, [a, ranks + 1] of ranks, in mean rank loads."""

    loads: FloatArray
    leaving: FloatArray
    """[a, ranks + 1]: excess of a rank and of those it exchanges load with."""
    out: FloatArray
    """[a, experts + 1]: excess that could leave through a further replica"""
    space: FloatArray
    """[a, m]: room of the element's rank without the element, and of ranks that it can push load to, less
    what comes back from the expert's other holder."""
    stranded: FloatArray
    """[a, m]: load of a replaced replica that finds no place, and a part of the load that must flow on."""
    other: IndexArray
    """[a, m]: the element of the expert's other holder, where two hold it; otherwise the element itself."""
    parallel: FloatArray
    """[a, m]: load that this holder can push back to the element's rank through other experts that both
    hold."""


def overflow_view(state: OverflowRanks) -> OverflowView:
    library = kernels.compiled()
    if library is None or not state.served.size:
        return _overflow_view(state)
    elements, of_ranks = state.served.shape, state.alone.shape
    found = OverflowView(
        np.empty(of_ranks),
        np.empty(of_ranks),
        np.empty(state.load.shape),
        np.empty(elements),
        np.empty(elements),
        np.empty(elements, np.intp),
        np.empty(elements),
    )
    library.overflow_view(
        state.served,
        state.rank,
        state.expert,
        state.dead,
        state.cap,
        state.load,
        state.replicas,
        state.alone,
        *found,
    )
    return found


def _overflow_view(state: OverflowRanks) -> OverflowView:
    """Implement `overflow_view` in numpy."""
    ranks, experts = len(state.dead), state.load.shape[1]
    rows = np.arange(len(state.layer))[:, None]
    loads, y = state.loads(), state.served
    high = over(loads, state.cap, state.dead)
    signed = np.where(state.dead, 0.0, state.cap[:, None] - loads)
    room = np.maximum(signed, 0.0)[rows, state.rank]
    leaving = pooled(state, high)
    out = np.minimum(state.load, summed(np.minimum(y, leaving[rows, state.rank]), state.expert, experts))
    # Displaced load: first into the room of the expert's other holders, the rest one step further through
    # their other experts.
    elsewhere = summed(room, state.expert, experts)[rows, state.expert] - room
    passing = np.where(state.expert < experts - 1, np.minimum(y, elsewhere), 0.0)
    onward = summed(passing, state.rank, ranks)[rows, state.rank]
    further = summed(onward - passing, state.expert, experts)[rows, state.expert] - onward + passing
    space = np.maximum(signed[rows, state.rank] + y + onward - passing, 0.0)
    other, parallel = _pairs(state)
    # What finds no room in either step is stranded, less what the other holder returns to this rank anyway.
    homeless = np.maximum(y - elsewhere, 0.0)
    left = np.maximum(homeless - further, 0.0)
    back = np.minimum(left, np.maximum(parallel, 0.0))
    return OverflowView(
        loads, leaving, out, np.maximum(space - back, 0.0), left - back + HOMELESS * homeless, other, parallel
    )


def pooled(state: OverflowRanks, high: FloatArray) -> FloatArray:
    """[a, ranks + 1]: the given excess, summed over the crowded ranks that can exchange load with each
    other."""
    ranks, experts = len(state.dead), state.load.shape[1]
    rows = np.arange(len(high))[:, None]
    # Ranks that are joined by a shared expert with load form a component: their excess is common.
    flowing = (state.served > _STILL) & (state.expert < experts - 1) & (high > 0)[rows, state.rank]
    rank, expert = (
        (state.rank + ranks * rows)[flowing],
        (state.expert + experts * rows + high.size)[flowing],
    )
    nodes = high.size + len(high) * experts
    starts = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=nodes))])
    pipes = csr_array(
        (
            np.ones(len(rank)),
            expert[np.argsort(rank, kind="stable")].astype(np.int32),
            starts.astype(np.int32),
        ),
        shape=(nodes, nodes),
    )
    pool = connected_components(pipes, directed=False)[1][: high.size]
    return np.asarray(np.bincount(pool, high.ravel())[pool].reshape(high.shape))


def _pairs(state: OverflowRanks) -> tuple[IndexArray, FloatArray]:
    """Return (`OverflowView.other`, `OverflowView.parallel`)."""
    a, m = state.rank.shape
    rows, ranks, experts = np.arange(a)[:, None], len(state.dead), state.load.shape[1]
    column = np.broadcast_to(np.arange(m, dtype=np.float64), (a, m))
    # The partner's column is the sum of the pair's columns less the own one.
    two = state.replicas[rows, state.expert] == 2
    other = np.where(two, summed(column, state.expert, experts)[rows, state.expert] - column, column).astype(
        np.intp
    )
    there = state.rank[rows, other]
    between = summed(np.where(two, state.served, 0.0), state.rank * ranks + there, ranks * ranks)
    return other, np.where(two, between[rows, there * ranks + state.rank] - state.served[rows, other], 0.0)


def admit(state: OverflowRanks, row: IndexArray, expert: IndexArray) -> None:
    """Make elements of the slots of experts with a single holder until now; a column is reserved for them."""
    library = kernels.compiled()
    if library is not None and state.slot.size:
        library.overflow_admit(
            row,
            expert,
            state.dead,
            state.table,
            state.load,
            state.replicas,
            state.slot,
            state.rank,
            state.expert,
            state.served,
            state.alone,
        )
        return
    new = (state.replicas[row, expert] == 1) & ~(state.expert[row] == expert[:, None]).any(axis=1)
    row, expert = row[new], expert[new]
    column = (state.slot[row] != NOWHERE).sum(axis=1)
    rank_of = np.arange(state.table.shape[1]) // (state.table.shape[1] // (len(state.dead) - 1))
    slot = ((state.table[row] == expert[:, None]) & ~state.dead[rank_of]).argmax(axis=1)
    rank = rank_of[slot]
    load = state.load[row, expert]
    (
        state.slot[row, column],
        state.rank[row, column],
        state.expert[row, column],
        state.served[row, column],
    ) = (
        slot,
        rank,
        expert,
        load,
    )
    state.alone[row, rank] -= load


def widen(state: OverflowRanks, room: int) -> None:
    """Add columns for `room` further elements in every layer."""
    used = int((state.slot != NOWHERE).sum(axis=1).max())
    more = used + room - state.slot.shape[1]
    if more <= 0:
        return
    placeholder = {
        "slot": NOWHERE,
        "rank": len(state.dead) - 1,
        "expert": state.load.shape[1] - 1,
        "served": 0.0,
        "new": False,
        "harm": 0.0,
    }
    for name, value in placeholder.items():
        part = getattr(state, name)
        setattr(
            state, name, np.concatenate([part, np.full((len(part), more + room), value, part.dtype)], axis=1)
        )
