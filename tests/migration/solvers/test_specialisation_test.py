"""The specialisation test against exact noise, homogeneous demand and specialised demand."""

import numpy as np
import pytest
from scipy.stats import hypergeom

from benchmarks.rig.placements.popularity import by_rank, domains
from migration.solvers.specialisation_test import Evidence, divergence, expected_noise, gate

LAYERS, EXPERTS, RANKS = 8, 64, 4


def window(special: float, pairs: float, seed: int, skew: str = "topheavy") -> np.ndarray:
    """Poisson counts [ranks, layers, experts] of domains that differ by this much."""
    dice = np.random.default_rng(seed)
    return dice.poisson(
        by_rank(domains(skew, RANKS, special, LAYERS, EXPERTS, dice), RANKS, 0.0) * pairs
    ).astype(float)


@pytest.mark.parametrize("sent", [(40, 60), (200, 20), (500, 700)])
def test_expected_noise_is_the_mean_over_all_ways_to_deal_the_pairs(sent: tuple[int, int]) -> None:
    of_expert = np.array([1, 2, sum(sent) // 3, sum(sent) - 3 - sum(sent) // 3])
    exact = -(np.sum([n * np.log(n) for n in sent]) + (of_expert * np.log(of_expert)).sum())
    for count in of_expert:
        for part in sent:
            x = np.arange(count + 1)
            exact += float((hypergeom.pmf(x, sum(sent), count, part) * x * np.log(np.maximum(x, 1))).sum())
    exact = exact / sum(sent) + np.log(sum(sent))
    dealt = np.outer(sent, of_expert) / sum(sent)
    assert expected_noise(dealt[:, None, :])[0] == pytest.approx(exact, rel=0.03)


def test_divergence_is_nothing_for_one_distribution_and_the_whole_entropy_for_disjoint_ones() -> None:
    same = np.tile(np.arange(1.0, 6.0), (3, 1))[:, None]
    assert divergence(same)[0] == pytest.approx(0.0, abs=1e-12)
    assert divergence(np.eye(4)[:, None])[0] == pytest.approx(np.log(4))


@pytest.mark.parametrize("skew", ["mild", "zipf"])
def test_homogeneous_demand_is_never_taken_for_specialised(skew: str) -> None:
    windows = (window(0.0, pairs, seed, skew) for pairs in (100, 3000) for seed in range(12))
    found = [gate(counts, counts.sum(axis=2)) for counts in windows]
    assert not any(one.specialised for one in found)
    assert all(one.evidence is Evidence.NONE for one in found)
    score = np.array([(one.divergence - one.floor) / one.spread for one in found])
    assert abs(score.mean()) < 0.7
    assert score.std() < 1.6


@pytest.mark.slow
def test_a_thousand_homogeneous_windows_raise_no_alarm() -> None:
    for seed in range(1000):
        counts = window(0.0, 1000, seed, ("mild", "topheavy", "zipf", "lognormal")[seed % 4])
        assert not gate(counts, counts.sum(axis=2)).specialised


@pytest.mark.parametrize("skew", ["topheavy", "zipf", "lognormal"])
def test_a_quarter_of_own_popularity_is_noticed_with_few_thousand_pairs(skew: str) -> None:
    for seed in range(5):
        counts = window(0.25, 2000, seed, skew)
        found = gate(counts, counts.sum(axis=2))
        assert found.specialised
        assert (found.evidence, found.sources) == (Evidence.CLEAR, 4)


def test_units_of_demand_do_not_matter_and_pairs_do() -> None:
    counts = window(0.25, 3000, 1)
    pairs = counts.sum(axis=2)
    assert gate(counts * 1e-3, pairs).floor == pytest.approx(gate(counts, pairs).floor)
    assert gate(counts, pairs.mean(axis=1)).specialised
    assert gate(counts, pairs, dispersion=10.0).floor > 8 * gate(counts, pairs).floor


def test_a_difference_too_small_to_matter_is_no_specialisation_however_certain() -> None:
    share = by_rank(domains("mild", RANKS, 0.1, LAYERS, EXPERTS, np.random.default_rng(0)), RANKS, 0.0)
    found = gate(share, np.full(RANKS, 1e9))
    assert not found.specialised
    assert found.divergence > found.floor + 5 * found.spread
    assert found.evidence is Evidence.TOO_SMALL


@pytest.mark.parametrize("counts", [np.zeros((4, 2, 8)), np.ones((1, 2, 8)), np.full((4, 2, 8), 0.1)])
def test_too_few_pairs_say_nothing(counts: np.ndarray) -> None:
    found = gate(counts, counts.sum(axis=2))
    assert not found.specialised
    assert found.evidence is Evidence.TOO_FEW_PAIRS


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        gate(np.ones((4, 2, 8)), np.ones(3))
    with pytest.raises(ValueError, match="dispersion"):
        gate(np.ones((4, 2, 8)), np.ones(4), dispersion=0.5)
