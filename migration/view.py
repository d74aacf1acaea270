"""What the planner looks at: one engine as it is at a moment. Values; pure."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.layout import Layout
from fleet.placement import Placement
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from migration.history import History


class Demand(NamedTuple):
    """What the requests of each rank wanted in a window.

    rates: float32 [ranks, layers, experts], (token, k) pairs per second. pairs: float64 [ranks], pairs behind each layer of them.
    seconds: length of the window; 0: a moment.
    """

    rates: NDArray[np.float32]
    pairs: NDArray[np.float64]
    seconds: float

    def tokens_per_second(self, top_k: int) -> float:
        """Of all ranks together."""
        return float(self.rates.sum(dtype=np.float64) / (len(self.rates[0]) * top_k))


class CacheUse(NamedTuple):
    """The KV cache of an engine. blocks: of each rank; used: float64 [ranks], of them in use; block_bytes: 0 where nobody said."""

    blocks: int
    used: NDArray[np.float64]
    block_size: int
    block_bytes: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class View:
    """One engine: what it holds, what is wanted of it, what it can do."""

    engine: str
    worker_id: int
    model: str
    shape: ModelShape
    layout: Layout
    placement: Placement
    node: NDArray[np.intp]
    """[ranks], numbers from 0"""
    speed: EngineSpeed
    demand: Demand
    """what plans are made from"""
    later: Demand | None = None
    """a window after that one, on which they are judged; None: there is none yet"""
    running: NDArray[np.float64] | None = None
    """float64 [ranks], sequences that decode; None: nobody said"""
    waiting: NDArray[np.float64] | None = None
    """float64 [ranks], requests not yet admitted; None: nobody said"""
    cache: CacheUse | None = None
    clusters: ClusterModel | None = None
    gain: float = 0.0
    """in [0, 1]: what predictions of clusters are worth at present"""
    homes: NDArray[np.float32] | None = None
    """float32 [K, ranks]: the homes that were said last; None: there are none"""
    history: History | None = None
    """what was moved lately; None: nobody knows"""
    now: float = 0.0
    """seconds on the clock of the history"""

    @property
    def judged(self) -> Demand:
        """What plans are judged on."""
        return self.demand if self.later is None else self.later
