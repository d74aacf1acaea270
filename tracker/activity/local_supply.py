"""What a rank's requests want against what the rank holds. Pure; every answer is defined when there is no evidence."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.layout import EP, Layout
from fleet.placement import Placement, PlacementRecord

NAMED = 16
"""Experts named per rank and list."""
DOUBT = 2.0
"""Standard deviations of a Poisson count by which an expert must stand out to be named."""

Named = tuple[tuple[int, int, float], ...]
"""(layer, expert, tokens per second)"""


@dataclass(frozen=True, eq=False)
class LocalSupply:
    """Who holds what in one placement epoch. held: bool [ranks, layers, experts]; layers below `boundary` are sharded over all ranks."""

    epoch: int
    held: NDArray[np.bool_]
    boundary: int

    @classmethod
    def of(cls, record: PlacementRecord, layout: Layout | None) -> "LocalSupply":
        """ValueError for a placement that contradicts itself. Takes milliseconds for a large one."""
        layout = layout or EP
        placement = Placement.from_record(record)
        held = np.ascontiguousarray(placement.replicas_on_rank.transpose(1, 0, 2) > 0)
        return cls(record.epoch, held, record.layers if layout.attention == "tp" else layout.boundary)

    def remote(self, rank: int, rates: NDArray[Any]) -> float | None:
        """Share of the rates [layers, experts] whose expert has no replica on the rank, over the layers that hold whole experts.

        None when nothing is wanted there, or no layer holds whole experts: then no rank is nearer than another.
        """
        wanted = rates[self.boundary :]
        total = float(wanted.sum(dtype=np.float64))
        if total <= 0.0:
            return None
        return min(1.0, max(0.0, 1.0 - float(wanted[self.held[rank, self.boundary :]].sum(dtype=np.float64)) / total))

    def wanted_remote(self, rank: int, rates: NDArray[Any], pairs: NDArray[Any]) -> Named:
        """Experts wanted here and held elsewhere, most wanted first. pairs: the counts behind the rates; those that noise may explain are left out."""
        stands_out = pairs > DOUBT * np.sqrt(pairs)
        return self._named(stands_out & ~self.held[rank], rates, -1.0)

    def local_idle(self, rank: int, rates: NDArray[Any], pairs: NDArray[Any]) -> Named:
        """Experts held here that are clearly wanted less than half as much as the layer's experts are on average, least wanted first."""
        mean = pairs.mean(axis=1, keepdims=True)
        idle = pairs + DOUBT * np.sqrt(pairs + 1.0) < 0.5 * mean
        return self._named(idle & self.held[rank], rates, 1.0)

    def _named(self, chosen: NDArray[np.bool_], rates: NDArray[Any], direction: float) -> Named:
        """Some of the chosen experts [layers, experts], by rate: falling for direction -1, rising for 1."""
        layers, experts = np.nonzero(chosen[self.boundary :])
        found = rates[self.boundary :][layers, experts]
        if len(found) > NAMED:
            few = direction * found <= np.partition(direction * found, NAMED - 1)[NAMED - 1]
            layers, experts, found = layers[few], experts[few], found[few]
        order = np.lexsort((experts, layers, direction * found))[:NAMED]
        return tuple((int(layers[at]) + self.boundary, int(experts[at]), float(found[at])) for at in order)
