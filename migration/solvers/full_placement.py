"""Place all experts from nothing, for balance alone: number of replicas, and the ranks that hold them. Pure.

An expert's load is shared evenly among its replicas. Layers are independent, and all are processed at once.
Three steps:

1. Counts (`migration.solvers.replica_counts`), by the divisor rule that makes the heaviest replica as light
as possible. With few slots per rank that is not all that matters: of any k * ranks + 1 replicas some rank
holds k + 1. So layers that miss their bound are tried once more with a signpost below 0: fewer replicas for
experts of most demand, and more for those of middling load.

2. Dealing. Replicas from the heaviest to the lightest, in rounds of one for each rank. In each round the
heaviest goes to the least loaded rank. Ranks that are full with their first replica get the lightest ones
beside it.

3. Trading. Heavy ranks are paired with light ones, differently in each round. A pair makes the exchange that
brings its two loads closest: one expert for one, or two for two.

Small engines are then improved slot by slot (`migration.solvers.local_search`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import Float32Array, FloatArray, IntArray, SlotTable
from fleet.placement import EMPTY, repeated
from migration import kernels
from migration.solvers.local_search import cells, fullest, local_search
from migration.solvers.replica_counts import CountBounds, floor, pigeonhole, replica_counts, replicas

SPARING = -0.3
"""Signpost of the second attempt."""
NEAR = 0.004
"""Relative distance of a layer's fullest rank from the bound above which the layer is tried once more."""
CLOSE = 1e-4
"""Relative distance from the bound below which a layer is left unchanged."""
ALONE = 1 << 16
ROUNDS = ((2, 8), (8, 12), (ALONE, 40))
"""(part, times): the heaviest 1/part of the ranks trade in this number of rounds. At the end only the
heaviest rank trades, with one other rank after another."""
MAX_PAIR_EXCHANGES = 500
"""Most two-for-two exchanges to examine per pair of ranks. Ranks with more have enough experts for single
exchanges."""
SMALL, EMPTIES = 1 << 16, 3
"""Local search runs where one step examines at most SMALL numbers; also with up to EMPTIES slots left
empty."""
_NEVER = (np.float32(np.inf), np.float32(-np.inf))
"""Weights, out and back, of replicas that must not be exchanged."""
_TIE = 1e-12
"""Added per rank: of nearly equal loads that of the lower rank counts as the higher one."""
_LEAST = 1e-6
"""Relative change of a rank's load that counts as none."""


def full_placement(
    load: NDArray[Any],
    ranks: int,
    slots_per_rank: int,
    *,
    max_replicas: int | None = None,
    min_replicas: NDArray[np.integer[Any]] | None = None,
    node: NDArray[np.intp] | None = None,
    live: NDArray[np.bool_] | None = None,
) -> SlotTable:
    """int16 [layers, ranks * slots_per_rank]: the best-balanced placement found for load [layers, experts]
    (any unit).

    No rank holds an expert twice; no expert has more replicas than `max_replicas` (None: one per rank), and
    slots beyond that stay empty. min_replicas: int [layers, experts], 1 where None. node: int [ranks], from
    0: node of each rank; an expert's replicas are spread over nodes as far as that costs no balance. live:
    bool [ranks], the slots of the others stay empty; None: all. ValueError when the experts do not fit, or a
    load is negative or not finite.
    """
    # Dead ranks: solve for the live ones, then expand.
    if live is not None and not live.all():
        live_ranks = np.flatnonzero(live)
        nodes = None if node is None else np.unique(node[live_ranks], return_inverse=True)[1]
        return _expanded(
            full_placement(
                load,
                len(live_ranks),
                slots_per_rank,
                max_replicas=max_replicas,
                min_replicas=min_replicas,
                node=nodes,
            ),
            live_ranks,
            ranks,
        )
    demand = _checked(load, ranks, slots_per_rank)
    bounds = CountBounds.of(demand, ranks, slots_per_rank, max_replicas, min_replicas)
    even = replica_counts(demand, bounds)
    packing, lowest = _packed(demand, even, ranks, slots_per_rank), floor(demand, even, ranks, slots_per_rank)
    table, most = _table(packing, demand.shape[1]), packing.fullest
    # Only layers far from the bound pay for the second attempt.
    again = np.flatnonzero(most > (1.0 + NEAR) * lowest)
    if len(again):
        other = _packed(
            demand[again],
            replica_counts(demand[again], bounds.of_layers(again), SPARING),
            ranks,
            slots_per_rank,
        )
        better = other.fullest < most[again]
        table[again[better]] = _table(other, demand.shape[1])[better]
        most[again[better]] = other.fullest[better]
    # Local search is expensive, so it is for small engines only.
    short = np.flatnonzero(most > (1.0 + CLOSE) * lowest)
    if len(short) and cells(table[short], demand.shape[1], ranks) <= SMALL:
        table[short] = _tried(table[short], demand[short], bounds.of_layers(short), ranks)
    return table if node is None else _spread(table, demand, np.asarray(node))


