"""Expert routings in responses: decoded as their engines wrote them, other data refused."""

import base64
import io
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fleet.routings import (
    MAX_EXPERTS,
    SAMPLED_TOKENS,
    UNKNOWN,
    count_pairs,
    from_sglang,
    from_vllm,
    read_npy,
    sampled_tokens,
)

SHAPES = npst.array_shapes(min_dims=3, max_dims=3, max_side=6)
IDS = npst.arrays(
    st.sampled_from([np.uint8, np.uint16, np.int32, np.dtype(">i4"), np.int64]),
    SHAPES,
    elements=st.integers(0, 31),
)


NPY_DTYPES = st.sampled_from(["?", "u1", "<i2", ">i4", "<f4", ">f8", "<c8", "<U3", "S2", "<M8[s]"])


def npy(table: Any, **options: Any) -> str:
    out = io.BytesIO()
    np.save(out, table, **options)
    return base64.b64encode(out.getvalue()).decode()


def raw(table: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(table, "<i4").tobytes()).decode()


@given(IDS)
def test_what_vllm_writes_is_read_back_as_numpy_reads_it(table: np.ndarray) -> None:
    text = npy(table)
    read = from_vllm(text, 32)
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read, np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))
    np.testing.assert_array_equal(from_vllm(npy(np.asfortranarray(table))), read)


@given(IDS)
def test_what_sglang_writes_is_read_back_by_layers_and_experts_per_token(table: np.ndarray) -> None:
    tokens, layers, top_k = table.shape
    read = from_sglang(raw(table), layers, top_k, 32)
    assert read.shape == (tokens, layers, top_k)
    np.testing.assert_array_equal(read, table)


@given(
    npst.arrays(NPY_DTYPES, npst.array_shapes(min_dims=0, max_dims=4, max_side=4), fill=st.nothing()),
    st.booleans(),
)
def test_any_npy_file_is_read_as_numpy_reads_it(table: np.ndarray, fortran: bool) -> None:
    out = io.BytesIO()
    np.save(out, np.asfortranarray(table) if fortran else table, allow_pickle=False)
    read, expected = read_npy(out.getvalue()), np.load(io.BytesIO(out.getvalue()), allow_pickle=False)
    assert read.dtype == expected.dtype
    assert read.shape == expected.shape
    assert read.tobytes() == expected.tobytes()


@given(
    st.text("()[]{}',:'\"\\0123456789 \n\tdescrfotan_shapTFulei<", max_size=120),
    st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"]),
)
def test_a_header_of_nonsense_is_refused(header: str, version: bytes) -> None:
    size = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    with pytest.raises(ValueError, match="header"):
        read_npy(b"\x93NUMPY" + version + size + header.encode())


@given(npst.arrays(np.int32, SHAPES, elements=st.integers(UNKNOWN, 7)))
def test_pairs_are_counted_one_by_one_and_unknown_ones_left_out(table: np.ndarray) -> None:
    counted = Counter(
        (layer, int(expert))
        for token in table
        for layer, chosen in enumerate(token)
        for expert in chosen
        if expert != UNKNOWN
    )
    counts = count_pairs(table, 8)
    assert counts.shape == (table.shape[1], 8)
    assert counts.sum() == counted.total()
    assert all(counts[at] == times for at, times in counted.items())
    if (table >= 0).all():
        np.testing.assert_array_equal(count_pairs(table.astype(np.uint8), 8), counts)


@given(
    st.text(max_size=300) | st.binary(max_size=300).map(lambda content: base64.b64encode(content).decode())
)
def test_garbage_is_refused_and_never_anything_else(text: str) -> None:
    for read in (lambda: from_vllm(text), lambda: from_sglang(text, 3, 2, 8)):
        try:
            table = read()
        except ValueError:
            continue
        assert table.ndim == 3


@pytest.mark.filterwarnings("ignore:Reading `.npy`")  # of a header in the style of Python 2
@given(IDS, st.data())
def test_a_damaged_array_is_refused_or_is_still_an_array_of_experts(
    table: np.ndarray, data: st.DataObject
) -> None:
    content = bytearray(base64.b64decode(npy(table)))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read = from_vllm(base64.b64encode(bytes(content)).decode(), 32)
    except ValueError:
        return
    assert read.ndim == 3
    assert read.size == 0 or (0 <= read.min() and read.max() < 32)


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


def test_nothing_pickled_is_ever_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        npy(np.array([[[_Evil()]]], dtype=object)),
        base64.b64encode(pickle.dumps(_Evil())).decode(),
    ):
        with pytest.raises(ValueError, match=r"not the base64 of a \.npy"):
            from_vllm(text)
    assert "it ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "experts", "said"),
    [
        (np.zeros((2, 3)), None, "holds no integers"),
        (np.zeros((2, 3), np.int32), None, r"shape \(2, 3\)"),
        (np.zeros((2, 0, 3), np.int32), None, "expected .tokens, layers, k"),
        (np.full((1, 1, 1), 8), 8, "from 8 to 8; expected 0 to 7"),
        (np.full((1, 1, 1), -1), 8, "from -1"),
        (np.full((1, 1, 1), MAX_EXPERTS), None, str(MAX_EXPERTS)),
        (np.array([[["a"]]]), None, "no integers"),
    ],
)
def test_other_arrays_are_refused_in_words(table: np.ndarray, experts: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_vllm(npy(table), experts)


@pytest.mark.parametrize(("layers", "top_k"), [(0, 1), (1, 0), (3, 5), (-1, -1)])
def test_bytes_that_make_no_whole_rows_are_refused(layers: int, top_k: int) -> None:
    with pytest.raises(ValueError, match="are no rows of"):
        from_sglang(raw(np.zeros((7, 2, 2), np.int32)), layers, top_k)


def test_an_array_that_claims_to_be_huge_is_refused_without_the_memory_for_it() -> None:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": "<i4", "fortran_order": False, "shape": (1 << 40, 1 << 10, 8)}
    )
    with pytest.raises(ValueError, match="routed_experts"):
        from_vllm(base64.b64encode(out.getvalue()).decode())


def test_no_tokens_are_no_counts() -> None:
    assert from_vllm(npy(np.zeros((0, 3, 2), np.uint8))).shape == (0, 3, 2)
    assert from_sglang("", 3, 2).shape == (0, 3, 2)
    assert not count_pairs(np.zeros((0, 3, 2), np.int32), 8).any()


def test_sampled_tokens_are_computed_ones_from_the_first_to_the_last() -> None:
    chosen = np.arange(100).repeat(6).reshape(100, 3, 2).astype(np.int16)
    chosen[:20] = chosen[50:60] = UNKNOWN
    found = sampled_tokens(chosen)
    assert found is not None
    assert found.shape == (SAMPLED_TOKENS, 3, 2)
    at = found[:, 0, 0].astype(int)
    assert (at[0], at[-1]) == (20, 99)
    assert (found == at[:, None, None]).all()
    assert not ((at >= 50) & (at < 60)).any()
    assert np.diff(at).max() <= 16
    assert sampled_tokens(chosen[: 20 + SAMPLED_TOKENS - 1]) is None
