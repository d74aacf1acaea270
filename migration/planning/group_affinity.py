"""Decide for group-limited gates if the experts of a group should stay on one node. Pure.

Where a token's experts come from few groups (DeepSeek-V3: 4 of 8), keeping groups on one node bounds the
number of nodes that the token must reach. But popular groups then make popular nodes, and experts cannot go
where their tokens originate. Both placements are made, and the cheaper one is reported.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import BoolArray
from fleet.experts import ModelShape
from fleet.timing import EngineSpeed
from migration.model.grouped_routing import expected_nodes, limited, node_draws
from migration.solvers.locality_placement import LocalityPlacement, LocalityProblem, locality_placement

_LAYERS = 6
"""Number of layers that are placed both ways; they are representative of all layers."""


class GroupAffinity(NamedTuple):
    """Decision and costs of both ways.

    keep: True if groups should stay together. apart, together: engine seconds per token, all layers: sending
    it, and the compute of the fullest rank above the mean. nodes_apart, nodes_together: distinct nodes that a
    token reaches in a layer if experts were equally popular. home: bool [layers, ranks, experts], for
    `migration.solvers.locality_placement.LocalityProblem.home`; None where groups should not stay together.
    """

    keep: bool
    apart: float
    together: float
    nodes_apart: float
    nodes_together: float
    home: BoolArray | None


def keep_groups(
    shape: ModelShape, speed: EngineSpeed, demand: NDArray[Any], problem: LocalityProblem
) -> GroupAffinity:
    """Decide if every group's base copies should be on one node, and on which one.

    demand: [ranks, layers, experts] pairs by the rank that serves their requests.
    """
    nodes = int(problem.node.max()) + 1
    sizes = np.bincount(problem.node)
    fits = nodes > 1 and shape.groups % nodes == 0 and (sizes * problem.slots >= shape.experts // nodes).all()
    if not limited(shape) or not fits:
        return GroupAffinity(False, 0.0, 0.0, float(nodes), float(nodes), None)
    spread, whole = (expected_nodes(shape, nodes, together=together) for together in (False, True))
    layers = np.unique(
        np.linspace(0, demand.shape[1] - 1, min(_LAYERS, demand.shape[1])).round().astype(np.intp)
    )
    some = demand[:, layers]
    home = group_homes(demand, problem, shape.groups)
    ways = [locality_placement(some, replace(problem, home=mask)) for mask in (None, home[layers])]
    draws = (node_draws(shape, nodes, together=together) for together in (False, True))
    apart, together = (
        _seconds(shape, speed, one, problem, number) for one, number in zip(ways, draws, strict=True)
    )
    keep = together < apart
    return GroupAffinity(keep, apart, together, spread, whole, home if keep else None)


def group_homes(demand: NDArray[Any], problem: LocalityProblem, groups: int) -> BoolArray:
    """Assign groups to nodes; bool [layers, ranks, experts]: the ranks of each expert's node.

    Groups choose in falling order of load. A group takes the node of most demand for it, less the load by
    which the node would exceed its fair part. Every node takes equally many groups.
    """
    layers, experts = demand.shape[1:]
    nodes = int(problem.node.max()) + 1
    on_nodes = (
        np.stack([demand[problem.node == at].sum(axis=0, dtype=np.float64) for at in range(nodes)], axis=1)
        .reshape(layers, nodes, groups, -1)
        .sum(axis=3)
    )
    load = on_nodes.sum(axis=1)
    fair, rows = load.sum(axis=1) / nodes, np.arange(layers)
    full, groups_left = np.zeros((layers, nodes)), np.full((layers, nodes), groups // nodes)
    of_group = np.empty((layers, groups), np.intp)
    # Largest groups first, as in longest-processing-time scheduling: small ones fill the gaps.
    for group in np.argsort(-load, axis=1, kind="stable").T:
        over = np.maximum(full + load[rows, group][:, None] - fair[:, None], 0.0)
        node = np.where(groups_left > 0, on_nodes[rows, :, group] - over, -np.inf).argmax(axis=1)
        of_group[rows, group] = node
        full[rows, node] += load[rows, group]
        groups_left[rows, node] -= 1
    return np.asarray(of_group.repeat(experts // groups, axis=1)[:, None, :] == problem.node[None, :, None])


def _seconds(
    shape: ModelShape, speed: EngineSpeed, found: LocalityPlacement, problem: LocalityProblem, draws: float
) -> float:
    """Return the cost of a token, all layers: sending it to other ranks and nodes, and the fullest rank's
    excess compute.

    A destination of mass m is reached with probability 1 - (1 - m)^n: of ranks with n = k, of nodes with n =
    draws.
    """
    nodes = int(problem.node.max()) + 1
    others = (1.0 - found.near) / (nodes - 1)
    off_node = (nodes - 1) * (1.0 - (1.0 - others) ** draws)
    off_rank = (problem.ranks - 1) * (1.0 - (1.0 - (1.0 - found.local) / (problem.ranks - 1)) ** shape.top_k)
    waiting = shape.top_k * speed.expert_pair * (1.0 / found.balance - 1.0)
    return shape.layers * float((speed.dispatch * off_rank + speed.dispatch_node * off_node + waiting).mean())