def _expanded(placed: SlotTable, live_ranks: NDArray[np.intp], ranks: int) -> SlotTable:
    """Expand a table of the ranks `live_ranks` to one of all ranks."""
    layers = len(placed)
    table = np.full((layers, ranks, placed.shape[1] // len(live_ranks)), EMPTY, np.int16)
    table[:, live_ranks] = placed.reshape(layers, len(live_ranks), -1)
    return table.reshape(layers, -1)


def bound(load: NDArray[Any], ranks: int, slots_per_rank: int, max_replicas: int | None = None) -> FloatArray:
    """float64 [layers]: upper bound of the balance of any placement into these slots under the even split.

    Some rank carries at least the mean. Some rank also carries at least the heaviest replica, which is
    lightest under the divisor rule of s = 0, and beside it the lightest of the experts that the other ranks
    have no slots for.
    """
    demand = _checked(load, ranks, slots_per_rank)
    even = replica_counts(demand, CountBounds.of(demand, ranks, slots_per_rank, max_replicas, None))
    return np.asarray(demand.sum(axis=1) / ranks / floor(demand, even, ranks, slots_per_rank))


def _checked(load: NDArray[Any], ranks: int, slots_per_rank: int) -> FloatArray:
    """Return the load, made positive everywhere: experts without demand share the left-over replicas."""
    demand = np.asarray(load, np.float64)
    if demand.ndim != 2 or not demand.size:
        raise ValueError(f"placing: load has shape {demand.shape}; expected [layers, experts]")
    if ranks < 1 or demand.shape[1] > ranks * slots_per_rank:
        raise ValueError(
            f"placing: {demand.shape[1]} experts do not fit into {slots_per_rank} slots on each of {ranks}"
            " ranks; give them more slots"
        )
    if not (np.isfinite(demand).all() and (demand >= 0).all()):
        raise ValueError("placing: a load is negative or not finite; give counts or rates")
    total = demand.sum(axis=1, keepdims=True)
    return np.asarray(demand + np.where(total > 0, 1e-12 * total, 1.0))


# Dealing and trading


@dataclass(frozen=True, slots=True)
class _Packing:
    """Assignment of replicas to ranks. A *place* is a rank in a layer, place = layer * ranks + rank. Expert
    number `experts` stands for an empty slot, of weight 0."""

    unit: FloatArray
    """[layers]: lower bound of the fullest rank's load, given the counts; weights and loads are relative to
    it."""
    expert: NDArray[np.int64]
    """[layers, ranks, slots_per_rank]."""
    weight: Float32Array
    """[places, slots_per_rank]; single precision, as many are compared."""
    loads: FloatArray
    """[places]"""
    held: NDArray[np.bool_]
    """[places, experts + 1]: True if the place holds the expert; never for the empty slot."""

    @property
    def by_layer(self) -> FloatArray:
        return self.loads.reshape(len(self.unit), -1)

    @property
    def fullest(self) -> FloatArray:
        """float64 [layers], in units of the load."""
        return np.asarray(self.by_layer.max(axis=1) * self.unit)


def _packed(load: FloatArray, counts: IntArray, ranks: int, per_rank: int) -> _Packing:
    packing = _dealt(load, counts, ranks, per_rank)
    twos = 4 <= per_rank and (per_rank * (per_rank - 1) // 2) ** 2 <= MAX_PAIR_EXCHANGES
    rounds = [max(1, ranks // part) for part, times in ROUNDS for _ in range(times if ranks > 1 else 0)]
    library = kernels.compiled()
    if library is None or not rounds:
        _traded(packing, rounds, twos)
    else:
        library.placement_traded(
            packing.expert,
            packing.weight,
            packing.loads,
            packing.held,
            np.array(rounds, np.int64),
            ranks,
            twos,
        )
    return packing


def _traded(packing: _Packing, rounds: list[int], twos: bool) -> None:
    """Trade in place, with this number of heavy ranks in each round."""
    for turn, count in enumerate(rounds):
        layers = np.flatnonzero(packing.by_layer.max(axis=1) > 1.0 + CLOSE)
        if not len(layers):
            break
        some = twos and count < packing.by_layer.shape[1] // 2
        _trade(packing, *_pairs(packing.by_layer, layers, count, turn), some)


def _dealt(load: FloatArray, counts: IntArray, ranks: int, per_rank: int) -> _Packing:
    layers, experts = load.shape
    # Relative to the bound, one tolerance serves all layers.
    unit = np.maximum(load.sum(axis=1) / ranks, pigeonhole(load, counts, ranks, per_rank))
    replica, heavy = replicas(load / counts / unit[:, None], counts, ranks * per_rank)
    full_up = _full_up(heavy, ranks)
    expert = np.empty((layers, ranks, per_rank), np.int64)
    while True:
        place = _rounds(full_up, ranks, per_rank)
        weight, loads = _deal(
            expert,
            np.take_along_axis(replica, place, axis=1),
            np.take_along_axis(heavy, place, axis=1),
            full_up,
            experts,
        )
        table = np.where(expert == experts, EMPTY, expert).astype(np.int16)
        again = repeated(table.reshape(layers, -1), ranks)
        twice = np.flatnonzero((full_up > 0) & again.any(axis=1))
        if not len(twice):
            held = np.zeros((layers * ranks, experts + 1), bool)
            np.put_along_axis(held, expert.reshape(-1, per_rank), True, axis=1)
            held[:, experts] = False
            return _Packing(
                unit, expert, weight.reshape(-1, per_rank).astype(np.float32), loads.ravel(), held
            )
        # A light expert with several replicas came twice to a rank: deal those layers in the simple order,
        # where that cannot happen.
        full_up[twice] = 0


def _full_up(heavy: FloatArray, ranks: int) -> IntArray:
    """int64 [layers]: number of the heaviest replicas that each fill a rank, even beside the lightest ones.

    A rank of S slots holds such a replica and the S - 1 lightest remaining ones. heavy: [layers, slots],
    falling.
    """
    layers = len(heavy)
    together = heavy[:, :ranks] + heavy[:, ranks:][:, ::-1].reshape(layers, ranks, -1).sum(axis=2)
    left = heavy.sum(axis=1, keepdims=True) - together.cumsum(axis=1) + together
    return np.asarray(
        np.logical_and.accumulate(together >= left / (ranks - np.arange(ranks)), axis=1).sum(axis=1) % ranks
    )


def _rounds(full_up: IntArray, ranks: int, per_rank: int) -> IntArray:
    """[layers, slots]: index, among the replicas sorted by weight, in the order of dealing.

    Ranks that are full with their first replica are last in each later round and get the lightest of all: the
    lightest for the fullest.
    """
    last, at = full_up[:, None, None], np.arange(ranks)
    turn = np.arange(per_rank)[:, None]
    usual = ranks + (turn - 1) * (ranks - last) + at
    light = ranks * per_rank - 1 - (ranks - 1 - at) * (per_rank - 1) - (turn - 1)
    later = np.where(at < ranks - last, usual, light)
    return np.where(turn == 0, at, later).reshape(len(full_up), -1)


def _deal(
    expert: IntArray, replica: IntArray, heavy: FloatArray, full_up: IntArray, experts: int
) -> tuple[FloatArray, FloatArray]:
    """Deal replicas and their weights, [layers, slots] in dealing order, into `expert`; return weights there,
    and rank loads."""
    layers, ranks, per_rank = expert.shape
    replica, heavy = replica.reshape(layers, per_rank, ranks), heavy.reshape(layers, per_rank, ranks)
    weight, loads = np.empty(expert.shape), np.zeros((layers, ranks))
    rows = np.arange(layers)[:, None]
    # The first round goes to ranks in order. In later rounds, ranks that are full with their first replica
    # come last, the fullest at the very end.
    last = 1e3 * np.maximum(full_up[:, None] - np.arange(ranks), 0)
    for at in range(per_rank):
        first = replica[:, at, :1]
        taken = (expert[:, :, at - 1] == first) & (first < experts) if at else np.zeros((layers, ranks), bool)
        order = _turns(loads + last * (at > 0), taken, (replica[:, at] == first).sum(axis=1, keepdims=True))
        expert[rows, order, at] = replica[:, at]
        weight[rows, order, at] = heavy[:, at]
        loads[rows, order] += heavy[:, at]
    return weight, loads


def _turns(loads: FloatArray, taken: NDArray[np.bool_], run: IntArray) -> NDArray[np.intp]:
    """[layers, ranks]: order in which ranks are dealt to, least load first.

    Where some ranks have `taken` the first expert of this round in the round before, its `run` remaining
    replicas go to other ranks.
    """
    if not taken.any():
        return np.argsort(loads, axis=1, kind="stable")
    free = np.argsort(np.where(taken, np.inf, loads), axis=1, kind="stable")
    ahead = np.zeros(loads.shape, bool)
    np.put_along_axis(
        ahead, free, (np.arange(loads.shape[1]) < run) & taken.any(axis=1, keepdims=True), axis=1
    )
    return np.lexsort((loads, ~ahead), axis=1)


def _pairs(
    loads: FloatArray, layers: NDArray[np.intp], count: int, turn: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return places [n] of heavy ranks and places [n] of their partners, for `count` ranks of each of these
    layers.

    Partners are the lightest ranks first and shift every turn; a single heavy rank meets the next heaviest
    first.
    """
    ranks = loads.shape[1]
    order = np.argsort(np.arange(ranks) * _TIE - loads[layers], axis=1, kind="stable")
    partner = (
        1 + turn % (ranks - 1) if count == 1 else ranks - 1 - (np.arange(count) + turn) % (ranks - count)
    )
    place = layers[:, None] * ranks
    return (place + order[:, :count]).ravel(), (place + order[:, np.atleast_1d(partner)]).ravel()


def _trade(packing: _Packing, heavy: NDArray[np.intp], light: NDArray[np.intp], twos: bool) -> None:
    """Make the exchange that brings each pair of places closest, if one brings them closer."""
    per_rank = packing.weight.shape[1]
    expert = packing.expert.reshape(-1, per_rank)
    wide = packing.held.shape[1]
    barred = (
        packing.held.take(other[:, None] * wide + expert[own])
        for own, other in ((heavy, light), (light, heavy))
    )
    out, back = (
        np.where(bar, bad, packing.weight[own])
        for bar, bad, own in zip(barred, _NEVER, (heavy, light), strict=True)
    )
    aim = (0.5 * (packing.loads[heavy] - packing.loads[light])).astype(np.float32)
    best, missed = _nearest(out, back, aim)
    one = np.flatnonzero(missed < aim - _LEAST)
    if twos:
        first, second = np.triu_indices(per_rank, 1)
        best_two, missed_two = _nearest(out[:, first] + out[:, second], back[:, first] + back[:, second], aim)
        one, two = (
            np.flatnonzero((missed < aim - _LEAST) & (missed <= missed_two)),
            np.flatnonzero(missed_two < np.minimum(aim - _LEAST, missed)),
        )
        for side in (first, second):
            _exchange(
                packing, heavy[two], light[two], *(side[at] for at in np.divmod(best_two[two], len(first)))
            )
    _exchange(packing, heavy[one], light[one], *np.divmod(best[one], per_rank))


def _nearest(
    out: Float32Array, back: Float32Array, aim: Float32Array
) -> tuple[NDArray[np.intp], Float32Array]:
    """[n]: the exchange of weights out [n, gone] against back [n, come] nearest to the target change [n], and
    its distance."""
    off = (out - aim[:, None])[:, :, None] - back[:, None, :]
    missed = np.abs(off, out=off).reshape(len(aim), -1)
    best = missed.argmin(axis=1)
    return best, missed[np.arange(len(best)), best]


def _exchange(
    packing: _Packing,
    heavy: NDArray[np.intp],
    light: NDArray[np.intp],
    gone: NDArray[np.intp],
    come: NDArray[np.intp],
) -> None:
    """Exchange the contents of slots `gone` and `come` of places `heavy` and `light`; each place occurs
    once."""
    expert, empty = packing.expert.reshape(-1, packing.weight.shape[1]), packing.held.shape[1] - 1
    leaving, coming = expert[heavy, gone], expert[light, come]
    change = packing.weight[heavy, gone] - packing.weight[light, come]
    expert[heavy, gone], expert[light, come] = coming, leaving
    packing.weight[heavy, gone] -= change
    packing.weight[light, come] += change
    packing.loads[heavy] -= change
    packing.loads[light] += change
    packing.held[heavy, leaving] = packing.held[light, coming] = False
    packing.held[heavy, coming] = coming != empty
    packing.held[light, leaving] = leaving != empty


# Small engines


def _table(packing: _Packing, empty: int) -> SlotTable:
    return (
        np.where(packing.expert == empty, EMPTY, packing.expert)
        .reshape(len(packing.unit), -1)
        .astype(np.int16)
    )


def _tried(table: SlotTable, load: FloatArray, bounds: CountBounds, ranks: int) -> SlotTable:
    """Return the best of this placement and of those with one, two or three slots left empty, after local
    search.

    Where slots are few, a replica that no rank has room for does harm.
    """
    layers, slots = table.shape
    experts = load.shape[1]
    totals = range(max(int(bounds.least.sum(axis=1).max()), slots - EMPTIES), slots)
    counts = [replica_counts(load, bounds._replace(slots=total)) for total in totals]
    starts = np.concatenate(
        [table, *(_table(_packed(load, count, ranks, slots // ranks), experts) for count in counts)]
    )
    loads = np.tile(load, (len(counts) + 1, 1))
    found = local_search(starts, loads, ranks, np.tile(bounds.least, (len(counts) + 1, 1)), bounds.most)
    best = fullest(found, loads, ranks).reshape(-1, layers).argmin(axis=0)
    return np.asarray(found.reshape(-1, layers, slots)[best, np.arange(layers)])


# Nodes


def _spread(table: SlotTable, load: FloatArray, node: NDArray[np.intp]) -> SlotTable:
    """Deal the same sets of experts, one per rank, so that replicas of an expert are on different nodes.

    Sets with the most shared load come first. Each goes to the node with a free rank that holds least of it
    already. Layers that do not improve stay unchanged.
    """
    layers, ranks = len(table), len(node)
    sets = table.reshape(layers, ranks, -1)
    home = _nodes_of(sets, _shared(sets, load), np.bincount(node), load.shape[1])
    source = np.empty((layers, ranks), np.intp)
    # Sets of a node go to that node's ranks, in any order.
    source[:, np.argsort(node, kind="stable")] = np.argsort(home, axis=1, kind="stable")
    spread = np.take_along_axis(sets, source[:, :, None], axis=1).reshape(table.shape)
    # Greedy may do harm: keep it only where more load reaches its expert on the node.
    better = _reach(spread, load, node) > _reach(table, load, node)
    return np.where(better[:, None], spread, table)


def _nodes_of(sets: SlotTable, shared: FloatArray, room: IntArray, experts: int) -> NDArray[np.intp]:
    """int [layers, ranks]: node of each set [slots_per_rank], one after the other, the one with most shared
    load first.

    room: ranks of each node.
    """
    layers, ranks = sets.shape[:2]
    order = np.argsort(-shared.sum(axis=2), axis=1, kind="stable")
    home = np.empty((layers, ranks), np.intp)
    library = kernels.compiled()
    if library is not None:
        library.spread_sets(kernels.plain(sets), kernels.plain(shared), order, room, experts, layers, home)
        return home
    left, rows = np.tile(room, (layers, 1)), np.arange(layers)
    there = np.zeros((layers, len(room), experts + 1))
    # All layers at once.
    for of in order.T:
        held = sets[rows, of]
        overlap = (
            np.take_along_axis(there, held[:, None, :].astype(np.intp), axis=2) * shared[rows, of][:, None, :]
        ).sum(axis=2)
        chosen = np.where(left > 0, overlap, np.inf).argmin(axis=1)
        home[rows, of] = chosen
        left[rows, chosen] -= 1
        there[rows[:, None], chosen[:, None], held] = 1.0
    return home


def _reach(table: SlotTable, load: FloatArray, node: NDArray[np.intp]) -> FloatArray:
    """float64 [layers]: load that finds its expert on a node, summed over nodes."""
    layers, experts = load.shape
    there = np.zeros((layers, int(node.max()) + 1, experts + 1), bool)
    there[
        np.arange(layers)[:, None], node[np.arange(table.shape[1]) * len(node) // table.shape[1]], table
    ] = True
    return np.asarray((there[:, :, :experts].sum(axis=1) * load).sum(axis=1))


def _shared(table: SlotTable, load: FloatArray) -> FloatArray:
    """float64 [layers, ranks, slots_per_rank]: load of the expert in each slot, 0 where it has no other
    replica."""
    layers, experts = load.shape
    place = np.arange(layers)[:, None, None] * experts + table
    counts = np.bincount(place[table != EMPTY], minlength=load.size)
    several = (table != EMPTY) & (counts[place] > 1)
    return np.where(several, load.ravel()[place], 0.0)
