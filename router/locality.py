"""What sending tokens to experts costs each rank of an engine: precomputed per placement epoch and profile version. Pure."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.layout import EP, Layout
from fleet.placement import Placement
from fleet.popularity import uniform
from fleet.timing import expected_remote_ranks


class Locality(NamedTuple):
    """remote_ranks: float64 [ranks], expected distinct remote ranks per token, summed over MoE layers; note: why it is what it is, when that needs saying."""

    remote_ranks: NDArray[np.float64]
    note: str | None


def locality(ranks: int, shape: ModelShape | None, layout: Layout | None, placement: Placement | None, profile: NDArray[np.float64] | None) -> Locality:
    """Price one engine's placement under the global profile ([layers, experts], None: nobody has observed this model yet).

    Zero, with the reason, where no rank is nearer to the experts than another: no shape, no placement, or experts sharded
    over all ranks. Layers below the layout's boundary are sharded and count for nothing.
    """
    nothing = np.zeros(ranks)
    if shape is None:
        return Locality(nothing, "the engine reports no experts")
    layout = layout or EP
    if layout.attention == "tp" or layout.boundary >= shape.layers:
        return Locality(nothing, "experts are sharded over all ranks in this layout")
    if placement is None:
        return Locality(nothing, "the engine's placement is unknown")
    if (placement.layers, placement.experts, placement.ranks) != (shape.layers, shape.experts, ranks):
        return Locality(nothing, f"the placement is of another shape: {placement!r}")
    note = None
    if profile is None or profile.shape != (shape.layers, shape.experts):
        profile, note = uniform(shape.layers, shape.experts), "no profile of this model yet: experts taken as equally popular"
    above = slice(layout.boundary, None)
    return Locality(expected_remote_ranks(profile[above], placement.share[above], shape.top_k), note)


def as_profile(table: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rows that sum to 1, float64 [layers, experts]; a row without any evidence becomes uniform."""
    wide = table.astype(np.float64)
    sums = wide.sum(axis=1, keepdims=True)
    return np.asarray(np.where(sums > 0, wide / np.where(sums > 0, sums, 1.0), 1.0 / wide.shape[1]))
