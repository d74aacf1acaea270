"""Homes decide only among ranks of equal cost."""

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from fleet.facts.placements import HomesPublished
from fleet.layout import Layout
from fleet.placement import with_rows
from fleet.signatures import ClusterModel
from router.fleet_state.cluster_homes import homes_of, is_home
from router.fleet_state.dispatch_cost import locality
from router.fleet_state.view import FleetView
from router.scheduling.cost import Weights
from router.scheduling.decision_record import DecisionRecord
from router.scheduling.policies import HomeRanks, PolicyRules, choose
from tests.router.decision_builders import SLOW, decided, prediction_of, view_of
from tests.router.router_fixture import SHAPE, OpenHouse, until


def halves() -> ClusterModel:
    profiles = np.zeros((2, SHAPE.layers, SHAPE.experts), np.float32)
    profiles[0, :, : SHAPE.experts // 2] = profiles[1, :, SHAPE.experts // 2 :] = 2 / SHAPE.experts
    return ClusterModel(3, profiles, np.full(2, 0.5, np.float32), 1.0)


def published(version: int = 1, share: Any = ((1.0, 0.0), (0.0, 1.0)), **fields: Any) -> HomesPublished:
    table = np.asarray(share, "<f4")
    plain: dict[str, Any] = {"engine": "e0", "worker_id": 1, "model": "demo", "epoch": 0, "clusters": 3}
    about = {
        **plain,
        "count": len(table),
        "ranks": table.shape[1] if table.size else 2,
        "homes": table.tobytes(),
        **fields,
    }
    return HomesPublished(version=version, **about)


def test_shares_become_multiples_of_the_even_share_and_a_cluster_without_homes_has_all_ranks_as_homes() -> (
    None
):
    homes = homes_of(published(share=((0.75, 0.25), (0.0, 0.0))), 2)
    assert homes.lift is not None
    np.testing.assert_allclose(homes.lift, [[1.5, 1.0], [0.5, 1.0]])
    assert homes_of(published(homes=b"", count=0), 2).lift is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 3},
        {"count": 3},
        {"count": 1 << 60},
        {"homes": b"xyz"},
        {"share": ((np.nan, 1.0),)},
        {"share": ((-1.0, 2.0),)},
        {"share": ((0.2, 0.2),)},
        {"share": ((np.inf, 0.0),)},
        {"epoch": -1},
    ],
)
def test_homes_that_contradict_themselves_or_the_engine_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="homes"):
        homes_of(published(**wrong), 2)


def test_a_home_gets_clearly_more_than_its_even_share_and_not_much_less_than_the_first() -> None:
    assert is_home(np.array([4.0, 2.0, 1.9, 0.1])).tolist() == [True, True, False, False]
    assert not is_home(np.ones(4)).any()
    assert not is_home(np.array([1.2, 0.8])).any()


def test_homes_come_first_if_they_cost_at_most_what_they_save_and_then_the_least_work() -> None:
    def chosen(
        score: list[float],
        home: list[bool] | None,
        work: list[float] | None = None,
        saves: list[float] | None = None,
    ) -> tuple[int, str]:
        total = np.array(score)
        where = (
            None if home is None else HomeRanks(np.array(home), None if saves is None else np.array(saves))
        )
        choice = choose(
            PolicyRules(), total, "ms", total, np.array(work or [0.0] * len(score)), 0, None, where
        )
        return choice.chosen, choice.why

    assert chosen([1, 1, 1], [False, False, True], [0, 0, 9]) == (2, "home")
    assert chosen([1, 1, 1], [False, True, True], [0, 5, 2]) == (2, "home")
    assert chosen([1, 1, 1], [False, False, False], [3, 1, 2]) == (1, "tie")
    assert chosen([1, 1, 1], [True, True, True], [3, 1, 2]) == (1, "tie"), "everywhere is nowhere"
    assert chosen([1, 1, 2], [False, False, True], [1, 0, 0]) == (1, "tie")
    assert chosen([1, 2], [False, True]) == (0, "cheapest")
    assert chosen([1, 2], [False, True], saves=[-3, -2]) == (1, "home"), "it saves as much as it costs more"
    assert chosen([1, 2], [False, True], saves=[-3, -2.1]) == (0, "cheapest")
    assert chosen([1, 1], [False, True], saves=[0, -9]) == (
        1,
        "home",
    ), "among equals even a home that saves nothing"
    assert chosen([1, 3, 2], [False, True, True], saves=[-9, 0, 0]) == (
        2,
        "home",
    ), "the cheapest of those that are worth it"
    assert chosen([1, 3, 1], [True, True, False], saves=[-9, 0, -9]) == (0, "home")
    assert chosen([1, 1, 2, 2], [False, False, True, True], saves=[-9, -9, 0, 0]) == (
        2,
        "home",
    ), "several homes, as many as there are cheapest ranks"


