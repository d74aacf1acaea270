"""What the planner looks at: one engine as it is at a moment. Values; pure."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.experts import ModelShape
from fleet.layout import Layout
from fleet.placement import Placement
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from migration.model.move_history import MoveHistory


class DemandCounts(NamedTuple):
    """What the requests of one rank wanted in a window. Its arrays never change."""

    pairs: NDArray[np.float32] | None
    """[layers, experts]: (token, k) pairs under all words before the last; None: there were none"""
    rates: NDArray[np.float32]
    """[layers, experts]: pairs per second, by the last word"""
    lasted: float
    """seconds that the last word holds so far"""
    known: float
    """seconds of the window of which it is known what was wanted; 0: the last word stands for it"""

    def wanted(self, out: NDArray[np.float32]) -> None:
        """The pairs into [layers, experts]; of a rank with 0 known seconds, pairs per second."""
        np.multiply(self.rates, np.float32(self.lasted if self.known > 0 else 1.0), out=out)
        if self.pairs is not None:
            out += self.pairs


@dataclass(frozen=True, eq=False)
class Demand:
    """What the requests of each rank wanted in a window. It is summed up by whoever asks first, in whatever thread."""

    ranks: tuple[DemandCounts, ...]
    told: NDArray[np.float64]
    """[ranks]: pairs behind each layer, as whoever said the demand says"""
    seconds: float
    """length of the window; 0: a moment"""
    began: float = np.inf
    """when it began, seconds on the clock of `EngineView.now`; inf: nobody says, and it counts as new"""

    @classmethod
    def of(cls, rates: NDArray[Any], pairs: NDArray[np.float64], seconds: float = 0.0, began: float = np.inf) -> "Demand":
        """Rates [ranks, layers, experts], pairs per second, with so many pairs [ranks] behind each layer."""
        return cls(tuple(DemandCounts(None, rank, 0.0, 0.0) for rank in np.asarray(rates, np.float32)), pairs, seconds, began)

    @cached_property
    def known(self) -> NDArray[np.float64]:
        """[ranks]: seconds of the window of which it is known what was wanted; 0: the rates are of this moment."""
        return np.array([rank.known for rank in self.ranks])

    @property
    def wanted(self) -> NDArray[np.float32]:
        """float32 [ranks, layers, experts]: (token, k) pairs; of ranks with 0 known seconds, pairs per second."""
        found = np.empty((len(self.ranks), *self.ranks[0].rates.shape), np.float32)
        for rank, out in zip(self.ranks, found, strict=True):
            rank.wanted(out)
        return found

    @cached_property
    def rates(self) -> NDArray[np.float32]:
        """float32 [ranks, layers, experts]: pairs per second."""
        found = self.wanted
        found /= np.where(self.known > 0, self.known, 1.0).astype(np.float32)[:, None, None]
        return found

    @cached_property
    def pairs(self) -> NDArray[np.float64]:
        """[ranks]: behind each layer. What was counted over a window is more than what its speaker remembers, once the window is long."""
        counted = self.rates.sum(axis=(1, 2), dtype=np.float64) * self.known / self.rates.shape[1]
        return np.where(self.known > 0, np.maximum(counted, self.told), self.told)

    def tokens_per_second(self, top_k: int) -> float:
        """Of all ranks together."""
        return float(self.rates.sum(dtype=np.float64) / (len(self.rates[0]) * top_k))


class PlannedHomes(NamedTuple):
    """Where kinds of requests should live."""

    share: NDArray[np.float32] | None
    """float32 [K, ranks], how much of a cluster's traffic belongs on which rank; rows sum to 1, of unused clusters to 0. None: nobody has a home"""
    clusters: int
    """version of the cluster model; 0: there is none"""
    epoch: int
    """of the placement that they were found for"""
    note: str
    """in a sentence: why these, or why none"""
    at: float
    """when they were found, seconds on the clock of `EngineView.now`"""


class CacheUse(NamedTuple):
    """The KV cache of an engine. blocks: of each rank; used: float64 [ranks], of them held by running requests; block_bytes: 0 where nobody said."""

    blocks: int
    used: NDArray[np.float64]
    block_size: int
    block_bytes: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineView:
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
    foreseen: float = 0.0
    """in [0, 1]: how far requests can be told apart before they run, whatever the placement: how far what is foretold of one goes from the traffic's mix
    to hindsight"""
    homes: PlannedHomes | None = None
    """what was said of homes last; None: nothing"""
    history: MoveHistory | None = None
    """what was moved lately; None: nobody knows"""
    since: Demand | None = None
    """the first whole window after that; None: it is not over yet"""
    now: float = 0.0
    """seconds on the clock of the history"""

    @cached_property
    def past(self) -> MoveHistory | None:
        """The history, with the evidence that there is for what the last plan did."""
        return self.history if self.history is None or self.since is None else self.history.seen(self.since.wanted)

    @property
    def judged(self) -> Demand:
        """What plans are judged on."""
        return self.demand if self.later is None else self.later
