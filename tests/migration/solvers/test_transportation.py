"""The transportation problem, compared with a linear programme; both forms find the same, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from migration import kernels
from migration.solvers.transportation import transported


def best(value: NDArray[np.float64], supply: NDArray[np.float64], room: NDArray[np.float64]) -> float:
    """Return the greatest total value, by HiGHS."""
    rows, columns = value.shape
    each, full = np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))
    found = linprog(-value.ravel(), A_ub=full, b_ub=room, A_eq=each, b_eq=supply, method="highs")
    assert found.status == 0
    return -float(found.fun)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([None, 0, 1]),
    st.booleans(),
    st.sampled_from([0.0, 1e-6, 0.5]),
)
def test_what_is_carried_is_worth_as_much_as_a_linear_programme_finds(
    seed: int, rows: int, columns: int, ties: int | None, even: bool, spare: float
) -> None:
    dice = np.random.default_rng(seed)
    value = dice.random((rows, columns)) if ties is None else dice.random((rows, columns)).round(ties)
    supply = np.full(rows, 1.0 / rows) if even else dice.dirichlet(np.full(rows, 0.5))
    room = np.full(columns, 1.0 / columns) + spare if even else dice.dirichlet(np.ones(columns)) + spare
    room[-1] += max(supply.sum() - room.sum(), 0.0)
    found = transported(value, supply, room)
    assert found.min() >= -1e-15
    assert found.sum(axis=1) == pytest.approx(supply)
    assert (found.sum(axis=0) <= room + 1e-12).all()
    # HiGHS keeps constraints to within 1e-7 of them.
    assert (found * value).sum() >= best(value, supply, room) - 1e-6
    with kernels.python_form():
        assert np.array_equal(transported(value, supply, room), found)


def test_the_forms_agree_at_full_size() -> None:
    dice = np.random.default_rng(0)
    value, supply, room = dice.random((64, 64)), dice.dirichlet(np.full(64, 3.0)), np.full(64, 1 / 64 + 1e-6)
    found = transported(value, supply, room)
    assert np.count_nonzero(found) <= 64 + 64
    assert (found * value).sum() == pytest.approx(best(value, supply, room), abs=1e-6)
    with kernels.python_form():
        assert np.array_equal(transported(value, supply, room), found)


def test_room_that_is_short_by_the_rounding_of_sums_is_enough() -> None:
    value, supply, room = np.eye(2), np.array([0.7, 0.3]), np.array([0.7, np.nextafter(0.3, 0.0)])
    assert transported(value, supply, room) == pytest.approx(np.diag(supply))


def test_supplies_without_room_and_values_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"room for 0.5.* supplies of 1.0"):
        transported(np.ones((2, 2)), np.full(2, 0.5), np.full(2, 0.25))
    with pytest.raises(ValueError, match="not finite"):
        transported(np.full((2, 2), np.nan), np.full(2, 0.5), np.full(2, 0.5))


def test_an_order_that_lacks_cells_is_refused() -> None:
    library = kernels.compiled()
    if library is None:
        pytest.skip("no library")
    with pytest.raises(ValueError, match="lacks cells"):
        library.transported(
            np.zeros((2, 2)), np.zeros(4, np.int64), np.ones(2), np.ones(2), 10, 0.0, np.zeros((2, 2))
        )
