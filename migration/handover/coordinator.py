"""State machine of one engine's handover on the coordinator side, using the tables of `fleet.handover`. Pure.

`HandoverState` is a value; the time is an argument. Reports from ranks (`reported`, `declined`), the time and
the loss of the engine (`gone`) each produce a new state. The caller reads from it the commands to send
(`due`) and the next transition (`next_transition`): the records to write, in order, and the state to persist
after them. The caller must write them in exactly that order. A successor that sees only the durable state can
then resume (`taken_over`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from fleet.facts.migrations import ExpertArrival, MigrationAborted, MigrationCommitted, MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.handover import CONDUCTING, CoordinatorEvent, CoordinatorState, next_state
from fleet.layout import AttentionLayout
from fleet.placement import PlacementRecord
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    ExpertCopy,
    HandoverDescribed,
    ProposeHandover,
)
from fleet.text import listed
from migration.handover.rank_progress import (
    DECLINED,
    ENGINE_GONE,
    OVERDUE,
    REFUSED,
    REPLACED,
    HandoverFailure,
    RankProgress,
    RankStatus,
    hopeless,
    reached,
)

Command = ProposeHandover | CommitHandover | AbortHandover | DescribeHandover
Record = MigrationStaged | PlacementCommitted | MigrationCommitted | MigrationAborted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandoverSpec:
    """Immutable description of a handover."""

    engine: str
    worker_id: int
    ranks: int
    handover: int
    plan: str
    number: int
    """index of the handover within the plan, from 0"""
    last: bool
    epoch: int
    """epoch that the handover creates"""
    placement: PlacementRecord | None
    """None: unknown to a successor; only an abort works without it"""
    copies: tuple[ExpertCopy, ...] = ()
    copied: int = 0
    bytes: int = 0
    stage_seconds: float
    """time limit for staging"""
    traceparent: str = ""
    highest_assigned: int = 0
    """see `OpenHandover`"""
    rearranges: bool = False
    """the engine moves its experts itself, so its ranks are told the map but no copies"""

    @property
    def arrivals(self) -> tuple[ExpertArrival, ...]:
        """Return the experts that arrive at each rank. Empty if the copies or the placement are not known any
        more."""
        if self.placement is None:
            return ()
        width = self.placement.slots_per_rank
        return tuple(
            ExpertArrival(one.layer, one.expert, one.source // width, one.slot // width)
            for one in self.copies
        )


class OpenHandover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durable state of a handover, stored under the engine's key. It suffices to finish the handover.

    Everything else comes from the log and the plan.
    """

    state: CoordinatorState
    worker_id: int
    ranks: int
    handover: int
    """for an idle engine: the last handover"""
    plan: str
    number: int
    last: bool
    epoch: int
    copied: int
    bytes: int
    token: int
    """fencing token of the coordinator that wrote this"""
    highest_assigned: int = msgspec.field(default=0, name="given")
    """highest number ever assigned to a handover of this engine, if higher than this one's. That happens when
    ranks were found with an earlier handover open"""
    reason: str = ""
    fault: str = ""
    rank: int | None = None

    @property
    def highest(self) -> int:
        """Highest handover number assigned so far.

        Numbers are never reused, because a late command of one handover would be taken for a command of the
        other.
        """
        return max(self.handover, self.highest_assigned)


class Transition(NamedTuple):
    """Change of state: write these records, in order, then persist the state `after`."""

    event: CoordinatorEvent
    records: tuple[Record, ...]
    after: CoordinatorState


