"""The compiled look-up of a row finds what the table holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.prediction import ROW
from router import kernels
from router.prediction.row_table import WAYS, RowTable

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
