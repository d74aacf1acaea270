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
    MOST_ENGINES,
    MOST_HARMS,
    EngineMemory,
    Harm,
    LoopMemory,
    PendingVerdict,
)
from migration.loop_state.plan_history import MOST_TALES, MOST_TOLD, PlanHistory
from migration.loop_state.verdict import StepPrices

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


def judged(plan: str = "p", verdict: Verdict = "harmful") -> PlanEvaluated:
    return PlanEvaluated(
        engine="a",
        worker_id=1,
        plan=plan,
        epoch=2,
        verdict=verdict,
        predicted_before=FIGURES,
        predicted_after=FIGURES,
        measured_after=FIGURES,
        trust=0.5,
        reason="so",
    )


def told(*entries: Any) -> PlanHistory:
    annals = PlanHistory()
    for at, entry in enumerate(entries):
        assert annals.hear(entry, float(at), 1000.0 + at)
    return annals


def test_a_story_told_twice_is_told_once() -> None:
    story = [planned(), committed(0), committed(1, last=True), judged()]
    annals = told(*story)
    assert not any(annals.hear(entry, 50.0, 2000.0) for entry in story)
    assert not annals.hear(committed(0, "nobody's"), 50.0, 2000.0)
    assert (annals.moved_bytes, annals.spending.within(3.0, 100.0)) == (20, 20)
    (plan,) = annals.told()
    assert (plan.at, plan.outcome, plan.predicted_before, plan.measured_after) == (
        1000.0,
        "harmful",
        FIGURES,
        FIGURES,
    )


def test_a_story_of_more_plans_than_are_remembered_is_told_once_too() -> None:
    story: list[Any] = []
    for number in range(2 * MOST_TALES):
        story += [planned(f"p{number}", handovers=1), committed(0, f"p{number}", last=True)]
    annals = told(*story)
    copied = 20 * MOST_TALES
    assert (annals.moved_bytes, annals.spending.within(len(story), 1e6)) == (copied, copied)
    for at, entry in enumerate(story):
        assert not annals.hear(entry, float(at), 1000.0 + at)
        assert annals.last is not None
        assert annals.last.planned.plan == f"p{2 * MOST_TALES - 1}"
    assert (annals.moved_bytes, annals.spending.within(len(story), 1e6)) == (copied, copied)


def test_only_what_the_planner_does_by_itself_is_on_its_budget() -> None:
    for origin, policy, spent in (
        ("planner", "roost", 10),
        ("operator", "", 0),
        ("rollback", "", 0),
        ("rollback", "roost", 10),
    ):
        annals = told(planned(origin=origin, policy=policy), committed(0))  # type: ignore[arg-type]
        assert (annals.spending.within(2.0, 100.0), annals.moved_bytes) == (spent, 10)


def test_a_plan_of_its_own_waits_to_be_judged_once_it_is_over_and_has_changed_something() -> None:
    assert told(planned(), committed(0)).to_judge is None
    assert told(planned(), aborted()).to_judge is None
    assert told(planned(origin="operator"), committed(0), committed(1, last=True)).to_judge is None
    part = told(planned(), committed(0), aborted()).to_judge
    assert part is not None
    assert (part.whole, part.epoch, part.ended_at) == (False, 1, 2.0)
    whole = told(planned(), committed(0), committed(1, last=True))
    assert whole.to_judge is not None
    assert whole.to_judge.whole
    assert whole.to_undo is None
    assert whole.hear(judged(verdict="kept"), 9.0, 9.0)
    assert (whole.to_judge, whole.to_undo) == (None, None)


def test_only_the_newest_plan_is_undone() -> None:
    annals = told(planned(), committed(0), committed(1, last=True), judged())
    assert annals.to_undo is not None
    assert annals.hear(planned("q", "rollback"), 5.0, 5.0)
    assert annals.to_undo is None


