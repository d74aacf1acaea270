"""The protocol by which an engine goes over from one epoch to the next: pure tables for both roles, and the rules that guard them.

Theory
------
A handover is a two-phase commit among the ranks of one engine, conducted by the coordinator (the leading migration service), where the
second phase ends in a *flip*: all ranks serve the new epoch from one and the same step on.

1. The coordinator makes the handover durable (`CoordinatorState.PROPOSING`, by compare-and-set on the engine's key), then proposes it to every
   rank. A rank pulls the experts it lacks into free cells, compares checksums, and says `staged`. Nothing that is served has changed.
2. When every rank has staged, the coordinator makes that durable too (PROPOSING -> COMMITTING, by compare-and-set on the same revision). This
   is *the decision*. Before it, any coordinator may give the handover up; after it, nobody may. One that was replaced meanwhile loses the
   compare-and-set, and so never sends a commit.
3. On `commit` a rank is ready: it says the new epoch as `epoch_ready` in the header that every step begins with. All ranks see the same
   headers, so all flip at the first step in which the least of *ready* exceeds *served*. No message can make them differ.
4. Before the decision, a refusal, a failure, a silence beyond the deadline or a new coordinator leads to `abort`: ranks drop what they staged.

Four rules keep late, repeated and reordered messages harmless:

- *Identity.* A handover has a number that only grows and is never given twice, and is for one life of the engine. A rank remembers the highest
  number that it has concluded (or been told to abort, even before it was proposed) and takes no proposal of that number or below. A commit is for one
  number, never for "the epoch".
- *Compare-and-set.* Who decides has seen the very state that is replaced. So there is one decision, however many believe to lead.
- *Fencing.* Every command carries the token of the coordinator's lease, which only grows. A rank remembers the highest and refuses lower ones.
  While the store is consistent the two rules above suffice. Where it was lost, this one takes their place: a coordinator first asks every rank under
  a token above all that they have heard, so that none listens to anybody before it; then what they say is the truth. A handover that is open without
  a key was decided if any rank is ready or has flipped; else nobody can commit it any more, and it is given up.
- *Settlement.* A cell that bytes may still land in, or that somebody may still read, is not free: not after a time-out (a transfer cannot be
  called back), not after an abort, not after a flip. It is quarantined, or drains, until the transfer has settled.

A rank that has staged cannot give up by itself: the decision may have been taken. It waits for the coordinator or for its successor,
and serves its old epoch meanwhile. Nor can a coordinator give a decision up because it hears nothing: silence is not death, and a rank that is heard
again would be left with a handover that nobody ends. Only an abort may end while ranks are silent, if whoever is found with it open later is told
again: a handover that is open at a rank and over by the key was never decided.

An engine that dies begins a new life with the last epoch that was decided: that of the handover under the engine's key, if the key says COMMITTING
(its placement was recorded as staged before), else of the last placement that was recorded as committed (recorded before the key says IDLE). That it
was recorded as staged is no decision. Who looks reads the key first, then the log.

`docs/handover.md` draws the tables; `tests/fleet/test_handover_model.py` walks through everything that can happen, and shows what goes wrong without
each of the rules.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar


class CoordinatorState(StrEnum):
    """Where the coordinator is with one engine; what is stored under the engine's key."""

    IDLE = "idle"
    PROPOSING = "proposing"
    COMMITTING = "committing"
    ABORTING = "aborting"


class CoordinatorEvent(StrEnum):
    """What moves the coordinator."""

    BEGIN = "begin"
    ALL_STAGED = "all staged"
    FAILED = "failed"
    """a rank refused or failed, the deadline passed, or another coordinator takes over"""
    ALL_SERVING = "all serving"
    ALL_ABORTED = "all aborted"
    ENGINE_GONE = "engine gone"
    """the life that the handover is for is over: it said so, or another has joined under the engine's name. Silence is no proof"""


CONDUCTING: Mapping[tuple[CoordinatorState, CoordinatorEvent], CoordinatorState] = {
    (CoordinatorState.IDLE, CoordinatorEvent.BEGIN): CoordinatorState.PROPOSING,
    (CoordinatorState.PROPOSING, CoordinatorEvent.ALL_STAGED): CoordinatorState.COMMITTING,
    (CoordinatorState.PROPOSING, CoordinatorEvent.FAILED): CoordinatorState.ABORTING,
    (CoordinatorState.PROPOSING, CoordinatorEvent.ENGINE_GONE): CoordinatorState.IDLE,
    (CoordinatorState.COMMITTING, CoordinatorEvent.ALL_SERVING): CoordinatorState.IDLE,
    (CoordinatorState.COMMITTING, CoordinatorEvent.ENGINE_GONE): CoordinatorState.IDLE,
    (CoordinatorState.ABORTING, CoordinatorEvent.ALL_ABORTED): CoordinatorState.IDLE,
    (CoordinatorState.ABORTING, CoordinatorEvent.ENGINE_GONE): CoordinatorState.IDLE,
}


