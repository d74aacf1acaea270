"""How far one rank is with a handover, by what it says. Pure.

A rank only ever gets further with one handover: nothing, staging, staged or failed, ready, over or serving. So what it says is merged by taking the
furthest, and late, repeated and reordered answers change nothing.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from fleet.events import HandoverDescribed, PullTold
from fleet.handover import CommandVerdict, RankState

ENGINE_GONE = "engine-gone"
OVERDUE = "overdue"
DECLINED = "declined"
REPLACED = "coordinator"
"""faults in a word, beside those that ranks tell"""


class RankProgress(IntEnum):
    """How far a rank is with one handover; it only grows."""

    UNHEARD = 0
    STAGING = 1
    FAILED = 2
    STAGED = 3
    READY = 4
    OVER = 5
    """concluded without a flip"""
    SERVING = 6


class HandoverFailure(NamedTuple):
    """Why a handover is given up."""

    reason: str
    """whose fault, and what to do"""
    fault: str
    rank: int | None = None


class RankStatus(NamedTuple):
    """What is known of one rank."""

    progress: RankProgress = RankProgress.UNHEARD
    asked_at: float = float("-inf")
    declined: bool = False
    """it refuses to take part, and has never said that it does"""
    pulls: tuple[PullTold, ...] = ()


_STATES: dict[str, RankProgress] = {
    RankState.STAGING: RankProgress.STAGING,
    RankState.FAILED: RankProgress.FAILED,
    RankState.STAGED: RankProgress.STAGED,
    RankState.READY: RankProgress.READY,
}


def reached(said: HandoverDescribed, handover: int) -> RankProgress:
    """How far a rank says to be with a handover. That it is open goes before what is over: an abort of a later one concludes that one alone."""
    if said.flipped == handover:
        return RankProgress.SERVING
    if said.handover == handover:
        return _STATES.get(said.state, RankProgress.UNHEARD)
    return RankProgress.OVER if said.concluded >= handover else RankProgress.UNHEARD


def hopeless(said: HandoverDescribed, handover: int, epoch: int) -> HandoverFailure | None:
    """What a rank says that leaves no hope for a proposal; None: nothing."""
    rank, progress = said.rank, reached(said, handover)
    if progress is RankProgress.FAILED:
        return HandoverFailure(said.failure or f"rank {rank} could not stage and does not say why; see its log", said.fault or "unknown", rank)
    if progress is RankProgress.OVER:
        return HandoverFailure(f"rank {rank} has been told to give it up by somebody else; ask for it again", REPLACED, rank)
    if said.verdict == CommandVerdict.BUSY and progress is RankProgress.UNHEARD:
        return HandoverFailure(f"rank {rank} is in the middle of handover {said.handover}; ask again when that is over", "busy", rank)
    if said.verdict == CommandVerdict.PAST and progress is RankProgress.UNHEARD:
        return HandoverFailure(f"rank {rank} serves epoch {said.served}, which epoch {epoch} does not follow; plan anew", "epoch", rank)
    return None


def listed(ranks: Sequence[int]) -> str:
    """The first of them, for people."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
