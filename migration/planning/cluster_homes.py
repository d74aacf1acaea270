"""Choose the homes of request clusters together with the placement of experts. Pure.

Routing alone, or placement alone, saves a point or two; together they save ten to fifteen: clusters go where
their experts are, and experts where their clusters are. The two halves are solved in turn, each for the
other's last answer, from several starts, until nothing changes. Route: a transportation problem of clusters
and ranks, solved exactly. Place: `migration.solvers.locality_placement`. The saving grows in every round.
Equal ranks are interchangeable, so the result is finally relabelled to match the present placement, so that
as little as possible moves.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fleet.arrays import BoolArray, FloatArray, SlotTable
from migration.planning.findings import Finding, FindingCode, Infeasible
from migration.solvers.holder_value import HolderValue
from migration.solvers.load_cap import held_of
from migration.solvers.locality_placement import (
    LocalityPlacement,
    LocalityProblem,
    locality_table,
    measured,
    placed,
    worth_of,
)
from migration.solvers.transportation import transported

_ROUNDS = 6
_FIRST = 3
"""Rounds from every start; only the best start is continued."""
_SHUFFLES = (
    0.6180339887498949,
    0.7548776662466927,
    0.5698402909980532,
    0.8191725133961645,
    0.6710436067037893,
    0.5497004779019703,
)
"""Fractions whose multiples are in no order (of the golden ratio and its generalisations). Each gives a
further start, with clusters in the order of its multiples."""
_FEW_SHUFFLES, _MANY_RANKS = 1, 16
"""Number of shuffled starts on more than _MANY_RANKS ranks, where a round takes longer and starts differ
less."""
_CELLS = 60_000
"""layers x ranks x experts that the search examines. Some layers are representative; the placement itself
covers all."""
_EXCHANGES = 6
_STILL = 1e-4
"""Relative change of the saving below which the search has converged."""
_TINY = 1e-12
_ROUNDING = 1e-6
"""Slack of a capacity, for shares that add up to one except for rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class ClusterTraffic:
    """Clusters of requests and their demand. ValueError when shapes do not fit."""

    profiles: NDArray[Any]
    """[K, layers, experts], rows sum to 1."""
    shares: NDArray[Any]
    """[K] of all (token, k) pairs; 0: unused."""
    leak: float = 0.0
    """Part of requests that goes anywhere, regardless of homes."""
    capacity: NDArray[np.float64] | None = None
    """[ranks], the part of all requests that a rank may be home to; None: its even part."""

    def __post_init__(self) -> None:
        if self.profiles.ndim != 3 or self.shares.shape != self.profiles.shape[:1]:
            raise ValueError(
                f"homes: profiles have shape {self.profiles.shape} and shares {self.shares.shape}; expected"
                " [K, layers, experts] and [K]"
            )
        if not 0 <= self.leak <= 1:
            raise ValueError(f"homes: leak must be from 0 to 1, not {self.leak}")
        if self.capacity is not None and self.capacity.sum() < 1.0 - 1e-9:
            raise ValueError(
                f"homes: the ranks' capacity adds up to {self.capacity.sum():.3f}; all requests need 1"
            )

    def room_for(self, ranks: int) -> FloatArray:
        """[ranks]: capacity."""
        return np.full(ranks, 1.0 / ranks) if self.capacity is None else self.capacity

    def demand(self, homes: FloatArray) -> FloatArray:
        """float64 [ranks, layers, experts]: demand of each rank's requests, as parts of all pairs.

        homes: [K, ranks]; a row of zeros spreads the cluster over all ranks.
        """
        shares = self.shares / max(float(self.shares.sum()), _TINY)
        even = self.room_for(homes.shape[1]) / self.room_for(homes.shape[1]).sum()
        known = homes.sum(axis=1, keepdims=True) > 0
        where = np.where(known, (1.0 - self.leak) * homes + self.leak * even, even) * shares[:, None]
        # A layer's numbers lie together in memory, as most readers go from layer to layer.
        return np.asarray(np.matmul(where.T, self.profiles.swapaxes(0, 1)), np.float64).swapaxes(0, 1)

    def some(self, layers: NDArray[np.intp]) -> "ClusterTraffic":
        """Return the traffic of some layers."""
        return ClusterTraffic(self.profiles[:, layers], self.shares, self.leak, self.capacity)


def homes(
    traffic: ClusterTraffic,
    room: LocalityProblem,
    *,
    before: FloatArray | None = None,
    present: SlotTable | None = None,
    least: float = 0.005,
    better: float = 0.005,
) -> tuple[FloatArray, LocalityPlacement]:
    """Return homes of the clusters, float64 [K, ranks], and the placement that goes with them; arguments of
    `homes_and_table`."""
    best, table = homes_and_table(traffic, room, before=before, present=present, least=least, better=better)
    return best, measured(table, None, traffic.demand(best), room)


