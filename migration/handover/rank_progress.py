"""How far one rank is with a handover, by what it says. Pure.

A rank only ever gets further with one handover: nothing, staging, staged or failed, ready, over or serving. So what it says is merged by taking the
furthest, and late, repeated and reordered answers change nothing.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from fleet.events import HandoverDescribed, PullTold
from fleet.handover import RankState, Verdict

ENGINE_GONE = "engine-gone"
OVERDUE = "overdue"
DECLINED = "declined"
REPLACED = "coordinator"
"""faults in a word, beside those that ranks tell"""


class Progress(IntEnum):
    """How far a rank is with one handover; it only grows."""

    UNHEARD = 0
    STAGING = 1
    FAILED = 2
    STAGED = 3
    READY = 4
    OVER = 5
    """concluded without a flip"""
    SERVING = 6


class Failure(NamedTuple):
    """Why a handover is given up."""

    reason: str
    """whose fault, and what to do"""
    fault: str
    rank: int | None = None


class Told(NamedTuple):
    """What is known of one rank."""

    progress: Progress = Progress.UNHEARD
    asked_at: float = float("-inf")
    declined: bool = False
    """it refuses to take part, and has never said that it does"""
    pulls: tuple[PullTold, ...] = ()


_STATES: dict[str, Progress] = {
    RankState.STAGING: Progress.STAGING,
    RankState.FAILED: Progress.FAILED,
    RankState.STAGED: Progress.STAGED,
    RankState.READY: Progress.READY,
}


def reached(said: HandoverDescribed, handover: int) -> Progress:
    """How far a rank says to be with a handover. That it is open goes before what is over: an abort of a later one concludes that one alone."""
    if said.flipped == handover:
        return Progress.SERVING
    if said.handover == handover:
        return _STATES.get(said.state, Progress.UNHEARD)
    return Progress.OVER if said.concluded >= handover else Progress.UNHEARD


def hopeless(said: HandoverDescribed, handover: int, epoch: int) -> Failure | None:
    """What a rank says that leaves no hope for a proposal; None: nothing."""
    rank, progress = said.rank, reached(said, handover)
    if progress is Progress.FAILED:
        return Failure(said.failure or f"rank {rank} could not stage and does not say why; see its log", said.fault or "unknown", rank)
    if progress is Progress.OVER:
        return Failure(f"rank {rank} has been told to give it up by somebody else; ask for it again", REPLACED, rank)
    if said.verdict == Verdict.BUSY and progress is Progress.UNHEARD:
        return Failure(f"rank {rank} is in the middle of handover {said.handover}; ask again when that is over", "busy", rank)
    if said.verdict == Verdict.PAST and progress is Progress.UNHEARD:
        return Failure(f"rank {rank} serves epoch {said.served}, which epoch {epoch} does not follow; plan anew", "epoch", rank)
    return None


def listed(ranks: Sequence[int]) -> str:
    """The first of them, for people."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
