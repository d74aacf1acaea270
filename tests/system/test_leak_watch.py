"""What counts as a leak in a soak, and what does not."""

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.system.leak_watch import MIB, Life, growth

AT = np.arange(0.0, 7200.0, 60.0)
NOISE = np.random.default_rng(3).normal(0.0, 1.0, len(AT))


def leaks(mib: NDArray[np.float64]) -> bool:
    return growth(Life("p", 1, AT.tolist(), [round(one * MIB) for one in mib + NOISE])).leaks


@pytest.mark.parametrize("per_hour", [40.0, 100.0, 1000.0])
def test_memory_that_rises_all_the_time_is_a_leak(per_hour: float) -> None:
    assert leaks(300.0 + per_hour * AT / 3600.0)


@pytest.mark.parametrize("every_seconds", [120.0, 300.0, 600.0])
def test_memory_that_rises_in_steps_is_a_leak(every_seconds: float) -> None:
    assert leaks(300.0 + 20.0 * np.floor(AT / every_seconds))


@pytest.mark.parametrize("at", [1500.0, 3000.0, 4500.0, 5000.0])
def test_one_step_is_none(at: float) -> None:
    assert not leaks(250.0 + 120.0 * (at <= AT))


def test_a_level_that_was_higher_before_is_none() -> None:
    assert not leaks(
        450.0 + 140.0 * ((AT > 1800.0) & (AT < 3000.0)) + 60.0 * np.maximum(AT - 5400.0, 0.0) / 3600.0
    )


def test_a_cache_that_fills_and_empties_is_none() -> None:
    assert not leaks(400.0 + 50.0 * np.sin(AT / 1200.0))


def test_memory_that_stays_is_none() -> None:
    assert not leaks(np.full(len(AT), 300.0))
