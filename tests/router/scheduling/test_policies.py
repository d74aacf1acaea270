"""The choice among priced ranks: policies, ties, temperature, sessions; and its record."""

from collections import Counter
from math import exp
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.facts.engines import Capabilities
from fleet.timing import EngineSpeed
from router.config import RouterConfig
from router.fleet_state.reservations import AMOUNTS, PREFILL, SEQUENCES, STEPS, Reservations
from router.fleet_state.view import FleetView
from router.prediction.predictor import PredictionKeys
from router.prefix_index.approximate_index import ApproximateIndex
from router.prefix_index.block_index import BlockIndex
from router.prefix_index.kv_event_index import KvEventIndex
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.cost import TERMS, Weights
from router.scheduling.decision import Decision
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.policies import PolicyRules, choose
from router.scheduling.routing_request import RoutingRequest
from router.scheduling.scheduler import Scheduler
from router.scheduling.session_affinity import SessionAffinity
from tests.router.decision_builders import decided, prediction_of, view_of
from tests.router.router_fixture import engine_joined

FLAT = EngineSpeed(prefill_token=1e-3, step=1e-3, decode_sequence=0.0, decode_block=0.0)
"""Only prompts and queues differ."""
ALONE = {"ranks": 1, "speed": FLAT}
Four = tuple[int, int, int, int]


def four(policy: str, queued: Four = (0, 0, 0, 0), **more: Any) -> Decision:
    """Return four engines of one rank. queued: outstanding prompt tokens of each, one millisecond per
    token."""
    load = np.zeros((AMOUNTS, 4), np.int64)
    load[PREFILL] = queued
    rules = more.pop("rules", {})
    return decided(
        view_of(*[dict(ALONE) for _ in range(4)])[0].target_table("demo"),
        load,
        rules=PolicyRules(policy=policy, **rules),
        **more,
    )  # type: ignore[arg-type]


# Policies


def test_kv_takes_the_most_cached_prompt_and_of_equals_the_least_loaded() -> None:
    assert four("kv", (0, 0, 900, 800), overlap=[1, 2, 9, 9]).chosen == 3
    assert four("kv", (0, 0, 4000, 0), overlap=[24, 24, 25, 0]).chosen == 2, (
        "any load for four tokens more: that is what it is for"
    )


def test_least_loaded_takes_the_least_promised_work_whatever_is_cached() -> None:
    decision = four("least_loaded", (30, 20, 10, 40), overlap=[25, 25, 0, 25])
    assert (decision.chosen, decision.unit) == (2, "ms")
    assert decision.score.tolist() == pytest.approx([30.0, 20.0, 10.0, 40.0])


def test_least_loaded_counts_what_runs_by_the_time_it_adds() -> None:
    speed = EngineSpeed(prefill_token=1e-3, decode_sequence=1e-3, decode_block=0.0)
    load = np.zeros((AMOUNTS, 2), np.int64)
    load[SEQUENCES], load[STEPS] = (1, 2), (1000, 10)
    decision = decided(
        view_of({"speed": speed})[0].target_table("demo"), load, rules=PolicyRules(policy="least_loaded")
    )
    assert decision.chosen == 1, "two that are nearly done are less than one that has just begun"


def test_round_robin_gives_each_its_turn() -> None:
    picked = [four("round_robin", conditions={"turn": turn}).chosen for turn in range(9)]
    assert picked == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert four("round_robin", conditions={"turn": 2}).score.tolist() == [2, 3, 0, 1]


