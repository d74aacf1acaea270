"""Learnt state of one model's requests, and the resulting tables."""

import tracemalloc
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.facts.activity import RequestOutcome, RequestProfile, SampledProfile
from fleet.facts.demand import KeyedRows, TablesPublished
from fleet.popularity import ExpertCounts
from fleet.prediction import PATTERNS, ROW, SOURCES, Query, Tables, predict
from fleet.signatures import ClusterModel, pack, unpack
from tracker.clustering.refit import ClusterMerge, ClusterSplit
from tracker.config import TrackerConfig
from tracker.prediction.model_learner import ROW_SECONDS, WAITING_SECONDS, ModelLearner

K, LAYERS, EXPERTS, BLOCK = 8, 3, 16, 16
CONFIG = TrackerConfig(
    clusters=K,
    prefix_bytes=64 << 10,
    session_bytes=32 << 10,
    tenant_bytes=16 << 10,
    token_bytes=64 << 10,
    waiting_bytes=64 << 10,
    max_waiting=64,
)
VERSION = 3


def model(version: int = VERSION, shares: NDArray[Any] | None = None) -> ClusterModel:
    profiles = np.random.default_rng(0).dirichlet(np.full(EXPERTS, 0.3), (K, LAYERS)).astype(np.float32)
    return ClusterModel(
        version,
        profiles,
        np.full(K, 1 / K, np.float32) if shares is None else np.asarray(shares, np.float32),
        0.1,
    )


def learner(config: TrackerConfig = CONFIG) -> ModelLearner:
    learning = ModelLearner(config, 100)
    learning.adopt(model(), [])
    return learning


def one_hot(cluster: int, sure: float = 0.9) -> NDArray[np.float64]:
    weights = np.full(K, (1 - sure) / K)
    weights[cluster] += sure
    return weights


def profile(
    decision: str, cluster: int, keys: list[int] | None = None, parent: int | None = None, **other: Any
) -> RequestProfile:
    keys = keys or []
    signature = pack(one_hot(cluster))
    given_fields = {
        "tokens": 200,
        "cached_tokens": 0,
        "signature": signature.tobytes(),
        "local": 0.4,
        "blocks": np.array(keys, "<u8").tobytes(),
        "block_signatures": signature.tobytes() * len(keys),
        "block_size": BLOCK,
    }
    return RequestProfile(decision=decision, parent=parent, **(given_fields | other))


def outcome(decision: str, tokens: list[int] | None = None, **other: Any) -> RequestOutcome:
    given_fields = {
        "prefix": 0,
        "session": 0,
        "tenant": 0,
        "predicted": pack(np.full(K, 1 / K)).tobytes(),
        "predicted_local": 0.4,
        "prior_local": 0.3,
    }
    return RequestOutcome(
        decision=decision,
        worker_id=1,
        rank=0,
        tokens=np.array(tokens or [], "<u4").tobytes(),
        **(given_fields | other),
    )


@dataclass
class Replica:
    """Replica of the tables, built by a router from messages according to their documentation alone."""

    version: int = -1
    head: tuple[Any, ...] = ()
    tokens: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, K), np.float32))
    keyed: tuple[dict[int, bytes], ...] = ()

    def take(self, told: TablesPublished) -> None:
        if told.base is None:
            self.tokens, self.keyed = np.zeros((told.buckets, K), np.float32), ({}, {}, {})
        else:
            assert told.base == self.version, "a gap"
        self.version = told.version
        self.head = (
            told.clusters,
            told.shares,
            told.trust,
            told.trusts,
            told.reliability,
            told.gain,
        )
        self.tokens[np.frombuffer(told.token_rows, "<u4")] = np.frombuffer(told.token_ratios, "<f2").reshape(
            -1, K
        )
        for table, rows in zip(self.keyed, (told.blocks, told.sessions, told.tenants), strict=True):
            self._put(table, rows)

    @staticmethod
    def _put(table: dict[int, bytes], told: KeyedRows) -> None:
        for at, key in enumerate(np.frombuffer(told.keys, "<u8").tolist()):
            table[key] = told.rows[at * ROW : (at + 1) * ROW]
            if table[key].endswith(bytes(4)):
                del table[key]

    def tables(self) -> Tables:
        clusters, shares, source_weights, trusts, reliability, gain = self.head
        assert list(source_weights) == list(SOURCES)
        return Tables(
            self.version,
            clusters,
            np.frombuffer(shares, "<f4"),
            *self.keyed,
            self.tokens,
            np.frombuffer(trusts, "<f4").reshape(PATTERNS, len(SOURCES)),
            np.array([reliability[source] for source in SOURCES], np.float32),
            gain,
        )

    def said(self) -> tuple[Any, ...]:
        return self.version, self.head, self.tokens.tobytes(), self.keyed


