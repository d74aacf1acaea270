"""Reads become faster as long as steps lose little by them, and slower when they lose more than they may. The
engine here is a model: a step takes a given time, and longer in proportion to the rate of reads."""

import random
from collections.abc import Callable

import pytest

from engine_adapter.config import TransferConfig
from engine_adapter.transfer.adaptive_rate import LEAST_RATE, AdaptiveRate
from engine_adapter.transfer.rate_limit import RateLimit

STEP, INTERVAL, MIB = 0.03, 0.06, 1 << 20
"""two steps end in an interval"""
Loss = Callable[[float], float]
"""Part of a step's time that is lost, by the rate of reads."""


def served(
    pace: AdaptiveRate, loss: Loss, seconds: float, *, reading: bool, now: float = 0.0, noise: float = 0.0
) -> float:
    """Let an engine serve, and read all the time or not at all. Return the time afterwards."""
    dice = random.Random(4)
    for _ in range(round(seconds / INTERVAL)):
        rate = pace.rate(now)
        if reading and rate is not None:
            pace.begin(round(rate * INTERVAL))
        lost = loss(rate) if reading and rate is not None else 0.0
        now += INTERVAL
        pace.note_steps(2, 2 * STEP * (1.0 + lost) * (1.0 + noise * dice.uniform(-1, 1)), now)
    return now


def settled(loss: Loss, *, noise: float = 0.0, max_loss: float = 0.05) -> float:
    """Return the rate after some minutes with reads in every other second."""
    pace, now = AdaptiveRate(max_loss), 0.0
    for _ in range(100):
        now = served(pace, loss, 1.2, reading=False, now=now, noise=noise)
        now = served(pace, loss, 1.2, reading=True, now=now, noise=noise)
    rate = pace.rate(now)
    assert rate is not None
    return rate


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("harmless", [0.7e9, 2e9, 9e9])
def test_the_rate_comes_to_where_steps_lose_as_much_as_they_may(harmless: float, noise: float) -> None:
    # At `harmless` bytes per second steps lose 5 %.
    found = settled(lambda rate: 0.05 * rate / harmless, noise=noise)
    assert harmless / 4 <= found <= 2 * harmless
    if not noise:
        assert harmless / 2 <= found <= harmless


def test_reads_that_cost_steps_nothing_become_as_fast_as_memory() -> None:
    assert settled(lambda rate: 0.0) > 1e12


def test_reads_that_cost_much_are_never_slower_than_deadlines_allow_for() -> None:
    assert settled(lambda rate: 3.0) == LEAST_RATE


def test_the_rate_falls_when_steps_begin_to_lose_more() -> None:
    pace = AdaptiveRate(0.05)
    now = served(pace, lambda rate: 0.0, 1.0, reading=False)
    now = served(pace, lambda rate: 0.0, 4.0, reading=True, now=now)
    fast = pace.rate(now)
    assert fast is not None
    assert fast > 8 * LEAST_RATE
    served(pace, lambda rate: 0.3, 10.0, reading=True, now=now)
    assert pace.rate(now) == LEAST_RATE


def test_a_few_steps_with_long_prompts_change_nothing() -> None:
    pace, now = AdaptiveRate(0.05), 0.0
    now = served(pace, lambda rate: 0.0, 1.0, reading=False)
    for at in range(60):
        pace.begin(round(LEAST_RATE * INTERVAL))
        now += INTERVAL
        before = pace.rate(now)
        pace.note_steps(2, 2 * STEP * (8.0 if at % 4 == 0 else 1.0), now)
        assert pace.rate(now) in {before, 2 * (before or 0.0)}


def test_short_reads_are_charged_with_what_they_alone_cost() -> None:
    # Reads take a tenth of the time, and steps take a tenth longer meanwhile: 1 % over all.
    pace, now = AdaptiveRate(0.05), 0.0
    now = served(pace, lambda rate: 0.0, 1.0, reading=False)
    for _ in range(400):
        rate = pace.rate(now)
        assert rate == LEAST_RATE
        pace.begin(round(0.1 * rate * INTERVAL))
        now += INTERVAL
        pace.note_steps(2, 2 * STEP * 1.01, now)


def test_an_idle_engine_limits_nothing() -> None:
    limit = RateLimit.of(TransferConfig())
    limit.begin(1000 * MIB, 0.0)
    assert (limit.wait(0.0), limit.piece_bytes(0.0)) == (0.0, 16 * MIB)
    limit.note_steps(2, 2 * STEP, INTERVAL)
    assert limit.piece_bytes(INTERVAL) < 4 * MIB
    limit.begin(25_000_000, INTERVAL)
    assert limit.wait(INTERVAL) == pytest.approx(0.1)
    limit.note_steps(0, 0.0, 9.0)
    assert (limit.wait(9.0), limit.piece_bytes(9.0)) == (0.0, 16 * MIB)


def test_a_cap_holds_beside_what_steps_permit_and_1_permits_all() -> None:
    capped = RateLimit.of(TransferConfig(bytes_per_second=1_000_000))
    free = RateLimit.of(TransferConfig(max_step_loss=1.0))
    for limit in (capped, free):
        limit.note_steps(2, 2 * STEP, INTERVAL)
        limit.begin(1_000_000, INTERVAL)
    assert capped.wait(INTERVAL) == pytest.approx(1.0)
    assert free.wait(INTERVAL) == 0.0
    assert (capped.least, free.least) == (1_000_000, None)
    assert RateLimit.of(TransferConfig()).least == LEAST_RATE
