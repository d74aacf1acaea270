"""Step times over batch and context from a few noisy measurements, and their crossings."""

from itertools import pairwise
from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.step_curves.accuracy import CONTEXT, CONTEXTS, Score, judged
from benchmarks.rig.step_curves.families import FAMILIES, cells, changes, drawn, measured
from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.curves import LayoutCurves, StepCurve

BATCHES = (1, 3, 9, 28, 84, 256)


def times(
    layout: LayoutName, *rows: list[float], contexts: tuple[int, ...] = (1024,), noise: float = 0.02
) -> LayoutTimes:
    return LayoutTimes(
        layout=layout,
        sequences=BATCHES,
        contexts=contexts,
        seconds=tuple(tuple(row) for row in rows),
        noise=noise,
        prefill_token=1e-5,
    )


def line(fixed: float, per_sequence: float) -> list[float]:
    return [1e-3 * (fixed + per_sequence * batch) for batch in BATCHES]


@pytest.mark.parametrize("most", [256, 2048])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_faster_layout_is_named_wherever_they_differ(family: str, most: int) -> None:
    """The benchmark draws a thousand pairs of each family; here are a few."""
    score = Score.of([judged(family, most, seed) for seed in range(12)])
    hard = family in ("alike", "graphs")  # differences hardly above the noise, and steps between the points
    assert score.right > (0.85 if hard else 0.97)
    assert score.false <= 2
    assert score.missed <= 4


def test_the_faster_layout_is_named_between_measured_contexts() -> None:
    score = Score.of([judged(family, 256, seed, CONTEXTS) for family in FAMILIES for seed in range(4)])
    assert score.right > 0.97


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_pairs_cross_at_most_once_between_neighbouring_points(family: str) -> None:
    pair, at = drawn(family, np.random.default_rng(3), 256), cells(256)
    log_ratio = pair.log_ratio(256, 0.0)
    for low, high in pairwise(measured(256)):
        assert changes(log_ratio[(at >= low) & (at <= high)]) <= 1


def test_a_line_is_met_between_the_points() -> None:
    curve = StepCurve.fitted(times("ep", line(5.0, 0.05)))
    for batch in (2, 5, 15, 50, 150):
        assert curve.seconds(batch, 1024) == pytest.approx(1e-3 * (5.0 + 0.05 * batch), rel=0.03)


def test_two_lines_cross_once_where_they_do() -> None:
    curves = LayoutCurves.fitted((times("ep", line(5.0, 0.02)), times("tp", line(3.0, 0.06))))
    (crossing,) = curves.crossings("ep", "tp", 1024)
    assert crossing.sequences == pytest.approx(50.0, rel=0.15)
    assert crossing.surely_below < 50.0 < crossing.surely_above
    assert (crossing.below, crossing.above) == ("tp", "ep")
    assert curves.crossings("tp", "ep", 1024) == (crossing,)
    assert (curves.better(5, 1024), curves.better(200, 1024)) == ("tp", "ep")


def test_a_layout_that_is_always_faster_has_no_crossing() -> None:
    curves = LayoutCurves.fitted((times("ep", line(5.0, 0.05)), times("tp", line(4.0, 0.04))))
    assert curves.crossings("ep", "tp", 1024) == ()
    assert {curves.better(batch, 1024) for batch in range(1, 257)} == {"tp"}


def test_layouts_that_differ_by_noise_alone_have_no_crossing() -> None:
    dice, stated = np.random.default_rng(1), 0
    for _ in range(40):
        rows = [np.array(line(5.0, 0.05)) * np.exp(dice.normal(0, 0.02, len(BATCHES))) for _ in range(2)]
        curves = LayoutCurves.fitted((times("ep", rows[0].tolist()), times("tp", rows[1].tolist())))
        stated += bool(curves.crossings("ep", "tp", 1024))
        assert all(curves.difference("ep", "tp", batch, 1024).deviation > 0.01 for batch in BATCHES)
    assert stated <= 8


def test_several_crossings_are_all_stated() -> None:
    ratio = [1.3, 0.8, 1.3, 1.3, 0.7, 0.7]
    rows = [base * part for base, part in zip(line(5.0, 0.05), ratio, strict=True)]
    curves = LayoutCurves.fitted((times("ep", rows), times("tp", line(5.0, 0.05))))
    assert [(one.below, one.above) for one in curves.crossings("ep", "tp", 1024)] == [
        ("tp", "ep"),
        ("ep", "tp"),
        ("tp", "ep"),
    ]


