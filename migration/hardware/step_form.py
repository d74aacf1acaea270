"""Work of one decode step in each layout, in units whose prices are fitted to timings. Pure.

A step's time is a sum over its parts, each with at most four prices:

    experts, projections, attention: t = fixed + per_byte * bytes + per_flop * flops + per_token * tokens
    collectives:                     t = fixed + per_byte * bytes + per_root * sqrt(bytes)

on the rank that has most of it. It is a roofline whose limits are added instead of compared, as kernels with
several waves behave between the limits. `fixed` holds launches, and the weights of projections, which are
read in every step. The square root stands for the chunks into which collectives cut messages.

Not in it: the host, sampling, norms. They are the same in all layouts.
"""

from math import sqrt
from typing import Literal, NamedTuple

from fleet.layout import head_groups
from fleet.layout_times import LayoutName
from migration.hardware.models import ConsideredModel
from migration.hardware.sizes import attention_bytes
from migration.model.sampling_noise import expected_most

PartName = Literal["experts", "projections", "attention", "collectives"]
PARTS: tuple[PartName, ...] = ("experts", "projections", "attention", "collectives")
Routing = Literal["random", "even"]
"""Distribution of a step's tokens over experts: `random` has uniform independent tokens, and so busier ranks
in small batches; `even` deals pairs out in turn, as benchmarks of kernels do."""


class Units(NamedTuple):
    """Amounts of one part of a step, in all layers, on the busiest rank."""

    calls: float = 1.0
    gigabytes: float = 0.0
    teraflops: float = 0.0
    thousands: float = 0.0
    """of tokens; of collectives, the square root of gigabytes of one call, times calls"""


class ActiveExperts(NamedTuple):
    """Experts of one layer that the busiest rank computes in a step."""

    experts: float
    """whole experts, or parts of them"""
    pairs: float
    """of a token and an expert"""


def active_experts(
    model: ConsideredModel, layout: LayoutName, ranks: int, sequences: float, routing: Routing = "random"
) -> ActiveExperts:
    """Return the experts and pairs of the busiest rank. Sharded: every rank has a part of all of them.

    With uniform tokens an expert is active with probability q = 1 - (1 - k / E)^B. A rank with E / P whole
    experts has a binomial number of them, and the busiest of P ranks about `expected_most` standard
    deviations more than the mean; pairs alike.
    """
    experts, pairs = model.experts, sequences * model.top_k
    if routing == "even":
        if layout != "ep":
            return ActiveExperts(min(experts, pairs), pairs)
        return ActiveExperts(min(experts / ranks, max(1.0, pairs / ranks)), max(1.0, pairs / ranks))
    active = 1.0 - (1.0 - model.top_k / experts) ** sequences
    if layout != "ep":
        return ActiveExperts(experts * active, pairs)
    own, most = experts / ranks, expected_most(ranks)
    mean = pairs / ranks
    busiest = own * active + most * sqrt(own * active * (1.0 - active))
    limit = sequences * min(model.top_k, own)
    return ActiveExperts(min(own, limit, busiest), min(limit, mean + most * sqrt(mean * (1.0 - 1.0 / ranks))))


def own_sequences(layout: LayoutName, ranks: int, sequences: float) -> float:
    """Return the sequences whose attention the busiest rank computes."""
    return sequences if layout == "tp" else max(1.0, sequences / ranks)


def experts_units(
    model: ConsideredModel, layout: LayoutName, ranks: int, sequences: float, routing: Routing = "random"
) -> Units:
    """Return the work of routed experts: weights of active ones read once, 2 flops per weight and pair."""
    active = active_experts(model, layout, ranks, sequences, routing)
    share = 1.0 if layout == "ep" else 1.0 / ranks
    weights = 3.0 * model.hidden * model.expert_intermediate * share
    layers = model.moe_layers
    return Units(
        layers,
        layers * active.experts * model.expert_bytes * share / 1e9,
        layers * active.pairs * 2.0 * weights / 1e12,
    )


def projection_weights(model: ConsideredModel, layout: LayoutName, ranks: int) -> float:
    """Return the weights that every token of a rank is multiplied with, routed experts apart."""
    share = ranks if layout == "tp" else 1
    attention = attention_bytes(model, share) / (model.dense_bits / 8)
    shared = 3.0 * model.moe_layers * model.shared_intermediate * model.hidden / share
    dense = 3.0 * (model.layers - model.moe_layers) * model.dense_intermediate * model.hidden / share
    routers = model.moe_layers * model.experts * model.hidden
    return attention + shared + dense + routers + model.vocabulary * model.hidden / share


def projections_units(model: ConsideredModel, layout: LayoutName, ranks: int, sequences: float) -> Units:
    """Return the work of attention's projections, routers, shared experts, dense layers and the output."""
    own = own_sequences(layout, ranks, sequences)
    return Units(1.0, 0.0, 2.0 * own * projection_weights(model, layout, ranks) / 1e12, own / 1e3)


def attention_units(
    model: ConsideredModel, layout: LayoutName, ranks: int, sequences: float, context: float
) -> Units:
    """Return the work of attention itself: KV read by a rank; also flops for a latent, which all heads
    share."""
    own = own_sequences(layout, ranks, sequences)
    share = ranks if layout == "tp" else 1
    groups = head_groups(share, model.kv_heads)
    seen = (context + min(context, model.window)) / 2 if model.window else context
    read = own * seen * model.cached_token_bytes / groups
    flops = 0.0
    if model.latent is not None:
        per_token = model.heads / share * (model.latent.cached + model.latent.latent)
        flops = 2.0 * own * seen * model.layers * per_token
    return Units(model.layers, read / 1e9, flops / 1e12, model.layers * own / 1e3)


def collectives_units(model: ConsideredModel, layout: LayoutName, ranks: int, sequences: float) -> Units:
    """Return the work between ranks: two all-reduces of a layer's tokens under tensor-parallel attention;
    otherwise an all-gather and a reduce-scatter, which count as one call."""
    calls = 2.0 * model.layers if layout == "tp" else float(model.moe_layers)
    tokens = sequences if layout == "tp" else own_sequences(layout, ranks, sequences) * ranks
    gigabytes = tokens * model.state_bytes / 1e9
    return Units(calls, calls * gigabytes, 0.0, calls * sqrt(gigabytes))


def step_units(
    model: ConsideredModel,
    layout: LayoutName,
    ranks: int,
    sequences: float,
    context: float,
    routing: Routing = "random",
) -> dict[PartName, Units]:
    """Return the work of each part of a decode step. sequences: of the engine; context: tokens of each."""
    return {
        "experts": experts_units(model, layout, ranks, sequences, routing),
        "projections": projections_units(model, layout, ranks, sequences),
        "attention": attention_units(model, layout, ranks, sequences, context),
        "collectives": collectives_units(model, layout, ranks, sequences),
    }
