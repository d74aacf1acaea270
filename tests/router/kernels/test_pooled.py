"""The compiled prediction of a request is that of `fleet.prediction.predict`, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.prediction import MAX_TOKENS, PATTERNS, SOURCES, Query, Tables, predict, row
from fleet.signatures import PACKED, pack
from router import kernels
from router.prediction.predictor import pooled

_U32 = (1 << 32) - 1


def _tables(seed: int, clusters: int, rows: int) -> Tables:
    chance = np.random.default_rng(seed)
    shares = chance.dirichlet(np.full(clusters, 0.5)) * chance.integers(0, 2, clusters)
    shares[0] += 0.1

    def known(*keys: int) -> dict[int, bytes]:
        packed = pack(chance.dirichlet(np.full(clusters, 0.3), size=len(keys)))
        evidence = chance.integers(0, 3000, len(keys))
        return {key: row(of.tobytes(), found) for key, of, found in zip(keys, packed, evidence, strict=True)}

    shape = (PATTERNS, len(SOURCES)) if chance.integers(2) else (len(SOURCES),)
    return Tables(
        version=1,
        clusters=1,
        shares=(shares / shares.sum()).astype(np.float32),
        blocks=known(11, 12),
        sessions=known(5),
        tenants=known(6),
        tokens=chance.normal(0, 2, (rows, clusters)).astype(np.float32),
        source_weights=chance.uniform(0, 2, shape).astype(np.float32),
        reliability=chance.uniform(0, 1, len(SOURCES)).astype(np.float32),
    )


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.sampled_from([0, 1, 7, 1000]),
    st.builds(
        Query,
        prefix=st.sampled_from([(), (11,), (11, 12), (99,)]),
        tokens=st.lists(st.integers(0, 2000) | st.integers(0, _U32), max_size=MAX_TOKENS + 60),
        block_size=st.sampled_from([1, 16, 100]),
        session=st.sampled_from([0, 5, 7]),
        tenant=st.sampled_from([0, 6, 7]),
    ),
)
def test_both_forms_predict_alike(seed: int, clusters: int, rows: int, query: Query) -> None:
    tables = _tables(seed, clusters, rows)
    expected = predict(replace(tables), query)
    found = pooled(tables, query)
    assert np.array_equal(found.weights, expected.weights)
    assert found.weights.dtype == np.float32
    assert (found.evidence, found.blocks, found.hash, found.looked_up) == expected.known[1:]


def test_ids_outside_u32_and_arrays_that_do_not_fit_are_refused() -> None:
    tables = _tables(1, 4, 7)
    with pytest.raises(OverflowError):
        pooled(tables, Query(tokens=[_U32 + 1]))
    with pytest.raises(ValueError, match="3 numbers in an array, expected 4"):
        pooled(replace(tables, source_weights=tables.source_weights.reshape(-1)[:3]), Query(tokens=[1]))
    library = kernels.compiled()
    assert library is not None, kernels.missing
    numbers = np.zeros(4, np.float32)
    arrays, rows = (numbers,) * 4, (None,) * 3
    for first, last in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match="no such tokens"):
            library.pool(4, [1, 2], first, last, 1.0, 1, 1, *arrays, *rows, numbers)
    with pytest.raises(ValueError, match="an array is None"):
        library.pool(4, [1, 2], 0, 1, 1.0, 1, 1, None, *arrays[1:], *rows, numbers)
    with pytest.raises(ValueError, match="weights of other sets of sources"):
        library.pool(4, [1, 2], 0, 1, 1.0, 1, 3, *arrays, *rows, numbers)
    with pytest.raises(ValueError, match="a row of another length"):
        library.pool(4, [1, 2], 0, 1, 1.0, 1, 1, *arrays, b"short", None, None, numbers)
    with pytest.raises(TypeError):
        library.pool(4, [1, 2], 0, 1, 1.0, 1, 1, *arrays, None, "text", None, numbers)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.binary(min_size=PACKED, max_size=PACKED),
    st.integers(0, _U32),
)
def test_rows_of_any_bytes_are_decoded_alike(seed: int, clusters: int, packed: bytes, seen: int) -> None:
    tables = replace(_tables(seed, clusters, 7), sessions={5: row(packed, seen)})
    found, expected = pooled(tables, Query(tokens=[], session=5)), predict(tables, Query(session=5))
    assert np.array_equal(found.weights, expected.weights)
    assert found.evidence == expected.known.evidence
