"""Compiled loops over rows compute what exact arithmetic does, for all lengths of rows; routing as torch does."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_adapter.embedded import kernels
from engine_adapter.embedded.kernels.row_operations import product, rms_norm, swiglu, weighted_sum
from engine_adapter.embedded.moe import GroupedMatrices, route
from tests.engine_adapter.layer_forms import FORMS, KINDS, TORCH, computed_by

pytestmark = pytest.mark.skipif(not KINDS, reason=kernels.missing)
LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([128, 192, 200]))


@pytest.fixture(params=FORMS, autouse=True, scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.set_num_threads(1)
    with computed_by(request.param):
        yield request.param


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, exact: torch.Tensor, scale: float = 1.0) -> bool:
    return bool((found.double() - exact).abs().max() <= 2e-6 * scale)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 140), LENGTHS, LENGTHS, st.booleans(), st.integers(0, 2**31))
def test_a_product_is_the_exact_one_rounded(
    rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    given_rows, wide = normal(seed, rows, inputs), normal(seed + 1, outputs, inputs + 5)
    matrix, bias = wide[:, 2 : inputs + 2], normal(seed + 2, outputs)
    found = product(given_rows, matrix, bias if biased else None)
    exact = given_rows.double() @ matrix.double().t() + (bias.double() if biased else 0.0)
    assert close(found, exact, inputs)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), LENGTHS, LENGTHS, st.booleans(), st.data())
def test_each_slot_multiplies_its_rows_by_its_matrix(
    counts: list[int], inputs: int, outputs: int, by_input: bool, data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 2**31))
    matrices = [normal(seed + slot, inputs, outputs) for slot in range(len(counts))]
    stored = matrices if by_input else [one.t().contiguous().t() for one in matrices]
    rows = normal(seed + 100, sum(counts), inputs)
    ends = torch.tensor(np.cumsum(counts), dtype=torch.int32)
    found = GroupedMatrices(stored).product(rows, ends)
    parts = zip(rows.double().split(counts), matrices, strict=True)
    exact = torch.cat([part @ matrix.double() for part, matrix in parts])
    assert found.shape == (sum(counts), outputs)
    assert not len(rows) or close(found, exact, inputs)


@settings(deadline=None)
@given(st.integers(1, 20), LENGTHS, st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_rows_are_scaled_to_a_mean_square_of_one(rows: int, width: int, size: float, seed: int) -> None:
    given_rows, weight = size * normal(seed, rows, width), normal(seed + 1, width)
    exact = given_rows.double()
    exact = exact / (exact.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert close(rms_norm(given_rows, weight, 1e-6), exact, float(exact.abs().max()))


@settings(deadline=None)
@given(st.integers(1, 20), LENGTHS, st.floats(1e-3, 1e3), st.integers(0, 2**31))
def test_gates_scale_their_values(rows: int, width: int, size: float, seed: int) -> None:
    both = size * normal(seed, rows, 2 * width)
    gate, up = both.double().chunk(2, dim=1)
    exact = gate / (1 + torch.exp(-gate)) * up
    assert close(swiglu(both), exact, max(1.0, float(exact.abs().max())))


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), LENGTHS, st.integers(0, 2**31))
def test_the_results_of_a_tokens_pairs_are_weighted_and_added(
    tokens: int, k: int, width: int, seed: int
) -> None:
    rows, weights = normal(seed, tokens * k, width), normal(seed + 1, tokens, k)
    row_of_pair = np.random.default_rng(seed).permutation(tokens * k)
    exact = (rows[row_of_pair].double().view(tokens, k, width) * weights.double()[:, :, None]).sum(dim=1)
    found = weighted_sum(rows.clone(), row_of_pair, weights)
    assert close(found, exact, k)
    with computed_by(TORCH):
        assert torch.equal(weighted_sum(rows, row_of_pair, weights), found), "rounded alike"


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(2, 130), st.booleans(), st.integers(0, 2**31))
def test_the_likeliest_experts_are_chosen_the_best_first(
    tokens: int, experts: int, normalise: bool, seed: int
) -> None:
    k = 1 + seed % min(experts, 8)
    hidden, gate = normal(seed, tokens, 24), normal(seed + 1, experts, 24)
    found = route(hidden, gate, k, normalise)
    chances = torch.softmax(hidden.double() @ gate.double().t(), dim=-1)
    weights = chances.gather(1, torch.from_numpy(found.experts))
    assert close(weights, chances.topk(k).values)
    assert all(len(set(row)) == k for row in found.experts.tolist())
    assert close(found.weights, weights / weights.sum(dim=1, keepdim=True) if normalise else weights)


def test_of_equally_likely_experts_the_first_are_chosen(form: str) -> None:
    if form == TORCH:
        pytest.skip("torch leaves that open")
    found = route(torch.ones(3, 4), torch.zeros(9, 4), 3, normalise=True)
    assert found.experts.tolist() == [[0, 1, 2]] * 3


def bits(values: torch.Tensor) -> NDArray[np.int32]:
    return values.numpy().view(np.int32)


@settings(deadline=None)
@given(st.integers(1, 90), LENGTHS, LENGTHS, st.integers(0, 2**31))
def test_a_row_has_the_same_bits_wherever_it_is_in_whichever_batch(
    rows: int, width: int, outputs: int, seed: int
) -> None:
    """Compiled loops alone: products by torch need padding (test_row_bits)."""
    pool, matrix, weight = normal(seed, 5, width), normal(seed + 1, outputs, width), normal(seed + 2, width)
    which = torch.from_numpy(np.random.default_rng(seed).integers(0, 5, rows))
    padding = seed % 7
    batch = torch.cat([torch.zeros(padding), pool[which].ravel()])[padding:].view(rows, width)
    calls = [lambda some: rms_norm(some, weight, 1e-6)]
    if kernels.compiled() is not None:
        calls += [
            lambda some: product(some, matrix),
            lambda some: swiglu(some[:, : width // 2 * 2].contiguous()),
        ]
    for call in calls:
        alone = torch.cat([call(row[None]) for row in pool])
        assert np.array_equal(bits(call(batch)), bits(alone[which]))
