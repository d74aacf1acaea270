"""Windows of measurements from engines: means, errors, bounds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.facts.activity import DispatchMeasured
from fleet.placement import linear, with_attention, with_rows
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry, InvalidPlacementEvent, PlacementFault
from migration.loop_state import dispatch_windows
from migration.loop_state.dispatch_windows import SLICES, DispatchWindows

WHOLE = linear(layers=3, experts=8, ranks=2)
ENTRY = EngineEntry("a", 1, with_rows(WHOLE, {0: None}, epoch=0))
CONFIG = MigrationConfig(window_seconds=30.0, evaluation_seconds=30.0)


def measured(config: MigrationConfig = CONFIG) -> DispatchWindows:
    found = DispatchWindows(config)
    found.keep_only([ENTRY])
    return found


def report(
    rank: int = 0, epoch: int = 0, steps: int = 10, took: float = 0.02, tokens: int = 100, **fields: Any
) -> DispatchMeasured:
    plain: dict[str, Any] = {
        "seconds": 1.0,
        "pairs": 2 * tokens,
        "remote_ranks": (0.0, 0.3 * tokens, 0.5 * tokens),
        "local": (0.0, 1.0 * tokens, 0.5 * tokens),
        "served": (0.0, 2.0 * tokens, 2.0 * tokens),
        "balance": (0.0, 0.8 * steps, 0.6 * steps),
    }
    return DispatchMeasured(
        engine="a",
        worker_id=1,
        rank=rank,
        model="m",
        epoch=epoch,
        steps=steps,
        step_seconds=took,
        tokens=tokens,
        **{**plain, **fields},
    )


def test_means_are_over_all_that_was_said_and_leave_out_layers_that_are_sharded() -> None:
    kept = measured()
    for second in range(8):
        kept.add(report(0), float(second))
        kept.add(report(1, tokens=300), second + 0.5)
    window = kept.window(1, 8.0)
    assert window is not None
    figures = window.measured.figures
    assert (figures.remote_ranks, figures.local, figures.balance) == pytest.approx((0.4, 0.375, 0.7))
    assert (figures.step_seconds, figures.tokens) == pytest.approx((0.002, 3200))
    assert window.measured.token_seconds == pytest.approx(0.002 / 40), (
        "a step of 40 tokens, of both ranks together"
    )
    assert window.measured.pairs == 6400
    assert window.layers.balance == pytest.approx((0.0, 0.8, 0.6))
    assert window.measured.errors.remote_ranks == pytest.approx(0.0, abs=1e-12)


def test_the_share_of_communication_is_of_all_steps_and_unknown_where_a_rank_cannot_tell() -> None:
    known, unknown = measured(), measured()
    for second in range(8):
        for rank, seconds in ((0, 0.004), (1, 0.012)):
            known.add(report(rank, communication_seconds=seconds), float(second))
            unknown.add(report(rank, communication_seconds=seconds if rank else None), float(second))
    window, without = known.window(1, 8.0), unknown.window(1, 8.0)
    assert window is not None
    assert without is not None
    assert window.measured.figures.communication == pytest.approx(0.4), "16 of 40 ms"
    assert without.measured.figures.communication is None


def test_every_epoch_has_a_window_of_its_own_and_what_is_older_than_asked_for_is_left_out() -> None:
    kept = measured()
    for second in range(10):
        kept.add(report(epoch=0, balance=(0.0, 2.0, 2.0)), float(second))
    for second in range(10, 20):
        kept.add(report(epoch=1), float(second))
    for epoch, balance in ((0, 0.2), (1, 0.7)):
        window = kept.window(1, 20.0, epoch=epoch)
        assert window is not None
        assert window.measured.figures.balance == pytest.approx(balance)
    late = kept.window(1, 20.0, since=15.0)
    assert late is not None
    assert late.measured.figures.tokens == 500
    assert kept.window(1, 20.0, epoch=2) is None
    assert kept.window(1, 20.0, seconds=2.0) is None, "of two seconds nobody can tell the error"
    assert kept.window(2, 20.0) is None


def test_ranks_that_report_a_new_epoch_one_after_another_cost_no_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_windows, "MIN_SLICES", 1)
    kept, turns = measured(), 4 * SLICES
    for turn in range(turns):
        kept.add(report(turn % 2, epoch=turn % 2), 0.8 * turn / turns)
    for epoch in (0, 1):
        window = kept.window(1, 1.0, epoch=epoch)
        assert window is not None
        assert window.measured.figures.tokens == 100 * turns / 2, "none was dropped"


def test_the_error_of_a_mean_is_about_what_its_spread_makes_it() -> None:
    chance, spread, found = np.random.default_rng(1), 0.2, []
    for _ in range(40):
        kept = measured()
        for second in range(24):
            step = 0.02 * max(1.0 + spread * float(chance.standard_normal()), 0.1)
            kept.add(report(took=step), float(second))
        window = kept.window(1, 24.0)
        assert window is not None
        found.append((window.measured.figures.step_seconds, window.measured.errors.step_seconds))
    means, errors = np.array(found).T
    assert 0.5 < errors.mean() / means.std() < 2.0


@given(st.lists(st.tuples(st.floats(1, 40), st.integers(0, 3)), max_size=2 * SLICES))
def test_a_bounded_number_of_slices_is_kept(story: list[tuple[float, int]]) -> None:
    kept, now = measured(), 0.0
    for pause, epoch in story:
        now += pause
        kept.add(report(epoch=epoch), now)
    window = kept.window(1, now)
    assert window is None or window.measured.figures.tokens == 100 * min(len(story), SLICES)
    kept.keep_only([])
    assert kept.window(1, now) is None
    kept.keep_only([ENTRY])
    assert kept.window(1, now) is None, "a present engine starts anew"


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"rank": 2}, PlacementFault.SHAPE),
        ({"balance": (1.0,)}, PlacementFault.SHAPE),
        ({"steps": 0}, PlacementFault.DEMAND),
        ({"took": float("inf")}, PlacementFault.DEMAND),
        ({"took": 1.5}, PlacementFault.DEMAND),
        ({"communication_seconds": 0.03}, PlacementFault.DEMAND),
        ({"communication_seconds": -0.01}, PlacementFault.DEMAND),
        ({"communication_seconds": float("nan")}, PlacementFault.DEMAND),
        ({"seconds": 1e9, "took": 1e9}, PlacementFault.DEMAND),
        ({"tokens": -1}, PlacementFault.DEMAND),
        ({"remote_ranks": (0.0, 0.0, 101.0)}, PlacementFault.DEMAND),
        ({"local": (0.0, 0.0, 201.0)}, PlacementFault.DEMAND),
        ({"local": (0.0, 0.0, -1.0)}, PlacementFault.DEMAND),
        ({"balance": (0.0, 0.0, 10.5)}, PlacementFault.DEMAND),
        ({"served": (0.0, float("nan"), 0.0)}, PlacementFault.DEMAND),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    wrong: dict[str, Any], fault: PlacementFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_windows, "MIN_SLICES", 1)
    kept = measured()
    with pytest.raises(InvalidPlacementEvent) as refusal:
        kept.add(report(**wrong), 0.0)
    assert refusal.value.fault is fault
    assert kept.window(1, 0.0) is None
    kept.add(report(), 0.0)
    assert kept.window(1, 0.0) is not None


def test_reports_of_absent_engines_are_ignored_and_contradictory_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_windows, "MIN_SLICES", 1)
    kept = DispatchWindows(CONFIG)
    kept.add(report(), 0.0)
    kept.keep_only([ENTRY])
    assert kept.window(1, 0.0) is None, "it was not present then"
    kept.keep_only([])
    kept.keep_only([EngineEntry("b", 1, ENTRY.placement)])
    with pytest.raises(InvalidPlacementEvent, match="worker 1 is engine 'b'"):
        kept.add(report(), 0.0)


def test_measurements_begin_anew_where_layers_change_their_form() -> None:
    kept = measured()
    for second in range(8):
        kept.add(report(), float(second))
    moved = EngineEntry("a", 1, with_rows(WHOLE, {0: None}, epoch=1))
    kept.placed(moved)
    assert kept.window(1, 8.0) is not None, "the layers have the forms that they had"
    turned = EngineEntry("a", 1, with_rows(WHOLE, {0: None, 1: None}, epoch=2))
    kept.placed(turned)
    assert kept.window(1, 8.0) is None
    for second in range(8, 14):
        kept.add(report(0, epoch=2), float(second))
        kept.add(report(1, epoch=1), float(second))
    window = kept.window(1, 14.0)
    assert window is not None
    assert window.measured.figures.tokens == pytest.approx(6 * 100), (
        "late reports of other forms do not count"
    )
    assert window.measured.figures.balance == pytest.approx(0.6), "of the one layer that is whole"


def test_with_tensor_parallel_attention_rank_0_alone_reports_and_late_reports_are_no_error() -> None:
    kept = measured()
    every = with_rows(WHOLE, dict.fromkeys(range(WHOLE.layers)), epoch=1)
    kept.placed(EngineEntry("a", 1, every))
    kept.placed(EngineEntry("a", 1, with_attention(every, "tp", epoch=2)))
    kept.add(report(1, epoch=1), 0.0)
    kept.add(report(0, epoch=2), 0.0)
    with pytest.raises(InvalidPlacementEvent, match="rank 1 of an engine of 1"):
        kept.add(report(1, epoch=2), 0.0)
    kept.placed(EngineEntry("a", 1, with_attention(every, "dp", epoch=3)))
    kept.add(report(1, epoch=3), 0.0)
