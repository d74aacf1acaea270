"""Decisions and their reasons: scenarios of demand, evaluated on the window after the one that plans are fitted
to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.rig.placements.popularity import by_rank, domains, drifted, load, sampled
from fleet.experts import ModelShape
from fleet.placement import FULL, Placement, linear, with_rows
from fleet.signatures import ClusterModel
from fleet.timing import EngineSpeed
from migration.config import MigrationConfig
from migration.model.engine_view import CacheUse, Demand, EngineView, PlannedHomes
from migration.model.move_history import MoveHistory
from migration.model.plan import Plan, replay
from migration.model.plan_record import PlanRecord
from migration.planning.planner import decide
from migration.planning.planner_decision import PlannerDecision, ReasonCode
from migration.planning.problem import PlanningQuestion
from migration.solvers.eplb import eplb_global
from migration.solvers.full_placement import full_placement

LAYERS, EXPERTS, RANKS, SLOTS = 3, 64, 8, 10
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=4, hidden=64, expert_intermediate=32)
SPEED = EngineSpeed(step=1e-3, decode_sequence=1e-5, expert_pair=2e-6, dispatch=0.0)
FAR = msgspec.structs.replace(SPEED, dispatch=2e-6)
"""Sending tokens to other ranks costs something."""
CONFIG = MigrationConfig()
PAIRS, TOKENS_PER_SECOND = 200_000.0, 50_000.0
Truth = NDArray[np.float64]
"""[layers, experts], the same on all ranks, or [ranks, layers, experts]."""


def window(truth: Truth, seed: int, pairs: float = PAIRS) -> Demand:
    """Sample a window of this demand."""
    by = np.broadcast_to(truth, (RANKS, *truth.shape)) if truth.ndim == 2 else truth
    counts = sampled(by / by.sum(axis=(0, 2), keepdims=True), pairs, np.random.default_rng(seed))
    rates = counts * (TOKENS_PER_SECOND * SHAPE.top_k / counts.sum(axis=(0, 2)).mean())
    return Demand.of(rates, counts.sum(axis=2).mean(axis=1), 60.0)


def view(placement: Placement, truth: Truth, later: Truth | None = None, **about: Any) -> EngineView:
    plain: dict[str, Any] = {
        "node": np.zeros(RANKS, np.intp),
        "speed": SPEED,
        "running": np.full(RANKS, 512.0),
        "waiting": np.zeros(RANKS),
        "cache": CacheUse(1000, np.full(RANKS, 400.0), 16, 65_536),
    }
    pairs = about.pop("pairs", PAIRS)
    windows = {
        "demand": window(truth, 1, pairs),
        "later": window(truth if later is None else later, 2, pairs),
    }
    return EngineView(
        engine="e", worker_id=1, model="m", shape=SHAPE, placement=placement, **{**plain, **windows, **about}
    )


def planned_for(truth: Truth, slots: int = SLOTS) -> Placement:
    return Placement(full_placement(truth, RANKS, slots), experts=EXPERTS, ranks=RANKS)


def sharded_in(placement: Placement, layers: Sequence[int]) -> Placement:
    return with_rows(placement, dict.fromkeys(layers), epoch=placement.epoch)


def zipf(seed: int = 7) -> tuple[Truth, Truth, np.random.Generator]:
    """Two unrelated domains."""
    dice = np.random.default_rng(seed)
    return load("zipf", LAYERS, EXPERTS, dice), load("zipf", LAYERS, EXPERTS, dice), dice


def decided(
    seen: EngineView,
    policy: Any = "roost",
    budget: int = 1 << 40,
    config: MigrationConfig = CONFIG,
    **question: Any,
) -> PlannerDecision:
    """Decide, and check: the record is JSON that reads back, and the plan can be carried out and leads to
    what it states."""
    found = decide(seen, PlanningQuestion(policy, budget, **question), config)
    assert msgspec.json.decode(msgspec.json.encode(found.record), type=PlanRecord) == found.record
    assert (found.plan is None) == (found.why is not None) == (found.record.refused is not None)
    if found.plan is not None:
        check(seen, found.plan, found.record, budget)
    return found


def check(seen: EngineView, plan: Plan, record: PlanRecord, budget: int) -> None:
    series = replay(seen.placement, plan)
    assert [placement.epoch for placement in series] == list(
        range(seen.placement.epoch + 1, seen.placement.epoch + 1 + record.handovers)
    )
    assert record.copied_bytes == plan.bytes == record.copies * SHAPE.expert_bytes <= budget
    assert all(step.why for step in plan.steps)
    assert record.net_seconds > 0 or record.lost


# Refused


def test_when_nothing_but_the_sample_is_new_nothing_is_done_and_that_is_said() -> None:
    truth, _, _ = zipf()
    found = decided(view(planned_for(truth), truth))
    assert found.why is ReasonCode.NOISE
    assert found.record.refused is not None
    assert "no gain beyond sampling noise" in found.record.refused
    assert found.record.before is not None
    assert found.record.before.balance_mean > 0.97


def test_the_same_demand_everywhere_gives_no_reason_to_move_anything_nearer() -> None:
    truth, _, _ = zipf()
    found = decided(view(planned_for(truth), truth, speed=FAR))
    assert found.why is ReasonCode.NOISE
    assert found.record.reasons


def test_empty_slots_are_filled_with_what_is_wanted_most_where_sending_tokens_takes_time() -> None:
    truth, _, _ = zipf()
    full_ranks = planned_for(truth, 9).expert_of_slot.reshape(LAYERS, RANKS, 9)
    room = Placement(
        np.pad(full_ranks, ((0, 0), (0, 0), (0, 3)), constant_values=-1).reshape(LAYERS, -1),
        experts=EXPERTS,
        ranks=RANKS,
    )
    found = decided(view(room, truth, speed=FAR), budget=3 * LAYERS * RANKS * SHAPE.expert_bytes).record
    assert found.before is not None
    assert found.after is not None
    assert {step.kind for step in found.steps} <= {"replicate", "reweight"}
    assert 0 < found.copies <= 3 * LAYERS * RANKS
    assert found.after.local_share > found.before.local_share + 0.1
    assert decided(view(room, truth)).why is ReasonCode.NOISE, (
        "where it takes none, there is nothing to be saved"
    )


def test_sharded_experts_have_no_better_place() -> None:
    truth, foreign, _ = zipf()
    found = decided(view(sharded_in(planned_for(truth), range(LAYERS)), foreign))
    assert found.why is ReasonCode.SHARDED
    assert "experts are sharded" in str(found.record.refused)


def test_from_too_little_nothing_is_concluded() -> None:
    truth, foreign, _ = zipf()
    found = decided(view(planned_for(truth), foreign, pairs=500.0))
    assert found.why is ReasonCode.DATA
    assert f"of {CONFIG.min_pairs * EXPERTS:,.0f}" in str(found.record.refused)
    nothing = view(planned_for(truth), foreign)
    empty = Demand.of(np.zeros_like(nothing.demand.rates), np.zeros(RANKS))
    assert (
        decided(replace(nothing, demand=empty, later=None), config=MigrationConfig(min_pairs=0.0)).why
        is ReasonCode.DATA
    )


def test_what_does_not_pay_while_the_demand_lasts_is_not_done() -> None:
    truth, foreign, _ = zipf()
    slow = MigrationConfig(lifetime_seconds=0.05, rank_bytes_per_second=1e5, min_gain=0.0)
    found = decided(view(planned_for(truth, 8), foreign), config=slow, policy="uniform")
    assert found.why is ReasonCode.COST
    assert "pays" in str(found.record.refused)


def test_demand_that_is_another_in_the_next_window_is_not_planned_for() -> None:
    truth, foreign, _ = zipf()
    found = decided(view(planned_for(truth), foreign, later=truth))
    assert found.plan is None, found.record.reasons


# Planned


def test_after_a_little_drift_new_shares_suffice_and_nothing_is_copied() -> None:
    truth, foreign, dice = zipf()
    found = decided(view(planned_for(truth, 16), drifted(truth, foreign, "mix25", dice)))
    assert (found.record.copies, found.record.copied_bytes, found.record.handovers) == (0, 0, 1)
    assert {step.kind for step in found.record.steps} == {"reweight"}
    assert found.record.before is not None
    assert found.record.after is not None
    assert found.record.after.balance_mean > found.record.before.balance_mean + 0.05
    assert found.record.payback_seconds == 0.0


def test_after_another_domain_few_copies_are_made_and_never_more_than_the_budget_allows() -> None:
    truth, foreign, _ = zipf()
    seen = view(planned_for(truth), foreign)
    free = decided(seen).record
    assert free.before is not None
    assert free.after is not None
    assert 0 < free.copied_share < 0.25
    assert free.after.balance_mean > free.before.balance_mean + 0.3
    tight = decided(seen, budget=4 * SHAPE.expert_bytes).record
    assert 0 < tight.copies <= 4
    assert 0 < tight.gain_seconds < free.gain_seconds
    assert decided(seen, budget=0).record.copies == 0


def test_more_bytes_are_taken_only_for_more_seconds() -> None:
    truth, foreign, _ = zipf()
    found = decided(view(planned_for(truth), foreign))
    anew = decided(view(planned_for(truth), foreign), policy="full")
    assert found.record.copies < anew.record.copies / 2
    assert found.record.net_seconds > 0.9 * anew.record.net_seconds
    assert any("all anew" in reason for reason in found.record.reasons), "it was thought of"


def test_a_full_placement_that_gains_too_little_for_its_copies_is_rejected_by_its_end_alone() -> None:
    truth, foreign, dice = zipf(3)
    seen = view(planned_for(truth, 9), drifted(truth, foreign, "mix25", dice))
    anew = decided(seen, policy="full").record
    found = decided(seen).record
    assert found.copies == 0 < anew.copies
    assert found.net_seconds < anew.net_seconds < 1.1 * found.net_seconds
    reasons = [reason for reason in found.reasons if "all anew" in reason]
    assert len(reasons) == 1
    assert f"with {anew.copies} copies: too little for their number" in reasons[0]


def test_a_step_of_evenly_loaded_ranks_lasts_what_the_speeds_say_and_chance_and_uneven_ranks_add_to_it() -> (
    None
):
    """The step time of an even load includes the experts' time already: it is not added twice."""
    truth, foreign, _ = zipf()
    seen = view(planned_for(truth), foreign)
    even = SPEED.step + 512 * SPEED.decode_sequence + 400 * SPEED.decode_block
    record = decided(seen).record
    assert record.before is not None
    assert record.after is not None
    mean = LAYERS * 512 * SHAPE.top_k * SPEED.expert_pair
    for figures in (record.before, record.after):
        assert figures.step_seconds == pytest.approx(
            even + figures.expert_seconds - mean + figures.memory_seconds
        )
    assert even < record.after.step_seconds < even + 0.2 * mean + record.after.memory_seconds


