"""Questions of the control loop about one engine's plans: evaluation due, rollback due, cooldown after
failures. Pure.

Times are seconds of a monotonic clock.
"""

from collections.abc import Iterator
from itertools import islice, takewhile

from fleet.facts.migrations import MigrationAborted
from fleet.requests.control_loop import PlanSummary
from migration.model.plan_log import EnginePlans, PlanRun

MAX_CONSIDERED = 32
"""Limit on the plans considered for evaluation and rollback: the newest."""
MAX_SUMMARIES = 8
"""limit on the plans included in reports"""
MAX_DOUBLINGS = 6
"""limit on the doublings of the pause after consecutive aborted plans"""


def to_evaluate(plans: EnginePlans) -> PlanRun | None:
    """Return the newest automatic plan that has not been evaluated yet."""
    return next((run for run in _newest_first(plans) if run.awaits_evaluation), None)


def to_undo(plans: EnginePlans) -> PlanRun | None:
    """Return the newest plan, if its verdict is harmful.

    Later plans are skipped if they changed nothing, or if they are automatic rollbacks that were aborted.
    """
    effective = (
        run
        for run in _newest_first(plans)
        if not (run.changed_nothing or (run.undoes and isinstance(run.end, MigrationAborted)))
    )
    newest = next(effective, None)
    harmful = newest is not None and newest.evaluated is not None and newest.evaluated.verdict == "harmful"
    return newest if harmful else None


def last_epoch(plans: EnginePlans) -> int:
    """Return the last epoch that a plan created; 0: none."""
    return next((run.progress.epoch for run in _newest_first(plans) if run.progress.numbers), 0)


def paused_until(plans: EnginePlans, seconds: float) -> float:
    """Return the time before which no further automatic plan is started; -inf: no restriction.

    The pause follows the last aborted plan. It lasts `seconds`, doubled for each directly preceding
    aborted plan.
    """
    aborted = list(
        takewhile(lambda run: run.own and isinstance(run.end, MigrationAborted), _newest_first(plans))
    )
    if not aborted:
        return float("-inf")
    return aborted[0].ended_at + seconds * 2.0 ** min(len(aborted), MAX_DOUBLINGS)


def changed_since(plans: EnginePlans, run: PlanRun) -> bool:
    """Return True if a later plan changed something after this one."""
    later = takewhile(lambda other: other is not run, _newest_first(plans))
    return any(other.progress.numbers for other in later)


def turned_since(plans: EnginePlans, run: PlanRun) -> bool:
    """Return True if a later plan changed the form of layers, or the attention, after this one."""
    later = takewhile(lambda other: other is not run, _newest_first(plans))
    return any(other.progress.numbers and other.switches_layout for other in later)


def turned_layers_since(plans: EnginePlans, since: float) -> frozenset[int]:
    """Return the layers that plans turned over and that have not rested since this time."""
    recent = (run for run in _newest_first(plans) if run.progress.numbers and run.ended_at >= since)
    return frozenset(layer for run in recent for layer in (*run.planned.to_sharded, *run.planned.to_whole))


def summaries(plans: EnginePlans, pending: str = "") -> tuple[PlanSummary, ...]:
    """Return the last plans, newest first. pending: what the one under way waits for; empty: nothing."""
    newest = islice(_newest_first(plans), MAX_SUMMARIES)
    return tuple(_summary(run, pending if run is plans.under_way else "") for run in newest)


def _newest_first(plans: EnginePlans) -> Iterator[PlanRun]:
    return islice(reversed(plans.runs.values()), MAX_CONSIDERED)


def _summary(run: PlanRun, pending: str) -> PlanSummary:
    planned, evaluated = run.planned, run.evaluated
    return PlanSummary(
        plan=planned.plan,
        origin=planned.origin,
        policy=planned.policy,
        at=run.at,
        outcome=f"{run.outcome}, pending: {pending}" if pending else run.outcome,
        copies=planned.copies,
        bytes=planned.bytes,
        predicted_before=planned.before,
        predicted_after=planned.after,
        measured_before=None if evaluated is None else evaluated.measured_before,
        measured_after=None if evaluated is None else evaluated.measured_after,
    )
