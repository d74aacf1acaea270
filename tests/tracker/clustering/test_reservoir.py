"""A decayed sample of requests against the decayed sums that it estimates."""

from math import exp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracker.clustering.reservoir import OVERHEAD, Reservoir, counts

T = 100.0


def offered(reservoir: Reservoir, number: int, at: float, cells: int = 4) -> None:
    prompt = np.arange(cells) + number
    reservoir.learn(prompt, prompt[::-1], at)


@given(st.integers(1, 40), st.integers(0, 100))
def test_while_there_is_room_everything_is_kept_and_weighs_by_its_age(capacity: int, seed: int) -> None:
    reservoir, times = (
        Reservoir(capacity, 4, T, steps=1),
        np.sort(np.random.default_rng(seed).uniform(0, T, capacity)),
    )
    for number, at in enumerate(times):
        offered(reservoir, number + 1, float(at))
    samples = reservoir.samples()
    assert len(samples) == capacity
    oldest_first = reservoir.weights(sorted(samples, key=lambda sample: sample.number))
    np.testing.assert_allclose(oldest_first, [exp(-(times[-1] - at) / T) for at in times], rtol=1e-9)


def test_when_full_the_weights_still_add_up_to_the_decayed_number_of_requests() -> None:
    """Oracle: the sum of exp(-age / T) over all offered samples; bottom-k estimates are unbiased."""
    estimates, random = [], np.random.default_rng(0)
    times = np.sort(random.uniform(0, 3 * T, 400))
    expected = sum(exp(-(times[-1] - at) / T) for at in times)
    for repeat in range(40):
        reservoir = Reservoir(50, 4, T, steps=1)
        for number, at in enumerate(times):
            offered(reservoir, 1 + number + 1000 * repeat, float(at))
        assert len(reservoir) == 50
        estimates.append(reservoir.weights(reservoir.samples()).sum())
    error = np.std(estimates) / len(estimates) ** 0.5
    assert np.mean(estimates) == pytest.approx(expected, abs=4 * error)


def test_the_old_make_way_for_the_new() -> None:
    reservoir = Reservoir(20, 4, T, steps=4)
    for number in range(1, 400):
        offered(reservoir, number, 50.0 * number)
    assert min(sample.number for sample in reservoir.samples()) > 300


@given(st.integers(0, 1000), st.integers(1, 60))
def test_which_are_kept_depends_on_the_clock_not_on_the_order_within_a_moment(seed: int, count: int) -> None:
    random, kept = np.random.default_rng(seed), []
    for order in (range(count), random.permutation(count)):
        reservoir = Reservoir(10, 4, T)
        for number in order:
            offered(reservoir, int(number) + 1, 7.0)
        kept.append([(sample.key, sample.roots) for sample in reservoir.samples()])
    assert kept[0] == kept[1]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 100_000), min_size=6, max_size=6),
    st.lists(st.integers(0, 300), min_size=6, max_size=6),
)
def test_counts_come_back_within_the_noise_of_counting(prompt: list[int], completion: list[int]) -> None:
    reservoir = Reservoir(2, 6, T)
    reservoir.learn(np.array(prompt), np.array(completion), 0.0)
    if not any(prompt + completion):
        assert len(reservoir) == 0
        return
    (back,), (back_completion,) = counts(reservoir.samples())
    for given_counts, found in ((prompt, back), (completion, back_completion)):
        assert found.sum() == pytest.approx(sum(given_counts), rel=1e-5)
        largest = max(given_counts)
        # the stored root is off by half a unit at most, before the sum is normalised
        bound = np.sqrt(np.array(given_counts)) * np.sqrt(largest) / 255 + largest / 255**2 / 4
        assert (np.abs(found - given_counts) <= bound + 0.01 * np.array(given_counts) + 1e-6).all()


def test_memory_is_bounded_by_what_is_kept() -> None:
    reservoir = Reservoir(8, 100, T)
    for number in range(50):
        reservoir.learn(np.full(100, number + 1), np.zeros(100), float(number))
    assert reservoir.stored_bytes == 8 * (200 + OVERHEAD)
    assert reservoir.received == 50


def test_a_clock_that_goes_back_or_leaps_does_no_harm() -> None:
    reservoir = Reservoir(8, 4, T)
    for number, at in enumerate((0.0, 1e9, -1e9, 5.0)):
        offered(reservoir, number + 1, at)
    weights = reservoir.weights(reservoir.samples())
    assert ((weights > 0.9) & (weights <= 1.0)).all()


def test_a_smaller_reservoir_takes_over_what_counts_most() -> None:
    large, small = Reservoir(20, 4, T), Reservoir(5, 4, T)
    for number in range(20):
        offered(large, number + 1, 1.0)
    small.restore(large.state())
    assert small.samples() == large.samples()[:5]
    assert small.weights(small.samples()).sum() > 5
