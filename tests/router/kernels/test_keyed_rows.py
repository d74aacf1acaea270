"""The compiled look-up of a row finds what the table holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.blocks import SEED
from fleet.prediction import ROW, longest_known
from router import kernels
from router.prediction.row_table import WAYS, RowTable
from router.prefix_index.block_hash_chain import BlockHashChain

KEYS = st.integers(1, 40) | st.integers(1, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(KEYS, min_size=1, max_size=80), st.lists(st.integers(-(2**70), 2**70) | KEYS, max_size=20))
def test_both_forms_find_the_same_rows(stored: list[int], asked: list[int]) -> None:
    table = RowTable(1, 0)  # one set, which evicts
    wide = RowTable(1 << 20, 80)
    rows = np.arange(len(stored) * ROW, dtype=np.uint8).reshape(-1, ROW) | 1
    for one in (table, wide):
        one.put(np.array(stored, np.uint64), rows)
        with kernels.python_form():
            expected = [one.get(key) for key in (*stored, *asked, 0)]
        assert [one.get(key) for key in (*stored, *asked, 0)] == expected
        assert one.get(0, b"none") == b"none"
    assert all(wide.get(key) is not None for key in stored)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=1200),
    size=st.integers(1, 20),
    known=st.floats(0, 1),
    missing=st.sets(st.integers(0, 1200), max_size=3),
    guess=st.integers(0, 200),
    computed=st.integers(0, 40),
)
def test_both_forms_find_the_same_known_prefix(
    ids: list[int], size: int, known: float, missing: set[int], guess: int, computed: int
) -> None:
    prefix, table = BlockHashChain(ids, size, SEED), RowTable(1 << 20, 1200)
    held = [hash for at, hash in enumerate(prefix[: round(known * len(prefix))]) if at not in missing]
    table.put(
        np.array(held, np.uint64), np.arange(len(held) * ROW, dtype=np.uint8).reshape(-1, ROW) | np.uint8(1)
    )
    asked, oracle = BlockHashChain(ids, size, SEED), BlockHashChain(ids, size, SEED)
    asked.reach(min(computed, len(asked)))
    oracle.reach(min(computed, len(oracle)))
    assert table.longest_known(asked, guess) == longest_known(table, oracle, guess)
    assert len(asked.hashes) == len(oracle.hashes), "no more is hashed than the search reads"
    assert list(asked) == list(prefix)


def test_the_search_refuses_an_id_outside_u32() -> None:
    table = RowTable(1 << 20, 10)
    for ids in ([1, 2**32], [-1, 1]):
        with pytest.raises(OverflowError):
            table.longest_known(BlockHashChain(ids, 2, SEED), 0)


def test_tables_that_do_not_fit_are_refused() -> None:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    keys, rows = np.arange(2 * WAYS, dtype=np.uint64), memoryview(bytes(2 * WAYS * ROW))
    assert library.keyed_row(99, keys, rows, WAYS, ROW, ROW) is None
    for wrong in (
        (99, keys, rows[:-1], WAYS, ROW, ROW),
        (99, keys, rows, 0, ROW, ROW),
        (99, keys, rows, WAYS, ROW, ROW + 1),
        (99, keys[:0], rows, WAYS, ROW, ROW),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            library.keyed_row(*wrong)
    with pytest.raises(TypeError):
        library.keyed_row("1", keys, rows, WAYS, ROW, ROW)  # type: ignore[arg-type]
