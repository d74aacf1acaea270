"""Each term of the cost alone: its value computed by hand, and its trend."""

from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.dispatch import numbered
from fleet.experts import ModelShape
from fleet.layout import EP, Layout, experts_tp, tp
from fleet.placement import linear
from fleet.timing import EngineSpeed
from router.config import RouterConfig
from router.evaluation.expected_latency import first_token, step
from router.fleet_state.dispatch_cost import locality
from router.fleet_state.reservations import AMOUNTS, BLOCKS, PREFILL, SEQUENCES, STEPS
from router.fleet_state.target_table import TargetTable
from router.fleet_state.view import FleetView
from router.scheduling.cost import TERMS, ExpectedLoad, Scores, Weights, score
from router.scheduling.decision_record import Terms
from router.scheduling.policies import PolicyRules
from tests.router.decision_builders import decided, prediction_of, view_of
from tests.router.learnt_tables import clusters, halves
from tests.router.router_fixture import SHAPE, engine_joined

TP = tp(2)
SPEED = EngineSpeed(
    prefill_token=1e-3,
    prefill_pair=1e-6,
    step=4e-3,
    decode_sequence=1e-3,
    decode_block=1e-5,
    dispatch=1e-5,
    dispatch_node=1e-4,
    expert_read=1e-4,
)


def load_of(*ranks: tuple[int, int, int, int]) -> NDArray[np.int64]:
    """Return a load table from (prefill tokens, sequences, blocks, steps) of each rank."""
    return np.array(ranks, np.int64).T


def expected(
    remote: Any = 0.0, nodes: Any = 0.0, added: Any = 0.0, gain: float = 1.0, targets: int = 2
) -> ExpectedLoad:
    return ExpectedLoad.of(
        *(np.broadcast_to(np.asarray(table, np.float64), targets) for table in (remote, nodes, added)), gain
    )


def priced(
    target_table: TargetTable,
    load: Any = None,
    uncached: Any = 100,
    prompt: int = 100,
    output: int = 20,
    **more: Any,
) -> dict[str, list[float]]:
    """Return milliseconds by term, one per target."""
    targets = len(target_table.targets)
    load = np.zeros((AMOUNTS, targets), np.int64) if load is None else load
    found = score(
        target_table,
        load,
        np.broadcast_to(np.asarray(uncached, np.int64), targets),
        prompt,
        output,
        Weights(),
        **more,
    )
    return dict(zip(TERMS, found.terms.tolist(), strict=True))


def pair(**about: Any) -> TargetTable:
    """One engine of two ranks."""
    return view_of({"speed": SPEED, **about})[0].target_table("demo")


# Values by hand; milliseconds. A prompt of 100 tokens, 20 tokens of output, blocks of 4 tokens.


@pytest.mark.parametrize(("uncached", "pairs"), [(100, 5000.0), (60, 60 * 100 - 60 * 60 / 2), (1, 99.5)])
def test_prefill_is_a_price_per_token_and_one_per_pair_that_attends(uncached: int, pairs: float) -> None:
    assert sum(position + 0.5 for position in range(100 - uncached, 100)) == pairs, (
        "token i attends to the i before it, and to half of itself"
    )
    assert priced(pair(), uncached=uncached)["prefill"] == pytest.approx([1.0 * uncached + 1e-3 * pairs] * 2)


def test_the_queue_is_the_prefill_that_was_promised_before() -> None:
    assert priced(pair(), load_of((250, 0, 0, 0), (0, 3, 9, 9)))["queue"] == pytest.approx([250.0, 0.0])


