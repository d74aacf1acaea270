"""Gates that choose groups of experts first: should a group's experts stay together on one node? Pure.

Where a token's experts are of few groups (DeepSeek-V3: 4 of 8), groups kept whole bound the nodes that it must reach. But popular groups then
make popular nodes, and experts cannot go where their tokens come from. Both placements are made, and the cheaper one is told.
"""

from dataclasses import replace
from math import comb, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.timing import EngineSpeed
from migration.locality import Located, Room, located
from migration.worth import Held

Values = NDArray[np.float64]
_LAYERS = 6
"""that are placed both ways; they tell as much as all"""
_TINY = 1e-12


class Grouped(NamedTuple):
    """keep: whether groups should stay together. apart, together: what a token costs an engine, in seconds, all layers: sending it, and what the
    fullest rank computes above the mean. nodes_apart, nodes_together: distinct nodes that it reaches in a layer were experts equally popular.
    home: bool [layers, ranks, experts], for `migration.locality.Room.home`; None where they should not. reason: a sentence."""

    keep: bool
    apart: float
    together: float
    nodes_apart: float
    nodes_together: float
    home: Held | None
    reason: str


def expected_nodes(shape: ModelShape, nodes: int, *, together: bool) -> float:
    """Distinct nodes that hold a token's experts, when all experts and groups are equally popular and each node has its even part of them.

    together: whole groups on nodes. The gate takes g of G groups, then k of the e experts in these. A node that holds j of the groups taken is
    missed with probability C(e - j E/G, k) / C(e, k), and j is hypergeometric. Apart, every group is spread evenly over the nodes: a node has e / nodes
    of the experts in reach. ValueError when groups, kept together, do not divide among the nodes.
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
    """Probability that none of k different experts is among those here."""
    return comb(experts - here, top_k) / comb(experts, top_k)


def keep_groups(shape: ModelShape, speed: EngineSpeed, demand: NDArray[Any], room: Room) -> Grouped:
    """Whether it pays that every group has its base copies on one node, and where they are then.

    demand: [ranks, layers, experts] pairs by the rank their requests live on.
    """
    nodes = int(room.node.max()) + 1
    sizes = np.bincount(room.node)
    fits = nodes > 1 and shape.groups % nodes == 0 and (sizes * room.slots >= shape.experts // nodes).all()
    if shape.groups_per_token >= shape.groups or not fits:
        reason = "the gate is not group-limited" if shape.groups_per_token >= shape.groups else f"{shape.groups} groups cannot be kept whole on {nodes} nodes"
        return Grouped(False, 0.0, 0.0, float(nodes), float(nodes), None, reason)
    spread, whole = (expected_nodes(shape, nodes, together=together) for together in (False, True))
    layers = np.unique(np.linspace(0, demand.shape[1] - 1, min(_LAYERS, demand.shape[1])).round().astype(np.intp))
    some = demand[:, layers]
    home = group_homes(demand, room, shape.groups)
    ways = [located(some, replace(room, home=mask)) for mask in (None, home[layers])]
    apart, together = (_seconds(shape, speed, one, some, room, reach) for one, reach in zip(ways, (spread, whole), strict=True))
    keep = together < apart
    told = f"a token costs {1e6 * together:.1f} us with groups whole on nodes, {1e6 * apart:.1f} us without"
    return Grouped(keep, apart, together, spread, whole, home if keep else None, told)


def group_homes(demand: NDArray[Any], room: Room, groups: int) -> Held:
    """bool [layers, ranks, experts]: the ranks of the node that each group belongs to: of most demand for it, as far as no node becomes too full.

    Groups choose in falling order of their load; each node takes as many.
    """
    layers, experts = demand.shape[1:]
    nodes = int(room.node.max()) + 1
    wanted = np.stack([demand[room.node == at].sum(axis=0, dtype=np.float64) for at in range(nodes)], axis=1).reshape(layers, nodes, groups, -1).sum(axis=3)
    load = wanted.sum(axis=1)
    fair, rows = load.sum(axis=1) / nodes, np.arange(layers)
    full, room_left = np.zeros((layers, nodes)), np.full((layers, nodes), groups // nodes)
    of_group = np.empty((layers, groups), np.intp)
    for group in np.argsort(-load, axis=1, kind="stable").T:
        over = np.maximum(full + load[rows, group][:, None] - fair[:, None], 0.0)
        node = np.where(room_left > 0, wanted[rows, :, group] - over, -np.inf).argmax(axis=1)
        of_group[rows, group] = node
        full[rows, node] += load[rows, group]
        room_left[rows, node] -= 1
    return np.asarray(of_group.repeat(experts // groups, axis=1)[:, None, :] == room.node[None, :, None])


def _seconds(shape: ModelShape, speed: EngineSpeed, found: Located, demand: NDArray[Any], room: Room, reach: float) -> float:
    """What a token costs, all layers: sending it to other ranks and nodes, and what the fullest rank computes above the mean.

    A destination of mass m is reached with probability 1 - (1 - m)^n. For ranks n is k; for nodes it is such that even masses give `reach` nodes.
    """
    nodes = int(room.node.max()) + 1
    draws = log(max(1.0 - reach / nodes, _TINY)) / log(1.0 - 1.0 / nodes)
    others = (1.0 - found.near) / (nodes - 1)
    off_node = (nodes - 1) * (1.0 - (1.0 - others) ** draws)
    off_rank = (room.ranks - 1) * (1.0 - (1.0 - (1.0 - found.local) / (room.ranks - 1)) ** shape.top_k)
    waiting = shape.top_k * speed.expert_pair * (1.0 / found.balance - 1.0)
    return shape.layers * float((speed.dispatch * off_rank + speed.dispatch_node * off_node + waiting).mean())