def replica(learning: ModelLearner) -> Replica:
    made = Replica()
    made.take(learning.snapshot("m"))
    return made


def keys_of(request: int, blocks: int, first: int = 0) -> list[int]:
    return [request * 1000 + block + 1 for block in range(first, first + blocks)]


def traffic(learning: ModelLearner, count: int, seed: int = 0, start: int = 0, *, turns: int = 2) -> None:
    """Yield conversations about one cluster each: their tokens are of that cluster, and the second turn
    continues the first one's prefix.
    """
    random = np.random.default_rng(seed)
    for request in range(start, start + count):
        cluster = int(random.integers(K))
        for turn in range(turns):
            name, now = f"{request}.{turn}", request + turn / 2
            first = keys_of(request, 4, 4 * turn)
            parent = first[0] - 1 if turn else None
            tokens = (100 * cluster + random.integers(0, 20, 40)).tolist()
            learning.profiled(profile(name, cluster, first, parent), VERSION, now)
            learning.finished(
                outcome(name, tokens, prefix=parent or 0, session=request + 1, tenant=1 + cluster % 2), now
            )


# Learning


def test_every_source_foretells_what_it_saw() -> None:
    learning = learner()
    traffic(learning, 60)
    learning.change("m")
    learning.profiled(profile("x", 5, [900_001, 900_002, 900_003]), VERSION, 60.0)
    learning.finished(outcome("x", [510] * 4, session=777, tenant=99), 60.0)
    learning.change("m")
    tables = replica(learning).tables()
    for query in (
        Query(prefix=[900_001, 900_002, 900_003, 900_004]),
        Query(session=777),
        Query(tokens=[500, 501, 502, 503, 504, 505, 506, 507]),
        Query(tenant=99),
    ):
        found = predict(tables, query)
        assert found.weights.argmax() == 5, query
        assert found.weights[5] > 0.16, query
    assert predict(tables, Query()).weights == pytest.approx(1 / K)


def test_a_prefix_row_is_the_mean_over_all_of_its_blocks() -> None:
    learning = learner()
    signatures = b"".join(pack(one_hot(cluster)).tobytes() for cluster in (1, 1, 2, 3))
    learning.profiled(profile("", 1, keys_of(1, 4), block_signatures=signatures), VERSION, 0.0)
    learning.profiled(profile("", 1, keys_of(1, 4, 4), keys_of(1, 4)[-1]), VERSION, 0.0)
    learning.change("m")
    rows = replica(learning).keyed[0]
    for key, tokens, mean in (
        (2, 32, one_hot(1)),
        (4, 64, (2 * one_hot(1) + one_hot(2) + one_hot(3)) / 4),
        (8, 128, (6 * one_hot(1) + one_hot(2) + one_hot(3)) / 8),
    ):
        row = rows[1000 + key]
        assert int.from_bytes(row[8:], "little") == tokens
        assert unpack(row[:8], model().shares) == pytest.approx(mean, abs=0.03)


def test_blocks_behind_an_unknown_parent_are_skipped_and_counted() -> None:
    learning = learner()
    learning.profiled(profile("", 1, keys_of(1, 4), parent=987), VERSION, 0.0)
    assert learning.orphans == 4
    assert learning.stored_blocks == 0