@pytest.mark.parametrize(
    ("load", "running"),
    [
        ((0, 0, 0, 0), 0.0),
        ((0, 3, 90, 1000), 20 * 3 * (1.0 + 0.01 * 30)),  # all three outlast the request
        ((0, 3, 90, 6), 6 * (1.0 + 0.01 * 30)),  # two steps each, and then they are done
        ((0, 3, 0, 60), 20 * 3 * 1.0),
        ((0, 0, 50, 40), 0.0),  # no sequence runs: blocks that are merely held cost nothing
    ],
)
def test_decode_is_the_requests_own_steps_and_what_runs_beside_it_until_it_is_done(
    load: tuple[int, int, int, int], running: float
) -> None:
    own = 20 * (4.0 + 1.0 + 0.01 * 120 / 4)
    assert priced(pair(), load_of(load, load))["decode"] == pytest.approx([own + running] * 2)


def test_a_rank_whose_sequences_are_nearly_done_costs_less() -> None:
    done, begun = priced(pair(), load_of((0, 4, 100, 8), (0, 4, 100, 400)))["decode"]
    assert done < begun


def test_a_slower_engine_is_dearer_even_when_both_are_idle() -> None:
    view, _ = view_of(
        {"speed": SPEED, "ranks": 1},
        {"speed": EngineSpeed(step=8e-3, decode_sequence=1e-3, decode_block=1e-5), "ranks": 1},
    )
    fast, slow = priced(view.target_table("demo"))["decode"]
    assert slow - fast == pytest.approx(20 * 4.0)


def test_experts_are_tokens_times_distinct_ranks_and_nodes_each_at_the_price_of_its_link() -> None:
    found = priced(pair(), uncached=60, expected=expected([3.0, 1.0], [1.0, 0.0], gain=0.5))["experts"]
    assert found == pytest.approx([0.5 * 80 * (0.01 * 3 + 0.1 * 1), 0.5 * 80 * 0.01 * 1])


def test_distinct_experts_are_read_by_all_ranks_of_an_engine_at_once() -> None:
    assert priced(pair(), expected=expected(added=[6.0, 6.0], gain=0.5))["distinct"] == pytest.approx(
        [0.5 * 20 * 0.1 * 6 / 2] * 2
    )
    four = view_of({"speed": SPEED, "ranks": 4})[0].target_table("demo")
    assert priced(four, expected=expected(added=6.0, targets=4))["distinct"] == pytest.approx(
        [20 * 0.1 * 6 / 4] * 4
    )


def test_lockstep_is_waiting_for_the_slowest_rank_and_making_the_longest_prefill_longer() -> None:
    speed = EngineSpeed(prefill_token=1e-3, decode_sequence=1e-3, decode_block=0.0)
    target_table = view_of({"speed": speed, "ranks": 3})[0].target_table("demo")
    found = priced(target_table, load_of((0, 5, 0, 1000), (0, 2, 0, 1000), (150, 0, 0, 0)))["lockstep"]
    wait = [0.0, 20 * (5 - 2 - 1) * 1.0, 20 * (5 - 0 - 1) * 1.0]
    longer = [0.0, 0.0, 100.0]  # 100 tokens beside 150 outstanding ones are hidden; behind them they are not
    assert found == pytest.approx([one + other for one, other in zip(wait, longer, strict=True)])


def test_beside_a_busier_rank_a_prefill_delays_no_request() -> None:
    prefill = 100 * 1.0 + 1e-3 * 5000
    beside, behind = priced(pair(), load_of((0, 1, 0, 9), (500, 1, 0, 9)))["lockstep"]
    assert (beside, behind) == (0.0, pytest.approx(prefill))
    ahead, only = priced(pair(), load_of((0, 1, 0, 9), (40, 1, 0, 9)))["lockstep"]
    assert (ahead, only) == (pytest.approx(prefill - 40), pytest.approx(prefill))


def test_where_nothing_runs_a_prefill_delays_no_request() -> None:
    assert priced(pair(), load_of((0, 0, 0, 0), (500, 0, 0, 0)))["lockstep"] == [0.0, 0.0]
    view, _ = view_of({"speed": SPEED}, {"speed": SPEED})
    load = load_of((0, 0, 0, 0), (500, 1, 90, 2000), (0, 0, 0, 0), (0, 0, 0, 0))
    assert {
        decided(view.target_table("demo"), load, seed=seed).target.engine.engine for seed in range(4)
    } == {"e1"}, "not beside the busy one"


