"""Fold of the log of plans, and detection of silent engines."""

from fleet.facts.migrations import MigrationAborted, MigrationCommitted, MigrationPlanned, MigrationStaged
from fleet.placement import linear
from migration.model.plan_log import PlanLog

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
    chronicle = PlanLog()
    for entry, after in ((planned(), 0), (staged(0), 0), (committed(0), 1), (staged(1), 1)):
        assert chronicle.heard(entry)
        course = chronicle.under_way("a")
        assert course is not None
        assert course.next == after
    assert chronicle.engines() == ("a",)
    chronicle.heard(committed(1, last=True))
    assert chronicle.under_way("a") is None
    assert chronicle.engines() == ()
    last = chronicle.course("a")
    assert last is not None
    assert last.staged == staged(1)


def test_what_is_stored_of_a_plan_is_needed_until_it_is_over_also_where_another_was_under_way() -> None:
    chronicle = PlanLog()
    for entry in (planned(), planned("second")):
        chronicle.heard(entry)
        assert chronicle.over("a") == {}
    chronicle.heard(aborted(0, "second"))
    assert chronicle.over("a") == {"second": "blob of second"}
    chronicle.heard(committed(1, last=True))
    assert chronicle.over("a") == {"p": "blob of p", "second": "blob of second"}
    for plan in ("p", "second", "unknown"):
        chronicle.dropped("a", plan)
    assert chronicle.over("a") == chronicle.over("b") == {}
    assert chronicle.unused("a", "p") == "p-2"
    chronicle.heard(planned())
    assert chronicle.over("a") == {}, "it is known already"


def test_an_abort_ends_it_and_repetitions_are_no_news() -> None:
    chronicle = PlanLog()
    log = [planned(), staged(0), committed(0), aborted(1)]
    for entry in log:
        assert not chronicle.has(entry)
        assert chronicle.heard(entry)
    assert not any(chronicle.heard(entry) for entry in log)
    assert all(chronicle.has(entry) for entry in log)
    assert chronicle.under_way("a") is None


def test_ids_are_used_once() -> None:
    chronicle = PlanLog()
    assert chronicle.unused("a", "p") == "p"
    for plan in ("p", "p-2"):
        chronicle.heard(planned(plan))
        chronicle.heard(aborted(0, plan))
    assert chronicle.unused("a", "p") == "p-3"
    assert chronicle.unused("b", "p") == "p"


def test_a_plan_recorded_beside_another_waits_to_be_ended_and_disturbs_nothing() -> None:
    chronicle = PlanLog()
    for entry in (planned("p"), planned("q"), staged(0)):
        chronicle.heard(entry)
    assert chronicle.second("a") == planned("q")
    assert not chronicle.has(aborted(0, "q"))
    chronicle.heard(aborted(0, "q"))
    assert chronicle.second("a") is None
    course = chronicle.under_way("a")
    assert course is not None
    assert course.planned == planned("p")
    assert not chronicle.heard(committed(0, "q")), "what is said of plans that are over says nothing"
