"""Calibrated curves corrected by live steps of the layout in force."""

from math import log

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.layout_times import LayoutName, LayoutTimes
from migration.layouts.curves_record import CurveKey, CurvesRecord
from migration.layouts.live_curves import LiveCurves

KEY = CurveKey(weights="w", hardware="h", ranks=2)
BATCHES = (1, 3, 9, 28, 84, 256)
HOUR = 3600.0


def times(layout: LayoutName, fixed: float, per_sequence: float, surplus: float = 0.0) -> LayoutTimes:
    row = tuple(1e-3 * (fixed + per_sequence * batch) for batch in BATCHES)
    return LayoutTimes(
        layout=layout,
        sequences=BATCHES,
        contexts=(1024,),
        seconds=(row,),
        noise=0.02,
        prefill_token=1e-5,
        surplus=surplus,
    )


EP, TP = times("ep", 5.0, 0.02, surplus=3.0), times("tp", 3.0, 0.06)


def live(expert_pair: float = 0.0) -> LiveCurves:
    return LiveCurves(KEY, (EP, TP), 0.0, expert_pair=expert_pair)


def ratio(curves: LiveCurves, sequences: float) -> float:
    return log(curves.step_seconds("ep", sequences, 1024) / curves.step_seconds("tp", sequences, 1024))


def serve(
    curves: LiveCurves, layout: LayoutName, factor: float, begin: float, seconds: int, sequences: float = 50.0
) -> float:
    """Report a step a second that takes `factor` times what was calibrated; the end."""
    for at in range(seconds):
        truth = factor * curves.curves.curves[layout].seconds(sequences, 1024)
        curves.observe(layout, sequences, 1024, truth, begin + at)
    return begin + seconds


def test_without_live_steps_the_calibrated_curves_hold() -> None:
    curves = live()
    for layout in ("ep", "tp"):
        assert curves.step_seconds(layout, 50, 1024) == curves.curves.curves[layout].seconds(50, 1024)
        assert curves.prefill_token(layout) == 1e-5
        assert not curves.uncertain(layout)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3, 3.0])
def test_a_machine_that_is_slower_is_slower_in_every_layout(factor: float) -> None:
    curves = live()
    before = ratio(curves, 50)
    serve(curves, "ep", factor, 0.0, 60)
    assert curves.step_seconds("ep", 50, 1024) == pytest.approx(
        factor * curves.curves.curves["ep"].seconds(50, 1024), rel=0.02
    )
    assert ratio(curves, 50) == pytest.approx(before, abs=0.05)
    assert curves.prefill_token("tp") == pytest.approx(factor * 1e-5, rel=0.05)


def test_a_curve_that_was_measured_wrongly_is_known_after_a_visit() -> None:
    """TP is 30 % slower than calibrated. EP has told how fast the machine is just before."""
    curves = live()
    now = serve(curves, "ep", 1.0, 0.0, 1800)
    now = serve(curves, "tp", 1.3, now, 300)
    assert curves.step_seconds("tp", 50, 1024) == pytest.approx(
        1.3 * curves.curves.curves["tp"].seconds(50, 1024), rel=0.03
    )
    calibrated = log(
        curves.curves.curves["ep"].seconds(50, 1024) / curves.curves.curves["tp"].seconds(50, 1024)
    )
    assert ratio(curves, 50) - calibrated < 0.5 * log(1 / 1.3)


def test_a_layout_wrong_at_large_batches_only_is_corrected_there() -> None:
    curves = live()
    now = 0.0
    for _ in range(60):
        now = serve(curves, "ep", 1.0, now, 20, sequences=3)
        now = serve(curves, "ep", 1.2, now, 20, sequences=84)
    calibrated = curves.curves.curves["ep"]
    apart = log(curves.step_seconds("ep", 84, 1024) / calibrated.seconds(84, 1024))
    apart -= log(curves.step_seconds("ep", 3, 1024) / calibrated.seconds(3, 1024))
    assert apart == pytest.approx(log(1.2), abs=0.08)


def test_corrected_curves_are_what_is_believed_now() -> None:
    curves = live(expert_pair=1e-5)
    curves.imbalance(5.0)
    serve(curves, "tp", 1.3, 0.0, 600)
    shown = curves.corrected()
    for batch in (1, 7, 50, 256):
        for layout in ("ep", "tp"):
            assert shown.seconds(layout, batch, 1024) == pytest.approx(
                curves.step_seconds(layout, batch, 1024), rel=0.01
            )
            assert shown.curves[layout].deviation(batch, 1024) == pytest.approx(
                curves.deviation(layout, batch, 1024), rel=0.05
            )
    (crossing,) = shown.crossings("ep", "tp", 1024)
    assert abs(ratio(curves, crossing.sequences)) < 0.01


