"""Few copies: what is won back, what it costs, and what is never done."""

import numpy as np

from migration.changes import copies_between, made
from migration.few import few
from migration.noise import Noise

LINEAR = np.arange(8, dtype=np.int16)[None, :]


def test_one_swap_evens_out_two_ranks() -> None:
    table = np.array([[0, 1, 2, 3]], np.int16)
    changes = few(table, np.array([[4.0, 3.0, 2.0, 1.0]]), 2, goal=np.array([1.0]))
    after = made(table, changes)
    assert copies_between(table, after, 2) == 2
    assert {frozenset(row) for row in after.reshape(2, 2).tolist()} in ({frozenset({0, 3}), frozenset({1, 2})},)


def test_what_the_sample_explains_is_left_alone() -> None:
    load = np.array([[103.0, 98, 110, 95, 104, 93, 99, 101]])
    assert not few(LINEAR, load, 4, goal=np.array([1.0]), noise=Noise(load.sum()))
    assert few(LINEAR, load, 4, goal=np.array([1.0]))
