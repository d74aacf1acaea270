"""History of an engine's plans, and the data that outlives it."""

from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.facts.migrations import (
    LoopFigures,
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    Origin,
    PlanEvaluated,
    Verdict,
)
from migration.loop_state.persistent_state import (
    MAX_ENGINES,
    MAX_HARMS,
    EngineMemory,
    Harm,
    LoopMemory,
    PendingVerdict,
    decoded,
)
from migration.loop_state.plan_history import (
    MAX_CONSIDERED,
    MAX_SUMMARIES,
    changed_since,
    last_epoch,
    paused_until,
    summaries,
    to_evaluate,
    to_undo,
    turned_since,
)
from migration.loop_state.verdict import StepPrices
from migration.model.plan_log import EnginePlans

FIGURES = LoopFigures(remote_ranks=1.0, local=0.5, balance=0.9, step_seconds=1e-3)


def planned(
    plan: str = "p", origin: Origin = "planner", policy: str = "roost", handovers: int = 2
) -> MigrationPlanned:
    return MigrationPlanned(
        engine="a",
        worker_id=1,
        plan=plan,
        origin=origin,
        base_epoch=0,
        handovers=handovers,
        copies=2,
        bytes=20,
        reason="so",
        policy=policy,
        before=FIGURES,
    )


def committed(number: int, plan: str = "p", last: bool = False) -> MigrationCommitted:
    return MigrationCommitted(
        engine="a",
        worker_id=1,
        plan=plan,
        handover=number + 1,
        number=number,
        epoch=number + 1,
        copies=1,
        bytes=10,
        seconds=1.0,
        commit_seconds=0.1,
        last=last,
    )


def aborted(plan: str = "p") -> MigrationAborted:
    return MigrationAborted(
        engine="a", worker_id=1, plan=plan, handover=1, number=0, epoch=1, reason="full", fault="memory"
    )


def evaluated(plan: str = "p", verdict: Verdict = "harmful") -> PlanEvaluated:
    return PlanEvaluated(
        engine="a",
        worker_id=1,
        plan=plan,
        epoch=2,
        verdict=verdict,
        predicted_before=FIGURES,
        predicted_after=FIGURES,
        measured_after=FIGURES,
        plan_discount=0.5,
        reason="so",
    )


def history(*entries: Any) -> EnginePlans:
    plans = EnginePlans()
    for at, entry in enumerate(entries):
        assert plans.apply(entry, float(at), 1000.0 + at)
    return plans


def test_a_story_told_twice_is_told_once() -> None:
    story = [planned(), committed(0), committed(1, last=True), evaluated()]
    plans = history(*story)
    assert not any(plans.apply(entry, 50.0, 2000.0) for entry in story)
    assert not plans.apply(committed(0, "nobody's"), 50.0, 2000.0)
    assert (plans.moved_bytes, plans.spending.within(3.0, 100.0)) == (20, 20)
    (plan,) = summaries(plans)
    assert (plan.at, plan.outcome, plan.predicted_before, plan.measured_after) == (
        1000.0,
        "harmful",
        FIGURES,
        FIGURES,
    )


def test_a_story_of_more_plans_than_are_remembered_is_told_once_too() -> None:
    story: list[Any] = []
    for number in range(2 * MAX_CONSIDERED):
        story += [planned(f"p{number}", handovers=1), committed(0, f"p{number}", last=True)]
    plans = history(*story)
    copied = 20 * MAX_CONSIDERED
    assert (plans.moved_bytes, plans.spending.within(len(story), 1e6)) == (copied, copied)
    for at, entry in enumerate(story):
        assert not plans.apply(entry, float(at), 1000.0 + at)
        assert plans.last is not None
        assert plans.last.planned.plan == f"p{2 * MAX_CONSIDERED - 1}"
    assert (plans.moved_bytes, plans.spending.within(len(story), 1e6)) == (copied, copied)


def test_only_what_the_planner_does_by_itself_is_on_its_budget() -> None:
    for origin, policy, spent in (
        ("planner", "roost", 10),
        ("operator", "", 0),
        ("rollback", "", 0),
        ("rollback", "roost", 10),
    ):
        plans = history(planned(origin=origin, policy=policy), committed(0))  # type: ignore[arg-type]
        assert (plans.spending.within(2.0, 100.0), plans.moved_bytes) == (spent, 10)


