"""Exchanges for sampled tokens: against tokens counted one by one, and placements known to be best."""

import numpy as np
import pytest
from numpy.typing import NDArray

from migration.model.sampled_traffic import SampledTokens
from migration.model.sampled_traffic import destinations as of_held
from migration.solvers.load_cap import held_of
from migration.solvers.locality_placement import LocalityProblem
from migration.solvers.token_swaps import exchanged

RANKS, EXPERTS = 2, 6
ROOM = LocalityProblem(np.zeros(RANKS, np.intp), 3, balance=0.5)
LOAD = np.ones((1, EXPERTS))


def tokens_of(experts: list[list[int]], homes: list[int]) -> SampledTokens:
    return SampledTokens(np.array(experts, np.uint16)[:, None], np.array(homes, np.int64))


def together(seed: int, tokens: int = 200) -> SampledTokens:
    """Tokens that need experts {0, 3}, {1, 4} or {2, 5}, from either rank."""
    dice = np.random.default_rng(seed)
    first = dice.integers(0, 3, tokens)
    return SampledTokens(
        np.stack([first, first + 3], axis=1)[:, None].astype(np.uint16), dice.integers(0, RANKS, tokens)
    )


def table(*rows: list[int]) -> NDArray[np.int16]:
    return np.array(rows, np.int16)


def destinations(
    rows: NDArray[np.int16], tokens: SampledTokens, ranks: int, experts: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return of_held(held_of(rows, ranks, experts), tokens)


def by_hand(row: NDArray[np.int16], tokens: SampledTokens) -> float:
    """Mean other ranks of a token, for a placement without replicas."""
    at = {int(expert): slot * RANKS // len(row) for slot, expert in enumerate(row)}
    reached = [
        len({at[int(expert)] for expert in experts[0]} - {int(home)})
        for experts, home in zip(tokens.experts, tokens.homes, strict=True)
    ]
    return float(np.mean(reached))


def test_destinations_are_counted_token_by_token_and_a_replica_at_home_sends_nothing() -> None:
    dice = np.random.default_rng(0)
    tokens = SampledTokens(dice.integers(0, EXPERTS, (50, 1, 3)), dice.integers(0, RANKS, 50))
    for _ in range(10):
        row = dice.permutation(EXPERTS).astype(np.int16)
        sent, _ = destinations(row[None], tokens, RANKS, EXPERTS)
        assert sent[0] == pytest.approx(by_hand(row, tokens))
    everywhere = table([*range(EXPERTS), *range(EXPERTS)])
    sent, alone = destinations(everywhere, tokens, RANKS, EXPERTS)
    assert sent.tolist() == alone.tolist() == [0.0]


def test_without_experts_in_common_both_counts_agree_and_companions_make_fewer() -> None:
    dice = np.random.default_rng(1)
    apart = SampledTokens(dice.integers(0, EXPERTS, (20_000, 1, 2)), dice.integers(0, RANKS, 20_000))
    sent, alone = destinations(table([0, 3, 1, 4, 2, 5]), apart, RANKS, EXPERTS)
    assert sent == pytest.approx(alone, abs=0.02)
    # {0, 3} are both on rank 0, {2, 5} both on rank 1.
    sent, alone = destinations(table([0, 3, 1, 4, 2, 5]), together(0, 20_000), RANKS, EXPERTS)
    assert sent[0] < alone[0] - 0.05


def test_from_any_start_experts_that_tokens_need_together_come_together() -> None:
    dice, pairs = np.random.default_rng(3), 4

    def drawn() -> SampledTokens:
        first = dice.integers(0, pairs, 2000)
        return SampledTokens(
            np.stack([first, first + pairs], axis=1)[:, None], dice.integers(0, RANKS, len(first))
        )

    judge, room = drawn(), LocalityProblem(np.zeros(RANKS, np.intp), pairs, balance=0.5)
    for _ in range(5):
        start = dice.permutation(2 * pairs).astype(np.int16)[None]
        found = exchanged(start, drawn(), judge, np.ones((1, 2 * pairs)), room)
        rank = np.argsort(found[0]) // pairs
        assert (rank[:pairs] == rank[pairs:]).all()
        assert np.bincount(rank).tolist() == [pairs, pairs]


def test_replicas_stay_and_every_rank_keeps_its_number_of_experts() -> None:
    start = table([0, 1, 2, -1, 3, 4, 5, 0])
    found = exchanged(start, together(0), together(1), LOAD, ROOM)
    assert sorted(found[0].tolist()) == sorted(start[0].tolist())
    assert (found[0] == 0).tolist() == (start[0] == 0).tolist()
    assert found[0, 3] == -1
    assert (
        destinations(found, together(1), RANKS, EXPERTS)[0]
        < destinations(start, together(1), RANKS, EXPERTS)[0]
    )


def test_a_layer_stays_unless_other_tokens_confirm_it() -> None:
    start = table([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    fit = together(0)
    both = SampledTokens(np.repeat(fit.experts, 2, axis=1), fit.homes)
    # In layer 1 the judging tokens need {0, 1, 2} or {3, 4, 5} together, as the start has them.
    judge = both.experts.copy()
    judge[:, 1] = np.where(fit.experts[:, 0, :1] == 0, [[0, 1]], [[3, 4]])
    found = exchanged(start, both, SampledTokens(judge, fit.homes), np.ones((2, EXPERTS)), ROOM)
    assert (found[0] != start[0]).any()
    assert (found[1] == start[1]).all()


def test_no_rank_becomes_fuller_than_the_balance_allows() -> None:
    load = np.array([[10.0, 1.0, 1.0, 10.0, 1.0, 1.0]])  # {0, 3} together would be far too much
    found = exchanged(
        table([0, 1, 2, 3, 4, 5]), together(0), together(1), load, LocalityProblem(ROOM.node, 3, balance=0.9)
    )
    held = held_of(found, RANKS, EXPERTS)[0]
    assert not (held[:, 0] & held[:, 3]).any()


def test_experts_do_not_leave_their_node() -> None:
    room = LocalityProblem(np.array([0, 1]), 3, balance=0.5)
    start = table([0, 1, 2, 3, 4, 5])
    assert (exchanged(start, together(0), together(1), LOAD, room) == start).all()


def test_many_experts_are_exchanged_several_at_once_and_further_in_the_next_plan() -> None:
    ranks, experts, pairs = 4, 128, 64
    dice = np.random.default_rng(5)

    def drawn() -> SampledTokens:
        first = dice.integers(0, pairs, 4000)
        return SampledTokens(
            np.stack([first, first + pairs], axis=1)[:, None], dice.integers(0, ranks, len(first))
        )

    start = dice.permutation(experts).astype(np.int16)[None]
    room = LocalityProblem(np.zeros(ranks, np.intp), 32, balance=0.5)
    fit, judge = drawn(), drawn()
    once = found = exchanged(start, fit, judge, np.ones((1, experts)), room)
    for _ in range(4):
        found = exchanged(found, fit, judge, np.ones((1, experts)), room)
    before, first, after, best = (
        destinations(one, judge, ranks, experts)[0][0]
        for one in (start, once, found, np.arange(experts).reshape(2, pairs).T.ravel()[None].astype(np.int16))
    )
    assert best == pytest.approx(0.75, abs=0.02), "every pair of companions is on one rank"
    assert after < first < before
    assert after - best < 0.1 * (before - best)
