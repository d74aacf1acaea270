"""Bring a placement made for locality under a cap of rank load, at the least cost in locality. Pure.

New weights come first (`migration.solvers.split_weights`; they copy nothing). Where they do not suffice, the
fullest rank of a layer either exchanges an expert with another rank, or another rank takes a replica of one
of its experts in place of a spare one. Of all such exchanges the one with the least loss of worth per load
taken from the fullest rank is made. This is repeated until the cap is kept or nothing helps.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray, FloatArray, SlotTable
from fleet.placement import EMPTY, Split
from migration import kernels
from migration.solvers.holder_value import HolderValue
from migration.solvers.split_weights import ROUNDS, DemandPull, SplitResult, diffused, shared, split_of

_STEPS = 8
"""Exchanges of a layer between two computations of the weights."""
_LOOKS = 40
_PARTNERS = 16
"""Emptiest ranks that the fullest exchanges with."""
_PATIENCE = 6
"""Computations without a less full maximum after which a layer is given up."""
_TINY = 1e-9
_PACE = 0.6
"""Share of a rank's excess that flows off in a round, of each pool."""
_LITTLE = 0.3
"""Least part, of the most that any exchange could take off the fullest rank, that an exchange must take."""


def table_of(held: BoolArray, slots: int) -> SlotTable:
    """int16 [layers, ranks * slots]: experts of each rank in ascending order, then empty slots."""
    layers, ranks = held.shape[:2]
    layer, rank, expert = np.nonzero(held)
    place = layer * ranks + rank
    nth = np.arange(len(place)) - np.searchsorted(place, place)
    fits = nth < slots
    table = np.full((layers, ranks, slots), EMPTY, np.int16)
    table[layer[fits], rank[fits], nth[fits]] = expert[fits]
    return table.reshape(layers, ranks * slots)