def test_sharded_layers_lengthen_a_step_by_their_collectives() -> None:
    truth, foreign, _ = zipf()
    mixed = sharded_in(planned_for(truth), [0])
    slow, free = (
        decided(
            view(
                mixed,
                foreign,
                speed=msgspec.structs.replace(SPEED, gather_byte=byte),
            )
        )
        for byte in (1e-9, 0.0)
    )
    assert slow.record.before is not None
    assert free.record.before is not None
    # One layer, 512 tokens of each rank, there and back: 64 float32 values.
    moved = 2 * 512 * RANKS * (64 * 4) * (RANKS - 1) / RANKS
    assert slow.record.before.step_seconds - free.record.before.step_seconds == pytest.approx(1e-9 * moved)


def specialised(special: float = 1.0) -> Truth:
    return by_rank(domains("topheavy", 4, special, LAYERS, EXPERTS, np.random.default_rng(5)), RANKS, 0.0)


def test_requests_of_different_kinds_on_different_ranks_get_their_experts_nearer() -> None:
    truth = specialised()
    found = decided(view(planned_for(truth.sum(axis=0)), truth, speed=FAR)).record
    assert found.before is not None
    assert found.after is not None
    assert found.after.local_share > found.before.local_share + 0.15
    assert found.after.remote_ranks < found.before.remote_ranks
    assert found.after.balance_mean > 0.85