class HandoverTimes(NamedTuple):
    """Timeouts, in seconds."""

    repeat: float
    """interval for resending a command that was not answered"""
    grace: float
    """extra time beyond the deadline that ranks enforce, because their failure report is more precise"""
    commit: float
    """a commit that takes longer causes a warning"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HandoverState:
    """Handover in progress."""

    what: HandoverSpec
    times: HandoverTimes
    state: CoordinatorState
    token: int
    begun: float
    statuses: tuple[RankStatus, ...]
    """status of each rank"""
    decided: float | None = None
    failure: HandoverFailure | None = None
    left: str = ""
    """reason why the engine is gone; empty: it is present"""
    silent: bool = False
    """True if heartbeats are missing. The engine may come back; it then receives the abort before any other
    proposal"""
    highest_token: int = 0
    """highest fencing token reported by any rank"""

    # Inputs

    def reported(self, report: HandoverDescribed) -> "HandoverState":
        """Apply a report or answer from a rank. Ignore reports about other incarnations, ranks or handovers,
        and invalid ones."""
        if report.worker_id != self.what.worker_id or not 0 <= report.rank < self.what.ranks:
            return self
        before = self.statuses[report.rank]
        progress = max(before.progress, reached(report, self.what.handover))
        pulls = report.pulls if report.handover == self.what.handover and report.pulls else before.pulls
        status = before._replace(
            progress=progress,
            pulls=pulls,
            declined=before.declined and progress is RankProgress.UNKNOWN,
            failure=report.failure if progress is RankProgress.OVER else before.failure,
        )
        token = max(self.highest_token, report.token)
        after = replace(self._with_status(report.rank, status), highest_token=token)
        if self.state is not CoordinatorState.PROPOSING or self.failure is not None:
            return after
        return replace(after, failure=hopeless(report, self.what.handover, self.what.epoch))

    def declined(self, rank: int, reason: str) -> "HandoverState":
        """Apply the refusal of a rank to accept any commands."""
        before = self.statuses[rank]
        after = self._with_status(rank, before._replace(declined=before.progress is RankProgress.UNKNOWN))
        if self.state is not CoordinatorState.PROPOSING or self.failure is not None:
            return after
        return replace(
            after, failure=HandoverFailure(f"rank {rank} takes part in no handover: {reason}", DECLINED, rank)
        )

    def gone(self, why: str) -> "HandoverState":
        """Apply that the engine left, died or came back as another incarnation. why: a clause."""
        return self if self.left else replace(self, left=why)

    def checked(self, *, silent: bool) -> "HandoverState":
        """Apply the result of a heartbeat check.

        Silence proves nothing, so it ends only an abort. A decided handover must reach every rank, and an
        undecided one has a deadline.
        """
        return self if silent is self.silent else replace(self, silent=silent)

    def commanded(self, ranks: Sequence[int], now: float) -> "HandoverState":
        """Note that commands were sent to these ranks."""
        statuses = tuple(
            status._replace(sent_at=now) if rank in ranks else status
            for rank, status in enumerate(self.statuses)
        )
        return replace(self, statuses=statuses)

    def with_token(self, token: int) -> "HandoverState":
        """Use a higher fencing token. Every rank becomes due at once."""
        return replace(self._all_due(), token=token)

    def with_transition(self, transition: Transition, now: float) -> "HandoverState":
        """Apply a persisted transition. Raises IllegalTransition if the tables do not allow it."""
        state = next_state(CONDUCTING, self.state, transition.event)
        decided = now if state is CoordinatorState.COMMITTING else self.decided
        ends_without = transition.event in (CoordinatorEvent.FAILED, CoordinatorEvent.ALL_REFUSED)
        failure = self._failed(now) if ends_without else self.failure
        return replace(self._all_due(), state=state, decided=decided, failure=failure)

    def _with_status(self, rank: int, status: RankStatus) -> "HandoverState":
        return replace(self, statuses=(*self.statuses[:rank], status, *self.statuses[rank + 1 :]))

    def _all_due(self) -> "HandoverState":
        return replace(
            self, statuses=tuple(status._replace(sent_at=float("-inf")) for status in self.statuses)
        )

    # Outputs

    @property
    def deadline(self) -> float:
        """Time by which all ranks must have staged."""
        return self.begun + self.what.stage_seconds + self.times.grace

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not yet done what the current state waits for."""
        return tuple(rank for rank, status in enumerate(self.statuses) if not self._done(status))

    def overdue(self, now: float) -> bool:
        """Return True if the commit takes too long. This only causes a warning; a decided handover is never
        aborted."""
        return (
            self.state is CoordinatorState.COMMITTING
            and self.decided is not None
            and now - self.decided > self.times.commit
        )

    def due(self, now: float) -> tuple[tuple[int, Command], ...]:
        """Return the (rank, command) pairs to send now."""
        if self.state is CoordinatorState.IDLE or self.left:
            return ()
        return tuple(
            (rank, self._command(rank))
            for rank in self.waiting_for
            if now >= self.statuses[rank].sent_at + self.times.repeat
        )

    def next_look(self, now: float) -> float:
        """Return the latest time of the next check; `now` or later."""
        moments = [status.sent_at + self.times.repeat for status in self.statuses if not self._done(status)]
        if self.state is CoordinatorState.PROPOSING:
            moments.append(self.deadline)
        return max(now, min(moments, default=now))

    def next_transition(self, now: float) -> Transition | None:
        """Return the next transition; None: keep sending the due commands."""
        event = self._next_event(now)
        return (
            None
            if event is None
            else Transition(event, self._records(event, now), next_state(CONDUCTING, self.state, event))
        )

    def durable(self, after: CoordinatorState, now: float) -> OpenHandover:
        """Return the durable record for a state."""
        what, failure = self.what, self._failed(now) if after is CoordinatorState.ABORTING else None
        return OpenHandover(
            state=after,
            worker_id=what.worker_id,
            ranks=what.ranks,
            handover=what.handover,
            plan=what.plan,
            number=what.number,
            last=what.last,
            epoch=what.epoch,
            copied=what.copied,
            bytes=what.bytes,
            token=self.token,
            highest_assigned=what.highest_assigned,
            **({} if failure is None else failure._asdict()),
        )

    def _done(self, status: RankStatus) -> bool:
        match self.state:
            case CoordinatorState.PROPOSING:
                return status.progress is RankProgress.STAGED
            case CoordinatorState.COMMITTING:
                return status.progress is RankProgress.SERVING
            case CoordinatorState.ABORTING:
                return status.progress >= RankProgress.OVER or status.declined or self.silent
        return True

    def _next_event(self, now: float) -> CoordinatorEvent | None:
        if self.state is CoordinatorState.IDLE:
            return None
        if self.state is CoordinatorState.COMMITTING and self._after_decision is not None:
            return self._after_decision
        if self.left:
            return CoordinatorEvent.ENGINE_GONE
        done = not self.waiting_for
        match self.state:
            case CoordinatorState.PROPOSING:
                failed = self.failure is not None or (not done and now >= self.deadline)
                return CoordinatorEvent.FAILED if failed else CoordinatorEvent.ALL_STAGED if done else None
            case CoordinatorState.COMMITTING:
                return None
        return CoordinatorEvent.ALL_ABORTED if done else None

    @property
    def _after_decision(self) -> CoordinatorEvent | None:
        """Return what all ranks have reported after the decision; None: some have not, or they differ."""
        reached = {status.progress for status in self.statuses}
        if reached == {RankProgress.SERVING}:
            return CoordinatorEvent.ALL_SERVING
        return CoordinatorEvent.ALL_REFUSED if reached == {RankProgress.OVER} else None

    def _command(self, rank: int) -> Command:
        what = self.what
        match self.state:
            case CoordinatorState.COMMITTING:
                return CommitHandover(
                    worker_id=what.worker_id, rank=rank, token=self.token, handover=what.handover
                )
            case CoordinatorState.ABORTING:
                reason = "" if self.failure is None else self.failure.reason
                return AbortHandover(
                    worker_id=what.worker_id,
                    rank=rank,
                    token=self.token,
                    handover=what.handover,
                    reason=reason,
                )
        if self.statuses[rank].progress is not RankProgress.UNKNOWN or what.placement is None:
            return DescribeHandover(worker_id=what.worker_id, rank=rank, token=self.token)
        return ProposeHandover(
            engine=what.engine,
            worker_id=what.worker_id,
            rank=rank,
            token=self.token,
            handover=what.handover,
            plan=what.plan,
            placement=what.placement,
            copies=() if what.rearranges else what.copies,
            deadline_seconds=what.stage_seconds,
            traceparent=what.traceparent,
        )

    def _failed(self, now: float) -> HandoverFailure | None:
        """Return the reason for the abort."""
        if self.failure is not None:
            return self.failure
        if self.left:
            start = (
                "its initial map, not the one on record"
                if self.what.rearranges
                else "the placement in the log"
            )
            return HandoverFailure(
                f"engine {self.what.engine!r} is gone: {self.left}; its next incarnation starts from {start}",
                ENGINE_GONE,
            )
        if self.state is CoordinatorState.PROPOSING and now >= self.deadline:
            return self._too_late()
        if self.state is CoordinatorState.COMMITTING:
            return self._refused()
        return None

    def _refused(self) -> HandoverFailure:
        named = next(((rank, one.failure) for rank, one in enumerate(self.statuses) if one.failure), None)
        rank, why = (None, "no rank said why") if named is None else named
        return HandoverFailure(
            f"every rank has dropped the new map before the vote on it passed: {why}; request it again",
            REFUSED,
            rank,
        )

    def _too_late(self) -> HandoverFailure:
        silent = [rank for rank in self.waiting_for if self.statuses[rank].progress is RankProgress.UNKNOWN]
        who, did = (silent, "did not answer") if silent else (self.waiting_for, "did not stage")
        named = f"rank {who[0]}" if len(who) == 1 else f"ranks {listed(who)}"
        return HandoverFailure(
            f"{named} {did} within {self.what.stage_seconds:g} s; see the log there, or raise"
            " planner.stage_seconds",
            OVERDUE,
            who[0],
        )

    # Records

    def _records(self, event: CoordinatorEvent, now: float) -> tuple[Record, ...]:
        if not self.what.plan:
            return ()  # it was found on the ranks after the log was lost: its plan is unknown
        match event:
            case CoordinatorEvent.ALL_STAGED:
                return self._staged(now)
            case CoordinatorEvent.ALL_SERVING:
                return self._committed(now)
            case CoordinatorEvent.ENGINE_GONE if self.state is CoordinatorState.COMMITTING:
                return self._committed(now)  # it was decided, so the next incarnation starts with it
            case CoordinatorEvent.ALL_ABORTED | CoordinatorEvent.ENGINE_GONE:
                return (self._aborted(now),)
        return ()

    def _staged(self, now: float) -> tuple[Record, ...]:
        what = self.what
        if what.placement is None:
            return ()
        staged = MigrationStaged(
            engine=what.engine,
            worker_id=what.worker_id,
            plan=what.plan,
            handover=what.handover,
            number=what.number,
            epoch=what.epoch,
            placement=what.placement,
            copies=what.copied,
            bytes=what.bytes,
            seconds=now - self.begun,
            pulls=tuple(pull for status in self.statuses for pull in status.pulls),
            arrivals=what.arrivals,
        )
        return (staged,)

    def _committed(self, now: float) -> tuple[Record, ...]:
        what = self.what
        placed: tuple[Record, ...] = ()
        if what.placement is not None:
            placed = (
                PlacementCommitted(
                    engine=what.engine,
                    worker_id=what.worker_id,
                    attention=AttentionLayout(kind=what.placement.attention),
                    placement=what.placement,
                    plan=what.plan,
                ),
            )
        committed = MigrationCommitted(
            engine=what.engine,
            worker_id=what.worker_id,
            plan=what.plan,
            handover=what.handover,
            number=what.number,
            epoch=what.epoch,
            copies=what.copied,
            bytes=what.bytes,
            seconds=now - self.begun,
            commit_seconds=0.0 if self.decided is None else now - self.decided,
            last=what.last,
            arrivals=what.arrivals,
        )
        return (*placed, committed)

    def _aborted(self, now: float) -> MigrationAborted:
        failure, what = self._failed(now) or HandoverFailure("it was aborted", REPLACED), self.what
        return MigrationAborted(
            engine=what.engine,
            worker_id=what.worker_id,
            plan=what.plan,
            handover=what.handover,
            number=what.number,
            epoch=what.epoch,
            reason=failure.reason,
            fault=failure.fault,
            rank=failure.rank,
            seconds=now - self.begun,
        )