def held_of(table: SlotTable, ranks: int, experts: int) -> BoolArray:
    """bool [layers, ranks, experts]."""
    layers, slots = table.shape
    held = np.zeros((layers, ranks, experts), bool)
    layer, slot = np.nonzero(table != EMPTY)
    held[layer, slot // (slots // ranks), table[layer, slot]] = True
    return held


def layer_sums(demand: NDArray[Any]) -> FloatArray:
    """Add up demand [ranks, layers, experts]: float64 [layers]. Ranks are added one by one, in any layout of
    memory."""
    return np.asarray(np.ascontiguousarray(demand.sum(axis=2, dtype=np.float64)).sum(axis=0))


class LoadCap(NamedTuple):
    """Loads of replicas after levelling by weights, while every node serves as much of its own demand as it
    can.

    Flat, as in `SplitResult`.
    """

    wants: DemandPull
    parts: SplitResult
    home: FloatArray
    """[n]: part of a slot's load that is demand of its own rank or node."""
    each: FloatArray
    """[n]."""

    @property
    def load(self) -> FloatArray:
        """[layers, ranks], in units of the layer's mean."""
        return self.parts.of_rank(self.each).reshape(-1, self.wants.ranks)

    def slots(self, table: SlotTable) -> FloatArray:
        """[layers, slots]: load of each slot, of shared and single replicas."""
        each = np.where(
            table == EMPTY,
            0.0,
            np.take_along_axis(self.wants.load, np.where(table == EMPTY, 0, table).astype(np.intp), 1),
        ).reshape(-1)
        each[self.parts.slot] = self.each
        return each.reshape(table.shape)


def level(table: SlotTable, wants: DemandPull) -> LoadCap:
    """Level ranks by diffusion, as in `migration.solvers.split_weights`, in two pools: node demand and the
    rest.

    A node's own demand flows among its replicas, and the rest among all replicas.
    """
    ranks = wants.ranks
    parts = shared(table, wants.load, ranks)
    own = wants.own(parts)
    # Pools: per expert (far), and per expert and node (near). Start: every rank serves its own demand, and a
    # node's rest is shared evenly on the node.
    near, cell, cells = wants.near_first(parts, own), parts.group, parts.groups
    if wants.node is not None:
        cell, cells = wants.cell(parts), (int(wants.node.max()) + 1) * parts.groups
    far = np.maximum(parts.whole - parts.of_group(own + near), 0.0) / parts.replicas
    width = _PACE / np.maximum(np.bincount(parts.rank, minlength=len(parts.alone)), 1)[parts.rank]
    # Both pools flow in the same field of rank loads.
    library = kernels.compiled()
    if library is not None:
        library.cap_levelled(
            parts.rank,
            parts.group,
            None if wants.node is None else cell,
            parts.alone,
            parts.groups,
            cells,
            own,
            width,
            ROUNDS,
            near,
            far,
        )
        return LoadCap(wants, parts, own + near, own + near + far)
    for _ in range(ROUNDS):
        height = parts.of_rank(own + near + far)[parts.rank]
        far = _flowed(far, height, width, parts.group, parts.groups)
        if wants.node is not None:
            near = _flowed(near, height, width, cell, cells)
    return LoadCap(wants, parts, own + near, own + near + far)


def _flowed(
    pool: FloatArray, height: FloatArray, width: FloatArray, group: NDArray[np.intp], groups: int
) -> FloatArray:
    """Move load from slots above their group's mean level to slots below it; each group keeps its sum."""
    total = np.bincount(group, pool, groups)
    mean = np.bincount(group, pool * height, groups) / np.maximum(total, _TINY)
    # Clipping at zero creates load: rescale each group to its total.
    flowed = np.maximum(pool + width * (mean[group] - height), 0.0)
    return np.asarray(flowed * (total / np.maximum(np.bincount(group, flowed, groups), _TINY))[group])


def split_under(
    table: SlotTable, demand: NDArray[Any], ranks: int, node: NDArray[np.intp], cap: float
) -> Split:
    """Return the split that levels ranks within nodes first; ranks above `cap` times the mean then give away
    local load too."""
    found = level(table, DemandPull(demand, ranks, node, None))
    each = diffused(found.parts, found.each, own=np.minimum(found.home, found.each), enough=cap)
    return split_of(table, found.parts, each, found.wants)


class _Layers(NamedTuple):
    """Layers, first axis of all arrays; changed in place."""

    table: SlotTable
    held: BoolArray
    near: NDArray[np.int64]
    """[layers, nodes, experts] replicas on each node."""
    replicas: NDArray[np.int64]
    """[layers, experts]."""
    each: FloatArray
    """[layers, slots]: loads of slots."""
    load: FloatArray
    """[layers, ranks]."""
    demand: FloatArray
    """[layers, ranks, experts] in units of the mean rank load, as the loads are."""

    @classmethod
    def of(cls, table: SlotTable, demand: NDArray[Any], worth: HolderValue) -> "_Layers":
        """Read a table; loads are not known yet. demand: [ranks, layers, experts]."""
        ranks, layers, experts = demand.shape
        mean = np.maximum(layer_sums(demand) / ranks, _TINY)[:, None, None]
        held = held_of(table, ranks, experts)
        return cls(
            table.copy(),
            held,
            worth.near(held),
            held.sum(axis=1),
            np.zeros(table.shape),
            np.zeros((layers, ranks)),
            np.ascontiguousarray(demand.transpose(1, 0, 2) / mean),
        )

    def put(self, layer: int, slot: int, expert: int, worth: HolderValue) -> None:
        """Put an expert, or none, into a slot."""
        rank = slot * self.held.shape[1] // self.table.shape[1]
        for which, there in ((int(self.table[layer, slot]), False), (expert, True)):
            if which != EMPTY:
                self.held[layer, rank, which] = there
                self.near[layer, 0 if worth.flat else worth.node[rank], which] += 1 if there else -1
                self.replicas[layer, which] += 1 if there else -1
        self.table[layer, slot] = expert


def levelled(
    table: SlotTable,
    demand: NDArray[Any],
    worth: HolderValue,
    cap: float,
    most: int,
    home: BoolArray | None = None,
) -> SlotTable:
    """Return the table after exchanges that bring every layer's fullest rank to at most `cap` times the mean
    where possible.

    The argument is not changed. demand: [ranks, layers, experts]. most: replicas of an expert. home: bool
    [layers, ranks, experts] where one replica must stay; None: anywhere.
    """
    ranks = len(worth.node)
    wants = DemandPull(demand, ranks, worth.node, None)
    state = _Layers.of(table, demand, worth)
    busy, least = np.arange(len(table)), np.full(len(table), np.inf)
    failed = np.zeros(len(table), int)
    best = table.copy()
    for _ in range(_LOOKS):
        found = level(state.table[busy], wants if len(busy) == len(table) else wants.some(busy))
        each, load = found.slots(state.table[busy]), found.load
        fullest = load.max(axis=1)
        # Later states may be worse, as steps assume constant weights: keep the best.
        better = fullest < least[busy] - _TINY
        best[busy[better]], least[busy[better]] = state.table[busy[better]], fullest[better]
        failed[busy] = np.where(better, 0, failed[busy] + 1)
        going = (fullest > cap) & (failed[busy] < _PATIENCE)
        busy = busy[going]
        if not len(busy):
            break
        state.each[busy], state.load[busy] = each[going], load[going]
        # After a failure try exchanges only: the load that a further replica takes over is an estimate, and
        # was wrong.
        allowed = np.where(failed % 2 == 1, 1, most)
        # A few exchanges in each of these layers; loads are updated as if weights were constant.
        _stepped(state, worth, busy, cap, allowed, home)
    return best


def _stepped(
    state: _Layers,
    worth: HolderValue,
    busy: NDArray[np.intp],
    cap: float,
    most: NDArray[np.intp],
    home: BoolArray | None,
) -> None:
    """Make up to `_STEPS` exchanges in each of these layers. most: [layers], replicas of an expert."""
    library = kernels.compiled()
    if library is not None:
        library.cap_stepped(
            busy,
            *state,
            kernels.plain(worth.own),
            kernels.plain(worth.shared),
            kernels.plain(worth.node),
            None if home is None else kernels.plain(home),
            None if home is None else (state.held & home).sum(axis=1),
            most,
            cap,
            _STEPS,
            _PARTNERS,
        )
        return
    for _ in range(_STEPS):
        rows = busy[state.load[busy].max(axis=1) > cap]
        if not len(rows):
            break
        _make(state, worth, rows, _cheapest(state, worth, rows, cap, most, home))


class _Cheapest(NamedTuple):
    """The cheapest exchange, and the cheapest further replica, of the fullest rank of each of some layers."""

    here: NDArray[np.intp]
    """[rows, slots here]: slots of the fullest rank."""
    there: NDArray[np.intp]
    """[rows, slots there]: slots of others."""
    swap: FloatArray
    """[rows]: cost; inf: there is none."""
    swap_at: NDArray[np.intp]
    """[rows]: index in the flat [slots here, slots there]."""
    copy: FloatArray
    copy_at: NDArray[np.intp]


def _cheapest(
    state: _Layers,
    worth: HolderValue,
    rows: NDArray[np.intp],
    cap: float,
    most: NDArray[np.intp],
    home: BoolArray | None,
) -> _Cheapest:
    loads, per = state.load[rows], state.table.shape[1] // state.load.shape[1]
    ranks = np.sort(np.argsort(loads, axis=1, kind="stable")[:, :_PARTNERS], axis=1)
    here = loads.argmax(axis=1)[:, None] * per + np.arange(per)
    there = (ranks[:, :, None] * per + np.arange(per)).reshape(len(rows), -1)
    pairs = _pairs(state, rows, here, there)
    swaps = _swaps(state, worth, pairs, cap, home).reshape(len(rows), -1)
    copies = _copies(state, worth, pairs, cap, most, home).reshape(len(rows), -1)
    return _Cheapest(here, there, *_least(swaps), *_least(copies))


def _least(cost: FloatArray) -> tuple[FloatArray, NDArray[np.intp]]:
    """Return (the least cost of each row, [rows]; its index)."""
    at = cost.argmin(axis=1)
    return cost[np.arange(len(cost)), at], at


class _Pairs(NamedTuple):
    """Slots of each layer's fullest rank, against those of the emptiest ranks. All broadcast to [rows, slots
    here, slots there]."""

    row: NDArray[np.intp]
    source: NDArray[np.intp]
    """The fullest rank."""
    target: NDArray[np.intp]
    """The other rank."""
    mine: NDArray[np.intp]
    theirs: NDArray[np.intp]
    sent: FloatArray
    """Load of the slots here."""
    back: FloatArray
    top: FloatArray
    """Load of the fullest rank."""
    other: FloatArray
    apart: NDArray[np.bool_]
    """Another rank, which does not hold the expert."""
    free: NDArray[np.bool_]
    """The other slot is empty."""


def _pairs(state: _Layers, rows: NDArray[np.intp], here: NDArray[np.intp], there: NDArray[np.intp]) -> _Pairs:
    per = state.table.shape[1] // state.load.shape[1]
    full = here[:, 0] // per
    at, row, source, target = (
        rows[:, None],
        rows[:, None, None],
        full[:, None, None],
        (there // per)[:, None, :],
    )
    mine, theirs = (
        state.table[at, here].astype(np.intp)[:, :, None],
        state.table[at, there].astype(np.intp)[:, None, :],
    )
    apart = (target != source) & (mine != EMPTY) & ~state.held[row, target, mine]
    sent, back = state.each[at, here][:, :, None], state.each[at, there][:, None, :]
    return _Pairs(
        row,
        source,
        target,
        mine,
        theirs,
        sent,
        back,
        state.load[row, source],
        state.load[row, target],
        apart,
        theirs == EMPTY,
    )


def _swaps(
    state: _Layers, worth: HolderValue, pairs: _Pairs, cap: float, home: BoolArray | None
) -> FloatArray:
    """Return the cost of exchanging two slots.

    For an expert with several replicas, the local part of its load differs on the new rank.
    """
    row, source, target, mine, theirs, free = (
        pairs.row,
        pairs.source,
        pairs.target,
        pairs.mine,
        pairs.theirs,
        pairs.free,
    )
    may = pairs.apart & (free | ~state.held[row, source, theirs])
    if home is not None:
        may &= (~home[row, source, mine] | home[row, target, mine]) & (
            free | ~home[row, target, theirs] | home[row, source, theirs]
        )
    # Half of the difference in local demand moves with a shared expert.
    pull = (state.demand[row, target, mine] - state.demand[row, source, mine]) * (
        state.replicas[row, mine] > 1
    )
    drag = (state.demand[row, source, theirs] - state.demand[row, target, theirs]) * (
        state.replicas[row, theirs] > 1
    )
    sent, back = (
        np.maximum(pairs.sent + 0.5 * pull, 0.0),
        np.where(free, 0.0, np.maximum(pairs.back + 0.5 * drag, 0.0)),
    )
    relief = pairs.top - np.maximum(pairs.top - pairs.sent + back, pairs.other - pairs.back + sent)
    won = _moved(state, worth, row, target, source, mine) + np.where(
        free, 0.0, _moved(state, worth, row, source, target, theirs)
    )
    return _cost(-won, relief, pairs.top - cap, may)


def _copies(
    state: _Layers,
    worth: HolderValue,
    pairs: _Pairs,
    cap: float,
    most: NDArray[np.intp],
    home: BoolArray | None,
) -> FloatArray:
    """Return the cost of a further replica in place of a spare one; it is assumed to take over half of the
    difference.

    A spare replica that serves as much as that stays: its load would come back elsewhere.
    """
    row, target, mine, theirs, free = pairs.row, pairs.target, pairs.mine, pairs.theirs, pairs.free
    spare = free | (state.replicas[row, theirs] > 1)
    if home is not None:
        spare &= free | ~home[row, target, theirs] | ((state.held & home).sum(axis=1)[row, theirs] > 1)
    may = pairs.apart & spare & (state.replicas[row, mine] < most[row])
    taken_over = np.clip(0.5 * (pairs.top - (pairs.other - pairs.back)), 0.0, pairs.sent)
    may &= pairs.back < taken_over
    relief = pairs.top - np.maximum(pairs.top - taken_over, pairs.other - pairs.back + taken_over)
    lost = np.where(free, 0.0, _alone(state, worth, row, target, theirs, 1)) - _alone(
        state, worth, row, target, mine, 0
    )
    return _cost(lost, relief, pairs.top - cap, may)


def _cost(lost: FloatArray, relief: FloatArray, needed: FloatArray, may: NDArray[np.bool_]) -> FloatArray:
    """Return worth lost per load taken off the fullest rank, down to the cap; inf where forbidden, or where
    it takes too little.

    Without that minimum, equal ranks would exchange tiny loads for nothing, and a load too large for all
    would never leave.
    """
    useful = np.where(may, np.minimum(relief, needed), 0.0)
    enough = np.maximum(_LITTLE * useful.max(axis=(1, 2), keepdims=True), _TINY)
    return np.where(useful >= enough, (np.maximum(lost, 0.0) + _TINY) / np.maximum(useful, _TINY), np.inf)


def _moved(state: _Layers, worth: HolderValue, row: Any, to: Any, origin: Any, expert: Any) -> FloatArray:
    """Return the worth gained when an expert's replica moves from a rank to another."""
    own = worth.own[row, to, expert] - worth.own[row, origin, expert]
    if worth.flat:
        return np.asarray(own)
    here, there = worth.node[origin], worth.node[to]
    last, first = state.near[row, here, expert] == 1, state.near[row, there, expert] == 0
    return np.asarray(
        own
        + np.where(
            here == there,
            0.0,
            worth.shared[row, there, expert] * first - worth.shared[row, here, expert] * last,
        )
    )


def _alone(state: _Layers, worth: HolderValue, row: Any, rank: Any, expert: Any, beside: int) -> FloatArray:
    """Return the worth of one replica more, or less, on a rank.

    beside: replicas on its node for which the node's shared worth counts (0 before one more, 1 before one
    less).
    """
    own = worth.own[row, rank, expert]
    if worth.flat:
        return np.asarray(own)
    at = worth.node[rank]
    return np.asarray(own + worth.shared[row, at, expert] * (state.near[row, at, expert] == beside))


def _make(state: _Layers, worth: HolderValue, rows: NDArray[np.intp], found: _Cheapest) -> None:
    """Make the cheaper of the best exchange and the best replica, per layer; update the loads."""
    per, width = found.here.shape[1], found.there.shape[1]
    for at, row in enumerate(rows.tolist()):
        exchange = bool(found.swap[at] <= found.copy[at])
        which = int((found.swap_at if exchange else found.copy_at)[at])
        if not np.isfinite((found.swap if exchange else found.copy)[at]):
            # Nothing helps until the weights are computed again.
            state.load[row] = 0.0
            continue
        mine, theirs = int(found.here[at, which // width]), int(found.there[at, which % width])
        rank, other, expert = mine // per, theirs // per, int(state.table[row, mine])
        sent, returned = state.each[row, mine], state.each[row, theirs]
        if exchange:
            state.put(row, mine, int(state.table[row, theirs]), worth)
            moved, state.each[row, mine], state.each[row, theirs] = sent - returned, returned, sent
        else:
            moved = min(max(0.5 * (state.load[row, rank] - state.load[row, other] + returned), 0.0), sent)
            state.each[row, mine], state.each[row, theirs] = sent - moved, moved
            state.load[row, other] -= returned
        state.put(row, theirs, expert, worth)
        state.load[row, rank] -= moved
        state.load[row, other] += moved