def test_classic_weighs_shares_that_have_no_unit() -> None:
    """alpha * uncached share + beta * calibrated remote share of expert traffic + gamma * load relative to
    the most loaded.
    """
    prediction = prediction_of(
        [1.0] * 4, gain=0.5, local=[0.25, 0.5, 0.0, 1.0], priced=[True, True, True, False]
    )
    decision = four(
        "classic",
        (50, 0, 100, 0),
        overlap=[5, 0, 10, 25],
        prediction=prediction,
        rules={"alpha": 2.0, "beta": 3.0, "gamma": 0.5},
    )
    uncached, remote, relative = (
        [0.8, 1.0, 0.6, 0.01],
        [0.5 * 0.75, 0.5 * 0.5, 0.5, 0.0],
        [0.5, 0.0, 1.0, 0.0],
    )
    assert decision.score == pytest.approx(
        [2 * u + 3 * r + 0.5 * busy for u, r, busy in zip(uncached, remote, relative, strict=True)]
    )
    assert decision.unit == "1"
    assert four("classic").score == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("policy", ["cost", "classic", "kv", "least_loaded", "round_robin"])
def test_every_policy_is_explained_by_the_same_record(policy: str) -> None:
    decision = four(
        policy,
        (5, 6, 7, 8),
        overlap=[0, 3, 2, 1],
        prediction=prediction_of([4.0, 3.0, 2.0, 1.0]),
        conditions={"turn": 1},
    )
    record = msgspec.json.decode(msgspec.json.encode(decision.record()), type=DecisionRecord)
    assert (record.policy, record.unit) == (policy, "ms" if policy in ("cost", "least_loaded") else "1")
    scores = [candidate.score for candidate in record.candidates]
    assert scores == sorted(scores)
    assert record.margin == scores[1] - scores[0]
    priced = {candidate.engine: candidate.terms_ms.queue for candidate in record.candidates}
    assert priced == pytest.approx({"e0": 5.0, "e1": 6.0, "e2": 7.0, "e3": 8.0}), (
        "terms are filled in for comparison"
    )
    assert set(record.without) == (set(TERMS) if policy == "cost" else set())
    assert record.if_gone == f"{record.candidates[1].engine}/0"


# Ties


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_ties_are_broken_only_by_chance(seed: int) -> None:
    decision = four("cost", (7, 3, 3, 3), seed=seed)
    assert decision.chosen == 1 + seed % 3
    assert (decision.choice.why, decision.choice.tied) == ("tie", 3)


