"""Single layers that are sharded, or made whole, where that gains more than moving experts."""

from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.arrays import FloatArray
from fleet.experts import ModelShape
from fleet.placement import Placement, linear, with_rows
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from migration.model.engine_view import Demand, EngineView
from migration.model.plan import replay
from migration.planning.layer_turns import TurnLimits, best_counts
from migration.planning.planner import decide
from migration.planning.planner_decision import PlannerDecision
from migration.planning.problem import LayerTurning, PlanningQuestion

LAYERS, EXPERTS, RANKS = 6, 8, 4
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=2, hidden=64, expert_intermediate=64)
SPEED = EngineSpeed(step=1e-3, decode_sequence=1e-5, expert_pair=2e-6, dispatch=0.0)
CONFIG = MigrationConfig()
PAIRS, PAIRS_PER_SECOND = 400_000.0, 100_000.0
TIGHT = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS)
"""No slot for a second replica."""
ROOMY = linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS, slots_per_rank=4)
DEAR = LayerTurning(even_gain=-1e-4)
"""Sharding a layer like all others would cost 100 us of a step."""


def demand_of(share: FloatArray, seed: int, pairs: float = PAIRS) -> Demand:
    """Draw a window of a demand [layers, experts], alike on all ranks. Rows of `share` sum to 1."""
    dice = np.random.default_rng(seed)
    counts = np.stack([dice.poisson(pairs / RANKS * share) for _ in range(RANKS)]).astype(np.float64)
    rates = counts * (PAIRS_PER_SECOND / pairs)
    return Demand.of(rates, counts.sum(axis=2).mean(axis=1), pairs / PAIRS_PER_SECOND)


def even() -> FloatArray:
    return np.full((LAYERS, EXPERTS), 1.0 / EXPERTS)


def with_hot_expert(layer: int, part: float = 0.7) -> FloatArray:
    """One expert of a layer has this part of its pairs."""
    share = even()
    share[layer] = (1.0 - part) / (EXPERTS - 1)
    share[layer, 0] = part
    return share


def view(placement: Placement, share: FloatArray, **about: Any) -> EngineView:
    plain: dict[str, Any] = {
        "node": np.zeros(RANKS, np.intp),
        "speed": SPEED,
        "demand": demand_of(share, 1),
        "later": demand_of(share, 2),
        "running": np.full(RANKS, 64.0),
    }
    return EngineView(
        engine="e", worker_id=1, model="m", shape=SHAPE, placement=placement, **{**plain, **about}
    )


def decided(
    seen: EngineView, turning: LayerTurning | None = DEAR, budget: int = 1 << 40, **config: Any
) -> PlannerDecision:
    return decide(seen, PlanningQuestion("roost", budget, turning=turning), replace(CONFIG, **config))


def sharded_after(seen: EngineView, found: PlannerDecision) -> tuple[int, ...]:
    assert found.plan is not None
    return replay(seen.placement, found.plan)[-1].sharded


def test_a_hot_expert_that_no_slot_can_relieve_has_its_layer_sharded() -> None:
    seen = view(TIGHT, with_hot_expert(2))
    found = decided(seen)
    assert sharded_after(seen, found) == (2,)
    assert found.turned is not None
    (gain,) = found.turned.gains
    assert (gain.layer, gain.reason) == (2, "hot-expert")
    mean = 4 * 64 * SHAPE.top_k / RANKS
    highest = 4 * 64 * SHAPE.top_k * (0.7 + 0.3 / 7)
    assert gain.seconds == pytest.approx(SPEED.expert_pair * (highest - mean) - 1e-4, rel=0.05)
    assert found.record.gain_seconds == gain.seconds
    assert "layer 2: sharding saves" in found.record.single_layers
    assert found.plan is not None
    assert found.record.copied_bytes == found.plan.bytes
    assert [step.kind for step in found.record.steps] == ["shard"]


def test_an_even_load_leaves_every_layer_whole() -> None:
    found = decided(view(TIGHT, even()))
    assert found.plan is None
    assert "single layers: none gains" in found.record.single_layers
    assert "nearest: layer" in found.record.single_layers


def test_layers_that_are_all_alike_stay_whole_however_much_sharding_them_saves() -> None:
    """That is the choice of the layout as a whole, by measured steps."""
    assert decided(view(TIGHT, even()), LayerTurning(even_gain=1e-3)).plan is None


def test_a_layer_that_is_hot_no_more_becomes_whole() -> None:
    served = with_rows(TIGHT, {2: None}, epoch=3)
    cooled = view(served, even())
    found = decided(cooled)
    assert sharded_after(cooled, found) == ()
    assert found.turned is not None
    assert [(gain.layer, gain.reason) for gain in found.turned.gains] == [(2, "gathers")]
    still = decided(view(served, with_hot_expert(2)))
    assert still.plan is None


