"""Estimated speeds: measured before they count, pooled over similar servers, robust, and kept while one
server is left.
"""

from math import exp, log

import numpy as np
import pytest

from router.scheduling.speed_estimation import (
    DECODE_SPEED,
    ENOUGH,
    HALF_LIFE_SECONDS,
    MIN_OBSERVATIONS,
    PREFILL_SPEED,
    SpeedEstimation,
)

ONE, TWO = (1, 0), (2, 0)


def feed(
    speeds: SpeedEstimation,
    ratio: float,
    times: int,
    server: tuple[int, int] = ONE,
    *,
    pool: str = "llama",
    noise: float = 0.0,
) -> None:
    chance = np.random.default_rng(server[0])
    for _ in range(times):
        factor = ratio * float(exp(chance.normal(0, noise)))
        speeds.first_token(pool, server, 0.1, 0.0, 0.1 * factor)
        speeds.step(pool, server, 0.02, 0.02 * factor)


def test_nothing_is_measured_before_a_few_observations() -> None:
    speeds = SpeedEstimation()
    assert speeds.of("llama", ONE) == ((1.0, False), (1.0, False))
    feed(speeds, 3.0, int(MIN_OBSERVATIONS) - 1)
    assert [known for _, known in speeds.of("llama", ONE)] == [False, False]
    feed(speeds, 3.0, 1)
    assert [known for _, known in speeds.of("llama", ONE)] == [True, True]


@pytest.mark.parametrize("ratio", [0.002, 0.3, 1.0, 40.0])
def test_a_speed_however_far_from_the_reference_is_found(ratio: float) -> None:
    speeds = SpeedEstimation()
    feed(speeds, ratio, 40, noise=0.2)
    for factor, _ in speeds.of("llama", ONE):
        assert factor == pytest.approx(ratio, rel=0.15)


def test_prefill_and_decode_are_measured_apart() -> None:
    speeds = SpeedEstimation()
    for _ in range(10):
        speeds.step("llama", ONE, 0.02, 0.06)
    found = speeds.of("llama", ONE)
    assert found[PREFILL_SPEED] == (1.0, False)
    assert found[DECODE_SPEED] == (pytest.approx(3.0), True)


def test_like_servers_have_one_speed_in_spite_of_noise() -> None:
    speeds = SpeedEstimation()
    for _ in range(20):
        feed(speeds, 1.05, 5, ONE, noise=0.1)
        feed(speeds, 0.95, 5, TWO, noise=0.1)
    assert speeds.of("llama", ONE) == speeds.of("llama", TWO)


def test_an_unmeasured_server_has_the_speed_of_its_pool_and_of_no_other() -> None:
    speeds = SpeedEstimation()
    feed(speeds, 5.0, 20, ONE)
    assert speeds.of("llama", (9, 0))[PREFILL_SPEED] == (pytest.approx(5.0), True)
    assert speeds.of("mistral", (9, 0))[PREFILL_SPEED] == (1.0, False)


def test_a_server_that_is_clearly_slower_is_known_for_it() -> None:
    speeds = SpeedEstimation()
    for _ in range(20):
        feed(speeds, 1.0, 2, ONE)
        feed(speeds, 6.0, 2, TWO)
    fast, slow = speeds.of("llama", ONE), speeds.of("llama", TWO)
    assert slow[DECODE_SPEED][0] / fast[DECODE_SPEED][0] == pytest.approx(6.0, rel=0.2)


def test_a_cold_start_among_the_first_tokens_does_not_tell_the_speed() -> None:
    speeds = SpeedEstimation()
    speeds.first_token("llama", ONE, 0.1, 0.0, 60.0)
    for _ in range(4):
        speeds.first_token("llama", ONE, 0.1, 0.0, 0.2)
    assert speeds.of("llama", ONE)[PREFILL_SPEED] == (pytest.approx(2.0), True)


def test_one_wild_value_later_changes_little() -> None:
    speeds = SpeedEstimation()
    feed(speeds, 2.0, 30)
    before = speeds.of("llama", ONE)[DECODE_SPEED][0]
    speeds.step("llama", ONE, 0.02, 2000.0)
    assert abs(log(speeds.of("llama", ONE)[DECODE_SPEED][0] / before)) <= log(2.0) / ENOUGH


def test_what_was_measured_once_stays_measured_through_a_silent_night_and_follows_a_change() -> None:
    speeds = SpeedEstimation()
    feed(speeds, 2.0, 30)
    speeds.age(0.0)
    speeds.age(1000 * HALF_LIFE_SECONDS)
    assert speeds.of("llama", ONE)[DECODE_SPEED] == (pytest.approx(2.0), True)
    feed(speeds, 0.5, 60)
    assert speeds.of("llama", ONE)[DECODE_SPEED][0] == pytest.approx(0.5, rel=0.2)


def test_the_last_server_that_is_forgotten_takes_its_pool_along() -> None:
    speeds = SpeedEstimation()
    feed(speeds, 2.0, 30, ONE)
    feed(speeds, 2.0, 30, TWO)
    speeds.forget_worker(1)
    assert speeds.of("llama", ONE)[DECODE_SPEED][1]
    speeds.forget_worker(2)
    assert speeds.of("llama", ONE) == ((1.0, False), (1.0, False))


def test_times_that_cannot_be_are_passed_over() -> None:
    speeds = SpeedEstimation()
    for _ in range(20):
        speeds.first_token("llama", ONE, 0.0, 0.1, 0.1)
        speeds.step("llama", ONE, 0.02, 0.0)
    assert speeds.of("llama", ONE) == ((1.0, False), (1.0, False))
