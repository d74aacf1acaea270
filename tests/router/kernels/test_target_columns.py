"""The compiled operations on numbers of all targets give what their Python form gives, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import kernels
from router.fleet_state.engine_state import PriceList
from router.scheduling.cost import uncached_tokens
from router.scheduling.policies import PolicyChoice, PolicyRules, choose
from tests.router.decision_builders import view_of

SEEDS = st.integers(0, 2**32 - 1)
TARGETS = st.integers(1, 70)


def _library() -> kernels.DecisionKernels:
    library = kernels.compiled()
    assert library is not None, kernels.missing
    return library


@given(SEEDS, TARGETS, st.integers(0, 40_000))
def test_uncached_tokens_are_the_same_in_both_forms(seed: int, targets: int, prompt: int) -> None:
    chance = np.random.default_rng(seed)
    overlap, size = chance.integers(0, 900, targets), chance.choice([1, 16, 64], targets)
    with kernels.python_form():
        expected = uncached_tokens(prompt, overlap, size)
    found = uncached_tokens(prompt, overlap, size)
    assert found.tolist() == expected.tolist()
    assert found.dtype == expected.dtype


@given(SEEDS, TARGETS, st.integers(1, 6))
def test_the_largest_numbers_are_those_of_numpy(seed: int, targets: int, rows: int) -> None:
    table = np.random.default_rng(seed).integers(-(2**62), 2**62, (rows, targets))
    assert list(_library().maxima(rows, targets, table)) == table.max(axis=1).tolist()


@settings(max_examples=300, deadline=None)
@given(SEEDS, TARGETS, SEEDS)
def test_both_forms_choose_the_same_candidate(seed: int, targets: int, drawn: int) -> None:
    """Scores and work are often equal, or differ by rounding."""
    chance = np.random.default_rng(seed)
    score = chance.choice([0.0, 3.0, 50.0, 900.0], targets) + chance.choice([0.0, 1e-14, 1e-3], targets)
    work = chance.choice([0.0, 0.5, 1.5], targets)

    def chosen() -> PolicyChoice:
        return choose(PolicyRules(), score, "ms", score, work, drawn, None)

    with kernels.python_form():
        expected = chosen()
    assert chosen() == expected


@given(SEEDS, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 40))
def test_both_forms_mix_the_prices_of_clusters_alike(seed: int, members: list[int], clusters: int) -> None:
    chance = np.random.default_rng(seed)
    view, _ = view_of(*({"ranks": ranks} for ranks in members))
    prices = PriceList(view.target_table("demo"), clusters)
    for part in (prices.remote, prices.nodes, prices.local, prices.distinct):
        part[:] = chance.gamma(1.0, 3.0, part.shape)
    weights = chance.dirichlet(np.full(clusters, 0.3)).astype(np.float32)
    with kernels.python_form():
        expected = prices.of(weights)
    for one, other in zip(prices.of(weights), expected, strict=True):
        assert one.tolist() == other.tolist()
    remote, nodes, local, added = expected
    engine = np.repeat(np.arange(len(members)), members)
    for mixed, by_cluster in (
        (remote, prices.remote),
        (nodes, prices.nodes),
        (local, prices.local),
        (added, prices.distinct[engine]),
    ):
        assert mixed == pytest.approx(by_cluster.astype(float) @ weights.astype(float), rel=1e-5)


def test_columns_of_another_length_are_refused() -> None:
    library, whole, real = _library(), np.zeros(3, np.int64), np.zeros(3)
    single = np.zeros(12, np.float32)
    for refused in (
        lambda: library.maxima(1, 2, whole),
        lambda: library.maxima(1, 0, whole),
        lambda: library.uncached(2, 9, whole, whole, whole),
        lambda: library.uncached(3, 9, whole, whole, real),  # type: ignore[arg-type]
        lambda: library.cheapest(4, real, real, 0.0, 0),
        lambda: library.cheapest(0, real, real, 0.0, 0),
        lambda: library.cheapest(3, real + np.nan, real, 0.0, 0),
        lambda: library.mixed(1, 12, single, single[:1], 4, np.zeros(4, np.intp), np.zeros(16)),  # no engine
        lambda: library.mixed(1, 4, single[:4], single[:1], 1, np.ones(1, np.intp), np.zeros(4)),
        lambda: library.mixed(1, 3, single[:3], single[:1], 4, np.zeros(4, np.intp), np.zeros(16)),
    ):
        with pytest.raises(ValueError, match=r"expected|targets|not a number|no such engine"):
            refused()  # type: ignore[no-untyped-call]
