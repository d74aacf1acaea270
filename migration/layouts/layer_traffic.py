"""Traffic of an engine's layers as the choice of their forms needs it: expected of a placement."""

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from fleet.arrays import BoolArray, FloatArray
from fleet.dispatch import flows, loads
from fleet.placement import Placement
from migration.model.cost_model import CostTerms, balance
from migration.model.cost_model import traffic as dispatch_traffic
from migration.model.sampling_noise import expected_most


@dataclass(frozen=True, slots=True, eq=False)
class LayerTraffic:
    """Traffic of an engine's steps, summed over them.

    ValueError names sums that do not fit together.
    """

    steps: float
    tokens: float
    """computed tokens of all ranks"""
    pairs: float
    """(token, k) pairs of these tokens in one layer"""
    whole: BoolArray
    """[layers]: False for layers that are sharded already, whose figures below are 0"""
    served: FloatArray
    """[layers, ranks]: pairs that each rank served"""
    remote_ranks: FloatArray
    """[layers, ranks]: distinct other ranks that each rank's tokens were sent to, summed over its tokens"""
    balance: FloatArray
    """[layers]: sum over the steps of mean / highest load of a rank"""
    reads: FloatArray
    """[layers, ranks]: expected distinct experts that a step activates on each rank (`expected_reads`); zeros
    leave reads out"""
    hottest: FloatArray
    """[layers]: share of a layer's pairs that its most demanded expert has; 0 if it is not known"""

    def __post_init__(self) -> None:
        layers, ranks = self.served.shape
        shapes = {
            "whole": (self.whole, (layers,)),
            "remote_ranks": (self.remote_ranks, (layers, ranks)),
            "balance": (self.balance, (layers,)),
            "reads": (self.reads, (layers, ranks)),
            "hottest": (self.hottest, (layers,)),
        }
        for name, (array, shape) in shapes.items():
            if array.shape != shape:
                raise ValueError(
                    f"layer traffic: {name} has shape {list(array.shape)}; served is of {layers} layers and"
                    f" {ranks} ranks, so it must be {list(shape)}"
                )
        if not (self.steps >= 1 and self.tokens >= 0 and self.pairs >= 0):
            raise ValueError(
                f"layer traffic: {self.steps} steps of {self.tokens} tokens and {self.pairs} pairs; a"
                " window has a step at least, and nothing below 0"
            )

    @property
    def ranks(self) -> int:
        return int(self.served.shape[1])

    @property
    def surplus(self) -> FloatArray:
        """[layers]: pairs of the most loaded rank above the mean, of a step.

        From the balance of single steps, since loads that differ from step to step add up to even sums; at
        least that of the sums.
        """
        mean = self.served.mean(axis=1) / self.steps
        share = np.clip(self.balance / self.steps, 1.0 / self.ranks, 1.0)
        summed = self.served.max(axis=1) / self.steps - mean
        return np.asarray(np.maximum(mean * (1.0 / share - 1.0), summed) * self.whole)


def expected_traffic(
    placement: Placement, demand: FloatArray, terms: CostTerms, counted: float = inf
) -> LayerTraffic:
    """Return the traffic of a step that a placement would have under a demand.

    demand: [ranks, layers, experts], pairs in any unit, by the rank of their requests. All layers of the
    placement count as whole: for those that are sharded, give the placement that they would return to. The
    loads of a step scatter as `migration.model.cost_model.expert_seconds` says.

    counted: independent pairs of each layer that the demand was counted from. The imbalance that their chance
    explains is left out.
    """
    pairs = terms.step_tokens * terms.top_k
    served = loads(placement, demand, terms.node) * terms.pairs_per_demand(demand)
    served = _without_chance(served, expected_most(placement.ranks) / sqrt(counted / placement.ranks))
    sent = dispatch_traffic(placement, demand, terms)
    chance = expected_most(placement.ranks) / np.sqrt(np.maximum(served.mean(axis=1), 1e-9))
    by_expert = demand.sum(axis=0, dtype=np.float64)
    total = by_expert.sum(axis=1)
    return LayerTraffic(
        steps=1.0,
        tokens=terms.step_tokens,
        pairs=pairs,
        whole=np.ones(placement.layers, np.bool_),
        served=served,
        remote_ranks=np.maximum(sent.ranks_out, sent.ranks_in),
        balance=1.0 / (1.0 + np.hypot(1.0 / balance(served) - 1.0, chance)),
        reads=expected_reads(placement, demand, pairs),
        hottest=np.divide(by_expert.max(axis=1), total, out=np.zeros(len(total)), where=total > 0),
    )


def _without_chance(served: FloatArray, chance: float) -> FloatArray:
    """Bring loads [layers, ranks] nearer to their mean, by the part of the highest one's excess that chance
    explains. chance: expected excess of even loads, over the mean."""
    excess = 1.0 / balance(served) - 1.0
    kept = np.sqrt(np.maximum(excess**2 - chance**2, 0.0)) / np.maximum(excess, 1e-300)
    mean = served.mean(axis=1, keepdims=True)
    return np.asarray(mean + (served - mean) * np.minimum(kept, 1.0)[:, None])


def expected_reads(placement: Placement, demand: FloatArray, pairs: float) -> FloatArray:
    """Return the expected distinct experts that a step activates on each rank: float64 [layers, ranks].

    demand: [ranks, layers, experts], pairs in any unit, by the rank of their requests. pairs: of a step and
    layer. A slot that serves share q of them is read with probability 1 - (1 - q)^pairs.
    """
    served = flows(placement, demand, np.zeros(placement.ranks, np.intp)).served
    total = served.sum(axis=1, keepdims=True)
    share = np.divide(served, total, out=np.zeros(served.shape), where=total > 0)
    read = -np.expm1(pairs * np.log1p(-np.minimum(share, 1.0 - 1e-12)))
    return np.asarray(read.reshape(placement.layers, placement.ranks, -1).sum(axis=2))
