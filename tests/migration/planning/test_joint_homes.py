"""Homes and placement planned together, in a pure model of the loop on recorded routings.

The loop converges, follows shifts of traffic, and moves nothing where nothing is gained.
"""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.signatures import ClusterModel
from migration.config import POLICIES, MigrationConfig
from migration.planning.cluster_homes import ClusterTraffic
from migration.planning.demand_forecast import (
    expected_part,
    homes_within_capacity,
    mix_of,
    observed_part,
    spread,
)
from migration.planning.planner import decide
from migration.planning.problem import PlanningQuestion
from tests.migration.loop_model import EXPERTS, LAYERS, RANKS, SHAPE, SLOTS, Loop, eplb, profiles

DOMAINS = 9
FEWER, OTHERS = (0, 3, 5, 7), (1, 2, 4, 6, 8)


def mixed(*domains: int) -> NDArray[np.float64]:
    """[domains]: these in even parts."""
    mix = np.zeros(DOMAINS)
    mix[list(domains)] = 1.0 / len(domains)
    return mix


def balanced(domain: int) -> Loop:
    """Traffic of one domain, on EPLB's placement for it, with empty slots filled."""
    loop = Loop(mixed(domain), policy="replicate")
    loop.run(8)
    return Loop(mixed(domain), placement=loop.placement)


# The loop


def test_from_a_linear_placement_without_any_gain_the_loop_closes() -> None:
    even, loop = (
        Loop(mixed(*range(DOMAINS)), placement=eplb(), policy="reweight"),
        Loop(mixed(*range(DOMAINS))),
    )
    even.run(4)
    loop.run(8)
    before, after = even.mean(4), loop.mean(4)
    assert after.remote_ranks < 0.8 * before.remote_ranks
    assert after.balance > before.balance - 0.08
    assert loop.bytes <= RANKS * SLOTS * LAYERS * SHAPE.expert_bytes, "no more than every slot once"


def test_with_sampled_tokens_the_same_traffic_is_sent_to_fewer_ranks_at_the_same_balance() -> None:
    for seed in (0, 1):
        plain, together = (
            Loop(mixed(*range(DOMAINS)), seed=seed, sampled=sampled) for sampled in (False, True)
        )
        for loop in (plain, together):
            loop.run(12)
        assert together.mean(4).remote_ranks < 0.985 * plain.mean(4).remote_ranks
        assert together.mean(4).balance > plain.mean(4).balance - 0.03
        assert together.bytes <= 1.1 * plain.bytes


def test_traffic_whose_kinds_are_alike_or_one_moves_nothing_and_has_no_homes() -> None:
    loop = balanced(1)
    alike = np.broadcast_to(profiles()[1], (4, LAYERS, EXPERTS)).copy()
    for clusters in (
        ClusterModel(1, alike, np.full(4, 0.25, np.float32), 1.0),
        ClusterModel(1, alike, np.array([1, 0, 0, 0], np.float32), 1.0),
    ):
        again = Loop(mixed(1), placement=loop.placement, clusters=clusters, seed=3)
        again.run(7)
        assert again.bytes == 0
        assert again.homes is not None
        assert again.homes.share is None


@pytest.mark.slow
def test_other_domains_are_followed_within_four_minutes_and_fewer_bytes_than_at_first() -> None:
    static, fresh, loop = (
        Loop(mixed(*OTHERS), placement=eplb(), policy="reweight"),
        Loop(mixed(*OTHERS)),
        Loop(mixed(*FEWER)),
    )
    static.run(8)
    fresh.run(12)
    loop.run(8)
    first, loop.mix = loop.bytes, mixed(*OTHERS)
    loop.run(16)
    reached, possible = (static.mean(8).remote_ranks - one.mean(8).remote_ranks for one in (loop, fresh))
    assert reached >= 0.9 * possible
    assert loop.bytes - first < first


@pytest.mark.slow
def test_domains_that_take_turns_every_half_minute_move_at_most_a_quarter_of_the_slots_once_the_loop_has_closed() -> (
    None
):
    loop = Loop(mixed(*FEWER))
    for turn in range(20):
        loop.mix = mixed(*(FEWER, OTHERS)[turn % 2])
        loop.cycle()
        if turn == 5:
            closed = loop.bytes
    assert loop.bytes - closed <= 0.25 * RANKS * SLOTS * LAYERS * SHAPE.expert_bytes


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "roost"])
def test_no_other_policy_gives_homes_and_each_keeps_to_its_name(policy: str) -> None:
    loop = Loop(
        mixed(*range(DOMAINS)), policy=policy, requests=32, config=MigrationConfig(critical_experts=0.1)
    )
    loop.run(4)
    assert loop.last is not None
    assert loop.last.homes.share is None
    assert loop.last.homes_after is None or loop.last.homes_after.share is None
    kinds = {step.kind for step in loop.last.record.steps}
    if policy == "reweight":
        assert loop.bytes == 0
        assert kinds <= {"reweight"}
    if policy == "uniform":
        assert loop.placement.even, "replicas share evenly"


