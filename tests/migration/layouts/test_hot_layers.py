"""Single layers worth sharding under data-parallel attention."""

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.dispatch import loads as loads_of
from fleet.experts import ModelShape
from fleet.placement import linear
from fleet.timing import EngineSpeed, gathered_bytes, step_seconds, surplus_pairs
from migration.layouts.hot_layers import (
    hot_layers,
    layer_costs,
    layers_to_gather,
)
from migration.layouts.layer_traffic import LayerTraffic, expected_reads, expected_traffic
from migration.model.cost_model import CostTerms, priced

SHAPE = ModelShape(layers=6, experts=8, top_k=2, hidden=64, expert_intermediate=64)
SPEED = EngineSpeed(
    step=1e-3, decode_sequence=1e-5, dispatch=2e-7, expert_pair=3e-6, expert_read=1e-6, gather_byte=1e-9
)
LAYERS, RANKS = 6, 4


def traffic(served: Any, remote: Any = 0.0, **about: Any) -> LayerTraffic:
    """One step, unless stated otherwise. served: [layers, ranks]; remote: for every layer, of each rank."""
    served = np.asarray(served, np.float64)
    layers, ranks = served.shape
    steps = about.pop("steps", 1)
    mean, most = served.mean(axis=1), np.maximum(served.max(axis=1), 1e-9)
    pairs = float(served[0].sum())
    fields: dict[str, Any] = {
        "steps": steps,
        "tokens": pairs / SHAPE.top_k,
        "pairs": pairs,
        "whole": np.ones(layers, np.bool_),
        "served": served,
        "remote_ranks": np.broadcast_to(np.asarray(remote, np.float64).reshape(-1, 1), (layers, ranks)),
        "balance": steps * mean / most,
        "reads": np.zeros((layers, ranks)),
        "hottest": np.zeros(layers),
    }
    return LayerTraffic(**{**fields, **about})


def by_the_time_model(one: LayerTraffic, sharded: tuple[int, ...]) -> float:
    """Duration of the step if these layers were sharded, from `fleet.timing`."""
    whole = np.setdiff1d(np.arange(LAYERS), sharded)
    nothing = np.zeros(RANKS)
    reads = one.reads[whole].max(axis=1).sum() + one.reads[list(sharded)].mean(axis=1).sum()
    return float(
        step_seconds(
            SPEED,
            prefill_tokens=nothing,
            prefill_pairs=nothing,
            sequences=np.full(RANKS, one.tokens / RANKS),
            blocks=nothing,
            remote_ranks=one.remote_ranks[whole].sum(axis=0),
            remote_nodes=nothing,
            distinct_experts=np.full(RANKS, reads),
            surplus=float(surplus_pairs(one.served[whole])),
            gathered=one.tokens * gathered_bytes(SHAPE, RANKS, len(sharded)),
        ).max()
    )


loads = st.lists(st.integers(0, 200), min_size=LAYERS * RANKS, max_size=LAYERS * RANKS)


@settings(max_examples=25)
@given(loads, st.lists(st.integers(0, 300), min_size=LAYERS, max_size=LAYERS), st.integers(0, 1000))
def test_no_set_of_layers_is_better_than_those_that_gain(
    flat: list[int], remote: list[int], seed: int
) -> None:
    """Against every subset, priced by the time model."""
    served = np.array(flat, np.float64).reshape(LAYERS, RANKS) + 1.0
    served *= served.sum(axis=1).mean() / served.sum(axis=1, keepdims=True)
    reads = np.random.default_rng(seed).uniform(0, 2, (LAYERS, RANKS))
    one = traffic(served, remote, reads=reads)
    found = hot_layers(one, SPEED, SHAPE)
    every = chain.from_iterable(combinations(range(LAYERS), count) for count in range(LAYERS + 1))
    best = min(by_the_time_model(one, subset) for subset in every)
    chosen = tuple(sorted(layer.layer for layer in found))
    assert by_the_time_model(one, chosen) == pytest.approx(best, abs=1e-12)
    saved = by_the_time_model(one, ()) - by_the_time_model(one, chosen)
    assert sum(layer.seconds for layer in found) == pytest.approx(saved, abs=1e-12)
    assert [layer.seconds for layer in found] == sorted((layer.seconds for layer in found), reverse=True)


@settings(max_examples=25)
@given(loads, st.sets(st.integers(0, LAYERS - 1)))
def test_sharding_and_gathering_lead_to_the_best_set_from_any_other(
    flat: list[int], sharded: set[int]
) -> None:
    served = np.array(flat, np.float64).reshape(LAYERS, RANKS) + 1.0
    served *= served.sum(axis=1).mean() / served.sum(axis=1, keepdims=True)
    whole = np.array([layer not in sharded for layer in range(LAYERS)])
    one = traffic(served, [150] * LAYERS)
    hot = hot_layers(
        traffic(
            served * whole[:, None], np.where(whole, 150, 0), whole=whole, pairs=one.pairs, tokens=one.tokens
        ),
        SPEED,
        SHAPE,
    )
    cold = layers_to_gather(one, sorted(sharded), SPEED, SHAPE)
    assert {layer.layer for layer in cold} <= sharded
    chosen = tuple(sorted(sharded - {layer.layer for layer in cold} | {layer.layer for layer in hot}))
    every = chain.from_iterable(combinations(range(LAYERS), count) for count in range(LAYERS + 1))
    assert by_the_time_model(one, chosen) == pytest.approx(
        min(by_the_time_model(one, subset) for subset in every), abs=1e-12
    )