class RankState(StrEnum):
    """Where a rank is."""

    SERVING = "serving"
    """no handover is open"""
    STAGING = "staging"
    STAGED = "staged"
    FAILED = "failed"
    """it could not stage, has said so, and waits for the abort"""
    READY = "ready"
    """the commit was taken; the flip follows as soon as every rank is ready"""


class RankEvent(StrEnum):
    """What moves a rank."""

    PROPOSE = "propose"
    STAGED = "staged"
    FAILED = "failed"
    COMMIT = "commit"
    FLIPPED = "flipped"
    ABORT = "abort"


RANK: Mapping[tuple[RankState, RankEvent], RankState] = {
    (RankState.SERVING, RankEvent.PROPOSE): RankState.STAGING,
    (RankState.STAGING, RankEvent.STAGED): RankState.STAGED,
    (RankState.STAGING, RankEvent.FAILED): RankState.FAILED,
    (RankState.STAGING, RankEvent.ABORT): RankState.SERVING,
    (RankState.STAGED, RankEvent.ABORT): RankState.SERVING,
    (RankState.FAILED, RankEvent.ABORT): RankState.SERVING,
    (RankState.STAGED, RankEvent.COMMIT): RankState.READY,
    (RankState.READY, RankEvent.FLIPPED): RankState.SERVING,
}


class Cell(StrEnum):
    """What a cell of a rank's expert memory is in use for."""

    FREE = "free"
    PULLING = "pulling"
    """bytes are landing"""
    VERIFYING = "verifying"
    STAGED = "staged"
    LIVE = "live"
    """it is served from"""
    DRAINING = "draining"
    """served no more, but somebody may still read it"""
    QUARANTINED = "quarantined"
    """given up, but bytes may still land"""


class CellEvent(StrEnum):
    """What changes the use of a cell."""

    RESERVED = "reserved"
    LANDED = "landed"
    BROKEN = "broken"
    """the transfer failed, and nothing is under way any more"""
    OVERDUE = "overdue"
    """given up after a deadline or by an abort, while bytes may still land"""
    VERIFIED = "verified"
    REFUSED = "refused"
    """its checksums are not those that were promised"""
    ADOPTED = "adopted"
    EVICTED = "evicted"
    DROPPED = "dropped"
    """staged for a handover that was aborted"""
    SETTLED = "settled"
    """no byte lands any more, and nobody reads it"""


CELL: Mapping[tuple[Cell, CellEvent], Cell] = {
    (Cell.FREE, CellEvent.RESERVED): Cell.PULLING,
    (Cell.PULLING, CellEvent.LANDED): Cell.VERIFYING,
    (Cell.PULLING, CellEvent.BROKEN): Cell.FREE,
    (Cell.PULLING, CellEvent.OVERDUE): Cell.QUARANTINED,
    (Cell.VERIFYING, CellEvent.VERIFIED): Cell.STAGED,
    (Cell.VERIFYING, CellEvent.REFUSED): Cell.FREE,
    (Cell.VERIFYING, CellEvent.OVERDUE): Cell.QUARANTINED,
    (Cell.STAGED, CellEvent.ADOPTED): Cell.LIVE,
    (Cell.STAGED, CellEvent.DROPPED): Cell.FREE,
    (Cell.LIVE, CellEvent.EVICTED): Cell.DRAINING,
    (Cell.DRAINING, CellEvent.SETTLED): Cell.FREE,
    (Cell.QUARANTINED, CellEvent.SETTLED): Cell.FREE,
}


class IllegalMove(Exception):
    """An event that a state does not allow; the text names role, state and event."""


_ROLES: Mapping[type[StrEnum], str] = {CoordinatorState: "coordinator", RankState: "rank", Cell: "cell"}

State = TypeVar("State", bound=StrEnum)
Happening = TypeVar("Happening", bound=StrEnum)


def moved(table: Mapping[tuple[State, Happening], State], state: State, event: Happening) -> State:
    """The state after an event. IllegalMove when the table does not have it."""
    after = table.get((state, event))
    if after is None:
        allowed = ", ".join(repr(one.value) for (of, one) in table if of is state) or "nothing"
        raise IllegalMove(f"a {_ROLES[type(state)]} that is {state.value!r} cannot take {event.value!r}; allowed: {allowed}")
    return after