def test_beyond_the_measured_range_the_last_value_holds_and_says_so() -> None:
    curve = StepCurve.fitted(times("ep", line(5.0, 0.05), line(5.0, 0.07), contexts=(512, 2048)))
    assert curve.seconds(5000, 1024) == curve.seconds(256, 1024)
    assert curve.seconds(0.0, 1024) == curve.seconds(1, 1024)
    assert curve.seconds(64, 9999) == curve.seconds(64, 2048)
    assert curve.seconds(64, 1) == curve.seconds(64, 512)
    assert not any(curve.within(*at) for at in ((257, 1024), (0.5, 1024), (64, 2049), (64, 511)))
    assert curve.within(1, 512)
    assert curve.within(256, 2048)


def test_a_layout_that_was_measured_less_is_not_faster_for_that() -> None:
    short = LayoutTimes(
        layout="tp",
        sequences=(1, 4, 16),
        contexts=(1024,),
        seconds=((3e-3, 3.5e-3, 5e-3),),
        noise=0.02,
        prefill_token=1e-5,
    )
    curves = LayoutCurves.fitted((times("ep", line(5.0, 0.05)), short))
    found = curves.difference("ep", "tp", 200, 1024)
    assert not found.within
    assert found.log_ratio == pytest.approx(curves.difference("ep", "tp", 16, 1024).log_ratio)
    assert curves.better(200, 1024) == "tp"


def test_between_contexts_the_time_is_a_line_of_tokens() -> None:
    curve = StepCurve.fitted(times("ep", line(5.0, 0.05), line(5.0, 0.08), contexts=(1000, 3000)))
    low, high = curve.seconds(100, 1000), curve.seconds(100, 3000)
    assert curve.seconds(100, 1500) == pytest.approx(low + 0.25 * (high - low))


def test_small_differences_are_indifferent() -> None:
    curves = LayoutCurves.fitted((times("ep", line(5.0, 0.05)), times("tp", line(5.05, 0.0505))))
    assert curves.difference("ep", "tp", 20, 1024).indifferent
    curves = LayoutCurves.fitted((times("ep", line(5.0, 0.05)), times("tp", line(6.0, 0.06))))
    assert not curves.difference("ep", "tp", 20, 1024).indifferent


def test_one_batch_is_enough_for_a_flat_curve() -> None:
    one = LayoutTimes(
        layout="ep", sequences=(8,), contexts=(64,), seconds=((5e-3,),), noise=0.02, prefill_token=1e-5
    )
    assert StepCurve.fitted(one).seconds(8, 64) == pytest.approx(5e-3)
    assert StepCurve.fitted(one).seconds(100, 64) == StepCurve.fitted(one).seconds(8, 64)


@settings(max_examples=40)
@given(
    st.lists(st.floats(1e-5, 10.0), min_size=6, max_size=6),
    st.floats(0.0, 0.3),
    st.floats(1.0, 256.0),
)
def test_any_measurements_make_a_finite_curve(row: list[float], noise: float, batch: float) -> None:
    curve = StepCurve.fitted(times("ep", row, noise=noise))
    assert 0.0 < curve.seconds(batch, 1024) < float("inf")
    assert 0.0 <= curve.deviation(batch, 1024) < float("inf")


@settings(max_examples=20)
@given(st.floats(1e-3, 1e3), st.floats(1.0, 256.0))
def test_units_do_not_matter(unit: float, batch: float) -> None:
    row = [one * (1.0 + 0.02 * (-1) ** at) for at, one in enumerate(line(5.0, 0.05))]
    plain = StepCurve.fitted(times("ep", row))
    scaled = StepCurve.fitted(times("ep", [unit * one for one in row]))
    assert scaled.seconds(batch, 1024) == pytest.approx(unit * plain.seconds(batch, 1024))


def test_more_noise_makes_the_answer_less_certain() -> None:
    sure, unsure = (StepCurve.fitted(times("ep", line(5.0, 0.05), noise=noise)) for noise in (0.01, 0.1))
    assert unsure.deviation(50, CONTEXT) > 2 * sure.deviation(50, CONTEXT)


CROSSING = LayoutCurves.fitted((times("ep", line(5.0, 0.02)), times("tp", line(3.0, 0.06))))


@given(st.floats(1.0, 300.0))
def test_the_difference_is_that_of_the_curves(batch: float) -> None:
    curves = CROSSING
    found = curves.difference("ep", "tp", batch, 1024)
    ratio = curves.curves["ep"].seconds(batch, 1024) / curves.curves["tp"].seconds(batch, 1024)
    assert found.log_ratio == pytest.approx(log(ratio))
    assert exp(found.log_ratio) > 0
