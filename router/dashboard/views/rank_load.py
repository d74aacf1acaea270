"""Load of the ranks of an engine that its placement should give at the present demand.

`fleet.dispatch.loads` computes the same from the demand of every rank for every expert. Here the requests of
all ranks have the profile of the model, each rank its share of the tokens, so that no table of ranks x layers
x experts is needed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from fleet.placement import FULL, Placement


def expected_load(
    placement: Placement, profile: FloatArray, weights: FloatArray, node: NDArray[np.intp]
) -> FloatArray:
    """Return the load of each rank, in units of the mean over the ranks: float64 [layers, ranks]; 1 in
    sharded layers.

    profile: [layers, experts], sums to 1 per layer. weights: [ranks], share of each rank in the tokens; sums
    to 1. node: [ranks], machine of each rank, from 0. ValueError for a profile of another shape.
    """
    layers, ranks, experts = placement.layers, placement.ranks, placement.experts
    if profile.shape != (layers, experts):
        raise ValueError(f"profile has shape {profile.shape}; the placement has {(layers, experts)}")
    expert = np.maximum(placement.expert_of_slot, 0).astype(np.intp)
    rank = np.arange(expert.shape[1]) // placement.slots_per_rank
    layer = np.arange(layers)[:, None]
    keep, spill, near = (np.asarray(part, np.float64) / FULL for part in placement.split)
    kept = keep * weights[rank] * profile[layer, expert]
    if near.any():
        nodes = int(node.max()) + 1
        place = node[rank] * experts + expert
        of_node = np.bincount(node, weights, nodes)
        left = (of_node[None, :, None] * profile[:, None, :]).reshape(layers, -1)
        left = np.maximum(left - _sums(kept, place, nodes * experts), 0.0)
        claimed = _sums(near, place, nodes * experts)
        taken = left / np.maximum(claimed, 1.0)
        nearby = near * taken[layer, place]
        rest = np.maximum(left - taken * claimed, 0.0).reshape(layers, nodes, experts).sum(axis=1)
    else:
        nearby = np.zeros_like(kept)
        rest = np.maximum(profile - _sums(kept, expert, experts), 0.0)
    served = kept + nearby + spill * rest[layer, expert]
    load = ranks * served.reshape(layers, ranks, -1).sum(axis=2)
    load[list(placement.sharded)] = 1.0
    return np.asarray(load)


def _sums(values: FloatArray, place: NDArray[Any], places: int) -> FloatArray:
    """Sum values [layers, slots] by place [layers, slots]: float64 [layers, places]."""
    layers = len(values)
    index = (np.arange(layers)[:, None] * places + place).ravel()
    return np.asarray(np.bincount(index, values.ravel(), layers * places).reshape(layers, places))
