"""Pure parts of the benchmark of switches of attention: pauses, bytes beside the least, first tokens."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.rig.engine_ranks import Window
from benchmarks.rig.turns.kv_figures import (
    NEAR_SECONDS,
    Flip,
    first_tokens,
    flips_of,
    least_bytes,
    pauses,
    quiet_moments,
    tokens_per_second,
)
from benchmarks.rig.turns.kv_switches import ANSWERS, GROUPS, GROWTH, PAGES, prompt_tokens
from benchmarks.rig.turns.turning_engine import RANKS
from engine_adapter.embedded.switching.attention_switch import LastRound
from fleet.blocks import BLOCK_SIZE
from fleet.layout import AttentionKind, held_limit, kv_units_read


def diary(**fields: Any) -> dict[str, NDArray[Any]]:
    return {name: np.array(values) for name, values in fields.items()}


def streamed(*answers: list[float]) -> dict[str, NDArray[Any]]:
    """The diary of answers, each with the times of its tokens."""
    found = [
        (at, at - before, number) for number, times in enumerate(answers) for before, at in pairwise(times)
    ]
    token, gap, answer = zip(*sorted(found), strict=True)
    return diary(token=token, gap=gap, answer=answer)


def flip(to: AttentionKind, pages: int) -> Flip:
    return Flip(to, Window(0.0, 1.0), 0.1, 0, 0, pages, 0)


def test_a_pause_is_the_longest_gap_over_the_switch_minus_the_median_one() -> None:
    even = [round(0.01 * at, 2) for at in range(100)]
    late = [at if at < 0.5 else at + 0.03 for at in even]
    assert pauses([streamed(even), streamed(late, even)], Window(0.495, 0.52)) == pytest.approx([0, 0.03, 0])


def test_gaps_far_from_a_switch_are_not_its_pauses() -> None:
    even = [round(0.01 * at, 2) for at in range(200)]
    broken = [at if at < 1.5 else at + 0.2 for at in even]
    assert pauses(
        [streamed(broken)], Window(1.5 - 2 * NEAR_SECONDS, 1.5 - 2 * NEAR_SECONDS)
    ) == pytest.approx([0], abs=1e-9)
    assert pauses([streamed(broken)], Window(1.5 - NEAR_SECONDS / 2, 1.5)) == pytest.approx([0.2])


def test_answers_that_begin_or_end_at_a_switch_have_no_pause() -> None:
    assert not pauses([streamed([0.0, 0.1, 0.2], [0.5, 0.6])], Window(0.3, 0.4))


def test_a_switch_lasts_from_the_first_rank_to_the_last_one() -> None:
    rounds = [
        [LastRound(10.0, 0.5, 0.2, 100, 1, 7, 3), LastRound(20.0, 0.5, 0.1, 10, 0, 4, 1)],
        [LastRound(10.1, 0.5, 0.3, 50, 2, 7, 3), LastRound(20.1, 0.1, 0.1, 20, 0, 5, 1)],
    ]
    first, second = flips_of([diary(rounds=one) for one in rounds])
    assert (first.to, first.window, first.reading_seconds, first.bytes) == (
        "tp",
        Window(10.0, 10.6),
        0.3,
        150,
    )
    assert first.ahead_bytes == 3
    assert (first.pages, first.pages_before) == (7, 10)  # of the engine
    assert (second.to, second.window, second.bytes) == ("dp", Window(20.0, 20.5), 30)
    assert (second.pages, second.pages_before) == (9, 10)  # of both ranks


@pytest.mark.parametrize(("ranks", "groups"), [(2, 2), (4, 4), (4, 2), (8, 4), (2, 1)])
@pytest.mark.parametrize("to", ["tp", "dp"])
def test_the_least_bytes_are_those_of_the_units_that_ranks_lack(
    to: AttentionKind, ranks: int, groups: int
) -> None:
    pages = [3 * ranks] * ranks
    units = int(kv_units_read(pages if to == "tp" else [sum(pages)], to, ranks, groups).sum())
    assert least_bytes(flip(to, sum(pages)), ranks, groups, 100) == 100 * units


def test_first_tokens_are_those_of_requests_that_came_near_a_window() -> None:
    ranks = [
        diary(asked=[0.85, 1.05, 2.0], first=[0.1, 0.2, 0.3]),
        diary(asked=[1.19, 1.3], first=[0.4, 0.5]),
    ]
    assert sorted(first_tokens(ranks, [Window(1.0, 1.1)], 0.1).tolist()) == [0.2, 0.4]
    assert sorted(first_tokens(ranks, [Window(1.0, 1.1), Window(1.9, 2.5)], 0.0).tolist()) == [0.2, 0.3]
    assert not len(first_tokens(ranks, [], 0.1))


def test_throughput_counts_the_tokens_of_all_ranks() -> None:
    ranks = [diary(token=[0.5, 1.0, 1.5, 3.0]), diary(token=[1.2])]
    assert tokens_per_second(ranks, [Window(1.0, 1.5)], 0.25) == pytest.approx([3.0])


def test_moments_without_a_switch_are_inside_their_windows() -> None:
    assert [one.begin for one in quiet_moments([Window(1.0, 2.0), Window(5.0, 5.3)], 0.25)] == pytest.approx(
        [1.25, 1.5]
    )


def test_long_answers_hold_no_more_than_a_switch_permits() -> None:
    longest = -(-(prompt_tokens(0.9) + 2 * GROWTH) // BLOCK_SIZE)
    assert 0.95 < ANSWERS * longest / PAGES / held_limit(RANKS, GROUPS) < 0.99
    assert prompt_tokens(0.1) < prompt_tokens(0.5) < prompt_tokens(0.9)
