"""What the tracker believes and refuses."""

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.events import DemandPublished, EngineJoined, ExpertsActivated, ProfilePublished
from fleet.experts import ModelShape
from fleet.popularity import ExpertCounts
from tracker.activity import Activity
from tracker.config import TrackerConfig
from tracker.refusals import Fault, Refused

LAYERS, EXPERTS = 2, 8
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=2, hidden=4, expert_intermediate=8)


def joined(worker_id: int = 1, engine: str = "a", model: str = "m", ranks: int = 2, shape: ModelShape | None = SHAPE) -> EngineJoined:
    return EngineJoined(
        engine=engine,
        worker_id=worker_id,
        model=model,
        node="n",
        urls=("http://x",) * ranks,
        block_size=16,
        kv_blocks=8,
        max_context=512,
        max_batch_tokens=256,
        shape=shape,
    )


def report(worker_id: int = 1, rank: int = 0, counts: Any = None, **fields: Any) -> ExpertsActivated:
    table = np.ones((LAYERS, EXPERTS)) if counts is None else np.asarray(counts)
    plain = {"engine": "a", "model": "m", "epoch": 0, "seconds": 1.0, "tokens": 4, "cached_tokens": 0, "counts": ExpertCounts.of(np.asarray(table, np.int64))}
    return ExpertsActivated(worker_id=worker_id, rank=rank, **{**plain, **fields})


def demands(said: Iterable[Any]) -> dict[tuple[int, int], DemandPublished]:
    return {(message.worker_id, message.rank): message for message in said if isinstance(message, DemandPublished)}


def profiles(said: Iterable[Any]) -> dict[str, ProfilePublished]:
    return {message.model: message for message in said if isinstance(message, ProfilePublished)}


def test_a_model_that_joined_has_a_uniform_profile_before_anything_was_reported() -> None:
    activity = Activity(TrackerConfig())
    assert activity.profile("m", 0.0) is None
    activity.joined(joined(), 0.0)
    found = activity.profile("m", 5.0)
    assert found is not None
    assert (found.tokens, found.version) == (0.0, 0)
    np.testing.assert_allclose(found.profile.array(), 1 / EXPERTS)
    assert list(activity.changed(5.0)) == []


def test_what_is_reported_is_published_once_as_profile_and_demand() -> None:
    activity = Activity(TrackerConfig(prior_pairs=1e-6))
    activity.joined(joined(), 0.0)
    hot = np.zeros((LAYERS, EXPERTS))
    hot[:, 3] = 8
    activity.report(report(counts=hot), 1.0)
    said = list(activity.changed(1.0))
    np.testing.assert_allclose(profiles(said)["m"].profile.array()[:, 3], 1.0, rtol=1e-5)
    demand = demands(said)[1, 0]
    assert (demand.engine, demand.model) == ("a", "m")
    assert demand.tokens_per_second == pytest.approx(4.0)
    np.testing.assert_allclose(demand.demand.array(), hot, rtol=1e-5)
    assert len({message.version for message in said}) == 2
    assert list(activity.changed(1.0)) == []


def test_the_profile_is_that_of_all_ranks_and_the_demand_that_of_each() -> None:
    activity = Activity(TrackerConfig(prior_pairs=1e-6))
    activity.joined(joined(1, "a"), 0.0)
    activity.joined(joined(2, "b"), 0.0)
    for expert, (worker_id, rank) in enumerate(((1, 0), (1, 1), (2, 0))):
        counts = np.zeros((LAYERS, EXPERTS))
        counts[:, expert] = 8
        activity.report(report(worker_id, rank, counts, engine="ab"[worker_id - 1]), 1.0)
    said = list(activity.changed(1.0))
    np.testing.assert_allclose(profiles(said)["m"].profile.array()[:, :3], 1 / 3, rtol=1e-5)
    assert {key: int(demand.demand.array()[0].argmax()) for key, demand in demands(said).items()} == {(1, 0): 0, (1, 1): 1, (2, 0): 2}
    assert activity.ranks == 3


def test_a_silent_ranks_falling_demand_is_published_until_it_is_nothing_and_then_no_more() -> None:
    activity = Activity(TrackerConfig())
    activity.joined(joined(), 0.0)
    activity.report(report(), 1.0)
    levels = [demands(activity.changed(1.0))[1, 0].tokens_per_second]
    for now in range(3, 3000, 2):
        levels += [demand.tokens_per_second for demand in demands(activity.changed(float(now))).values()]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == 0.0
    assert 20 < len(levels) < 200


def test_a_new_incarnation_replaces_the_old_one_and_the_profile_stays() -> None:
    activity = Activity(TrackerConfig())
    activity.joined(joined(1), 0.0)
    activity.report(report(1, tokens=100), 1.0)
    activity.joined(joined(2), 2.0)
    assert activity.ranks == 0
    with pytest.raises(Refused) as refusal:
        activity.report(report(1), 3.0)
    assert refusal.value.fault is Fault.DEPARTED
    found = activity.profile("m", 3.0)
    assert found is not None
    assert found.tokens > 90
    activity.joined(joined(1), 4.0)  # an old record read again
    with pytest.raises(Refused):
        activity.report(report(1), 5.0)


def test_a_join_heard_again_changes_nothing() -> None:
    activity = Activity(TrackerConfig())
    activity.joined(joined(), 0.0)
    activity.report(report(), 1.0)
    activity.joined(joined(), 2.0)
    assert activity.ranks == 1


def test_a_worker_that_left_or_fell_silent_is_forgotten() -> None:
    config = TrackerConfig(forget_seconds=10)
    activity = Activity(config)
    for worker_id, engine in ((1, "a"), (2, "b"), (3, "c")):
        activity.joined(joined(worker_id, engine), 0.0)
        activity.report(report(worker_id, engine=engine), 1.0)
    activity.left(1)
    activity.beat(2, 9.0)
    assert activity.forget_silent(12.0) == [3]
    assert activity.ranks == 1
    activity.report(report(3, engine="c"), 13.0)  # only silent, not dead
    assert activity.ranks == 2


