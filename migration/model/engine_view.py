"""Planner's input: snapshot of one engine. Pure values."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.dispatch import SPLIT
from fleet.experts import ModelShape
from fleet.placement import Placement
from fleet.routings import count_pairs
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed, RearrangeSpeed
from migration.model.move_history import MoveHistory


class DemandCounts(NamedTuple):
    """Demand of one rank's requests in a window: counts with their exposure. The arrays never change."""

    pairs: NDArray[np.float32] | None
    """[layers, experts]: (token, k) pairs counted under all reports before the last; None: there were none"""
    rates: NDArray[np.float32]
    """[layers, experts]: pairs per second of the last report"""
    lasted: float
    """seconds for which the last report has been in effect"""
    exposure: float
    """seconds of the window with known demand; 0: use the rates of the last report"""

    def part(self, ranks: int) -> "DemandCounts":
        """Return the part of one of several ranks with equal demand."""
        pairs = None if self.pairs is None else self.pairs / np.float32(ranks)
        return self._replace(pairs=pairs, rates=self.rates / np.float32(ranks))

    def add_up(self, out: NDArray[np.float32]) -> None:
        """Write the pairs into `out` [layers, experts]; for a rank without exposure, pairs per second."""
        np.multiply(self.rates, np.float32(self.lasted if self.exposure > 0 else 1.0), out=out)
        if self.pairs is not None:
            out += self.pairs


@dataclass(frozen=True, eq=False)
class Demand:
    """Demand of the requests of each rank in a window: counts, their exposure, and the evidence behind them.

    The sums are computed on first use, in any thread.
    """

    ranks: tuple[DemandCounts, ...]
    stated_pairs: NDArray[np.float64]
    """[ranks]: pairs behind each layer, as stated by the publisher of the demand"""
    seconds: float
    """length of the window; 0: an instant"""
    began: float = np.inf
    """start of the window, seconds on the clock of `EngineView.now`; inf: unknown, the window counts as new
    """

    @classmethod
    def of(
        cls, rates: NDArray[Any], pairs: NDArray[np.float64], seconds: float = 0.0, began: float = np.inf
    ) -> "Demand":
        """Make a demand from rates [ranks, layers, experts] in pairs per second and from the pairs [ranks]
        behind each layer."""
        return cls(
            tuple(DemandCounts(None, rank, 0.0, 0.0) for rank in np.asarray(rates, np.float32)),
            pairs,
            seconds,
            began,
        )

    @cached_property
    def exposure(self) -> NDArray[np.float64]:
        """[ranks]: seconds of the window with known demand; 0: the demand is instantaneous."""
        return np.array([rank.exposure for rank in self.ranks])

    @property
    def window_counts(self) -> NDArray[np.float32]:
        """float32 [ranks, layers, experts]: (token, k) pairs of the window; for ranks without exposure, pairs
        per second."""
        found = np.empty((len(self.ranks), *self.ranks[0].rates.shape), np.float32)
        for rank, out in zip(self.ranks, found, strict=True):
            rank.add_up(out)
        return found

    @cached_property
    def _summed(self) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """(`rates`, float64 [ranks]: pairs counted behind each layer), in one pass over the counts."""
        found = self.window_counts
        counted = found.sum(axis=(1, 2), dtype=np.float64) / found.shape[1]
        found /= np.where(self.exposure > 0, self.exposure, 1.0).astype(np.float32)[:, None, None]
        return found, counted

    @property
    def rates(self) -> NDArray[np.float32]:
        """float32 [ranks, layers, experts]: pairs per second, comparable between ranks of unequal
        exposure."""
        return self._summed[0]

    @cached_property
    def by_layer(self) -> NDArray[np.float64]:
        """[layers, ranks, experts]: `rates`, not to be changed; a layer's numbers lie together in memory, as
        most solvers go from layer to layer."""
        found = self.rates.swapaxes(0, 1).astype(np.float64, order="C")
        found.flags.writeable = False
        return found

    @cached_property
    def of_layers(self) -> NDArray[np.float64]:
        """[layers, ranks]: `rates`, summed over experts."""
        return np.asarray(self.by_layer.sum(axis=2))

    @cached_property
    def pairs(self) -> NDArray[np.float64]:
        """[ranks]: pairs behind each layer.

        In long windows the pairs counted here exceed the decaying window of the publisher. The larger of the
        two is used.
        """
        most = np.maximum(self._summed[1], self.stated_pairs)
        return np.where(self.exposure > 0, most, self.stated_pairs)

    def over(self, ranks: int) -> "Demand":
        """Return the demand of the ranks that hold experts, from that of the targets.

        Where several ranks are one target, its requests belong to all of them alike.
        """
        each = ranks // len(self.ranks)
        if each == 1:
            return self
        return replace(
            self,
            ranks=tuple(part for target in self.ranks for part in (target.part(each),) * each),
            stated_pairs=np.repeat(self.stated_pairs / each, each),
        )

    @property
    def evidence(self) -> NDArray[np.float32]:
        """float32 [ranks, layers, experts]: the counts behind the demand, `pairs` in every layer: samples for
        tests of significance."""
        counts = self.window_counts
        total = counts.sum(axis=2, dtype=np.float64, keepdims=True)
        scale = np.where(total > 0, self.pairs[:, None, None] / np.where(total > 0, total, 1.0), 0.0)
        return np.asarray(counts * scale, np.float32)

    def evidence_of(self, layers: NDArray[np.intp]) -> NDArray[np.float64]:
        """float64 [layers, experts]: `evidence` of some layers, summed over ranks."""
        rates, total = self.by_layer, self.of_layers
        if len(layers) < len(rates):
            rates, total = rates[layers], total[layers]
        scale = np.where(total > 0, self.pairs / np.where(total > 0, total, 1.0), 0.0)
        return np.asarray(np.einsum("lr,lre->le", scale, rates))

    def tokens_per_second(self, top_k: int) -> float:
        """Return the tokens per second of all ranks together."""
        return float(self.of_layers.sum() / (len(self.of_layers) * top_k))