def test_only_the_named_layers_change() -> None:
    truth, foreign, _ = zipf()
    for policy in ("roost", "uniform", "full"):
        found = decided(view(planned_for(truth), foreign), policy=policy, layers=(1,))
        assert {step.layer for step in found.record.steps} == {1}


def test_layers_that_are_sharded_are_left_out_of_plans_and_figures() -> None:
    truth, foreign, _ = zipf()
    half = view(sharded_in(planned_for(truth), [0]), foreign)
    for policy in ("roost", "uniform", "full"):
        found = decided(half, policy=policy)
        assert {step.layer for step in found.record.steps} == {1, 2}
        assert found.plan is not None
        assert replay(half.placement, found.plan)[-1].sharded == (0,)


@pytest.mark.parametrize("policy", ["uniform", "full", "eplb", "eplb_hierarchical"])
def test_every_policy_plans(policy: str) -> None:
    truth, foreign, _ = zipf()
    found = decided(view(planned_for(truth), foreign, node=np.arange(RANKS) // 4), policy=policy)
    assert found.record.policy == policy
    assert found.plan is not None
    assert found.record.after is not None
    assert found.record.after.balance_mean > 0.6


def test_where_eplb_has_an_expert_twice_on_a_rank_it_keeps_two_parts_of_its_tokens() -> None:
    """One expert takes most of the load: EPLB packs several of its replicas on one rank."""
    truth = np.ones((LAYERS, EXPERTS))
    truth[:, 0] = 500.0
    seen = view(linear_with_room(), truth)
    found = decided(seen, policy="eplb")
    assert found.plan is not None
    after = replay(seen.placement, found.plan)[-1]
    share = np.where(after.expert_of_slot == 0, after.split.spill / FULL, 0.0)
    assert share.sum(axis=1) == pytest.approx(1.0)
    raw = eplb_global(seen.demand.rates.sum(axis=0), RANKS * SLOTS, RANKS).reshape(LAYERS, RANKS, SLOTS)
    counts = (raw == 0).sum(axis=2)
    assert counts.max() > 1
    np.testing.assert_allclose(
        share.max(axis=1), (counts / counts.sum(axis=1, keepdims=True)).max(axis=1), atol=1e-4
    )


def test_a_policy_that_cannot_plan_here_says_why() -> None:
    truth, foreign, _ = zipf()
    found = decided(view(planned_for(truth), foreign, node=np.arange(RANKS) % 3), policy="eplb_hierarchical")
    assert found.why is ReasonCode.UNABLE
    assert "node" in found.record.reasons[0]


def test_equal_views_get_equal_answers() -> None:
    truth, foreign, _ = zipf()
    first, second = (decided(view(planned_for(truth), foreign)) for _ in range(2))
    assert first.record == second.record
    assert first.plan == second.plan


def test_a_plan_that_takes_too_many_handovers_is_cut_to_its_best_part() -> None:
    truth, foreign, _ = zipf()
    found = decided(view(planned_for(truth), foreign), policy="full", config=MigrationConfig(max_steps=3))
    assert 0 < found.record.handovers <= 3
    assert found.record.gain_seconds > 0


# Homes


def kinds(count: int = 4, special: float = 1.0) -> ClusterModel:
    """Clusters with demand for different experts, and one unused cluster."""
    profiles = domains("topheavy", count, special, LAYERS, EXPERTS, np.random.default_rng(5))
    unused = np.full((1, LAYERS, EXPERTS), 1 / EXPERTS)
    shares = np.append(np.full(count, 1 / count), 0.0)
    return ClusterModel(
        9, np.concatenate([profiles, unused]).astype(np.float32), shares.astype(np.float32), 1.0
    )


def test_kinds_of_requests_get_homes_with_the_plan_that_brings_their_experts_and_keep_them() -> None:
    clusters = kinds()
    truth = np.asarray(clusters.mean, np.float64)
    seen = view(planned_for(truth), truth, speed=FAR, clusters=clusters, predictability=0.9)
    found = decided(seen)
    assert found.homes.share is None, "what is served now brings nobody nearer to anything"
    assert found.plan is not None
    assert found.homes_after is not None
    assert found.homes_after.share is not None
    assert (found.homes_after.clusters, found.homes_after.share.shape) == (9, (5, RANKS))
    assert found.homes_after.epoch == seen.placement.epoch + len(found.plan.handovers)
    np.testing.assert_allclose(found.homes_after.share.sum(axis=1), [1, 1, 1, 1, 0], atol=1e-6)
    assert [cluster for cluster, _ in found.record.homes] == [0, 1, 2, 3]
    there = replay(seen.placement, found.plan)[-1]
    lives = np.einsum(
        "kr,kle->rle", 0.63 * found.homes_after.share.astype(np.float64) + 0.37 / RANKS, clusters.profiles
    )
    for now in (100.0, 1000.0):
        again = decided(
            replace(
                seen,
                placement=there,
                homes=found.homes_after,
                now=now,
                demand=window(lives, 3),
                later=window(lives, 4),
            )
        )
        assert again.record.copied_share < 0.05, "what is left to be evened out is little"
        assert again.homes.share is not None
        np.testing.assert_array_equal(again.homes.share, found.homes_after.share)
    fresh = decided(replace(seen, placement=there, now=1000.0)).homes
    assert fresh.share is not None, "a planner that begins anew finds them by what is served"
    assert "under this placement" in fresh.note


def test_a_lull_takes_nobodys_home_away() -> None:
    truth, clusters = zipf()[0], kinds()
    share = np.append(np.eye(RANKS, dtype=np.float32)[:4], np.zeros((1, RANKS), np.float32), axis=0)
    before = PlannedHomes(share, 8, 3, "they save", 50.0)
    served = Placement(planned_for(truth).expert_of_slot, experts=EXPERTS, ranks=RANKS, epoch=3)
    seen = view(
        served, truth, speed=FAR, clusters=clusters, predictability=0.9, homes=before, pairs=500.0, now=100.0
    )
    found = decided(seen)
    assert found.why is ReasonCode.DATA
    assert found.homes == before._replace(
        clusters=9, note=f"{found.record.refused}; the present homes stay"
    ), "since when they held, and for which epoch"
    assert [cluster for cluster, _ in found.record.homes] == [0, 1, 2, 3]
    assert decided(replace(seen, clusters=None)).homes.clusters == 8, (
        "a tracker that begins anew says nothing against them"
    )
    to_come, others = before._replace(epoch=4), before._replace(share=share[:4])
    for another in (replace(seen, homes=to_come), replace(seen, homes=others), replace(seen, homes=None)):
        assert decided(another).homes.share is None
    assert decided(seen, "replicate").homes.share is None, "that policy leaves requests where they are"
    sharded = decided(replace(seen, placement=sharded_in(seen.placement, range(LAYERS))))
    assert sharded.homes.share is None


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"predictability": 0.0}, "cannot be predicted"),
        ({"clusters": None}, "no clusters of requests"),
        (
            {
                "clusters": ClusterModel(
                    1, np.full((2, 1, 4), 0.25, np.float32), np.full(2, 0.5, np.float32), 1.0
                )
            },
            "another shape",
        ),
        ({"clusters": kinds(special=0.0)}, "no specialisation"),
        ({"speed": SPEED}, "next to nothing"),
    ],
)
def test_nobody_has_a_home_where_none_would_help_and_it_is_said_why(about: dict[str, Any], said: str) -> None:
    truth, _, _ = zipf()
    found = decided(
        view(planned_for(truth), truth, **{"speed": FAR, "clusters": kinds(), "predictability": 0.9, **about})
    )
    assert found.homes.share is None
    assert said in found.homes.note
    assert found.record.homes_note == found.homes.note


