"""Accepted and rejected reports, and the resulting activity."""

import itertools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.experts import ModelShape
from fleet.facts.activity import CountsImported, ExpertsActivated
from fleet.facts.demand import DemandPublished, ProfilePublished
from fleet.facts.engines import EngineJoined
from fleet.placement import Placement, linear
from fleet.popularity import ExpertCounts
from tracker.activity.engine_activity import EngineActivity
from tracker.activity.local_supply import LocalSupply
from tracker.activity.report_validation import InvalidReport, ReportFault
from tracker.config import TrackerConfig

LAYERS, EXPERTS = 2, 8
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=2, hidden=4, expert_intermediate=8)


def joined(
    worker_id: int = 1, engine: str = "a", model: str = "m", ranks: int = 2, shape: ModelShape | None = SHAPE
) -> EngineJoined:
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
    plain = {
        "engine": "a",
        "model": "m",
        "epoch": 0,
        "seconds": 1.0,
        "tokens": 4,
        "cached_tokens": 0,
        "counts": ExpertCounts.of(np.asarray(table, np.int64)),
    }
    return ExpertsActivated(worker_id=worker_id, rank=rank, **{**plain, **fields})


def demands(said: Iterable[Any]) -> dict[tuple[int, int], DemandPublished]:
    return {
        (message.worker_id, message.rank): message for message in said if isinstance(message, DemandPublished)
    }


def profiles(said: Iterable[Any]) -> dict[str, ProfilePublished]:
    return {message.model: message for message in said if isinstance(message, ProfilePublished)}


def test_a_model_that_joined_has_a_uniform_profile_before_anything_was_reported() -> None:
    activity = EngineActivity(TrackerConfig())
    assert activity.profile("m", 0.0) is None
    activity.joined(joined(), 0.0)
    found = activity.profile("m", 5.0)
    assert found is not None
    assert (found.tokens, found.version) == (0.0, 0)
    np.testing.assert_allclose(found.profile.array(), 1 / EXPERTS)
    assert list(activity.changed(5.0)) == []


def test_what_is_reported_is_published_once_as_profile_and_demand() -> None:
    activity = EngineActivity(TrackerConfig(prior_pairs=1e-6))
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


def test_a_demand_says_how_many_pairs_are_behind_it_and_a_rank_that_wants_nothing_has_none() -> None:
    activity = EngineActivity(TrackerConfig(fast_seconds=20.0))
    activity.joined(joined(), 0.0)
    for second in range(1, 401):
        activity.report(report(), float(second))
    (said,) = demands(activity.changed(400.0)).values()
    assert said.pairs == pytest.approx(20.0 * EXPERTS, rel=0.01), (
        "EXPERTS pairs a second in each layer, over the 20 s that are remembered"
    )
    last = [
        demand for now in range(402, 3000, 2) for demand in demands(activity.changed(float(now))).values()
    ][-1]
    assert (last.tokens_per_second, last.pairs) == (0.0, 0.0)


def test_the_profile_is_that_of_all_ranks_and_the_demand_that_of_each() -> None:
    activity = EngineActivity(TrackerConfig(prior_pairs=1e-6))
    activity.joined(joined(1, "a"), 0.0)
    activity.joined(joined(2, "b"), 0.0)
    for expert, (worker_id, rank) in enumerate(((1, 0), (1, 1), (2, 0))):
        counts = np.zeros((LAYERS, EXPERTS))
        counts[:, expert] = 8
        activity.report(report(worker_id, rank, counts, engine="ab"[worker_id - 1]), 1.0)
    said = list(activity.changed(1.0))
    np.testing.assert_allclose(profiles(said)["m"].profile.array()[:, :3], 1 / 3, rtol=1e-5)
    assert {key: int(demand.demand.array()[0].argmax()) for key, demand in demands(said).items()} == {
        (1, 0): 0,
        (1, 1): 1,
        (2, 0): 2,
    }
    assert activity.ranks == 3


def test_a_silent_ranks_falling_demand_is_published_until_it_is_nothing_and_then_no_more() -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(), 0.0)
    activity.report(report(), 1.0)
    levels = [demands(activity.changed(1.0))[1, 0].tokens_per_second]
    for now in range(3, 3000, 2):
        levels += [demand.tokens_per_second for demand in demands(activity.changed(float(now))).values()]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == 0.0
    assert 20 < len(levels) < 200


