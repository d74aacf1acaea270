"""Protocol by which an engine changes from one epoch to the next: pure transition tables for both roles, and
their rules.

Theory
------
A handover is a two-phase commit among the ranks of one engine. The coordinator is the leading migration
service. The second phase ends in a *flip*: all ranks serve the new epoch from the same step on.

1. The coordinator makes the handover durable (`CoordinatorState.PROPOSING`, by compare-and-set on the
   engine's key). It then proposes it to every rank. A rank pulls the missing experts into free cells,
   verifies checksums and reports `staged`. The epoch in service has not changed.
2. When every rank has staged, the coordinator makes that durable too (PROPOSING -> COMMITTING, by
   compare-and-set on the same revision). This is *the decision*. Before it, any coordinator may abort the
   handover. After it, none may. A coordinator that was replaced in the meantime loses the compare-and-set,
   and so never sends a commit.
3. On `commit` a rank is ready: it announces the new epoch as `epoch_ready` in the header that starts every
   step. All ranks see the same headers. They all flip at the first step in which the minimum of *ready*
   exceeds *served*. No message can make them diverge. Next to the epoch, a header states a digest of the
   placement that the rank would serve under it, forms of layers included. Where ranks mean different
   placements by one epoch (`disagreement`), the engine stops before the step computes anything.
4. Before the decision, a refusal, a failure, a rank silent beyond the deadline or a new coordinator leads to
   `abort`: ranks drop what they staged.

Four rules make late, repeated and reordered messages harmless:

- *Identity.* Handover numbers increase monotonically and are never reused. A handover belongs to one
  incarnation of the engine. A rank remembers the highest number that it has concluded (or was ordered to
  abort, even before the proposal) and rejects proposals of that number or below. A commit names one number,
  never "the epoch".
- *Compare-and-set.* A decision replaces exactly the state that its coordinator has read. So there is one
  decision, even if several coordinators believe to be the leader.
- *Fencing.* Every command carries the fencing token of the coordinator's lease, which only increases. A rank
  remembers the highest token and rejects lower ones. While the store is consistent, the two rules above
  suffice. If the store was lost, fencing replaces them. A coordinator first queries every rank under a token
  above all tokens they have seen, so that none accepts commands from an earlier coordinator. The reported
  states are then the truth. A handover that is open without a key was decided if any rank is ready or has
  flipped. Otherwise no coordinator can commit it, and it is aborted.
- *Settlement.* A cell is not free while bytes may still arrive in it or another rank may still read it. No
  time-out changes that (a transfer cannot be recalled), nor does an abort or a flip. The cell is quarantined,
  or drains, until the transfer has settled. Where several reads fill a cell (`Filling`), all of them count:
  it is staged when every part has arrived and compares, and given up as a whole when one part fails. Where
  several peers read a cell, it drains until the last of them has settled.

A rank that has staged cannot abort on its own: the decision may have been made. It waits for the coordinator
or its successor, and serves its old epoch meanwhile. Nor can a coordinator revoke a decision because ranks
are silent. Silence does not prove death, and a rank that returned would have an open handover that no
coordinator ends. Only an abort may finish while ranks are silent. A rank later found with the aborted
handover open receives the abort again: a handover that is open on a rank and finished according to the key
was never decided.

A restarted engine begins with the last epoch that was decided. If the engine's key says COMMITTING, that is
the epoch of its handover (the placement was recorded as staged before). Otherwise it is the last placement
recorded as committed (recorded before the key says IDLE). A placement recorded only as staged is not decided.
Readers read the key first, then the log.

Engines that rearrange
----------------------
An engine that moves its experts itself (vLLM's EPLB) takes part with another rank table, `REARRANGING`. Its
ranks stage a map, not weights. A commit is the permission to *vote*: at every K-th step all ranks exchange
ballots in a collective, and carry out the map in that step if all ballots name the same handover and the same
map in force. Otherwise none does, and the vote is repeated. So no rank moves experts because of a message
that it alone received.

- *Ballots bind.* A rank drops its map only between votes, never between its ballot and the result.
- *Refused by all.* A rank that drops its map reports that the handover has ended for it (REFUSED), and never
  votes for that number again: so no later vote passes, and the other ranks are told to drop it too. A decided
  handover that all ranks have dropped is aborted (ALL_REFUSED, by compare-and-set like every decision). It is
  the only abort after the decision. It needs a report of every rank: after the vote has passed, an error or
  silence proves nothing.
- *Own map after a restart.* A restarted engine serves the map that it was built with, whatever was decided
  before. It joins with that map, under an epoch above every epoch that its predecessor may have reached.

`docs/handover.md` draws the tables. `tests/handovers/test_handover_model.py`, `test_turn_model.py` and
`test_vote_model.py` explore all interleavings, and show the failure that follows from dropping each rule.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar


class CoordinatorState(StrEnum):
    """Progress of the coordinator for one engine; stored under the engine's key."""

    IDLE = "idle"
    PROPOSING = "proposing"
    COMMITTING = "committing"
    ABORTING = "aborting"


