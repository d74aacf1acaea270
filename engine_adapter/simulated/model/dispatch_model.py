"""What the tokens of a step cause under a placement: whom they reach, who reads and who serves what. Pure numpy.

Tokens are so many of each row of `demand.Tastes`, by home rank. Everything that needs the rows alone is worked out when a placement is
adopted; a step then is a few products over its rows.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.model.routing_model import RoutingModel
from fleet.dispatch import Chooser, reached, shares
from fleet.placement import EMPTY, Placement

_NEVER = 1e-300
"""in place of 0, which has no logarithm"""
Each = NDArray[np.float32]
"""[ranks, layers, rows]: of a token of each row that lives on each rank"""
_TURNS = 8
"""times that each row is sent, to learn where the choice for whole tokens takes it: at equal intervals of the turns"""


class StepTraffic(NamedTuple):
    """What the tokens of a step cause, as is to be expected. The first three per rank: float64 [ranks], summed over tokens and layers."""

    remote_ranks: NDArray[np.float64]
    remote_nodes: NDArray[np.float64]
    distinct_experts: NDArray[np.float64]
    """experts that the rank must read"""
    served: NDArray[np.float64]
    """[layers, ranks] (token, k) pairs"""


class DispatchModel:
    """Where rows go under one placement: by the rule of `fleet.dispatch`, in expectation. Exact numbers where nothing is shared out."""

    def __init__(self, tastes: RoutingModel, placement: Placement, node_of_rank: Sequence[int], *, cover: bool = False) -> None:
        """cover: replicas are chosen such that a token reaches few ranks. How many is then a mean over a few tokens of each row."""
        node = np.asarray(node_of_rank, np.intp)
        layer, slot = np.nonzero(placement.expert_of_slot != EMPTY)
        part = np.stack([shares(placement, home, node)[layer, slot] for home in range(placement.ranks)])
        held = _Slots(layer * placement.experts + placement.expert_of_slot[layer, slot], layer, slot // placement.slots_per_rank, part)
        replicas = np.bincount(held.place)[held.place]
        wanted = np.zeros((tastes.rows, placement.layers * placement.experts), bool)
        np.put_along_axis(wanted, tastes.places, True, axis=1)
        self._sole = _Sole(tastes, held.only(replicas == 1), wanted, placement)
        self._several = _Several(held.only(replicas > 1), wanted, placement)
        if cover and (replicas > 1).any():
            self._reached, self._local, nodes = _covered(tastes, placement, node)
        else:
            self._reached, self._local = _remote(tastes, placement, held, np.arange(placement.ranks)), _local(tastes, placement, held)
            nodes = _remote(tastes, placement, held, node)
        self._remote_ranks, self._remote_nodes = self._reached.sum(axis=1, dtype=np.float64), nodes.sum(axis=1, dtype=np.float64)

    def sent(self, rank: int, tokens_of_row: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """float64 [layers] each: distinct other ranks that so many tokens [rows] of one rank reach, and pairs of them that stay at home."""
        there = np.flatnonzero(tokens_of_row)
        tokens = tokens_of_row[there].astype(np.float64)
        return self._reached[rank][:, there] @ tokens, self._local[rank][:, there] @ tokens

    def traffic(self, tokens_of_row: NDArray[np.int64]) -> StepTraffic:
        """tokens_of_row: int [ranks, rows] of one step."""
        remote = (tokens_of_row * self._remote_ranks).sum(axis=1, dtype=np.float64)
        nodes = (tokens_of_row * self._remote_nodes).sum(axis=1, dtype=np.float64)
        pairs = self._several.pairs(tokens_of_row)
        read = self._sole.read(tokens_of_row) + self._several.read(pairs)
        return StepTraffic(remote, nodes, read, self._sole.served(tokens_of_row) + self._several.served(pairs))


class _Slots(NamedTuple):
    """Slots that hold an expert."""

    place: NDArray[np.intp]
    """[slots]: layer * experts + expert"""
    layer: NDArray[np.intp]
    rank: NDArray[np.intp]
    part: NDArray[np.float64]
    """[homes, slots]: `fleet.dispatch.shares`"""

    def only(self, these: NDArray[np.bool_]) -> "_Slots":
        return _Slots(self.place[these], self.layer[these], self.rank[these], self.part[:, these])


class _Sole:
    """Experts with one replica: it does not matter who asks."""

    def __init__(self, tastes: RoutingModel, held: _Slots, wanted: NDArray[np.bool_], placement: Placement) -> None:
        """wanted: [rows, layers * experts]."""
        layers, self._ranks = placement.layers, placement.ranks
        self._rank = held.rank
        servers = layers * placement.ranks
        server = np.full(layers * placement.experts, servers)  # the last one: of no interest here
        server[held.place] = held.layer * placement.ranks + held.rank
        cells = np.arange(tastes.rows)[:, None] * (servers + 1) + server[tastes.places]
        by_row = np.bincount(cells.ravel(), minlength=tastes.rows * (servers + 1)).reshape(tastes.rows, -1)
        self._pairs = by_row[:, :servers].astype(np.float32)
        """[rows, layers * ranks] that a token of each row wants there"""
        bits = np.packbits(wanted[:, held.place], axis=1)
        self._wanted = np.ascontiguousarray(np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))).view(np.uint64)
        """[rows, slots / 64]: a bit of each slot"""

    def served(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [layers, ranks]"""
        found = tokens_of_row.sum(axis=0).astype(np.float32) @ self._pairs
        return np.asarray(found.astype(np.float64).reshape(-1, self._ranks))

    def read(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [ranks] experts that each must read"""
        joined = np.bitwise_or.reduce(self._wanted[tokens_of_row.any(axis=0)], axis=0)
        read = np.flatnonzero(np.unpackbits(joined.view(np.uint8), count=len(self._rank)))
        return np.bincount(self._rank[read], minlength=self._ranks).astype(np.float64)


class _Several:
    """Experts with more replicas than one: it matters who asks."""

    def __init__(self, held: _Slots, wanted: NDArray[np.bool_], placement: Placement) -> None:
        """wanted: [rows, layers * experts]."""
        self._ranks, self._servers = placement.ranks, placement.layers * placement.ranks
        places, self._which = np.unique(held.place, return_inverse=True)
        self._rank, self._server = held.rank, held.layer * placement.ranks + held.rank
        self._part = held.part
        self._miss = np.log(np.maximum(1.0 - held.part, _NEVER))
        """logarithm of the probability that a pair goes to another slot"""
        self._wanted = wanted[:, places].astype(np.float32)

    def pairs(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [homes, slots]: what each home wants of the expert in each slot"""
        there = np.flatnonzero(tokens_of_row.any(axis=0))
        wanted = tokens_of_row[:, there].astype(np.float32) @ self._wanted[there]
        return np.asarray(wanted.astype(np.float64)[:, self._which])

    def served(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [layers, ranks]"""
        found = np.bincount(self._server, (pairs * self._part).sum(axis=0), self._servers)
        return found.astype(np.float64).reshape(-1, self._ranks)

    def read(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [ranks] experts that each is expected to have to read"""
        return np.bincount(self._rank, -np.expm1((pairs * self._miss).sum(axis=0)), self._ranks).astype(np.float64)


def _remote(tastes: RoutingModel, placement: Placement, held: _Slots, spot: NDArray[np.intp]) -> Each:
    """How many spots other than its own a token goes to in a layer. spot: of each rank, from 0. Each of a token's experts goes its own way."""
    found, spots = np.zeros((placement.ranks, placement.layers, tastes.rows), np.float32), int(spot.max()) + 1
    if spots == 1:
        return found
    alike = bool((held.part == held.part[0]).all())
    ends = np.searchsorted(held.layer, np.arange(placement.layers + 1))
    for layer, home in product(range(placement.layers), range(placement.ranks)):
        if not home or not alike:
            these = slice(ends[layer], ends[layer + 1])
            place = (held.place[these] - layer * placement.experts) * spots + spot[held.rank[these]]
            share = np.bincount(place, held.part[home, these], placement.experts * spots).astype(np.float64)
            went = _went(tastes.table[:, layer], share.reshape(-1, spots))
        found[home, layer] = went.sum(axis=1) - went[:, spot[home]]
    return found


def _local(tastes: RoutingModel, placement: Placement, held: _Slots) -> Each:
    """How many of a token's k pairs its own rank serves in a layer."""
    found = np.empty((placement.ranks, placement.layers, tastes.rows), np.float32)
    for home in range(placement.ranks):
        own = held.rank == home
        part = np.bincount(held.place[own], held.part[home, own], placement.layers * placement.experts)
        found[home] = part[tastes.places].reshape(tastes.rows, placement.layers, -1).sum(axis=2).T
    return found


def _covered(tastes: RoutingModel, placement: Placement, node: NDArray[np.intp]) -> tuple[Each, Each, Each]:
    """Where a token's replicas are chosen together: how many other ranks it goes to, how many of its pairs stay, how many other nodes it goes to."""
    chooser, per = Chooser(placement, range(placement.ranks), node), placement.slots_per_rank
    found = np.zeros((3, placement.ranks, placement.layers, tastes.rows), np.float32)
    ranks, local, nodes = found
    for layer, home, turn in product(range(placement.layers), range(placement.ranks), range(_TURNS)):
        rank = chooser.cover(layer, home * placement.experts + tastes.table[:, layer].astype(np.intp), turn) // per
        ranks[home, layer] += reached(rank, np.full(tastes.rows, home))
        local[home, layer] += (rank == home).sum(axis=1)
        nodes[home, layer] += reached(node[rank], np.full(tastes.rows, node[home]))
    found /= _TURNS
    return ranks, local, nodes


def _went(experts: NDArray[np.int16], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [rows, places]: the probability that a token of a row goes to a place in one layer.

    experts: [rows, k] distinct ones; share: [experts, places] of an expert's tokens.
    """
    elsewhere = 1.0 - share
    missed = elsewhere[experts[:, 0]]
    for one in experts[:, 1:].T:
        missed *= elsewhere[one]
    return np.asarray(1.0 - missed)