class CommandVerdict(StrEnum):
    """What a rank does with a command. Only TAKE changes anything but the highest token (`heard`); to REPEAT it says again where it is."""

    TAKE = "take"
    REPEAT = "repeat"
    FENCED = "fenced"
    """from a coordinator that has been replaced"""
    PAST = "past"
    """of a handover that is over, or for an epoch that does not follow the one served"""
    BUSY = "busy"
    """another handover is open"""
    UNKNOWN = "unknown"
    """commit of a handover that was never proposed here"""
    PREMATURE = "premature"
    """commit before it was staged, or abort after the commit"""


class ProtocolState(NamedTuple):
    """All that a rank remembers of the protocol."""

    state: RankState
    served: int
    """epoch"""
    token: int = 0
    """highest seen"""
    handover: int = 0
    """the open one; 0: none"""
    concluded: int = 0
    """highest number that is over: flipped, or aborted"""
    flipped: int = 0
    """number of the last one that was flipped to"""


def is_open(rank: ProtocolState, handover: int) -> bool:
    """Whether this handover is open here. It goes before the question what is over: an abort that came for a later one concludes that one alone."""
    return rank.state is not RankState.SERVING and handover == rank.handover


def heard(rank: ProtocolState, token: int) -> ProtocolState:
    """After any command, whatever became of it: the highest token seen counts, also when the command brought nothing new."""
    return rank if token <= rank.token else rank._replace(token=token)


def heed_propose(rank: ProtocolState, token: int, handover: int, epoch: int) -> CommandVerdict:
    """What becomes of a proposal. epoch: the one it makes."""
    if token < rank.token:
        return CommandVerdict.FENCED
    if is_open(rank, handover):
        return CommandVerdict.REPEAT
    if handover <= rank.concluded:
        return CommandVerdict.PAST
    if rank.state is not RankState.SERVING:
        return CommandVerdict.BUSY
    return CommandVerdict.TAKE if epoch == rank.served + 1 else CommandVerdict.PAST


def heed_commit(rank: ProtocolState, token: int, handover: int) -> CommandVerdict:
    """What becomes of a commit."""
    if token < rank.token:
        return CommandVerdict.FENCED
    if is_open(rank, handover):
        return {RankState.STAGED: CommandVerdict.TAKE, RankState.READY: CommandVerdict.REPEAT}.get(rank.state, CommandVerdict.PREMATURE)
    if handover == rank.flipped:
        return CommandVerdict.REPEAT
    return CommandVerdict.PAST if handover <= rank.concluded else CommandVerdict.UNKNOWN


def heed_abort(rank: ProtocolState, token: int, handover: int) -> CommandVerdict:
    """What becomes of an abort. One of a handover that was never proposed here is taken too: its proposal may still come, and must find it over."""
    if token < rank.token:
        return CommandVerdict.FENCED
    if is_open(rank, handover):
        return CommandVerdict.PREMATURE if rank.state is RankState.READY else CommandVerdict.TAKE
    if handover <= rank.concluded:
        return CommandVerdict.PREMATURE if handover == rank.flipped else CommandVerdict.REPEAT
    return CommandVerdict.TAKE


def proposed(rank: ProtocolState, token: int, handover: int) -> ProtocolState:
    """After a proposal that was taken."""
    return rank._replace(state=moved(RANK, rank.state, RankEvent.PROPOSE), token=token, handover=handover)


def staged(rank: ProtocolState, *, failed: bool = False) -> ProtocolState:
    """After everything was pulled and verified, or could not be."""
    return rank._replace(state=moved(RANK, rank.state, RankEvent.FAILED if failed else RankEvent.STAGED))


def committed(rank: ProtocolState, token: int) -> ProtocolState:
    """After a commit that was taken: ready."""
    return rank._replace(state=moved(RANK, rank.state, RankEvent.COMMIT), token=token)


def flipped(rank: ProtocolState) -> ProtocolState:
    """After the step at which all ranks went over."""
    state = moved(RANK, rank.state, RankEvent.FLIPPED)
    concluded = max(rank.concluded, rank.handover)
    return rank._replace(state=state, served=rank.served + 1, handover=0, concluded=concluded, flipped=rank.handover)


def aborted(rank: ProtocolState, token: int, handover: int) -> ProtocolState:
    """After an abort that was taken, of the open handover or of one that has not come yet."""
    concluded = max(rank.concluded, handover)
    if handover != rank.handover:
        return rank._replace(token=token, concluded=concluded)
    return rank._replace(state=moved(RANK, rank.state, RankEvent.ABORT), token=token, handover=0, concluded=concluded)


def flips(served: int, ready: tuple[int, ...]) -> bool:
    """Whether the ranks go over at this step: what every rank decides from the same step headers."""
    return min(ready) > served
