"""Plans for engines that move their experts themselves: one handover to one whole map."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.dispatch import ROW_HASH
from fleet.experts import ModelShape
from fleet.placement import EMPTY, Placement, repeated
from fleet.timing import EngineSpeed, RearrangeSpeed
from migration.config import POLICIES, MigrationConfig
from migration.model.engine_view import Demand, EngineView
from migration.model.move_history import MoveHistory
from migration.model.plan import Plan, replay
from migration.planning.planner import decide
from migration.planning.planner_decision import PlannerDecision, ReasonCode
from migration.planning.problem import PlanningQuestion, prepare
from migration.planning.rearrangement import one_map, rearrange_seconds

EXPERTS, LAYERS = 12, 3
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=2, hidden=8, expert_intermediate=16)
CONFIG = MigrationConfig(min_pairs=0.0, min_gain=0.0)
SPEED = EngineSpeed(step=1e-3, decode_sequence=1e-5, expert_pair=2e-6)


def as_vllm_starts(ranks: int, per: int) -> Placement:
    """The experts in order, and the redundant slots with the first experts again."""
    table = np.tile(np.arange(ranks * per) % EXPERTS, (LAYERS, 1))
    return Placement(table, experts=EXPERTS, ranks=ranks, epoch=3, duplicates=True)


def view(placement: Placement, truth: NDArray[Any], pairs: float = 1e6, **about: Any) -> EngineView:
    """An engine that moves its experts itself; truth: [layers, experts], the demand of all its requests."""
    dice = np.random.default_rng(5)
    share = truth / truth.sum(axis=1, keepdims=True)
    windows = [
        Demand.of(
            np.broadcast_to(dice.poisson(share * pairs) / placement.ranks, (placement.ranks, *truth.shape)),
            np.full(placement.ranks, pairs / placement.ranks),
            60.0,
        )
        for _ in range(2)
    ]
    plain: dict[str, Any] = {
        "targets": 1,
        "speed": SPEED,
        "running": np.array([4096.0]),
        "history": MoveHistory.begin(1, placement),
    }
    return EngineView(
        engine="e",
        worker_id=1,
        model="m",
        shape=SHAPE,
        placement=placement,
        node=np.zeros(placement.ranks, np.intp),
        demand=windows[0],
        later=windows[1],
        dispatch=ROW_HASH,
        rearranges=True,
        gathers_all=True,
        now=1000.0,
        **{**plain, **about},
    )


def decided(seen: EngineView, policy: Any = "roost", budget: int = 1 << 40, **fields: Any) -> PlannerDecision:
    return decide(seen, PlanningQuestion(policy, budget), replace(CONFIG, **fields))


def plan_of(found: PlannerDecision) -> Plan:
    assert found.plan is not None, found.record.refused
    return found.plan


def end_of(seen: EngineView, plan: Plan) -> Placement:
    return replay(seen.placement, plan)[-1]


def received(before: Placement, after: Placement) -> NDArray[np.bool_]:
    """[layers, ranks, experts]: experts that come to a rank."""
    return np.asarray(after.replicas_on_rank > before.replicas_on_rank)


def skewed(seed: int, skew: float = 0.4) -> NDArray[np.float64]:
    return np.random.default_rng(seed).dirichlet(np.full(EXPERTS, skew), LAYERS)


@given(
    seed=st.integers(0, 1 << 16),
    size=st.sampled_from([(2, 6), (2, 7), (2, 10), (3, 4), (3, 6), (4, 4), (6, 3)]),
    policy=st.sampled_from(POLICIES),
    budget=st.sampled_from([0, 2, 9, 1000]),
)
@settings(max_examples=40, deadline=None)
def test_a_plan_is_one_handover_to_one_full_map(
    seed: int, size: tuple[int, int], policy: Any, budget: int
) -> None:
    start = as_vllm_starts(*size)
    seen = view(start, skewed(seed))
    found = decided(seen, policy, budget * SHAPE.expert_bytes)
    assert (found.plan is None) == (found.record.refused is not None)
    if found.plan is None:
        return
    assert len(found.plan.handovers) == 1
    assert found.plan.handovers[0].split is None
    end = end_of(seen, found.plan)
    assert (end.expert_of_slot != EMPTY).all()
    assert not repeated(end.expert_of_slot, end.ranks).any()
    assert (end.replicas_on_rank.sum(axis=1) >= 1).all()
    moved = int(received(start, end).sum())
    assert len(found.plan.copies) == moved, "no expert is received twice, or without need"
    assert found.plan.bytes == moved * SHAPE.expert_bytes
    if not start.duplicates:
        assert moved <= budget
    assert found.record.net_seconds > 0


def test_experts_that_stay_on_a_rank_stay_in_their_slots() -> None:
    seen = view(as_vllm_starts(2, 7), skewed(1))
    plan = plan_of(decided(seen))
    changed = (end_of(seen, plan).expert_of_slot != seen.placement.expert_of_slot).sum()
    assert changed == len(plan.copies)


def test_every_copy_is_read_from_a_rank_that_holds_the_expert() -> None:
    seen = view(as_vllm_starts(3, 6), skewed(2))
    for step in plan_of(decided(seen, "full")).steps:
        for copy in step.copies:
            assert copy.source is not None
            assert seen.placement.expert_of_slot[step.layer, copy.source] == copy.expert
            assert copy.source // 6 != copy.slot // 6


def test_the_price_is_a_fixed_time_for_each_layer_touched_and_a_time_for_the_bytes_of_its_busiest_rank() -> (
    None
):
    speed = RearrangeSpeed(layer=1.0, byte=0.01)
    before = np.array([[0, 1, 2, 3]] * 3)
    after = np.array([[0, 1, 2, 3], [0, 2, 1, 3], [2, 3, 1, 0]])
    assert rearrange_seconds(before, after, 2, 10, speed).tolist() == [0.0, 1.1, 1.2]


def test_moves_are_left_out_of_layers_in_which_they_do_not_pay() -> None:
    truth = skewed(4)
    truth[1] = 1.0 / EXPERTS
    truth[1, :6] *= 1.01
    seen = view(as_vllm_starts(2, 6), truth, pairs=1e9)
    everywhere = plan_of(decided(replace(seen, rearrange_speed=RearrangeSpeed(layer=0.0, byte=0.0)), "full"))
    assert {step.layer for step in everywhere.steps} == {0, 1, 2}
    gain = sum(step.gain for step in everywhere.steps if step.layer == 1)
    lifetime = CONFIG.lifetime_seconds * prepare(seen, PlanningQuestion("full", 0), CONFIG).steps_per_second
    dear = RearrangeSpeed(layer=2 * gain * lifetime, byte=0.0)
    assert {step.layer for step in plan_of(decided(replace(seen, rearrange_speed=dear), "full")).steps} == {
        0,
        2,
    }


def test_nothing_is_moved_where_a_move_costs_more_than_the_demand_lasts() -> None:
    seen = view(as_vllm_starts(2, 6), skewed(4), rearrange_speed=RearrangeSpeed(layer=1e5, byte=0.0))
    found = decided(seen)
    assert found.plan is None
    assert found.why in (ReasonCode.COST, ReasonCode.NOISE)


def test_the_same_demand_again_moves_nothing() -> None:
    seen = view(as_vllm_starts(2, 7), skewed(6))
    end = end_of(seen, plan_of(decided(seen)))
    again = replace(view(end, skewed(6)), now=1e6)
    assert decided(again, min_gain=0.002).plan is None


def test_experts_in_cooldown_stay() -> None:
    start = as_vllm_starts(2, 7)
    seen = view(start, skewed(7))
    moved = seen.history
    assert moved is not None
    rest = np.zeros((LAYERS, EXPERTS), bool)
    rest[0] = True
    resting = replace(seen, history=moved.harmed(rest, until=2000.0))
    assert {step.layer for step in plan_of(decided(resting)).steps} <= {1, 2}


def test_a_map_that_holds_an_expert_twice_on_a_rank_is_repaired_by_the_first_plan() -> None:
    table = np.tile([*range(EXPERTS), 6, 7, 8, 0], (LAYERS, 1))
    start = Placement(table, experts=EXPERTS, ranks=2, duplicates=True)
    assert start.duplicates
    seen = view(start, skewed(8))
    assert not end_of(seen, plan_of(decided(seen))).duplicates


def test_more_slots_on_a_rank_than_experts_are_refused_with_the_remedy() -> None:
    table = np.tile(np.arange(26) % EXPERTS, (LAYERS, 1))
    start = Placement(table, experts=EXPERTS, ranks=2, duplicates=True)
    found = decided(view(start, skewed(8)))
    assert found.plan is None
    assert "fewer redundant experts" in " ".join(found.record.reasons)


def test_the_loss_of_a_rank_is_refused_because_the_engine_ends_with_it() -> None:
    found = decide(
        view(as_vllm_starts(2, 7), skewed(9)), PlanningQuestion("roost", 1 << 40, dead=(1,)), CONFIG
    )
    assert found.plan is None
    assert "restart it" in str(found.record.refused)


def test_a_policy_that_only_changes_shares_cannot_plan_for_an_engine_with_even_shares() -> None:
    assert decided(view(as_vllm_starts(2, 7), skewed(9)), "reweight").why is ReasonCode.UNABLE


def test_an_engine_that_states_no_speed_gets_a_plan_from_its_steps() -> None:
    seen = view(as_vllm_starts(2, 7), skewed(10), speed=EngineSpeed(), step_seconds=0.03)
    found = decided(seen)
    assert found.plan is not None
    assert found.record.before is not None
    assert 0.03 < found.record.before.step_seconds < 0.06


def test_no_homes_are_published_where_every_rank_receives_every_token() -> None:
    seen = view(as_vllm_starts(2, 7), skewed(11), targets=2, running=np.full(2, 2048.0), speed=SPEED)
    assert decided(seen).homes.share is None


def test_two_ranks_become_nearly_as_even_as_under_the_best_of_all_maps() -> None:
    """Brute force: every set of experts that two ranks may hold twice, and every division of the others."""
    experts, per = 6, 4
    shape = ModelShape(layers=1, experts=experts, top_k=2, hidden=8, expert_intermediate=16)
    start = Placement(np.array([[*range(6), 0, 1]]), experts=experts, ranks=2)
    parts = []
    for seed in range(8):
        truth = np.random.default_rng(seed).dirichlet(np.full(experts, 0.7), 1)
        seen = replace(view(start, truth, pairs=1e12), shape=shape)
        found = decided(replace(seen, rearrange_speed=RearrangeSpeed(layer=0.0, byte=0.0)))
        end = start if found.plan is None else end_of(seen, found.plan)
        held = end.replicas_on_rank[0] / end.replicas_on_rank[0].sum(axis=0)
        least = min(_fullest(truth[0], mask) for mask in _masks(experts, per))
        parts.append(least / float((held @ truth[0]).max()))
    assert max(parts) <= 1.001
    assert np.mean(parts) > 0.97
    assert min(parts) > 0.92


def _masks(experts: int, per: int) -> list[tuple[set[int], set[int]]]:
    sets = [set(some) for some in combinations(range(experts), per)]
    return [(one, other) for one in sets for other in sets if len(one | other) == experts]


def _fullest(load: NDArray[np.float64], held: tuple[set[int], set[int]]) -> float:
    both = held[0] & held[1]
    return max(sum(load[one] / (2 if one in both else 1) for one in rank) for rank in held)


def test_a_map_with_nothing_new_makes_no_handover() -> None:
    seen = view(as_vllm_starts(2, 6), skewed(1))
    room = prepare(seen, PlanningQuestion("roost", 0), CONFIG).room
    turned = seen.placement.expert_of_slot.reshape(LAYERS, 2, -1)[:, :, ::-1].reshape(LAYERS, -1)
    assert one_map(seen.placement, turned, room) == ()


def in_turns(n: int = 40) -> NDArray[np.float32]:
    """Samples of texts in turns: experts 0 and 1 of every layer are hot together, then 6 and 7."""
    hot = np.ones((n, LAYERS, EXPERTS), np.float32)
    hot[::2, :, :2] += 20.0
    hot[1::2, :, 6:8] += 20.0
    return hot


def test_experts_that_are_hot_together_are_parted_although_the_mean_is_even() -> None:
    """With few tokens a step, the mean demand promises nothing; the samples do."""
    start = as_vllm_starts(2, 6)
    even = in_turns().mean(axis=0).astype(np.float64)
    few = {"running": np.array([16.0]), "pairs": 1e5}
    assert decided(view(start, even, **few), min_gain=0.002).plan is None
    seen = replace(view(start, even, **few), samples=in_turns(), later_samples=in_turns(30))
    found = decided(seen, min_gain=0.002)
    end = end_of(seen, plan_of(found))
    assert len(plan_of(found).copies) == 2 * LAYERS
    for hot in ((0, 1), (6, 7)):
        assert (end.replicas_on_rank[:, :, hot].sum(axis=2) == 1).all()
    assert found.record.after is not None
    assert found.record.before is not None
    assert found.record.before.balance_mean < 0.65
    assert found.record.after.balance_mean == pytest.approx(1.0, abs=0.01)


def test_moves_that_do_not_help_the_next_window_are_not_made() -> None:
    start = as_vllm_starts(2, 6)
    even = in_turns().mean(axis=0).astype(np.float64)
    calm = np.ones((30, LAYERS, EXPERTS), np.float32)
    seen = replace(view(start, even, running=np.array([16.0])), samples=in_turns(), later_samples=calm)
    assert decided(seen, min_gain=0.002).plan is None


def test_too_few_samples_are_not_used() -> None:
    seen = view(as_vllm_starts(2, 6), skewed(1))
    few = replace(seen, samples=in_turns(5), later_samples=in_turns(5))
    assert decided(few).record.id == decided(seen).record.id
