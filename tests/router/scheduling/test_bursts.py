"""Bursts between two load reports: no rank gets much more than its fair share of the work, in predicted
time."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet.timing import EngineSpeed, prefill_seconds, queue_seconds, running_seconds
from router.fleet_state.reservations import BLOCKS, PREFILL, SEQUENCES, STEPS, Reservations
from router.fleet_state.view import FleetView
from router.scheduling.cost import Weights
from router.scheduling.decision import Ask, Conditions, decide
from router.scheduling.filters import SaturationLimits, candidates
from router.scheduling.policies import PolicyRules
from tests.router.router_fixture import engine_joined

BLOCK = 16
LARGE = SaturationLimits(10**9, 1e9)
FAST = EngineSpeed(prefill_token=1e-4, prefill_pair=1e-9, decode_sequence=1e-4, decode_block=1e-6, step=3e-3)
SLOW = EngineSpeed(prefill_token=2e-4, prefill_pair=2e-9, decode_sequence=2e-4, decode_block=2e-6, step=6e-3)
CHATTY = EngineSpeed(
    prefill_token=5e-5, prefill_pair=5e-10, decode_sequence=4e-4, decode_block=2e-6, step=2e-3
)
MIXED = ((4, FAST), (4, SLOW), (1, CHATTY), (2, FAST))
SINGLE = ((1, FAST), (1, SLOW), (1, CHATTY), (1, SLOW), (1, FAST))
ALIKE = ((8, FAST), (8, FAST))
STEPS_AHEAD = 128
"""Steps for which the running work is predicted."""


class Burst(NamedTuple):
    """Each [targets]. before: predicted seconds of work at the start; given: of the work of the burst's
    requests; requests: their number.
    """

    before: NDArray[np.float64]
    given: NDArray[np.float64]
    requests: NDArray[np.int64]


def burst(engines: Any, rules: PolicyRules, requests: int = 1000) -> Burst:
    """Send requests of mixed lengths between two reports. Every rank has reported its (random) load before,
    and nothing since.
    """
    chance = np.random.default_rng(1)
    reservations = Reservations(settle_seconds=0.1, stale_seconds=5.0)
    view = FleetView(reservations)
    for number, (ranks, speed) in enumerate(engines):
        urls = [f"http://h:{100 * number + rank}" for rank in range(ranks)]
        view.join(
            engine_joined(
                f"e{number}",
                urls,
                "f" * 64,
                worker_id=number + 1,
                block_size=BLOCK,
                max_context=1 << 20,
                speed=speed,
            ),
            0.0,
        )
        view.sign_of_life(number + 1, 0.0)
        for rank in range(ranks):
            running = int(chance.integers(0, 12))
            load = (
                int(chance.integers(0, 6000)),
                running,
                running * int(chance.integers(20, 80)),
                running * 64,
            )
            reservations.report((number + 1, rank), load, 0.0)
    target_table = view.target_table("demo")
    targets = len(target_table.targets)
    load = reservations.load(target_table.rows, 0.0)
    runs = running_seconds(
        target_table.decode_sequence_s,
        target_table.decode_block_s,
        load[SEQUENCES],
        load[BLOCKS],
        load[STEPS],
        STEPS_AHEAD,
    )
    before = queue_seconds(target_table.prefill_token_s, load[PREFILL]) + runs
    given, counts, nothing = np.zeros(targets), np.zeros(targets, np.int64), np.zeros(targets, np.int64)
    for number in range(requests):
        prompt = int(
            chance.choice([200, 1000, 4000, 16_000], p=[0.4, 0.3, 0.2, 0.1]) * chance.uniform(0.7, 1.3)
        )
        output = int(chance.choice([32, 128]))
        load = reservations.load(target_table.rows, 0.0)
        ask = Ask(
            decision_id="d",
            seed=int(chance.integers(2**32)),
            model="demo",
            prompt_tokens=prompt,
            output_tokens=output,
        )
        decision = decide(
            ask,
            target_table,
            candidates(target_table, load, 0, LARGE),
            nothing,
            Conditions(load, turn=number),
            rules,
            1,
        )
        at, blocks = decision.chosen, -(-(prompt + output) // BLOCK)
        reservations.book(decision.target.key, (prompt, 1, blocks, output), 0.0)
        work = prefill_seconds(
            target_table.prefill_token_s, target_table.prefill_pair_s, np.full(targets, prompt), prompt
        )
        given[at] += float(
            work[at]
            + output * (target_table.decode_sequence_s[at] + target_table.decode_block_s[at] * blocks)
        )
        counts[at] += 1
    return Burst(before, given, counts)


def shares(found: Burst) -> NDArray[np.float64]:
    """Return the work given to each rank, relative to its fair share. The fair share brings a rank to the
    mean of all ranks, in predicted seconds of its previous work and of the given work, each at the rank's own
    speed. A rank that was busy, or is slow, has a smaller share, or the same one with fewer requests.
    """
    level = (found.before + found.given).mean()
    assert (found.before < level).all(), "the burst is large enough for all ranks"
    return np.asarray(found.given / (level - found.before))


@pytest.mark.parametrize(
    ("engines", "lockstep"),
    [(MIXED, 1.0), (MIXED, 0.0), (SINGLE, 1.0), (ALIKE, 1.0)],
    ids=["mixed", "no lockstep", "single", "alike"],
)
def test_a_burst_between_two_reports_gives_no_rank_more_than_five_quarters_of_a_fair_share(
    engines: Any, lockstep: float
) -> None:
    assert shares(burst(engines, PolicyRules(weights=Weights.of(lockstep=lockstep)))).max() < 1.25


@pytest.mark.parametrize("policy", ["classic", "kv", "least_loaded"])
def test_policies_that_look_at_load_share_a_burst_as_fairly(policy: Any) -> None:
    assert shares(burst(MIXED, PolicyRules(policy=policy))).max() < 1.25


def test_round_robin_shares_a_burst_by_number() -> None:
    found = burst(MIXED, PolicyRules(policy="round_robin"))
    assert found.requests.max() - found.requests.min() <= 1
    assert shares(found).max() > 1.25, "which is not fair by time: that is why it is no default"
