"""The timeline of plans and layouts, as the log tells it."""

from typing import Any

import numpy as np

from fleet.facts.migrations import (
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PlanEvaluated,
)
from fleet.placement import Placement, linear, with_rows
from router.dashboard.views import plan_timeline
from router.dashboard.views.plan_timeline import PlanTimeline

WHOLE = linear(layers=3, experts=4, ranks=2)
FIGURES = LoopFigures(remote_ranks=1.0, local=0.5, balance=0.9, step_seconds=0.01)


def planned(plan: str = "p", engine: str = "a", **about: Any) -> MigrationPlanned:
    values: dict[str, Any] = {"origin": "planner", "policy": "weighted", "handovers": 2, "bytes": 30} | about
    return MigrationPlanned(
        engine=engine, worker_id=1, plan=plan, base_epoch=0, copies=3, reason="demand moved", **values
    )


def staged(number: int, placement: Placement = WHOLE, plan: str = "p", engine: str = "a") -> MigrationStaged:
    return MigrationStaged(
        engine=engine,
        worker_id=1,
        plan=plan,
        handover=number + 1,
        number=number,
        epoch=number + 1,
        placement=placement.record(),
        copies=1,
        bytes=10,
        seconds=2.0,
    )


def committed(number: int, *, last: bool, plan: str = "p", engine: str = "a") -> MigrationCommitted:
    return MigrationCommitted(
        engine=engine,
        worker_id=1,
        plan=plan,
        handover=number + 1,
        number=number,
        epoch=number + 1,
        copies=1,
        bytes=10,
        seconds=2.5,
        commit_seconds=0.5,
        last=last,
    )


def aborted(plan: str = "p") -> MigrationAborted:
    return MigrationAborted(
        engine="a", worker_id=1, plan=plan, handover=1, number=0, epoch=1, reason="rank 1 died", fault="dead"
    )


def evaluated(plan: str = "p") -> PlanEvaluated:
    return PlanEvaluated(
        engine="a",
        worker_id=1,
        plan=plan,
        epoch=2,
        verdict="harmful",
        predicted_before=FIGURES,
        predicted_after=FIGURES,
        realised=-0.5,
        plan_discount=0.4,
        reason="steps became longer",
    )


def told(*entries: object) -> PlanTimeline:
    """A timeline of entries, one a second from 100 on."""
    timeline = PlanTimeline()
    for at, entry in enumerate(entries, start=100):
        timeline.apply(entry, float(at))
    return timeline


def test_a_plan_has_its_handovers_its_end_and_its_verdict() -> None:
    timeline = told(
        planned(), staged(0), committed(0, last=False), staged(1), committed(1, last=True), evaluated()
    )
    (plan,) = timeline.plans
    assert (plan.engine, plan.plan, plan.state, plan.at, plan.ended_at) == ("a", "p", "committed", 100, 104)
    assert (plan.done, plan.handovers, plan.moved_bytes, plan.counts) == (2, 2, 20, True)
    first, second = plan.bars
    assert (first.number, first.begun_at, first.staged_at, first.committed_at) == (0, 99, 101, 102)
    assert (second.epoch, second.committed_at, second.commit_seconds) == (2, 104, 0.5)
    assert (plan.verdict, plan.verdict_at, plan.realised, plan.plan_discount) == ("harmful", 105, -0.5, 0.4)


def test_an_aborted_plan_says_why_and_a_running_one_is_under_way() -> None:
    timeline = told(planned(), staged(0), planned("q"), aborted())
    running, ended = timeline.plans
    assert (running.plan, running.state, running.ended_at) == ("q", "under way", None)
    assert (ended.state, ended.fault, ended.ended_at) == ("aborted", "rank 1 died", 103)


def test_entries_that_come_again_change_nothing() -> None:
    entries = (planned(), staged(0), committed(0, last=True), evaluated())
    assert told(*entries, *entries).plans == told(*entries).plans


def test_a_handover_whose_staging_was_not_read_is_shown_from_its_commit() -> None:
    (plan,) = told(planned(), committed(0, last=True)).plans
    (bar,) = plan.bars
    assert (bar.begun_at, bar.staged_at, bar.committed_at) == (98.5, 100.5, 101)
    assert plan.done == 1


def test_plans_of_operators_count_towards_the_budget_only_if_paced() -> None:
    timeline = told(
        planned("one", origin="operator", policy=""),
        planned("two", origin="operator", policy="", paced=True),
        planned("three", origin="rollback", policy=""),
        planned("four", origin="rollback", policy="weighted"),
    )
    assert {plan.plan: plan.counts for plan in timeline.plans} == {
        "one": False,
        "two": True,
        "three": False,
        "four": True,
    }


def test_only_the_newest_plans_are_kept() -> None:
    timeline = told(*(planned(str(number)) for number in range(plan_timeline.MAX_PLANS + 5)))
    assert len(timeline.plans) == plan_timeline.MAX_PLANS
    assert timeline.plans[-1].plan == "5"


def test_verdicts_of_plans_before_the_timeline_are_left_out() -> None:
    assert told(evaluated(), aborted()).plans == []


def test_layouts_begin_with_the_one_before_the_first_plan() -> None:
    one, two = (
        with_rows(WHOLE, {1: None}, epoch=1),
        with_rows(WHOLE, {1: None, 2: None}, epoch=2),
    )
    timeline = told(
        planned(to_sharded=(1, 2)),
        staged(0, one),
        committed(0, last=False),
        staged(1, two),
        committed(1, last=True),
    )
    assert [(span.at, span.epoch, span.layers, span.attention) for span in timeline.layouts("a")] == [
        (None, None, "", "dp"),
        (102, 1, "1", "dp"),
        (104, 2, "1-2", "dp"),
    ]
    assert timeline.layouts("b") == []


def test_the_attention_before_a_change_is_the_other_one() -> None:
    table = np.full((3, 4), -1, np.int16)
    tp = Placement(table, experts=4, ranks=2, sharded=(0, 1, 2), attention="tp", epoch=1)
    timeline = told(planned(attention="tp"), staged(0, tp), committed(0, last=True))
    assert [(span.attention, span.sharded) for span in timeline.layouts("a")] == [("dp", 3), ("tp", 3)]


def test_moves_of_experts_leave_the_layout_as_it_is() -> None:
    timeline = told(planned(), staged(0), committed(0, last=True))
    assert [(span.at, span.sharded) for span in timeline.layouts("a")] == [(None, 0)]


def test_a_handover_that_is_not_committed_changes_no_layout() -> None:
    sharded = with_rows(WHOLE, {1: None}, epoch=1)
    assert [
        span.sharded for span in told(planned(to_sharded=(1,)), staged(0, sharded), aborted()).layouts("a")
    ] == [0]


def test_the_layout_before_a_plan_that_had_begun_before_is_not_known() -> None:
    sharded = with_rows(WHOLE, {1: None}, epoch=1)
    timeline = told(staged(3, sharded), committed(3, last=True))
    assert [(span.at, span.layers) for span in timeline.layouts("a")] == [(101, "1")]


def test_a_cleared_timeline_begins_anew() -> None:
    timeline = told(planned(), staged(0), committed(0, last=True))
    timeline.clear()
    assert (timeline.plans, timeline.layouts("a")) == ([], [])
