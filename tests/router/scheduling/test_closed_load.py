"""Requests under a closed load, decided as the router decides: they settle at their homes, as far as this
does not slow the engine's slowest rank.
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.rig.homes import LoadResult, Setting, World, run_load, world

LAYERS, EXPERTS, TOKENS, TOP_K = 4, 32, 64, 4
Table = NDArray[Any]


@pytest.fixture(scope="module")
def recorded() -> tuple[Table, Table]:
    """Return requests of four domains. Each sends six pairs in ten to a quarter of the experts."""
    dice = np.random.default_rng(0)
    domain = np.repeat(np.arange(4), 12)
    own = np.stack([dice.permutation(EXPERTS).reshape(4, -1) for _ in range(LAYERS)])
    likely = np.full((4, LAYERS, EXPERTS), 0.4 / EXPERTS)
    for layer in range(LAYERS):
        for kind in range(4):
            likely[kind, layer, own[layer, kind]] += 0.6 / own.shape[2]
    drawn = np.log(likely[domain][:, None]) + dice.gumbel(size=(len(domain), TOKENS, LAYERS, EXPERTS))
    return np.argsort(-drawn, axis=3)[..., :TOP_K].astype(np.int16), domain


def live(before: World, gain: float, *, given: bool = True) -> LoadResult:
    return run_load(before, Setting(16, gain, given), 160)


def test_under_a_placement_that_follows_homes_requests_come_home_and_nothing_gets_slower(
    recorded: tuple[Table, Table],
) -> None:
    aligned = world(*recorded, width=EXPERTS, slots=9)
    blind, homed, priced, both = (
        live(aligned, gain, given=given)
        for gain, given in ((0.0, False), (0.0, True), (0.8, False), (0.8, True))
    )
    assert blind.is_home < 0.35
    assert homed.is_home > blind.is_home + 0.1, "homes pull before prediction has earned anything"
    assert both.is_home > max(priced.is_home, 0.5)
    assert both.is_home == pytest.approx(homed.is_home, abs=0.05), "a home is worth as much in either term"
    assert both.remote_ranks < 0.9 * blind.remote_ranks
    assert both.tokens_per_second > blind.tokens_per_second
    assert both.balance > blind.balance - 0.1


def test_under_a_placement_that_ignores_clusters_there_is_next_to_nothing_to_steer_by(
    recorded: tuple[Table, Table],
) -> None:
    linear = world(*recorded, width=EXPERTS, slots=9, follows=False)
    steered, blind = live(linear, 0.8), live(linear, 0.0, given=False)
    assert steered.swing_ms < 5.0
    assert steered.balance > blind.balance - 0.05
