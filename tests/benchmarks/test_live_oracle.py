"""Hindsight about homes and placement, against all possibilities of small worlds."""

from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.rig.live.oracle import Recorded, best_alternation, best_ranks, remote_by_rank
from fleet.placement import linear

RANKS, EXPERTS, SLOTS, TOKENS = 2, 4, 2, 6


def some_requests(seed: int) -> Recorded:
    """Four requests of one layer, whose tokens choose one expert each; each request has its favourites."""
    random = np.random.default_rng(seed)
    likes = random.dirichlet(np.full(EXPERTS, 0.4), 4)
    experts = np.stack([random.choice(EXPERTS, TOKENS, p=one) for one in likes])
    return Recorded(experts.astype(np.uint8)[:, :, None, None], np.ones((4, TOKENS), np.bool_), EXPERTS)


def least_remote(experts: NDArray[np.uint8]) -> float:
    """Try every placement with one replica per expert, and every even assignment of requests."""
    even = [one for one in product(range(RANKS), repeat=len(experts)) if sum(one) == len(experts) // RANKS]
    placements = [
        np.isin(np.arange(EXPERTS), held).astype(int) for held in combinations(range(EXPERTS), SLOTS)
    ]
    served = [rank_of[experts[:, :, 0, 0]] for rank_of in placements]
    return min(float((one != np.array(ranks)[:, None]).mean()) for one in served for ranks in even)


@pytest.mark.parametrize("seed", range(12))
def test_the_alternation_finds_what_trying_everything_finds(seed: int) -> None:
    requests = some_requests(seed)
    best = best_alternation(requests, ranks=RANKS, slots=SLOTS, balance=0.01)
    assert best.remote_ranks == pytest.approx(least_remote(requests.experts), abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_experts_that_tokens_need_together_are_placed_nearly_as_trying_everything_places_them(
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    first = random.integers(0, 4, (8, 40))
    # Each expert below 4 has a companion that comes along nine times in ten.
    second = np.where(random.random(first.shape) < 0.9, first + 4, random.integers(4, 8, first.shape))
    experts = np.stack([first, second], axis=2)[:, :, None].astype(np.uint8)
    requests = Recorded(experts, np.ones(first.shape, np.bool_), 8)
    even = [one for one in product(range(RANKS), repeat=8) if sum(one) == 4]
    least = 2.0
    for held in combinations(range(8), 4):
        served = np.isin(np.arange(8), held).astype(int)[experts[:, :, 0]]
        away = np.stack([(served != home).any(axis=2).mean(axis=1) for home in range(RANKS)])
        least = min(least, min(float(away[list(homes), range(8)].mean()) for homes in even))
    best = best_alternation(requests, ranks=RANKS, slots=4, balance=0.01).remote_ranks
    assert least - 1e-6 <= best < least + 0.02


def test_a_balanced_placement_reaches_no_fewer_ranks_than_one_that_need_not_be() -> None:
    requests = some_requests(0)
    free = best_alternation(requests, ranks=RANKS, slots=SLOTS, balance=0.01)
    assert best_alternation(requests, ranks=RANKS, slots=SLOTS).remote_ranks >= free.remote_ranks


def test_requests_go_where_they_reach_fewest_ranks_while_ranks_have_room() -> None:
    requests = some_requests(3)
    placement = linear(layers=1, experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS)
    remote = remote_by_rank(requests, placement)
    assert remote.shape == (4, RANKS)
    np.testing.assert_allclose(remote.sum(axis=1), 1.0)
    even, free = best_ranks(requests, placement), best_ranks(requests, placement, room=RANKS)
    np.testing.assert_allclose(even.share.sum(axis=0), 2.0, atol=1e-5)
    assert free.remote_ranks == pytest.approx(remote.min(axis=1).mean())
    assert free.remote_ranks <= even.remote_ranks


def test_tokens_that_are_not_computed_do_not_count() -> None:
    requests = some_requests(5)
    computed = requests.computed.copy()
    computed[:, TOKENS // 2 :] = False
    shorter = Recorded(requests.experts[:, : TOKENS // 2], computed[:, : TOKENS // 2], EXPERTS)
    placement = linear(layers=1, experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS)
    np.testing.assert_array_equal(
        remote_by_rank(requests._replace(computed=computed), placement), remote_by_rank(shorter, placement)
    )
