"""Published results of the Moebius paper beside predictions, and the rollouts that are predicted for it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import migration.hardware
from docs import make_before_buying
from fleet.layout_times import LayoutName
from migration.hardware.memory import memory_table
from migration.hardware.moebius import (
    EXTRA_BYTES,
    HIGH_KV_SECONDS,
    MACHINE,
    MODEL,
    RANKS,
    TPOT_EP,
    TPOT_TP,
    WEIGHTS_SECONDS,
    kv_seconds_at_most,
    quiet_ratios,
    rollout_gains,
    weights_seconds,
)
from migration.hardware.prices import PublishedPrices
from migration.hardware.rollouts import lognormal_lengths, rollout_seconds

ROOM: dict[LayoutName, int] = {"ep": 10**9, "tp": 10**9}


@cache
def prices() -> PublishedPrices:
    (folder,) = migration.hardware.__path__
    return PublishedPrices.decode((Path(folder) / "published_prices.json").read_bytes())


def test_the_published_switch_of_weights_lies_between_line_rate_and_nccl() -> None:
    line, nccl = weights_seconds()
    assert (line, nccl) == pytest.approx((0.110, 0.160), abs=1e-3)
    assert line < WEIGHTS_SECONDS < nccl


def test_kv_at_its_most_explains_less_than_half_of_what_was_published() -> None:
    line, nccl = kv_seconds_at_most()
    assert 0.08 < line < nccl < 0.5 * (HIGH_KV_SECONDS - WEIGHTS_SECONDS)


def test_extra_memory_and_the_quiet_ratio_are_as_published() -> None:
    assert memory_table(MODEL, MACHINE, RANKS).for_switching == pytest.approx(EXTRA_BYTES, rel=0.02)
    low, high = quiet_ratios(prices())
    assert low < TPOT_EP / TPOT_TP < high


def test_one_switch_gains_on_both_static_layouts_at_every_length() -> None:
    gains = list(rollout_gains(prices()))
    assert all(1.0 <= one.over_better < one.over_worse for one in gains)
    assert 1.1 < max(one.over_better for one in gains) < 1.25


def test_every_published_figure_has_its_prediction_or_unknown() -> None:
    page = make_before_buying.FILE.read_text()
    assert "| TTFT in bursts, TP / Moebius | mean 9.9 / 3.1 s, p99 90 / 6.0 s | unknown |" in page
    assert "| switch, weights only | 152 ms | 110 ms at 450 GB/s line rate; 160 ms at 311 GB/s" in page
    assert "| rollout, over the better / worse static layout | 1.16 to 1.25 / at most 1.31 |" in page


# Rollouts


def constant(layout: LayoutName, sequences: int, context: int) -> float:
    return 1.0


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20).map(lambda some: [32 * n for n in some]))
def test_with_room_for_all_a_rollout_takes_its_longest_sequence(lengths: list[int]) -> None:
    assert rollout_seconds(lengths, 10, constant, ROOM, ("ep",)) == max(lengths)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20).map(lambda some: [32 * n for n in some]))
def test_with_room_for_one_it_takes_their_sum(lengths: list[int]) -> None:
    room: dict[LayoutName, int] = {"ep": 10 + max(lengths)}
    alone = [one for one in lengths if 2 * (10 + min(lengths)) > room["ep"]]
    if len(alone) == len(lengths):
        assert rollout_seconds(lengths, 10, constant, room, ("ep",)) == sum(lengths)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=60),
    crossing=st.integers(0, 80),
    cost=st.floats(0, 5),
)
def test_a_switch_to_the_faster_layout_loses_at_most_its_cost(
    lengths: Sequence[int], crossing: int, cost: float
) -> None:
    def step(layout: LayoutName, sequences: int, context: int) -> float:
        return 1.0 if layout == "ep" else 0.5 + 0.5 * sequences / max(1, crossing)

    static = rollout_seconds(lengths, 1, step, ROOM, ("ep",))
    assert rollout_seconds(lengths, 1, step, ROOM, ("ep", "tp"), cost) <= static + cost + 1e-6


def test_lengths_have_their_median_and_limit() -> None:
    lengths = lognormal_lengths(2048, 4000, 1.0, 32_768)
    assert sorted(lengths)[1024] == pytest.approx(4000, rel=0.01)
    assert (len(lengths), max(lengths)) == (2048, 32_768)
    assert lengths != sorted(lengths)


def test_a_sequence_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 110 tokens does not fit in the 50 KV tokens of tp"):
        rollout_seconds([100], 10, constant, {"tp": 50}, ("tp",))
