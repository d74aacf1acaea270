"""What the steps of an engine add up to, from which every rank takes its part when its agent asks. Pure numpy."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.engine import balance


class StepTotals(NamedTuple):
    """Of all steps under one placement so far, or of those between two moments."""

    steps: int
    seconds: float
    served: NDArray[np.float64]
    """[layers, ranks] (token, k) pairs"""
    balance: NDArray[np.float64]
    """[layers]: mean / highest of each step's"""

    @classmethod
    def none(cls, layers: int, ranks: int) -> "StepTotals":
        """Of no step."""
        return cls(0, 0.0, np.zeros((layers, ranks)), np.zeros(layers))

    def after(self, seconds: float, served: NDArray[np.float64]) -> "StepTotals":
        """One step more. served: as of `Traffic`."""
        return StepTotals(self.steps + 1, self.seconds + seconds, self.served + served, self.balance + balance(served))

    def since(self, before: "StepTotals") -> "StepTotals":
        """The steps in between."""
        return StepTotals(self.steps - before.steps, self.seconds - before.seconds, self.served - before.served, self.balance - before.balance)