class CoordinatorEvent(StrEnum):
    """Events of the coordinator."""

    BEGIN = "begin"
    ALL_STAGED = "all staged"
    FAILED = "failed"
    """a rank refused or failed, the deadline passed, or another coordinator takes over"""
    ALL_SERVING = "all serving"
    ALL_REFUSED = "refused by all"
    """every rank of an engine that rearranges has dropped the decided map, and serves the old one"""
    ALL_ABORTED = "all aborted"
    ENGINE_GONE = "engine gone"
    """the incarnation that the handover belongs to has ended: it sent `EngineLeft`, or another one joined
    under the engine's name. Silence is no proof
    """


CONDUCTING: Mapping[tuple[CoordinatorState, CoordinatorEvent], CoordinatorState] = {
    (CoordinatorState.IDLE, CoordinatorEvent.BEGIN): CoordinatorState.PROPOSING,
    (CoordinatorState.PROPOSING, CoordinatorEvent.ALL_STAGED): CoordinatorState.COMMITTING,
    (CoordinatorState.PROPOSING, CoordinatorEvent.FAILED): CoordinatorState.ABORTING,
    (CoordinatorState.PROPOSING, CoordinatorEvent.ENGINE_GONE): CoordinatorState.IDLE,
    (CoordinatorState.COMMITTING, CoordinatorEvent.ALL_SERVING): CoordinatorState.IDLE,
    (CoordinatorState.COMMITTING, CoordinatorEvent.ALL_REFUSED): CoordinatorState.ABORTING,
    (CoordinatorState.COMMITTING, CoordinatorEvent.ENGINE_GONE): CoordinatorState.IDLE,
    (CoordinatorState.ABORTING, CoordinatorEvent.ALL_ABORTED): CoordinatorState.IDLE,
    (CoordinatorState.ABORTING, CoordinatorEvent.ENGINE_GONE): CoordinatorState.IDLE,
}


class RankState(StrEnum):
    """Handover state of a rank."""

    SERVING = "serving"
    """no handover is open"""
    STAGING = "staging"
    STAGED = "staged"
    FAILED = "failed"
    """staging failed; the rank has reported it and waits for the abort"""
    READY = "ready"
    """the commit was accepted; the flip follows as soon as every rank is ready. In an engine that rearranges:
    the rank votes for the map that it holds
    """


class RankEvent(StrEnum):
    """Events of a rank."""

    PROPOSE = "propose"
    STAGED = "staged"
    FAILED = "failed"
    COMMIT = "commit"
    FLIPPED = "flipped"
    ABORT = "abort"
    REFUSED = "refused"
    """a rank of an engine that rearranges has dropped the map that it held, serves the old one, and never
    votes for that handover again
    """


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

