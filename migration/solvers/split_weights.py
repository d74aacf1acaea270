"""New split weights for a fixed placement: nothing is copied, and the fullest rank of a layer gets less load.
Pure.

Ranks with replicas of one expert are like vessels joined by a pipe. In each round an expert's load flows from
its fuller holders to its emptier ones, in proportion to the difference, divided among the pipes of a rank.
This is diffusion (Cybenko, "Dynamic load balancing for distributed memory multiprocessors", 1989). Flows keep
their momentum (Nesterov, "A method for solving the convex programming problem with convergence rate
O(1/k^2)", 1983). The fixed point has the least sum of squares of rank loads, hence also the least possible
maximum: the feasible loads are the base of a polymatroid, where one point is best for both (Federgruen and
Groenevelt, 1986). The flow starts at the even split and moves only as far as it must. A linear programme of
the same maximum ends in a corner instead, where most experts have one replica that serves all: good for the
window it was fitted to, and bad for a step.

A window's counts are a sample, and weights fit its noise too. Per layer, the weights go only a part of the
way from the even split: the part by which the imbalance exceeds what sampling alone would show (James and
Stein's shrinkage, positive part).
"""

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray, IndexArray, SlotTable
from fleet.placement import EMPTY, FULL, Split
from migration import kernels

ROUNDS = 40
"""Rounds of flow to convergence; within 0.001 of the optimum on graphs of up to 64 ranks."""
_BEFORE_RELEASE = 15
"""Rounds in which ranks keep all load of their own requests."""
_PACE = 0.9
"""Share of a rank's excess that flows off in a round; at 1 and above, two ranks can exchange the same load
forever."""
_TINY = 1e-12
SLACK = 0.005
"""Distance above the mean from which a rank gives away load of its own requests."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitResult:
    """The n slots of a table whose experts have several replicas, flat, by table position. Loads are in mean
    rank loads of the layer."""

    slot: IndexArray
    """[n]: layer * slots + slot, ascending"""
    place: IndexArray
    """[n]: layer * experts + expert"""
    group: IndexArray
    """[n]: the same, numbered without gaps."""
    rank: IndexArray
    """[n]: layer * ranks + rank"""
    whole: FloatArray
    """[n]: total load of the expert."""
    alone: FloatArray
    """[layers * ranks]: load of experts with one replica"""
    groups: int
    idle: IndexArray
    """Positions of slots that hold an expert and serve nothing: their rank is dead, and a live one holds the
    expert."""

    def of_group(self, values: FloatArray) -> FloatArray:
        """[n]: sum of values [n] over the replicas of the slot's expert."""
        return np.asarray(np.bincount(self.group, values, self.groups)[self.group])

    def of_rank(self, served: FloatArray) -> FloatArray:
        """[layers * ranks]: rank loads when the slots serve these loads."""
        return np.asarray(self.alone + np.bincount(self.rank, served, len(self.alone)))

    @property
    def replicas(self) -> FloatArray:
        """[n]: holders of the slot's expert."""
        return np.asarray(np.bincount(self.group, minlength=self.groups)[self.group], np.float64)


def shared(
    table: SlotTable, load: FloatArray, ranks: int, live: NDArray[np.bool_] | None = None
) -> SplitResult:
    """Return the part of a table that weights can change.

    load: float64 [layers, experts] in units of the mean rank load; live: bool [ranks].
    """
    layers, slots = table.shape
    held = table != EMPTY
    place = np.arange(layers)[:, None] * load.shape[1] + np.where(held, table, 0)
    rank = np.arange(slots) // (slots // ranks)
    serving = held if live is None else _serving(held, place, live[rank], load.size)
    flat = np.flatnonzero(serving)
    place = place.ravel()[flat]
    where = (np.arange(layers)[:, None] * ranks + rank).ravel()[flat]
    several = np.bincount(place, minlength=load.size) > 1
    number, flags = np.cumsum(several) - 1, several[place]
    # Positions, as they select several times as fast as flags.
    at, single = np.flatnonzero(flags), np.flatnonzero(~flags)
    whole = load.ravel()
    alone = np.asarray(np.bincount(where[single], whole[place[single]], layers * ranks), np.float64)
    place = place[at]
    return SplitResult(
        flat[at],
        place,
        number[place],
        where[at],
        whole[place],
        alone,
        int(np.count_nonzero(several)),
        np.flatnonzero(held & ~serving),
    )


