"""Choose single layers to shard, and sharded ones to make whole: the alternative to moving experts. Pure.

A layer is hot if sharding it saves more of each step than its change costs over the lifetime of the demand,
and cold if making it whole does. Layers are chosen on the window of demand that plans are fitted to, and must
pay on the next one too, by which they are evaluated. Costs, budget, discount and least gain are those of
plans that move experts, so the two can be compared.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fleet.arrays import FloatArray, IntArray
from fleet.layout import Layout
from fleet.placement import EMPTY, Placement, with_rows
from fleet.text import byte_size
from migration.layouts.hot_layers import LayerGain, hot_layers, layers_to_gather, measured_gathers
from migration.layouts.layer_traffic import LayerTraffic, expected_traffic
from migration.model.cost_model import Payback, payback
from migration.model.engine_view import Demand
from migration.model.plan import Plan
from migration.planning.demand_forecast import DESIGN_EFFECT
from migration.planning.findings import Finding, FindingCode, Infeasible
from migration.planning.layout_switch import switch
from migration.planning.problem import LayerTurning, PlanningProblem
from migration.planning.switch_costs import priced_switch
from migration.solvers.full_placement import full_placement

SUBJECT = "single layers"


@dataclass(frozen=True, eq=False)
class TurnedLayers:
    """Plan that changes the form of single layers."""

    plan: Plan
    layout: Layout
    """At its end."""
    goal: Placement
    """Where it puts the experts of layers that become whole."""
    gains: tuple[LayerGain, ...]
    """Of the layers that change, by falling gain."""
    gain_seconds: float
    """Predicted reduction of the step time, without discount."""
    payback: Payback
    net_seconds: float
    """Gain over the lifetime of the demand, less the cost."""


def turned_layers(found: PlanningProblem, turning: LayerTurning) -> TurnedLayers:
    """Return the best set of layers to turn over within the budget. Raises Infeasible with the reason if
    there is none."""
    placement, goal = found.view.placement, _all_whole(found)
    least = _turn_seconds(found) / max(_seconds_per_gain(found), 1e-300)
    hot, cold = _paying(found, goal, turning, least)
    sizes = _turn_bytes(found, goal)
    each = tuple(max((int(sizes[one.layer]) for one in gains), default=0) for gains in (hot, cold))
    most = TurnLimits(each[0], each[1], found.question.budget_bytes, _room(placement))
    shards, gathers = best_counts(
        np.array([one.seconds - least for one in hot]), np.array([one.seconds - least for one in cold]), most
    )
    if not shards + gathers:
        if not cold and not most.room:
            raise Infeasible(Finding.of(FindingCode.LAYERS_AT_HALF, SUBJECT, gain=hot[0]))
        first = max((*hot, *cold), key=lambda one: one.seconds)
        raise Infeasible(
            Finding.of(
                FindingCode.LAYERS_BEYOND_BUDGET,
                SUBJECT,
                gain=first,
                size=byte_size(int(sizes[first.layer])),
                left=byte_size(found.question.budget_bytes),
            )
        )
    return _planned(found, goal, hot[:shards], cold[:gathers])


# The set


class TurnLimits(NamedTuple):
    """Limits of a set of layers that change their form."""

    shard_bytes: int
    """Bytes that a layer copies to become sharded."""
    gather_bytes: int
    """The same to become whole."""
    budget_bytes: int
    room: int
    """Layers that may become sharded beyond those that become whole."""


def best_counts(shards: FloatArray, gathers: FloatArray, most: TurnLimits) -> tuple[int, int]:
    """Return how many layers to shard, and how many to make whole, so that the gains add up to most.

    shards, gathers: gains of the layers that could become sharded, and whole: [n], falling, above 0. Layers
    of one kind copy equally much, so those that gain most come first. Of equal sums, the one that shards
    fewest is taken.
    """
    sums = [np.concatenate([[0.0], gains.cumsum()]) for gains in (shards, gathers)]
    more, fewer = np.ogrid[: len(sums[0]), : len(sums[1])]
    fits = more * most.shard_bytes + fewer * most.gather_bytes <= most.budget_bytes
    total = np.where(fits & (more - fewer <= most.room), sums[0][:, None] + sums[1], -np.inf)
    best = np.unravel_index(int(total.argmax()), total.shape)
    return int(best[0]), int(best[1])


def _room(placement: Placement) -> int:
    """Return the layers that may be sharded one by one in addition: up to half of all. More of them are a
    matter of the layout as a whole."""
    return max(placement.layers // 2 - len(placement.sharded), 0)


def _paying(
    found: PlanningProblem, goal: Placement, turning: LayerTurning, least: float
) -> tuple[list[LayerGain], list[LayerGain]]:
    """Return (whole layers worth sharding, sharded ones worth making whole) by falling gain: those that gain
    more than `least` seconds of a step, and the error of what all layers have in common, in both windows of
    demand, with the gain in the second one. Raises Infeasible if there are none."""
    enough = least + turning.error
    may = set(found.question.layers or range(found.view.shape.layers)) - turning.resting
    first = _gains(found, goal, turning.even_gain, found.view.demand)
    fitted = {one.layer for gains in first for one in gains if one.seconds > enough} & may
    last = _gains(found, goal, turning.even_gain, found.view.evaluation) if fitted else first
    hot, cold = ([one for one in gains if one.layer in fitted and one.seconds > enough] for gains in last)
    if not hot and not cold:
        free = (one for gains in last for one in gains if one.layer in may)
        nearest = max(free, key=lambda one: one.seconds, default=None)
        resting = tuple(sorted(turning.resting))
        raise Infeasible(
            Finding.of(FindingCode.LAYERS_EQUAL, SUBJECT, gain=nearest, least=enough, resting=resting)
        )
    return hot, cold


def _gains(
    found: PlanningProblem, goal: Placement, even_gain: float, demand: Demand
) -> tuple[list[LayerGain], list[LayerGain]]:
    """Return the gains of the whole layers if they were sharded, and of the sharded ones if they were whole,
    in one window, by falling gain."""
    speed, shape, sharded = found.terms.speed, found.view.shape, found.view.placement.sharded
    traffic = _traffic(found, goal, demand)
    gathers = measured_gathers(traffic, speed, shape, even_gain)
    hot = hot_layers(traffic, speed, shape, -np.inf, gathers)
    return (
        [one for one in hot if one.layer not in sharded],
        list(layers_to_gather(traffic, sharded, speed, shape, -np.inf, gathers)),
    )


def _traffic(found: PlanningProblem, goal: Placement, demand: Demand) -> LayerTraffic:
    """Return the expected traffic of all layers of the model if they were whole."""
    counted = float(demand.pairs.sum()) / max(DESIGN_EFFECT, found.scatter)
    return expected_traffic(goal, np.asarray(demand.rates, np.float64), found.terms, counted)


def _all_whole(found: PlanningProblem) -> Placement:
    """Return the served placement with its sharded layers as they would be whole: of best balance."""
    placement = found.view.placement
    if not (sharded := list(placement.sharded)):
        return placement
    load = found.view.demand.rates[:, sharded].sum(axis=0, dtype=np.float64)
    table = full_placement(
        load,
        placement.ranks,
        placement.slots_per_rank,
        max_replicas=found.config.max_replicas,
        node=found.several_nodes,
    )
    return with_rows(placement, dict(zip(sharded, table, strict=True)), epoch=placement.epoch)


# Costs


def _turn_bytes(found: PlanningProblem, goal: Placement) -> IntArray:
    """Return the bytes that ranks read from each other when a layer changes its form: int64 [layers].

    A rank of a layer that becomes sharded has its part of the experts that it holds. One of a layer that
    becomes whole has one of the P parts of each.
    """
    placement, ranks = found.view.placement, goal.ranks
    parts = ranks * goal.experts - (goal.replicas_on_rank > 0).sum(axis=(1, 2))
    sharded = list(placement.sharded)
    parts[sharded] = (goal.expert_of_slot[sharded] != EMPTY).sum(axis=1) * (ranks - 1)
    return np.asarray(parts * (found.view.shape.expert_bytes // ranks), np.int64)


def _turn_seconds(found: PlanningProblem) -> float:
    """Return the seconds of engine time that the change of a layer costs, about."""
    view = found.view
    one = priced_switch(Layout("dp"), Layout("dp", (0,)), view.shape, found.node, found.links, 0)
    return one.weights_seconds * found.links.contention


def _seconds_per_gain(found: PlanningProblem) -> float:
    """Return the seconds saved over the lifetime of the demand for each second of a step."""
    return found.question.plan_discount * found.steps_per_second * found.config.lifetime_seconds


def _planned(
    found: PlanningProblem, goal: Placement, hot: list[LayerGain], cold: list[LayerGain]
) -> TurnedLayers:
    placement, gains = found.view.placement, sorted((*hot, *cold), key=lambda one: -one.seconds)
    sharded = (set(placement.sharded) - {one.layer for one in cold}) | {one.layer for one in hot}
    layout = Layout("dp", tuple(sorted(sharded)))
    made = switch(placement, layout.sharded, found.room, goal=goal)
    gain = sum(one.seconds for one in gains)
    paid = payback(
        gain * found.question.plan_discount,
        found.steps_per_second,
        found.config.lifetime_seconds,
        made.transfers,
        found.node,
        found.links,
    )
    net = paid.gain_per_second * paid.lifetime_seconds - paid.cost_seconds
    return TurnedLayers(made.plan, layout, goal, tuple(gains), gain, paid, net)
