"""Predicted decode steps: the work that is counted, the fit of its prices, and where the faster layout
changes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import migration.hardware
from fleet.layout_times import LayoutName
from migration.hardware.crossings import INDIFFERENT, counts, crossings, stretches
from migration.hardware.machines import MACHINES
from migration.hardware.models import MODELS
from migration.hardware.price_fit import fitted
from migration.hardware.prices import OwnSteps, OwnTimes, OwnTimings, PublishedPrices
from migration.hardware.sizes import expert_sizes
from migration.hardware.step_form import active_experts, step_units

QWEN = MODELS["qwen3-235b"]
LAYOUTS: tuple[LayoutName, ...] = ("ep", "experts-tp", "tp")


@cache
def published() -> PublishedPrices:
    (folder,) = migration.hardware.__path__
    return PublishedPrices.decode((Path(folder) / "published_prices.json").read_bytes())


# Work


@pytest.mark.parametrize("sequences", [1, 4, 16, 64, 256])
def test_the_busiest_rank_is_that_of_tokens_drawn_one_by_one(sequences: int) -> None:
    """Oracle: the mean over draws of uniform tokens on 8 ranks."""
    random = np.random.default_rng(sequences)
    found = []
    for _ in range(400):
        chosen = np.stack([random.permutation(128)[:8] for _ in range(sequences)])
        pairs = np.bincount(chosen.ravel() // 16, minlength=8)
        active = np.bincount(np.unique(chosen) // 16, minlength=8)
        found.append((active.max(), pairs.max(), len(np.unique(chosen))))
    active, pairs, distinct = np.mean(found, axis=0)
    whole, sharded = (active_experts(QWEN, layout, 8, sequences) for layout in ("ep", "tp"))
    assert whole.experts == pytest.approx(active, rel=0.08)
    assert whole.pairs == pytest.approx(pairs, rel=0.1)
    assert sharded.experts == pytest.approx(distinct, rel=0.02)
    assert sharded.pairs == 8 * sequences


@given(name=st.sampled_from(sorted(MODELS)), ranks=st.sampled_from([2, 4, 8]))
def test_large_batches_read_every_expert_of_a_gpu_in_every_layout(name: str, ranks: int) -> None:
    model = MODELS[name]
    for layout in LAYOUTS:
        read = step_units(model, layout, ranks, 100_000, 1024)["experts"].gigabytes
        assert read == pytest.approx(expert_sizes(model, ranks).total / 1e9, rel=1e-6)


@given(
    name=st.sampled_from(sorted(MODELS)),
    layout=st.sampled_from(LAYOUTS),
    sequences=st.integers(1, 2000),
    context=st.integers(1, 30_000),
)
def test_more_sequences_and_longer_ones_are_more_work(
    name: str, layout: LayoutName, sequences: int, context: int
) -> None:
    now, more, longer = (
        step_units(MODELS[name], layout, 8, *at)
        for at in ((sequences, context), (sequences + 1, context), (sequences, context + 1))
    )
    for part, units in now.items():
        assert all(later >= one * (1 - 1e-9) for one, later in zip(units, more[part], strict=True)), part
        assert all(later >= one for one, later in zip(units, longer[part], strict=True)), part


# Fit


@settings(max_examples=30)
@given(prices=st.tuples(*(st.floats(0.01, 10.0) for _ in range(3))), seed=st.integers(0, 1000))
def test_prices_of_exact_timings_are_found(prices: tuple[float, ...], seed: int) -> None:
    units = np.random.default_rng(seed).uniform(0.1, 10.0, (12, 3))
    found = fitted(units.tolist(), (units @ np.array(prices)).tolist())
    assert found.prices == pytest.approx(prices, rel=1e-6)
    assert found.error < 1e-9


def test_no_price_is_below_zero_and_the_error_is_relative() -> None:
    found = fitted([[1.0, x] for x in (1.0, 2.0, 3.0)], [3.0, 2.0, 1.0])
    assert min(found.prices) >= 0
    assert 0.1 < found.error < 1
    with pytest.raises(ValueError, match="there are no timings"):
        fitted([], [])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernels", ["vllm", "sglang"])
def test_published_prices_give_longer_steps_for_more_work(name: str, kernels: str) -> None:
    for hardware in ("h200-nvl", "h100"):
        for skewed in (False, True):
            steps = published().find(MODELS[name], hardware, 8, kernels, skewed=skewed)
            assert steps is not None
            assert all(0 < error < 0.2 for error in steps.errors.values())
            for layout in LAYOUTS:
                times = [steps.seconds(layout, count, 1024) for count in (1, 8, 64, 512, 2048)]
                assert times == sorted(times)
                assert steps.seconds(layout, 64, 8192) > steps.seconds(layout, 64, 1024)


def test_experts_tp_has_the_attention_of_ep_and_the_experts_of_tp() -> None:
    steps = published().find(QWEN, "h200-nvl", 8, "vllm")
    assert steps is not None
    ep, mixed, tp = (steps.parts(layout, 256, 1024) for layout in LAYOUTS)
    assert mixed == {**ep, "experts": tp["experts"]}
    assert sum(mixed.values()) == steps.seconds("experts-tp", 256, 1024)


def test_without_a_published_figure_there_are_no_steps() -> None:
    find = published().find
    assert find(QWEN, "a100", 8, "vllm") is None
    assert find(QWEN, "h100", 16, "vllm") is None
    assert find(replace(QWEN, hidden=8192), "h100", 8, "vllm") is None
    assert find(replace(QWEN, name="config.json"), "h100", 8, "vllm") is not None, "the same dimensions"
    assert {fit.hardware for fit in published().fits} < set(MACHINES)


def test_in_quiet_hours_ep_is_as_much_slower_as_the_moebius_paper_measured() -> None:
    """52 to 37 ms per token, at a few dozen sequences, with SGLang."""
    steps = published().find(QWEN, "h200-nvl", 8, "sglang")
    assert steps is not None
    ratios = [steps.seconds("ep", count, 1024) / steps.seconds("tp", count, 1024) for count in (32, 64, 128)]
    assert min(ratios) < 52 / 37 < max(ratios)


# Crossings


@given(
    bends=st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=6),
    band=st.sampled_from([0.01, 0.05]),
)
def test_stretches_are_those_of_every_batch_looked_at_alone(bends: list[float], band: float) -> None:
    def seconds(layout: LayoutName, count: int) -> float:
        return 1.0 if layout == "tp" else 1.0 + bends[min(count // 10, len(bends) - 1)]

    batches = list(range(1, 70))
    found = stretches("tp", "ep", seconds, batches, band)
    for stretch in found:
        for count in range(stretch.first, stretch.last + 1):
            ratio = seconds("ep", count) - 1.0
            near = abs(ratio) < band * min(1.0, 1.0 + ratio)
            assert stretch.faster == (None if near else "tp" if ratio > 0 else "ep")
    assert [one.first for one in found[1:]] == [one.last + 1 for one in found[:-1]]
    decided = [one.faster for one in found if one.faster]
    changes = sum(1 for one, two in pairwise(decided) if one != two)
    assert len(list(crossings(found))) == changes


def test_none_one_and_several_crossings_are_told_apart() -> None:
    def found(*ratios: float) -> list[tuple[int, int]]:
        steps = stretches(
            "tp", "ep", lambda layout, at: 1.0 if layout == "ep" else ratios[at], range(len(ratios))
        )
        return [(one.first, one.last) for one in crossings(steps)]

    assert found(0.8, 0.9, 0.97, 0.9) == [], "a near tie is no crossing"
    assert found(0.8, 0.97, 1.03, 1.2) == [(0, 3)]
    assert found(0.8, 1.2, 0.8) == [(0, 1), (1, 2)]
    assert found(0.99, 1.01) == []
    assert INDIFFERENT == 0.05


def test_batches_are_compared_to_the_last_one_each_once() -> None:
    found = counts(1, 2048)
    assert (found[0], found[-1]) == (1, 2048)
    assert found == sorted(set(found))
    assert found[:40] == list(range(1, 41)), "small ones all"
    assert counts(7, 7) == [7]


# Own timings


def own_file(contexts: tuple[int, ...] = (1024, 4096), noise: float = 0.0) -> OwnTimings:
    """Timings of whole steps, as the published prices predict them, with an overhead of 2 ms."""
    steps = published().find(QWEN, "h200-nvl", 8, "vllm")
    assert steps is not None
    random, sizes = np.random.default_rng(1), (1, 8, 32, 128, 512, 1500)
    return OwnTimings(
        times=tuple(
            OwnTimes(
                layout=layout,
                context=context,
                sequences=sizes,
                milliseconds=tuple(
                    (2 + 1e3 * steps.seconds(layout, count, context)) * (1 + noise * random.standard_normal())
                    for count in sizes
                ),
            )
            for layout in ("ep", "tp")
            for context in contexts
        )
    )


def test_own_timings_are_fitted_by_the_same_form() -> None:
    timings = own_file()
    steps = OwnSteps("times.toml", QWEN, 8, timings)
    assert (steps.sequences, steps.contexts) == ((1, 1500), (1024, 4096))
    for one in timings.times:
        for count, time in zip(one.sequences, one.milliseconds, strict=True):
            assert steps.seconds(one.layout, count, one.context) * 1e3 == pytest.approx(time, rel=0.05)
    assert set(steps.errors) == {"ep", "tp"}
    assert max(steps.errors.values()) < 0.1


def test_noise_of_own_timings_shows_in_the_error() -> None:
    exact, noisy = (OwnSteps("f", QWEN, 8, own_file(noise=noise)) for noise in (0.0, 0.1))
    assert all(noisy.errors[layout] > 1.5 * exact.errors[layout] for layout in ("ep", "tp"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("times = []", "at least 4 timings of ep and tp"),
        (
            '[[times]]\nlayout="tp"\ncontext=1\nsequences=[1,2]\nmilliseconds=[1.0]',
            "2 sequences and 1 milliseconds",
        ),
        ('[[times]]\nlayout="tp"\ncontext=1\nsequences=[1]\nmilliseconds=[-1.0]', "must be above 0"),
        ('[[times]]\nlayout="pp"\ncontext=1\nsequences=[1]\nmilliseconds=[1.0]', "pp"),
    ],
)
def test_a_file_of_timings_that_cannot_be_used_says_why(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        OwnSteps("times.toml", QWEN, 8, OwnTimings.decode(text.encode()))


def test_layouts_without_common_points_are_refused() -> None:
    times = tuple(
        OwnTimes(layout=layout, context=1, sequences=sizes, milliseconds=(1.0, 2.0, 3.0, 4.0))
        for layout, sizes in (("ep", (1, 2, 3, 4)), ("tp", (10, 20, 30, 40)))
    )
    with pytest.raises(ValueError, match="no sequences or contexts in common"):
        OwnSteps("f", QWEN, 8, OwnTimings(times=times))