def test_a_new_incarnation_replaces_the_old_one_and_the_profile_stays() -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(1), 0.0)
    activity.report(report(1, tokens=100), 1.0)
    activity.joined(joined(2), 2.0)
    assert activity.ranks == 0
    with pytest.raises(InvalidReport) as refusal:
        activity.report(report(1), 3.0)
    assert refusal.value.fault is ReportFault.DEPARTED
    found = activity.profile("m", 3.0)
    assert found is not None
    assert found.tokens > 90
    activity.joined(joined(1), 4.0)  # an old record read again
    with pytest.raises(InvalidReport):
        activity.report(report(1), 5.0)


def test_a_join_heard_again_changes_nothing() -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(), 0.0)
    activity.report(report(), 1.0)
    activity.joined(joined(), 2.0)
    assert activity.ranks == 1


def test_a_worker_that_left_or_fell_silent_is_forgotten() -> None:
    config = TrackerConfig(forget_seconds=10)
    activity = EngineActivity(config)
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
    activity = EngineActivity(TrackerConfig())
    activity.report(report(), 1.0)
    activity.joined(joined(), 2.0)
    assert (activity.ranks, list(demands(activity.changed(2.0)))) == (1, [(1, 0)])


def test_another_shape_is_another_model() -> None:
    activity = EngineActivity(TrackerConfig())
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
        ({"rank": 2}, ReportFault.RANK),
        ({"rank": -1}, ReportFault.RANK),
        ({"model": "other"}, ReportFault.MODEL),
        ({"seconds": 0.0}, ReportFault.INTERVAL),
        ({"seconds": 1e-309}, ReportFault.INTERVAL),
        ({"seconds": -1.0}, ReportFault.INTERVAL),
        ({"seconds": float("nan")}, ReportFault.INTERVAL),
        ({"seconds": float("inf")}, ReportFault.INTERVAL),
        ({"seconds": 1e9}, ReportFault.INTERVAL),
        ({"tokens": -1}, ReportFault.COUNTS),
        ({"tokens": 1 << 63}, ReportFault.COUNTS),
        ({"cached_tokens": -1}, ReportFault.COUNTS),
        ({"tokens": 0}, ReportFault.COUNTS),
        ({"counts": np.full((LAYERS, EXPERTS), 1 << 60)}, ReportFault.COUNTS),
        ({"counts": np.ones((LAYERS, EXPERTS + 1))}, ReportFault.SHAPE),
        ({"counts": np.ones((LAYERS + 1, EXPERTS))}, ReportFault.SHAPE),
        ({"counts": np.ones((EXPERTS, LAYERS))}, ReportFault.SHAPE),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_changes_nothing(
    fields: dict[str, Any], fault: ReportFault
) -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(), 0.0)
    with pytest.raises(InvalidReport) as refusal:
        activity.report(report(**fields), 1.0)
    assert refusal.value.fault is fault
    assert (activity.ranks, list(activity.changed(2.0))) == (0, [])


@pytest.mark.parametrize(
    ("layers", "experts", "values"), [(2, 8, b"123"), (0, 8, b""), (-2, -8, b""), (1 << 40, 1 << 40, b"")]
)
def test_a_table_whose_bytes_do_not_fit_is_refused(layers: int, experts: int, values: bytes) -> None:
    table = ExpertCounts(layers=layers, experts=experts, width=4, values=values)
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(), 0.0)
    with pytest.raises(InvalidReport) as refusal:
        activity.report(msgspec.structs.replace(report(), counts=table), 1.0)
    assert refusal.value.fault in (ReportFault.COUNTS, ReportFault.CAPACITY)


def test_what_is_followed_is_bounded() -> None:
    activity = EngineActivity(TrackerConfig(max_ranks=3, max_models=2, max_cells=100))
    activity.joined(joined(1, "a", "m1", ranks=8), 0.0)
    for rank in range(3):
        activity.report(report(1, rank, model="m1"), 1.0)
    with pytest.raises(InvalidReport, match="max_ranks"):
        activity.report(report(1, 3, model="m1"), 1.0)
    with pytest.raises(InvalidReport, match="max_cells"):
        activity.report(report(1, 0, np.ones((2, 51)), model="m1"), 1.0)
    with pytest.raises(InvalidReport, match="max_cells"):
        activity.joined(joined(9, "z", "huge", shape=msgspec.structs.replace(SHAPE, experts=51)), 1.0)
    activity.joined(joined(2, "b", "m2"), 2.0)
    with pytest.raises(InvalidReport, match="max_models"):
        activity.joined(joined(3, "c", "m3"), 3.0)
    activity.left(2)
    activity.left(3)
    activity.joined(joined(4, "d", "m4"), 4.0)
    assert activity.profile("m2", 4.0) is None
    assert activity.profile("m1", 4.0) is not None