def test_sessions_follow_their_last_turns_and_tenants_change_slowly() -> None:
    learning = learner()
    for turn in range(12):
        cluster = 1 if turn < 8 else 2
        learning.profiled(profile(f"{turn}", cluster), VERSION, float(turn))
        learning.finished(outcome(f"{turn}", session=5, tenant=6), float(turn))
    learning.change("m")
    _, sessions, tenants = replica(learning).keyed
    session, tenant = unpack(sessions[5][:8], model().shares), unpack(tenants[6][:8], model().shares)
    assert session[2] > 0.45
    assert tenant[2] == pytest.approx(one_hot(2)[2] / 3 + one_hot(1)[2] * 2 / 3, abs=0.03)


def test_a_signature_of_few_tokens_counts_less() -> None:
    many, few = learner(), learner()
    for learning, tokens in ((many, 1000), (few, 4)):
        learning.profiled(profile("a", 1, tokens=tokens), VERSION, 0.0)
        learning.finished(outcome("a", [11] * 5, session=3), 0.0)
        learning.change("m")
    surer, doubtful = (
        predict(replica(learning).tables(), Query(session=3, tokens=[11])).weights[1]
        for learning in (many, few)
    )
    assert surer > doubtful + 0.1


def test_prediction_is_judged_by_what_was_known_before() -> None:
    """A tenant's first request teaches the source weights nothing about the tenant: its row did not exist
    when it was looked up.
    """
    learning = learner()
    learning.profiled(profile("a", 1), VERSION, 0.0)
    learning.finished(outcome("a", tenant=6), 0.0)
    assert [source.requests for source in learning.sources()] == [0, 0, 0, 0]
    learning.profiled(profile("b", 1), VERSION, 1.0)
    learning.finished(outcome("b", tenant=6), 1.0)
    assert [source.requests for source in learning.sources()] == [0, 0, 0, 1]


def test_reliable_sources_are_told_from_useless_ones() -> None:
    learning = learner()
    random = np.random.default_rng(1)
    for at in range(400):
        cluster = int(random.integers(K))
        learning.profiled(profile(f"{at}", cluster), VERSION, float(at))
        learning.finished(
            outcome(f"{at}", [50 * cluster + int(random.integers(5)) for _ in range(8)], tenant=1 + at % 3),
            float(at),
        )
    found = {source.source: source for source in learning.sources()}
    assert found["tokens"].reliability > 0.5
    assert found["tenant"].reliability < 0.1
    assert found["prefix"].requests == 0


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_gain_is_high_for_predictions_that_come_true_and_none_for_shuffled_ones(shuffled: bool) -> None:
    learning, random = learner(), np.random.default_rng(2)
    for at in range(400):
        predicted = 0.25 + 0.15 * random.normal()
        came = 0.25 + 0.15 * random.normal() if shuffled else predicted
        learning.profiled(
            profile(f"{at}", 1, local=float(np.clip(came + 0.04 * random.normal(), 0, 1))), VERSION, float(at)
        )
        learning.finished(
            outcome(f"{at}", predicted_local=float(np.clip(predicted, 0, 1)), prior_local=0.25), float(at)
        )
    assert learning.outcomes == 400
    assert learning.gain < 0.1 if shuffled else learning.gain > 0.5


def test_where_every_rank_is_as_near_only_the_trusts_learn() -> None:
    learning = learner()
    for at in range(5):
        learning.profiled(profile(f"{at}", 1), VERSION, float(at))
        learning.finished(outcome(f"{at}", tenant=3, predicted_local=None, prior_local=None), float(at))
    assert (learning.outcomes, learning.gain) == (0, 0.0)
    assert learning.sources()[3].requests == 4


