"""Progress of one rank in a handover, from its reports. Pure.

Progress of a rank in one handover is monotonic: unknown, staging, failed or staged, ready, over or serving.
Reports are merged by taking the maximum. Late, repeated and reordered reports therefore change nothing.
"""

from enum import IntEnum
from typing import NamedTuple

from fleet.facts.migrations import PullReport
from fleet.handover import CommandVerdict, RankState
from fleet.requests.handovers import HandoverDescribed

ENGINE_GONE = "engine-gone"
OVERDUE = "overdue"
DECLINED = "declined"
REPLACED = "coordinator"
REFUSED = "refused"
"""fault codes, in addition to those that ranks report"""


class RankProgress(IntEnum):
    """Progress of one rank in one handover; it never decreases."""

    UNKNOWN = 0
    STAGING = 1
    FAILED = 2
    STAGED = 3
    READY = 4
    OVER = 5
    """concluded without a flip"""
    SERVING = 6


class HandoverFailure(NamedTuple):
    """Reason for aborting a handover."""

    reason: str
    """cause and remedy"""
    fault: str
    rank: int | None = None


class RankStatus(NamedTuple):
    """Last known status of one rank."""

    progress: RankProgress = RankProgress.UNKNOWN
    sent_at: float = float("-inf")
    declined: bool = False
    """the rank refuses to take part and has never reported that it does"""
    pulls: tuple[PullReport, ...] = ()
    failure: str = ""
    """why the handover ended there without a flip, as the rank said"""


_STATES: dict[str, RankProgress] = {
    RankState.STAGING: RankProgress.STAGING,
    RankState.FAILED: RankProgress.FAILED,
    RankState.STAGED: RankProgress.STAGED,
    RankState.READY: RankProgress.READY,
}


def reached(report: HandoverDescribed, handover: int) -> RankProgress:
    """Return the progress that a rank reports for a handover.

    An open handover takes precedence over concluded ones, because aborting a later handover concludes only
    that one.
    """
    if report.flipped == handover:
        return RankProgress.SERVING
    if report.handover == handover:
        return _STATES.get(report.state, RankProgress.UNKNOWN)
    return RankProgress.OVER if report.concluded >= handover else RankProgress.UNKNOWN


def hopeless(report: HandoverDescribed, handover: int, epoch: int) -> HandoverFailure | None:
    """Return the failure if the report of a rank rules out the proposal; None: it does not."""
    rank, progress = report.rank, reached(report, handover)
    if progress is RankProgress.FAILED:
        return HandoverFailure(
            report.failure or f"rank {rank} failed to stage and gave no reason; see its log",
            report.fault or "unknown",
            rank,
        )
    if progress is RankProgress.OVER and report.failure:
        return HandoverFailure(report.failure, report.fault or REFUSED, rank)
    if progress is RankProgress.OVER:
        return HandoverFailure(
            f"rank {rank} received an abort from another coordinator; request it again", REPLACED, rank
        )
    if report.verdict == CommandVerdict.BUSY and progress is RankProgress.UNKNOWN:
        return HandoverFailure(
            f"rank {rank} is busy with handover {report.handover}; try again when that has ended",
            "busy",
            rank,
        )
    if report.verdict == CommandVerdict.PAST and progress is RankProgress.UNKNOWN:
        return HandoverFailure(
            f"rank {rank} serves epoch {report.served}, but the handover creates epoch {epoch}; plan anew",
            "epoch",
            rank,
        )
    return None