def test_versions_never_repeat() -> None:
    activity = EngineActivity(TrackerConfig(), first_version=1000)
    versions: list[int] = []
    for now in range(1, 6):
        activity.report(report(), float(now))
        versions += [message.version for message in activity.changed(float(now))]
    assert versions == list(range(1000, 1010))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3), st.integers(-1, 2), st.integers(-1, 5), st.floats(-1, 10), st.floats(0, 100)
        ),
        max_size=40,
    )
)
def test_no_sequence_of_reports_makes_the_tracker_say_nonsense(
    steps: list[tuple[int, int, int, float, float]],
) -> None:
    activity, now, numbers = EngineActivity(TrackerConfig(max_ranks=4)), 0.0, itertools.count()
    for worker_id, rank, tokens, seconds, wait in steps:
        now += wait
        with suppress(InvalidReport):  # every rejection is fine; the accepted state must stay consistent
            activity.report(
                report(worker_id, rank, tokens=tokens, seconds=seconds), now, 1, next(numbers) * tokens
            )
        activity.forget_silent(now)
        for message in activity.changed(now):
            table = (message.profile if isinstance(message, ProfilePublished) else message.demand).array()
            assert np.isfinite(table).all()
            if isinstance(message, ProfilePublished):
                np.testing.assert_allclose(table.sum(axis=1), 1.0, rtol=1e-4)
        assert activity.ranks <= 4


Heard = tuple[int, int, int, float, float, list[int]]
"""worker, rank, sequence, arrival, seconds, counts"""
arrivals = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.integers(0, 1),
        st.integers(0, 20),
        st.floats(0, 200),
        st.floats(0.1, 10),
        st.lists(st.integers(0, 300), min_size=16, max_size=16),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda received: received[:3],
)


def tell(activity: EngineActivity, received: Heard) -> None:
    worker_id, rank, sequence, arrival, seconds, counts = received
    said = report(
        worker_id,
        rank,
        np.reshape(counts, (LAYERS, EXPERTS)),
        engine="ab"[worker_id - 1],
        tokens=sum(counts),
        seconds=seconds,
    )
    activity.report(said, arrival, publisher=10 * worker_id + rank, sequence=sequence)


def everything(activity: EngineActivity, now: float) -> dict[Any, tuple[float, np.ndarray]]:
    """Return all published messages, without versions."""
    found: dict[Any, tuple[float, np.ndarray]] = {}
    for said in activity.changed(now):
        if isinstance(said, ProfilePublished):
            found[said.model] = (said.tokens, said.profile.array())
        else:
            found[said.worker_id, said.rank] = (said.tokens_per_second, said.demand.array())
    fast = activity.fast_profile("m", now)
    assert fast is not None
    return found | {"fast": (0.0, fast.array())}


def assert_same(
    one: dict[Any, tuple[float, np.ndarray]], other: dict[Any, tuple[float, np.ndarray]], rtol: float
) -> None:
    assert one.keys() == other.keys()
    for key, (number, table) in one.items():
        assert number == pytest.approx(other[key][0], rel=rtol, abs=1e-9)
        np.testing.assert_allclose(table, other[key][1], rtol=rtol, atol=1e-6)


@given(arrivals, st.randoms())
def test_the_order_in_which_reports_are_taken_changes_nothing(told: list[Heard], random: Any) -> None:
    shuffled = list(told)
    random.shuffle(shuffled)
    orders = (told, shuffled, sorted(told, key=lambda received: received[3]))
    believed = [EngineActivity(TrackerConfig()) for _ in orders]
    for activity, order in zip(believed, orders, strict=True):
        for received in order:
            tell(activity, received)
    first, *others = (everything(activity, 201.0) for activity in believed)
    for other in others:
        assert_same(first, other, 1e-4)


@given(arrivals, st.floats(0, 2000), st.integers(0, 12))
def test_a_restart_changes_nothing(told: list[Heard], away: float, until: int) -> None:
    told = sorted(told, key=lambda received: received[3])
    plain, restarted = EngineActivity(TrackerConfig()), EngineActivity(TrackerConfig())
    plain.joined(joined(1, "a"), 0.0)
    restarted.joined(joined(1, "a"), 0.0)
    for received in told[:until]:
        tell(plain, received)
        tell(restarted, received)
    pieces = msgspec.msgpack.decode(msgspec.msgpack.encode(list(restarted.state())))
    restarted = EngineActivity(TrackerConfig())
    restarted.restore([(kind, piece) for kind, piece in pieces])
    for received in told[until:]:
        tell(plain, received)
        tell(restarted, received)
    assert_same(everything(plain, 201.0 + away), everything(restarted, 201.0 + away), 1e-6)
    assert sorted(plain.last_sequences()) == sorted(restarted.last_sequences())


