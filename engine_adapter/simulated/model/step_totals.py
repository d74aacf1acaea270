"""Totals over an engine's steps. Each rank takes its share when its agent polls. Pure NumPy."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import balance


class StepTotals(NamedTuple):
    """Totals of all steps under one placement so far, or of those between two times."""

    steps: int
    seconds: float
    served: NDArray[np.float64]
    """[layers, ranks] (token, k) pairs."""
    balance: NDArray[np.float64]
    """[layers]: sum of mean / highest load of each step."""

    @classmethod
    def none(cls, layers: int, ranks: int) -> "StepTotals":
        """Return the totals of no steps."""
        return cls(0, 0.0, np.zeros((layers, ranks)), np.zeros(layers))

    def after(self, seconds: float, served: NDArray[np.float64]) -> "StepTotals":
        """Add one step. served: as in `StepTraffic`."""
        return StepTotals(
            self.steps + 1, self.seconds + seconds, self.served + served, self.balance + balance(served)
        )

    def since(self, before: "StepTotals") -> "StepTotals":
        """Return the totals of the steps since `before`."""
        return StepTotals(
            self.steps - before.steps,
            self.seconds - before.seconds,
            self.served - before.served,
            self.balance - before.balance,
        )
