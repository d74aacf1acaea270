"""Gates that choose groups of experts first: should a group's experts stay together on one node? Pure.

Where a token's experts are of few groups (DeepSeek-V3: 4 of 8), groups kept whole bound the nodes that it must reach. But popular groups then
make popular nodes, and experts cannot go where their tokens come from. Both placements are made, and the cheaper one is told.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.timing import EngineSpeed
from migration.model.grouped_routing import expected_nodes, limited, node_draws
from migration.solvers.holder_value import Held
from migration.solvers.locality_placement import LocalityPlacement, LocalityProblem, located

Values = NDArray[np.float64]
_LAYERS = 6
"""that are placed both ways; they tell as much as all"""


class GroupAffinity(NamedTuple):
    """keep: whether groups should stay together. apart, together: what a token costs an engine, in seconds, all layers: sending it, and what the
    fullest rank computes above the mean. nodes_apart, nodes_together: distinct nodes that it reaches in a layer were experts equally popular.
    home: bool [layers, ranks, experts], for `migration.solvers.locality_placement.LocalityProblem.home`; None where they should not. reason: a sentence."""

    keep: bool
    apart: float
    together: float
    nodes_apart: float
    nodes_together: float
    home: Held | None
    reason: str


def keep_groups(shape: ModelShape, speed: EngineSpeed, demand: NDArray[Any], room: LocalityProblem) -> GroupAffinity:
    """Whether it pays that every group has its base copies on one node, and where they are then.

    demand: [ranks, layers, experts] pairs by the rank their requests live on.
    """
    nodes = int(room.node.max()) + 1
    sizes = np.bincount(room.node)
    fits = nodes > 1 and shape.groups % nodes == 0 and (sizes * room.slots >= shape.experts // nodes).all()
    if not limited(shape) or not fits:
        reason = "the gate is not group-limited" if not limited(shape) else f"{shape.groups} groups cannot be kept whole on {nodes} nodes"
        return GroupAffinity(False, 0.0, 0.0, float(nodes), float(nodes), None, reason)
    spread, whole = (expected_nodes(shape, nodes, together=together) for together in (False, True))
    layers = np.unique(np.linspace(0, demand.shape[1] - 1, min(_LAYERS, demand.shape[1])).round().astype(np.intp))
    some = demand[:, layers]
    home = group_homes(demand, room, shape.groups)
    ways = [located(some, replace(room, home=mask)) for mask in (None, home[layers])]
    draws = (node_draws(shape, nodes, together=together) for together in (False, True))
    apart, together = (_seconds(shape, speed, one, room, number) for one, number in zip(ways, draws, strict=True))
    keep = together < apart
    told = f"a token costs {1e6 * together:.1f} us with groups whole on nodes, {1e6 * apart:.1f} us without"
    return GroupAffinity(keep, apart, together, spread, whole, home if keep else None, told)


def group_homes(demand: NDArray[Any], room: LocalityProblem, groups: int) -> Held:
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


def _seconds(shape: ModelShape, speed: EngineSpeed, found: LocalityPlacement, room: LocalityProblem, draws: float) -> float:
    """What a token costs, all layers: sending it to other ranks and nodes, and what the fullest rank computes above the mean.

    A destination of mass m is reached with probability 1 - (1 - m)^n: of ranks with n = k, of nodes with n = draws.
    """
    nodes = int(room.node.max()) + 1
    others = (1.0 - found.near) / (nodes - 1)
    off_node = (nodes - 1) * (1.0 - (1.0 - others) ** draws)
    off_rank = (room.ranks - 1) * (1.0 - (1.0 - (1.0 - found.local) / (room.ranks - 1)) ** shape.top_k)
    waiting = shape.top_k * speed.expert_pair * (1.0 / found.balance - 1.0)
    return shape.layers * float((speed.dispatch * off_rank + speed.dispatch_node * off_node + waiting).mean())