class PlannedHomes(NamedTuple):
    """The planner's choice of home ranks for request clusters, with its reason."""

    share: NDArray[np.float32] | None
    """float32 [K, ranks]: share of each cluster's traffic that belongs on each rank. Rows sum to 1; rows of
    unused clusters sum to 0. None: no cluster has a home"""
    clusters: int
    """version of the cluster model; 0: there is none"""
    epoch: int
    """epoch of the placement that the homes were computed for"""
    note: str
    """one sentence: reason for these homes, or for having none"""
    at: float
    """time of the computation, seconds on the clock of `EngineView.now`"""


class CacheUse(NamedTuple):
    """KV cache use of an engine.

    blocks: capacity of each target; used: float64 [targets], blocks held by running requests; block_bytes: 0
    if unknown.
    """

    blocks: int
    used: NDArray[np.float64]
    block_size: int
    block_bytes: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineView:
    """One engine: its placement, its demand and its speed."""

    engine: str
    worker_id: int
    model: str
    shape: ModelShape
    placement: Placement
    """its sharded layers are planned for by no planner: every rank has a part of each of their experts"""
    node: NDArray[np.intp]
    """[ranks]: node number of each rank, from 0"""
    speed: EngineSpeed
    demand: Demand
    """demand from which plans are made"""
    later: Demand | None = None
    """the following window, on which plans are evaluated; None: not available yet"""
    running: NDArray[np.float64] | None = None
    """float64 [targets]: sequences in decode; None: unknown"""
    waiting: NDArray[np.float64] | None = None
    """float64 [targets]: requests not yet admitted; None: unknown"""
    cache: CacheUse | None = None
    clusters: ClusterModel | None = None
    predictability: float = 0.0
    """in [0, 1]: predictability of requests before they run, independent of the placement. 0: a prediction is
    no better than the traffic mix; 1: as good as the counterfactual with full knowledge"""
    homes: PlannedHomes | None = None
    """homes published last; None: none"""
    history: MoveHistory | None = None
    """recent moves; None: unknown"""
    since: Demand | None = None
    """the first complete window after the last plan; None: that window is still open"""
    now: float = 0.0
    """seconds on the clock of the history"""
    step_seconds: float | None = None
    """median duration of recent decode steps; None: unknown"""
    samples: NDArray[np.float32] | None = None
    """float32 [n, layers, experts]: pairs of short intervals of the window `demand`; None: not reported"""
    later_samples: NDArray[np.float32] | None = None
    """the same of the window `later`"""
    tokens: NDArray[np.uint16] | None = None
    """[requests, tokens, layers, k]: experts of some tokens of recent requests; None: not reported"""
    targets: int = 0
    """targets of requests; 0: every rank is one"""
    dispatch: str = SPLIT
    """replica selection of the engine, a `fleet.dispatch.DispatchRule`"""
    rearranges: bool = False
    """the engine moves its experts itself: a plan is one handover to a placement without empty slots"""
    gathers_all: bool = False
    """every rank receives every token, wherever its experts are"""
    rearrange_speed: RearrangeSpeed = field(default_factory=RearrangeSpeed)
    """time that such a handover takes"""

    @cached_property
    def token_weights(self) -> NDArray[np.float64] | None:
        """float64 [requests, K]: clusters of the requests of `tokens`; None: one of both is unknown."""
        if self.tokens is None or self.clusters is None:
            return None
        requests, _, layers, _ = self.tokens.shape
        # In single precision, as signatures are computed: these arrays are large.
        counts = np.empty((requests, layers, self.shape.experts), np.float32)
        for request, out in zip(self.tokens, counts, strict=True):
            out[...] = count_pairs(request, self.shape.experts)
        return np.asarray(self.clusters.signature(counts), np.float64)

    @cached_property
    def token_halves(self) -> tuple[NDArray[np.int64], ...]:
        """int64 [layers, S, k], twice: `tokens` of every other request, and of the others."""
        if self.tokens is None:
            return ()
        layers, k = self.tokens.shape[2:]
        return tuple(
            np.ascontiguousarray(half.reshape(-1, layers, k).swapaxes(0, 1), np.int64)
            for half in (self.tokens[::2], self.tokens[1::2])
        )

    @cached_property
    def past(self) -> MoveHistory | None:
        """Return the move history, completed with the demand seen since the last plan."""
        return (
            self.history
            if self.history is None or self.since is None
            else self.history.seen(self.since.window_counts)
        )

    @property
    def evaluation(self) -> Demand:
        """Demand on which plans are evaluated."""
        return self.demand if self.later is None else self.later
