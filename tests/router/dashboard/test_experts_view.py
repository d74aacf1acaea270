"""The view Experts: demand against placement."""

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.dispatch import loads
from fleet.placement import EMPTY, Placement, linear, with_rows, with_slots
from fleet.popularity import ExpertTable
from fleet.requests.demand import ClusterPopularity, PopularityDescribed, RankPopularity
from router.dashboard.views.experts import (
    LevelMap,
    PlacedEngine,
    Popularity,
    Replicas,
    expert_maps,
    experts_picture,
    level_map,
    maps_version,
)
from tests.router.router_fixture import engine_joined

SLOW = np.array([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
FAST = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])


def copied() -> Placement:
    """Two layers of four experts on two ranks; rank 1 also holds expert 0 of layer 0."""
    table = with_slots(linear(layers=2, experts=4, ranks=2), 3).expert_of_slot.copy()
    table[0, 5] = 0
    return Placement(table, experts=4, ranks=2, epoch=7)


def placed(placement: Placement | None = None, name: str = "a", **about: Any) -> PlacedEngine:
    joined = engine_joined(name, ["http://h:1", "http://h:2"], None, **about)
    return PlacedEngine(joined, placement or copied(), ("m0", "m1"))


def answer(**changes: Any) -> PopularityDescribed:
    values: dict[str, Any] = {
        "model": "demo",
        "tokens": 1000.0,
        "tokens_per_second": 50.0,
        "fast": ExpertTable.of(FAST),
        "slow": ExpertTable.of(SLOW),
        "ranks": (
            RankPopularity(engine="a", rank=0, tokens_per_second=30.0, remote=0.5),
            RankPopularity(engine="a", rank=1, tokens_per_second=10.0, remote=0.1),
            RankPopularity(engine="other", rank=0, tokens_per_second=10.0, remote=None),
        ),
        "clusters": (ClusterPopularity(cluster=0, share=1.0, distance=0.0),),
        "shifted": True,
        "divergence": 0.02,
        "threshold": 0.01,
        "sources": (),
        "gain": 0.75,
        "outcomes": 3,
        "recall": None,
        "prior_recall": None,
        "stored_blocks": 0,
        "stored_bytes": 0,
    }
    return PopularityDescribed(**(values | changes))


KNOWN = Popularity().answered(answer())


def values(found: LevelMap) -> NDArray[Any]:
    levels = np.frombuffer(base64.b64decode(found.levels), np.uint8)
    return levels.reshape(found.rows, found.columns) * found.unit


def test_a_model_has_skew_and_drift() -> None:
    picture = experts_picture([placed()], {"demo": KNOWN}, {placed().joined.worker_id: Replicas.of(copied())})
    (model,) = picture.models
    assert (model.model, model.shifted, model.divergence, model.threshold) == ("demo", True, 0.02, 0.01)
    assert model.skew == pytest.approx((1.6 + 1.0) / 2)
    assert model.top_tenth == pytest.approx((0.4 + 0.25) / 2, rel=1e-3)
    assert (model.clusters, model.gain, model.tokens_per_second) == (1, 0.75, 50)


def test_an_engine_has_its_replicas_and_its_remote_share_by_tokens() -> None:
    engine = placed()
    picture = experts_picture([engine], {"demo": KNOWN}, {engine.joined.worker_id: Replicas.of(copied())})
    (one,) = picture.engines
    assert (one.epoch, one.replicated, one.most_replicas, one.empty_slots) == (7, 1, 2, 3)
    assert one.tokens_per_second == 40
    assert one.remote == pytest.approx((0.5 * 30 + 0.1 * 10) / 40)


def test_without_an_answer_of_the_tracker_the_page_says_so() -> None:
    engine = placed()
    picture = experts_picture([engine], {}, {engine.joined.worker_id: Replicas.of(copied())})
    assert picture.models[0].silence
    assert (picture.engines[0].tokens_per_second, picture.engines[0].remote) == (0, None)
    maps = expert_maps(engine, Popularity())
    assert maps.known is False
    np.testing.assert_allclose(values(maps.demand), 1.0, rtol=0.01)


def test_the_maps_are_demand_replicas_and_the_expected_load() -> None:
    maps = expert_maps(placed(), KNOWN)
    assert maps.known
    np.testing.assert_allclose(values(maps.demand), 4 * SLOW, atol=0.01)
    np.testing.assert_allclose(values(maps.recent), 4 * FAST, atol=0.01)
    np.testing.assert_array_equal(values(maps.replicas), [[2, 1, 1, 1], [1, 1, 1, 1]])
    demand = np.array([0.75, 0.25])[:, None, None] * FAST[None]
    exact = 2 * loads(copied(), demand, np.array([0, 1]))
    np.testing.assert_allclose(values(maps.load), exact, atol=0.01)
    assert [one.load for one in maps.ranks] == pytest.approx(list(exact.mean(axis=0)), rel=1e-3)


def test_layers_name_their_hottest_experts_and_where_they_are() -> None:
    layer = expert_maps(placed(), KNOWN).layers[0]
    assert (layer.skew, layer.top_tenth) == (1.6, 0.4)
    first, second = layer.hottest[:2]
    assert (first.expert, first.demand, first.replicas, first.ranks) == (0, 1.6, 2, [0, 1])
    assert (second.expert, second.ranks) == (1, [0])
    assert 0 < layer.balance <= 1


def test_ranks_have_their_own_traffic() -> None:
    zero, one = expert_maps(placed(), KNOWN).ranks
    assert (zero.rank, zero.node, zero.tokens_per_second, zero.remote) == (0, "m0", 30, 0.5)
    assert (one.node, one.remote) == ("m1", 0.1)


def test_a_sharded_layer_has_no_replicas_and_an_even_load() -> None:
    maps = expert_maps(placed(with_rows(copied(), {1: None}, epoch=8)), KNOWN)
    assert values(maps.replicas)[1].tolist() == [0, 0, 0, 0]
    np.testing.assert_allclose(values(maps.load)[1], 1.0, rtol=0.01)
    assert maps.layers[1].hottest[0].ranks == []


def test_a_profile_of_another_shape_is_not_used() -> None:
    other = Popularity().answered(
        answer(slow=ExpertTable.of(np.ones((3, 4))), fast=ExpertTable.of(np.ones((3, 4))))
    )
    assert expert_maps(placed(), other).known is False


def test_the_version_of_maps_changes_with_the_epoch_and_with_other_figures_alone() -> None:
    engine, moved = placed(), placed(with_rows(copied(), {}, epoch=8))
    again = KNOWN.answered(answer(outcomes=99))
    assert maps_version(engine, KNOWN) == maps_version(engine, again)
    assert maps_version(engine, KNOWN) != maps_version(moved, KNOWN)
    newer = KNOWN.answered(answer(fast=ExpertTable.of(SLOW)))
    assert maps_version(engine, KNOWN) != maps_version(engine, newer)


def test_a_damaged_table_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        KNOWN.answered(answer(slow=ExpertTable(layers=2, experts=4, values=b"12")))


def test_large_maps_stay_small() -> None:
    table = np.random.default_rng(1).random((94, 512)) * 3
    found = level_map(table)
    assert len(msgspec.json.encode(found)) < 70_000
    np.testing.assert_allclose(values(found), table, atol=3 / 255)


def test_empty_slots_of_sharded_layers_are_not_free() -> None:
    placement = with_rows(copied(), {1: None}, epoch=8)
    assert (placement.expert_of_slot[1] == EMPTY).all()
    assert Replicas.of(placement).empty == 1