def test_decode_and_lockstep_together_are_the_time_of_the_engines_steps() -> None:
    """The work of a request on any rank but the slowest is hidden behind the slowest."""
    found = priced(pair(), load_of((0, 5, 0, 1000), (0, 1, 0, 1000)))
    slow, fast = (
        decode + lockstep for decode, lockstep in zip(found["decode"], found["lockstep"], strict=True)
    )
    prefill = 100 * 1.0 + 1e-3 * 5000
    assert fast - prefill == pytest.approx(20 * (4.0 + 5 * 1.0))
    assert slow - prefill == pytest.approx(20 * (4.0 + 5 * 1.0) + 20 * (1.0 + 0.01 * 120 / 4))


def test_ranks_that_are_no_candidates_still_step_with_the_others() -> None:
    load = load_of((0, 0, 0, 0), (0, 10, 0, 10_000))
    decision = decided(pair(), load)
    assert [out.rank for out in decision.excluded] == [1]
    own = 20 * (1.0 + 0.01 * 120 / 4)
    assert decision.scores.terms[TERMS.index("lockstep")] == pytest.approx([20 * 10 * 1.0 - own + 105.0])


def test_a_handover_costs_what_the_engine_says_it_costs() -> None:
    assert priced(pair(), switch_delay=np.array([0.25, 0.25]))["handover"] == pytest.approx([250.0] * 2)


def test_measured_speeds_multiply_what_they_were_measured_of() -> None:
    load, foreseen = load_of((50, 3, 40, 1000), (70, 1, 10, 1000)), expected(2.0, 1.0, 3.0)
    plain = priced(pair(), load, expected=foreseen)
    faster = priced(pair(), load, expected=foreseen, factors=np.array([[2.0, 2.0], [3.0, 3.0]]))
    for term, factor in (
        ("prefill", 2.0),
        ("queue", 2.0),
        ("decode", 3.0),
        ("experts", 1.0),
        ("distinct", 1.0),
    ):
        assert faster[term] == pytest.approx([factor * ms for ms in plain[term]])
    only = priced(pair(), load, factors=np.array([[1.0, 5.0], [1.0, 1.0]]))
    assert only["lockstep"][0] == 0.0, (
        "the other rank's queue is known to last longer than this one and the prompt"
    )
    assert plain["lockstep"][0] > 0


# Terms that are 0


@pytest.mark.parametrize(
    "about",
    [
        {"ranks": 1},
        {"ranks": 4, "layout": TP},
    ],
)
def test_an_engine_of_one_target_has_neither_expert_nor_lockstep_terms(about: dict[str, Any]) -> None:
    view, _ = view_of({"speed": SPEED, **about}, clusters=halves())
    view.set_distinct(1, np.array([4.0, 4.0]))
    remote, nodes, _, added = view.prices("demo").of(np.array([0.5, 0.5], np.float32))
    found = priced(
        view.target_table("demo"), np.full((AMOUNTS, 1), 9), expected=ExpectedLoad.of(remote, nodes, added)
    )
    assert len(view.target_table("demo").targets) == 1
    assert found["experts"] == found["lockstep"] == [0.0]


def test_an_engine_behind_one_url_is_one_target_whose_experts_are_not_priced() -> None:
    view, _ = view_of()
    view.learn("demo", halves())
    joined = engine_joined("e", ["http://h:1", "http://h:1"], "f" * 64, worker_id=5)
    view.join(joined, 0.0)
    view.sign_of_life(5, 0.0)
    view.price(5, 0, locality((0, 0), SHAPE, None, linear(layers=2, experts=4, ranks=2), halves()))
    assert not view.prices("demo").priced.any()
    assert (
        view.target_table("demo").targets[0].note
        == "the engine is one target: the rank of a request is not known"
    )


# Trends of terms


