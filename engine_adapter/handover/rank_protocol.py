"""Handover protocol of one rank: its replies to commands, and its decisions to stage and to fail. Pure.

`fleet.handover` defines the legal transitions, and this module decides what the rank does at each. Commands
and events come in with the time (seconds of any monotonic clock). Effects go out as plain values.
`engine_adapter.agent.handover_agent` executes them and reports the results. Steps of a handover on one rank:

1. `propose`: the placement is checked against the served one (`proposal_check`), and incoming experts are
   copied (`inbound_copies`). When that fails for good, the rank is FAILED: it reports the reason, drops
   everything staged, and waits for the abort.
2. Everything is staged and verified: `Prepare`. Once the engine is prepared, the rank is STAGED.
3. `commit`: `Adopt`. The engine adopts the placement at the first step at which all ranks are ready. The rank
   then serves the new epoch, and the old cells drain.
4. `abort`, any time before the commit: staged cells are dropped. Reads in progress are stopped, and their
   cells are quarantined until the reads settle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.config import TransferConfig
from engine_adapter.handover import inbound_copies
from engine_adapter.handover.cell_table import CellTable
from engine_adapter.handover.inbound_copies import InboundCopies, Report
from engine_adapter.handover.proposal_check import CannotStage, StagingFault, required_work
from fleet.facts.engines import FIXED_ATTENTION
from fleet.facts.migrations import PullReport
from fleet.handover import (
    Cell,
    CommandVerdict,
    ProtocolState,
    RankState,
    aborted,
    committed,
    flipped,
    handle_abort,
    handle_commit,
    handle_propose,
    proposed,
    staged,
    with_token,
)
from fleet.placement import Placement
from fleet.requests.handovers import AbortHandover, CommitHandover, HandoverDescribed, ProposeHandover


class Prepare(NamedTuple):
    """Have the engine prepare a placement, with this rank's slots in these cells. Reported by `prepared` or
    `unprepared`."""

    handover: int
    placement: Placement
    cells: NDArray[np.int32]
    """[layers, slots_per_rank]"""


class Adopt(NamedTuple):
    """Have the engine adopt the prepared placement. Reported by `adopted`."""

    handover: int


class Forget(NamedTuple):
    """Discard the prepared placement, or stop preparing it."""

    handover: int


Effect = inbound_copies.Effect | Prepare | Adopt | Forget


@dataclass(slots=True)
class _Open:
    """The open handover."""

    number: int
    placement: Placement
    began: float
    until: float
    """Deadline for staging."""
    cells: NDArray[np.int32] | None = None
    """int32 [layers, slots_per_rank]. Set once everything is staged."""


class RankProtocol:
    """Protocol state of one rank. tensors: number of tensors of an expert. The cell table knows into how many
    parts experts are cut. tp_refusal: `EngineJoined.tp_refusal`."""

    def __init__(
        self,
        *,
        worker_id: int,
        rank: int,
        placement: Placement,
        cell_table: CellTable,
        tensors: int,
        config: TransferConfig,
        tp_refusal: str = FIXED_ATTENTION,
    ) -> None:
        self.cell_table = cell_table
        self.placement = placement
        """The served placement."""
        self.protocol_state = ProtocolState(RankState.SERVING, placement.epoch)
        self.failure = ""
        """Reason why the open or last handover could not be staged."""
        self.fault = ""
        self.inbound = InboundCopies(
            cell_table, tensors=tensors, slots_per_rank=placement.slots_per_rank, config=config
        )
        self._worker_id = worker_id
        self._rank = rank
        self._config = config
        self._tp_refusal = tp_refusal
        self._open: _Open | None = None
        self._effects: list[Effect] = []
        self._seconds = 0.0

    def drain(self) -> list[Effect]:
        """Return the pending effects in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    # commands

    def verdict_on_proposal(self, command: ProposeHandover) -> CommandVerdict:
        """Return the verdict on a proposal without changing any state."""
        return handle_propose(self.protocol_state, command.token, command.handover, command.placement.epoch)

    def propose(self, command: ProposeHandover, placement: Placement | str, now: float) -> CommandVerdict:
        """Take a proposal. placement: the decoded placement of the command, or the error text when it cannot
        be decoded."""
        verdict = self.verdict_on_proposal(command)
        self.protocol_state = with_token(self.protocol_state, command.token)
        if verdict is not CommandVerdict.TAKE:
            return verdict
        self.protocol_state = proposed(self.protocol_state, command.token, command.handover)
        self.failure = self.fault = ""
        self.inbound.pulls.clear()
        self._open = open_ = _Open(command.handover, self.placement, now, now + command.deadline_seconds)
        self._attempt(lambda: self._begin(command, placement, open_, now), now)
        return verdict

    def commit(self, command: CommitHandover) -> CommandVerdict:
        verdict = handle_commit(self.protocol_state, command.token, command.handover)
        self.protocol_state = with_token(self.protocol_state, command.token)
        if verdict is CommandVerdict.TAKE:
            self.protocol_state = committed(self.protocol_state, command.token)
            self._effects.append(Adopt(command.handover))
        return verdict

    def abort(self, command: AbortHandover, now: float) -> CommandVerdict:
        verdict = handle_abort(self.protocol_state, command.token, command.handover)
        self.protocol_state = with_token(self.protocol_state, command.token)
        if verdict is not CommandVerdict.TAKE:
            return verdict
        if self._open is not None and self._open.number == command.handover:
            self._drop_copies(now)
            self._close(now)
        self.protocol_state = aborted(self.protocol_state, command.token, command.handover)
        return verdict

    def status_requested(self, token: int) -> None:
        """Note the token of a coordinator's status request. This fences coordinators with lower tokens."""
        self.protocol_state = with_token(self.protocol_state, token)

    def describe(self, now: float, verdict: CommandVerdict | None = None) -> HandoverDescribed:
        """Return this rank's status. verdict: the verdict on the command that this message replies to."""
        protocol_state, cell_table = self.protocol_state, self.cell_table
        return HandoverDescribed(
            worker_id=self._worker_id,
            rank=self._rank,
            state=protocol_state.state.value,
            served=protocol_state.served,
            token=protocol_state.token,
            handover=protocol_state.handover,
            concluded=protocol_state.concluded,
            flipped=protocol_state.flipped,
            verdict="" if verdict is None else verdict.value,
            failure=self.failure,
            fault=self.fault,
            seconds=self._seconds if self._open is None else now - self._open.began,
            pulls=tuple(self.inbound.pulls),
            free=cell_table.count(Cell.FREE),
            quarantined=cell_table.count(Cell.QUARANTINED),
            draining=cell_table.count(Cell.DRAINING),
            oldest_seconds=cell_table.oldest(now),
        )

    # events

    def take(self, report: Report, now: float) -> None:
        """Process a report about incoming experts."""
        self._attempt(lambda: self.inbound.take(report, now), now)

    def prepared(self, handover: int) -> bool:
        """Mark the rank as staged: the engine is prepared. False: the handover is not staging any more."""
        if not self._stages(handover):
            return False
        self.protocol_state = staged(self.protocol_state)
        return True

    def unprepared(self, handover: int, text: str, now: float) -> None:
        """Fail the handover: the engine could not prepare the placement."""
        if self._stages(handover):
            self._fail(CannotStage(StagingFault.ENGINE, text), now)

    def adopted(self, now: float) -> None:
        """Switch to the new epoch. The engine serves it since the last step at the latest."""
        assert self._open is not None
        assert self._open.cells is not None
        self.placement = self._open.placement
        self.cell_table.adopt(self.placement, self._open.cells, now)
        self._close(now)
        self.protocol_state = flipped(self.protocol_state)

    def tick(self, now: float) -> None:
        """Advance the time: expire leases, and fail staging that is past its deadline."""
        self.cell_table.expire(now)
        if self._open is not None and self._stages(self._open.number) and now >= self._open.until:
            what = self.inbound.hindrance or "the engine prepares"
            seconds = self._open.until - self._open.began
            self._fail(
                CannotStage(
                    StagingFault.OVERDUE,
                    f"rank {self._rank} had not staged {seconds:.3g} s after the proposal: {what}",
                ),
                now,
            )

    @property
    def wakes(self) -> float:
        """Time at which `tick` is due, in seconds. Infinity: never."""
        staging = self._open is not None and self._stages(self._open.number)
        return min(
            self.cell_table.next_expiry,
            self._open.until if self._open is not None and staging else float("inf"),
        )

    @property
    def at_rest(self) -> bool:
        """True when no handover is open and no copy of an earlier one is in flight."""
        return self._open is None and self.inbound.at_rest

    # steps

    def _begin(self, command: ProposeHandover, placement: Placement | str, open_: _Open, now: float) -> None:
        if isinstance(placement, str):
            raise CannotStage(StagingFault.PLACEMENT, placement)
        work = required_work(
            command, placement, self.placement, self._rank, self.cell_table.parts, self._tp_refusal
        )
        held = self.cell_table.count(Cell.QUARANTINED)
        if held > self._config.quarantine_cells:
            raise CannotStage(
                StagingFault.QUARANTINE,
                f"{held} cells of rank {self._rank} are quarantined, and the limit is"
                f" {self._config.quarantine_cells}: reads into them have not settled; check the ranks that"
                " were read from, and try again",
            )
        open_.placement = placement
        if work.moved:
            self.inbound.pulls.append(
                PullReport(source=self._rank, transfer="local", experts=work.moved, bytes=0, seconds=0.0)
            )
        self.inbound.expect(work.coming, command.handover, open_.until, now)

    def _attempt(self, step: Callable[[], None], now: float) -> None:
        """Run a step of staging. Fail the handover when the step shows that staging is impossible, and
        prepare when it was the last step."""
        try:
            step()
        except CannotStage as error:
            self._fail(error, now)
        self._collect()
        if (
            self._open is not None
            and self._stages(self._open.number)
            and self.inbound.all_staged
            and self._open.cells is None
        ):
            self._open.cells = self.cell_table.arranged(self._open.placement)
            self._effects.append(Prepare(self._open.number, self._open.placement, self._open.cells))

    def _stages(self, handover: int) -> bool:
        return self.protocol_state.state is RankState.STAGING and self.protocol_state.handover == handover

    def _fail(self, error: CannotStage, now: float) -> None:
        self.failure, self.fault = str(error), error.fault.value
        self.protocol_state = staged(self.protocol_state, failed=True)
        self._drop_copies(now)

    def _drop_copies(self, now: float) -> None:
        """Drop all staged and incoming experts. Idempotent."""
        assert self._open is not None
        self.inbound.abort(now)
        self._collect()
        self._effects.append(Forget(self._open.number))

    def _collect(self) -> None:
        self._effects += self.inbound.effects
        self.inbound.effects.clear()

    def _close(self, now: float) -> None:
        assert self._open is not None
        self._seconds = now - self._open.began
        self._open = None
