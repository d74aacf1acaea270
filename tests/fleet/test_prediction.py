"""Prediction from several sources of evidence about a request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.prediction import (
    FLOOR,
    MAX_TOKENS,
    PATTERNS,
    PREFIX,
    ROW,
    SESSION,
    SHRINK,
    SOURCES,
    TENANT,
    TOKENS,
    Query,
    Tables,
    confidence,
    confidences,
    know,
    longest_known,
    predict,
    row,
    together,
)
from fleet.signatures import PACKED, pack, unpack

K = 6


def tables(
    *,
    trust: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    reliability: Sequence[float] = (0.5, 0.5, 0.5, 0.5),
    shares: Any = None,
    tokens: Any = None,
    blocks: dict[int, bytes] | None = None,
    sessions: dict[int, bytes] | None = None,
    tenants: dict[int, bytes] | None = None,
) -> Tables:
    return Tables(
        version=1,
        clusters=1,
        shares=np.full(K, 1 / K, np.float32) if shares is None else np.asarray(shares, np.float32),
        blocks=blocks or {},
        sessions=sessions or {},
        tenants=tenants or {},
        tokens=np.zeros((0, K), np.float32) if tokens is None else np.asarray(tokens, np.float32),
        source_weights=np.asarray(trust, np.float32),
        reliability=np.asarray(reliability, np.float32),
    )


def speaks_for(cluster: int, tokens: float = 1000.0, weight: float = 0.9) -> bytes:
    weights = np.full(K, (1 - weight) / (K - 1))
    weights[cluster] = weight
    return row(pack(weights).tobytes(), tokens)


weights = (
    st.lists(st.floats(0, 1), min_size=K, max_size=K)
    .map(lambda found: np.array(found) + 1e-3)
    .map(lambda found: found / found.sum())
)
rows = st.builds(lambda found, tokens: row(pack(found).tobytes(), tokens), weights, st.integers(0, 10**6))
shares = (
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=K, max_size=K)
    .filter(any)
    .map(lambda found: np.array(found) / sum(found))
)
ratio_tables = st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).normal(scale=3, size=(7, K))
)
learnt = st.builds(
    tables,
    trust=st.lists(st.floats(0, 2), min_size=4, max_size=4),
    reliability=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    shares=shares,
    tokens=ratio_tables,
    blocks=st.dictionaries(st.sampled_from([11, 12, 13]), rows),
    sessions=st.dictionaries(st.just(5), rows),
    tenants=st.dictionaries(st.just(6), rows),
)
queries = st.builds(
    Query,
    prefix=st.sampled_from([(), (11,), (11, 12, 13), (99,)]),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60),
    block_size=st.just(16),
    session=st.sampled_from([0, 5, 7]),
    tenant=st.sampled_from([0, 6, 7]),
)


@settings(max_examples=150, deadline=None)
@given(learnt, queries)
def test_a_prediction_is_a_distribution_over_the_clusters_in_use_and_its_confidence_is_a_share(
    found: Tables, query: Query
) -> None:
    prediction = predict(found, query)
    assert prediction.weights.shape == (K,)
    assert prediction.weights.dtype == np.float32
    assert (prediction.weights >= 0).all()
    assert prediction.weights.sum() == pytest.approx(1.0, abs=1e-5)
    assert (prediction.weights[found.shares == 0] == 0).all()
    assert 0 <= prediction.confidence <= 1
    assert all(0 <= one <= prediction.confidence + 1e-12 for one in prediction.confidences)
    assert len(prediction.confidences) == len(prediction.known.evidence) == len(SOURCES)


@settings(max_examples=60, deadline=None)
@given(learnt)
def test_without_evidence_the_mix_is_predicted_and_nothing_is_certain(found: Tables) -> None:
    prediction = predict(found, Query())
    assert prediction.weights == pytest.approx(found.shares, abs=1e-6)
    assert prediction.confidence == 0
    assert prediction.known.evidence == (0, 0, 0, 0)
    assert (prediction.known.blocks, prediction.known.hash) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(learnt, queries)
def test_without_trust_the_mix_is_predicted(found: Tables, query: Query) -> None:
    distrusted = Tables(**{**vars_of(found), "source_weights": np.zeros(4, np.float32)})
    assert predict(distrusted, query).weights == pytest.approx(found.shares, abs=1e-6)


def vars_of(found: Tables) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Tables.__dataclass_fields__}


EVIDENCE = Query(prefix=(11,), tokens=range(40), session=5, tenant=6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.lists(st.floats(0, 2), min_size=4, max_size=4), st.floats(0, 1))
def test_the_more_a_source_is_trusted_the_more_the_prediction_is_what_it_says(
    source: int, trust: list[float], more: float
) -> None:
    ratios = np.tile(np.where(np.arange(K) == TOKENS, 0.1, 0.0), (3, 1))
    found = tables(
        trust=trust,
        tokens=ratios,
        blocks={11: speaks_for(PREFIX)},
        sessions={5: speaks_for(SESSION)},
        tenants={6: speaks_for(TENANT)},
    )
    raised = list(trust)
    raised[source] += more
    before, after = (
        predict(one, EVIDENCE).weights
        for one in (found, Tables(**{**vars_of(found), "source_weights": np.array(raised, np.float32)}))
    )
    assert after[source] >= before[source] - 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_evidence_says_more_and_little_is_shrunk_to_the_mix(few: int, more: int) -> None:
    few, more = sorted((few, more))
    found = [predict(tables(sessions={5: speaks_for(2, tokens)}), Query(session=5)) for tokens in (few, more)]
    assert found[0].weights[2] <= found[1].weights[2] + 1e-6
    assert found[0].confidence <= found[1].confidence
    assert found[1].weights[2] <= 0.91
    share = few / (few + SHRINK[SESSION]) * (1 - FLOOR)
    expected = share * 0.9 + (1 - share) / K
    assert found[0].weights[2] == pytest.approx(expected, abs=0.01), (
        "alone and with trust 1 a source is believed as far as it is shrunk"
    )


def test_no_cluster_in_use_is_ever_called_impossible() -> None:
    prediction = predict(tables(sessions={5: speaks_for(2, 1e9, 1.0)}), Query(session=5))
    assert prediction.weights.min() > 1e-4


def test_sources_that_agree_are_surer_and_those_that_contradict_one_another_cancel() -> None:
    agreeing = predict(tables(blocks={11: speaks_for(1)}, sessions={5: speaks_for(1)}), EVIDENCE)
    alone = predict(tables(blocks={11: speaks_for(1)}), EVIDENCE)
    torn = predict(tables(blocks={11: speaks_for(1, 1e6)}, sessions={5: speaks_for(2, 1e6)}), EVIDENCE)
    assert agreeing.weights[1] > alone.weights[1]
    assert agreeing.confidence > alone.confidence
    assert torn.weights[1] == pytest.approx(torn.weights[2], rel=1e-3)


def test_the_tokens_after_the_known_prefix_are_looked_up_and_no_more_than_256_of_them() -> None:
    ratios = np.zeros((1000, K))
    ratios[:, 3] = 0.01
    found = tables(tokens=ratios, blocks={11: speaks_for(0), 12: speaks_for(0)})
    known = know(found, Query(prefix=(11, 12, 13), tokens=list(range(10_000)), block_size=16))
    assert (known.blocks, known.hash) == (2, 12)
    assert known.looked_up == slice(32, 32 + MAX_TOKENS)
    assert known.evidence[TOKENS] == MAX_TOKENS
    worth = MAX_TOKENS * SHRINK[TOKENS] / (MAX_TOKENS + SHRINK[TOKENS])
    assert known.ratios[TOKENS] == pytest.approx(0.01 * worth * (np.arange(K) == 3), rel=1e-4)
    assert know(found, Query(prefix=(11, 12), tokens=list(range(32)))).evidence[TOKENS] == 0


def test_token_ids_beyond_the_table_share_its_rows() -> None:
    ratios = np.arange(3)[:, None] * np.ones(K)
    known = know(tables(tokens=ratios), Query(tokens=[2**32 - 1, 5, 7]))
    assert known.ratios[TOKENS] == pytest.approx(
        np.full(K, ((2**32 - 1) % 3 + 2 + 1) * SHRINK[TOKENS] / (SHRINK[TOKENS] + 3))
    )


def test_one_query_says_the_same_of_tuples_lists_and_ranges() -> None:
    ratios = np.random.default_rng(0).normal(size=(50, K))
    found = [
        predict(tables(tokens=ratios), Query(tokens=ids)).weights
        for ids in (list(range(30)), tuple(range(30)), range(30))
    ]
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 400))
def test_the_longest_known_prefix_is_found_whatever_its_length_and_the_guess(
    length: int, known: int, guess: int
) -> None:
    prefix = list(range(1000, 1000 + length))
    blocks = {block: speaks_for(0, at + 1) for at, block in enumerate(prefix[:known])}
    depth = 0  # block by block
    while depth < length and prefix[depth] in blocks:
        depth += 1
    assert longest_known(blocks, prefix, guess) == (depth, blocks.get(prefix[depth - 1]) if depth else None)


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(0, 70))
def test_a_store_with_holes_gives_a_prefix_whose_end_is_known(
    held: set[int], length: int, guess: int
) -> None:
    blocks = {block: speaks_for(0, block + 1) for block in held}
    depth, found = longest_known(blocks, range(length), guess)
    assert found == (blocks[depth - 1] if depth else None)


def test_little_of_a_prefix_is_read_where_little_of_it_is_known() -> None:
    class Lazy(list[int]):
        deepest = -1

        def __getitem__(self, at: Any) -> Any:
            self.deepest = max(self.deepest, at)
            return super().__getitem__(at)

    for known, most in ((0, 0), (1, 2), (10, 30), (100, 300)):
        prefix = Lazy(range(1, 5001))
        assert longest_known({block: speaks_for(0) for block in range(1, known + 1)}, prefix)[0] == known
        assert prefix.deepest <= most


def test_a_good_guess_saves_looking() -> None:
    class Counting(dict[int, bytes]):
        asked = 0

        def get(self, key: int, default: Any = None) -> Any:
            self.asked += 1
            return super().get(key, default)

    for guess, most in ((100, 2), (99, 4), (101, 8), (60, 12), (0, 16)):
        blocks = Counting({block: speaks_for(0) for block in range(100)})
        assert longest_known(blocks, range(1000), guess)[0] == 100
        assert blocks.asked <= most


def test_a_row_is_a_packed_signature_and_its_tokens() -> None:
    packed = bytes(range(PACKED))
    assert row(packed, 258.9) == packed + b"\x02\x01\x00\x00"
    assert len(row(packed, 1e12)) == ROW
    assert row(packed, 1e12).endswith(b"\xff" * 4)


@settings(max_examples=100, deadline=None)
@given(shares, st.lists(st.integers(0, 255), min_size=PACKED, max_size=PACKED), st.integers(1, 10**6))
def test_a_source_says_the_log_ratio_of_its_shrunk_weights_to_the_mix(
    mix: Any, packed: list[int], tokens: int
) -> None:
    found = tables(shares=mix, sessions={5: row(bytes(packed), tokens)})
    ratios = know(found, Query(session=5)).ratios[SESSION]
    believed = tokens / (tokens + SHRINK[SESSION]) * (1 - FLOOR)
    weights = unpack(packed, found.shares)
    for cluster in np.flatnonzero(mix):
        expected = np.log(believed * weights[cluster] / found.shares[cluster] + 1 - believed)
        assert ratios[cluster] == pytest.approx(expected, abs=1e-4)


def test_trust_depends_on_who_else_speaks_where_the_tables_say_so() -> None:
    trust = np.ones((PATTERNS, len(SOURCES)), np.float32)
    trust[1 << PREFIX | 1 << SESSION, SESSION] = 0.0
    by_source = tables(blocks={11: speaks_for(1)}, sessions={5: speaks_for(2)})
    by_pattern = replace(by_source, source_weights=trust)
    alone, both = Query(session=5), Query(prefix=(11,), session=5)
    assert predict(by_pattern, alone).weights == pytest.approx(predict(by_source, alone).weights)
    assert predict(by_pattern, both).weights == pytest.approx(predict(by_source, Query(prefix=(11,))).weights)


def test_a_share_next_to_nothing_divides_nothing() -> None:
    shares = [0.5, 0.5, 1e-40, 0.0, 0.0, 0.0]
    found = predict(tables(shares=shares, sessions={5: speaks_for(1)}), Query(session=5))
    assert np.isfinite(found.weights).all()
    assert found.weights[1] > 0.5


def test_the_confidence_of_all_sources_is_that_of_their_confidences_together() -> None:
    reliabilities, evidence = (0.5, 0.1, 0.9, 0.3), (10.0, 0.0, 128.0, 5.0)
    assert confidence(reliabilities, evidence) == pytest.approx(
        together(confidences(reliabilities, evidence))
    )
    assert confidence((0.9,) * 4, (0.0,) * 4) == 0.0