def test_expected_traffic_costs_what_the_planner_says() -> None:
    placement = linear(layers=3, experts=8, ranks=4, slots_per_rank=2)
    dice = np.random.default_rng(2)
    demand = dice.gamma(0.3, 1.0, (4, 3, 8)) + 0.01
    terms = CostTerms(speed=SPEED, node=np.zeros(4, np.intp), top_k=2, step_tokens=64.0)
    found = layer_costs(expected_traffic(placement, demand, terms), SPEED, SHAPE)
    even = (
        SPEED.expert_pair
        * loads_of(placement, demand, terms.node).mean(axis=1)
        * terms.pairs_per_demand(demand)
    )
    assert found.imbalance + found.dispatch == pytest.approx(priced(placement, demand, terms).seconds - even)


def test_no_replica_brings_a_hot_expert_to_the_mean_but_sharding_does() -> None:
    """One expert has 70 % of the pairs of layer 2, on four ranks. Two replicas leave 35 % on a rank."""
    pairs = 400.0
    demand = np.full((LAYERS, SHAPE.experts), pairs / SHAPE.experts)
    demand[2] = 0.3 * pairs / (SHAPE.experts - 1)
    demand[2, 0] = 0.7 * pairs
    served = demand.reshape(LAYERS, RANKS, -1).sum(axis=2)
    mean = pairs / RANKS
    for replicas in range(1, 3):
        assert demand[2, 0] / replicas > mean, "whatever else lies on these ranks"
    one = traffic(served, hottest=demand.max(axis=1) / pairs)
    (hot,) = hot_layers(one, SPEED, SHAPE)
    assert (hot.layer, hot.reason) == (2, "hot-expert")
    assert hot.imbalance == pytest.approx(SPEED.expert_pair * (served[2].max() - mean))
    assert by_the_time_model(one, (2,)) < by_the_time_model(one, ())
    assert "one expert has 70% of the pairs" in str(hot)


def test_an_even_layer_that_sends_little_stays_whole() -> None:
    assert hot_layers(traffic(np.full((LAYERS, RANKS), 50.0)), SPEED, SHAPE) == ()


def test_the_reason_is_the_largest_cost() -> None:
    served = np.full((LAYERS, RANKS), 50.0)
    sent = np.zeros((LAYERS, RANKS))
    sent[1] = 1000.0
    reads = np.zeros((LAYERS, RANKS))
    reads[3, 0] = 200.0
    served[5] = (140.0, 20.0, 20.0, 20.0)
    found = hot_layers(traffic(served, remote_ranks=sent, reads=reads), SPEED, SHAPE)
    assert {one.layer: one.reason for one in found} == {1: "dispatch", 3: "reads", 5: "imbalance"}


def test_layers_that_are_sharded_already_are_no_candidates() -> None:
    served = np.full((LAYERS, RANKS), 50.0)
    served[5] = (140.0, 20.0, 20.0, 20.0)
    whole = np.ones(LAYERS, np.bool_)
    whole[5] = False
    one = traffic(served, whole=whole)
    assert hot_layers(one, SPEED, SHAPE) == ()
    assert layer_costs(one, SPEED, SHAPE).gain[5] == 0.0


def test_loads_that_differ_from_step_to_step_are_not_averaged_away() -> None:
    """Each rank in turn has all pairs: the sums are even, no step is."""
    one = traffic(np.full((LAYERS, RANKS), 100.0), steps=4, balance=np.full(LAYERS, 4 / RANKS))
    assert one.surplus == pytest.approx(np.full(LAYERS, 25.0 * (RANKS - 1)))


def test_expected_reads_are_those_of_drawn_steps() -> None:
    placement = linear(layers=2, experts=8, ranks=2, slots_per_rank=4)
    dice = np.random.default_rng(0)
    demand = dice.dirichlet(np.ones(8), 2)
    pairs = 6
    drawn = np.empty((2, 2))
    for layer in range(2):
        steps = dice.choice(8, (4000, pairs), p=demand[layer])
        active = (steps[:, :, None] == np.arange(8)).any(axis=1)
        drawn[layer] = active.reshape(4000, 2, 4).sum(axis=2).mean(axis=0)
    by_rank = np.stack([0.3 * demand, 0.7 * demand])
    assert expected_reads(placement, by_rank, pairs) == pytest.approx(drawn, abs=0.05)


def test_sums_that_do_not_fit_are_refused() -> None:
    served = np.full((LAYERS, RANKS), 50.0)
    with pytest.raises(ValueError, match=r"balance has shape \[3\].*must be \[6\]"):
        traffic(served, balance=np.ones(3))
    with pytest.raises(ValueError, match="a window has a step at least"):
        traffic(served, steps=0)
