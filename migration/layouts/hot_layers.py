"""Gain of sharding single layers under data-parallel attention, from measured traffic.

In a whole layer every step waits for the rank that serves most pairs, for the busiest sender of tokens, and
for the rank that reads most experts. In a sharded layer ranks share pairs and reads evenly, and every rank
gathers the tokens of all others. Costs add per layer, so every layer is judged alone, and the best set of
layers is that of all layers that gain. It is also the answer to a hot expert: an expert with more than a
rank's mean load keeps its rank above the mean unless replicas split it, and sharding splits every expert.

What all layers have in common is measured rather than priced where an engine measured its layouts
(`measured_gathers`): fixed parts of collectives are in no price.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np

from fleet.arrays import FloatArray
from fleet.experts import ModelShape
from fleet.timing import EngineSpeed, gathered_bytes
from migration.layouts.layer_traffic import LayerTraffic
from migration.model.sampling_noise import expected_most

LayerReason = Literal["hot-expert", "imbalance", "dispatch", "reads", "gathers"]
"""Cost that weighs most in the layer as it is: for a whole layer one of the first four, for a sharded one its
gathers. `hot-expert`: imbalance, and one expert alone has more pairs than a rank's mean."""


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


def layer_costs(
    traffic: LayerTraffic, speed: EngineSpeed, shape: ModelShape, gathers: float | None = None
) -> LayerCosts:
    """Price every layer as it is, and as it would be if it were sharded. Layers that are sharded already cost
    0.

    gathers: seconds of a step that any sharded layer costs, as measured; None: the price of its gathers.
    Links between machines are in `EngineSpeed.gather_byte`, but not in the price of dispatch, since reports
    do not tell nodes apart: across machines the gain is a lower bound.
    """
    tokens = traffic.tokens / traffic.steps
    busiest = traffic.remote_ranks.max(axis=1) / traffic.steps
    more_reads = traffic.reads.max(axis=1) - traffic.reads.mean(axis=1)
    if gathers is None:
        gathers = speed.gather_byte * gathered_bytes(shape, traffic.ranks, 1) * tokens
    return LayerCosts(
        speed.expert_pair * traffic.surplus,
        speed.dispatch * busiest * traffic.whole,
        speed.expert_read * more_reads * traffic.whole,
        gathers * traffic.whole.astype(np.float64),
    )


def measured_gathers(
    if_whole: LayerTraffic, speed: EngineSpeed, shape: ModelShape, even_gain: float
) -> float:
    """Return the seconds of a step that a sharded layer costs, from measured steps of whole layouts.

    if_whole: traffic with all layers whole. even_gain: seconds of a step that sharding a layer without any
    imbalance saves, as measured; below 0 where it costs.

    A layer like all others is then worth `even_gain` and the imbalance that chance makes, but never more than
    nothing: whether all layers are to be sharded is a matter of the layout as a whole. So a layer is hot for
    what sets it apart, and cold once nothing does.
    """
    costs, mean = layer_costs(if_whole, speed, shape), if_whole.pairs / if_whole.steps / if_whole.ranks
    chance = speed.expert_pair * expected_most(if_whole.ranks) * sqrt(mean)
    return float((costs.dispatch + costs.reads).mean()) + max(-even_gain, chance)


class LayerGain(NamedTuple):
    """Layer that is worth another form. Costs are seconds of a step."""

    layer: int
    seconds: float
    """gain of a step in the other form"""
    reason: LayerReason
    imbalance: float
    """costs of the whole layer"""
    dispatch: float
    reads: float
    gathers: float
    """cost of the sharded layer"""
    hottest: float
    """share of pairs of the most demanded expert"""

    def __str__(self) -> str:
        spent = {"imbalance": self.imbalance, "dispatch": self.dispatch, "expert reads": self.reads}
        parts = ", ".join(f"{name} {1e6 * cost:.1f}" for name, cost in spent.items())
        verb = "whole experts save" if self.reason == "gathers" else "sharding saves"
        hot = f"; one expert has {self.hottest:.0%} of the pairs" if self.reason == "hot-expert" else ""
        return (
            f"layer {self.layer}: {verb} {1e6 * self.seconds:.1f} us of a step (whole: {parts} us; sharded:"
            f" gathers {1e6 * self.gathers:.1f} us{hot})"
        )


def hot_layers(
    traffic: LayerTraffic,
    speed: EngineSpeed,
    shape: ModelShape,
    least_gain: float = 0.0,
    gathers: float | None = None,
) -> tuple[LayerGain, ...]:
    """Return the whole layers worth sharding, by falling gain, then by number.

    least_gain: seconds of a step that a layer must save more than. gathers: as in `layer_costs`.
    """
    costs = layer_costs(traffic, speed, shape, gathers)
    names: tuple[LayerReason, ...] = ("imbalance", "dispatch", "reads")
    found = []
    for layer in _largest(costs.gain, least_gain):
        one = _gain(layer, float(costs.gain[layer]), "imbalance", costs, traffic)
        reason = names[int(np.argmax((one.imbalance, one.dispatch, one.reads)))]
        if reason == "imbalance" and one.hottest * traffic.ranks > 1.0:
            reason = "hot-expert"
        found.append(one._replace(reason=reason))
    return tuple(found)


def layers_to_gather(
    if_whole: LayerTraffic,
    sharded: Sequence[int],
    speed: EngineSpeed,
    shape: ModelShape,
    least_gain: float = 0.0,
    gathers: float | None = None,
) -> tuple[LayerGain, ...]:
    """Return the sharded layers that would cost less whole, by falling gain, then by number.

    if_whole: `expected_traffic` of a placement in which they are whole, since sharded layers are not
    measured. least_gain, gathers: as in `hot_layers`.
    """
    costs = layer_costs(if_whole, speed, shape, gathers)
    gain = np.full(len(if_whole.whole), -np.inf)
    gain[list(sharded)] = -costs.gain[list(sharded)]
    return tuple(
        _gain(layer, float(gain[layer]), "gathers", costs, if_whole) for layer in _largest(gain, least_gain)
    )


def _largest(gain: FloatArray, least: float) -> list[int]:
    """Return the layers that gain more than this, the largest gain first."""
    order = np.argsort(-gain, kind="stable")
    layers: list[int] = order[gain[order] > least].tolist()
    return layers


def _gain(
    layer: int, seconds: float, reason: LayerReason, costs: LayerCosts, traffic: LayerTraffic
) -> LayerGain:
    """Return the gain of one layer with its costs."""
    parts = [float(part[layer]) for part in costs]
    return LayerGain(
        layer, seconds, reason, parts[0], parts[1], parts[2], parts[3], float(traffic.hottest[layer])
    )
