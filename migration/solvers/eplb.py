"""DeepSeek's Expert Parallelism Load Balancer (EPLB), as a policy and for comparison; written from its
published description. Pure.

Both variants are greedy, and use loads only:

- Replication: every expert once; then, one by one, a replica of the expert with the most load per replica.
- Packing: from the heaviest to the lightest, each to the pack with the least load that has room.

Global: replicas over all ranks. Hierarchical, where groups of experts divide by nodes: groups are packed into
nodes, experts are replicated within their node, replicas are packed into the node's ranks. Ties go to the
lowest index. The result is a *raw map*, which may hold an expert twice on a rank. Scores refer to the raw
map, with each replica at its even share. `as_placement` turns it into a table that can be served, and
`raw_shares` gives the split with which that table balances as the raw map does.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IntArray
from fleet.placement import EMPTY


def eplb_global(load: NDArray[Any], slots: int, ranks: int) -> IntArray:
    """int64 [layers, slots], rank-major: the expert in each slot.

    load: [layers, experts]. ValueError when slots do not divide by ranks or do not hold all experts.
    """
    return eplb_hierarchical(load, slots, 1, 1, ranks)


def eplb_hierarchical(load: NDArray[Any], slots: int, groups: int, nodes: int, ranks: int) -> IntArray:
    """int64 [layers, slots], rank-major, nodes one after the other.

    groups: of consecutive experts, equally many in each; every node gets equally many groups. ValueError when
    experts do not divide by groups, groups, ranks or slots by nodes, slots by ranks, or there are fewer slots
    than experts.
    """
    weight = np.asarray(load, np.float64)
    layers, experts = weight.shape
    _check(experts, slots, groups, nodes, ranks)
    size = experts // groups
    node, nth = packed(weight.reshape(layers, groups, size).sum(axis=2), nodes)
    first = (node * (groups // nodes) + nth) * size
    place = (first[:, :, None] + np.arange(size)).reshape(layers, experts)
    expert_at = np.argsort(place, axis=1)
    ordered = np.take_along_axis(weight, expert_at, axis=1).reshape(layers * nodes, experts // nodes)
    of_replica, counts = replicated(ordered, slots // nodes)
    rank, slot = packed(np.take_along_axis(ordered / counts, of_replica, axis=1), ranks // nodes)
    raw = np.empty_like(of_replica)
    np.put_along_axis(raw, rank * (slots // ranks) + slot, of_replica, axis=1)
    raw = raw.reshape(layers, nodes, -1) + np.arange(nodes)[:, None] * (experts // nodes)
    return np.asarray(np.take_along_axis(expert_at, raw.reshape(layers, slots), axis=1))


def _check(experts: int, slots: int, groups: int, nodes: int, ranks: int) -> None:
    for what, many, whose, few in (
        ("experts", experts, "groups", groups),
        ("groups", groups, "nodes", nodes),
        ("ranks", ranks, "nodes", nodes),
        ("slots", slots, "ranks", ranks),
    ):
        if few < 1 or many % few:
            raise ValueError(
                f"eplb: {many} {what} do not divide by {few} {whose}; the global variant needs one group and"
                " one node"
            )
    if slots < experts:
        raise ValueError(f"eplb: {slots} slots do not hold {experts} experts")


def replicated(weight: FloatArray, slots: int) -> tuple[IntArray, IntArray]:
    """Return the expert of each replica [rows, slots], the first replicas in order; and their numbers [rows,
    experts].

    weight: [rows, experts].
    """
    rows, experts = weight.shape
    of_replica = np.empty((rows, slots), np.int64)
    of_replica[:, :experts] = np.arange(experts)
    counts = np.ones((rows, experts), np.int64)
    row = np.arange(rows)
    for at in range(experts, slots):
        heaviest = (weight / counts).argmax(axis=1)
        of_replica[:, at] = heaviest
        counts[row, heaviest] += 1
    return of_replica, counts


def packed(weight: FloatArray, packs: int) -> tuple[IntArray, IntArray]:
    """Return the pack of each item, and its place there: [rows, items] each.

    weight: [rows, items]; every pack takes items / packs of them.
    """
    rows, items = weight.shape
    room = items // packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), np.int64)
    pack, place = np.empty((rows, items), np.int64), np.empty((rows, items), np.int64)
    loads, filled = np.zeros((rows, packs)), np.zeros((rows, packs), np.int64)
    row = np.arange(rows)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = np.where(filled < room, loads, np.inf).argmin(axis=1)
        pack[row, item], place[row, item] = lightest, filled[row, lightest]
        loads[row, lightest] += weight[row, item]
        filled[row, lightest] += 1
    return pack, place


def as_placement(raw: NDArray[Any], ranks: int) -> NDArray[np.int16]:
    """int16 [layers, slots]: the map with an empty slot in place of a duplicate on the same rank.

    Another replica of some expert there would take load to a rank that was packed full without it: it costs
    more balance than it gains.
    """
    table = np.array(raw, np.int16).reshape(len(raw), ranks, -1)
    table[_repeats(table)] = EMPTY
    return table.reshape(raw.shape)


def raw_shares(raw: NDArray[Any], ranks: int) -> FloatArray:
    """float64 [layers, slots]: shares of the slots of `as_placement` for which every rank has the load that
    the raw map gives it.

    A slot gets one part for each slot in which its rank had the expert.
    """
    layers, slots = raw.shape
    table = np.asarray(raw).reshape(layers, ranks, 1, -1)
    twins = (table == table.swapaxes(2, 3)).sum(axis=3)
    counts = np.bincount(
        (np.arange(layers)[:, None] * slots + raw).ravel(), minlength=layers * slots
    ).reshape(layers, slots)
    share = twins.reshape(layers, slots) / np.take_along_axis(counts, np.asarray(raw), axis=1)
    return np.where(as_placement(raw, ranks) == EMPTY, 0.0, share)


def _repeats(table: NDArray[np.int16]) -> NDArray[np.bool_]:
    """bool as table [layers, ranks, slots_per_rank]: True if an earlier slot of the rank holds the same
    expert."""
    order = np.argsort(table, axis=2, kind="stable")
    ordered = np.take_along_axis(table, order, axis=2)
    same = np.zeros(table.shape, bool)
    same[:, :, 1:] = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)
    repeated = np.zeros(table.shape, bool)
    np.put_along_axis(repeated, order, same, axis=2)
    return repeated