@given(
    costs=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    work=st.lists(st.integers(0, 2), min_size=40, max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
def test_few_candidates_are_compared_as_many_are(costs: list[int], work: list[int], seed: int) -> None:
    """More candidates than are compared in lists: dearer ones are added, which change nothing but the word
    for a choice without an alternative."""
    score, outstanding = np.array(costs, np.float64), np.array(work[: len(costs)], np.float64)
    rules = PolicyRules()
    found = choose(rules, score, "ms", score, outstanding, seed, None)
    dearer = np.full(40, 1e3)
    many = np.concatenate([score, dearer])
    other = choose(rules, many, "ms", many, np.concatenate([outstanding, dearer]), seed, None)
    assert (found.chosen, found.tied) == (other.chosen, other.tied)
    assert found.why == ("only" if len(costs) == 1 else other.why)


def test_beside_an_engines_slowest_rank_all_cost_the_same_and_the_least_promised_work_decides() -> None:
    """All work there is hidden behind the slowest rank, up to rounding."""
    view, _ = view_of(
        {"ranks": 4, "speed": EngineSpeed(prefill_token=1e-4, decode_sequence=1e-3, decode_block=0.0)}
    )
    load = np.zeros((AMOUNTS, 4), np.int64)
    load[SEQUENCES], load[STEPS] = (9, 3, 2, 3), 10**6
    for seed in range(4):
        decision = decided(view.target_table("demo"), load, seed=seed)
        assert (decision.chosen, decision.choice.why, decision.choice.tied) == (2, "tie", 3)
        assert decision.record().candidates[0].rank == 2


def test_one_candidate_alone_is_only_that() -> None:
    record = decided(view_of(dict(ALONE))[0].target_table("demo")).record()
    assert (record.why, record.runner_up, record.margin, record.if_gone) == ("only", None, None, None)


# Temperature


def test_temperature_draws_by_how_much_dearer_a_rank_is() -> None:
    """A rank that costs more by the temperature is drawn 1/e times as often as the cheapest."""
    score, rules = np.array([0.0, 10.0, 20.0, 500.0]), PolicyRules(temperature_ms=10.0)
    drawn = Counter(
        choose(rules, score, "ms", score, score, number * 2**32 // 4000, None).chosen
        for number in range(4000)
    )
    weights = [1.0, exp(-1), exp(-2), exp(-50)]
    assert [drawn[at] / 4000 for at in range(4)] == pytest.approx(
        [weight / sum(weights) for weight in weights], abs=0.002
    )
    assert drawn[3] == 0


def test_a_draw_is_repeatable_and_says_what_it_was() -> None:
    decisions = [
        four("cost", (0, 10, 20, 30), seed=2**32 - 5, rules={"temperature_ms": 10.0}) for _ in range(2)
    ]
    assert decisions[0].chosen == decisions[1].chosen == 3
    record = decisions[0].record()
    assert (record.why, record.chosen) == ("temperature", "e3/0")
    assert record.margin == pytest.approx(-30.0), "a more expensive rank than the runner-up"
    assert four("cost", (0, 10, 20, 30), seed=0, rules={"temperature_ms": 10.0}).choice.why == "cheapest"


def test_temperature_is_for_milliseconds_and_a_tiny_one_is_no_temperature() -> None:
    assert (
        four("kv", seed=2**32 - 1, overlap=[0, 0, 0, 9], rules={"temperature_ms": 1e6}).choice.why
        == "cheapest"
    )
    assert four("cost", (5, 0, 10, 9), seed=2**32 - 1, rules={"temperature_ms": 1e-9}).chosen == 1


# Sessions


def test_a_conversation_stays_until_another_rank_is_cheaper_by_more_than_it_may_be() -> None:
    rules = {"stay_ms": 15.0}
    near = four("cost", (10, 0, 20, 5), conditions={"held": (1, 0)}, rules=rules)
    assert (near.chosen, near.choice.why) == (0, "session")
    far = four("cost", (10, 0, 20, 5), conditions={"held": (3, 0)}, rules=rules)
    assert (far.chosen, far.choice.why) == (1, "cheapest")
    record = far.record()
    assert record.session_rank == "e2/0"
    assert four("cost", (10, 0, 20, 5), conditions={"held": (2, 0)}, rules=rules).choice.why == "cheapest", (
        "it is there already"
    )
    assert (
        four(
            "kv", (10, 0, 20, 5), overlap=[0, 9, 0, 0], conditions={"held": (4, 0)}, rules={"stay_ms": 50.0}
        ).choice.why
        == "session"
    )


def test_a_conversation_whose_rank_is_no_candidate_moves() -> None:
    decision = four("cost", (0, 0, 0, 9000), conditions={"held": (4, 0)}, rules={"stay_ms": 1e9})
    assert decision.chosen != 3, "its rank is saturated"
    assert decision.record().session_rank is None
    assert four("cost", conditions={"held": (77, 0)}).held is None


def test_the_conversations_rank_gone_or_a_term_uncounted_is_weighed_with_the_session_in_mind() -> None:
    decision = four("cost", (10, 0, 20, 5), conditions={"held": (1, 0)}, rules={"stay_ms": 15.0})
    record = decision.record()
    assert record.if_gone == "e1/0"
    assert record.without["queue"] == "e0/0", "then all cost the same, and it stays"
    moved = four("cost", (10, 0, 20, 5), conditions={"held": (3, 0)}, rules={"stay_ms": 18.0})
    assert moved.chosen == 1
    assert moved.record().if_gone == "e2/0", "without the cheapest it would have stayed"


def test_sessions_are_remembered_for_their_time_and_the_longest_silent_makes_room() -> None:
    affinity = SessionAffinity(10.0, max_sessions=2)
    for session, now in ((1, 0.0), (2, 1.0), (1, 5.0), (3, 6.0)):
        affinity.record_route(session, (session, 0), now)
    assert [affinity.rank(session, 7.0) for session in (1, 2, 3, 4)] == [(1, 0), None, (3, 0), None]
    assert affinity.rank(1, 15.5) is None, "silent for too long"
    assert affinity.rank(3, 15.5) == (3, 0)
    affinity.forget_worker(3)
    assert len(affinity) == 0


def test_requests_without_a_session_are_not_remembered_and_without_a_time_none_is() -> None:
    affinity = SessionAffinity(10.0)
    affinity.record_route(0, (1, 0), 0.0)
    assert affinity.rank(0, 0.0) is None
    affinity.record_route(5, (1, 0), 0.0)
    affinity.set_seconds(0.0)
    assert len(affinity) == 0
    affinity.record_route(5, (1, 0), 0.0)
    assert affinity.rank(5, 0.0) is None


# Through the scheduler


def picker_of(ranks: int, **config: Any) -> tuple[Scheduler, RoutingRequest]:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = FleetView(reservations)
    urls = [f"http://h:{number}" for number in range(ranks)]
    view.join(
        engine_joined(
            "e", urls, "f" * 64, worker_id=1, shape=None, placement=None, capabilities=Capabilities()
        ),
        0.0,
    )
    view.sign_of_life(1, 0.0)
    holders = BlockIndex()
    scheduler = Scheduler(
        view, reservations, KvEventIndex(holders), ApproximateIndex(100, holders), RouterConfig(**config)
    )
    return scheduler, RoutingRequest(
        "demo", TokenPrompt(list(range(50))), 60, 10, "f" * 64, keys=PredictionKeys(session=9)
    )


def test_the_picker_takes_turns_by_what_it_booked_and_not_by_what_it_explained() -> None:
    scheduler, need = picker_of(3, policy="round_robin")
    picked = []
    for number in range(6):
        assert scheduler.decide(need, "asked", 0, 0.0).chosen == number % 3
        decision = scheduler.decide(need, f"d{number}", 0, 0.0)
        scheduler.book(decision, need.prompt, 0.0)
        picked.append(decision.chosen)
    assert picked == [0, 1, 2, 0, 1, 2]


def test_the_picker_remembers_where_a_conversation_went() -> None:
    scheduler, need = picker_of(3, session_affinity_seconds=10.0)
    first = scheduler.decide(need, "a", 1, 0.0)
    scheduler.book(first, need.prompt, 0.0)
    again = scheduler.decide(need, "b", 0, 5.0)
    assert again.target is first.target
    assert again.choice.why == "session"
    assert scheduler.decide(need, "c", 0, 10.5).choice.why != "session"
    assert scheduler.decide(msgspec.structs.replace(need, keys=PredictionKeys()), "d", 0, 5.0).held is None
    scheduler.reconfigure(RouterConfig())
    assert scheduler.decide(need, "e", 0, 5.0).held is None


def test_kept_decisions_are_bounded_by_their_memory_too() -> None:
    scheduler, need = picker_of(8)
    size = scheduler.decide(need, "x", 0, 0.0).nbytes
    scheduler, need = picker_of(8, kept_decisions_bytes=3 * size)
    for number in range(5):
        scheduler.book(scheduler.decide(need, f"d{number}", 0, 0.0), need.prompt, 0.0)
    assert [scheduler.kept.get(f"d{number}") is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_rules_are_what_the_configuration_says() -> None:
    config = RouterConfig(
        policy="classic",
        classic_beta=0.5,
        lockstep_weight=0.0,
        distinct_weight=2.0,
        temperature_ms=3.0,
        session_affinity_ms=7.0,
    )
    weights = Weights.of(lockstep=0.0, distinct=2.0)
    assert PolicyRules.of(config) == PolicyRules("classic", weights, 1.0, 0.5, 1.0, 3.0, 7.0)
    assert PolicyRules.of(config).without(("distinct", "queue")).weights == Weights.of(
        lockstep=0.0, distinct=0.0, queue=0.0
    )