def test_samples_tell_the_recall() -> None:
    learning = learner()
    assert learning.recall is None
    counts = (1000 * model().profiles[1]).astype(int)
    sample = SampledProfile(prompt=ExpertCounts.of(counts), completion=ExpertCounts.of(counts // 2))
    learning.profiled(profile("a", 1, sample=sample), VERSION, 0.0)
    learning.finished(outcome("a", predicted=pack(one_hot(1)).tobytes()), 0.0)
    assert learning.recall == pytest.approx(1.0, abs=0.01)
    assert learning.prior_recall is not None
    assert learning.prior_recall < learning.recall


# Versions of the clusters


def test_signatures_over_an_older_version_are_taken_and_over_an_unknown_one_refused() -> None:
    learning = learner()
    learning.adopt(model(VERSION + 4), [])
    learning.profiled(profile("", 1, keys_of(1, 2)), VERSION, 0.0)
    assert learning.stored_blocks == 2
    with pytest.raises(ValueError, match="version 8 is not known"):
        learning.profiled(profile("", 1), VERSION + 5, 0.0)
    learning.profiled(profile("", 1, keys_of(2, 2)), VERSION - 1, 0.0)
    learning.profiled(profile("", 1, keys_of(2, 2)), 0, 0.0)
    assert (learning.stored_blocks, learning.stale) == (2, 2)


def test_what_was_said_of_a_freed_cluster_is_said_of_the_kept_one() -> None:
    learning = learner()
    traffic(learning, 40)
    learning.profiled(profile("old", 4, keys_of(900, 2)), VERSION, 50.0)
    learning.profiled(profile("late", 4), VERSION, 50.0)
    shares = np.full(K, 1 / K)
    shares[3], shares[4] = 2 / K, 0.0
    learning.adopt(model(VERSION + 1, shares), [ClusterMerge(3, 4)])
    learning.finished(outcome("late", session=42), 51.0)
    told = learning.change("m")
    assert told is not None
    assert told.base is None
    copy = Replica()
    copy.take(told)
    tables = copy.tables()
    assert predict(tables, Query(prefix=keys_of(900, 2))).weights.argmax() == 3
    assert predict(tables, Query(session=42)).weights.argmax() == 3
    assert predict(tables, Query(tokens=[400 + at for at in range(20)])).weights.argmax() == 3
    assert all(
        predict(tables, Query(tokens=[100 * cluster + at for at in range(20)])).weights[4] == 0
        for cluster in range(K)
    )


def test_a_child_shares_what_was_said_of_its_parent() -> None:
    shares = np.full(K, 1 / (K - 1))
    shares[7] = 0.0
    learning = ModelLearner(CONFIG, 100)
    learning.adopt(model(VERSION, shares), [])
    for at in range(30):
        learning.profiled(profile(f"{at}", at % 7, keys_of(at, 2)), VERSION, float(at))
        learning.finished(outcome(f"{at}", [at % 7] * 5, session=1 + at % 7), float(at))
    after = shares.copy()
    after[2], after[7] = 0.1, shares[2] - 0.1
    learning.adopt(model(VERSION + 1, after), [ClusterSplit(2, 7)])
    told = learning.change("m")
    assert told is not None
    copy = Replica()
    copy.take(told)
    for query in (Query(prefix=keys_of(2, 2)), Query(session=3), Query(tokens=[2] * 8)):
        found = predict(copy.tables(), query).weights
        assert found[2] / found[7] == pytest.approx(after[2] / after[7], rel=0.15), query
        assert found[2] + found[7] > 0.3, query


def test_one_cluster_says_nothing_and_is_not_learnt() -> None:
    only = np.zeros(K)
    only[0] = 1.0
    learning = ModelLearner(CONFIG, 100)
    learning.adopt(model(1, only), [])
    learning.profiled(profile("a", 0, keys_of(1, 2)), 1, 0.0)
    assert (learning.stored_blocks, learning.stale) == (0, 1)


def test_clusters_of_another_shape_or_an_older_version_are_refused() -> None:
    learning = learner()
    with pytest.raises(ValueError, match="cannot follow"):
        learning.adopt(model(VERSION - 1), [])
    with pytest.raises(ValueError, match=r"tracker\.clusters is 8"):
        learning.adopt(
            ClusterModel(
                9, np.ones((2, LAYERS, EXPERTS), np.float32) / EXPERTS, np.ones(2, np.float32) / 2, 0.1
            ),
            [],
        )
    with pytest.raises(ValueError, match="cannot follow"):
        learning.adopt(
            ClusterModel(9, np.ones((K, 1, EXPERTS), np.float32) / EXPERTS, np.ones(K, np.float32) / K, 0.1),
            [],
        )


# Joining reports


def said(learning: ModelLearner) -> Any:
    """Return the complete state without the counts of duplicates."""
    state = learning.state()
    return {name: value for name, value in state.items() if name != "counted"}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_order_and_repetition_of_both_reports_change_nothing(orders: list[tuple[bool, bool, bool]]) -> None:
    """A pair is learnt from when it is complete, in either order. Duplicates are ignored."""
    plain, mixed = learner(), learner()
    random = np.random.default_rng(0)
    for at, (swapped, again_profile, again_outcome) in enumerate(orders):
        cluster = int(random.integers(K))
        one = profile(f"{at}", cluster, keys_of(at, 3))
        other = outcome(
            f"{at}",
            random.integers(0, 50, 10).tolist(),
            session=1 + at % 3,
            tenant=2,
            prefix=keys_of(at - 1, 3)[-1] if at else 0,
        )
        plain.profiled(one, VERSION, float(at))
        plain.finished(other, float(at))
        steps = [partial(mixed.profiled, one, VERSION, float(at)), partial(mixed.finished, other, float(at))]
        for step in steps[::-1] if swapped else steps:
            step()
        for step, repeated in zip(steps, (again_profile, again_outcome), strict=True):
            if repeated:
                step()
    assert said(mixed) == said(plain)
    assert mixed.repeated == sum(again for _, *both in orders for again in both)


def test_reports_wait_a_while_and_no_longer() -> None:
    learning = learner()
    learning.finished(outcome("a", session=5), 0.0)
    learning.finished(outcome("b", session=6), 100.0)
    learning.profiled(profile("a", 1), VERSION, WAITING_SECONDS + 1)
    learning.profiled(profile("b", 1), VERSION, WAITING_SECONDS + 1)
    assert set(replica(learning).keyed[1]) == {6}
    assert learning.given_up == 1


def test_a_flood_of_halves_is_bounded_in_number_and_bytes() -> None:
    learning = learner()
    for at in range(500):
        learning.finished(outcome(f"{at}", [1] * 128), 0.0)
        learning.profiled(profile(f"other {at}", 1), VERSION, 0.0)
    assert learning.waiting <= CONFIG.max_waiting
    assert learning.nbytes < sum(
        (
            CONFIG.prefix_bytes,
            CONFIG.session_bytes,
            CONFIG.tenant_bytes,
            CONFIG.token_bytes,
            CONFIG.waiting_bytes,
        )
    )


# Publishing


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.sampled_from(["requests", "requests", "requests", "telling", "hours", "merge", "split"]),
        min_size=5,
        max_size=40,
    )
)
def test_a_replica_that_follows_the_changes_equals_the_whole(steps: list[str]) -> None:
    learning, follower, version, now, shares = learner(), Replica(), VERSION, 0, np.full(K, 1 / K)
    follower.take(learning.snapshot("m"))
    for at, step in enumerate([*steps, "telling"]):
        if step == "requests":
            traffic(learning, 3, seed=at, start=now)
            now += 3
        elif step == "hours":
            now += int(0.4 * ROW_SECONDS)
        elif step in ("merge", "split"):
            version += 1
            shares = np.where(np.arange(K) == at % 3, 0.0 if step == "merge" else 0.1, shares)
            learning.adopt(
                model(version, shares / shares.sum()),
                [ClusterMerge(5, at % 3) if step == "merge" else ClusterSplit(5, at % 3)],
            )
        elif (told := learning.change("m")) is not None:
            follower.take(told)
            assert follower.said() == replica(learning).said()