def _serving(
    held: NDArray[np.bool_], place: IndexArray, alive: NDArray[np.bool_], places: int
) -> NDArray[np.bool_]:
    """Slots that serve: those of live ranks, and those of dead ranks where an expert has no live holder."""
    here = held & alive
    lost = np.bincount(place[here], minlength=places) == 0
    return np.asarray(here | (held & lost[place]))


def diffused(
    parts: SplitResult,
    served: FloatArray,
    rounds: int = ROUNDS,
    own: FloatArray | None = None,
    enough: float = 0.0,
) -> FloatArray:
    """[n]: load that each slot serves after this many rounds of flow, starting from `served` [n].

    own: [n], at most `served`: load that a slot gives away only if its rank is still above `enough` half-way
    through; None: nothing. enough: ranks below this load push nothing away; towards their neighbours they
    count as being at this level.
    """
    if not parts.groups:
        return served.copy()
    library = kernels.compiled()
    if library is None:
        return _diffused(parts, served, rounds, own, enough)
    found = np.empty(len(served))
    library.flow(
        parts.rank,
        parts.group,
        parts.alone,
        parts.groups,
        kernels.plain(served),
        None if own is None else kernels.plain(own),
        rounds,
        enough,
        found,
    )
    return found


def _diffused(
    parts: SplitResult, served: FloatArray, rounds: int, own: FloatArray | None, enough: float
) -> FloatArray:
    """Implement `diffused` in numpy."""
    rank, group, groups = parts.rank, parts.group, parts.groups
    # A pipe's width limits the flow so that a rank with many replicas does not overshoot.
    width = _PACE / np.maximum(np.bincount(rank, minlength=len(parts.alone)), 1)[rank]
    part = width / np.bincount(group, width, groups).take(group)
    # Load of a rank's own requests is held back first, so that locality is given up only where it must be.
    fixed = np.zeros(0) if own is None else own.copy()
    free = served.copy() if own is None else served - own
    total = np.bincount(group, free, groups)
    ahead, since = np.asarray(free, np.float64), 0
    for turn in range(rounds):
        load = parts.of_rank(ahead if own is None else ahead + fixed)
        # Ranks that are still too full after some rounds release it, and momentum restarts.
        if own is not None and turn >= _BEFORE_RELEASE:
            given = (load > enough)[rank] & (fixed > 0)
            if given.any():
                free, fixed = np.where(given, free + fixed, free), np.where(given, 0.0, fixed)
                total = np.bincount(group, free, groups)
                ahead, since = free, 0
        # Flow towards the width-weighted mean level of the expert's holders.
        height = (np.maximum(load, enough) if enough else load).take(rank)
        flow = np.asarray(np.bincount(group, part * height, groups).take(group), np.float64)
        flow -= height
        flow *= width
        flow += ahead
        np.maximum(flow, 0.0, out=flow)
        # Clipping at zero created load: rescale so that each expert keeps its total.
        flow *= (total / (np.bincount(group, flow, groups) + _TINY)).take(group)
        # Nesterov's extrapolation: the next gradient is taken ahead of the current point.
        ahead = flow + since / (since + 3) * (flow - free)
        free, since = flow, since + 1
    return free if own is None else np.asarray(free + fixed)


def reweight(
    table: SlotTable,
    demand: NDArray[Any],
    ranks: int,
    experts: int,
    node: NDArray[np.intp] | None = None,
    *,
    pairs: float | FloatArray | None = None,
    live: NDArray[np.bool_] | None = None,
    slack: float = SLACK,
) -> Split:
    """Return the split of `table` that minimises the load of each layer's fullest rank and keeps requests
    local where it can.

    demand: [ranks, layers, experts] pairs by the rank that serves their requests, or [layers, experts] where
    that is unknown: then it is the same for all ranks. node: int [ranks], numbers from 0; None: one node.
    pairs: (token, k) pairs per layer behind the demand, one number or [layers]; None: the demand is exact.
    live: bool [ranks], the ranks that serve. slack: distance above the mean from which a rank sends away load
    that could stay local (known sources only). ValueError when shapes contradict each other.
    """
    check(table, demand, ranks, experts)
    return reweighted(table, DemandPull(demand, ranks, node, live), pairs=pairs, slack=slack)


