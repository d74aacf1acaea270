"""The pure part: who is a candidate, what each would cost, and which one is picked."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.events import Capabilities
from fleet.layout import Layout
from fleet.placement import linear
from fleet.popularity import ExpertTable
from fleet.timing import EngineSpeed
from router.candidates import Limits, candidates
from router.decision import Ask, Decision, DecisionRecord, decide
from router.locality import as_profile, locality
from router.reservations import PREFILL, SEQUENCES, Reservations
from router.roster import Roster
from router.scoring import TERMS, Weights, score, uncached_tokens
from router.view import Profile, View
from tests.router.houses import SHAPE, engine_joined

LIMITS = Limits(requests=10, queue_seconds=5.0)
SLOW = EngineSpeed(prefill_token=1e-3, decode_sequence=1e-3, decode_block=1e-5, dispatch=1e-5)


def view_of(*engines: dict[str, Any]) -> tuple[View, Reservations]:
    """A view of live, priced engines named e0, e1, ...; each given as what differs from the ordinary."""
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = View(reservations)
    for number, about in enumerate(engines):
        ranks = about.pop("ranks", 2)
        tokenizer = about.pop("tokenizer", "f" * 64)
        joined = engine_joined(f"e{number}", [f"http://h:{9000 + 10 * number + rank}" for rank in range(ranks)], tokenizer, worker_id=number + 1, **about)
        view.join(joined, 0.0)
        view.heard(joined.worker_id, 0.0)
        state = view.engine(joined.worker_id)
        assert state is not None
        found = locality(ranks, joined.shape, state.layout, state.placement, None)
        view.price(joined.worker_id, None if state.placement is None else state.placement.epoch, found)
    return view, reservations


def ask(seed: int = 0, prompt: int = 100, output: int = 20) -> Ask:
    return Ask(decision_id="d", seed=seed, model="demo", prompt_tokens=prompt, output_tokens=output)


def decided(roster: Roster, load: Any = None, overlap: Any = None, weights: Weights = Weights(), **asked: int) -> Decision:  # noqa: B008 immutable
    load = np.zeros((3, len(roster.targets)), np.int64) if load is None else load
    overlap = np.zeros(len(roster.targets), np.int64) if overlap is None else np.array(overlap)
    return decide(ask(**asked), roster, candidates(roster, load, 1, LIMITS), overlap, load, weights, 1)


loads = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 9), st.integers(0, 500)), min_size=4, max_size=4)
overlaps = st.lists(st.integers(0, 40), min_size=4, max_size=4)
weights = st.builds(Weights, *[st.floats(0, 10)] * 4)


@settings(deadline=None)
@given(load=loads, overlap=overlaps, weight=weights, prompt=st.integers(1, 200), output=st.integers(1, 100), seed=st.integers(0, 2**32))
def test_the_terms_of_a_decision_add_up_to_its_scores_exactly(load: Any, overlap: Any, weight: Weights, prompt: int, output: int, seed: int) -> None:
    view, _ = view_of({}, {"speed": SLOW})
    decision = decided(view.roster("demo"), np.array(load).T, overlap, weight, prompt=prompt, output=output, seed=seed)
    record = msgspec.json.decode(msgspec.json.encode(decision.record()), type=DecisionRecord)
    for candidate in record.candidates:
        terms = candidate.terms_ms
        assert candidate.score_ms == terms.prefill + terms.queue + terms.decode + terms.experts
        assert min(terms.prefill, terms.queue, terms.decode, terms.experts) >= 0
    scores = [candidate.score_ms for candidate in record.candidates]
    assert scores == sorted(scores)
    assert record.chosen == f"{record.candidates[0].engine}/{record.candidates[0].rank}"
    assert record.margin_ms is not None
    assert record.margin_ms == scores[1] - scores[0]
    assert record.runner_up == f"{record.candidates[1].engine}/{record.candidates[1].rank}"


@settings(deadline=None)
@given(load=loads, overlap=overlaps, more=st.integers(1, 20), which=st.integers(0, 3), prompt=st.integers(1, 200))
def test_more_overlap_never_raises_a_score(load: Any, overlap: list[int], more: int, which: int, prompt: int) -> None:
    view, _ = view_of({}, {"speed": SLOW})
    roster = view.roster("demo")
    at = np.arange(4)
    grown = [blocks + more if one == which else blocks for one, blocks in enumerate(overlap)]
    table = np.array(load).T
    before, after = (score(roster, at, table, uncached_tokens(prompt, np.array(blocks), roster.block_size), 10, Weights()).total for blocks in (overlap, grown))
    assert after[which] <= before[which]
    assert (np.delete(after, which) == np.delete(before, which)).all()


@settings(deadline=None)
@given(load=loads, row=st.integers(0, 2), which=st.integers(0, 3))
def test_more_load_never_lowers_a_score(load: Any, row: int, which: int) -> None:
    view, _ = view_of({}, {"speed": SLOW})
    roster, table = view.roster("demo"), np.array(load).T
    heavier = table.copy()
    heavier[row, which] += 100
    scores = [score(roster, np.arange(4), one, np.full(4, 50), 10, Weights()).total for one in (table, heavier)]
    assert scores[1][which] >= scores[0][which]


def test_a_weight_of_zero_switches_a_term_off_and_two_doubles_it() -> None:
    view, _ = view_of({"speed": SLOW})
    load = np.full((3, 2), 5)
    for at in range(len(TERMS)):
        plain = decided(view.roster("demo"), load).scores.terms
        for factor in (0.0, 2.0):
            weighted = decided(view.roster("demo"), load, weights=Weights(*[factor if one == at else 1.0 for one in range(4)])).scores.terms
            assert (weighted[at] == factor * plain[at]).all()


def test_terms_are_milliseconds_of_the_time_model() -> None:
    view, _ = view_of({"speed": SLOW})
    load = np.array([[200, 0], [3, 0], [40, 0]])
    decision = decided(view.roster("demo"), load, [5, 0], prompt=100, output=20)
    remote = 2 * (1 - 0.5**2)  # two layers, half of the mass away, two draws
    assert decision.scores.terms[:, 0] == pytest.approx([80.0, 200.0, 20 * (3 * 1.0 + 40 * 0.01), (80 + 20) * 0.01 * remote])


def test_equal_candidates_are_told_apart_by_the_seed_alone() -> None:
    view, _ = view_of({}, {})
    picks = [decided(view.roster("demo"), seed=seed).target.name for seed in range(400)]
    assert picks == [decided(view.roster("demo"), seed=seed).target.name for seed in range(400)]
    assert {name: picks.count(name) for name in set(picks)} == {"e0/0": 100, "e0/1": 100, "e1/0": 100, "e1/1": 100}
    assert decided(view.roster("demo")).tied == 4
    assert decided(view.roster("demo")).margin_ms == 0.0


def test_the_router_prefers_the_rank_that_holds_the_prefix_until_it_is_too_busy() -> None:
    view, _ = view_of({"speed": SLOW})
    load = np.zeros((3, 2), np.int64)
    assert decided(view.roster("demo"), load, [0, 20]).target.rank == 1
    load[PREFILL, 1] = 100
    assert decided(view.roster("demo"), load, [0, 20]).target.rank == 0


def test_saturated_and_too_small_ranks_are_left_out_with_reasons() -> None:
    view, _ = view_of({"max_context": 100}, {"speed": SLOW})
    load = np.zeros((3, 4), np.int64)
    load[SEQUENCES, 2] = 10
    load[PREFILL, 3] = 6000
    found = candidates(view.roster("demo"), load, 500, LIMITS)
    assert not len(found.at)
    assert [out.reason for out in found.excluded] == [
        "its context of 100 tokens is too small for 500",
        "its context of 100 tokens is too small for 500",
        "saturated: 10 requests of at most 10",
        "saturated: 6000 prompt tokens wait, more than 5 s of work",
    ]
    assert found.busy
    assert found.wait_seconds == 0.0


def test_ranks_to_avoid_are_left_out_and_are_not_called_busy() -> None:
    view, _ = view_of({})
    found = candidates(view.roster("demo"), np.zeros((3, 2), np.int64), 1, LIMITS, frozenset({(1, 0)}))
    assert found.at.tolist() == [1]
    assert [(out.rank, out.reason) for out in found.excluded] == [(0, "this request failed there before")]
    assert not found.busy


def test_a_decision_without_candidates_is_an_error_of_the_caller() -> None:
    view, _ = view_of({})
    roster = view.roster("demo")
    none = candidates(roster, np.zeros((3, 2), np.int64), 10**6, LIMITS)
    with pytest.raises(ValueError, match="no candidate"):
        decide(ask(), roster, none, np.zeros(2, np.int64), np.zeros((3, 2), np.int64), Weights(), 1)


def test_engines_that_cannot_serve_are_named_with_their_reason() -> None:
    view, _ = view_of({}, {"model": "other"}, {}, {}, {"tokenizer": "e" * 64}, {"tokenizer": None, "capabilities": Capabilities(token_ids=False)})
    view.leave(3)
    view.unreachable(4)
    excluded = {out.engine: out.reason for out in view.roster("demo").excluded}
    assert [target.name for target in view.roster("demo").targets] == ["e0/0", "e0/1"]
    assert excluded["e1"] == "serves another model: other"
    assert excluded["e2"].startswith("left")
    assert excluded["e3"].startswith("unreachable")
    assert "tokenizer differs" in excluded["e4"]
    assert "no token ids" in excluded["e5"]


def test_text_only_engines_serve_a_model_that_nobody_serves_by_ids() -> None:
    view, _ = view_of({}, {"tokenizer": None, "ranks": 1, "capabilities": Capabilities(token_ids=False)})
    assert view.roster("demo").dialect == "ids"
    view.leave(1)
    assert view.roster("demo").dialect == "text"
    assert [target.name for target in view.roster("demo").targets] == ["e1/0"]


# What experts cost


def test_the_expert_term_is_lower_where_the_popular_experts_live() -> None:
    placement = linear(layers=2, experts=4, ranks=2)
    hot = as_profile(np.array([[9, 9, 1, 1], [9, 9, 1, 1]], np.float32))
    found = locality(2, SHAPE, None, placement, hot)
    assert found.note is None
    assert found.remote_ranks[0] == pytest.approx(2 * (1 - 0.9**2))
    assert found.remote_ranks[1] == pytest.approx(2 * (1 - 0.1**2))


@pytest.mark.parametrize(
    ("layout", "note"),
    [
        (Layout(attention="tp", boundary=2), "sharded over all ranks"),
        (Layout(attention="dp", boundary=2), "sharded over all ranks"),
    ],
)
def test_the_expert_term_is_zero_where_experts_are_sharded(layout: Layout, note: str) -> None:
    found = locality(2, SHAPE, layout, linear(layers=2, experts=4, ranks=2), None)
    assert not found.remote_ranks.any()
    assert found.note is not None
    assert note in found.note


def test_layers_below_the_boundary_cost_nothing() -> None:
    whole = locality(2, SHAPE, None, linear(layers=2, experts=4, ranks=2), None)
    half = locality(2, SHAPE, Layout(attention="dp", boundary=1), linear(layers=2, experts=4, ranks=2), None)
    assert half.remote_ranks == pytest.approx(whole.remote_ranks / 2)


def test_what_is_unknown_of_experts_is_said_and_costs_nothing() -> None:
    assert "reports no experts" in str(locality(2, None, None, None, None).note)
    assert "placement is unknown" in str(locality(2, SHAPE, None, None, None).note)
    assert "another shape" in str(locality(2, SHAPE, None, linear(layers=3, experts=4, ranks=2), None).note)
    assert "no profile" in str(locality(2, SHAPE, None, linear(layers=2, experts=4, ranks=2), None).note)


def test_a_profile_of_another_shape_is_not_used() -> None:
    assert "no profile" in str(locality(2, SHAPE, None, linear(layers=2, experts=4, ranks=2), np.ones((5, 7))).note)


def test_a_profiles_rows_sum_to_one_and_silent_layers_are_uniform() -> None:
    table = as_profile(ExpertTable.of(np.array([[2, 2, 4], [0, 0, 0]])).array())
    assert table.tolist() == [[0.25, 0.25, 0.5], [1 / 3] * 3]


# The view


def test_silence_means_death_and_a_heartbeat_life_again() -> None:
    view, _ = view_of({}, {})
    view.heard(1, 10.0)
    assert view.sweep(12.0, 3.0, 600.0) == []
    assert [target.engine.engine for target in view.roster("demo").targets] == ["e0", "e0"]
    assert {out.engine: out.reason for out in view.roster("demo").excluded}["e1"].startswith("dead")
    view.heard(2, 13.0)
    assert len(view.roster("demo").targets) == 4


def test_engines_that_stay_silent_for_long_are_forgotten() -> None:
    view, reservations = view_of({}, {})
    view.heard(1, 700.0)
    assert view.sweep(700.0, 3.0, 600.0) == [2]
    assert view.engine(2) is None
    assert reservations.add_rank((9, 0)) in (2, 3)  # the columns are free again


def test_a_new_incarnation_supersedes_the_one_before() -> None:
    view, _ = view_of({})
    again = engine_joined("e0", ["http://h:1"], "f" * 64, worker_id=77)
    assert view.join(again, 5.0) == [1]
    view.heard(77, 5.0)
    assert [target.key for target in view.roster("demo").targets] == [(77, 0)]
    assert not view.heard(1, 6.0)


def test_an_engine_that_left_is_not_revived_by_a_late_heartbeat() -> None:
    view, _ = view_of({})
    view.leave(1)
    view.heard(1, 1.0)
    assert not view.roster("demo").targets


def test_under_tensor_parallel_attention_an_engine_is_one_target() -> None:
    view, _ = view_of({"ranks": 4, "layout": Layout(attention="tp", boundary=2)})
    assert [target.name for target in view.roster("demo").targets] == ["e0/0"]
    assert "sharded" in str(view.roster("demo").targets[0].note)


def test_an_older_placement_never_replaces_a_newer_one() -> None:
    view, _ = view_of({})
    newer = linear(layers=2, experts=4, ranks=2, slots_per_rank=3)
    newer.epoch = 5
    assert view.place(1, newer, Layout(attention="dp", boundary=0))
    assert view.roster("demo").targets[0].epoch == 5
    assert view.roster("demo").targets[0].note == "not priced yet"
    assert not view.place(1, linear(layers=2, experts=4, ranks=2), Layout(attention="dp", boundary=0))
    view.price(1, 4, locality(2, None, None, None, None))  # for an epoch that has passed
    assert view.roster("demo").targets[0].note == "not priced yet"


def test_a_profile_is_learnt_once_per_version() -> None:
    view, _ = view_of({})
    assert view.learn("demo", Profile(3, np.ones((2, 4)) / 4))
    assert not view.learn("demo", Profile(3, np.ones((2, 4)) / 4))
    assert view.learn("demo", Profile(4, np.ones((2, 4)) / 4))


def test_rosters_of_unknown_models_are_not_kept() -> None:
    view, _ = view_of({})
    for number in range(50):
        assert not view.roster(f"model{number}").targets
    assert len(view._rosters) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_worker_ids_of_64_bits_come_through_whole(worker_id: int) -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = View(reservations)
    view.join(engine_joined("e", ["http://h:1"], "f" * 64, worker_id=worker_id or 1), 0.0)
    view.heard(worker_id or 1, 0.0)
    record = decided(view.roster("demo")).record()
    assert record.candidates[0].worker_id == str(worker_id or 1)