REARRANGING: Mapping[tuple[RankState, RankEvent], RankState] = {
    **RANK,
    (RankState.STAGED, RankEvent.REFUSED): RankState.SERVING,
    (RankState.READY, RankEvent.REFUSED): RankState.SERVING,
}
"""Table of a rank of an engine that moves its experts itself."""


class Cell(StrEnum):
    """Use of a cell of a rank's expert memory."""

    FREE = "free"
    PULLING = "pulling"
    """bytes are arriving"""
    VERIFYING = "verifying"
    STAGED = "staged"
    LIVE = "live"
    """in service"""
    DRAINING = "draining"
    """no longer in service, but another rank may still read it"""
    QUARANTINED = "quarantined"
    """given up, but bytes may still arrive"""


class CellEvent(StrEnum):
    """Events of a cell."""

    RESERVED = "reserved"
    LANDED = "landed"
    BROKEN = "broken"
    """a transfer or a part failed, and none is in progress"""
    OVERDUE = "overdue"
    """given up at a deadline or by an abort, while bytes may still arrive"""
    VERIFIED = "verified"
    REFUSED = "refused"
    """its checksums differ from the leased ones"""
    ADOPTED = "adopted"
    EVICTED = "evicted"
    DROPPED = "dropped"
    """staged for a handover that was aborted"""
    SETTLED = "settled"
    """no further bytes arrive, and no reader is left"""


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


class IllegalTransition(Exception):
    """An event that a state does not allow. The text names role, state and event."""


_ROLES: Mapping[type[StrEnum], str] = {CoordinatorState: "coordinator", RankState: "rank", Cell: "cell"}

State = TypeVar("State", bound=StrEnum)
Happening = TypeVar("Happening", bound=StrEnum)


def next_state(table: Mapping[tuple[State, Happening], State], state: State, event: Happening) -> State:
    """Return the state after an event. IllegalTransition if the table has no such transition."""
    after = table.get((state, event))
    if after is None:
        allowed = ", ".join(repr(one.value) for (of, one) in table if of is state) or "nothing"
        raise IllegalTransition(
            f"a {_ROLES[type(state)]} that is {state.value!r} cannot take {event.value!r}; allowed: {allowed}"
        )
    return after


class Filling(NamedTuple):
    """Reads that fill a cell, one per part of what it is to hold. Bits: which parts.

    A whole expert that is read from one rank is one part; a layer that is turned over (`fleet.sharding`)
    fills a cell from every rank. A part that is in none of the three has arrived and compares, or has failed.
    Parts only move on: none is read a second time into the same cell.
    """

    waiting: int = 0
    """the read has not begun"""
    reading: int = 0
    """bytes may arrive"""
    comparing: int = 0
    """all bytes have arrived, and are being compared with their checksums"""

    @classmethod
    def of(cls, parts: int) -> "Filling":
        """Return the filling of a reserved cell: no read has begun. parts: how many there are."""
        return cls(waiting=(1 << parts) - 1)

    @property
    def uses_cell(self) -> bool:
        """True while bytes may arrive in the cell, or are being compared there."""
        return bool(self.reading | self.comparing)

    def begun(self, part: int) -> "Filling":
        """Return the filling after the read of a part began. IllegalTransition if it is not the first."""
        bit = self._only(part, self.waiting, "be read")
        return self._replace(waiting=self.waiting ^ bit, reading=self.reading | bit)

    def landed(self, part: int) -> "Filling":
        """Return the filling after all bytes of a part arrived. IllegalTransition if it is not being read."""
        bit = self._only(part, self.reading, "land")
        return self._replace(reading=self.reading ^ bit, comparing=self.comparing | bit)

    def done(self, part: int) -> "Filling":
        """Return the filling after a part was compared, or its read failed or settled: it does not use the
        cell any more.
        """
        keep = ~(1 << part)
        return Filling(self.waiting & keep, self.reading & keep, self.comparing & keep)

    def stopped(self) -> "Filling":
        """Return the filling of a cell that was given up: no further read begins."""
        return self._replace(waiting=0)

    def _only(self, part: int, bits: int, verb: str) -> int:
        if not bits >> part & 1:
            raise IllegalTransition(f"part {part} of a cell cannot {verb} now: {self}")
        return 1 << part


