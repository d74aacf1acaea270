"""Expert demand of a rank's requests compared with the experts on the rank. Pure; every result is defined
without evidence.
"""

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
    """Placement of one epoch, by rank. held: bool [ranks, layers, experts]. whole: layers in which a rank may
    be nearer to an expert than others, ascending.
    """

    epoch: int
    held: NDArray[np.bool_]
    whole: NDArray[np.intp]

    @classmethod
    def of(cls, record: PlacementRecord, layout: Layout | None) -> "LocalSupply":
        """Build from a placement record. ValueError for an inconsistent one. Takes milliseconds for a large
        placement.
        """
        layout = layout or EP
        placement = Placement.from_record(record)
        held = np.ascontiguousarray(placement.replicas_on_rank.transpose(1, 0, 2) > 0)
        return cls(record.epoch, held, layout.whole(record.layers if layout.targets_are_ranks else 0))

    def remote(self, rank: int, rates: NDArray[Any]) -> float | None:
        """Return the share of the rates [layers, experts] for experts without a replica on the rank, over
        layers of whole experts.

        None without demand, or without a layer of whole experts: then all ranks are equally near.
        """
        wanted = rates[self.whole]
        total = float(wanted.sum(dtype=np.float64))
        if total <= 0.0:
            return None
        return min(
            1.0, max(0.0, 1.0 - float(wanted[self.held[rank, self.whole]].sum(dtype=np.float64)) / total)
        )

    def wanted_remote(self, rank: int, rates: NDArray[Any], pairs: NDArray[Any]) -> Named:
        """Return the experts in demand here but placed elsewhere, highest demand first.

        pairs: counts behind the rates. Experts that noise may explain are left out.
        """
        stands_out = pairs > DOUBT * np.sqrt(pairs)
        return self._named(stands_out & ~self.held[rank], rates, -1.0)

    def local_idle(self, rank: int, rates: NDArray[Any], pairs: NDArray[Any]) -> Named:
        """Return the experts placed here with clearly less than half the layer's mean demand, lowest demand
        first.
        """
        mean = pairs.mean(axis=1, keepdims=True)
        idle = pairs + DOUBT * np.sqrt(pairs + 1.0) < 0.5 * mean
        return self._named(idle & self.held[rank], rates, 1.0)

    def _named(self, chosen: NDArray[np.bool_], rates: NDArray[Any], direction: float) -> Named:
        """Return up to NAMED of the chosen experts [layers, experts], by rate: descending for direction -1,
        ascending for 1.
        """
        layers, experts = np.nonzero(chosen[self.whole])
        layers = self.whole[layers]
        found = rates[layers, experts]
        if len(found) > NAMED:
            few = direction * found <= np.partition(direction * found, NAMED - 1)[NAMED - 1]
            layers, experts, found = layers[few], experts[few], found[few]
        order = np.lexsort((experts, layers, direction * found))[:NAMED]
        return tuple((int(layers[at]), int(experts[at]), float(found[at])) for at in order)
