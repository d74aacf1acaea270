"""The oracle's requests on the clock: figures against sums by hand."""

import numpy as np
import pytest

from benchmarks.rig.live.oracle import Recorded, remote_by_rank
from benchmarks.rig.live.oracle_clock import (
    AtHome,
    ClosedLoad,
    Emptiest,
    Priced,
    best_priced,
    replayed,
)
from fleet.arrays import IntArray
from fleet.placement import Placement, linear
from fleet.timing import EngineSpeed
from router.fleet_state.reservations import AMOUNTS, PREFILL, SEQUENCES, STEPS

RANKS, EXPERTS, PROMPT, OUTPUT = 2, 4, 16, 4
SPEED = EngineSpeed(prefill_token=1e-3, step=1e-2, decode_sequence=2e-3, decode_block=0.0, dispatch=5e-3)
LOAD = ClosedLoad(users=1, prompt=PROMPT, output=OUTPUT)
PLACEMENT: Placement = linear(layers=1, experts=EXPERTS, ranks=RANKS, slots_per_rank=2)
"""Experts 0 and 1 on rank 0, 2 and 3 on rank 1."""


def of_expert(*experts: int) -> Recorded:
    """Return requests of which every token activates one expert, by request."""
    tokens = PROMPT + OUTPUT - 1
    routed = np.repeat(np.array(experts, np.uint8)[:, None], tokens, axis=1)[:, :, None, None]
    return Recorded(routed, np.ones((len(experts), tokens), np.bool_), EXPERTS)


def always(rank: int) -> AtHome:
    return AtHome(np.tile(np.eye(RANKS)[rank], (8, 1)), 0)


def test_a_lone_request_at_its_home_takes_its_steps_and_sends_nothing() -> None:
    one = replayed(of_expert(*[0] * 8), PLACEMENT, always(0), LOAD, SPEED)
    seconds = (0.01 + PROMPT * 1e-3) + (OUTPUT - 1) * (0.01 + 2e-3)
    assert one.tokens_per_second == pytest.approx(OUTPUT / seconds)
    assert one.first_token_seconds == pytest.approx(0.01 + PROMPT * 1e-3)
    assert one.remote_ranks == 0
    assert one.step_balance == one.balance == pytest.approx(1 / RANKS), "one rank serves every token"


def test_every_token_of_a_request_elsewhere_is_sent_and_paid() -> None:
    one = replayed(of_expert(*[0] * 8), PLACEMENT, always(1), LOAD, SPEED)
    seconds = (0.01 + PROMPT * 6e-3) + (OUTPUT - 1) * (0.01 + 2e-3 + 5e-3)
    assert one.tokens_per_second == pytest.approx(OUTPUT / seconds)
    assert one.remote_ranks == 1


def test_prompts_at_two_ranks_share_a_step_and_at_one_rank_they_do_not() -> None:
    requests, load = of_expert(*[0, 2] * 4), LOAD._replace(users=2)
    apart = replayed(requests, PLACEMENT, AtHome(np.tile(np.eye(RANKS), (4, 1)), 0), load, SPEED)
    together = replayed(requests, PLACEMENT, always(0), load, SPEED)
    seconds = (0.01 + PROMPT * 1e-3) + (OUTPUT - 1) * (0.01 + 2e-3)
    assert apart.tokens_per_second == pytest.approx(2 * OUTPUT / seconds)
    assert apart.step_balance == apart.balance == 1
    seconds = (0.01 + 2 * PROMPT * 1e-3 + PROMPT * 5e-3) + (OUTPUT - 1) * (0.01 + 2 * 2e-3 + 5e-3)
    assert together.tokens_per_second == pytest.approx(2 * OUTPUT / seconds)
    assert together.remote_ranks == pytest.approx(0.5)


def test_balance_of_steps_is_lower_than_that_of_the_whole_where_ranks_serve_in_turn() -> None:
    one = replayed(of_expert(*[0, 2] * 4), PLACEMENT, AtHome(np.tile(np.eye(RANKS), (4, 1)), 0), LOAD, SPEED)
    assert (one.step_balance, one.balance) == (pytest.approx(0.5), pytest.approx(7 / 8)), (
        "four requests were served by one rank, and three by the other"
    )


def held(*sequences: int, prefill: tuple[int, int] = (0, 0)) -> IntArray:
    """Return the load of ranks with these numbers of requests."""
    load = np.zeros((AMOUNTS, RANKS), np.int64)
    load[SEQUENCES], load[PREFILL], load[STEPS] = sequences, prefill, OUTPUT * np.array(sequences)
    return load


def test_the_emptiest_rank_is_chosen_and_equal_ones_in_turn() -> None:
    choose = Emptiest(0)
    assert choose(0, held(3, 2)) == 1
    assert {choose(0, held(2, 2)) for _ in range(50)} == {0, 1}


def test_the_router_prices_true_destinations_against_a_wait() -> None:
    requests = of_expert(0, 2)
    remote = remote_by_rank(requests, PLACEMENT) * PLACEMENT.layers

    def chosen(request: int, load: IntArray, weight: float = 1.0) -> int:
        return Priced(PLACEMENT, remote, SPEED, LOAD, weight, 0)(request, load)

    assert [chosen(0, held(0, 0)), chosen(1, held(0, 0))] == [0, 1]
    queue = held(1, 0, prefill=(1000, 0))
    assert chosen(0, queue) == 1, "a second of waiting outweighs a tenth of a second of sending"
    assert chosen(0, queue, weight=50.0) == 0


def test_the_best_price_sends_least_among_those_as_fast_as_any() -> None:
    requests, load = of_expert(*[0, 1, 2, 3] * 4), LOAD._replace(users=4)
    best = best_priced(requests, PLACEMENT, load, SPEED)
    assert best.remote_ranks == 0
    blind = replayed(requests, PLACEMENT, Emptiest(0), load, SPEED)
    assert best.tokens_per_second > blind.tokens_per_second