def test_how_near_locality_comes_to_what_is_possible_is_told_to_whoever_asks() -> None:
    truth = specialised()
    found = decided(view(planned_for(truth.sum(axis=0)), truth, speed=FAR), bounds=True).record
    assert found.saved is not None
    assert found.saved_bound is not None
    assert 0.5 * found.saved_bound < found.saved <= found.saved_bound + 1e-9
    assert decided(view(planned_for(truth.sum(axis=0)), truth, speed=FAR)).record.saved is None


# Oscillation


def test_demand_that_swings_to_and_fro_moves_bounded_bytes() -> None:
    """Two domains alternate every cycle: moved experts are in cooldown, and the next swing does not undo the
    last one."""
    truth, foreign, _ = zipf()
    placement, copied = planned_for(truth), []
    history = MoveHistory.begin(1, placement)
    for turn in range(8):
        now = 30.0 * turn
        seen = view(placement, foreign if turn % 2 else truth, history=history, now=now)
        found = decided(seen, budget=32 * SHAPE.expert_bytes)
        copied.append(found.record.copies)
        if found.plan is not None:
            placement = replay(placement, found.plan)[-1]
            history = history.committed(placement, found.plan.id, now, seen.demand.evidence)
    assert sum(copied) <= 2 * LAYERS * RANKS * SLOTS * 0.2, copied
    assert sum(copied[4:]) <= sum(copied[:4]), copied