@pytest.mark.parametrize(
    "pieces",
    [
        [("nothing", [])],
        [("model", [])],
        [("model", ["m", {}, 0.0, None, False, 1])],
        [("rank", [1, 0, {}, [], False, 0.0])],
        [("worker", [1])],
        [("departed", 5)],
        [("constants", [1.0, 2.0])],
    ],
)
def test_a_state_that_makes_no_sense_is_refused(pieces: list[tuple[str, Any]]) -> None:
    with pytest.raises(ValueError, match="no state of"):
        EngineActivity(TrackerConfig()).restore(pieces)


def test_a_state_of_more_than_may_be_followed_is_refused() -> None:
    activity = EngineActivity(TrackerConfig())
    for rank in range(3):
        activity.report(report(rank=rank), 1.0)
    with pytest.raises(ValueError, match="max_ranks"):
        EngineActivity(TrackerConfig(max_ranks=2)).restore(activity.state())
    with pytest.raises(ValueError, match="max_cells"):
        EngineActivity(TrackerConfig(max_cells=8)).restore(activity.state())


def test_counts_of_several_publishers_of_one_rank_add_up() -> None:
    activity = EngineActivity(TrackerConfig())
    for now in range(1, 60):
        for publisher, tokens in ((7, 10), (8, 30)):
            activity.report(report(tokens=tokens), float(now), publisher, now)
    assert demands(activity.changed(59.0))[1, 0].tokens_per_second == pytest.approx(40.0)


def test_a_restarted_worker_starts_afresh() -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(1), 0.0)
    for now in range(1, 60):
        activity.report(report(1, tokens=1000), float(now), 5, now)
    activity.joined(joined(2), 60.0)
    activity.report(report(2, tokens=10), 61.0, 6, 0)
    assert {key: demand.tokens_per_second for key, demand in demands(activity.changed(61.0)).items()} == {
        (2, 0): pytest.approx(10.0)
    }


def placed(activity: EngineActivity, worker_id: int, epoch: int, slots: Any) -> None:
    placement = Placement(np.tile(np.asarray(slots), (LAYERS, 1)), experts=EXPERTS, ranks=2, epoch=epoch)
    activity.placed(worker_id, LocalSupply.of(placement.record(), None))


def test_only_the_newest_placement_says_what_is_remote() -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(), 0.0)
    hot = np.zeros((LAYERS, EXPERTS))
    hot[:, 0] = 30
    hot[:, 7] = 10
    activity.report(report(counts=hot, tokens=20), 1.0)
    assert demands(activity.changed(1.0))[1, 0].remote is None
    for epoch, slots, remote in (
        (1, [4, 5, 6, 7, 0, 1, 2, 3], 0.75),
        (3, [0, 1, 2, 7, 4, 5, 6, 3], 0.0),
        (2, [4, 5, 6, 7, 0, 1, 2, 3], 0.0),
    ):
        placed(activity, 1, epoch, slots)
        activity.report(report(counts=hot, tokens=20), 1.0)
        assert demands(activity.changed(1.0))[1, 0].remote == pytest.approx(remote, abs=1e-6)


def test_a_placement_may_be_heard_before_its_worker_and_goes_with_it() -> None:
    activity = EngineActivity(TrackerConfig())
    placed(activity, 1, 0, range(8))
    activity.joined(joined(), 0.0)
    activity.report(report(), 1.0)
    assert demands(activity.changed(1.0))[1, 0].remote == pytest.approx(0.5)
    before = activity.stored_bytes
    activity.left(1)
    placed(activity, 1, 5, range(8))
    assert activity.stored_bytes < before - 2 * LAYERS * EXPERTS


def test_a_placement_of_other_ranks_or_experts_says_nothing() -> None:
    activity = EngineActivity(TrackerConfig(max_ranks=4))
    activity.joined(joined(ranks=4), 0.0)
    placed(activity, 1, 0, range(8))
    for rank in (0, 3):
        activity.report(report(rank=rank), 1.0)
    assert [demand.remote for demand in demands(activity.changed(1.0)).values()] == [None, None]
    with pytest.raises(InvalidReport, match="max_ranks"):
        activity.placed(1, LocalSupply.of(linear(layers=LAYERS, experts=EXPERTS, ranks=8).record(), None))