amounts = st.tuples(st.integers(0, 4000), st.integers(0, 9), st.integers(0, 500), st.integers(0, 900))
states = st.fixed_dictionaries(
    {
        "load": st.lists(amounts, min_size=4, max_size=4),
        "uncached": st.lists(st.integers(1, 2000), min_size=4, max_size=4),
        "remote": st.lists(st.floats(0, 60), min_size=4, max_size=4),
        "nodes": st.lists(st.floats(0, 8), min_size=4, max_size=4),
        "added": st.lists(st.floats(0, 30), min_size=4, max_size=4),
        "output": st.integers(1, 200),
        "factors": st.lists(st.floats(0.25, 4.0), min_size=8, max_size=8),
    }
)
HOUSE = view_of({"speed": SPEED}, {"ranks": 1}, {"ranks": 1, "speed": EngineSpeed(step=1e-2)})[
    0
].target_table("demo")

ALONE = view_of({"ranks": 1, "speed": SPEED})[0].target_table("demo")


def scores_of(state: dict[str, Any], weights: Weights = Weights()) -> Scores:  # noqa: B008 immutable
    foreseen = ExpectedLoad.of(
        np.array(state["remote"]), np.array(state["nodes"]), np.array(state["added"]), 0.7
    )
    factors = np.reshape(state["factors"], (2, 4))
    return score(
        HOUSE,
        np.array(state["load"]).T,
        np.array(state["uncached"]),
        2000,
        state["output"],
        weights,
        foreseen,
        np.full(4, 0.1),
        factors,
    )


def test_every_term_is_a_row_with_a_setting() -> None:
    settings_of_terms = [
        field.name.removesuffix("_weight") for field in fields(RouterConfig) if field.name.endswith("_weight")
    ]
    assert settings_of_terms == list(TERMS) == list(Terms.__struct_fields__)
    assert PolicyRules.of(RouterConfig()).weights == Weights()


@settings(deadline=None, max_examples=60)
@given(state=states, prompt=st.integers(1, 2000))
def test_expected_latencies_are_the_terms_of_the_cost(state: dict[str, Any], prompt: int) -> None:
    """The first token is the terms prefill and queue. The term decode is one step per token, and the KV blocks
    of the request itself, as long as no sequence ends before it.
    """
    load = np.array(state["load"]).T
    load[STEPS] = load[SEQUENCES] * state["output"]
    for at in range(4):
        decision = decided(
            HOUSE, load, conditions={"held": HOUSE.targets[at].key}, prompt=prompt, output=state["output"]
        )
        seconds = {term: decision.scores.ms(term)[decision.chosen] / 1000.0 for term in TERMS}
        assert first_token(decision).prefill == pytest.approx(seconds["prefill"] + seconds["queue"])
        target = int(decision.at[decision.chosen])
        own_blocks = HOUSE.decode_token_block_s[target] * (prompt + state["output"])
        running = load[SEQUENCES, target] > 0  # blocks without a sequence cost a step, but no request waits
        if running or not load[BLOCKS, target]:
            assert seconds["decode"] == pytest.approx(state["output"] * (step(decision) + own_blocks))


@settings(deadline=None, max_examples=60)
@given(
    state=states, weights=st.builds(Weights, st.fixed_dictionaries(dict.fromkeys(TERMS, st.floats(0, 10))))
)
def test_terms_add_up_exactly_and_none_is_negative(state: dict[str, Any], weights: Weights) -> None:
    found = scores_of(state, weights)
    alone = score(
        ALONE, np.array(state["load"][:1]).T, np.array(state["uncached"][:1]), 2000, state["output"], weights
    )
    for terms, total in zip(
        [*found.terms.T.tolist(), *alone.terms.T.tolist()], [*found.total, *alone.total], strict=True
    ):
        assert reduce(add, terms) == total
    assert (found.terms >= 0).all()