def reweighted(
    table: SlotTable,
    wants: "DemandPull",
    *,
    pairs: float | FloatArray | None = None,
    slack: float = SLACK,
) -> Split:
    """Return the split of `reweight`, for callers that ask about several tables of one demand."""
    parts = shared(table, wants.load, wants.ranks, wants.live)
    own = wants.own(parts)
    # Start at the most local split; only the difference from it is subject to shrinkage.
    start = wants.at_home_first(parts, own)
    best = diffused(parts, start, own=own, enough=1.0 + slack) if wants.known else diffused(parts, start)
    return split_of(table, parts, start + trust(parts, start, pairs, len(table)) * (best - start), wants, own)


def check(table: SlotTable, demand: NDArray[Any], ranks: int, experts: int) -> None:
    """Raise ValueError when table [layers, slots] and demand [(ranks,) layers, experts] contradict each
    other."""
    if table.ndim != 2 or ranks < 1 or table.shape[1] % ranks:
        raise ValueError(
            f"split: a table of shape {table.shape} does not fit {ranks} ranks; expected [layers, ranks *"
            " slots_per_rank]"
        )
    if demand.shape not in ((len(table), experts), (ranks, len(table), experts)):
        raise ValueError(
            f"split: demand has shape {demand.shape}; expected {(len(table), experts)} or"
            f" {(ranks, len(table), experts)}"
        )


