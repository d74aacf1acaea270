"""Clusters learnt from sampled requests: correct detections, no false ones, and persistence."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.signatures import ClusterModel, ClusterRecord
from tracker.clustering.online_clusters import OnlineClusters
from tracker.clustering.refit import ClusterMerge, ClusterSplit
from tracker.config import TrackerConfig

LAYERS, EXPERTS, K = 3, 16, 8
CONFIG = TrackerConfig(clusters=K, refine_seconds=1.0)


def kinds(
    count: int, seed: int = 0, spread: float = 0.3, layers: int = LAYERS, experts: int = EXPERTS
) -> np.ndarray:
    """Return distinct profiles: float64 [count, layers, experts]."""
    return np.random.default_rng(seed).dirichlet(np.full(experts, spread), (count, layers))


def drawn(profile: np.ndarray, random: np.random.Generator, pairs: int) -> np.ndarray:
    return np.stack([random.multinomial(pairs, row / row.sum()) for row in profile])


def taught(
    profiles: np.ndarray,
    requests: int,
    seed: int = 0,
    config: TrackerConfig = CONFIG,
    clusters: OnlineClusters | None = None,
    start: float = 0.0,
) -> OnlineClusters:
    """Return clusters after `requests` samples of kinds in turn, one per second, refitted whenever due."""
    random, learnt = np.random.default_rng(seed), clusters or OnlineClusters(config, *profiles.shape[1:])
    for number in range(requests):
        kind = profiles[number % len(profiles)]
        learnt.learn(drawn(kind, random, 200), drawn(kind, random, 200), start + number)
        learnt.refine(start + number)
    return learnt


def used(model: ClusterModel) -> np.ndarray:
    return np.flatnonzero(model.shares > 0)


def assert_valid(model: ClusterModel) -> None:
    assert model.shares.min() >= 0
    assert model.shares.sum() == pytest.approx(1.0, abs=1e-5)
    assert model.profiles.min() >= 0
    np.testing.assert_allclose(model.profiles.sum(axis=2), 1.0, atol=1e-4)
    assert 0 < model.sharpness < np.inf
    unused = np.flatnonzero(model.shares == 0)
    np.testing.assert_allclose(
        model.profiles[unused], np.broadcast_to(model.mean, (len(unused), *model.mean.shape)), atol=1e-5
    )
    assert isinstance(ClusterModel.from_record(model.record()), ClusterModel)


def test_before_anything_was_seen_one_uniform_cluster_is_told() -> None:
    model = OnlineClusters(CONFIG, LAYERS, EXPERTS, first_version=7).model
    assert model.version == 7
    assert list(used(model)) == [0]
    np.testing.assert_allclose(model.profiles, 1 / EXPERTS)


def test_the_first_sample_is_told_at_once() -> None:
    profiles = kinds(1)
    clusters = taught(profiles, 1)
    assert clusters.model.version == 2
    assert (
        np.abs(clusters.model.profiles[0] - profiles[0]).max() < np.abs(1 / EXPERTS - profiles[0]).max() / 2
    )


def test_kinds_of_requests_are_found_and_keep_apart_those_that_differ() -> None:
    profiles = kinds(5)
    model = taught(profiles, 150).model
    assert 5 <= len(used(model)) <= 6
    random = np.random.default_rng(9)
    found = {int(model.signature(drawn(kind, random, 300)).argmax()) for kind in profiles}
    assert len(found) == 5
    for kind in profiles:
        predicted = model.expected(model.signature(drawn(kind, random, 300)))
        assert np.abs(predicted - kind).sum(axis=1).mean() < 0.1


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(2, 80),
    st.sampled_from([(2, 8), (3, 16), (8, 32)]),
    st.integers(5, 3000),
)
def test_noise_of_counting_is_never_split(
    seed: int, requests: int, shape: tuple[int, int], pairs: int
) -> None:
    random = np.random.default_rng(seed)
    profile, clusters = random.dirichlet(np.full(shape[1], 0.5), shape[0]), OnlineClusters(CONFIG, *shape)
    for _ in range(requests):
        clusters.learn(drawn(profile, random, pairs), drawn(profile, random, pairs), 0.0)
    assert clusters.refine(0.0) == []
    assert list(used(clusters.model)) == [0]


def test_differences_that_do_not_last_from_prompt_to_completion_are_not_split() -> None:
    random, profiles, clusters = (
        np.random.default_rng(3),
        kinds(2, spread=1.0),
        OnlineClusters(CONFIG, LAYERS, EXPERTS),
    )
    for _ in range(100):
        first, second = random.integers(0, 2, 2)
        clusters.learn(drawn(profiles[first], random, 300), drawn(profiles[second], random, 300), 0.0)
    assert clusters.refine(0.0) == []


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_the_order_within_a_batch_changes_nothing(seed: int, requests: int) -> None:
    random, profiles = np.random.default_rng(seed), kinds(3, seed)
    batch = [
        (drawn(profiles[number % 3], random, 100), drawn(profiles[number % 3], random, 100))
        for number in range(requests)
    ]
    models = []
    for order in (range(requests), random.permutation(requests)):
        clusters = OnlineClusters(CONFIG, LAYERS, EXPERTS)
        for number in order:
            clusters.learn(*batch[number], 5.0)
        clusters.refine(5.0)
        models.append(clusters.model)
    np.testing.assert_array_equal(models[0].profiles, models[1].profiles)
    np.testing.assert_array_equal(models[0].shares, models[1].shares)
    assert models[0].sharpness == models[1].sharpness


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(0, 400), st.floats(0, 500)),
        min_size=1,
        max_size=60,
    ),
)
def test_whatever_is_learnt_probabilities_stay_probabilities(
    seed: int, samples: list[tuple[int, int, int, float]]
) -> None:
    random, profiles, clusters, now = (
        np.random.default_rng(seed),
        kinds(4, seed),
        OnlineClusters(CONFIG, LAYERS, EXPERTS),
        0.0,
    )
    for kind, prompt, completion, seconds in samples:
        now += seconds
        clusters.learn(drawn(profiles[kind], random, prompt), drawn(profiles[kind], random, completion), now)
        clusters.mixed(clusters.model.signature(drawn(profiles[kind], random, prompt)), prompt, now)
        clusters.refine(now)
        assert clusters.shares.sum() == pytest.approx(1.0, abs=1e-5)
    assert_valid(clusters.model)


def test_splits_and_merges_are_told_and_hand_mass_on() -> None:
    clusters, random, profiles, now = (
        OnlineClusters(CONFIG, LAYERS, EXPERTS),
        np.random.default_rng(0),
        kinds(4),
        0.0,
    )
    slots, structural = {0}, 0
    for number in range(400):
        now += 4.0
        kind = profiles[number % 2 + (2 if number > 150 else 0)]
        clusters.learn(drawn(kind, random, 100), drawn(kind, random, 100), now)
        clusters.mixed(clusters.model.signature(drawn(kind, random, 100)), 100, now)
        before = clusters.state()["tokens"]
        changes = clusters.refine(now)
        for change in changes:
            structural += 1
            if isinstance(change, ClusterSplit):
                assert change.parent in slots
                assert change.child not in slots
                slots.add(change.child)
            else:
                assert isinstance(change, ClusterMerge)
                assert {change.kept, change.freed} <= slots
                slots.remove(change.freed)
        assert np.frombuffer(clusters.state()["tokens"]).sum() == pytest.approx(
            np.frombuffer(before).sum(), rel=1e-9
        )
        assert slots == set(used(clusters.model).tolist())
    assert structural >= 3


def test_a_slot_keeps_its_meaning_while_others_come() -> None:
    profiles = kinds(4)
    clusters = taught(profiles[:2], 60)
    random = np.random.default_rng(1)
    before = [int(clusters.model.signature(drawn(kind, random, 300)).argmax()) for kind in profiles[:2]]
    taught(profiles, 120, seed=5, clusters=clusters, start=100.0)
    after = [int(clusters.model.signature(drawn(kind, random, 300)).argmax()) for kind in profiles[:2]]
    assert before == after


def test_what_is_no_longer_asked_for_gives_its_slot_back() -> None:
    profiles = kinds(4)
    clusters = taught(profiles[:2], 60)
    held = len(used(clusters.model))
    random, now = np.random.default_rng(2), 60.0
    for number in range(400):
        now += 30.0
        kind = profiles[2 + number % 2]
        clusters.learn(drawn(kind, random, 200), drawn(kind, random, 200), now)
        clusters.mixed(clusters.model.signature(drawn(kind, random, 200)), 200, now)
        clusters.refine(now)
    model = clusters.model
    assert held == len(used(model)) == 2
    for kind in profiles[2:]:
        assert (
            np.abs(model.expected(model.signature(drawn(kind, random, 300))) - kind).sum(axis=1).mean() < 0.1
        )


def test_when_all_slots_are_taken_the_two_most_alike_make_room_for_what_differs_more() -> None:
    base = kinds(4, seed=3)
    alike = np.stack([0.8 * base[0] + 0.2 * base[1], base[0], base[2]])
    config = TrackerConfig(clusters=3, refine_seconds=1.0)
    clusters = taught(alike, 150, config=config)
    assert len(used(clusters.model)) == 3
    everything = np.concatenate([alike, base[3:]])
    taught(everything, 300, seed=1, clusters=clusters, start=150.0)
    model, random = clusters.model, np.random.default_rng(0)
    assert len(used(model)) == 3
    owners = [int(model.signature(drawn(kind, random, 400)).argmax()) for kind in everything]
    assert owners[0] == owners[1]
    assert len(set(owners)) == 3


def test_a_quiet_night_forgets_nothing() -> None:
    profiles = kinds(3)
    clusters = taught(profiles, 90)
    slots = set(used(clusters.model).tolist())
    random = np.random.default_rng(4)
    for number in range(20):
        clusters.learn(
            drawn(profiles[0], random, 200), drawn(profiles[0], random, 200), 90.0 + 40_000.0 + number
        )
        clusters.refine(40_090.0 + number)
    assert set(used(clusters.model).tolist()) == slots


def test_shares_follow_the_signatures_of_all_requests() -> None:
    profiles = kinds(2)
    clusters = taught(profiles, 60)
    first, second = (
        clusters.model.signature(drawn(kind, np.random.default_rng(0), 500)) for kind in profiles
    )
    for number in range(2000):
        clusters.mixed(first if number % 10 else second, 400, 60.0 + number / 10)
    clusters.refine(300.0)
    assert 0.75 < clusters.model.shares[first.argmax()] < 0.95
    clusters.mixed(second, 0.0, 1e9)
    assert clusters.shares[second.argmax()] == pytest.approx(0.5, abs=0.1), (
        "what is long ago is forgotten, and the samples speak"
    )


def test_shares_alone_are_told_now_and_then() -> None:
    profiles = kinds(2)
    clusters = taught(profiles, 60)
    first, second = (
        clusters.model.signature(drawn(kind, np.random.default_rng(0), 500)) for kind in profiles
    )
    version, start = clusters.model.version, 60.0
    for number in range(120):
        clusters.mixed(first if number // 10 % 2 else second, 20_000, start + number)
        clusters.refine(start + number)
    assert 1 <= clusters.model.version - version <= 4


def test_versions_rise_only_when_there_is_something_to_tell() -> None:
    profiles = kinds(3)
    clusters = taught(profiles, 300)
    version = clusters.model.version
    taught(profiles, 300, seed=1, clusters=clusters, start=300.0)
    assert version < 60
    assert clusters.model.version - version <= 6


def test_refining_waits_for_its_time_and_for_enough_new_samples() -> None:
    clusters, random, profiles = OnlineClusters(CONFIG, LAYERS, EXPERTS), np.random.default_rng(0), kinds(1)
    assert clusters.due(0.0) is None
    clusters.learn(drawn(profiles[0], random, 50), drawn(profiles[0], random, 50), 0.0)
    assert clusters.due(0.0) is not None
    assert clusters.due(0.0) is None
    clusters.learn(drawn(profiles[0], random, 50), drawn(profiles[0], random, 50), 0.5)
    assert clusters.due(0.5) is None
    assert clusters.due(1.5) is not None


def test_what_is_learnt_during_a_refinement_is_kept_for_the_next() -> None:
    profiles, random = kinds(2), np.random.default_rng(0)
    clusters = OnlineClusters(CONFIG, LAYERS, EXPERTS)
    for _ in range(20):
        clusters.learn(drawn(profiles[0], random, 200), drawn(profiles[0], random, 200), 0.0)
    job = clusters.due(0.0)
    assert job is not None
    for _ in range(20):
        clusters.learn(drawn(profiles[1], random, 200), drawn(profiles[1], random, 200), 1.0)
    assert clusters.adopt(job.run(), 1.0) == []
    assert [type(change) for change in clusters.refine(2.0)] == [ClusterSplit]


def test_memory_is_bounded() -> None:
    config = TrackerConfig(clusters=4, cluster_bytes=60_000, refine_seconds=1.0)
    clusters = OnlineClusters(config, 4, 64)
    random = np.random.default_rng(0)
    profile = kinds(1, layers=4, experts=64)[0]
    for number in range(500):
        clusters.learn(drawn(profile, random, 50), drawn(profile, random, 50), float(number))
        assert clusters.stored_bytes <= 60_000
    assert len(msgspec.msgpack.encode(clusters.state())) < 3 * 60_000


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 50), st.integers(0, 30))
def test_restoring_is_exact(seed: int, before: int, after: int) -> None:
    profiles = kinds(3, seed)
    clusters = taught(profiles, before)
    restored = OnlineClusters.restore(
        CONFIG, msgspec.msgpack.decode(msgspec.msgpack.encode(clusters.state()), strict=False)
    )
    for each in (clusters, restored):
        taught(profiles, after, seed=1, clusters=each, start=float(before))
    assert restored.model.version == clusters.model.version
    assert restored.model.sharpness == clusters.model.sharpness
    np.testing.assert_array_equal(restored.model.profiles, clusters.model.profiles)
    np.testing.assert_array_equal(restored.model.shares, clusters.model.shares)
    np.testing.assert_array_equal(restored.shares, clusters.shares)


@pytest.mark.parametrize(
    "broken",
    [
        {"shape": [K + 1, LAYERS, EXPERTS]},
        {"shape": None},
        {"profiles": b"123"},
        {"profiles": b"\xff" * 4 * K * LAYERS * EXPERTS},
        {"told": b""},
        {"sampled": b"\x00" * 8 * K},
        {"tokens": np.full(K, -1.0).tobytes()},
        {"sharpness": 0.0},
        {"labels": {1: K}},
        {"reservoir": {}},
        {"version": None},
    ],
)
def test_a_broken_snapshot_is_refused(broken: dict[str, object]) -> None:
    state = taught(kinds(2), 20).state()
    with pytest.raises(ValueError, match="clusters"):
        OnlineClusters.restore(CONFIG, {**state, **broken})


def test_nonsense_is_refused_and_changes_nothing() -> None:
    clusters = taught(kinds(2), 20)
    before = msgspec.msgpack.encode(clusters.state())
    good = np.ones((LAYERS, EXPERTS))
    for bad in (np.ones((LAYERS, EXPERTS + 1)), -good, good * np.nan):
        with pytest.raises(ValueError, match="sampled profile"):
            clusters.learn(good, bad, 30.0)
    for weights, tokens in (
        (np.ones(K + 1), 1.0),
        (np.full(K, np.nan), 1.0),
        (np.full(K, 1 / K), np.inf),
        (np.full(K, -1.0), 1.0),
    ):
        with pytest.raises(ValueError, match="signature"):
            clusters.mixed(weights.astype(np.float32), tokens, 30.0)
    assert msgspec.msgpack.encode(clusters.state()) == before


def test_a_model_that_is_told_survives_the_journey() -> None:
    model = taught(kinds(4), 80).model
    arrived = ClusterModel.from_record(
        msgspec.msgpack.decode(msgspec.msgpack.encode(model.record()), type=ClusterRecord)
    )
    np.testing.assert_allclose(arrived.profiles, model.profiles, rtol=2e-3, atol=1e-6)


def test_draws_that_come_in_bunches_say_less_each() -> None:
    """Oracle: n copies of every draw carry the evidence of one, so that the best sharpness falls by about
    n."""
    found = []
    for copies in (1, 16):
        random, profiles, clusters = (
            np.random.default_rng(0),
            kinds(2, spread=8.0),
            OnlineClusters(CONFIG, LAYERS, EXPERTS),
        )
        for number in range(400):
            prompt, completion = (copies * drawn(profiles[number % 2], random, 24) for _ in range(2))
            clusters.learn(prompt, completion, 0.0)
        clusters.refine(0.0)
        found.append(clusters.model.sharpness)
        assert len(used(clusters.model)) == 2
    assert 0.3 < found[0] < 3
    assert 5 < found[0] / found[1] < 50
