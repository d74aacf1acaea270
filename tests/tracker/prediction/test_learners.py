"""Learnt state of models, unchanged by a restart."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.facts.activity import (
    RequestOutcome,
    RequestProfile,
    RequestsFinished,
    RequestsProfiled,
    SampledProfile,
)
from fleet.facts.demand import ClustersPublished, TablesPublished
from fleet.popularity import ExpertCounts
from fleet.signatures import ClusterModel, pack
from tracker.config import TrackerConfig
from tracker.prediction.learners import MODEL, OUTCOME, SAMPLE, SIGNATURE, Learners, popularity
from tracker.prediction.model_learner import HEAD
from tracker.prediction.token_table import MIN_CHANGE

LAYERS, EXPERTS = 3, 12
SHAPE = (LAYERS, EXPERTS)
CONFIG = TrackerConfig(
    clusters=6,
    refine_seconds=2.0,
    prefix_bytes=1 << 20,
    session_bytes=1 << 18,
    tenant_bytes=1 << 16,
    token_bytes=1 << 18,
)
KINDS = np.random.default_rng(7).dirichlet(np.full(EXPERTS, 0.15), (3, LAYERS))
FIRST = 1000

Step = tuple[int, int, bool]
"""kind, tokens, sampled"""
steps = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400), st.booleans()), min_size=1, max_size=70)


def counts(kind: int, tokens: int, seed: int) -> np.ndarray:
    random = np.random.default_rng((kind, tokens, seed))
    return np.stack([random.multinomial(2 * tokens, row) for row in KINDS[kind]])


def current(learners: Learners) -> ClusterModel:
    said = learners.clusters("m")
    assert said is not None
    return ClusterModel.from_record(said.record)


def profiled(model: ClusterModel, step: Step, number: int) -> RequestsProfiled:
    kind, tokens, sampled = step
    prompt, completion = counts(kind, tokens, 0), counts(kind, tokens, 1)
    signature = pack(model.signature(prompt + completion)).tobytes()
    sample = SampledProfile(prompt=ExpertCounts.of(prompt), completion=ExpertCounts.of(completion))
    profile = RequestProfile(
        decision=f"d{number}",
        tokens=2 * tokens,
        cached_tokens=0,
        signature=signature,
        local=0.2 + 0.3 * kind,
        blocks=np.array([1 + 2 * number, 2 + 2 * number], "<u8").tobytes(),
        block_signatures=2 * signature,
        block_size=16,
        sample=sample if sampled else None,
    )
    return RequestsProfiled(
        engine="a", worker_id=1, rank=0, model="m", epoch=0, clusters=model.version, requests=(profile,)
    )


def finished(model: ClusterModel, step: Step, number: int) -> RequestsFinished:
    outcome = RequestOutcome(
        decision=f"d{number}",
        worker_id=1,
        rank=0,
        prefix=0,
        tokens=np.full(8, step[0], "<u4").tobytes(),
        session=1 + number % 5,
        tenant=1 + step[0],
        predicted=pack(model.shares).tobytes(),
        predicted_local=0.25 + 0.2 * step[0],
        prior_local=0.5,
    )
    return RequestsFinished(model="m", tables=1, clusters=model.version, requests=(outcome,))


def live(learners: Learners, published: list[Step], began: int) -> None:
    """Run one second per request: its outcome and its profile, and a refit when due."""
    for number, step in enumerate(published, start=began):
        model = current(learners)
        assert not learners.finished(finished(model, step, number), float(number))
        assert not learners.profiled(profiled(model, step, number), float(number))
        for name, clusters, job in learners.due(float(number)):
            learners.adopt(name, clusters, None if job is None else job.run(), float(number))
        learners.changes()


def restarted(learners: Learners, first_version: int) -> Learners:
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(learners.state()))
    again = Learners(CONFIG, first_version, learners.meaning_from)
    again.restore("m", SHAPE, kept["m"])
    return again


def as_told(learners: Learners) -> tuple[TablesPublished, ClustersPublished]:
    """Return snapshots of tables and clusters, without versions."""
    learners.changes()
    tables, clusters = learners.tables("m"), learners.clusters("m")
    assert tables is not None
    assert clusters is not None
    assert tables.clusters == clusters.record.version
    return msgspec.structs.replace(tables, version=0, clusters=0), msgspec.structs.replace(
        clusters, record=msgspec.structs.replace(clusters.record, version=0)
    )


def same_tables(one: TablesPublished, other: TablesPublished) -> None:
    """Compare tables. Values that changed too little to be published (HEAD, MIN_CHANGE) are published after
    a restart.
    """
    for left, right in ((one.shares, other.shares), (one.trusts, other.trusts)):
        assert np.frombuffer(left, "<f4") == pytest.approx(np.frombuffer(right, "<f4"), abs=HEAD)
    assert one.trust == pytest.approx(other.trust, abs=HEAD)
    assert one.reliability == pytest.approx(other.reliability, abs=HEAD)
    assert one.gain == pytest.approx(other.gain, abs=HEAD)
    assert (one.blocks, one.sessions, one.tenants) == (other.blocks, other.sessions, other.tenants)
    assert np.abs(token_table(one) - token_table(other)).max() <= MIN_CHANGE + 0.01


def token_table(tables: TablesPublished) -> np.ndarray:
    """Return the table as a reader has it: [buckets, K]."""
    rows = np.frombuffer(tables.token_rows, "<u4")
    table = np.zeros((tables.buckets, CONFIG.clusters))
    table[rows] = np.frombuffer(tables.token_ratios, "<f2").reshape(len(rows), CONFIG.clusters)
    return table


@settings(max_examples=30)
@given(steps, steps)
def test_a_restart_changes_nothing_of_what_is_told_then_or_later(
    before: list[Step], after: list[Step]
) -> None:
    plain = Learners(CONFIG, FIRST)
    plain.follow({"m": SHAPE})
    live(plain, before, 0)
    again = restarted(plain, FIRST + 10_000)
    (tables, clusters), (other_tables, other_clusters) = as_told(plain), as_told(again)
    assert clusters == other_clusters
    same_tables(tables, other_tables)
    assert current(again).version == FIRST + 10_000
    learnt = again.learnt("m")
    assert learnt == plain.learnt("m")
    live(plain, after, len(before))
    live(again, after, len(before))
    (tables, clusters), (other_tables, other_clusters) = as_told(plain), as_told(again)
    assert clusters == other_clusters
    same_tables(tables, other_tables)


def test_a_model_of_another_shape_is_learnt_anew_and_one_that_is_gone_is_forgotten() -> None:
    learners = Learners(CONFIG, FIRST)
    learners.follow({"m": SHAPE, "other": (1, 2)})
    live(learners, [(number % 3, 200, True) for number in range(60)], 0)
    assert (current(learners).shares > 0).sum() > 1
    learners.follow({"m": (LAYERS + 1, EXPERTS)})
    assert (current(learners).shares > 0).sum() == 1
    assert learners.tables("other") is None
    assert learners.clusters("other") is None
    assert learners.learnt("other") is None
    assert learners.all_learnt().keys() == {"m"}


def test_a_refinement_of_clusters_that_are_gone_changes_nothing() -> None:
    learners = Learners(CONFIG, FIRST)
    learners.follow({"m": SHAPE})
    for number in range(40):
        learners.profiled(profiled(current(learners), (number % 3, 200, True), number), float(number))
    ((name, clusters, job),) = learners.due(50.0)
    assert job is not None
    fitted = job.run()
    learners.follow({})
    learners.follow({"m": SHAPE})
    learners.adopt(name, clusters, fitted, 51.0)
    assert (current(learners).shares > 0).sum() == 1


def test_clusters_are_told_when_they_changed_and_tables_as_changes() -> None:
    learners = Learners(CONFIG, FIRST)
    learners.follow({"m": SHAPE})
    first = learners.changes()
    assert [type(message) for message in first] == [ClustersPublished, TablesPublished]
    assert learners.changes() == []
    live(learners, [(number % 3, 200, True) for number in range(60)], 0)
    assert current(learners).version > FIRST
    assert learners.changes() == []  # `live` published it


def test_what_cannot_be_learnt_from_is_counted_by_reason_and_changes_nothing() -> None:
    learners = Learners(CONFIG, FIRST)
    learners.follow({"m": SHAPE})
    live(learners, [(number % 3, 200, True) for number in range(60)], 0)
    model, before = current(learners), as_told(learners)
    good, outcome = profiled(model, (0, 10, False), 100), finished(model, (0, 10, False), 100)
    replace = msgspec.structs.replace
    small = ExpertCounts.of(np.ones((1, 1), np.int64))
    broken = ExpertCounts(layers=LAYERS, experts=EXPERTS, width=3, values=b"")
    for sample in (
        SampledProfile(prompt=small, completion=small),
        SampledProfile(prompt=broken, completion=broken),
    ):
        said = replace(good, requests=(replace(good.requests[0], sample=sample),))
        assert learners.profiled(said, 100.0)[SAMPLE] == 1
    assert learners.profiled(replace(good, requests=(replace(good.requests[0], signature=b""),)), 100.0) == {
        SIGNATURE: 1
    }
    assert learners.profiled(replace(good, model="x"), 100.0) == {MODEL: 1}
    assert learners.finished(replace(outcome, model="x"), 100.0) == {MODEL: 1}
    assert learners.finished(
        replace(outcome, requests=(replace(outcome.requests[0], predicted=b"1"),)), 100.0
    ) == {OUTCOME: 1}
    assert as_told(learners) == before


def test_signatures_over_clusters_of_another_life_are_not_learnt_from() -> None:
    learners = Learners(CONFIG, FIRST)
    learners.follow({"m": SHAPE})
    live(learners, [(number % 3, 200, True) for number in range(60)], 0)
    before = as_told(learners)
    said = profiled(current(learners), (0, 10, False), 100)
    assert not learners.profiled(msgspec.structs.replace(said, clusters=FIRST - 1), 100.0)
    assert as_told(learners) == before


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"clusters": {}, "learning": {}},
        {"clusters": 1, "learning": 2},
        {"clusters": {"shape": []}, "learning": {}},
    ],
)
def test_what_is_no_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"state|snapshot"):
        Learners(CONFIG, FIRST).restore("m", SHAPE, state)


def test_a_state_of_another_shape_is_refused() -> None:
    learners = Learners(CONFIG, FIRST)
    learners.follow({"m": SHAPE})
    with pytest.raises(ValueError, match="shape"):
        Learners(CONFIG, FIRST).restore("m", (LAYERS, EXPERTS + 1), learners.state()["m"])


def test_popularity_names_the_clusters_in_use_by_their_share() -> None:
    profiles = np.stack(
        [np.full((1, 4), 0.25), np.array([[0.7, 0.1, 0.1, 0.1]]), np.array([[0.1, 0.1, 0.1, 0.7]])]
    ).astype(np.float32)
    found = popularity(ClusterModel(1, profiles, np.array([0.0, 0.25, 0.75], np.float32), 0.1))
    assert [(each.cluster, each.share) for each in found] == [(2, 0.75), (1, 0.25)]
    assert found[1].distance > found[0].distance > 0