def test_a_plan_of_its_own_waits_to_be_judged_once_it_is_over_and_has_changed_something() -> None:
    assert to_evaluate(history(planned(), committed(0))) is None
    assert to_evaluate(history(planned(), aborted())) is None
    assert to_evaluate(history(planned(origin="operator"), committed(0), committed(1, last=True))) is None
    part = to_evaluate(history(planned(), committed(0), aborted()))
    assert part is not None
    assert (part.progress.committed, part.progress.epoch, part.ended_at) == (False, 1, 2.0)
    whole = history(planned(), committed(0), committed(1, last=True))
    complete = to_evaluate(whole)
    assert complete is not None
    assert complete.progress.committed
    assert to_undo(whole) is None
    assert whole.apply(evaluated(verdict="kept"), 9.0, 9.0)
    assert (to_evaluate(whole), to_undo(whole)) == (None, None)


def test_only_the_newest_plan_is_undone() -> None:
    plans = history(planned(), committed(0), committed(1, last=True), evaluated())
    assert to_undo(plans) is not None
    assert plans.apply(planned("q", "rollback"), 5.0, 5.0)
    assert to_undo(plans) is None


HARMFUL = [planned(), committed(0), committed(1, last=True), evaluated()]


@pytest.mark.parametrize(
    ("behind", "stands"),
    [
        ([planned("q", "rollback"), aborted("q")], True),
        ([planned("q", "operator", ""), aborted("q"), planned("r", "rollback"), aborted("r")], True),
        ([planned("q", "rollback"), committed(0, "q"), aborted("q")], True),
        ([planned("q", "rollback", ""), committed(0, "q"), aborted("q")], False),
        ([planned("q", "operator", ""), committed(0, "q", last=True)], False),
        (
            [planned("q", "rollback"), aborted("q"), planned("r", "rollback"), committed(0, "r", last=True)],
            False,
        ),
        ([planned("q", "rollback"), aborted("q"), planned("r", "rollback"), committed(0, "r")], False),
    ],
    ids=[
        "in vain",
        "both in vain",
        "given up half way",
        "half way by an operator",
        "moved by an operator",
        "rolled back",
        "being rolled back",
    ],
)
def test_what_did_harm_is_to_be_undone_until_it_is_or_others_move_something(
    behind: list[Any], stands: bool
) -> None:
    undo = to_undo(history(*HARMFUL, *behind))
    assert (undo is not None) == stands
    assert undo is None or undo.planned.plan == "p"


def test_only_a_plan_that_changed_something_follows_another_and_says_what_is_served() -> None:
    plans = history(planned(), committed(0), committed(1, last=True))
    run = to_evaluate(plans)
    assert run is not None
    assert plans.apply(planned("q", "operator", ""), 5.0, 5.0)
    assert not changed_since(plans, run)
    assert plans.apply(aborted("q"), 6.0, 6.0)
    assert (changed_since(plans, run), last_epoch(plans)) == (False, 2)
    for entry in (planned("r", "operator", ""), msgspec.structs.replace(committed(0, "r"), epoch=3)):
        plans.apply(entry, 7.0, 7.0)
    assert (changed_since(plans, run), last_epoch(plans)) == (True, 3)


def test_plans_that_are_given_up_one_after_another_make_the_pause_longer() -> None:
    plans = history(planned("p"), aborted("p"))
    assert paused_until(plans, 10.0) == 1.0 + 20.0
    for plan in ("q", "r"):
        plans.apply(planned(plan), 5.0, 5.0)
        plans.apply(aborted(plan), 5.0, 5.0)
    assert paused_until(plans, 10.0) == 5.0 + 80.0
    plans.apply(planned("s"), 6.0, 6.0)
    assert paused_until(plans, 10.0) == float("-inf")


def test_old_stories_are_forgotten() -> None:
    plans = history(*(planned(str(number)) for number in range(3 * MAX_CONSIDERED)))
    assert [plan.plan for plan in summaries(plans)] == [
        str(3 * MAX_CONSIDERED - 1 - at) for at in range(MAX_SUMMARIES)
    ]