@pytest.mark.parametrize("sharded", [(), (0,), (1,)])
def test_what_the_last_plan_did_is_not_undone_without_new_evidence(sharded: tuple[int, ...]) -> None:
    truth, foreign, _ = zipf()
    per, layer = EXPERTS // RANKS, 2
    start = planned_for(truth, per)
    table = start.expert_of_slot.copy()
    wants = truth[layer, table[layer]]
    pair = [int(wants[:per].argmax()), per + int(wants[per : 2 * per].argmin())]
    table[layer, pair] = table[layer, pair[::-1]]
    moved = sharded_in(Placement(table, experts=EXPERTS, ranks=RANKS, epoch=1), sharded)
    start = sharded_in(start, sharded)
    seen = view(
        moved,
        truth,
        history=MoveHistory.begin(1, start).committed(moved, "p", 0.0),
        now=1e6,
    )
    taken = start.replicas_on_rank & ~moved.replicas_on_rank
    undone = []
    for basis in (truth, foreign):
        plan = decided(replace(seen, since=window(basis, 3)), config=MigrationConfig(min_gain=0.0)).plan
        copied = (
            []
            if plan is None
            else [(step.layer, copy.slot // per, copy.expert) for step in plan.steps for copy in step.copies]
        )
        undone.append(any(taken[where] for where in copied))
    assert undone == [False, True]


def test_a_layer_rests_after_any_of_its_experts_was_moved_if_that_is_wanted() -> None:
    truth, foreign, _ = zipf()
    start = planned_for(truth)
    table = start.expert_of_slot.copy()
    table[1, [0, SLOTS]] = table[1, [SLOTS, 0]]
    moved = Placement(table, experts=EXPERTS, ranks=RANKS, epoch=1)
    seen = view(moved, foreign, history=MoveHistory.begin(1, start).committed(moved, "p", 0.0), now=100.0)
    for config, layers in ((CONFIG, {0, 1, 2}), (MigrationConfig(layer_cooldown_seconds=200.0), {0, 2})):
        found = decided(seen, config=config)
        assert {step.layer for step in found.record.steps if step.copies} == layers


# Losses, memory


def test_lost_ranks_are_planned_for_whatever_that_costs() -> None:
    truth, _, _ = zipf()
    seen = view(planned_for(truth, 12), truth)
    found = decided(seen, dead=(3, 5))
    assert found.plan is not None
    assert found.record.lost
    assert found.record.before is None
    after = replay(seen.placement, found.plan)[-1]
    alive = np.delete(after.replicas_on_rank, [3, 5], axis=1)
    assert (alive.sum(axis=1) > 0).all()


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("dead", [(0,), (3, 5)])
def test_all_layers_recover_from_losses_although_the_question_names_some(
    layers: tuple[int, ...], dead: tuple[int, ...]
) -> None:
    truth, foreign, _ = zipf()
    seen = view(planned_for(truth, 12), foreign)
    found = decided(seen, dead=dead, layers=layers)
    assert found.plan is not None, found.record.reasons
    after = replay(seen.placement, found.plan)[-1]
    alive = np.delete(after.replicas_on_rank, dead, axis=1)
    assert (alive.sum(axis=1) > 0).all()


def test_the_parts_of_sharded_layers_on_lost_ranks_cannot_be_recovered() -> None:
    truth, _, _ = zipf()
    seen = view(sharded_in(planned_for(truth, 12), [1]), truth)
    found = decided(seen, dead=(3,))
    assert found.plan is None
    assert "the lost ranks alone held their parts" in " ".join(
        [str(found.record.refused), *found.record.reasons]
    )


def test_a_lack_of_slots_on_the_survivors_is_reported() -> None:
    truth, _, _ = zipf()
    found = decided(view(planned_for(truth, 8), truth), dead=(0,))
    assert "survivors lack" in found.record.lost
    assert found.record.reasons


def test_the_memory_curve_weighs_slots_against_blocks() -> None:
    truth, _, _ = zipf()
    found = decided(view(planned_for(truth), truth), memory=True).record
    assert [point.slots_per_rank for point in found.memory if point.present] == [SLOTS]
    assert sum(point.best for point in found.memory) == 1
    blocks = [point.kv_blocks for point in found.memory]
    assert blocks == sorted(blocks, reverse=True)
    silent = decided(view(planned_for(truth), truth, cache=None), memory=True).record
    assert silent.memory == ()
    assert any("KV blocks" in reason for reason in silent.reasons)


def test_experts_chosen_as_critical_survive_the_loss_of_any_one_rank() -> None:
    _, foreign, _ = zipf()
    seen = view(linear_with_room(), foreign)
    config = MigrationConfig(critical_experts=0.1)
    found = decide(seen, PlanningQuestion("roost", 1 << 40), config)
    assert found.plan is not None
    safe = replay(seen.placement, found.plan)[-1]
    hot = np.argsort(-seen.demand.rates.sum(axis=0), axis=1)[:, :6]
    holders = np.take_along_axis(safe.replicas_on_rank.sum(axis=1), hot, axis=1)
    assert (holders >= 2).all()
    assert found.record.copies >= LAYERS * 6
    again = decide(replace(seen, placement=safe), PlanningQuestion("full", 1 << 40), config)
    kept = safe if again.plan is None else replay(safe, again.plan)[-1]
    assert (np.take_along_axis(kept.replicas_on_rank.sum(axis=1), hot, axis=1) >= 2).all()


def test_second_holders_take_no_place_of_experts_that_rest_and_come_into_named_layers_alone() -> None:
    _, foreign, _ = zipf()
    truth, config = zipf()[0], MigrationConfig(critical_experts=0.1)
    start = planned_for(truth)
    held = start.replicas_on_rank.sum(axis=1)
    rests = MoveHistory.begin(1, start).harmed(held > 1, 1e9)
    seen = view(start, foreign, now=100.0)
    free = decide(seen, PlanningQuestion("roost", 1 << 40), config)
    assert free.plan is not None
    assert "second replicas" in free.plan.reason
    resting = decide(replace(seen, history=rests), PlanningQuestion("roost", 1 << 40), config)
    assert resting.plan is None or "second replicas" not in resting.plan.reason
    end = start if resting.plan is None else replay(start, resting.plan)[-1]
    assert (end.replicas_on_rank.sum(axis=1) == held)[held > 1].all(), "what rests stays where it is"
    alone = MoveHistory.begin(1, start).harmed(held == 1, 1e9)
    wanted = decide(replace(seen, history=alone), PlanningQuestion("roost", 1 << 40), config)
    assert wanted.plan is not None
    assert "second replicas" in wanted.plan.reason, "what has one holder gets its second though it rests"
    one = decide(seen, PlanningQuestion("roost", 1 << 40, layers=(1,)), config)
    assert {step.layer for step in one.record.steps} == {1}


def test_experts_that_must_be_held_twice_where_there_is_no_room_for_that_hinder_no_decision() -> None:
    truth, foreign, _ = zipf()
    found = decided(
        view(planned_for(truth), foreign), budget=0, config=MigrationConfig(critical_experts=0.5)
    ).record
    assert {step.kind for step in found.steps} == {"reweight"}
    assert len([reason for reason in found.reasons if "required replicas take" in reason]) == 1


def linear_with_room() -> Placement:
    return linear(layers=LAYERS, experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS)