def test_changes_are_small_and_their_versions_rise() -> None:
    learning = learner()
    traffic(learning, 100)
    learning.change("m")
    told = []
    for at in range(20):
        traffic(learning, 1, seed=at, start=1000 + at)
        told.append(learning.change("m"))
    found = [change for change in told if change is not None]
    assert all(
        later.version == earlier.version + 1 == later.base + 1
        for earlier, later in pairwise(found)
        if later.base is not None
    )
    assert all(change.base is not None for change in found)
    assert max(len(msgspec.msgpack.encode(change)) for change in found) < 8000
    assert len(msgspec.msgpack.encode(learning.snapshot("m"))) > 20_000


def test_nothing_is_told_where_nothing_changed() -> None:
    learning = learner()
    traffic(learning, 20)
    for _ in range(50):
        learning.change("m")
    assert learning.change("m") is None


def test_more_changes_than_are_remembered_are_told_whole() -> None:
    learning = learner(replace(CONFIG, max_changes=16))
    learning.change("m")
    learning.profiled(profile("", 1, keys_of(1, 40)), VERSION, 0.0)
    told = learning.change("m")
    assert told is not None
    assert told.base is None
    assert len(told.blocks.keys) == 8 * 40


def test_the_token_table_tells_its_largest_changes_first() -> None:
    learning = learner(replace(CONFIG, max_token_changes=5))
    for at in range(30):
        learning.profiled(profile(f"{at}", 1 + at % 2), VERSION, 0.0)
        learning.finished(outcome(f"{at}", [10 + at % 2] * 3 + [100 + at]), 0.0)
    told = [learning.change("m") for _ in range(9)]
    rows = [np.frombuffer(change.token_rows, "<u4").tolist() for change in told if change is not None]
    assert {10, 11} <= set(rows[0])
    assert all(len(some) <= 5 for some in rows)
    assert len({row for some in rows for row in some}) == 32


