"""The compiled loops and their numpy forms give the same bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.placement import EMPTY
from migration import kernels
from migration.solvers.split_copies import split_copies
from migration.solvers.split_weights import reweight
from tests.migration.kernels.cases import Case, cases


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([None, 1e3, 1e5]))
def test_shares_are_the_same(case: Case, pairs: float | None) -> None:
    def found() -> list[NDArray[np.uint16]]:
        return list(reweight(case.table, case.demand, case.ranks, case.experts, case.node, pairs=pairs))

    with kernels.python_form():
        expected = found()
    assert all(np.array_equal(one, two) for one, two in zip(found(), expected, strict=True))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_few_copies_are_the_same(case: Case) -> None:
    with kernels.python_form():
        expected = split_copies(
            case.table, case.demand, case.ranks, case.experts, case.limits, node=case.node
        )
    found = split_copies(case.table, case.demand, case.ranks, case.experts, case.limits, node=case.node)
    assert np.array_equal(found.table, expected.table)
    assert all(np.array_equal(one, two) for one, two in zip(found.split, expected.split, strict=True))
    assert all(np.array_equal(one, two) for one, two in zip(found.changes, expected.changes, strict=True))


def test_wrong_arrays_are_refused() -> None:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    rank, group, numbers = np.array([0, 1]), np.array([0, 0]), np.zeros(2)
    with pytest.raises(ValueError, match="no such rank"):
        library.flow(rank + 1, group, numbers, 1, numbers, None, 1, 0.0, numbers.copy())
    with pytest.raises(ValueError, match="no such group"):
        library.flow(rank, group - 1, numbers, 1, numbers, None, 1, 0.0, numbers.copy())
    with pytest.raises(ValueError, match="differ in length"):
        library.flow(rank, group, numbers, 1, numbers, None, 1, 0.0, np.zeros(3))
    with pytest.raises(ValueError, match="expected 'd'"):
        library.flow(rank, group, numbers, 1, numbers.astype(np.float32), None, 1, 0.0, np.zeros(2))
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        library.flow(rank, group, numbers, 1, np.zeros(4)[::2], None, 1, 0.0, np.zeros(2))


def test_copies_without_slots_or_with_too_few_flows_are_refused() -> None:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    one, number, no, none = np.zeros(1, np.intp), np.ones(1), np.zeros(2, bool), np.zeros(0, np.int16)
    free = one - 1, one.copy(), one - 1, number.copy(), np.ones(2)  # a column for the copy, and loads
    with pytest.raises(ValueError, match="differ in length"):
        library.overflow_admit(one, one, no, none, number, one + 1, *free)
    table, rows = np.zeros(1, np.int16), (one, one)
    arrays = (number, table, table, *rows, *rows, no[:1], None, None, number, no, number.copy(), number)
    library.overflow_promises(one, one, number, number, *arrays)
    with pytest.raises(ValueError, match="differ in length"):
        library.overflow_promises(one, one, number, np.ones(0), *arrays)
    with pytest.raises(ValueError, match="differ in length"):
        library.overflow_promises(one, one, None, None, *arrays)


def test_the_python_form_serves_while_it_is_asked_for() -> None:
    with kernels.python_form():
        assert kernels.compiled() is None
    assert kernels.compiled() is not None, kernels.missing
    assert kernels.missing == ""
    assert EMPTY == -1, "the C sources rely on it"
