"""Exchanges for sampled tokens are the same in both forms."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.arrays import IntArray
from migration import kernels
from migration.model.sampled_traffic import SampledTokens, destinations
from migration.solvers.load_cap import held_of
from migration.solvers.locality_placement import LocalityProblem
from migration.solvers.token_swaps import exchanged

SEEDS = st.integers(0, 2**32 - 1)


class Case(NamedTuple):
    table: NDArray[np.int16]
    """with replicas and empty slots"""
    tokens: SampledTokens
    judged: SampledTokens
    load: NDArray[np.float64]
    room: LocalityProblem
    ranks: int
    experts: int


def case_of(seed: int) -> Case:
    dice = np.random.default_rng(seed)
    ranks, per, layers = int(dice.integers(1, 9)), int(dice.integers(1, 9)), int(dice.integers(1, 4))
    experts = int(dice.integers(1, ranks * per + 1))
    k = int(dice.integers(1, min(experts, 6) + 1))
    table = np.full((layers, ranks * per), -1, np.int16)
    for row in table:
        slots = dice.permutation(len(row))
        row[slots[:experts]] = dice.permutation(experts)
        for slot in slots[experts:]:
            rank, expert = slot // per, int(dice.integers(experts))
            if dice.random() < 0.4 and expert not in row[rank * per : (rank + 1) * per]:
                row[slot] = expert

    def drawn(tokens: int) -> SampledTokens:
        chosen = np.argsort(dice.random((tokens, layers, experts)) * dice.random(experts), axis=2)[:, :, :k]
        return SampledTokens(chosen.astype(np.uint16), dice.integers(0, ranks, tokens))

    node = np.sort(dice.integers(0, 1 + ranks // 4, ranks))
    load = dice.gamma(1.0, 1.0, (layers, experts)).round(1)
    room = LocalityProblem(node, per, balance=float(dice.choice([0.5, 0.9])))
    tokens, judged = drawn(int(dice.integers(0, 200))), drawn(int(dice.integers(1, 200)))
    return Case(table, tokens, judged, load, room, ranks, experts)


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_placements_after_exchanges_are_the_same(seed: int) -> None:
    case = case_of(seed)
    tokens = case.tokens.thinned(60)
    with kernels.python_form():
        expected = exchanged(case.table, tokens, case.judged, case.load, case.room)
    found = exchanged(case.table, tokens, case.judged, case.load, case.room)
    assert np.array_equal(found, expected)


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_tokens_reach_the_same_ranks(seed: int) -> None:
    case = case_of(seed)
    held = held_of(case.table, case.ranks, case.experts)
    with kernels.python_form():
        expected = destinations(held, case.judged)
    assert all(np.array_equal(*both) for both in zip(destinations(held, case.judged), expected, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    held, one, two = np.ones((1, 2, 3), np.bool_), np.zeros(1, np.int64), np.zeros(2, np.int64)

    def reach(experts: IntArray, homes: IntArray, ranks: int = 2) -> None:
        library.tokens_destinations(held, experts, homes, 1, ranks, np.empty(1), np.empty(1))

    def exchange(experts: IntArray, judged: IntArray, node: IntArray = two, owners: int = 3) -> None:
        library.tokens_exchanged(
            held, experts, one, judged, one, np.ones((1, 3)), node, 1.0,
            0.0, 1, 1, 1, 1, np.zeros(owners, np.int64), np.zeros(1, np.bool_),
        )  # fmt: skip

    for refused, message in (
        (lambda: reach(one + 3, one), "no such expert"),
        (lambda: reach(one, one + 2), "no such rank"),
        (lambda: reach(one, two), "differ in length"),
        (lambda: reach(one, one, 0), "differ in length"),
        (lambda: exchange(one + 3, one), "no such expert"),
        (lambda: exchange(one, one - 1), "no such expert"),
        (lambda: exchange(one, one, np.zeros(3, np.int64)), "differ in length"),
        (lambda: exchange(one, one, owners=2), "differ in length"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()  # type: ignore[no-untyped-call]
