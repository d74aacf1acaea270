"""The expert ranks' side of the handover protocol in an engine that moves its experts itself. Pure.

One `VoteProtocol` speaks for all expert ranks of an engine. Each rank has a worker process, which holds a
map, votes for it together with the others, and carries it out (`fleet.handover`, "Engines that rearrange").
What counts is in the workers. So a rank is described by its worker's last status, and nothing is reported
that no worker has said: a restarted agent knows as much as its predecessor, apart from the highest fencing
token.

Commands become messages to the worker: `propose` stages the map, `commit` permits to vote, `abort` drops the
map. A command has been carried out when the worker's status shows it. Messages may be lost: a proposal is
repeated here, the other commands by the coordinator.

Two duties are the agent's own. When one worker has dropped the map, no vote for it can pass any more, so the
others are told to drop it too. And when all vote but nothing happens, the engine makes no steps, and is
nudged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_adapter.engine import WorkerMap
from engine_adapter.handover.proposal_check import (
    CannotStage,
    StagingFault,
    check_terms,
    check_whole_map,
)
from fleet.handover import (
    CommandVerdict,
    ProtocolState,
    RankState,
    handle_abort,
    handle_commit,
    handle_propose,
)
from fleet.placement import Placement
from fleet.requests.handovers import AbortHandover, CommitHandover, HandoverDescribed, ProposeHandover

REPEAT_SECONDS = 0.5
"""Interval at which a message that no status has answered is sent again."""
IDLE_SECONDS = 5.0
"""Time without any change, while all workers vote, after which the engine counts as idle."""


class Stage(NamedTuple):
    """Send a map to a worker."""

    rank: int
    handover: int
    placement: Placement


class Permit(NamedTuple):
    """Permit a worker to vote."""

    rank: int
    handover: int


class Drop(NamedTuple):
    """Ask a worker to drop its map."""

    rank: int
    handover: int
    reason: str


class Nudge(NamedTuple):
    """Make the engine do a few steps."""


Effect = Stage | Permit | Drop | Nudge


class NotConnected(ValueError):
    """The worker of a rank is not connected. The text names the rank and the remedy."""


@dataclass(slots=True)
class _Proposal:
    """A map on its way to a worker, or that the worker could not hold."""

    number: int
    placement: Placement
    began: float
    until: float
    """Deadline for staging."""
    sent: float
    failure: str = ""
    fault: str = ""
    aborted: bool = False

    @property
    def due(self) -> float:
        """Time at which it is sent again or fails. An aborted one is not sent again."""
        return self.until if self.aborted else min(self.sent + REPEAT_SECONDS, self.until)


@dataclass(slots=True)
class _Rank:
    """One expert rank."""

    worker: WorkerMap | None = None
    token: int = 0
    concluded: int = 0
    proposal: _Proposal | None = None
    """None once the worker holds the map: its status says the rest."""
    began: float = 0.0
    seconds: float = 0.0
    """Duration of the last handover."""
    dropped_at: float = float("-inf")
    """Time at which the worker was last told to drop its map because another has."""

    @property
    def held(self) -> int:
        """Number of the map that the worker holds. 0: none."""
        worker = self.worker
        return worker.handover if worker is not None and worker.state in ("staged", "voting") else 0

    @property
    def voting(self) -> int:
        """Number of the map that the worker votes for. 0: none."""
        return self.held if self.worker is not None and self.worker.state == "voting" else 0

    def standing(self) -> tuple[RankState, int]:
        """Return the state of the rank, and the number of its open handover (0: none)."""
        if self.proposal is not None and self.proposal.failure:
            return RankState.FAILED, self.proposal.number
        if self.held:
            return RankState.READY if self.voting else RankState.STAGED, self.held
        if self.proposal is not None:
            return RankState.STAGING, self.proposal.number
        return RankState.SERVING, 0


class VoteProtocol:
    """Protocol state of all expert ranks. placement: the map in force."""

    def __init__(self, *, worker_id: int, placement: Placement) -> None:
        self.placement = placement
        """The map in force. The owner replaces it once all workers serve another one."""
        self.fault = ""
        """Why the engine takes no map any more. Set by the owner. Empty: it takes maps."""
        self._worker_id = worker_id
        self._ranks = [_Rank() for _ in range(placement.ranks)]
        self._effects: list[Effect] = []
        self._changed_at = float("-inf")
        """Time of the last change of any worker's status."""
        self._nudged_at = float("-inf")
        self._stalled = False
        """True: the workers vote, and nothing has changed for IDLE_SECONDS."""

    def drain(self) -> list[Effect]:
        """Return the pending effects in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    # commands

    def verdict_on_proposal(self, command: ProposeHandover) -> CommandVerdict:
        """Return the verdict on a proposal without changing any state. NotConnected if the rank has no
        worker."""
        state = self.state(command.rank)
        return handle_propose(state, command.token, command.handover, command.placement.epoch)

    def propose(self, command: ProposeHandover, placement: Placement | str, now: float) -> CommandVerdict:
        """Take a proposal. placement: the decoded placement of the command, or why it cannot be decoded.
        NotConnected if the rank has no worker."""
        verdict = self.verdict_on_proposal(command)
        rank = self._seen(command.rank, command.token)
        if verdict is not CommandVerdict.TAKE:
            return verdict
        valid = placement if isinstance(placement, Placement) else self.placement
        until = now + command.deadline_seconds
        rank.began = now
        rank.proposal = proposal = _Proposal(command.handover, valid, now, until, now)
        try:
            if isinstance(placement, str):
                raise CannotStage(StagingFault.PLACEMENT, placement)  # noqa: TRY301
            if self.fault:
                raise CannotStage(StagingFault.ENGINE, self.fault)  # noqa: TRY301
            check_terms(command.deadline_seconds, placement, self.placement)
            check_whole_map(placement)
        except CannotStage as error:
            proposal.failure, proposal.fault = str(error), error.fault
        else:
            self._effects.append(Stage(command.rank, command.handover, placement))
        return verdict

    def commit(self, command: CommitHandover) -> CommandVerdict:
        """Take a commit: the worker may vote. NotConnected if the rank has no worker."""
        verdict = handle_commit(self.state(command.rank), command.token, command.handover)
        self._seen(command.rank, command.token)
        if verdict is CommandVerdict.TAKE:
            why = self._hopeless(command.handover)
            message = (
                Drop(command.rank, command.handover, why) if why else Permit(command.rank, command.handover)
            )
            self._effects.append(message)
        return verdict

    def abort(self, command: AbortHandover) -> CommandVerdict:
        """Take an abort. The handover has ended for the rank when its worker says so. NotConnected if the
        rank has no worker."""
        verdict = handle_abort(self.state(command.rank), command.token, command.handover)
        rank = self._seen(command.rank, command.token)
        if verdict is CommandVerdict.TAKE:
            if rank.proposal is not None and rank.proposal.number == command.handover:
                rank.proposal.aborted = True
                self._settle(rank)
            self._effects.append(Drop(command.rank, command.handover, command.reason))
        return verdict

    def status_requested(self, rank: int, token: int) -> None:
        """Note the token of a coordinator's status request, which fences coordinators with lower tokens.
        NotConnected if the rank has no worker."""
        self.state(rank)
        self._seen(rank, token)

    def state(self, rank: int) -> ProtocolState:
        """Return the protocol state of a rank. NotConnected if it has no worker."""
        one = self._ranks[rank]
        if one.worker is None:
            raise NotConnected(
                f"the worker of expert rank {rank} is not connected to the agent; see the log of the engine"
            )
        state, handover = one.standing()
        return ProtocolState(state, one.worker.epoch, one.token, handover, one.concluded, one.worker.flipped)

    def describe(self, rank: int, now: float, verdict: CommandVerdict | None = None) -> HandoverDescribed:
        """Return the status of a rank. verdict: the verdict on the command that this message replies to.
        NotConnected if the rank has no worker."""
        state, one = self.state(rank), self._ranks[rank]
        failure, fault = self._failure(one, state)
        return HandoverDescribed(
            worker_id=self._worker_id,
            rank=rank,
            state=state.state.value,
            served=state.served,
            token=state.token,
            handover=state.handover,
            concluded=state.concluded,
            flipped=state.flipped,
            verdict="" if verdict is None else verdict.value,
            failure=failure,
            fault=fault,
            seconds=now - one.began if state.handover and one.began else one.seconds,
            pending=self._pending(one),
        )

    # events

    def update(self, statuses: Sequence[WorkerMap | None], now: float) -> None:
        """Take the last status of every worker. None: the worker is not connected."""
        for rank, worker in zip(self._ranks, statuses, strict=True):
            if worker == rank.worker:
                continue
            self._changed_at, self._stalled = now, False
            held = rank.held
            rank.worker = worker
            if worker is not None:
                # A worker never takes a number below the one that it holds.
                over = worker.handover - 1 if rank.held else worker.handover
                rank.concluded = max(rank.concluded, worker.flipped, over)
                self._settle(rank)
                if held and not rank.held:
                    rank.seconds = now - rank.began if rank.began else 0.0

    def tick(self, now: float) -> None:
        """Advance the time: fail staging that is past its deadline, repeat messages, and nudge."""
        for number, rank in enumerate(self._ranks):
            if rank.standing()[0] is RankState.STAGING and rank.proposal is not None:
                self._stage_again(number, rank.proposal, now)
            if rank.voting and now >= rank.dropped_at + REPEAT_SECONDS:
                self._drop_hopeless(number, rank, now)
        if self._waits_for_steps and now >= max(self._changed_at, self._nudged_at) + IDLE_SECONDS:
            self._stalled, self._nudged_at = True, now
            self._effects.append(Nudge())

    @property
    def wakes(self) -> float:
        """Time at which `tick` is due, in seconds. Infinity: never."""
        due = [float("inf")]
        for rank in self._ranks:
            if rank.standing()[0] is RankState.STAGING and rank.proposal is not None:
                due.append(rank.proposal.due)
            if rank.voting and self._hopeless(rank.voting):
                due.append(rank.dropped_at + REPEAT_SECONDS)
        if self._waits_for_steps:
            due.append(max(self._changed_at, self._nudged_at) + IDLE_SECONDS)
        return min(due)

    # steps

    def _seen(self, rank: int, token: int) -> _Rank:
        one = self._ranks[rank]
        one.token = max(one.token, token)
        return one

    def _settle(self, rank: _Rank) -> None:
        """End a proposal that the worker has answered."""
        proposal, worker = rank.proposal, rank.worker
        if proposal is None or worker is None or max(worker.handover, worker.flipped) < proposal.number:
            return
        if rank.held:
            if not proposal.failure:
                rank.proposal = None
        elif proposal.aborted or worker.flipped >= proposal.number:
            rank.proposal = None
        elif not proposal.failure:
            proposal.failure = worker.reason or "its worker did not take the map, and gave no reason"
            proposal.fault = StagingFault.ENGINE

    def _stage_again(self, number: int, proposal: _Proposal, now: float) -> None:
        if now >= proposal.until:
            seconds = proposal.until - proposal.began
            proposal.failure = (
                f"the worker of expert rank {number} did not confirm the map within {seconds:.3g} s; see the"
                " log of the engine"
            )
            proposal.fault = StagingFault.OVERDUE
        elif now >= proposal.sent + REPEAT_SECONDS and not proposal.aborted:
            proposal.sent = now
            self._effects.append(Stage(number, proposal.number, proposal.placement))

    def _drop_hopeless(self, number: int, rank: _Rank, now: float) -> None:
        why = self._hopeless(rank.voting)
        if why:
            rank.dropped_at = now
            self._effects.append(Drop(number, rank.voting, why))

    def _hopeless(self, handover: int) -> str:
        """Return why no vote for a handover can or may pass any more. Empty: it still can, as far as is
        known."""
        if self.fault:
            return self.fault
        voting = set[tuple[str, str]]()
        for number, rank in enumerate(self._ranks):
            worker = rank.worker
            if worker is None or worker.flipped >= handover:
                continue
            if rank.held == handover:
                voting.add((worker.digest, worker.served))
            elif worker.handover >= handover:
                return f"expert rank {number} has dropped the map: {worker.reason or 'it gave no reason'}"
        if len({digest for digest, _ in voting if digest}) > 1 or len({served for _, served in voting}) > 1:
            return "the workers hold different maps, or serve different ones"
        return ""

    @property
    def _waits_for_steps(self) -> bool:
        """True while all workers vote, or have carried out what the others still vote for."""
        number = max(rank.voting for rank in self._ranks)
        return number > 0 and all(
            rank.voting == number or (rank.worker is not None and rank.worker.flipped == number)
            for rank in self._ranks
        )

    def _failure(self, rank: _Rank, state: ProtocolState) -> tuple[str, str]:
        """Return why the open handover failed, or why the last one ended without a flip."""
        if state.state is RankState.FAILED and rank.proposal is not None:
            return rank.proposal.failure, rank.proposal.fault
        worker = rank.worker
        if worker is None or state.handover or worker.flipped >= worker.handover or not worker.reason:
            return "", ""
        return worker.reason, StagingFault.REFUSED

    def _pending(self, rank: _Rank) -> str:
        if not rank.voting or rank.worker is None:
            return ""
        done = rank.worker.layers_done  # all of them: those of the map before
        if 0 < done < self.placement.layers:
            return f"{done} of {self.placement.layers} layers"
        if not self._stalled:
            return ""
        return "idle" if all(one.voting for one in self._ranks) else "unknown"
