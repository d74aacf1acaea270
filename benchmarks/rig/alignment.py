"""Placement that puts jointly used experts on one rank: a greedy planner on the tracker's clusters."""

import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement
from fleet.signatures import ClusterModel

CROWDED = 1.2
"""Largest share of the traffic with its home on one rank, in fair shares."""
LOADED = 1.05
"""Largest share of pairs for the experts of one rank, in fair shares."""


def aligned(model: ClusterModel, ranks: int, epoch: int = 0) -> Placement:
    """Assign each layer's experts in falling order of a rank's excess use over the mean: to that rank while
    it has a free slot and its load allows it, else to the least loaded rank with a slot."""
    demand = _demand(model, homes(model, ranks), ranks)
    slots = -(-model.mean.shape[1] // ranks)
    table = np.stack([_layer(demand[:, layer], model.mean[layer], slots) for layer in range(demand.shape[1])])
    return Placement(table, experts=model.mean.shape[1], ranks=ranks, epoch=epoch)


def homes(model: ClusterModel, ranks: int) -> NDArray[np.intp]:
    """Return intp [K]: the home rank of each cluster; similar clusters together, no rank overloaded. Unused
    ones: rank 0."""
    centred = (model.profiles - model.mean).reshape(model.clusters, -1)
    home, load, mix = np.zeros(model.clusters, np.intp), np.zeros(ranks), np.zeros((ranks, centred.shape[1]))
    for cluster in np.argsort(-model.shares, kind="stable"):
        share = float(model.shares[cluster])
        if share <= 0:
            break
        likeness = np.where((load == 0) | (load + share <= CROWDED / ranks), mix @ centred[cluster], -np.inf)
        rank = int(likeness.argmax()) if np.isfinite(likeness).any() else int(load.argmin())
        home[cluster] = rank
        load[rank] += share
        mix[rank] += share * centred[cluster]
    return home


def _demand(model: ClusterModel, home: NDArray[np.intp], ranks: int) -> NDArray[np.float64]:
    """Return float64 [ranks, layers, experts]: the share of the traffic with its home on a rank, by
    expert."""
    demand = np.zeros((ranks, *model.mean.shape))
    for cluster, rank in enumerate(home):
        demand[rank] += model.shares[cluster] * model.profiles[cluster]
    return demand


def _layer(demand: NDArray[np.float64], mean: NDArray[np.float32], slots: int) -> NDArray[np.int16]:
    """Return int16 [ranks * slots] from demand [ranks, experts] and the mix [experts]."""
    ranks = len(demand)
    table, filled, load = np.full((ranks, slots), -1, np.int16), np.zeros(ranks, int), np.zeros(ranks)
    for expert in np.argsort(demand.mean(axis=0) - demand.max(axis=0), kind="stable"):
        free = filled < slots
        light = free & (load + mean[expert] <= LOADED / ranks)
        rank = (
            int(np.where(light, demand[:, expert], -1.0).argmax())
            if light.any()
            else int(np.where(free, load, np.inf).argmin())
        )
        table[rank, filled[rank]] = expert
        filled[rank] += 1
        load[rank] += mean[expert]
    return table.ravel()