HARMFUL = [planned(), committed(0), committed(1, last=True), judged()]


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
    undo = told(*HARMFUL, *behind).to_undo
    assert (undo is not None) == stands
    assert undo is None or undo.planned.plan == "p"


def test_only_a_plan_that_changed_something_follows_another_and_says_what_is_served() -> None:
    annals = told(planned(), committed(0), committed(1, last=True))
    tale = annals.to_judge
    assert tale is not None
    assert annals.hear(planned("q", "operator", ""), 5.0, 5.0)
    assert not annals.follows(tale)
    assert annals.hear(aborted("q"), 6.0, 6.0)
    assert (annals.follows(tale), annals.epoch) == (False, 2)
    for entry in (planned("r", "operator", ""), msgspec.structs.replace(committed(0, "r"), epoch=3)):
        annals.hear(entry, 7.0, 7.0)
    assert (annals.follows(tale), annals.epoch) == (True, 3)


def test_plans_that_are_given_up_one_after_another_make_the_pause_longer() -> None:
    annals = told(planned("p"), aborted("p"))
    assert annals.setback(10.0) == 1.0 + 20.0
    for plan in ("q", "r"):
        annals.hear(planned(plan), 5.0, 5.0)
        annals.hear(aborted(plan), 5.0, 5.0)
    assert annals.setback(10.0) == 5.0 + 80.0
    annals.hear(planned("s"), 6.0, 6.0)
    assert annals.setback(10.0) == float("-inf")


def test_old_stories_are_forgotten() -> None:
    annals = told(*(planned(str(number)) for number in range(3 * MOST_TALES)))
    assert len(annals._plans) == MOST_TALES
    assert [plan.plan for plan in annals.told()] == [str(3 * MOST_TALES - 1 - at) for at in range(MOST_TOLD)]


def test_what_is_remembered_comes_back_whole_and_stays_small() -> None:
    cells = np.zeros((58, 256), bool)
    cells[3, 5] = cells[57, 255] = True
    memory = EngineMemory(
        worker_id=7,
        trust=0.4,
        trust_at=5.0,
        judging=PendingVerdict(plan="p", prices=StepPrices(experts=1.0, remote=2.0)),
        at_start=FIGURES,
    )
    for number in range(2 * MOST_HARMS):
        memory = memory.harmed(Harm.of(f"p{number}", 100.0, cells), 50.0)
    assert [harm.plan for harm in memory.harms] == [
        f"p{number}" for number in range(MOST_HARMS, 2 * MOST_HARMS)
    ]
    whole = LoopMemory().steered(True, "x" * 9999, 3.0).remembering("a", memory)
    for number in range(MOST_ENGINES + 10):
        whole = (
            whole.remembering(f"b{number}", EngineMemory()) if number % 2 else whole.remembering("a", memory)
        )
    content = msgspec.json.encode(whole)
    assert len(content) < 100_000
    back = msgspec.json.decode(content, type=LoopMemory)
    assert back == whole
    resting = back.engine("a").harms[0].resting()
    assert resting is not None
    assert (resting == cells).all()
    assert len(back.engines) <= MOST_ENGINES
    assert back.engine("nobody") == EngineMemory()


def test_harm_that_is_over_is_forgotten_and_a_new_life_begins_without_what_was_of_the_old_one() -> None:
    cells = np.ones((2, 3), bool)
    memory = EngineMemory(worker_id=1, trust=0.4, at_start=FIGURES).harmed(Harm.of("p", 10.0, cells), 0.0)
    assert [harm.plan for harm in memory.harmed(Harm.of("q", 99.0, cells), 20.0).harms] == ["q"]
    assert memory.begun(1) is memory
    new = memory.begun(2)
    assert (new.at_start, new.trust, len(new.harms)) == (None, 0.4, 1)


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
    once = LoopMemory().steered(True, "why", 3.0)
    again = once.steered(True, "why not", 9.0)
    assert (again.paused_at, again.paused_reason) == (3.0, "why not")
    assert again.steered(False, "enough", 11.0) == LoopMemory()