def test_one_wild_report_changes_little() -> None:
    curves = live()
    now = serve(curves, "ep", 1.0, 0.0, 60)
    before = ratio(curves, 50)
    curves.observe("ep", 50, 1024, 1.0, now)
    assert ratio(curves, 50) == pytest.approx(before, abs=0.02)
    assert curves.step_seconds("ep", 50, 1024) < 1.1 * curves.curves.curves["ep"].seconds(50, 1024)


def test_layouts_age_while_another_is_in_force() -> None:
    curves = LiveCurves(KEY, (EP, TP), 0.0, stale_seconds=HOUR)
    fresh = curves.deviation("tp", 50, 1024)
    serve(curves, "ep", 1.0, 0.0, 60)
    curves.advance(HOUR - 1)
    assert not curves.uncertain("tp")
    aged = curves.deviation("tp", 50, 1024)
    assert aged > 1.2 * fresh
    curves.observe("ep", 50, 1024, 6e-3, HOUR + 1)
    assert curves.uncertain("tp")
    assert not curves.uncertain("ep")
    serve(curves, "tp", 1.0, HOUR + 2, 60)
    assert not curves.uncertain("tp")
    assert curves.deviation("tp", 50, 1024) < aged


def test_a_layout_without_a_curve_is_uncertain() -> None:
    curves = LiveCurves(KEY, (), 0.0)
    curves.observe("ep", 50, 1024, 6e-3, 1.0)
    assert curves.uncertain("ep")
    assert live().uncertain("experts-tp")
    with pytest.raises(KeyError, match="experts-tp"):
        live().step_seconds("experts-tp", 50, 1024)


def test_batches_that_were_not_measured_correct_nothing() -> None:
    curves = live()
    before = curves.record().machine
    curves.observe("ep", 257, 1024, 1.0, 1.0)
    assert curves.record().machine == before
    assert not curves.within(257, 1024)
    assert curves.step_seconds("ep", 5000, 1024) == curves.step_seconds("ep", 256, 1024)


def test_imbalance_above_that_of_the_calibration_costs_expert_parallelism_alone() -> None:
    curves = live(expert_pair=1e-5)
    calm = [curves.step_seconds(layout, 50, 1024) for layout in ("ep", "tp")]
    curves.imbalance(5.0)
    skewed = [curves.step_seconds(layout, 50, 1024) for layout in ("ep", "tp")]
    assert skewed[0] - calm[0] == pytest.approx(50 * (5.0 - 3.0) * 1e-5)
    assert skewed[1] == calm[1]
    curves.imbalance(3.0)
    assert curves.step_seconds("ep", 50, 1024) == calm[0]
    curves.imbalance(0.0)
    assert 0 < curves.step_seconds("ep", 50, 1024) < calm[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite seconds above 0"):
        live().observe("ep", 50, 1024, seconds, 1.0)
    with pytest.raises(ValueError, match="a context finite tokens"):
        live().observe("ep", 50, float("nan"), 1.0, 1.0)
    with pytest.raises(ValueError, match="finite and at least 0"):
        live().imbalance(-1.0 if seconds == 0 else seconds)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ep", "tp"]),
            st.floats(0.5, 300.0),
            st.floats(1e-5, 1.0),
            st.floats(-10.0, 5000.0),
        ),
        max_size=30,
    )
)
def test_a_record_continues_where_it_ended(reports: list[tuple[LayoutName, float, float, float]]) -> None:
    curves, now = live(), 0.0
    for layout, sequences, seconds, later in reports:
        now = max(0.0, now + later)
        curves.observe(layout, sequences, 1024, seconds, now)
    stored = msgspec.json.decode(msgspec.json.encode(curves.record()), type=CurvesRecord)
    again = LiveCurves.restored(stored, KEY, (EP, TP), now)
    assert again.record() == curves.record()
    for layout in ("ep", "tp"):
        assert again.step_seconds(layout, 20, 1024) == curves.step_seconds(layout, 20, 1024)
        assert 0 < again.step_seconds(layout, 20, 1024) < float("inf")


@pytest.mark.parametrize(
    "key", [CurveKey(weights="x", hardware="h", ranks=2), CurveKey(weights="w", hardware="h", ranks=4)]
)
def test_figures_of_another_model_or_machine_are_dropped(key: CurveKey) -> None:
    curves = live()
    serve(curves, "ep", 2.0, 0.0, 60)
    again = LiveCurves.restored(curves.record(), key, (EP, TP), 60.0)
    assert again.record() == LiveCurves(key, (EP, TP), 60.0).record()
    assert LiveCurves.restored(curves.record(), key, (), 60.0).uncertain("ep")


