"""Expected nodes reached by a token when the gate chooses groups of experts first (group-limited routing).
Pure."""

from math import comb, log

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape

_TINY = 1e-12


def limited(shape: ModelShape) -> bool:
    """Return True if the gate restricts a token's experts to a subset of the groups."""
    return shape.groups_per_token < shape.groups


def expected_nodes(shape: ModelShape, nodes: int, *, together: bool) -> float:
    """Return the expected number of distinct nodes that hold a token's experts.

    All experts and groups are equally popular, and each node holds an even part of them.

    together: each group is entirely on one node. The gate takes g of G groups, then k of the e experts in
    these groups. A node that holds j of the chosen groups is missed with probability C(e - j E/G, k) / C(e,
    k), and j is hypergeometric. Otherwise every group is spread evenly over the nodes, and a node holds e /
    nodes of the eligible experts. Raises ValueError if `together` is set and the groups do not divide evenly
    among the nodes.
    """
    in_reach, size = shape.groups_per_token * (shape.experts // shape.groups), shape.experts // shape.groups
    if not together:
        return nodes * (1.0 - _missed(in_reach, in_reach // nodes, shape.top_k))
    if shape.groups % nodes:
        raise ValueError(f"grouping: {shape.groups} groups do not divide among {nodes} nodes")
    own = shape.groups // nodes
    ways = comb(shape.groups, shape.groups_per_token)
    missed = 0.0
    for taken in range(min(own, shape.groups_per_token) + 1):
        chance = comb(own, taken) * comb(shape.groups - own, shape.groups_per_token - taken) / ways
        missed += chance * _missed(in_reach, taken * size, shape.top_k)
    return nodes * (1.0 - missed)


def _missed(experts: int, here: int, top_k: int) -> float:
    """Return the probability that none of k distinct experts is among the `here` experts of a node."""
    return comb(experts - here, top_k) / comb(experts, top_k)


def node_draws(shape: ModelShape, nodes: int, *, together: bool) -> float:
    """Return n such that a node of mass m is reached with probability 1 - (1 - m)^n.

    Independent draws have n = k. Here n is chosen so that even masses reach `expected_nodes`.
    """
    return log(max(1.0 - expected_nodes(shape, nodes, together=together) / nodes, _TINY)) / log(
        1.0 - 1.0 / nodes
    )


def draws_of(shape: ModelShape, on_node: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the effective draws of a placement, float64 [layers].

    Interpolates between `node_draws` for spread groups and for whole groups, by the share of groups that are
    complete on some node. on_node: bool [layers, nodes, experts], nodes that hold a replica.
    """
    layers, nodes, _ = on_node.shape
    apart = node_draws(shape, nodes, together=False)
    if shape.groups % nodes:
        return np.full(layers, apart)
    of_groups = np.asarray(on_node.reshape(layers, nodes, shape.groups, -1).all(axis=3))
    whole = of_groups.any(axis=1).mean(axis=1)
    return np.asarray(apart + whole * (node_draws(shape, nodes, together=True) - apart))