def test_layers_that_become_whole_get_a_placement_that_suits_the_demand() -> None:
    """Experts 0 to 1 of layer 2 are in demand: in order, they would be on one rank."""
    share = even()
    share[2] = [0.4, 0.4, *[0.2 / 6] * 6]
    served = with_rows(ROOMY, {2: None}, epoch=3)
    seen = view(served, share)
    found = decided(seen)
    assert found.plan is not None
    after = replay(served, found.plan)[-1]
    assert not after.sharded
    load = (share[2] * after.replicas_on_rank[2] / after.replicas_on_rank[2].sum(axis=0)).sum(axis=1)
    assert load.max() < 1.05 / RANKS


def test_experts_move_where_replicas_relieve_the_hot_one_for_less() -> None:
    seen = view(ROOMY, with_hot_expert(2))
    found = decided(seen)
    assert found.turned is None
    assert found.plan is not None
    assert sharded_after(seen, found) == ()
    assert "gains" in found.record.single_layers


def test_a_change_beyond_the_budget_is_refused_with_its_bytes() -> None:
    """A rank has 2 of 8 experts, and reads a quarter of each of the other 6."""
    needed = RANKS * 6 * SHAPE.expert_bytes // 4
    seen = view(TIGHT, with_hot_expert(2))
    found = decided(seen, budget=needed - 1)
    assert found.turned is None
    assert "the change copies" in found.record.single_layers
    assert "the byte budget has" in found.record.single_layers
    assert sharded_after(seen, decided(seen, budget=needed)) == (2,)


def test_nothing_turns_without_permission_or_while_it_rests() -> None:
    seen = view(TIGHT, with_hot_expert(2))
    found = decided(seen, None)
    assert (found.turned, found.record.single_layers) == (None, "")
    resting = decided(seen, DEAR._replace(resting=frozenset({2})))
    assert resting.turned is None
    assert "2 turned over a short time ago" in resting.record.single_layers
    assert "layer 2" not in resting.record.single_layers


def test_an_error_of_the_measured_steps_counts_against_a_change_of_either_kind() -> None:
    hot, cooled = view(TIGHT, with_hot_expert(2)), view(with_rows(TIGHT, {2: None}, epoch=3), even())
    for seen in (hot, cooled):
        assert decided(seen, DEAR._replace(error=2e-5)).turned is not None
        assert decided(seen, DEAR._replace(error=1e-3)).turned is None


def test_a_gain_too_small_for_a_plan_is_too_small_for_a_layer() -> None:
    found = decided(view(TIGHT, with_hot_expert(2)), min_gain=0.9)
    assert found.turned is None
    assert "is the least" in found.record.single_layers


def test_a_discount_on_predictions_counts_here_too() -> None:
    seen = view(TIGHT, with_hot_expert(2))
    question = PlanningQuestion("roost", 1 << 40, turning=DEAR)
    full, half = (decide(seen, question._replace(plan_discount=part), CONFIG) for part in (1.0, 0.5))
    assert half.record.gain_per_second == pytest.approx(0.5 * full.record.gain_per_second)


def test_at_most_half_of_the_layers_are_sharded_one_by_one() -> None:
    share = np.concatenate([with_hot_expert(0, 0.3 + 0.1 * layer)[:1] for layer in range(LAYERS)])
    seen = view(TIGHT, share)
    found = decided(seen)
    assert sharded_after(seen, found) == (3, 4, 5)
    served = with_rows(TIGHT, dict.fromkeys((3, 4, 5)), epoch=3)
    assert "half of the layers are the most" in decided(view(served, share)).record.single_layers


def test_noise_of_a_short_window_makes_no_layer_hot() -> None:
    few = 40.0 * EXPERTS
    for seed in range(5):
        windows = {"demand": demand_of(even(), seed, few), "later": demand_of(even(), 100 + seed, few)}
        found = decided(view(TIGHT, even(), **windows), LayerTurning(even_gain=0.0))
        assert found.turned is None


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 50), max_size=5),
    st.lists(st.integers(1, 50), max_size=5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 24),
    st.integers(0, 5),
)
def test_no_set_of_up_to_ten_layers_gains_more_within_the_limits(
    shards: list[int], gathers: list[int], each: int, other: int, budget: int, room: int
) -> None:
    shards, gathers = sorted(shards, reverse=True), sorted(gathers, reverse=True)
    found = best_counts(
        np.array(shards, np.float64), np.array(gathers, np.float64), TurnLimits(each, other, budget, room)
    )
    layers = [(gain, each, 1) for gain in shards] + [(gain, other, -1) for gain in gathers]
    subsets = chain.from_iterable(combinations(layers, count) for count in range(len(layers) + 1))
    best = max(
        sum(gain for gain, _, _ in subset)
        for subset in subsets
        if sum(size for _, size, _ in subset) <= budget and sum(more for *_, more in subset) <= room
    )
    more, fewer = found
    assert sum(shards[:more]) + sum(gathers[:fewer]) == best
    assert more * each + fewer * other <= budget
    assert more - fewer <= room