def begun(what: HandoverSpec, token: int, times: HandoverTimes, now: float) -> HandoverState:
    """Start a handover whose first state has just been persisted."""
    return HandoverState(
        what=what,
        times=times,
        state=next_state(CONDUCTING, CoordinatorState.IDLE, CoordinatorEvent.BEGIN),
        token=token,
        begun=now,
        statuses=(RankStatus(),) * what.ranks,
    )


def taken_over(
    what: HandoverSpec,
    found: OpenHandover,
    token: int,
    times: HandoverTimes,
    now: float,
    staged_seconds: float = 0.0,
) -> HandoverState:
    """Resume a handover left by a previous coordinator.

    Abort it if undecided, commit it if decided, and finish the abort if it was already aborting.
    staged_seconds: duration of its staging, as far as known.
    """
    resumed = HandoverState(
        what=what,
        times=times,
        state=found.state,
        token=token,
        begun=now - staged_seconds,
        statuses=(RankStatus(),) * what.ranks,
        decided=None,
        failure=None,
    )
    match found.state:
        case CoordinatorState.PROPOSING:
            return replace(
                resumed,
                failure=HandoverFailure(
                    "the migration service that coordinated it ended before the decision; request it again",
                    REPLACED,
                ),
            )
        case CoordinatorState.COMMITTING:
            return replace(resumed, decided=now)
        case CoordinatorState.ABORTING:
            return replace(
                resumed,
                failure=HandoverFailure(
                    found.reason or "it was aborted", found.fault or REPLACED, found.rank
                ),
            )
    return resumed
