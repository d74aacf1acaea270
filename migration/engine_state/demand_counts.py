"""Demand of one rank within a window: integral of the demand reports, and the last report. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.facts.dynamo_kv import KvMetrics
from migration.model.engine_view import DemandCounts


@dataclass(slots=True)
class DemandByRank:
    """Demand of one rank: the last report and the pairs counted since the window began.

    A report is added lazily: the time for which it has been in effect is counted, and multiplied when the
    next arrives.
    """

    rates: NDArray[np.float32]
    """[layers, experts], pairs per second: the last report; read-only"""
    counts: NDArray[np.float32] | None = None
    """[layers, experts], pairs: from the previous reports of this window; read-only"""
    lasted: float = 0.0
    """seconds of this window for which the last report has been in effect"""
    exposure: float = 0.0
    """seconds of this window with known demand"""
    version: int = -1
    reported_at: float = -np.inf
    active: bool = False
    stated_pairs: float = 0.0
    counted_at: float = 0.0
    load: KvMetrics | None = None
    load_at: float = -np.inf

    def report(self, rates: NDArray[np.float32]) -> None:
        """Take over the rates of a new report."""
        if self.lasted and self.active:
            added = self.rates * np.float32(self.lasted)
            self.counts = added if self.counts is None else self.counts + added
        self.rates, self.lasted, self.active = rates, 0.0, bool(rates.any())

    def begin(self) -> None:
        """Start a new window."""
        self.counts, self.lasted, self.exposure = None, 0.0, 0.0

    @property
    def counted_pairs(self) -> float:
        """Pairs of this window, of the layer with most."""
        counted = self.rates.sum(axis=1) * np.float32(self.lasted)
        if self.counts is not None:
            counted = counted + self.counts.sum(axis=1)
        return float(counted.max())

    @property
    def window(self) -> DemandCounts:
        """Counts of the current window so far."""
        return DemandCounts(self.counts, self.rates, self.lasted, self.exposure)