def after_part(use: Cell, filling: Filling) -> CellEvent | None:
    """Return the event of a cell that follows from its parts; None: other parts are still awaited."""
    if use is Cell.PULLING and not filling.waiting | filling.reading:
        return CellEvent.LANDED
    if use is Cell.VERIFYING and not filling.comparing:
        return CellEvent.VERIFIED
    if use is Cell.QUARANTINED and not filling.uses_cell:
        return CellEvent.SETTLED
    return None


def given_up(use: Cell, filling: Filling) -> CellEvent:
    """Return the event by which a cell that is pulling or verifying is given up, because a part failed or is
    overdue, or the handover was aborted. It is free at once only if no other part uses it.
    """
    if filling.uses_cell:
        return CellEvent.OVERDUE
    return CellEvent.BROKEN if use is Cell.PULLING else CellEvent.REFUSED


class CommandVerdict(StrEnum):
    """Reaction of a rank to a command.

    Only TAKE changes the state, except for the highest token (`with_token`). On REPEAT the rank reports its
    state again.
    """

    TAKE = "take"
    REPEAT = "repeat"
    FENCED = "fenced"
    """from a coordinator that has been replaced"""
    PAST = "past"
    """of a finished handover, or for an epoch that does not follow the one in service"""
    BUSY = "busy"
    """another handover is open"""
    UNKNOWN = "unknown"
    """commit of a handover that was never proposed to this rank"""
    PREMATURE = "premature"
    """commit before staging finished, or abort after the commit"""


class ProtocolState(NamedTuple):
    """Protocol state of a rank."""

    state: RankState
    served: int
    """epoch in service"""
    token: int = 0
    """highest fencing token seen"""
    handover: int = 0
    """number of the open handover; 0: none"""
    concluded: int = 0
    """highest number of a finished handover, flipped or aborted"""
    flipped: int = 0
    """number of the last handover that was flipped to"""


def is_open(rank: ProtocolState, handover: int) -> bool:
    """Return True if this handover is open on the rank.

    Check this before `concluded`: an abort received for a later handover concludes only that one.
    """
    return rank.state is not RankState.SERVING and handover == rank.handover


def with_token(rank: ProtocolState, token: int) -> ProtocolState:
    """Return the state after any command, whatever its verdict: the highest token seen is recorded."""
    return rank if token <= rank.token else rank._replace(token=token)


def handle_propose(rank: ProtocolState, token: int, handover: int, epoch: int) -> CommandVerdict:
    """Return the verdict on a proposal. epoch: the epoch that it creates."""
    if token < rank.token:
        return CommandVerdict.FENCED
    if is_open(rank, handover):
        return CommandVerdict.REPEAT
    if handover <= rank.concluded:
        return CommandVerdict.PAST
    if rank.state is not RankState.SERVING:
        return CommandVerdict.BUSY
    return CommandVerdict.TAKE if epoch == rank.served + 1 else CommandVerdict.PAST


def handle_commit(rank: ProtocolState, token: int, handover: int) -> CommandVerdict:
    """Return the verdict on a commit."""
    if token < rank.token:
        return CommandVerdict.FENCED
    if is_open(rank, handover):
        return {RankState.STAGED: CommandVerdict.TAKE, RankState.READY: CommandVerdict.REPEAT}.get(
            rank.state, CommandVerdict.PREMATURE
        )
    if handover == rank.flipped:
        return CommandVerdict.REPEAT
    return CommandVerdict.PAST if handover <= rank.concluded else CommandVerdict.UNKNOWN


