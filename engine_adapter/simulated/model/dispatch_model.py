"""Dispatch model: traffic of a step's tokens under a placement, expert reads, and load of each rank. Pure
NumPy.

The tokens of a step are counts per row of `routing_model.RoutingModel`, by home rank. Everything that depends
on the rows alone is computed when a placement is adopted. A step then costs a few products over its rows.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.simulated.model.routing_model import RoutingModel
from fleet.arrays import Float32Array
from fleet.dispatch import Chooser, reached, shares
from fleet.placement import EMPTY, Placement
from fleet.timing import gathered_bytes

_NEVER = 1e-300
"""Replaces 0, which has no logarithm."""
_TURNS = 8
"""Samples of each row, at equal intervals of the turns, to estimate the result of joint replica selection."""


class StepTraffic(NamedTuple):
    """Expected traffic of a step's tokens. The first three fields are per rank: float64 [ranks], summed over
    tokens and layers. Sharded layers count in the third and the last."""

    remote_ranks: NDArray[np.float64]
    remote_nodes: NDArray[np.float64]
    distinct_experts: NDArray[np.float64]
    """Experts that the rank must read. Its part of an expert of a sharded layer counts 1 / ranks."""
    served: NDArray[np.float64]
    """[layers, ranks] (token, k) pairs; 0 in sharded layers, where all ranks serve every pair."""
    gathered: float
    """Bytes that each rank moves in the collectives of sharded layers (`fleet.timing.gathered_bytes`)."""


class DispatchModel:
    """Destinations of rows under one placement, by the rule of `fleet.dispatch`, as expected values. Exact
    for experts with one replica."""

    def __init__(
        self, routing: RoutingModel, placement: Placement, node_of_rank: Sequence[int], *, cover: bool = False
    ) -> None:
        """cover: choose replicas so that a token reaches few ranks. The number of ranks is then a mean over a
        few tokens of each row."""
        node = np.asarray(node_of_rank, np.intp)
        layer, slot = np.nonzero(placement.expert_of_slot != EMPTY)
        part = np.stack([shares(placement, home, node)[layer, slot] for home in range(placement.ranks)])
        held = _Slots(
            layer * placement.experts + placement.expert_of_slot[layer, slot],
            layer,
            slot // placement.slots_per_rank,
            part,
        )
        # Most experts have one replica. Their traffic is the same whatever a token's home, so it is computed
        # by row alone, without the dimension of homes.
        replicas = np.bincount(held.place)[held.place]
        demand = np.zeros((routing.rows, placement.layers * placement.experts), bool)
        np.put_along_axis(demand, routing.places, True, axis=1)
        self._sole = _Sole(routing, held.only(replicas == 1), demand, placement)
        self._several = _Several(held.only(replicas > 1), demand, placement)
        self._shards = _Shards(demand, placement)
        self._token_bytes = gathered_bytes(routing.shape, placement.ranks, len(placement.sharded))
        if cover and (replicas > 1).any():
            self._reached, self._local, nodes = _covered(routing, placement, node)
        else:
            self._reached, self._local = (
                _remote(routing, placement, held, np.arange(placement.ranks)),
                _local(routing, placement, held),
            )
            nodes = _remote(routing, placement, held, node)
        self._remote_ranks, self._remote_nodes = (
            self._reached.sum(axis=1, dtype=np.float64),
            nodes.sum(axis=1, dtype=np.float64),
        )

    def sent(
        self, rank: int, tokens_of_row: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return two float64 [layers]: distinct other ranks that tokens of one rank reach, and their local
        pairs. tokens_of_row: [rows]."""
        there = np.flatnonzero(tokens_of_row)
        tokens = tokens_of_row[there].astype(np.float64)
        return self._reached[rank][:, there] @ tokens, self._local[rank][:, there] @ tokens

    def traffic(self, tokens_of_row: NDArray[np.int64]) -> StepTraffic:
        """Return the traffic of one step. tokens_of_row: int [ranks, rows]."""
        remote = (tokens_of_row * self._remote_ranks).sum(axis=1, dtype=np.float64)
        nodes = (tokens_of_row * self._remote_nodes).sum(axis=1, dtype=np.float64)
        pairs = self._several.pairs(tokens_of_row)
        read = self._sole.read(tokens_of_row) + self._several.read(pairs) + self._shards.read(tokens_of_row)
        served = self._sole.served(tokens_of_row) + self._several.served(pairs)
        return StepTraffic(remote, nodes, read, served, self._token_bytes * float(tokens_of_row.sum()))