def test_tables_before_any_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="no model was adopted"):
        ModelLearner(CONFIG, 1).snapshot("m")


def test_reports_before_any_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="version 3 is not known"):
        ModelLearner(CONFIG, 1).profiled(profile("a", 1), VERSION, 0.0)


# Saving and restoring


def test_a_restart_changes_nothing() -> None:
    learning = learner()
    traffic(learning, 80)
    learning.finished(outcome("waits", session=4), 80.0)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(learning.state()))
    again = ModelLearner.restore(CONFIG, state)
    again.adopt(model(), [])
    assert again.state() == learning.state()
    for one in (learning, again):
        traffic(one, 40, start=81)
        one.profiled(profile("waits", 3), VERSION, 125.0)
    assert again.state() == learning.state()
    assert (again.gain, again.sources(), again.stored_blocks) == (
        learning.gain,
        learning.sources(),
        learning.stored_blocks,
    )
    told = again.change("m")
    assert told is not None
    assert told.base is None, "nobody can know what was told since the state was taken"


def test_versions_go_on_above_those_of_the_state() -> None:
    learning = learner()
    learning.change("m")
    assert ModelLearner.restore(CONFIG, learning.state()).version >= learning.version
    assert ModelLearner.restore(CONFIG, learning.state(), 5000).version == 5000


def test_a_state_on_another_clock_keeps_its_ages() -> None:
    learning = learner()
    learning.profiled(profile("", 1, keys_of(1, 2)), VERSION, 100.0)
    learning.profiled(profile("", 1, keys_of(2, 2)), VERSION, 100.0 + 0.9 * ROW_SECONDS)
    moved = ModelLearner.restore(CONFIG, learning.state(), later=-100.0 - 0.9 * ROW_SECONDS)
    moved.adopt(model(), [])
    moved.profiled(profile("", 1, keys_of(3, 2)), VERSION, 0.2 * ROW_SECONDS)
    assert set(replica(moved).keyed[0]) == {*keys_of(2, 2), *keys_of(3, 2)}


@pytest.mark.parametrize(
    "broken",
    [
        {"format": 0},
        {"blocks": None},
        {"trust": {}},
        {"pairs": {"waiting": [["a", 7, 0.0, []]], "paired": [], "given_up": 0}},
    ],
)
def test_a_state_that_is_none_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"learning|pairing"):
        ModelLearner.restore(CONFIG, learner().state() | broken)
    with pytest.raises(ValueError, match="sets"):
        ModelLearner.restore(replace(CONFIG, prefix_bytes=128 << 10), learner().state())


@pytest.mark.parametrize("garbage", [None, -3, "x", b"12345678", [None], float("nan")])
def test_whatever_part_of_a_state_is_garbled_it_is_refused_or_does_no_harm(garbage: Any) -> None:
    learning = learner()
    traffic(learning, 10)
    learning.finished(outcome("waits", session=3), 11.0)
    packed = msgspec.msgpack.encode(learning.state())
    for path in _paths(learning.state()):
        state = part = msgspec.msgpack.decode(packed)
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = garbage
        try:
            again = ModelLearner.restore(CONFIG, state)
        except ValueError:
            continue
        again.adopt(model(), [])
        traffic(again, 2, start=20)
        again.profiled(profile("waits", 1), VERSION, 30.0)
        again.change("m")


