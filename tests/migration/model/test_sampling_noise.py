"""Overdispersion of pairs, estimated from the difference between two windows."""

import numpy as np
import pytest

from migration.model.sampling_noise import scatter

SHARES = np.random.default_rng(5).dirichlet(np.full(64, 2.0), 8)


@pytest.mark.parametrize("repeats", [1, 4, 10])
def test_pairs_that_come_in_bunches_count_as_many_times_less(repeats: int) -> None:
    dice = np.random.default_rng(repeats)
    windows = [
        np.stack([repeats * dice.multinomial(20_000 // repeats, share) for share in SHARES]) for _ in range(2)
    ]
    assert scatter(*windows) == pytest.approx(repeats, rel=0.2)


def test_windows_of_different_lengths_differ_by_their_mix_alone() -> None:
    dice = np.random.default_rng(1)
    short, long = (
        np.stack([dice.multinomial(pairs, share) for share in SHARES]) for pairs in (5_000, 80_000)
    )
    assert scatter(short, long) == pytest.approx(1.0, abs=0.2)


def test_what_cannot_be_compared_scatters_as_independent_pairs_do() -> None:
    assert scatter(np.zeros((2, 4)), np.zeros((2, 4))) == 1.0
    assert scatter(np.array([[5.0, 0.0]]), np.array([[5.0, 0.0]])) == 1.0