def settled(share: Any) -> FleetView:
    view, _ = view_of({"speed": SLOW}, {"speed": SLOW}, clusters=halves())
    assert view.set_homes(1, homes_of(published(share=share), 2))
    return view


def test_a_decision_goes_home_and_its_record_says_where_that_is() -> None:
    target_table = view_of({"speed": SLOW}, {"speed": SLOW})[0].target_table("demo")
    prediction = replace(prediction_of([0.0] * 4), home=np.array([0.4, 1.6, 1.0, 1.0]))
    decision = decided(target_table, prediction=prediction)
    assert (decision.target.name, decision.choice.why) == ("e0/1", "home")
    record = msgspec.json.decode(msgspec.json.encode(decision.record()), type=DecisionRecord)
    assert (record.home_ranks, record.chosen, record.candidates[0].rank) == (["e0/1"], "e0/1", 1)
    assert record.homes_note is None
    assert {
        candidate.rank: candidate.home_lift for candidate in record.candidates if candidate.engine == "e0"
    } == {0: 0.4, 1: 1.6}


def test_homes_apply_by_the_requests_own_confidence_regardless_of_the_earned_gain() -> None:
    target_table = view_of({"speed": SLOW}, {"speed": SLOW})[0].target_table("demo")
    prediction = replace(prediction_of([0.0] * 4, gain=0.0), home=np.array([0.4, 1.6, 1.0, 1.0]))
    assert prediction.request.confidence == 0.25
    assert decided(target_table, prediction=prediction).choice.why == "home"
    unsure = decided(target_table, prediction=prediction, rules=PolicyRules(home_confidence=0.26))
    assert (unsure.record().home_ranks, unsure.choice.why, unsure.home) == (["e0/1"], "tie", None)
    assert "0.26 is required" in (unsure.record().homes_note or "")


@pytest.mark.parametrize("gain", [0.0, 0.5, 1.0])
def test_a_home_may_cost_two_and_a_half_times_what_it_saves_whatever_part_of_that_the_expert_term_has(
    gain: float,
) -> None:
    target_table = view_of({"speed": SLOW}, {"speed": SLOW})[0].target_table("demo")
    near = replace(prediction_of([1.0, 0.5, 1.0, 1.0], gain=gain), home=np.array([0.4, 1.6, 1.0, 1.0]))
    saved = 1e3 * 2.5 * SLOW.dispatch * 0.5 * (100 + 20)
    for dearer, is_worth_it in ((0.99 * saved, True), (1.01 * saved, False)):
        load = {"switch_delay": np.array([0.0, dearer / 1e3, 0.0, 0.0])}
        decision = decided(target_table, prediction=near, conditions=load)
        assert (decision.choice.why == "home", decision.target.name == "e0/1") == (is_worth_it, is_worth_it)
    unpriced = replace(near, priced=np.array([True, False, True, True]))
    load = {"switch_delay": np.array([0.0, 0.5 * saved / 1e3, 0.0, 0.0])}
    assert decided(target_table, prediction=unpriced, conditions=load).choice.why != "home", (
        "what is not priced saves nothing that is known"
    )


