"""A placement that puts what is asked for together on one rank: what a planner would make of the tracker's clusters, greedily."""

import numpy as np
from numpy.typing import NDArray

from fleet.placement import Placement
from fleet.signatures import ClusterModel

CROWDED = 1.2
"""Share of the traffic that may be at home on one rank, in fair shares."""
LOADED = 1.05
"""Pairs that the experts of one rank may get, in fair shares."""


def aligned(model: ClusterModel, ranks: int, epoch: int = 0) -> Placement:
    """Each layer's experts in falling order of how much more one rank's clusters use them than the mean, to that rank while it has a slot
    and its load allows it, else to the least loaded rank with a slot."""
    wanted = _wanted(model, homes(model, ranks), ranks)
    slots = -(-model.mean.shape[1] // ranks)
    table = np.stack([_layer(wanted[:, layer], model.mean[layer], slots) for layer in range(wanted.shape[1])])
    return Placement(table, experts=model.mean.shape[1], ranks=ranks, epoch=epoch)


def homes(model: ClusterModel, ranks: int) -> NDArray[np.intp]:
    """intp [K]: the rank each cluster is at home on; like ones together, none crowded. Unused ones: rank 0."""
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


def _wanted(model: ClusterModel, home: NDArray[np.intp], ranks: int) -> NDArray[np.float64]:
    """float64 [ranks, layers, experts]: the part of the traffic that is at home on a rank and goes to an expert."""
    wanted = np.zeros((ranks, *model.mean.shape))
    for cluster, rank in enumerate(home):
        wanted[rank] += model.shares[cluster] * model.profiles[cluster]
    return wanted


def _layer(wanted: NDArray[np.float64], mean: NDArray[np.float32], slots: int) -> NDArray[np.int16]:
    """int16 [ranks * slots] of wanted [ranks, experts] and the mix [experts]."""
    ranks = len(wanted)
    table, filled, load = np.full((ranks, slots), -1, np.int16), np.zeros(ranks, int), np.zeros(ranks)
    for expert in np.argsort(wanted.mean(axis=0) - wanted.max(axis=0), kind="stable"):
        free = filled < slots
        light = free & (load + mean[expert] <= LOADED / ranks)
        rank = int(np.where(light, wanted[:, expert], -1.0).argmax()) if light.any() else int(np.where(free, load, np.inf).argmin())
        table[rank, filled[rank]] = expert
        filled[rank] += 1
        load[rank] += mean[expert]
    return table.ravel()
