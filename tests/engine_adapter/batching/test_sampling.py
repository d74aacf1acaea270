"""Sampling against a row-by-row reference, and against the distribution it claims."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.batching.sampling import GREEDY, Draw, Sampling, logprobs, probabilities, sample, uniform

all_options = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    seed=st.integers(-(2**70), 2**70),
)


def reference(logits: list[float], options: Sampling) -> list[float]:
    """One row with plain Python floats and sorted lists."""
    peak = max(logits)
    weights = [math.exp((value - peak) / options.temperature) for value in logits]
    if 0 < options.top_k < len(weights):
        smallest = sorted(logits, reverse=True)[options.top_k - 1]
        weights = [
            weight if value >= smallest else 0.0 for weight, value in zip(weights, logits, strict=True)
        ]
    total = math.fsum(weights)
    chances = [weight / total for weight in weights]
    if options.top_p < 1:
        mass, smallest = 0.0, 0.0
        for chance in sorted(chances, reverse=True):
            mass, smallest = mass + chance, chance
            if mass >= options.top_p:
                break
        chances = [chance if chance >= smallest else 0.0 for chance in chances]
    return [chance / math.fsum(chances) for chance in chances]


def rows(seed: int, count: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (count, vocabulary)).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(all_options.filter(lambda options: options.temperature > 0), min_size=1, max_size=6),
    st.integers(0, 1000),
    st.sampled_from([2, 17, 256]),
)
def test_every_row_has_the_reference_distribution(batch: list[Sampling], seed: int, vocabulary: int) -> None:
    logits = rows(seed, len(batch), vocabulary)
    found = probabilities(
        logits,
        *(
            np.array([getattr(options, name) for options in batch])
            for name in ("temperature", "top_k", "top_p")
        ),
    )
    found = found / found.sum(axis=1, keepdims=True)
    for row, options in enumerate(batch):
        np.testing.assert_allclose(found[row], reference(logits[row].tolist(), options), atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(all_options, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_row_is_sampled_alike_alone_and_in_any_batch(batch: list[Sampling], seed: int) -> None:
    logits = rows(seed, len(batch), 64)
    draws = [Draw(options, 100 + row) for row, options in enumerate(batch)]
    together = sample(logits, draws).tolist()
    assert together == [int(sample(logits[row : row + 1], [draw])[0]) for row, draw in enumerate(draws)]
    assert together == sample(logits[::-1], draws[::-1]).tolist()[::-1]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    count = 20_000
    options = Sampling(temperature=1.0, top_p=0.9, seed=7)
    tokens = sample(np.repeat(logits, count, axis=0), [Draw(options, position) for position in range(count)])
    shares = np.bincount(tokens, minlength=4) / count
    np.testing.assert_allclose(
        shares, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0], atol=4 * math.sqrt(0.25 / count)
    )


def test_random_numbers_depend_on_seed_and_position_alone_and_are_even() -> None:
    assert uniform(3, 9) == uniform(3, 9) == uniform(3 + 2**64, 9)
    assert len({uniform(seed, position) for seed in range(30) for position in range(30)}) == 900
    numbers = np.array([uniform(1, position) for position in range(20_000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0] / 20_000, 0.1, atol=0.01)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(np.array([[1, 5, 5, 0]], np.float32), [Draw(GREEDY, 0)]).tolist() == [1]


def test_a_tiny_temperature_is_greedy_and_overflows_nothing() -> None:
    logits = rows(3, 4, 50)
    draws = [
        Draw(Sampling(temperature=temperature, seed=row), row)
        for row, temperature in enumerate((1e-6, 1e-300, 5e-324, 1e-12))
    ]
    assert sample(logits, draws).tolist() == logits.argmax(axis=1).tolist()


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.array([[-np.inf, 0.0, -np.inf, 0.0]], np.float32)
    drawn = {int(sample(logits, [Draw(Sampling(seed=1), position)])[0]) for position in range(50)}
    assert drawn == {1, 3}


def test_a_row_without_numbers_is_an_error_that_names_it() -> None:
    logits = rows(0, 3, 8)
    logits[1, 4] = np.nan
    with pytest.raises(ArithmeticError, match="row 1"):
        sample(logits, [Draw(GREEDY, 0)] * 3)


def test_log_probabilities_are_those_of_the_model_and_ordered() -> None:
    logits = rows(5, 3, 40)
    tokens = np.array([4, 0, 39])
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for row, (found, count) in enumerate(zip(logprobs(logits, tokens, [0, 5, 100]), [0, 5, 40], strict=True)):
        assert found.chosen == pytest.approx(exact[row, tokens[row]], abs=1e-9)
        assert [token for token, _ in found.top] == np.argsort(-exact[row], kind="stable")[:count].tolist()
        assert [value for _, value in found.top] == pytest.approx(
            sorted(exact[row], reverse=True)[:count], abs=1e-9
        )