class DemandPull:
    """Demand in units of each layer's mean rank load. demand, node, live: as for `reweight`."""

    def __init__(
        self, demand: NDArray[Any], ranks: int, node: NDArray[np.intp] | None, live: NDArray[np.bool_] | None
    ) -> None:
        self.ranks, self.live = ranks, live
        self.node = None if node is None or int(node.max()) == 0 else node
        """None: all ranks are equally near to each other."""
        self.known = demand.ndim == 3
        """True if the demand is known by the rank of its requests."""
        load = demand.sum(axis=0, dtype=np.float64) if self.known else np.asarray(demand, np.float64)
        mean = load.sum(axis=1) / (ranks if live is None else max(1, int(live.sum())))
        self._unit = np.where(mean > 0, mean, 1.0)[:, None]
        self.load: FloatArray = load / self._unit
        """[layers, experts]"""
        self._demand = demand
        self._layers: IndexArray | None = None
        """Layers of the demand that this is about; None: all."""

    def some(self, layers: IndexArray) -> "DemandPull":
        """Return the same of some layers of the demand."""
        found = copy(self)
        found.load, found._unit = self.load[layers], self._unit[layers]
        found._layers = layers if self._layers is None else self._layers[layers]
        if self.node is not None and self.known:
            found._by_node = self._by_node.reshape(-1, *self.load.shape)[:, layers].reshape(
                len(self._by_node), -1
            )
        return found

    def own(self, parts: SplitResult) -> FloatArray:
        """[n]: demand of the slot's own rank for its expert."""
        if not self.known:
            return np.asarray(parts.whole / self.ranks)
        layer, expert = np.divmod(parts.place, self.load.shape[1])
        at = layer if self._layers is None else self._layers[layer]
        return np.asarray(self._demand[parts.rank % self.ranks, at, expert] / self._unit[layer, 0])

    def of_node(self, parts: SplitResult) -> FloatArray:
        """[n]: demand of the slot's node for its expert."""
        assert self.node is not None
        node = self.node[parts.rank % self.ranks]
        if not self.known:
            return np.asarray(np.bincount(self.node)[node] / self.ranks * self.load.reshape(-1)[parts.place])
        return np.asarray(self._by_node[node, parts.place] / self._unit[parts.place // self.load.shape[1], 0])

    def cell(self, parts: SplitResult) -> IndexArray:
        """[n]: number of the slot's expert on its node."""
        assert self.node is not None
        return np.asarray(self.node[parts.rank % self.ranks] * parts.groups + parts.group)

    @cached_property
    def _by_node(self) -> FloatArray:
        """[nodes, layers * experts]: the demand of each node's ranks."""
        assert self.node is not None
        found = np.zeros((int(self.node.max()) + 1, *self.load.shape))
        for node, demand in zip(self.node.tolist(), self._demand, strict=True):
            found[node] += demand
        return found.reshape(len(found), -1)

    def near_first(self, parts: SplitResult, own: FloatArray) -> FloatArray:
        """[n]: loads when a node's replicas share evenly what its ranks do not serve of its demand."""
        if self.node is None:
            return np.zeros_like(own)
        cell = self.cell(parts)
        left = np.maximum(self.of_node(parts) - np.bincount(cell, own)[cell], 0.0)
        return np.asarray(left / np.bincount(cell)[cell])

    def at_home_first(self, parts: SplitResult, own: FloatArray) -> FloatArray:
        """[n]: loads when every rank serves its own demand, then a node's replicas share the rest of the
        node's demand evenly, then all replicas share what remains."""
        near = self.near_first(parts, own)
        return np.asarray(
            own + near + np.maximum(parts.whole - parts.of_group(own + near), 0.0) / parts.replicas
        )


def trust(parts: SplitResult, start: FloatArray, pairs: float | FloatArray | None, layers: int) -> FloatArray:
    """[n]: part of the way from the start to go: 1 - (sampling variance of a rank's load) / (its observed
    variance)."""
    if pairs is None:
        return np.ones(len(start))
    ranks = len(parts.alone) // layers
    per_rank = np.maximum(np.broadcast_to(np.asarray(pairs, np.float64), (layers,)) / ranks, _TINY)
    squares = np.bincount(parts.rank, start * start / np.maximum(parts.whole, _TINY), layers * ranks)
    noise = (parts.alone + squares).reshape(layers, ranks).mean(axis=1) / per_rank
    seen = ((parts.of_rank(start).reshape(layers, ranks) - 1.0) ** 2).mean(axis=1)
    return np.asarray(np.maximum(0.0, 1.0 - noise / np.maximum(seen, _TINY))[parts.rank // ranks])


def split_of(
    table: SlotTable, parts: SplitResult, served: FloatArray, wants: DemandPull, own: FloatArray | None = None
) -> Split:
    """Return the split under which slots serve these loads ([n]), as much as possible for their own rank,
    then for their node.

    own: `wants.own(parts)`, where known.
    """
    own = wants.own(parts) if own is None else own
    kept = np.minimum(own, served)
    rest = served - kept
    keep = np.where(table.reshape(-1) == EMPTY, np.uint16(0), np.uint16(FULL))
    spill, near = keep.copy(), np.zeros_like(keep)
    if wants.node is not None:
        near[parts.slot], rest = _near(parts, kept, rest, wants)
    keep[parts.idle] = spill[parts.idle] = 0
    keep[parts.slot] = np.rint(FULL * np.where(own > 0, kept / np.maximum(own, _TINY), 1.0))
    spill[parts.slot] = _in_full(parts, rest)
    return Split(keep.reshape(table.shape), spill.reshape(table.shape), near.reshape(table.shape))


def _in_full(parts: SplitResult, rest: FloatArray) -> NDArray[np.uint16]:
    """[n]: shares of FULL in proportion to rest, that add up to FULL for each expert; even where rest is
    zero."""
    total = parts.of_group(rest)
    share = np.where(total > _TINY, rest / np.maximum(total, _TINY), 1.0 / parts.replicas)
    # NumPy sorts numbers of 16 bits by radix.
    group = parts.group.astype(np.uint16) if parts.groups <= 1 << 16 else parts.group
    order = np.argsort(group, kind="stable")
    found = np.empty(len(share), np.uint16)
    # Round a running sum: every expert begins and ends at a multiple of FULL.
    found[order] = np.diff(np.rint(FULL * np.cumsum(share[order])), prepend=0.0)
    return found


def _near(
    parts: SplitResult, kept: FloatArray, rest: FloatArray, wants: DemandPull
) -> tuple[NDArray[np.uint16], FloatArray]:
    """Return (near [n], [n] load served for other nodes' tokens)."""
    cell = wants.cell(parts)
    left = np.maximum(wants.of_node(parts) - np.bincount(cell, kept)[cell], 0.0)
    offered = np.bincount(cell, rest)[cell]
    near = rest / np.maximum(np.maximum(left, offered), _TINY)
    away = np.maximum(1.0 - left / np.maximum(offered, _TINY), 0.0)
    return np.rint(FULL * near).astype(np.uint16), np.asarray(rest * away)
