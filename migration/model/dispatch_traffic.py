"""Demand as a placement serves it, and the distinct ranks and nodes that tokens reach. Pure.

The compiled form (`migration/kernels/prices.c`) and the numpy form beside it give equal bits: both add up a
layer slot by slot, as no rank holds many of its experts.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from fleet.dispatch import LocalReplicas, onward
from fleet.experts import ModelShape
from fleet.placement import FULL, Placement
from migration import kernels
from migration.model.grouped_routing import draws_of, limited

_TINY = 1e-300
"""below any real demand"""


class DispatchedPairs(NamedTuple):
    """Demand as a placement serves it, float64 [layers, ranks] each, in the unit of the demand.

    A token that reaches several experts of one destination counts once there: pairs of it that go out or in
    are its tokens, times the draws of a token.
    """

    pairs: FloatArray
    """of this rank's tokens"""
    load: FloatArray
    """of any rank's tokens that this rank serves"""
    local: FloatArray
    """of this rank's tokens that the rank serves itself"""
    ranks_out: FloatArray
    """from tokens of this rank to other ranks"""
    ranks_in: FloatArray
    """from tokens of other ranks to this rank"""
    nodes_out: FloatArray
    """from tokens of this rank to other nodes"""
    nodes_in: FloatArray
    """from tokens of other nodes to the node of this rank, divided evenly among its ranks"""


def dispatched(
    placement: Placement,
    demand: NDArray[Any],
    node: NDArray[np.intp],
    top_k: int,
    shape: ModelShape | None = None,
) -> DispatchedPairs:
    """Serve demand [ranks, layers, experts] by the dispatch rule of `fleet.dispatch`.

    The k experts of a token count as independent draws. A destination that serves a fraction m of a rank's
    pairs is therefore reached with probability 1 - (1 - m)^k. With a shape whose gate limits groups,
    `migration.model.grouped_routing` gives the probability of reaching a node.
    """
    by_layer = np.ascontiguousarray(demand.transpose(1, 0, 2), np.float64)
    grouped = shape is not None and limited(shape) and int(node.max()) > 0
    served = _Served.by(placement, by_layer, node, top_k, 0 if grouped else top_k)
    if grouped:
        assert shape is not None
        nodes = int(node.max()) + 1
        on_node = np.stack(
            [placement.replicas_on_rank[:, node == at].any(axis=1) for at in range(nodes)], axis=1
        )
        draws = draws_of(shape, on_node)[:, None, None]
        reached = 1.0 - (1.0 - served.mass.clip(0.0, 1.0)) ** draws
        _count_nodes(served, reached * served.pairs[:, None, :], node)
    size = np.bincount(node, minlength=served.nodes_in.shape[1])
    return DispatchedPairs(
        served.pairs,
        served.load,
        served.local,
        served.ranks_out,
        served.ranks_in,
        served.nodes_out,
        (served.nodes_in / np.maximum(size, 1))[:, node],
    )


class _Served(NamedTuple):
    """`DispatchedPairs` with nodes_in float64 [layers, nodes], and the part of each rank's pairs that a node
    serves."""

    pairs: FloatArray
    load: FloatArray
    local: FloatArray
    ranks_out: FloatArray
    ranks_in: FloatArray
    mass: FloatArray
    """[layers, nodes, ranks]"""
    nodes_out: FloatArray
    nodes_in: FloatArray

    @classmethod
    def by(
        cls, placement: Placement, demand: FloatArray, node: NDArray[np.intp], top_k: int, node_top_k: int
    ) -> "_Served":
        """Serve demand [layers, ranks, experts]. node_top_k: 0: the caller counts the nodes that are
        reached."""
        layers, ranks, experts = demand.shape
        nodes = int(node.max()) + 1
        flat, by_node = (layers, ranks), (layers, nodes, ranks)
        found = cls(*map(np.empty, (flat, flat, flat, flat, flat, by_node, flat, (layers, nodes))))
        library = kernels.compiled()
        if library is None:
            _serve(placement, demand, node, top_k, node_top_k, found)
            return found
        split = (np.asarray(part, np.float64) / FULL for part in placement.split)
        table, at = kernels.plain(placement.expert_of_slot), kernels.plain(np.asarray(node, np.int64))
        library.priced_traffic(table, *split, demand, at, layers, experts, top_k, node_top_k, *found)
        return found


def _serve(
    placement: Placement,
    demand: FloatArray,
    node: NDArray[np.intp],
    top_k: int,
    node_top_k: int,
    into: _Served,
) -> None:
    """Implement `priced_traffic` in numpy, layer by layer: what a layer needs stays in the cache."""
    held, per = LocalReplicas.of(placement), placement.slots_per_rank
    parts, rank = onward(placement, node), np.arange(placement.ranks)
    keep = np.asarray(placement.split.keep, np.float64) / FULL
    into.pairs[...] = demand.sum(axis=2)
    into.mass[...] = 0.0
    for layer, pairs in enumerate(into.pairs):
        expert, owner = held.expert[layer], held.rank[0]
        kept = demand[layer, owner, expert] * keep[layer]
        left = demand[layer].T.copy()
        np.subtract.at(left, (expert, owner), kept)
        part = parts[node if len(parts) > 1 else np.zeros_like(node), layer].T
        flow = (left[expert] * part).reshape(len(rank), per, len(rank))
        here, own = np.zeros((len(rank), len(rank))), np.zeros(len(rank))
        for slot in range(per):
            here += flow[:, slot]
            own += kept[slot::per]
        here[rank, rank] += own
        into.local[layer], into.load[layer] = here[rank, rank], here.sum(axis=1)
        here /= np.maximum(pairs, _TINY)
        for at in range(len(rank)):
            into.mass[layer, node[at]] += here[at]
        reached = _reached(here, top_k) * pairs
        reached[rank, rank] = 0.0
        into.ranks_out[layer], into.ranks_in[layer] = reached.sum(axis=0), reached.sum(axis=1)
    if node_top_k:
        _count_nodes(into, _reached(into.mass, node_top_k) * into.pairs[:, None, :], node)
    else:
        into.nodes_out[...] = 0.0


def _count_nodes(into: _Served, reached: FloatArray, node: NDArray[np.intp]) -> None:
    """Add up the pairs [layers, nodes, ranks] of each rank's tokens that reach a node; its own do not
    count."""
    reached[:, node, np.arange(len(node))] = 0.0
    into.nodes_out[...], into.nodes_in[...] = reached.sum(axis=1), reached.sum(axis=2)


def _reached(mass: FloatArray, top_k: int) -> FloatArray:
    """Return 1 - (1 - mass)^k, using exponentiation by squaring."""
    square, left = np.clip(mass, 0.0, 1.0), top_k
    np.subtract(1.0, square, out=square)
    power: FloatArray | None = None
    while left:
        if left & 1:
            power = square.copy() if power is None else np.multiply(power, square, out=power)
        left >>= 1
        if left:
            np.multiply(square, square, out=square)
    return np.zeros_like(square) if power is None else np.subtract(1.0, power, out=power)