def test_there_are_no_homes_while_no_layer_is_whole() -> None:
    view, _ = view_of({"speed": SLOW}, clusters=halves())
    assert view.set_homes(1, homes_of(published(share=((0.75, 0.25), (0.25, 0.75))), 2))
    state = view.engine(1)
    assert state is not None
    assert state.placement is not None
    whole = state.placement
    for epoch, sharded in enumerate([(0,), (0, 1), (1,), ()], whole.epoch + 1):
        placement = with_rows(whole, dict.fromkeys(sharded), epoch=epoch)
        layout = Layout(attention="dp", sharded=sharded)
        assert view.place(1, placement, layout)
        prices = view.prices("demo")
        assert (prices.homes is None) == ("e0" not in prices.versions.homes) == (sharded == (0, 1))
        assert prices.priced.all() == (sharded in {(0,), ()})
        view.price(1, epoch, locality((0, 0), SHAPE, layout, placement, halves()))
        prices = view.prices("demo")
        assert prices.priced.all() == (sharded != (0, 1))
        # In each whole layer each cluster's experts are all on one of the two ranks.
        assert prices.remote.sum() == pytest.approx(2 * (2 - len(sharded)))


@pytest.mark.parametrize(
    "rules",
    [
        PolicyRules(weights=Weights.of(experts=0.0)),
        PolicyRules("kv"),
        PolicyRules("least_loaded"),
        PolicyRules("round_robin"),
        PolicyRules("classic", beta=0.0),
    ],
)
def test_rules_that_do_not_mind_where_experts_are_do_not_mind_homes(rules: PolicyRules) -> None:
    target_table = view_of({"speed": SLOW}, {"speed": SLOW})[0].target_table("demo")
    record = decided(
        target_table,
        prediction=replace(prediction_of([0.0] * 4), home=np.array([0.4, 1.6, 1.0, 1.0])),
        rules=rules,
    ).record()
    assert "does not depend on expert placement" in (record.homes_note or "")
    assert record.why != "home"


def test_an_older_word_of_the_planner_and_words_about_strangers_change_nothing() -> None:
    view = settled(((1.0, 0.0), (0.0, 1.0)))
    before = view.version
    assert not view.set_homes(1, homes_of(published(version=1, share=((0.0, 1.0),) * 2), 2))
    assert not view.set_homes(9, homes_of(published(version=5), 2))
    assert view.version == before
    assert view.set_homes(1, homes_of(published(version=2, homes=b"", count=0), 2)), "homes are withdrawn"


def test_the_homes_of_a_signature_are_those_of_its_clusters_and_an_engine_without_homes_counts_as_any() -> (
    None
):
    view = settled(((1.0, 0.0), (0.0, 1.0)))
    lift = view.prices("demo").home(np.array([0.9, 0.1], np.float32))
    assert lift is not None
    np.testing.assert_allclose(lift, [1.8, 0.2, 1.0, 1.0], rtol=1e-6)
    assert view.set_homes(1, homes_of(published(version=2, share=((1.0, 0.0),)), 2))
    assert view.prices("demo").home(np.array([0.9, 0.1], np.float32)) is None, (
        "they are of another number of clusters"
    )


async def test_homes_from_the_bus_reach_decisions_and_garbage_does_not(open_house: OpenHouse) -> None:
    house = await open_house()
    joined = await house.join("a", ["http://127.0.0.1:9", "http://127.0.0.1:10"], None)
    publisher = house.bus.publisher(house.subjects.homes)
    about = {"engine": "a", "worker_id": joined.worker_id}
    await publisher.publish(published(7, homes=b"odd", **about))
    await publisher.publish(published(8, **about))
    state = house.service.view.engine(joined.worker_id)
    assert state is not None
    await until(lambda: state.homes.now is not None)
    assert state.homes.now is not None
    assert state.homes.now.version == 8