@pytest.mark.parametrize(("policy", "share", "requests"), [("roost", 0.1, 4), ("replicate", 0.25, 64)])
def test_experts_that_must_survive_a_loss_are_not_held_twice_over_and_over_while_traffic_stays_as_it_is(
    policy: str, share: float, requests: int
) -> None:
    loop = Loop(mixed(1), policy=policy, requests=requests, config=MigrationConfig(critical_experts=share))
    safe, copied = [], []
    for _ in range(16):
        before, decided = loop.bytes, loop.cycle()
        safe.append(
            decided is not None and decided.plan is not None and "second replicas" in decided.plan.reason
        )
        copied.append((loop.bytes - before) / SHAPE.expert_bytes)
    assert any(safe)
    assert sum(safe[8:]) <= 1, "it came to rest"
    assert sum(copied[8:]) <= 0.1 * RANKS * SLOTS * LAYERS, copied
    assert ((loop.placement.replicas_on_rank.sum(axis=1) > 1).sum(axis=1) >= round(share * EXPERTS)).all()


def test_a_gain_that_is_not_trusted_does_not_pay() -> None:
    loop = Loop(mixed(*range(DOMAINS)), requests=32)
    loop.run(3)
    loop.policy = "reweight"
    loop.cycle()
    view = loop.view()
    sure, doubtful = (
        decide(view, PlanningQuestion("roost", 1 << 40, plan_discount=discount), MigrationConfig())
        for discount in (1.0, 0.001)
    )
    assert sure.plan is not None
    assert sure.homes_after is not None
    assert sure.homes_after.epoch == view.placement.epoch + len(sure.plan.handovers)
    assert doubtful.plan is None
    nobody = decide(replace(view, predictability=0.0), PlanningQuestion("roost", 1 << 40), MigrationConfig())
    assert nobody.homes_after is None or nobody.homes_after.share is None
    assert "cannot be predicted" in nobody.homes.note


# Predictions


def kinds(seed: int = 0, clusters: int = 6) -> tuple[ClusterTraffic, NDArray[np.float64]]:
    """Traffic, and homes that suit as many ranks."""
    dice = np.random.default_rng(seed)
    traffic = ClusterTraffic(
        dice.dirichlet(np.full(EXPERTS, 0.3), (clusters, LAYERS)), dice.dirichlet(np.full(clusters, 3.0))
    )
    return traffic, dice.dirichlet(np.full(RANKS, 0.3), clusters)


def test_a_window_tells_of_which_clusters_it_is() -> None:
    traffic, _ = kinds()
    wanted = np.random.default_rng(1).poisson(20_000 * np.tensordot(traffic.shares, traffic.profiles, 1))
    start = np.append(np.full(5, 0.2), 0.0)
    found = mix_of(wanted, traffic.profiles, np.full(6, 1 / 6))
    np.testing.assert_allclose(found, traffic.shares, atol=0.01)
    assert mix_of(wanted, traffic.profiles, start)[5] == 0.0, "who is not used stays unused"
    np.testing.assert_array_equal(mix_of(np.zeros_like(wanted), traffic.profiles, start), start)


@pytest.mark.parametrize("part", [0.0, 0.4, 0.8])
def test_how_many_requests_live_at_home_is_read_from_what_ranks_want(part: float) -> None:
    traffic, homes = kinds()
    demand = ClusterTraffic(traffic.profiles, traffic.shares, 1.0 - part).demand(homes)
    counts = np.random.default_rng(2).poisson(demand * 200_000).astype(float)
    found = observed_part(counts, counts.sum(axis=(1, 2)) / LAYERS, traffic, homes, 0.9)
    assert found.seen
    assert found.part == pytest.approx(part, abs=0.05)
    few = observed_part(counts, np.full(RANKS, 0.01), traffic, homes, 0.9)
    assert few.part == pytest.approx(expected_part(0.9).part, abs=0.05), "next to no evidence"


def test_the_forecast_keeps_every_experts_own_count_and_gives_each_rank_its_even_part() -> None:
    traffic, homes = kinds()
    routed = homes_within_capacity(homes, traffic.shares, traffic.room_for(RANKS))
    wanted = np.random.default_rng(3).poisson(50.0, (RANKS, LAYERS, EXPERTS)).astype(float)
    found = spread(wanted, traffic, routed)
    np.testing.assert_allclose(found.sum(axis=0), wanted.sum(axis=0))
    assert (found >= 0).all()


def test_what_a_home_has_no_room_for_lives_where_there_is_some() -> None:
    homes = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    shares = np.array([0.5, 0.25, 0.25])
    found = homes_within_capacity(homes, shares, np.full(4, 0.25))
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    load = shares @ found
    assert load.max() <= 0.275 + 1e-9
    assert load[0] == pytest.approx(0.275)
