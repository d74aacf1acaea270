"""What a plan may do, whatever it would gain. Pure."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """Bounds of one plan. None: no bound of this kind. ValueError names the one that is out of range."""

    most_copies: int | None = None
    """experts' weights brought to ranks, all layers together: the byte budget of a cycle"""
    most_replicas: int | None = None
    """holders of one expert in a layer, the first included"""
    frozen: NDArray[np.bool_] | None = None
    """bool [layers, experts]: experts whose replicas stay where they are (cooling down)"""
    live: NDArray[np.bool_] | None = None
    """bool [ranks]: nothing is put on the others, nothing there counts as a replica"""
    least_replicas: NDArray[np.integer[Any]] | None = None
    """int [layers, experts]: live holders that an expert must keep, 1 unless it was chosen to survive a loss; over several nodes where there are several"""
    target: float = 0.95
    """copying stops at this share of what a full re-placement would gain"""

    def __post_init__(self) -> None:
        if self.most_copies is not None and self.most_copies < 0:
            raise ValueError(f"limits: most_copies must be 0 or more, not {self.most_copies}")
        if self.most_replicas is not None and self.most_replicas < 1:
            raise ValueError(f"limits: most_replicas must be at least 1, not {self.most_replicas}")
        if not 0 < self.target <= 1:
            raise ValueError(f"limits: target must be above 0 and at most 1, not {self.target}")


UNLIMITED = Constraints()
