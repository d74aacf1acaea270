"""Few moves by samples of demand: even single steps, not an even mean."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.placement import EMPTY, Placement
from migration.model.constraints import Constraints
from migration.solvers.full_tables import arrivals, completed
from migration.solvers.sampled_moves import sampled_moves

Samples = NDArray[np.float64]
SEEDS = st.integers(0, 1 << 16)


def fullest(table: NDArray[np.int16], samples: Samples, ranks: int) -> float:
    """Mean over the samples [n, experts] of the fullest rank's load of a layer [slots], in mean rank loads."""
    counts = np.bincount(table, minlength=samples.shape[1])
    loads = np.stack([(samples[:, part] / counts[part]).sum(axis=1) for part in table.reshape(ranks, -1)], 1)
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def texts(dice: np.random.Generator, experts: int, n: int = 40) -> Samples:
    """Samples of few texts at a time, each with experts of its own."""
    profiles = dice.dirichlet(np.full(experts, 0.2), 5)
    return (
        np.stack([dice.poisson(30 * profiles[dice.integers(5, size=2)].sum(axis=0)) for _ in range(n)]) * 1.0
    )


def start(dice: np.random.Generator, experts: int, ranks: int, per: int) -> NDArray[np.int16]:
    rest = dice.integers(0, experts, ranks * per - experts)
    table = dice.permutation(np.concatenate([np.arange(experts), rest])).astype(np.int16)[None]
    return completed(table, np.ones((1, experts)), ranks)


def test_experts_that_are_in_demand_together_are_parted_though_the_mean_is_even() -> None:
    """Experts 0 and 1 are hot in the same steps, 2 and 3 in the others: the mean of both ranks is the same."""
    together = np.array([[8.0, 8.0, 0.0, 0.0], [0.0, 0.0, 8.0, 8.0]] * 10)
    table = np.array([[0, 1, 2, 3]], np.int16)
    found = sampled_moves(table, together[:, None], 2)
    assert fullest(table[0], together, 2) == 2.0
    assert fullest(found[0], together, 2) == 1.0
    assert arrivals(table, found, 2).sum() == 2


@given(seed=SEEDS, size=st.sampled_from([(6, 2, 4), (6, 3, 3), (8, 4, 3), (5, 1, 5)]))
def test_the_table_stays_full_and_legal_and_never_gets_worse(seed: int, size: tuple[int, int, int]) -> None:
    experts, ranks, per = size
    dice = np.random.default_rng(seed)
    samples, table = texts(dice, experts), start(dice, experts, ranks, per)
    found = sampled_moves(table, samples[:, None], ranks)
    assert (found != EMPTY).all()
    Placement(found, experts=experts, ranks=ranks)
    assert fullest(found[0], samples, ranks) <= fullest(table[0], samples, ranks) + 1e-9


@given(seed=SEEDS)
def test_every_received_expert_brings_what_is_asked_of_it(seed: int) -> None:
    dice = np.random.default_rng(seed)
    samples, table = texts(dice, 8), start(dice, 8, 2, 6)
    found = sampled_moves(table, samples[:, None], 2, least=0.02)
    gained = fullest(table[0], samples, 2) - fullest(found[0], samples, 2)
    assert gained >= 0.02 * arrivals(table, found, 2).sum() - 1e-9


@given(seed=SEEDS)
def test_experts_in_cooldown_stay_and_no_expert_gets_more_replicas_than_allowed(seed: int) -> None:
    dice = np.random.default_rng(seed)
    samples, table = texts(dice, 8), start(dice, 8, 4, 3)
    frozen = dice.random((1, 8)) < 0.3
    found = sampled_moves(table, samples[:, None], 4, Constraints(frozen=frozen, max_replicas=2))
    for expert in np.flatnonzero(frozen[0]):
        assert ((found == expert) == (table == expert)).all()
    before, after = (np.bincount(one[0], minlength=8) for one in (table, found))
    assert (after <= np.maximum(before, 2)).all()


def test_most_of_the_gain_of_the_best_of_all_maps_is_found_by_few_single_moves() -> None:
    """Brute force: every pair of sets that two ranks may hold."""
    experts, per, parts = 6, 4, []
    sets = [set(some) for some in combinations(range(experts), per)]
    maps = [[*one, *other] for one in sets for other in sets if len(one | other) == experts]
    for seed in range(10):
        dice = np.random.default_rng(seed)
        samples, table = texts(dice, experts), start(dice, experts, 2, per)
        least = min(fullest(np.array(one), samples, 2) for one in maps)
        begin = fullest(table[0], samples, 2)
        end = fullest(sampled_moves(table, samples[:, None], 2)[0], samples, 2)
        parts.append((begin - end) / (begin - least) if begin - least > 1e-3 else 1.0)
    assert np.mean(parts) > 0.65
    assert np.median(parts) > 0.85


def test_layers_without_demand_stay_as_they_are() -> None:
    table = np.array([[0, 1, 2, 3]], np.int16)
    assert (sampled_moves(table, np.zeros((9, 1, 4)), 2) == table).all()