def homes_and_table(
    traffic: ClusterTraffic,
    room: LocalityProblem,
    *,
    before: FloatArray | None = None,
    present: SlotTable | None = None,
    least: float = 0.005,
    better: float = 0.005,
) -> tuple[FloatArray, SlotTable]:
    """Return homes of the clusters, float64 [K, ranks], and the table that goes with them.

    Rows sum to 1, for unused clusters to 0. Infeasible gives the reason for no homes. Savings are parts of
    the dispatch cost with nothing local (`LocalityPlacement.saved`). least: minimal saving over having no
    homes. before: [K, ranks], present homes, kept unless others save at least `better` more. present: int16
    [layers, slots] placement.
    """
    if (traffic.shares > 0).sum() < 2:
        raise Infeasible(Finding.of(FindingCode.SINGLE_CLUSTER))
    search = _Search(traffic, room, present)
    best, value = search.best(before)
    nothing = search.saved(np.zeros_like(best))
    if value < nothing + least:
        raise Infeasible(
            Finding.of(FindingCode.HOMES_SAVE_TOO_LITTLE, saved=100 * value, without=100 * nothing)
        )
    if _comparable(before, best) and value < search.saved(before) + better:
        best = before
    elif present is not None:
        best = laid_onto(
            best,
            search.held(best),
            held_of(present[search.layers], room.ranks, traffic.profiles.shape[2]),
            room,
            traffic.room_for(room.ranks),
        )
    return best, locality_table(traffic.demand(best), room, present)


def homes_for_table(
    traffic: ClusterTraffic, room: LocalityProblem, present: SlotTable
) -> tuple[FloatArray, Callable[[FloatArray], float]]:
    """Return the best homes for an unchanged placement, float64 [K, ranks], and the saving by any homes under
    it. present: int16 [layers, slots]."""
    search = _Search(traffic, room, present)
    held = held_of(present[search.layers], room.ranks, traffic.profiles.shape[2])
    return search.routed_to(held), partial(search.saved_by, held)


def _comparable(before: FloatArray | None, others: FloatArray) -> TypeGuard[FloatArray]:
    """True if there are present homes, of the same clusters and ranks."""
    return before is not None and before.shape == others.shape and bool(before.any())


