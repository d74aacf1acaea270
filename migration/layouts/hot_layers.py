"""Gain of sharding single layers under data-parallel attention, from measured traffic.

In a whole layer every step waits for the rank that serves most pairs, for the busiest sender of tokens, and
for the rank that reads most experts. In a sharded layer ranks share pairs and reads evenly, and every rank
gathers the tokens of all others. Costs add per layer, so every layer is judged alone, and the best set of
layers is that of all layers that gain. It is also the answer to a hot expert: an expert with more than a
rank's mean load keeps its rank above the mean unless replicas split it, and sharding splits every expert.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fleet.arrays import BoolArray, FloatArray
from fleet.dispatch import flows
from fleet.experts import ModelShape
from fleet.placement import Placement
from fleet.timing import EngineSpeed, gathered_bytes

LayerReason = Literal["hot-expert", "imbalance", "dispatch", "reads"]
"""Cost that weighs most in a layer worth sharding. `hot-expert`: imbalance, and one expert alone has more
pairs than a rank's mean."""
_CHANGE = 0.05
"""Change of a layer's gain, as a share of the largest cost of a layer, below which the last answer holds."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTraffic:
    """Measured traffic of an engine over a window, summed over the ranks' reports (`DispatchMeasured`).

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


class LayerCosts(NamedTuple):
    """Seconds of a step in each layer beyond the even share of pairs and reads, float64 [layers] each."""

    imbalance: FloatArray
    dispatch: FloatArray
    reads: FloatArray
    gathers: FloatArray
    """cost of the layer once it is sharded, in place of the other three"""

    @property
    def gain(self) -> FloatArray:
        """[layers]: seconds of a step that sharding the layer saves; below 0 where it costs."""
        return self.imbalance + self.dispatch + self.reads - self.gathers


def layer_costs(traffic: LayerTraffic, speed: EngineSpeed, shape: ModelShape) -> LayerCosts:
    """Price every layer as it is, and as it would be if it were sharded. Layers that are sharded already cost
    0.

    Links between machines are in `EngineSpeed.gather_byte`, but not in the price of dispatch, since reports
    do not tell nodes apart: across machines the gain is a lower bound.
    """
    tokens = traffic.tokens / traffic.steps
    busiest = traffic.remote_ranks.max(axis=1) / traffic.steps
    more_reads = traffic.reads.max(axis=1) - traffic.reads.mean(axis=1)
    gather = speed.gather_byte * gathered_bytes(shape, traffic.ranks, 1) * tokens
    return LayerCosts(
        speed.expert_pair * traffic.surplus,
        speed.dispatch * busiest * traffic.whole,
        speed.expert_read * more_reads * traffic.whole,
        gather * traffic.whole.astype(np.float64),
    )


class HotLayer(NamedTuple):
    """Layer that is worth sharding."""

    layer: int
    seconds: float
    """gain of a step"""
    reason: LayerReason
    imbalance: float
    """seconds of a step in the layer as it is, for each of its costs"""
    dispatch: float
    reads: float
    gathers: float
    """seconds of a step for gathers in the sharded layer"""
    hottest: float
    """share of pairs of the most demanded expert"""

    def __str__(self) -> str:
        spent = {"imbalance": self.imbalance, "dispatch": self.dispatch, "expert reads": self.reads}
        parts = ", ".join(f"{name} {1e6 * cost:.1f}" for name, cost in spent.items())
        hot = f"; one expert has {self.hottest:.0%} of the pairs" if self.reason == "hot-expert" else ""
        return (
            f"layer {self.layer}: sharding saves {1e6 * self.seconds:.1f} us of a step ({parts} us as it is,"
            f" gathers {1e6 * self.gathers:.1f} us{hot})"
        )


def hot_layers(
    traffic: LayerTraffic, speed: EngineSpeed, shape: ModelShape, least_gain: float = 0.0
) -> tuple[HotLayer, ...]:
    """Return the whole layers worth sharding, by falling gain, then by number.

    least_gain: seconds of a step that a layer must save more than.
    """
    costs = layer_costs(traffic, speed, shape)
    gain = costs.gain
    order = np.argsort(-gain, kind="stable")
    names: tuple[LayerReason, ...] = ("imbalance", "dispatch", "reads")
    found = []
    for layer in order[gain[order] > least_gain].tolist():
        imbalance, dispatch, reads, gathers = (float(part[layer]) for part in costs)
        reason = names[int(np.argmax((imbalance, dispatch, reads)))]
        hottest = float(traffic.hottest[layer])
        if reason == "imbalance" and hottest * traffic.ranks > 1.0:
            reason = "hot-expert"
        found.append(
            HotLayer(
                layer,
                float(gain[layer]),
                reason,
                imbalance=imbalance,
                dispatch=dispatch,
                reads=reads,
                gathers=gathers,
                hottest=hottest,
            )
        )
    return tuple(found)


class HotLayerWatch:
    """Layers worth sharding, computed again only when costs changed."""

    def __init__(self, speed: EngineSpeed, shape: ModelShape) -> None:
        self._speed, self._shape = speed, shape
        self._gain: FloatArray | None = None
        self._size = 0.0
        self._found: tuple[HotLayer, ...] = ()

    def of(self, traffic: LayerTraffic) -> tuple[HotLayer, ...]:
        """Return `hot_layers` of this traffic, or the last answer if no layer's gain changed by 5 % of the
        largest cost of a layer."""
        costs = layer_costs(traffic, self._speed, self._shape)
        gain = costs.gain
        known = self._gain
        if (
            known is None
            or known.shape != gain.shape
            or float(np.abs(gain - known).max(initial=0.0)) > _CHANGE * self._size
        ):
            self._gain = gain
            self._size = max(float(part.max(initial=0.0)) for part in costs)
            self._found = hot_layers(traffic, self._speed, self._shape)
        return self._found
