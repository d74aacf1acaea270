"""How the choice of a layout is shown."""

from typing import Any

from deploy.views.layout_choice import crossings, curve_rows, option_rows, sentences
from fleet.requests.layouts import EngineLayout, LayoutCrossing, LayoutOption, StepTimeCurve


def choice(**changes: Any) -> EngineLayout:
    stated: dict[str, Any] = {
        "engine": "engine-0",
        "worker_id": 1,
        "layout": "dp, experts whole",
        "policy": "regret",
        "automatic": True,
        "running": 12,
        "waiting": 3,
        "context": 100.4,
        "decided": "stays: no gain\x1b[2J",
    }
    return EngineLayout(**{**stated, **changes})


def curve(layout: Any, *seconds: float) -> StepTimeCurve:
    points = tuple(range(1, len(seconds) + 1))
    return StepTimeCurve(layout=layout, sequences=points, seconds=seconds, deviation=(0.01,) * len(seconds))


def test_load_and_reason_are_told_without_control_sequences() -> None:
    lines = [line.plain for line in sentences(choice())]
    assert lines == [
        "choice: automatic, policy regret",
        "load: 12 decoding sequences, 3 waiting, 100 tokens of context",
        "stays: no gain [2J",
    ]


def test_a_layout_kept_by_hand_names_the_command_that_frees_it() -> None:
    first, *_ = sentences(choice(automatic=False))
    assert "roost layout engine-0 --auto on" in first.plain


def test_every_layout_has_its_step_regret_and_cost() -> None:
    options = (
        LayoutOption(layout="ep", step_seconds=0.008, deviation=0.021, cost_seconds=0.0),
        LayoutOption(layout="tp", step_seconds=0.004, deviation=0.2, uncertain=True, regret_seconds=1.5),
        LayoutOption(layout="experts-tp"),
    )
    assert list(option_rows(choice(options=options))) == [
        ("ep", "8 ms ± 2.1%", "0 us", "0 us"),
        ("tp", "4 ms ± 20.0%, uncertain", "1.5 s", "unknown"),
        ("experts-tp", "unknown", "0 us", "unknown"),
    ]


def test_a_curve_marks_the_fastest_layout_at_each_batch() -> None:
    rows = list(curve_rows((curve("ep", 0.003, 0.004), curve("tp", 0.002, 0.005))))
    assert rows == [("1", "3 ms", "2 ms *"), ("2", "4 ms *", "5 ms")]


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    rows = list(curve_rows((curve("ep", *(0.001 * n for n in range(1, 40))),)))
    assert len(rows) <= 10
    assert (rows[0][0], rows[-1][0]) == ("1", "39")
    assert list(curve_rows(())) == []


def test_crossings_are_sentences() -> None:
    found = LayoutCrossing(sequences=50.4, below="tp", above="ep")
    assert "at 50 sequences tp and ep" in crossings((found,))
    assert "none" in crossings(())