class _Search:
    """The alternation of routing and placement, on some of the layers."""

    def __init__(self, traffic: ClusterTraffic, room: LocalityProblem, present: SlotTable | None) -> None:
        layers, experts = traffic.profiles.shape[1:]
        count = min(layers, max(4, _CELLS // (room.ranks * experts)))
        self.layers = np.unique(np.linspace(0, layers - 1, count).round().astype(np.intp))
        some = traffic.some(self.layers)
        # Converted once: every demand is a product with these.
        self._traffic = replace(some, profiles=np.asarray(some.profiles, np.float64))
        self._room = room if room.home is None else replace(room, home=room.home[self.layers])
        self._present = None if present is None else held_of(present[self.layers], room.ranks, experts)

    def held(self, homes: FloatArray) -> BoolArray:
        """Place experts under these homes."""
        return self._placed(self._worth(homes))

    def saved(self, homes: FloatArray) -> float:
        """Return the saving by these homes and the placement made for them."""
        worth = self._worth(homes)
        return float(worth.of(self._placed(worth)).mean())

    def saved_by(self, held: BoolArray, homes: FloatArray) -> float:
        """Return the saving by these homes under a given placement."""
        return float(self._worth(homes).of(held).mean())

    def _worth(self, homes: FloatArray) -> HolderValue:
        return worth_of(self._traffic.demand(homes), self._room)

    def _placed(self, worth: HolderValue) -> BoolArray:
        return placed(worth, self._room, _EXCHANGES)

    def best(self, before: FloatArray | None) -> tuple[FloatArray, float]:
        """Return (homes, saved): of all starts, the best after a few rounds, continued to convergence."""
        used, ranks = np.flatnonzero(self._traffic.shares > 0), self._room.ranks
        shuffled = (
            used[np.argsort(np.modf(np.arange(len(used)) * step)[0], kind="stable")]
            for step in _SHUFFLES[: _FEW_SHUFFLES if ranks > _MANY_RANKS else None]
        )
        starts = [chained(self._traffic, ranks), *(laid_along(self._traffic, row, ranks) for row in shuffled)]
        if _comparable(before, starts[0]):
            starts.append(before)
        if self._present is not None:
            starts.append(self.routed_to(self._present))
        # Few rounds from every start first: most starts can be ranked early.
        reached = [self._alternated(start, _FIRST) for start in starts]
        homes, value, turns = max(reached, key=lambda one: one[1])
        if turns < _FIRST:
            return homes, value
        return self._alternated(homes, _ROUNDS - _FIRST)[:2]

    def _alternated(self, homes: FloatArray, rounds: int) -> tuple[FloatArray, float, int]:
        value, worth = 0.0, self._worth(homes)
        for turn in range(rounds):
            held = self._placed(worth)
            routed = self.routed_to(held)
            worth = self._worth(routed)
            reached = float(worth.of(held).mean())
            if reached < value + _STILL:
                return homes, max(value, reached), turn + 1
            homes, value = routed, reached
        return homes, value, rounds

    def routed_to(self, held: BoolArray) -> FloatArray:
        """float64 [K, ranks]: the homes that save most under a placement."""
        # Weights of the two kinds of locality: on the rank, and at least on its node.
        rank, node = (price / sum(self._room.prices) for price in self._room.prices)
        at, several = self._room.node, int(self._room.node.max()) > 0
        rank = rank if several and rank > 0 else 1.0
        value = held * rank
        if several and node > 0:
            value = (
                value
                + node
                * np.stack(
                    [held[:, at == number].any(axis=1) for number in range(int(at.max()) + 1)], axis=1
                )[:, at]
            )
        profiles = self._traffic.profiles.reshape(len(self._traffic.shares), -1)
        local = profiles @ value.transpose(1, 0, 2).reshape(self._room.ranks, -1).T / len(self.layers)
        return routed(local, self._traffic.shares, self._traffic.room_for(self._room.ranks))


def routed(value: FloatArray, shares: NDArray[Any], capacity: FloatArray) -> FloatArray:
    """float64 [K, ranks]: maximise sum shares * homes * value.

    Constraints: rows of homes sum to 1 (where the share is not 0), and sum shares * homes is at most a rank's
    capacity.
    """
    used = np.flatnonzero(shares > 0)
    weight = np.asarray(shares[used], np.float64) / float(shares[used].sum())
    homes = np.zeros((len(shares), len(capacity)))
    homes[used] = transported(value[used], weight, capacity + _ROUNDING) / weight[:, None]
    homes[homes < 1e-9] = 0.0
    homes[used] /= homes[used].sum(axis=1, keepdims=True)
    return homes


def chained(traffic: ClusterTraffic, ranks: int) -> FloatArray:
    """float64 [K, ranks]: clusters in a row, each beside the most similar remaining one, laid along the
    ranks."""
    used = np.flatnonzero(traffic.shares > 0)
    shares = np.asarray(traffic.shares[used], np.float64) / float(traffic.shares[used].sum())
    profiles = np.asarray(traffic.profiles[used], np.float64).reshape(len(used), -1)
    # Compare clusters by their deviation from the mean: experts popular everywhere carry no information.
    apart = profiles - shares @ profiles
    apart /= np.maximum(np.linalg.norm(apart, axis=1, keepdims=True), _TINY)
    alike = apart @ apart.T
    row, left = [int(shares.argmax())], set(range(len(used)))
    left.discard(row[0])
    while left:
        row.append(max(sorted(left), key=lambda cluster: alike[row[-1], cluster]))
        left.discard(row[-1])
    return laid_along(traffic, used[row], ranks)


def laid_along(traffic: ClusterTraffic, row: NDArray[np.intp], ranks: int) -> FloatArray:
    """float64 [K, ranks]: clusters in this order along the ranks, each over a length equal to its share.

    row: the clusters that have a share.
    """
    shares = np.asarray(traffic.shares[row], np.float64) / float(traffic.shares[row].sum())
    # Overlap of two partitions of [0, 1]: clusters by share, and ranks by capacity.
    ends = np.cumsum(shares)
    edges = np.cumsum(traffic.room_for(ranks) / traffic.room_for(ranks).sum())
    overlap = np.minimum(ends[:, None], edges) - np.maximum(
        (ends - shares)[:, None], np.concatenate([[0.0], edges[:-1]])
    )
    homes = np.zeros((len(traffic.shares), ranks))
    homes[row] = np.maximum(overlap, 0.0) / shares[:, None]
    return np.asarray(
        homes / np.where(homes.sum(axis=1, keepdims=True) > 0, homes.sum(axis=1, keepdims=True), 1.0)
    )


def laid_onto(
    found: FloatArray, held: BoolArray, present: BoolArray, room: LocalityProblem, capacity: FloatArray
) -> FloatArray:
    """Relabel the ranks of homes [K, ranks] so that `held` overlaps most with `present`; both bool [layers,
    ranks, experts].

    Nodes are assigned to nodes, and ranks to ranks within them. Only ranks of the same capacity, and nodes
    with equally many ranks, are interchangeable.
    """
    ranks, nodes = room.ranks, int(room.node.max()) + 1
    common = (
        held.transpose(1, 0, 2).reshape(ranks, -1).astype(np.float32)
        @ present.transpose(1, 0, 2).reshape(ranks, -1).astype(np.float32).T
    )
    # Forbid pairs of unequal capacity by a cost that no overlap can outweigh.
    common = np.where(capacity[:, None] == capacity, common, -1e9)
    members = [np.flatnonzero(room.node == at) for at in range(nodes)]
    # Two levels: the best assignment of ranks for every pair of nodes, then the best assignment of nodes.
    gain = np.full((nodes, nodes), -1e12)
    inner = {}
    for a, b in np.ndindex(nodes, nodes):
        if len(members[a]) == len(members[b]):
            rows, columns = linear_sum_assignment(common[np.ix_(members[a], members[b])], maximize=True)
            gain[a, b] = common[members[a][rows], members[b][columns]].sum()
            inner[a, b] = (members[a][rows], members[b][columns])
    renamed = np.empty_like(found)
    for a, b in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
        mine, theirs = inner[a, b]
        renamed[:, theirs] = found[:, mine]
    return renamed