def _paths(state: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the keys of everything in a state, recursively."""
    below = [
        path
        for key, value in state.items()
        if isinstance(value, dict)
        for path in _paths(value, (*above, key))
    ]
    return [(*above, key) for key in state] + below


# Invalid input


@pytest.mark.parametrize(
    ("field_name", "broken"),
    [
        ("tokens", {"tokens": -1}),
        ("cached_tokens", {"cached_tokens": -5}),
        ("signature", {"signature": b"123"}),
        ("signature", {"signature": bytes([K, 255, 0, 0, 0, 0, 0, 0])}),
        ("signature", {"signature": bytes([1, 255, 2, 255, 0, 0, 0, 0])}),
        ("local", {"local": 1.5}),
        ("local", {"local": float("nan")}),
        ("parent", {"parent": -1}),
        ("blocks", {"blocks": b"1234567"}),
        ("blocks", {"blocks": bytes(8), "block_signatures": bytes(8)}),
        ("blocks", {"blocks": b"12345678" * 2, "block_signatures": bytes(16)}),
        ("block_signatures", {"blocks": b"12345678"}),
        ("block_size", {"blocks": b"12345678", "block_signatures": bytes(8), "block_size": 0}),
        ("decision", {"decision": "x" * 200}),
        (
            "sample.prompt",
            {
                "sample": SampledProfile(
                    prompt=ExpertCounts.of(np.ones((2, 2), int)),
                    completion=ExpertCounts.of(np.ones((2, 2), int)),
                )
            },
        ),
    ],
)
def test_a_profile_that_cannot_be_is_refused_and_changes_nothing(
    field_name: str, broken: dict[str, Any]
) -> None:
    learning = learner()
    before = learning.state()
    with pytest.raises(ValueError, match=field_name):
        learning.profiled(msgspec.structs.replace(profile("a", 1), **broken), VERSION, 0.0)
    assert learning.state() == before


@pytest.mark.parametrize(
    ("field_name", "broken"),
    [
        ("decision", {"decision": ""}),
        ("prefix", {"prefix": 1 << 64}),
        ("session", {"session": -1}),
        ("tenant", {"tenant": 1 << 65}),
        ("tokens", {"tokens": b"123"}),
        ("tokens", {"tokens": bytes(4 * 257)}),
        ("predicted", {"predicted": b""}),
        ("predicted_local", {"predicted_local": -0.1}),
        ("prior_local", {"prior_local": float("inf")}),
    ],
)
def test_an_outcome_that_cannot_be_is_refused_and_changes_nothing(
    field_name: str, broken: dict[str, Any]
) -> None:
    learning = learner()
    before = learning.state()
    with pytest.raises(ValueError, match=field_name):
        learning.finished(msgspec.structs.replace(outcome("a"), **broken), 0.0)
    assert learning.state() == before


# Memory limits


def test_a_megabyte_is_enough_for_a_hundred_thousand_prefixes() -> None:
    config = replace(CONFIG, prefix_bytes=1 << 20, max_changes=4096)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    learning = learner(config)
    hot = keys_of(1, 40)
    for at in range(100_000 // 250):
        learning.profiled(profile(f"{at}", 1, keys_of(1000 + at, 250)), VERSION, float(at))
        learning.finished(
            outcome(f"{at}", [at % 512], session=1 + at, tenant=1 + at % 50, prefix=hot[-1]), float(at)
        )
        if at % 15 == 0:
            learning.profiled(profile("", 2, hot), VERSION, float(at))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    budget = sum(
        (
            config.prefix_bytes,
            config.session_bytes,
            config.tenant_bytes,
            config.token_bytes,
            config.waiting_bytes,
        )
    )
    assert learning.stored_bytes <= learning.nbytes <= budget
    assert held < budget + 64_000, "and the model, the trusts, the decisions that were joined"
    assert set(hot) <= set(replica(learning).keyed[0]), "what is used again and again stays"