def test_placements_of_strangers_are_bounded_and_push_nobody_out_who_is_there() -> None:
    activity = EngineActivity(TrackerConfig(max_ranks=4))
    activity.joined(joined(), 0.0)
    placed(activity, 1, 0, range(8))
    for stranger in range(2, 40):
        placed(activity, stranger, 0, range(8))
    assert activity.stored_bytes - 2 * LAYERS * EXPERTS * 4 == 8 * LAYERS * EXPERTS
    activity.report(report(), 1.0)
    assert demands(activity.changed(1.0))[1, 0].remote == pytest.approx(0.5)


def test_what_a_rank_wants_and_holds_is_told_expert_by_expert() -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(), 0.0)
    placed(activity, 1, 0, range(8))
    counts = np.zeros((LAYERS, EXPERTS))
    counts[0, [0, 1, 5]] = (200, 100, 300)
    counts[1, 6] = 600
    for now in range(1, 100):
        activity.report(report(counts=counts, tokens=300), float(now))
    (key,) = activity.rank_keys("m")
    found = activity.rank_popularity(key, 99.0)
    assert found is not None
    assert (found.engine, found.rank) == ("a", 0)
    assert found.tokens_per_second == pytest.approx(300.0)
    assert found.remote == pytest.approx(0.75)
    assert [(layer, expert) for layer, expert, _ in found.wanted_remote] == [(1, 6), (0, 5)]
    assert [(layer, expert) for layer, expert, _ in found.local_idle] == [
        (0, 2),
        (0, 3),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    silent = activity.rank_popularity(key, 2000.0)
    assert silent is not None
    assert (silent.tokens_per_second, silent.remote, silent.wanted_remote, silent.local_idle) == (
        0.0,
        None,
        (),
        (),
    )
    activity.left(1)
    assert activity.rank_popularity(key, 99.0) is None
    assert activity.rank_keys("m") == []


def imported(digest: str = "d", counts: Any = None, tokens: int = 100, model: str = "m") -> CountsImported:
    table = np.ones((LAYERS, EXPERTS)) if counts is None else np.asarray(counts)
    return CountsImported(
        model=model, digest=digest, tokens=tokens, counts=ExpertCounts.of(np.asarray(table, np.int64))
    )


def test_an_import_enters_the_slow_profile_once_and_no_demand() -> None:
    activity = EngineActivity(TrackerConfig(prior_pairs=1e-6))
    hot = np.zeros((LAYERS, EXPERTS))
    hot[:, 2] = 1000
    assert activity.imported(imported(counts=hot), 1.0)
    assert not activity.imported(imported(counts=hot), 2.0)
    (said,) = activity.changed(2.0)
    assert isinstance(said, ProfilePublished)
    assert said.tokens == pytest.approx(100.0, rel=0.01)
    np.testing.assert_allclose(said.profile.array()[:, 2], 1.0, rtol=1e-5)
    activity.report(report(), 3.0)
    assert demands(activity.changed(3.0))[1, 0].tokens_per_second == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (imported(digest=""), ReportFault.COUNTS),
        (imported(digest="d" * 200), ReportFault.COUNTS),
        (imported(tokens=-1), ReportFault.COUNTS),
        (imported(counts=np.ones((LAYERS + 1, EXPERTS))), ReportFault.SHAPE),
        (imported(counts=np.ones((300, 300)), model="huge"), ReportFault.CAPACITY),
    ],
)
def test_an_import_that_cannot_be_used_is_refused_and_may_be_tried_again(
    bad: CountsImported, fault: ReportFault
) -> None:
    activity = EngineActivity(TrackerConfig())
    activity.joined(joined(), 0.0)
    with pytest.raises(InvalidReport) as refusal:
        activity.imported(bad, 1.0)
    assert refusal.value.fault is fault
    assert list(activity.changed(2.0)) == []
    assert activity.imported(imported(), 2.0)


def test_the_fast_profile_follows_what_changed_and_the_slow_one_remembers() -> None:
    activity = EngineActivity(TrackerConfig())
    assert activity.fast_profile("m", 0.0) is None
    for now in range(1, 401):
        counts = np.zeros((LAYERS, EXPERTS))
        counts[:, 0 if now <= 340 else 1] = 100
        activity.report(report(counts=counts, tokens=100), float(now))
    fast, slow = activity.fast_profile("m", 400.0), activity.profile("m", 400.0)
    assert fast is not None
    assert slow is not None
    assert fast.array()[0, 1] > 0.9
    assert slow.profile.array()[0, 0] > 0.8
    quiet = activity.fast_profile("m", 3000.0)
    assert quiet is not None
    np.testing.assert_allclose(quiet.array(), slow.profile.array(), atol=0.05)
