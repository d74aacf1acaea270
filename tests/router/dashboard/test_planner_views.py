"""The views Loop and Layouts, from the planner's answers and the timeline."""

import msgspec
import numpy as np

from fleet.facts.migrations import LoopFigures
from fleet.layout import EP, tp
from fleet.placement import linear
from fleet.requests.control_loop import EngineLoop, LoopDescribed, PlanSummary
from fleet.requests.layouts import EngineLayout, LayoutOption, LayoutsDescribed, StepTimeCurve
from router.dashboard.views.layouts import layouts_picture
from router.dashboard.views.loop import loop_picture
from router.dashboard.views.plan_timeline import LayoutSpan, PlanTimeline
from router.fleet_state.engine_state import EngineState, EngineStatus
from tests.router.dashboard.test_plan_timeline import committed, evaluated, planned, staged
from tests.router.router_fixture import engine_joined

FIGURES = LoopFigures(remote_ranks=1.5, local=0.25, balance=0.8, step_seconds=0.02)


def summary(plan: str, outcome: str, at: float = 1.0) -> PlanSummary:
    return PlanSummary(
        plan=plan, origin="planner", policy="weighted", at=at, outcome=outcome, copies=3, bytes=30
    )


def described(*plans: PlanSummary, paused: bool = False) -> LoopDescribed:
    engine = EngineLoop(
        engine="a",
        worker_id=2**64 - 1,
        epoch=4,
        plan_discount=0.5,
        decided="nothing pays",
        decided_at=90.0,
        next_seconds=3.2,
        spent_bytes=10,
        moved_bytes=40,
        measured=FIGURES,
        plans=plans,
    )
    return LoopDescribed(
        policy="weighted",
        automatic=True,
        paused=paused,
        paused_reason="load test" if paused else "",
        paused_at=80.0 if paused else None,
        budget_bytes=100,
        budget_seconds=60.0,
        cycle_seconds=5.0,
        engines=(engine, msgspec.structs.replace(engine, engine="A", next_seconds=None, plans=())),
    )


def timeline(*entries: object) -> PlanTimeline:
    made = PlanTimeline()
    for at, entry in enumerate(entries, start=100):
        made.apply(entry, float(at))
    return made


def test_before_the_first_answer_the_page_says_why_nothing_is_known() -> None:
    picture = loop_picture(None, "no planner is running", (), 60.0)
    assert (picture.loop, picture.engines, picture.plans) == (None, [], [])
    assert picture.silence == "no planner is running"


def test_the_loop_is_shown_as_the_planner_states_it() -> None:
    picture = loop_picture(described(paused=True), "", (), 60.0)
    assert picture.loop is not None
    assert (picture.loop.paused, picture.loop.paused_reason, picture.loop.paused_at) == (
        True,
        "load test",
        80,
    )
    assert [one.engine for one in picture.engines] == ["A", "a"]
    one = picture.engines[1]
    assert (one.spent_bytes, one.moved_bytes, one.plan_discount) == (10, 40, 0.5)
    assert (one.decided, one.on_request, picture.engines[0].on_request) == ("nothing pays", False, True)
    assert one.measured == FIGURES


def test_plans_of_the_log_come_before_summaries_of_older_ones() -> None:
    bars = timeline(planned("new"), staged(0, plan="new"), committed(0, last=True, plan="new")).plans
    answer = described(summary("new", "committed", at=100.0), summary("old", "aborted after 0: no", at=50.0))
    picture = loop_picture(answer, "", bars, 60.0)
    assert [(plan.plan, plan.state, len(plan.bars)) for plan in picture.plans] == [
        ("new", "committed", 1),
        ("old", "aborted", 0),
    ]
    assert picture.plans[1].fault == "aborted after 0: no"


def test_outcomes_of_summaries_are_states_and_verdicts() -> None:
    outcomes = (
        "kept",
        "harmful",
        "unknown",
        "committed",
        "under way, 1 of 2 handovers done",
        "aborted after 0: x",
    )
    answer = described(*(summary(str(at), outcome, at=-at) for at, outcome in enumerate(outcomes)))
    picture = loop_picture(answer, "", (), 60.0)
    assert [(plan.state, plan.verdict) for plan in picture.plans] == [
        ("committed", "kept"),
        ("committed", "harmful"),
        ("committed", "unknown"),
        ("committed", ""),
        ("under way", ""),
        ("aborted", ""),
    ]


def test_the_page_does_not_change_because_time_passes() -> None:
    bars = timeline(planned(), staged(0), committed(0, last=True), evaluated()).plans
    later = described()
    later = msgspec.structs.replace(
        later, engines=tuple(msgspec.structs.replace(one, next_seconds=1.0) for one in later.engines)
    )
    first = loop_picture(
        msgspec.structs.replace(
            later, engines=tuple(msgspec.structs.replace(one, next_seconds=0.5) for one in later.engines)
        ),
        "",
        bars,
        60.0,
    )
    assert msgspec.json.encode(first) == msgspec.json.encode(loop_picture(later, "", bars, 60.0))


def engine(name: str, layout: object = EP, status: EngineStatus = EngineStatus.LIVE) -> EngineState:
    joined = engine_joined(name, ["http://h:1", "http://h:2"], None)
    placement = linear(layers=2, experts=4, ranks=2)
    state = EngineState(joined, placement, layout)  # type: ignore[arg-type]
    state.status = status
    return state


CHOICE = EngineLayout(
    engine="a",
    worker_id=2**64 - 1,
    layout="ep",
    policy="regret",
    automatic=True,
    running=7,
    context=1234.56,
    options=(
        LayoutOption(layout="ep", step_seconds=0.01),
        LayoutOption(layout="tp", step_seconds=0.02, regret_seconds=3.0, cost_seconds=9.0),
    ),
    curves=(StepTimeCurve(layout="ep", sequences=(1, 8), seconds=(0.0123456, 0.02), deviation=(0.01, 0.02)),),
    decided="it stays",
)


def test_each_engine_has_its_layout_and_how_the_planner_chooses() -> None:
    spans = {"a": [LayoutSpan(at=None, epoch=None, attention="dp", sharded=0, layers="")]}
    answer = LayoutsDescribed(engines=(CHOICE,))
    picture = layouts_picture([engine("b", tp(2)), engine("a")], answer, "", spans, 60.0)
    first, second = picture.engines
    assert (first.engine, first.attention, first.sharded, first.epoch) == ("a", "dp", 0, 0)
    assert first.spans == spans["a"]
    assert first.choice is not None
    assert (first.choice.running, first.choice.context) == (7, 1234.6)
    assert first.choice.options[1].regret_seconds == 3.0
    np.testing.assert_allclose(first.choice.curves[0].step_ms, [12.35, 20.0])
    assert (second.engine, second.attention, second.sharded_layers, second.choice) == ("b", "tp", "0-1", None)


def test_engines_that_are_gone_or_report_no_experts_are_left_out() -> None:
    gone = [engine("a", status=status) for status in (EngineStatus.LEFT, EngineStatus.DEAD)]
    plain = engine("c")
    plain.placement = None
    assert layouts_picture([*gone, plain], None, "no planner is running", {}, 60.0).engines == []