def test_a_worker_may_report_before_its_join_is_heard() -> None:
    activity = Activity(TrackerConfig())
    activity.report(report(), 1.0)
    activity.joined(joined(), 2.0)
    assert (activity.ranks, list(demands(activity.changed(2.0)))) == (1, [(1, 0)])


def test_another_shape_is_another_model() -> None:
    activity = Activity(TrackerConfig())
    activity.joined(joined(1), 0.0)
    activity.report(report(1), 1.0)
    other = msgspec.structs.replace(SHAPE, experts=16)
    activity.joined(joined(2, shape=other), 2.0)
    found = activity.profile("m", 2.0)
    assert found is not None
    assert (found.tokens, found.profile.experts) == (0.0, 16)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"rank": 2}, Fault.RANK),
        ({"rank": -1}, Fault.RANK),
        ({"model": "other"}, Fault.MODEL),
        ({"seconds": 0.0}, Fault.INTERVAL),
        ({"seconds": 1e-309}, Fault.INTERVAL),
        ({"seconds": -1.0}, Fault.INTERVAL),
        ({"seconds": float("nan")}, Fault.INTERVAL),
        ({"seconds": float("inf")}, Fault.INTERVAL),
        ({"seconds": 1e9}, Fault.INTERVAL),
        ({"tokens": -1}, Fault.COUNTS),
        ({"tokens": 1 << 63}, Fault.COUNTS),
        ({"cached_tokens": -1}, Fault.COUNTS),
        ({"tokens": 0}, Fault.COUNTS),
        ({"counts": np.full((LAYERS, EXPERTS), 1 << 60)}, Fault.COUNTS),
        ({"counts": np.ones((LAYERS, EXPERTS + 1))}, Fault.SHAPE),
        ({"counts": np.ones((LAYERS + 1, EXPERTS))}, Fault.SHAPE),
        ({"counts": np.ones((EXPERTS, LAYERS))}, Fault.SHAPE),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_changes_nothing(fields: dict[str, Any], fault: Fault) -> None:
    activity = Activity(TrackerConfig())
    activity.joined(joined(), 0.0)
    with pytest.raises(Refused) as refusal:
        activity.report(report(**fields), 1.0)
    assert refusal.value.fault is fault
    assert (activity.ranks, list(activity.changed(2.0))) == (0, [])


@pytest.mark.parametrize(("layers", "experts", "values"), [(2, 8, b"123"), (0, 8, b""), (-2, -8, b""), (1 << 40, 1 << 40, b"")])
def test_a_table_whose_bytes_do_not_fit_is_refused(layers: int, experts: int, values: bytes) -> None:
    table = ExpertCounts(layers=layers, experts=experts, width=4, values=values)
    activity = Activity(TrackerConfig())
    activity.joined(joined(), 0.0)
    with pytest.raises(Refused) as refusal:
        activity.report(msgspec.structs.replace(report(), counts=table), 1.0)
    assert refusal.value.fault in (Fault.COUNTS, Fault.CAPACITY)


def test_what_is_followed_is_bounded() -> None:
    activity = Activity(TrackerConfig(most_ranks=3, most_models=2, most_cells=100))
    activity.joined(joined(1, "a", "m1", ranks=8), 0.0)
    for rank in range(3):
        activity.report(report(1, rank, model="m1"), 1.0)
    with pytest.raises(Refused, match="most_ranks"):
        activity.report(report(1, 3, model="m1"), 1.0)
    with pytest.raises(Refused, match="most_cells"):
        activity.report(report(1, 0, np.ones((2, 51)), model="m1"), 1.0)
    with pytest.raises(Refused, match="most_cells"):
        activity.joined(joined(9, "z", "huge", shape=msgspec.structs.replace(SHAPE, experts=51)), 1.0)
    activity.joined(joined(2, "b", "m2"), 2.0)
    with pytest.raises(Refused, match="most_models"):
        activity.joined(joined(3, "c", "m3"), 3.0)
    activity.left(2)
    activity.left(3)
    activity.joined(joined(4, "d", "m4"), 4.0)
    assert activity.profile("m2", 4.0) is None
    assert activity.profile("m1", 4.0) is not None


def test_versions_never_repeat() -> None:
    activity = Activity(TrackerConfig(), first_version=1000)
    versions: list[int] = []
    for now in range(1, 6):
        activity.report(report(), float(now))
        versions += [message.version for message in activity.changed(float(now))]
    assert versions == list(range(1000, 1010))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 2), st.integers(-1, 5), st.floats(-1, 10), st.floats(0, 100)), max_size=40))
def test_no_sequence_of_reports_makes_the_tracker_say_nonsense(steps: list[tuple[int, int, int, float, float]]) -> None:
    activity, now, numbers = Activity(TrackerConfig(most_ranks=4)), 0.0, itertools.count()
    for worker_id, rank, tokens, seconds, wait in steps:
        now += wait
        try:
            activity.report(report(worker_id, rank, tokens=tokens, seconds=seconds), now, 1, next(numbers) * tokens)
        except Refused:
            pass  # every refusal is fine; what is believed must stay sound
        activity.forget_silent(now)
        for message in activity.changed(now):
            table = (message.profile if isinstance(message, ProfilePublished) else message.demand).array()
            assert np.isfinite(table).all()
            if isinstance(message, ProfilePublished):
                np.testing.assert_allclose(table.sum(axis=1), 1.0, rtol=1e-4)
        assert activity.ranks <= 4
