"""Limits on a plan, regardless of its gain. Pure."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """Limits of one plan. None means no limit of that kind. Raises ValueError naming the value that is out of
    range."""

    max_copies: int | None = None
    """limit on expert weight copies to ranks, over all layers: the byte budget of one cycle"""
    max_replicas: int | None = None
    """limit on the ranks that hold one expert of a layer, including the first"""
    frozen: NDArray[np.bool_] | None = None
    """bool [layers, experts]: experts whose replicas must not move (cooldown)"""
    live: NDArray[np.bool_] | None = None
    """bool [ranks]: ranks that are alive. Nothing is placed on the others and their copies do not count as
    replicas"""
    min_replicas: NDArray[np.integer[Any]] | None = None
    """int [layers, experts]: live holders that each expert must keep. The value is 1, except for experts that
    must survive the loss of a rank. With several nodes, their holders are on different nodes"""
    target: float = 0.95
    """copying stops at this share of the gain of a full re-placement"""

    def __post_init__(self) -> None:
        if self.max_copies is not None and self.max_copies < 0:
            raise ValueError(f"limits: max_copies must be 0 or more, not {self.max_copies}")
        if self.max_replicas is not None and self.max_replicas < 1:
            raise ValueError(f"limits: max_replicas must be at least 1, not {self.max_replicas}")
        if not 0 < self.target <= 1:
            raise ValueError(f"limits: target must be above 0 and at most 1, not {self.target}")


UNLIMITED = Constraints()
