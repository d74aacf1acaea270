"""Which replica serves a token: one rule, for whoever sends tokens and for whoever foretells where they go. Pure.

A token of rank h wants expert e:

1. h holds a replica: it serves the part `keep` of its own tokens itself.
2. What is left of the tokens of h's node goes to the replicas of that node, each the part `near` (in proportion where they claim more than all).
3. What is left then, from wherever, goes to the replicas by `spill`, h's own among them.

All three are shares, so the expected load is a sum of products (`served`), and single tokens are sent such that any run of them comes as
near to the shares as whole tokens can (`Chooser`).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.placement import EMPTY, FULL, Placement

Table = NDArray[np.float64]


class Flows(NamedTuple):
    """Where an engine's (token, k) pairs are served, per slot: float64 [layers, slots] each; their sum is the slot's load."""

    kept: Table
    """from the holder's own requests, by `keep`"""
    near: Table
    """from its node, by `near`"""
    spilt: Table
    """from anywhere, by `spill`"""

    @property
    def served(self) -> Table:
        return np.asarray(self.kept + self.near + self.spilt)


def flows(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> Flows:
    """Expected pairs of each slot. demand: [ranks, layers, experts] pairs (any unit) by the rank their requests live on; node: int [ranks], from 0."""
    ranks, layers, experts = demand.shape
    table, per = placement.expert_of_slot, placement.slots_per_rank
    held = table != EMPTY
    layer = np.arange(layers)[:, None]
    expert = np.where(held, table, 0)
    rank = np.arange(table.shape[1]) // per
    keep, spill, claim = (np.asarray(part, np.float64) / FULL for part in placement.split)
    kept = demand[rank[None, :], layer, expert] * keep
    nodes = int(node.max()) + 1
    if nodes == 1 and not placement.split.near.any():
        rest = demand.sum(axis=0, dtype=np.float64) - _sums(kept, expert, experts)
        return Flows(kept, np.zeros_like(kept), spill * rest[layer, expert])
    left = np.zeros((layers, nodes, experts))
    for at in range(ranks):
        left[:, node[at]] += demand[at]
    place = node[rank][None, :] * experts + expert
    left -= _sums(kept, place, nodes * experts).reshape(left.shape)
    flat = left.reshape(layers, -1)
    claimed = _sums(claim, place, nodes * experts)
    taken = flat / np.maximum(claimed, 1.0)
    near = claim * taken[layer, place]
    rest = (flat - taken * claimed).reshape(left.shape).sum(axis=1)
    return Flows(kept, near, spill * rest[layer, expert])


def loads(placement: Placement, demand: NDArray[Any], node: NDArray[np.intp]) -> Table:
    """float64 [layers, ranks]: expected pairs that each rank serves. Arguments as of `flows`."""
    served = flows(placement, demand, node).served
    return np.asarray(served.reshape(placement.layers, placement.ranks, -1).sum(axis=2))


def _sums(values: Table, place: NDArray[Any], places: int) -> Table:
    """float64 [layers, places]: values [layers, slots] added up by place [layers, slots]."""
    layers = len(values)
    index = (np.arange(layers)[:, None] * places + place).ravel()
    return np.asarray(np.bincount(index, values.ravel(), layers * places).reshape(layers, places))