def handle_abort(rank: ProtocolState, token: int, handover: int) -> CommandVerdict:
    """Return the verdict on an abort.

    An abort of a handover that was never proposed to this rank is accepted too: its proposal may still
    arrive, and must then be rejected as past.
    """
    if token < rank.token:
        return CommandVerdict.FENCED
    if is_open(rank, handover):
        return CommandVerdict.PREMATURE if rank.state is RankState.READY else CommandVerdict.TAKE
    if handover <= rank.concluded:
        return CommandVerdict.PREMATURE if handover == rank.flipped else CommandVerdict.REPEAT
    return CommandVerdict.TAKE


def proposed(rank: ProtocolState, token: int, handover: int) -> ProtocolState:
    """Return the state after an accepted proposal."""
    return rank._replace(
        state=next_state(RANK, rank.state, RankEvent.PROPOSE), token=token, handover=handover
    )


def staged(rank: ProtocolState, *, failed: bool = False) -> ProtocolState:
    """Return the state after staging finished, or failed."""
    return rank._replace(state=next_state(RANK, rank.state, RankEvent.FAILED if failed else RankEvent.STAGED))


def committed(rank: ProtocolState, token: int) -> ProtocolState:
    """Return the state after an accepted commit: ready."""
    return rank._replace(state=next_state(RANK, rank.state, RankEvent.COMMIT), token=token)


def flipped(rank: ProtocolState) -> ProtocolState:
    """Return the state after the step at which all ranks flipped."""
    state = next_state(RANK, rank.state, RankEvent.FLIPPED)
    concluded = max(rank.concluded, rank.handover)
    return rank._replace(
        state=state, served=rank.served + 1, handover=0, concluded=concluded, flipped=rank.handover
    )


def aborted(rank: ProtocolState, token: int, handover: int) -> ProtocolState:
    """Return the state after an accepted abort, of the open handover or of one that has not been proposed
    yet.
    """
    concluded = max(rank.concluded, handover)
    if handover != rank.handover:
        return rank._replace(token=token, concluded=concluded)
    return rank._replace(
        state=next_state(RANK, rank.state, RankEvent.ABORT), token=token, handover=0, concluded=concluded
    )


def refused(rank: ProtocolState) -> ProtocolState:
    """Return the state after a rank of an engine that rearranges has dropped the map that it held."""
    state = next_state(REARRANGING, rank.state, RankEvent.REFUSED)
    return rank._replace(state=state, handover=0, concluded=max(rank.concluded, rank.handover))


class Ballot(NamedTuple):
    """Vote of one rank of an engine that rearranges."""

    handover: int
    """number of the map that it votes for; 0: none"""
    digest: str
    """digest of that map"""
    served: str
    """digest of the map in force on the rank"""


def passes(ballots: Sequence[Ballot]) -> bool:
    """Return True if the ranks carry out the map in this step. Every rank decides this from the same
    ballots."""
    return ballots[0].handover > 0 and all(ballot == ballots[0] for ballot in ballots)


def flips(served: int, ready: tuple[int, ...]) -> bool:
    """Return True if the ranks flip at this step. Every rank decides this from the same step headers."""
    return min(ready) > served


def disagreement(ready: Sequence[int], digests: Sequence[int]) -> tuple[int, int] | None:
    """Return the first two ranks that mean different placements by one epoch; None: the ranks agree. Every
    rank decides this from the same step headers, before it flips or computes anything.

    ready: the epoch that each rank announces as ready; digests: of the placement that it would serve under
    that epoch. A digest of the placement in service would be one step late: ranks flip between the headers
    of a step and its computation.
    """
    first: dict[int, int] = {}
    for rank, (epoch, digest) in enumerate(zip(ready, digests, strict=True)):
        known = first.setdefault(epoch, rank)
        if digests[known] != digest:
            return known, rank
    return None
