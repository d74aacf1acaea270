"""The pure part of a decision: candidates, their prices, and the choice."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.dispatch import ROW_HASH
from fleet.facts.engines import Capabilities
from fleet.layout import EP, TP_EP, Layout, experts_tp, tp
from fleet.placement import Placement, linear, with_attention, with_rows
from fleet.timing import EngineSpeed
from router.fleet_state.dispatch_cost import (
    DispatchCost,
    DispatchInputs,
    DispatchPrices,
    DispatchRules,
    locality,
)
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES, STEPS, Reservations
from router.fleet_state.target_table import TargetTable
from router.fleet_state.view import FleetView
from router.prediction.predictor import NO_GAIN, UNKNOWN_MODEL
from router.scheduling.cost import TERMS, Weights, score, uncached_tokens
from router.scheduling.decision import Conditions, TargetPredictions, decide
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.filters import SaturationLimits, candidates
from router.scheduling.policies import PolicyRules
from tests.router.decision_builders import LIMITS, SLOW, ask, decided, prediction_of, view_of
from tests.router.learnt_tables import clusters, halves
from tests.router.router_fixture import SHAPE, engine_joined

loads = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 9), st.integers(0, 500), st.integers(0, 900)),
    min_size=4,
    max_size=4,
)
overlaps = st.lists(st.integers(0, 40), min_size=4, max_size=4)
weights = st.builds(Weights, st.fixed_dictionaries(dict.fromkeys(TERMS, st.floats(0, 10))))


@settings(deadline=None)
@given(
    load=loads,
    overlap=overlaps,
    weight=weights,
    prompt=st.integers(1, 200),
    output=st.integers(1, 100),
    seed=st.integers(0, 2**32),
    prediction=st.none()
    | st.builds(prediction_of, st.lists(st.floats(0, 60), min_size=4, max_size=4), st.floats(0, 1)),
)
def test_the_terms_of_a_decision_add_up_to_its_scores_exactly(
    load: Any,
    overlap: Any,
    weight: Weights,
    prompt: int,
    output: int,
    seed: int,
    prediction: TargetPredictions | None,
) -> None:
    view, _ = view_of({}, {"speed": SLOW})
    decision = decided(
        view.target_table("demo"),
        np.array(load).T,
        overlap,
        weight,
        prediction,
        prompt=prompt,
        output=output,
        seed=seed,
    )
    record = msgspec.json.decode(msgspec.json.encode(decision.record()), type=DecisionRecord)
    for candidate in record.candidates:
        terms = candidate.terms_ms
        assert (
            candidate.score
            == terms.prefill
            + terms.queue
            + terms.decode
            + terms.experts
            + terms.distinct
            + terms.lockstep
            + terms.handover
        )
        assert min(msgspec.structs.astuple(terms)) >= 0
    scores = [candidate.score for candidate in record.candidates]
    assert scores == pytest.approx(sorted(scores), rel=1e-11)
    assert record.chosen == f"{record.candidates[0].engine}/{record.candidates[0].rank}"
    assert record.margin is not None
    assert record.margin == scores[1] - scores[0]
    assert record.runner_up == f"{record.candidates[1].engine}/{record.candidates[1].rank}"


@settings(deadline=None)
@given(
    load=loads, overlap=overlaps, more=st.integers(1, 20), which=st.integers(0, 3), prompt=st.integers(1, 200)
)
def test_more_overlap_never_raises_a_score(
    load: Any, overlap: list[int], more: int, which: int, prompt: int
) -> None:
    view, _ = view_of({}, {"speed": SLOW})
    target_table = view.target_table("demo")
    grown = [blocks + more if one == which else blocks for one, blocks in enumerate(overlap)]
    table = np.array(load).T
    before, after = (
        score(
            target_table,
            table,
            uncached_tokens(prompt, np.array(blocks), target_table.block_size),
            prompt,
            10,
            Weights(),
        ).total
        for blocks in (overlap, grown)
    )
    assert after[which] <= before[which]
    assert (np.delete(after, which) == np.delete(before, which)).all()


@settings(deadline=None)
@given(load=loads, row=st.sampled_from([PREFILL, BLOCKS, STEPS, None]), which=st.integers(0, 3))
def test_more_load_never_lowers_a_score(load: Any, row: int | None, which: int) -> None:
    """Row None: one more request, as large as those there."""
    view, _ = view_of({}, {"speed": SLOW})
    target_table, table = view.target_table("demo"), np.array(load).T
    heavier = table.copy()
    if row is None:
        heavier[:, which] += [100, 1, heavier[BLOCKS, which], heavier[STEPS, which]]
    else:
        heavier[row, which] += 100
    scores = [score(target_table, one, np.full(4, 50), 50, 10, Weights()).total for one in (table, heavier)]
    assert scores[1][which] >= scores[0][which] * (1 - 1e-12)


def test_a_weight_of_zero_switches_a_term_off_and_two_doubles_it() -> None:
    view, _ = view_of({"speed": SLOW})
    load = np.array([[5, 9]] * AMOUNTS)
    for at, term in enumerate(TERMS):
        plain = decided(view.target_table("demo"), load, prediction=prediction_of([1.0, 0.5])).scores.terms
        for factor in (0.0, 2.0):
            only = Weights.of(**{term: factor})
            weighted = decided(
                view.target_table("demo"), load, weights=only, prediction=prediction_of([1.0, 0.5])
            ).scores.terms
            assert (weighted[at] == factor * plain[at]).all()


def test_terms_are_milliseconds_of_the_time_model() -> None:
    view, _ = view_of({"speed": SLOW})
    load = np.array([[200, 0], [3, 0], [40, 0], [1000, 0]])
    remote = 2 * (1 - 0.5**2)  # two layers, half of the mass away, two draws
    decision = decided(
        view.target_table("demo"),
        load,
        [5, 0],
        prediction=prediction_of([remote, remote], gain=0.6),
        prompt=100,
        output=20,
    )
    own, running = 20 * (3.0 + 1.0 + 0.01 * (100 + 20) / 4), 20 * (3 * 1.0 + 40 * 0.01)
    assert decision.scores.terms[:, 0] == pytest.approx(
        [80.0, 200.0, own + running, 0.6 * (80 + 20) * 0.01 * remote, 0.0, 0.0, 80.0, 0.0]
    )


def test_ties_between_candidates_are_broken_only_by_the_seed() -> None:
    view, _ = view_of({}, {})
    picks = [decided(view.target_table("demo"), seed=seed).target.name for seed in range(400)]
    assert picks == [decided(view.target_table("demo"), seed=seed).target.name for seed in range(400)]
    assert {name: picks.count(name) for name in set(picks)} == {
        "e0/0": 100,
        "e0/1": 100,
        "e1/0": 100,
        "e1/1": 100,
    }
    assert decided(view.target_table("demo")).choice.tied == 4
    assert decided(view.target_table("demo")).margin == 0.0


def test_the_router_prefers_the_rank_that_holds_the_prefix_until_it_is_too_busy() -> None:
    view, _ = view_of({"speed": SLOW})
    load = np.zeros((AMOUNTS, 2), np.int64)
    assert decided(view.target_table("demo"), load, [0, 20]).target.rank == 1
    load[PREFILL, 1] = 100
    assert decided(view.target_table("demo"), load, [0, 20]).target.rank == 0


def test_saturated_and_too_small_ranks_are_left_out_with_reasons() -> None:
    view, _ = view_of({"max_context": 100}, {"speed": SLOW})
    load = np.zeros((AMOUNTS, 4), np.int64)
    load[SEQUENCES, 2] = 10
    load[PREFILL, 3] = 6000
    found = candidates(view.target_table("demo"), load, 500, LIMITS)
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
    found = candidates(
        view.target_table("demo"), np.zeros((AMOUNTS, 2), np.int64), 1, LIMITS, frozenset({(1, 0)})
    )
    assert found.at.tolist() == [1]
    assert [(out.rank, out.reason) for out in found.excluded] == [(0, "this request failed there before")]
    assert not found.busy


def test_a_decision_without_candidates_is_an_error_of_the_caller() -> None:
    view, _ = view_of({})
    target_table = view.target_table("demo")
    none = candidates(target_table, np.zeros((AMOUNTS, 2), np.int64), 10**6, LIMITS)
    with pytest.raises(ValueError, match="no candidate"):
        decide(
            ask(),
            target_table,
            none,
            np.zeros(2, np.int64),
            Conditions(np.zeros((AMOUNTS, 2), np.int64)),
            PolicyRules(),
            1,
        )


def test_engines_that_cannot_serve_are_named_with_their_reason() -> None:
    view, _ = view_of(
        {},
        {"model": "other"},
        {},
        {},
        {"tokenizer": "e" * 64},
        {"tokenizer": None, "capabilities": Capabilities(token_ids=False)},
    )
    view.leave(3, "rank 1 has ended")
    view.unreachable(4)
    excluded = {out.engine: out.reason for out in view.target_table("demo").excluded}
    assert [target.name for target in view.target_table("demo").targets] == ["e0/0", "e0/1"]
    assert excluded["e1"] == "serves another model: other"
    assert excluded["e2"] == "left: rank 1 has ended"
    assert excluded["e3"].startswith("unreachable")
    assert "tokenizer differs" in excluded["e4"]
    assert "no token ids" in excluded["e5"]


def test_text_only_engines_serve_a_model_that_no_engine_serves_by_ids() -> None:
    view, _ = view_of({}, {"tokenizer": None, "ranks": 1, "capabilities": Capabilities(token_ids=False)})
    assert view.target_table("demo").dialect == "ids"
    view.leave(1)
    assert view.target_table("demo").dialect == "text"
    assert [target.name for target in view.target_table("demo").targets] == ["e1/0"]


# Cost of experts


def prices(found: DispatchCost) -> DispatchPrices:
    assert found.note is None
    assert found.prices is not None
    return found.prices


def test_a_clusters_price_is_lower_where_its_experts_live() -> None:
    found = prices(locality((0, 0), SHAPE, None, linear(layers=2, experts=4, ranks=2), halves()))
    near, far = 2 * (1 - 0.9**2), 2 * (1 - 0.1**2)
    assert found.remote == pytest.approx(np.array([[near, far], [far, near]]), abs=1e-3)
    assert found.local == pytest.approx(np.array([[0.9, 0.1], [0.1, 0.9]]), abs=1e-3)


def test_a_cluster_without_traffic_is_priced_as_the_mean() -> None:
    model = clusters([[[9, 9, 1, 1]] * 2, [[1, 1, 9, 9]] * 2, [[1, 0, 0, 0]] * 2], shares=[0.5, 0.5, 0.0])
    found = prices(locality((0, 0), SHAPE, None, linear(layers=2, experts=4, ranks=2), model))
    assert found.remote[:, 2] == pytest.approx([2 * (1 - 0.5**2)] * 2, abs=1e-3)
    assert found.local[:, 2] == pytest.approx([0.5] * 2, abs=1e-3)


@pytest.mark.parametrize("layout", [tp(2), experts_tp(2)])
def test_there_is_no_expert_price_where_experts_are_sharded(layout: Layout) -> None:
    found = locality((0, 0), SHAPE, layout, linear(layers=2, experts=4, ranks=2), halves())
    assert found.prices is None
    assert "sharded over all ranks" in str(found.note)


def test_there_is_no_expert_price_where_every_rank_receives_every_token() -> None:
    rules = DispatchRules(2, ROW_HASH, gathers_all=True)
    found = locality((0, 0), SHAPE, None, linear(layers=2, experts=4, ranks=2), halves(), rules)
    assert found.prices is None
    assert "every rank receives every token" in str(found.note)


def test_an_engine_that_is_one_target_has_no_expert_price() -> None:
    found = locality((0, 0), SHAPE, TP_EP, linear(layers=2, experts=4, ranks=2), halves(), DispatchRules(1))
    assert found.prices is None
    assert "one target" in str(found.note)


def test_copies_chosen_by_the_row_are_near_to_no_rank() -> None:
    everywhere = Placement(np.tile(np.arange(4), (2, 2)), experts=4, ranks=2)
    found = prices(locality((0, 0), SHAPE, None, everywhere, halves(), DispatchRules(2, ROW_HASH)))
    assert found.local == pytest.approx(0.5, abs=1e-3)


def test_sharded_layers_cost_nothing_and_are_not_counted_as_local() -> None:
    placement = linear(layers=2, experts=4, ranks=2)
    whole = prices(locality((0, 0), SHAPE, None, placement, halves()))
    sharded = with_rows(placement, {0: None}, epoch=0)
    half = prices(locality((0, 0), SHAPE, Layout(attention="dp", sharded=(0,)), sharded, halves()))
    assert half.remote == pytest.approx(whole.remote / 2)
    assert half.local == pytest.approx(whole.local)


def test_a_rank_that_keeps_less_of_its_own_sends_more_away() -> None:
    even = Placement(np.tile(np.arange(4), (2, 2)), experts=4, ranks=2)
    shared = Placement(
        even.expert_of_slot, experts=4, ranks=2, split=even.split._replace(keep=even.split.keep // 2)
    )
    near = Placement(
        even.expert_of_slot, experts=4, ranks=2, split=shared.split._replace(near=even.split.keep)
    )
    found = {
        name: prices(locality((0, 1), SHAPE, None, one, halves()))
        for name, one in (("even", even), ("shared", shared), ("near", near))
    }
    assert found["even"].local == pytest.approx(1.0)
    assert found["even"].remote == pytest.approx(0.0)
    assert found["shared"].local == pytest.approx(0.75, abs=1e-4)
    assert (found["shared"].nodes > 0.1).all()
    assert found["near"].local == pytest.approx(1.0), "each rank is all of its node"


def test_unknown_expert_terms_are_noted_and_cost_nothing() -> None:
    placement = linear(layers=2, experts=4, ranks=2)
    cases = {
        "reports no experts": locality((0, 0), None, None, None, None),
        "placement is unknown": locality((0, 0), SHAPE, None, None, halves()),
        "placement is of another shape": locality(
            (0, 0), SHAPE, None, linear(layers=3, experts=4, ranks=2), halves()
        ),
        "no clusters of this model yet": locality((0, 0), SHAPE, None, placement, None),
        "clusters are of another shape": locality(
            (0, 0), SHAPE, None, placement, clusters(np.ones((2, 5, 7)))
        ),
    }
    for expected_note, found in cases.items():
        assert found.prices is None
        assert expected_note in str(found.note)


def test_engines_that_began_alike_have_the_same_prices_whatever_their_epochs() -> None:
    placement, model = linear(layers=2, experts=4, ranks=2), halves()
    later = linear(layers=2, experts=4, ranks=2)
    later.epoch = 7
    mirrored = Placement(placement.expert_of_slot[:, ::-1], experts=4, ranks=2)
    split = placement.split._replace(keep=placement.split.keep // 2)
    work = DispatchInputs((0, 0), SHAPE, None, placement, model)
    assert work.same_as(DispatchInputs((0, 0), SHAPE, None, later, model))
    others = [
        DispatchInputs(
            (0, 0), SHAPE, None, Placement(placement.expert_of_slot, experts=4, ranks=2, split=split), model
        ),
        DispatchInputs((0, 0), SHAPE, None, mirrored, model),
        DispatchInputs((0, 0), SHAPE, None, None, model),
        DispatchInputs((0, 0), SHAPE, None, placement, halves()),
        DispatchInputs((0, 0), SHAPE, None, placement, None),
        DispatchInputs((0, 0), None, None, placement, model),
        DispatchInputs((0, 0), SHAPE, Layout(attention="dp", sharded=(0,)), placement, model),
        DispatchInputs((0, 0, 0), SHAPE, None, placement, model),
    ]
    assert not any(work.same_as(other) or other.same_as(work) for other in others)


def aligned(gain: float = 1.0) -> tuple[TargetTable, TargetPredictions]:
    """Return two ranks of one engine, and a request whose experts are on the second."""
    view, _ = view_of({"speed": SLOW}, clusters=halves())
    near, far = 2 * (1 - 0.9**2), 2 * (1 - 0.1**2)
    return view.target_table("demo"), prediction_of([far, near], gain, [0.1, 0.9])


@pytest.mark.parametrize("seed", range(4))
def test_the_rank_whose_experts_a_request_wants_wins_as_far_as_the_gain_believes_it(seed: int) -> None:
    target_table, prediction = aligned()
    decision = decided(target_table, prediction=prediction, seed=seed)
    assert decision.target.rank == 1
    assert decision.choice.tied == 1
    assert decision.margin == pytest.approx((100 + 20) * 0.01 * 2 * (0.9**2 - 0.1**2))
    target_table, prediction = aligned(gain=0.0)
    unbelieved, unpredicted = (
        decided(target_table, prediction=prediction, seed=seed),
        decided(target_table, seed=seed),
    )
    assert (unbelieved.scores.terms == unpredicted.scores.terms).all()
    assert unbelieved.target is unpredicted.target
    assert unbelieved.choice.tied == 2


def test_a_cached_prefix_outweighs_experts_and_experts_outweigh_a_little_less() -> None:
    target_table, prediction = aligned()
    assert decided(target_table, None, [25, 0], prediction=prediction).target.rank == 0
    assert decided(target_table, None, [0, 25], prediction=prediction).target.rank == 1


def test_a_candidates_record_says_what_was_expected_there_and_why_not() -> None:
    target_table, prediction = aligned(gain=0.5)
    record = msgspec.json.decode(
        msgspec.json.encode(decided(target_table, prediction=prediction).record()), type=DecisionRecord
    )
    assert [(one.rank, one.local_share, one.experts_note) for one in record.candidates] == [
        (1, 0.9, None),
        (0, 0.1, None),
    ]
    assert (record.epochs.tables, record.epochs.clusters) == (7, 3)
    assert record.prediction is not None
    assert [(one.cluster, round(one.weight, 3)) for one in record.prediction.clusters] == [(0, 0.8), (1, 0.2)]
    assert record.prediction.prefix == str(2**64 - 5)
    assert [(one.source, one.evidence_tokens, one.confidence) for one in record.prediction.sources] == [
        ("prefix", 8.0, 0.25)
    ]
    assert (record.prediction.best, record.prediction.known_blocks, record.prediction.gain) == (
        "prefix",
        2,
        0.5,
    )


def test_an_expert_term_of_zero_says_why() -> None:
    def notes(prediction: TargetPredictions | None) -> set[str | None]:
        return {
            candidate.experts_note
            for candidate in decided(target_table, prediction=prediction).record().candidates
        }

    target_table, _ = aligned()
    assert notes(None) == {UNKNOWN_MODEL}
    assert notes(prediction_of([1, 1], gain=0.0)) == {NO_GAIN}
    assert notes(prediction_of([0, 0], priced=[False, False])) == {"not priced yet with the present clusters"}
    assert decided(target_table).record().prediction is None
    view, _ = view_of({"layout": tp(2)}, clusters=halves())
    target_table = view.target_table("demo")
    assert "sharded" in str(notes(prediction_of([0], priced=[False])))


# The view


def test_silence_means_death_and_a_heartbeat_life_again() -> None:
    view, _ = view_of({}, {})
    view.sign_of_life(1, 10.0)
    assert view.sweep(12.0, 3.0, 600.0) == []
    assert [target.engine.engine for target in view.target_table("demo").targets] == ["e0", "e0"]
    assert {out.engine: out.reason for out in view.target_table("demo").excluded}["e1"].startswith("dead")
    view.sign_of_life(2, 13.0)
    assert len(view.target_table("demo").targets) == 4


def test_engines_that_stay_silent_for_long_are_forgotten() -> None:
    view, reservations = view_of({}, {})
    view.sign_of_life(1, 700.0)
    assert view.sweep(700.0, 3.0, 600.0) == [2]
    assert view.engine(2) is None
    assert reservations.add_rank((9, 0)) in (2, 3)  # the columns are reused


def test_a_new_incarnation_supersedes_the_one_before() -> None:
    view, _ = view_of({})
    again = engine_joined("e0", ["http://h:1"], "f" * 64, worker_id=77)
    assert view.join(again, 5.0) == [1]
    view.sign_of_life(77, 5.0)
    assert [target.key for target in view.target_table("demo").targets] == [(77, 0)]
    assert not view.sign_of_life(1, 6.0)


def test_an_engine_that_left_is_not_revived_by_a_late_heartbeat() -> None:
    view, _ = view_of({})
    view.leave(1)
    view.sign_of_life(1, 1.0)
    assert not view.target_table("demo").targets


def test_under_tensor_parallel_attention_an_engine_is_one_target() -> None:
    view, _ = view_of({"ranks": 4, "layout": tp(2)})
    assert [target.name for target in view.target_table("demo").targets] == ["e0/0"]
    assert "sharded" in str(view.target_table("demo").targets[0].note)


def test_an_engine_that_is_one_target_has_the_capacity_of_its_ranks_together() -> None:
    shape = msgspec.structs.replace(SHAPE, heads=8, kv_heads=2)
    about = {"ranks": 4, "shape": shape, "kv_blocks": 100, "max_requests": 8}
    view, _ = view_of(about)
    dp = view.target_table("demo")
    assert (dp.kv_blocks.tolist(), dp.max_requests.tolist()) == ([100.0] * 4, [8] * 4)
    every = with_rows(linear(layers=2, experts=4, ranks=4), {0: None, 1: None}, epoch=1)
    view.place(1, with_attention(every, "tp", epoch=1), tp(2))
    one = view.target_table("demo")
    assert one is not dp
    assert [target.name for target in one.targets] == ["e0/0"]
    assert (one.kv_blocks.tolist(), one.max_requests.tolist()) == ([200.0], [32])
    assert SaturationLimits(5, 1.0).max_requests(one).tolist() == [20]
    view.place(1, with_attention(every, "dp", epoch=2), experts_tp(2))
    assert (view.target_table("demo").kv_blocks == dp.kv_blocks).all()


@pytest.mark.parametrize("tp_speed", [None, EngineSpeed(step=5e-3, expert_read=2e-6, dispatch=0.0)])
def test_an_engine_has_the_speed_of_its_attention(tp_speed: EngineSpeed | None) -> None:
    speed = EngineSpeed(step=1e-3, expert_read=1e-6, gather_byte=1e-9)
    view, _ = view_of({"ranks": 4, "speed": speed, "tp_speed": tp_speed})
    assert view.target_table("demo").step_s.tolist() == [1e-3] * 4
    assert view.target_table("demo").expert_read_s == pytest.approx([1e-6 / 4] * 4)
    every = with_rows(linear(layers=2, experts=4, ranks=4), {0: None, 1: None}, epoch=1)
    view.place(1, with_attention(every, "tp", epoch=1), tp(2))
    table = view.target_table("demo")
    assert table.targets[0].speed == (tp_speed or speed)
    assert table.stated.all()
    assert table.expert_read_s == pytest.approx([1e-6 / 4 if tp_speed is None else 2e-6])
    view.place(1, with_attention(every, "dp", epoch=2), experts_tp(2))
    assert view.target_table("demo").step_s.tolist() == [1e-3] * 4


def test_an_engine_of_unknown_speed_stays_unknown_under_the_attention_that_was_not_measured() -> None:
    view, _ = view_of({"speed": None, "tp_speed": EngineSpeed(step=5e-3)})
    assert not view.target_table("demo").stated.any()
    every = with_rows(linear(layers=2, experts=4, ranks=2), {0: None, 1: None}, epoch=1)
    view.place(1, with_attention(every, "tp", epoch=1), tp(2))
    assert view.target_table("demo").stated.all()


def test_an_engine_that_states_itself_as_one_target_states_its_own_capacity() -> None:
    placement = linear(layers=2, experts=4, ranks=2).record()
    view, _ = view_of({"ranks": 1, "layout": TP_EP, "placement": placement, "max_requests": 8})
    table = view.target_table("demo")
    assert (table.kv_blocks.tolist(), table.max_requests.tolist()) == ([1000.0], [8])


def test_an_older_placement_never_replaces_a_newer_one() -> None:
    view, _ = view_of({})
    newer = linear(layers=2, experts=4, ranks=2, slots_per_rank=3)
    newer.epoch = 5
    assert view.place(1, newer, EP)
    assert view.target_table("demo").targets[0].epoch == 5
    assert view.target_table("demo").targets[0].note == "not priced yet"
    assert not view.place(1, linear(layers=2, experts=4, ranks=2), EP)
    view.price(1, 4, locality((0, 0), None, None, None, None))  # for an outdated epoch
    assert view.target_table("demo").targets[0].note == "not priced yet"


def test_the_last_epochs_prices_stand_until_those_of_the_new_one_are_known() -> None:
    view, _ = view_of({}, clusters=halves())
    before = view.prices("demo")
    assert before.priced.all()
    mirrored = Placement(
        linear(layers=2, experts=4, ranks=2).expert_of_slot[:, ::-1], experts=4, ranks=2, epoch=1
    )
    view.place(1, mirrored, EP)
    assert (view.prices("demo").flat == before.flat).all()
    assert view.target_table("demo").targets[0].note == "not priced yet: the term is that of epoch 0"
    view.price(1, 1, locality((0, 0), SHAPE, None, mirrored, halves()))
    assert view.prices("demo").flat == pytest.approx(before.flat[[1, 0, 2, 3, 5, 4, 6]])
    assert view.target_table("demo").targets[0].note is None
    tp = Placement(mirrored.expert_of_slot, experts=4, ranks=2, epoch=2)
    view.place(1, tp, experts_tp(2))
    assert not view.prices("demo").priced.any(), "another layout has other prices"


def test_prices_follow_the_clusters_and_those_of_another_number_of_clusters_are_not_used() -> None:
    view, _ = view_of({}, clusters=halves())
    assert view.prices("demo").clusters == 2
    assert view.learn("demo", halves(version=2))
    assert view.prices("demo").priced.all(), "slots keep their meaning: the last version's prices will do"
    assert view.learn("demo", clusters(np.ones((3, 2, 4)), version=3))
    assert not view.prices("demo").priced.any()
    assert view.prices("demo").clusters == 3


def test_clusters_are_learnt_once_per_version_and_forgotten_with_their_last_engine() -> None:
    view, _ = view_of({})
    assert view.learn("demo", halves(version=3))
    assert not view.learn("demo", halves(version=3))
    assert not view.learn("demo", halves(version=2))
    assert view.learn("demo", halves(version=4))
    assert view.keep_clusters() == {"demo"}
    view.forget(1)
    assert view.keep_clusters() == set()
    assert view.clusters("demo") is None


def test_rosters_of_unknown_models_are_not_kept() -> None:
    view, _ = view_of({})
    for number in range(50):
        assert not view.target_table(f"model{number}").targets
    assert view.target_table("model1") is not view.target_table("model1")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_worker_ids_of_64_bits_come_through_whole(worker_id: int) -> None:
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = FleetView(reservations)
    view.join(engine_joined("e", ["http://h:1"], "f" * 64, worker_id=worker_id or 1), 0.0)
    view.sign_of_life(worker_id or 1, 0.0)
    record = decided(view.target_table("demo")).record()
    assert record.candidates[0].worker_id == str(worker_id or 1)