@settings(deadline=None, max_examples=60)
@given(
    state=states,
    what=st.sampled_from(["remote", "nodes", "added", "uncached"]),
    which=st.integers(0, 3),
    more=st.integers(1, 50),
)
def test_more_to_compute_or_to_send_never_costs_less_and_leaves_others_alone(
    state: dict[str, Any], what: str, which: int, more: int
) -> None:
    state["uncached"] = [min(uncached, 1900) for uncached in state["uncached"]]
    before = scores_of(state).total
    state[what][which] += more
    after = scores_of(state).total
    assert after[which] >= before[which] * (1 - 1e-12)
    assert (np.delete(after, which) == np.delete(before, which)).all()


@settings(deadline=None, max_examples=60)
@given(
    state=states,
    row=st.sampled_from([PREFILL, BLOCKS, STEPS]),
    which=st.integers(0, 3),
    more=st.integers(1, 500),
)
def test_more_promised_to_a_rank_never_makes_it_cheaper_nor_a_rank_of_another_engine_dearer(
    state: dict[str, Any], row: int, which: int, more: int
) -> None:
    before = scores_of(state).total
    state["load"] = [
        tuple(amount + more * (at == row and one == which) for at, amount in enumerate(load))
        for one, load in enumerate(state["load"])
    ]
    after = scores_of(state).total
    assert after[which] >= before[which] * (1 - 1e-12)
    assert (after == before)[HOUSE.engine != HOUSE.engine[which]].all()


@pytest.mark.parametrize("experts", [16, 64, 256])
def test_the_expert_term_does_not_change_with_the_number_of_experts_where_the_ranks_are_the_same(
    experts: int,
) -> None:
    shape = ModelShape(layers=2, experts=experts, top_k=4, hidden=64, expert_intermediate=64)
    placement, model = linear(layers=2, experts=experts, ranks=4), clusters(np.ones((2, 2, experts)))
    view, _ = view_of(
        {"ranks": 4, "speed": SPEED, "shape": shape, "placement": placement.record()}, clusters=model
    )
    found = view.prices("demo")
    remote, nodes, local, added = found.of(np.array([0.3, 0.7], np.float32))
    assert remote == pytest.approx(np.full(4, 2 * 3 * (1 - 0.75**4)), rel=1e-5)
    terms = priced(view.target_table("demo"), expected=ExpectedLoad.of(remote, nodes, added))
    assert terms["experts"] == pytest.approx([120 * 0.01 * 2 * 3 * (1 - 0.75**4)] * 4, rel=1e-5)
    assert local == pytest.approx(np.full(4, 0.25), rel=1e-5)


# Sources of terms


def test_nodes_of_ranks_make_remote_nodes_and_engines_spread_alike_are_priced_alike() -> None:
    view, _ = view_of(
        {"ranks": 4, "nodes": ("a", "a", "b", "b")},
        {"ranks": 4, "nodes": ("x", "x", "y", "y")},
        {"ranks": 4},
        clusters=clusters(np.ones((2, 2, 4))),
    )
    _, nodes, _, _ = view.prices("demo").of(np.array([0.5, 0.5], np.float32))
    away = 2 * (1 - 0.5**SHAPE.top_k)
    assert nodes == pytest.approx([away] * 8 + [0.0] * 4)
    assert numbered(("a", "a", "b", "b")) == numbered(("x", "x", "y", "y")) == (0, 0, 1, 1)


def test_an_engine_that_names_nodes_for_other_ranks_than_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="names 3 nodes for 2 ranks"):
        view_of({"nodes": ("a", "b", "c")})


def distinct_of(view: FleetView) -> list[float]:
    decision = decided(
        view.target_table("demo"),
        prediction=prediction_of(
            [0.0] * 4, added=view.prices("demo").of(np.array([0.8, 0.2], np.float32))[3]
        ),
    )
    return decision.scores.terms[TERMS.index("distinct")].tolist()  # type: ignore[no-any-return]