class _Slots(NamedTuple):
    """Slots that hold an expert."""

    place: NDArray[np.intp]
    """[slots]: layer * experts + expert."""
    layer: NDArray[np.intp]
    rank: NDArray[np.intp]
    part: NDArray[np.float64]
    """[homes, slots]: `fleet.dispatch.shares`."""

    def only(self, these: NDArray[np.bool_]) -> "_Slots":
        return _Slots(self.place[these], self.layer[these], self.rank[these], self.part[:, these])


class _Sole:
    """Experts with one replica. Their traffic does not depend on the home rank of a token."""

    def __init__(
        self, routing: RoutingModel, held: _Slots, demand: NDArray[np.bool_], placement: Placement
    ) -> None:
        """demand: [rows, layers * experts]."""
        layers, self._ranks = placement.layers, placement.ranks
        self._rank = held.rank
        servers = layers * placement.ranks
        # The last server collects the experts with several replicas, which are ignored here.
        server = np.full(layers * placement.experts, servers)
        server[held.place] = held.layer * placement.ranks + held.rank
        cells = np.arange(routing.rows)[:, None] * (servers + 1) + server[routing.places]
        by_row = np.bincount(cells.ravel(), minlength=routing.rows * (servers + 1)).reshape(routing.rows, -1)
        self._pairs = by_row[:, :servers].astype(np.float32)
        """[rows, layers * ranks] pairs per token of each row."""
        self._demand = _Demand(demand[:, held.place])

    def served(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the load, float64 [layers, ranks]."""
        found = tokens_of_row.sum(axis=0).astype(np.float32) @ self._pairs
        return np.asarray(found.astype(np.float64).reshape(-1, self._ranks))

    def read(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the experts that each rank must read, float64 [ranks]."""
        read = self._demand.of(tokens_of_row)
        return np.bincount(self._rank[read], minlength=self._ranks).astype(np.float64)


class _Shards:
    """Experts of sharded layers, of which every rank holds a part."""

    def __init__(self, demand: NDArray[np.bool_], placement: Placement) -> None:
        """demand: [rows, layers * experts]."""
        by_layer = demand.reshape(len(demand), placement.layers, placement.experts)
        self._demand = _Demand(by_layer[:, list(placement.sharded)].reshape(len(demand), -1))
        self._ranks = placement.ranks

    def read(self, tokens_of_row: NDArray[np.int64]) -> float:
        """Return the experts that each rank must read."""
        return len(self._demand.of(tokens_of_row)) / self._ranks


class _Demand:
    """Demand of rows for some experts: whether an expert is read is one bit per row, and a step only joins
    the bits of its rows, 64 experts an operation, instead of a product over rows and experts."""

    def __init__(self, demand: NDArray[np.bool_]) -> None:
        """demand: [rows, experts]."""
        bits = np.packbits(demand, axis=1)
        self._bits = np.ascontiguousarray(np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8)))).view(np.uint64)
        self._experts = demand.shape[1]

    def of(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the experts that a step reads, ascending. tokens_of_row: [ranks, rows]."""
        joined = np.bitwise_or.reduce(self._bits[tokens_of_row.any(axis=0)], axis=0)
        return np.flatnonzero(np.unpackbits(joined.view(np.uint8), count=self._experts))


class _Several:
    """Experts with several replicas. Their traffic depends on the home rank of a token."""

    def __init__(self, held: _Slots, demand: NDArray[np.bool_], placement: Placement) -> None:
        """demand: [rows, layers * experts]."""
        self._ranks, self._servers = placement.ranks, placement.layers * placement.ranks
        places, self._which = np.unique(held.place, return_inverse=True)
        self._rank, self._server = held.rank, held.layer * placement.ranks + held.rank
        self._part = held.part
        # Misses of independent pairs multiply. With logarithms a step sums them by one product.
        self._miss = np.log(np.maximum(1.0 - held.part, _NEVER))
        """Logarithm of the probability that a pair goes to another slot."""
        self._demand = demand[:, places].astype(np.float32)

    def pairs(self, tokens_of_row: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return each home's pairs for the expert in each slot, float64 [homes, slots]."""
        there = np.flatnonzero(tokens_of_row.any(axis=0))
        demand = tokens_of_row[:, there].astype(np.float32) @ self._demand[there]
        return np.asarray(demand.astype(np.float64)[:, self._which])

    def served(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the load, float64 [layers, ranks]."""
        found = np.bincount(self._server, (pairs * self._part).sum(axis=0), self._servers)
        return found.astype(np.float64).reshape(-1, self._ranks)

    def read(self, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the expected number of experts that each rank must read, float64 [ranks]."""
        # 1 - exp(x) loses all digits of a small x.
        return np.bincount(self._rank, -np.expm1((pairs * self._miss).sum(axis=0)), self._ranks).astype(
            np.float64
        )


def _remote(
    routing: RoutingModel, placement: Placement, held: _Slots, spot: NDArray[np.intp]
) -> Float32Array:
    """Return the number of places other than its own that a token goes to in a layer. spot: place of each
    rank, from 0. Each of a token's experts selects its replica independently."""
    found, spots = (
        np.zeros((placement.ranks, placement.layers, routing.rows), np.float32),
        int(spot.max()) + 1,
    )
    if spots == 1:
        return found
    alike = bool((held.part == held.part[0]).all())
    ends = np.searchsorted(held.layer, np.arange(placement.layers + 1))
    for layer, home in product(placement.whole.tolist(), range(placement.ranks)):
        # Without a preference for near replicas, all homes share the result of the first.
        if not home or not alike:
            these = slice(ends[layer], ends[layer + 1])
            place = (held.place[these] - layer * placement.experts) * spots + spot[held.rank[these]]
            share = np.bincount(place, held.part[home, these], placement.experts * spots).astype(np.float64)
            went = _went(routing.table[:, layer], share.reshape(-1, spots))
        found[home, layer] = went.sum(axis=1) - went[:, spot[home]]
    return found


def _local(routing: RoutingModel, placement: Placement, held: _Slots) -> Float32Array:
    """Return the number of a token's k pairs that its own rank serves in a layer."""
    found = np.empty((placement.ranks, placement.layers, routing.rows), np.float32)
    for home in range(placement.ranks):
        own = held.rank == home
        part = np.bincount(held.place[own], held.part[home, own], placement.layers * placement.experts)
        found[home] = part[routing.places].reshape(routing.rows, placement.layers, -1).sum(axis=2).T
    return found


def _covered(
    routing: RoutingModel, placement: Placement, node: NDArray[np.intp]
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Return other ranks, local pairs and other nodes per token, for joint replica selection."""
    chooser, per = Chooser(placement, range(placement.ranks), node), placement.slots_per_rank
    found = np.zeros((3, placement.ranks, placement.layers, routing.rows), np.float32)
    ranks, local, nodes = found
    for layer, home, turn in product(placement.whole.tolist(), range(placement.ranks), range(_TURNS)):
        rank = (
            chooser.cover(layer, home * placement.experts + routing.table[:, layer].astype(np.intp), turn)
            // per
        )
        ranks[home, layer] += reached(rank, np.full(routing.rows, home))
        local[home, layer] += (rank == home).sum(axis=1)
        nodes[home, layer] += reached(node[rank], np.full(routing.rows, node[home]))
    found /= _TURNS
    return ranks, local, nodes


def _went(experts: NDArray[np.int16], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a token of a row goes to a place in one layer, float64 [rows, places].

    experts: [rows, k] distinct experts. share: [experts, places] share of an expert's tokens.
    """
    # A token misses a place only if each of its k distinct experts does.
    elsewhere = 1.0 - share
    missed = elsewhere[experts[:, 0]]
    for one in experts[:, 1:].T:
        missed *= elsewhere[one]
    return np.asarray(1.0 - missed)
