"""Fold of the log of plans."""

import msgspec

from fleet.facts.migrations import (
    MigrationAborted,
    MigrationCommitted,
    MigrationPlanned,
    MigrationStaged,
    PullReport,
)
from fleet.placement import linear
from migration.model.plan_log import MAX_PLANS, EnginePlans, PlanLog

RECORD = linear(layers=1, experts=2, ranks=2).record()


def planned(plan: str = "p", handovers: int = 2) -> MigrationPlanned:
    return MigrationPlanned(
        engine="a",
        worker_id=1,
        plan=plan,
        origin="operator",
        base_epoch=0,
        handovers=handovers,
        copies=1,
        bytes=1,
        reason="",
        blob=f"blob of {plan}",
    )


def staged(number: int, plan: str = "p") -> MigrationStaged:
    return MigrationStaged(
        engine="a",
        worker_id=1,
        plan=plan,
        handover=number + 1,
        number=number,
        epoch=number + 1,
        placement=RECORD,
        copies=1,
        bytes=1,
        seconds=1.0,
    )


def committed(number: int, plan: str = "p", *, last: bool = False) -> MigrationCommitted:
    return MigrationCommitted(
        engine="a",
        worker_id=1,
        plan=plan,
        handover=number + 1,
        number=number,
        epoch=number + 1,
        copies=1,
        bytes=1,
        seconds=1.0,
        commit_seconds=0.1,
        last=last,
    )


def aborted(number: int, plan: str = "p") -> MigrationAborted:
    return MigrationAborted(
        engine="a", worker_id=1, plan=plan, handover=0, number=number, epoch=number + 1, reason="", fault="x"
    )


def test_a_plan_is_under_way_until_its_last_handover_is_committed() -> None:
    log = PlanLog()
    plans = log.engines["a"]
    for entry, after in ((planned(), 0), (staged(0), 0), (committed(0), 1), (staged(1), 1)):
        assert log.apply(entry)
        assert plans.under_way is not None
        assert plans.under_way.progress.next == after
    assert log.busy == ("a",)
    log.apply(committed(1, last=True))
    assert plans.under_way is None
    assert log.busy == ()
    assert plans.current is not None
    assert plans.current.progress.staged == staged(1)


def stored(plans: EnginePlans) -> dict[str, str]:
    return {run.plan: run.planned.blob for run in plans.finished}


def test_the_blob_of_a_plan_is_needed_until_it_has_ended_also_where_another_was_under_way() -> None:
    plans = EnginePlans()
    for entry in (planned(), planned("second")):
        plans.apply(entry)
        assert stored(plans) == {}
    plans.apply(aborted(0, "second"))
    assert stored(plans) == {"second": "blob of second"}
    plans.apply(committed(1, last=True))
    assert stored(plans) == {"p": "blob of p", "second": "blob of second"}
    for run in plans.finished:
        run.stored = False
    assert stored(plans) == {}
    assert plans.unused("p") == "p-2"
    plans.apply(planned())
    assert stored(plans) == {}, "it is known already"


def test_an_abort_ends_it_and_repetitions_are_no_news() -> None:
    plans = EnginePlans()
    log = [planned(), staged(0), committed(0), aborted(1)]
    for entry in log:
        assert not plans.has(entry)
        assert plans.apply(entry)
    assert not any(plans.apply(entry) for entry in log)
    assert all(plans.has(entry) for entry in log)
    assert plans.under_way is None


def test_ids_are_used_once() -> None:
    log = PlanLog()
    assert log.engines["a"].unused("p") == "p"
    for plan in ("p", "p-2"):
        log.apply(planned(plan))
        log.apply(aborted(0, plan))
    assert log.engines["a"].unused("p") == "p-3"
    assert log.engines["b"].unused("p") == "p"


def test_a_plan_recorded_beside_another_waits_to_be_ended_and_disturbs_nothing() -> None:
    plans = EnginePlans()
    for entry in (planned("p"), planned("q"), staged(0)):
        plans.apply(entry)
    assert plans.second is not None
    assert plans.second.planned == planned("q")
    assert not plans.has(aborted(0, "q"))
    plans.apply(aborted(0, "q"))
    assert plans.has(aborted(0, "q"))
    assert plans.second is None
    assert plans.under_way is not None
    assert plans.under_way.planned == planned("p")
    plans.apply(committed(1, last=True))
    assert plans.under_way is None
    assert plans.second is None


def test_a_plan_recorded_beside_another_is_not_begun_when_that_ends() -> None:
    plans = EnginePlans()
    for entry in (planned("p"), planned("q"), committed(1, last=True)):
        plans.apply(entry)
    assert plans.under_way is None
    assert plans.second is not None
    assert plans.second.plan == "q"


def test_entries_of_unknown_plans_are_ignored() -> None:
    plans = EnginePlans()
    for entry in (staged(0), committed(0), aborted(0)):
        assert not plans.apply(entry)
        assert not plans.has(entry)
    assert plans.last is None


def test_the_first_end_of_a_plan_counts_unless_it_was_committed_after_all() -> None:
    plans = EnginePlans()
    for entry in (planned(), aborted(1), aborted(0)):
        plans.apply(entry, 5.0)
    assert plans.last is not None
    assert plans.last.end == aborted(1)
    assert plans.apply(committed(1, last=True))
    assert plans.last.progress.committed


def test_the_newest_plans_and_those_under_way_are_remembered() -> None:
    plans = EnginePlans()
    for number in range(MAX_PLANS + 10):
        plans.apply(planned(f"p{number}"))
        if number:
            plans.apply(aborted(0, f"p{number}"))
    assert len(plans.runs) == MAX_PLANS
    assert plans.under_way is not None
    assert plans.under_way.plan == "p0"


def test_of_engines_that_come_and_go_a_bounded_number_is_remembered() -> None:
    log = PlanLog()
    for engine in ("gone", "busy", "present", "gone too"):
        log.apply(msgspec.structs.replace(planned(), engine=engine))
    for engine in ("gone", "present", "gone too"):
        log.apply(msgspec.structs.replace(aborted(0), engine=engine))
    log.trim(3, ["present"])
    assert list(log.engines) == ["busy", "present", "gone too"]
    log.trim(1, ["present"])
    assert list(log.engines) == ["busy", "present"]


def test_the_speed_of_reads_is_that_between_ranks_in_the_last_staged_handover() -> None:
    pulls = (
        PullReport(source=1, transfer="shared", experts=1, bytes=300, seconds=2.0),
        PullReport(source=0, transfer="shared", experts=1, bytes=100, seconds=2.0),
        PullReport(source=0, transfer="local", experts=9, bytes=10**9, seconds=1e-3),
    )
    plans = EnginePlans()
    plans.apply(planned())
    assert plans.read_speed == 0
    plans.apply(msgspec.structs.replace(staged(0), pulls=pulls))
    assert plans.read_speed == 100.0
    plans.apply(msgspec.structs.replace(staged(1), pulls=pulls[2:]))
    assert plans.read_speed == 0, "nothing was read from another rank"
