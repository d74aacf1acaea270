"""Distinct experts of a step: against exhaustive enumeration, and against sampled routings."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.timing import added_distinct_experts, expected_distinct_experts, log_misses


def counted(profiles: list[list[float]], clusters: list[int], top_k: int) -> float:
    """Return the expected number of distinct experts of one layer: every outcome of every draw, with its
    probability.
    """
    experts = range(len(profiles[0]))
    total = 0.0
    for outcome in product(experts, repeat=top_k * len(clusters)):
        chances = [profiles[clusters[draw // top_k]][expert] for draw, expert in enumerate(outcome)]
        total += len(set(outcome)) * float(np.prod(chances))
    return total


@pytest.mark.parametrize(
    ("clusters", "top_k"), [([0], 1), ([0], 2), ([1], 3), ([0, 1], 2), ([0, 0, 1], 2), ([1, 1], 3)]
)
def test_it_is_what_all_possible_outcomes_say(clusters: list[int], top_k: int) -> None:
    profiles = [[0.7, 0.2, 0.1], [0.05, 0.15, 0.8]]
    misses = log_misses(np.array(profiles)[:, None], top_k)
    tokens = np.bincount(clusters, minlength=2)
    assert expected_distinct_experts(misses, tokens) == pytest.approx(
        counted(profiles, clusters, top_k), rel=1e-5
    )
    for more in (0, 1):
        added = counted(profiles, [*clusters, more], top_k) - counted(profiles, clusters, top_k)
        assert added_distinct_experts(misses, tokens)[more] == pytest.approx(added, rel=1e-4, abs=1e-6)


def test_it_agrees_with_sampled_routings_in_which_a_token_never_chooses_an_expert_twice() -> None:
    chance = np.random.default_rng(0)
    layers, experts, top_k = 3, 64, 4
    logits = chance.normal(0, 0.7, (2, layers, experts))
    profiles = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    tokens = np.array([5, 9])
    of = np.repeat([0, 1], tokens)
    seen = []
    for _ in range(400):
        scores = np.log(profiles[of]) + chance.gumbel(size=(len(of), layers, experts))
        chosen = np.argsort(-scores, axis=2)[..., :top_k]
        seen.append(sum(len(np.unique(chosen[:, layer])) for layer in range(layers)))
    expected = float(expected_distinct_experts(log_misses(profiles, top_k), tokens))
    # independent draws repeat experts slightly more often
    assert expected == pytest.approx(np.mean(seen), rel=0.04)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_what_one_more_adds_is_the_difference_it_makes(seed: int, top_k: int) -> None:
    chance = np.random.default_rng(seed)
    profiles = chance.dirichlet(np.full(12, 0.4), size=(3, 2))
    tokens = chance.integers(0, 6, (4, 3)) * chance.random((4, 3))
    misses = log_misses(profiles, top_k)
    now, added = expected_distinct_experts(misses, tokens), added_distinct_experts(misses, tokens)
    assert added.shape == (4, 3)
    for more in range(3):
        after = expected_distinct_experts(misses, tokens + np.eye(3)[more])
        assert added[:, more] == pytest.approx(after - now, rel=1e-3, abs=2e-4)
    assert (added > -1e-9).all()
    assert (now <= 2 * 12 + 1e-3).all()


def test_nobody_activates_nothing_and_a_crowd_everything() -> None:
    profiles = np.full((1, 2, 16), 1 / 16)
    misses = log_misses(profiles, 2)
    assert expected_distinct_experts(misses, np.zeros(1)) == 0.0
    assert expected_distinct_experts(misses, np.array([10_000.0])) == pytest.approx(32.0)
    assert added_distinct_experts(misses, np.array([10_000.0]))[0] == pytest.approx(0.0, abs=1e-9)


def test_an_expert_that_is_certain_has_a_finite_logarithm() -> None:
    misses = log_misses(np.array([[[1.0, 0.0]], [[0.0, 1.0]]]), 8)
    assert np.isfinite(misses).all()
    assert expected_distinct_experts(misses, np.array([1.0, 0.0])) == pytest.approx(1.0)
    assert added_distinct_experts(misses, np.array([1.0, 0.0])) == pytest.approx([0.0, 1.0], abs=1e-6)