def test_what_a_request_adds_to_an_engines_steps_is_taken_without_building_anything_anew() -> None:
    view, _ = view_of({"speed": SPEED}, {"speed": SPEED}, clusters=halves())
    target_table, prices, version = view.target_table("demo"), view.prices("demo"), view.version
    view.set_distinct(2, np.array([10.0, 0.0]))
    assert (view.target_table("demo"), view.prices("demo"), view.version) == (target_table, prices, version)
    assert distinct_of(view) == pytest.approx([0.0, 0.0, 20 * 0.1 * 8 / 2, 20 * 0.1 * 8 / 2])
    view.sign_of_life(1, 1.0)
    view.leave(1)
    assert view.prices("demo").distinct.tolist() == [[10.0, 0.0]], "and survives what is built anew"
    view.set_distinct(2, np.array([1.0, 2.0, 3.0]))
    assert view.prices("demo").distinct.tolist() == [[0.0, 0.0]], "of other clusters"
    view.set_distinct(99, np.array([1.0, 2.0]))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_numbers_of_experts_and_seconds_that_cannot_be_are_refused(bad: float) -> None:
    view, _ = view_of({})
    with pytest.raises(ValueError, match="added experts must be finite and not negative"):
        view.set_distinct(1, np.array([1.0, bad]))
    with pytest.raises(ValueError, match="a handover must cost finite seconds"):
        view.handing_over(1, bad)


def test_an_announced_handover_counts_until_it_is_over_and_rebuilds_nothing() -> None:
    view, _ = view_of({}, {})
    target_table = view.target_table("demo")
    assert view.handovers(target_table) is None
    view.handing_over(2, 0.5)
    handovers = view.handovers(target_table)
    assert handovers is not None
    assert handovers.tolist() == [0, 0, 0.5, 0.5]
    assert view.handovers(target_table) is handovers
    assert view.target_table("demo") is target_table
    view.handing_over(2, 0.0)
    assert view.handovers(target_table) is None
    view.handing_over(77, 1.0)


def test_the_ranks_share_reads_in_every_layout() -> None:
    for layout, reads in ((EP, [5e-5] * 2), (experts_tp(2), [5e-5] * 2), (TP, [5e-5])):
        assert pair(layout=layout).expert_read_s.tolist() == reads


@given(sharded=st.sets(st.integers(0, 1)), uncached=st.integers(1, 500), output=st.integers(1, 500))
def test_a_sharded_layer_takes_every_token_to_all_other_ranks_and_back(
    sharded: set[int], uncached: int, output: int
) -> None:
    """Two engines of two ranks. The second has no sharded layer."""
    layout = Layout(attention="dp", sharded=tuple(sorted(sharded)))
    speed = msgspec.structs.replace(SPEED, gather_byte=1e-6)
    view, _ = view_of({"speed": speed, "layout": layout}, {"speed": speed})
    target_table = view.target_table("demo")
    found = score(
        target_table,
        np.zeros((AMOUNTS, 4), np.int64),
        np.full(4, uncached, np.int64),
        uncached,
        output,
        Weights(),
    ).ms("sharded")
    there_and_back = (
        2 * len(sharded) * SHAPE.hidden * 4 / 2
    )  # half of a token's float32 values are its rank's
    assert found == pytest.approx([1e-3 * (uncached + output) * there_and_back] * 2 + [0.0, 0.0])


@settings(deadline=None, max_examples=30)
@given(state=states)
def test_what_has_no_price_is_not_computed_and_would_have_been_nothing(state: dict[str, Any]) -> None:
    load, uncached = np.array(state["load"]).T, np.array(state["uncached"])
    foreseen = ExpectedLoad.of(np.array(state["remote"]), np.array(state["nodes"]), np.array(state["added"]))
    assert (PLAIN.pairs, PLAIN.far, PLAIN.reads, PLAIN.gathers, PLAIN.apart) == (False,) * 5
    houses = PLAIN, replace(PLAIN, pairs=True, far=True, reads=True, gathers=True, apart=True)
    short, whole = (
        score(house, load, uncached, 2000, state["output"], Weights(), foreseen) for house in houses
    )
    assert (short.terms == whole.terms).all()


PLAIN = view_of({}, {})[0].target_table("demo")
"""Prices only of tokens, steps, blocks and ranks."""