def test_what_is_remembered_comes_back_whole_and_stays_small() -> None:
    cells = np.zeros((58, 256), bool)
    cells[3, 5] = cells[57, 255] = True
    memory = EngineMemory(
        worker_id=7,
        plan_discount=0.4,
        plan_discount_at=5.0,
        pending=PendingVerdict(plan="p", prices=StepPrices(experts=1.0, remote=2.0)),
        at_start=FIGURES,
    )
    for number in range(2 * MAX_HARMS):
        memory = memory.harmed(Harm.of(f"p{number}", 100.0, cells), 50.0)
    assert [harm.plan for harm in memory.harms] == [
        f"p{number}" for number in range(MAX_HARMS, 2 * MAX_HARMS)
    ]
    whole = LoopMemory().with_pause(True, "x" * 9999, 3.0).with_engine("a", memory)
    for number in range(MAX_ENGINES + 10):
        whole = (
            whole.with_engine(f"b{number}", EngineMemory()) if number % 2 else whole.with_engine("a", memory)
        )
    content = msgspec.json.encode(whole)
    assert len(content) < 100_000
    back = decoded(content).memory
    assert back == whole
    resting = back.engine("a").harms[0].resting()
    assert resting is not None
    assert (resting == cells).all()
    assert len(back.engines) <= MAX_ENGINES
    assert back.engine("nobody") == EngineMemory()


def test_harm_that_is_over_is_forgotten_and_a_new_life_begins_without_what_was_of_the_old_one() -> None:
    cells = np.ones((2, 3), bool)
    memory = EngineMemory(worker_id=1, plan_discount=0.4, at_start=FIGURES).harmed(
        Harm.of("p", 10.0, cells), 0.0
    )
    assert [harm.plan for harm in memory.harmed(Harm.of("q", 99.0, cells), 20.0).harms] == ["q"]
    assert memory.begun(1) is memory
    new = memory.begun(2)
    assert (new.at_start, new.plan_discount, len(new.harms)) == (None, 0.4, 1)


@pytest.mark.parametrize(
    "harm",
    [
        Harm(plan="p", until=1.0, layers=2, experts=3, cells=b""),
        Harm(plan="p", until=1.0, layers=-1, experts=-8, cells=b"x"),
        Harm(plan="p", until=1.0, layers=1 << 40, experts=1, cells=b"x"),
    ],
)
def test_what_stands_under_the_key_and_cannot_be_is_no_rest(harm: Harm) -> None:
    assert harm.resting() is None


def test_a_pause_that_is_repeated_keeps_its_beginning() -> None:
    once = LoopMemory().with_pause(True, "why", 3.0)
    again = once.with_pause(True, "why not", 9.0)
    assert (again.paused_at, again.paused_reason) == (3.0, "why not")
    assert again.with_pause(False, "enough", 11.0) == LoopMemory()


def test_the_state_that_an_older_version_stored_is_read() -> None:
    old = (
        b'{"paused":true,"paused_reason":"so","engines":{"a":{"worker_id":7,"trust":0.4,"trust_at":5.0,'
        b'"judging":{"plan":"p","prices":{"experts":1.0,"remote":2.0}},'
        b'"harms":[{"plan":"q","until":9.0,"layers":1,"experts":8,"cells":"/w=="}]}}}'
    )
    memory = EngineMemory(
        worker_id=7,
        plan_discount=0.4,
        plan_discount_at=5.0,
        pending=PendingVerdict(plan="p", prices=StepPrices(experts=1.0, remote=2.0)),
        harms=(Harm(plan="q", until=9.0, layers=1, experts=8, cells=b"\xff"),),
    )
    assert decoded(old).memory == LoopMemory(paused=True, paused_reason="so", engines={"a": memory})
    for wrong in (b"nonsense", b"[]", b'{"engines":[]}', b'{"engines":{"a":{"trust":"high"}}}'):
        with pytest.raises(ValueError, match=r"."):
            decoded(wrong)


def test_a_later_change_of_forms_is_known_once_a_layer_has_turned_over() -> None:
    switched = msgspec.structs.replace(planned("s", "operator"), to_whole=(1,))
    plans = history(planned(), committed(0), committed(1, last=True), switched)
    run = plans.runs["p"]
    assert not turned_since(plans, run), "no handover was committed yet"
    plans.apply(committed(0, "s"))
    assert turned_since(plans, run)
    assert not turned_since(plans, plans.runs["s"])
    moved = history(planned(), committed(1, last=True), planned("m", "operator"), committed(0, "m"))
    assert not turned_since(moved, moved.runs["p"])


def test_paced_plans_of_operators_count_towards_the_byte_budget_and_others_do_not() -> None:
    for paced, spent in ((True, 10), (False, 0)):
        plan = msgspec.structs.replace(planned("s", "operator"), paced=paced)
        assert history(plan, committed(0, "s")).spending.within(2.0, 100.0) == spent