def test_a_new_calibration_begins_anew_and_none_keeps_the_stored_one() -> None:
    curves = live()
    serve(curves, "ep", 2.0, 0.0, 60)
    assert LiveCurves.restored(curves.record(), KEY, (), 60.0).record() == curves.record()
    newer = (times("ep", 6.0, 0.02), TP)
    assert (
        LiveCurves.restored(curves.record(), KEY, newer, 60.0).record()
        == LiveCurves(KEY, newer, 60.0).record()
    )


def test_stored_figures_out_of_range_are_refused() -> None:
    good = msgspec.to_builtins(live().record())
    factor, (ep, tp) = good["machine"], good["corrections"]
    for name, bad, words in (
        ("machine", {**factor, "value": 50.0}, "value must be from -5 to 5, not 50.0"),
        ("machine", {**factor, "variance": -1.0}, "variance must be from 0 to 1, not -1.0"),
        ("machine", {**factor, "updated": 1e12}, "time must be from 0 to 1e.11"),
        ("corrections", [ep], "beside times"),
        ("corrections", [{**ep, "knots": [factor]}, tp], "remove the record"),
        ("corrections", [{**ep, "measured": -1.0}, tp], "ep was measured at Unix time -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            msgspec.convert({**good, name: bad}, CurvesRecord)


def test_drift_of_both_is_followed_through_a_day_of_switches() -> None:
    """The machine slows by 40 % and back; comparisons stay within a few percent of the truth."""
    dice, curves, worst = np.random.default_rng(2), live(), 0.0
    calibrated = {layout: curves.curves.curves[layout] for layout in ("ep", "tp")}
    for at in range(0, 20_000, 10):
        layout: LayoutName = "ep" if at // 2500 % 2 else "tp"
        factor = 1.2 + 0.2 * float(np.sin(at / 3000))
        batch = float(np.exp(dice.uniform(np.log(4), np.log(128))))
        seconds = calibrated[layout].seconds(batch, 1024) * factor * float(np.exp(dice.normal(0, 0.02)))
        curves.observe(layout, batch, 1024, seconds, float(at))
        truth = log(calibrated["ep"].seconds(batch, 1024) / calibrated["tp"].seconds(batch, 1024))
        worst = max(worst, abs(ratio(curves, batch) - truth))
    assert worst < 0.1


SHARDED = times("experts-tp", 6.0, 0.03)
PAIR = 1e-5


def with_single_layers() -> LiveCurves:
    return LiveCurves(KEY, (EP, SHARDED), 0.0, expert_pair=PAIR)


def even(batch: float) -> float:
    """A step of whole layers without the imbalance that the calibration had."""
    return EP.seconds[0][BATCHES.index(int(batch))] - PAIR * EP.surplus * batch


def test_the_gain_of_an_even_layer_is_its_part_of_the_difference_without_any_imbalance() -> None:
    curves = with_single_layers()
    for surplus in (0.0, 2.0, 7.0):
        curves.imbalance(surplus)
        gain = curves.even_layer_gain(84, 1024, 10)
        assert gain is not None
        assert gain.seconds == pytest.approx((even(84) - SHARDED.seconds[0][4]) / 10, rel=0.1)
        apart = 0.02 * (even(84) + SHARDED.seconds[0][4]) / 10
        assert 0.2 * apart < gain.error < 3 * apart
    curves.imbalance(EP.surplus)
    serve(curves, "ep", 2.0, 0.0, 60, 84.0)
    assert curves.machine > 1.5
    later = curves.even_layer_gain(84, 1024, 10)
    assert later is not None
    assert gain is not None
    assert later.seconds == pytest.approx(gain.seconds, rel=0.3), "as of the calibration"
    assert live().even_layer_gain(84, 1024, 10) is None


def test_layers_that_are_sharded_take_as_long_as_in_the_sharded_layout() -> None:
    """A step that is as long as expected changes neither layout's curve."""
    curves = with_single_layers()
    curves.imbalance(1.0)
    curves.sharded_layers(0.25)
    seconds = 0.75 * even(84) + 0.25 * SHARDED.seconds[0][4] + PAIR * 84
    assert curves.step_seconds("ep", 84, 1024) == pytest.approx(seconds, rel=0.02)
    expected = curves.step_seconds("ep", 84, 1024)
    for at in range(60):
        curves.observe("ep", 84, 1024, expected, float(at))
    assert curves.step_seconds("experts-tp", 84, 1024) == pytest.approx(SHARDED.seconds[0][4], rel=0.02)


def test_a_copy_keeps_the_curves_of_that_moment() -> None:
    curves = with_single_layers()
    curves.imbalance(5.0)
    kept, before = curves.copied(), curves.step_seconds("ep", 50, 1024)
    serve(curves, "ep", 1.5, 0.0, 60)
    assert kept.step_seconds("ep", 50, 1024) == before != curves.step_seconds("ep", 50, 1024)
