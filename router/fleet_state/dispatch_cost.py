"""Cost of dispatching tokens to experts, by rank of an engine and by cluster: computed once per placement
epoch and cluster version. Pure.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import FloatArray
from fleet.dispatch import SPLIT, as_dispatched
from fleet.experts import ModelShape
from fleet.layout import EP, Layout
from fleet.placement import Placement
from fleet.signatures import ClusterModel
from fleet.timing import expected_local_share, expected_remote


class DispatchPrices(NamedTuple):
    """float64 [ranks, K], per token of each cluster. remote, nodes: expected distinct remote ranks and nodes
    it must reach, summed over whole layers. local: expected share of its routed pairs in them that the rank
    serves itself.
    """

    remote: FloatArray
    nodes: FloatArray
    local: FloatArray


class DispatchCost(NamedTuple):
    """prices: None if no rank is nearer to the experts than another, or if that is unknown; note: the reason,
    if it needs an explanation.
    """

    prices: DispatchPrices | None
    note: str | None
    clusters: int | None = None
    """version of the cluster model behind the prices"""


class DispatchRules(NamedTuple):
    """Statement of an engine about the way of its tokens to experts (`EngineJoined`)."""

    targets: int
    dispatch: str = SPLIT
    gathers_all: bool = False


class DispatchInputs(NamedTuple):
    """Inputs of an engine's prices. clusters None: the tracker has not published any for this model yet."""

    nodes: tuple[int, ...]
    """number of the node of each rank that holds experts, from 0 in order of appearance"""
    shape: ModelShape | None
    layout: Layout | None
    placement: Placement | None
    clusters: ClusterModel | None
    rules: DispatchRules | None = None
    """None: one target for each rank, and nothing else stated"""

    def same_as(self, other: "DispatchInputs") -> bool:
        """Return True if both have the same prices. Epochs may differ, as with engines that start alike."""
        if self.clusters is not other.clusters or (*self[:3], self.rules) != (*other[:3], other.rules):
            return False
        mine, others = self.placement, other.placement
        if mine is None or others is None:
            return mine is others
        return mine.serves_as(others)


def locality(
    nodes: tuple[int, ...],
    shape: ModelShape | None,
    layout: Layout | None,
    placement: Placement | None,
    clusters: ClusterModel | None,
    rules: DispatchRules | None = None,
) -> DispatchCost:
    """Price one engine's placement (`DispatchInputs`).

    Sharded layers do not count here: they cost the same at every rank (`EngineState.gather_token`).
    """
    layout, rules = layout or EP, rules or DispatchRules(len(nodes))
    if shape is None:
        return DispatchCost(None, "the engine reports no experts")
    if alike := _alike(layout, rules, shape, len(nodes)):
        return DispatchCost(None, alike)
    if placement is None:
        return DispatchCost(None, "the engine's placement is unknown")
    if (placement.layers, placement.experts, placement.ranks) != (shape.layers, shape.experts, len(nodes)):
        return DispatchCost(None, f"the placement is of another shape: {placement!r}")
    if clusters is None:
        return DispatchCost(None, "no clusters of this model yet: experts are not priced")
    if clusters.profiles.shape[1:] != (shape.layers, shape.experts):
        return DispatchCost(
            None, f"the clusters are of another shape: {clusters.profiles.shape[1:]}; experts are not priced"
        )
    return DispatchCost(
        _prices(
            clusters,
            as_dispatched(placement, rules.dispatch),
            shape.top_k,
            np.array(nodes),
        ),
        None,
        clusters.version,
    )


def _alike(layout: Layout, rules: DispatchRules, shape: ModelShape, ranks: int) -> str:
    """Return why no target is nearer to the experts than another; empty: some may be."""
    if not layout.has_whole(shape.layers):
        return "experts are sharded over all ranks in this layout"
    if rules.gathers_all:
        return "every rank receives every token: it costs nothing where the experts are"
    if not layout.targets_are_ranks:
        return "the engine is one target: its ranks are equally near to every request"
    if rules.targets != ranks:
        return f"experts are on {ranks} ranks behind {rules.targets} targets: none is known to be nearer"
    return ""


def _prices(
    clusters: ClusterModel, placement: Placement, top_k: int, node: NDArray[np.intp]
) -> DispatchPrices:
    """Compute the prices. Clusters without traffic get the price of the mean, which they represent until they
    are used.
    """
    used = np.flatnonzero(clusters.shares > 0)
    profiles = np.concatenate([clusters.profiles[used], clusters.mean[None]])
    which = np.full(clusters.clusters, len(used))
    which[used] = np.arange(len(used))
    found = (
        *expected_remote(profiles, placement, top_k, node),
        expected_local_share(profiles, placement, node),
    )
    return DispatchPrices(*(np.ascontiguousarray(table[which].T) for table in found))
