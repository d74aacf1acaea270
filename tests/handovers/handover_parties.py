"""The real decision modules of both sides against each other: `migration.handover.coordinator` and
`engine_adapter.handover.rank_protocol` (with its cells).

The network loses, repeats and reorders messages, transfers are late, and parties die. Experts move, and the
layer turns over and back. Everything around the modules is simulated here, deterministically from a seed.
Results are checked against the physical memory: a piece of a cell is a number, the checksum of its part of an
expert. A read copies it when it lands or settles, however late, and bytes overwritten meanwhile arrive torn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_adapter.handover.cell_table import LeaseRefused, Requested
from engine_adapter.handover.inbound_copies import (
    CellRead,
    CellsVerified,
    CopyLocal,
    LeaseDenied,
    LeaseGranted,
    LeaseRenewed,
    ReadBroken,
    ReadCells,
    ReadLanded,
    ReadLate,
    ReadSettled,
    ReleaseLease,
    Report,
    RequestLease,
    StopReads,
    VerifyCells,
)
from engine_adapter.handover.rank_protocol import Adopt, Effect, Forget, Prepare
from engine_adapter.initial_placement import last_decided
from fleet.facts.migrations import MigrationStaged
from fleet.facts.placements import PlacementCommitted
from fleet.handover import Cell, CoordinatorState, flips
from fleet.placement import EMPTY, Placement, with_rows
from fleet.requests.handovers import (
    AbortHandover,
    CommitHandover,
    DescribeHandover,
    ExpertCopy,
    ExpertsLeased,
    HandoverDescribed,
    ProposeHandover,
)
from migration.config import MigrationConfig
from migration.engine_state.placement_registry import EngineEntry
from migration.execution.handover_driver import stray
from migration.handover.coordinator import (
    Command,
    HandoverSpec,
    HandoverState,
    HandoverTimes,
    Transition,
    begun,
    taken_over,
)
from migration.handover.handover_messages import found_on_ranks, left_open
from tests.handovers.handover_fake_memory import (
    EXPERTS,
    FIRST,
    LEASE_SECONDS,
    MEMORY,
    RANKS,
    SLOTS,
    STAGE_SECONDS,
    TORN,
    Flow,
    Seat,
    due,
)
from tests.handovers.handover_store import Store

PACE = HandoverTimes(repeat=0.5, grace=1.0, commit=5.0)


@dataclass(eq=False)
class Leader:
    """The shell of a coordinator, one small step at a time. Only the store reveals that it was replaced."""

    token: int
    proceeding: HandoverState | None = None
    revision: int | None = None
    fenced: int = 0
    """incarnation whose ranks accept no command of an earlier coordinator"""
    recorded: int = 0
    """records of the present transition in the log"""

    def forget(self) -> None:
        self.proceeding, self.recorded = None, 0


@dataclass(eq=False)
class World(Store):
    """Complete world and its possible events."""

    leaders: list[Leader] = field(default_factory=list)
    commands: list[tuple[Leader, Command]] = field(default_factory=list)
    """in transit"""
    answers: list[tuple[Leader, HandoverDescribed]] = field(default_factory=list)
    errands: list[tuple[Seat, Callable[[], None]]] = field(default_factory=list)
    """work that a rank has started and not finished"""
    flows: list[Flow] = field(default_factory=list)
    flips: int = 0
    faults: bool = True
    turning: float = 0.25
    """chance that a handover cuts the layer"""
    turns: int = 0
    """flips that turned the layer over"""
    switches: int = 0
    """flips that changed the attention"""
    seats: list[Seat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin_life()
        self.leaders.append(Leader(1))

    @property
    def entry(self) -> EngineEntry:
        """Return the engine as registered in the migration service."""
        return EngineEntry("a", self.life, self.seats[0].protocol.placement)

    # Incarnations

    def begin_life(self) -> None:
        """Start the engine with the last decided state (`deploy.parts.resume`)."""
        found = self.open
        last = next((one for one in reversed(self.log) if not isinstance(one, PlacementCommitted)), None)
        decided = (
            isinstance(last, MigrationStaged)
            and found is not None
            and found.state is CoordinatorState.COMMITTING
            and found.handover == last.handover
        )
        record = last_decided(
            self.committed(), last if decided and isinstance(last, MigrationStaged) else None
        )
        placement = FIRST if record is None else Placement.from_record(record)
        self.life += 1
        self.errands, self.flows = [], []
        self.seats = [Seat(self.life, rank, placement) for rank in range(RANKS)]
        self.tell(f"life {self.life} begins with epoch {placement.epoch}")

    @property
    def whole(self) -> bool:
        return all(seat.alive for seat in self.seats)

    def kill(self, seat: Seat) -> None:
        seat.alive = False
        self.flows = [flow for flow in self.flows if flow.reader is not seat]
        self.errands = [(of, errand) for of, errand in self.errands if of is not seat]
        self.tell(f"rank {seat.rank} dies")

    # Coordinators

    def lead(self, leader: Leader) -> None:
        """Do one step of a coordinator: query, start, record, change the key, or send."""
        if leader.proceeding is None:
            self._look(leader)
            return
        proceeding = leader.proceeding
        if proceeding.what.worker_id != self.life:
            proceeding = proceeding.gone("it has begun a new life")
        if proceeding.highest_token > proceeding.token and leader is self.leaders[-1]:
            leader.token = proceeding.highest_token + 1
            proceeding = proceeding.with_token(leader.token)
        leader.proceeding = proceeding
        transition = proceeding.next_transition(self.now)
        if transition is not None:
            self._make(leader, proceeding, transition)
            return
        for rank, command in proceeding.due(self.now):
            self.commands.append((leader, command))
            leader.proceeding = leader.proceeding.commanded((rank,), self.now)

    def _make(self, leader: Leader, proceeding: HandoverState, transition: Transition) -> None:
        if leader.recorded < len(transition.records):
            record = transition.records[leader.recorded]
            if not any(_same(record, one) for one in self.log):
                self.log.append(record)
                self.tell(
                    f"coordinator {leader.token} records {type(record).__name__} (handover"
                    f" {proceeding.what.handover})"
                )
            leader.recorded += 1
            return
        leader.recorded = 0
        if not self.claim(proceeding.durable(transition.after, self.now), leader.revision):
            self.tell(
                f"coordinator {leader.token} finds that handover {proceeding.what.handover} was changed by"
                " somebody else"
            )
            leader.forget()
            return
        leader.revision = self.revision
        self.tell(
            f"coordinator {leader.token}: handover {proceeding.what.handover}: {transition.event}, {transition.after}"
        )
        leader.proceeding = proceeding.with_transition(transition, self.now)
        if transition.after is CoordinatorState.IDLE:
            leader.forget()

    def _look(self, leader: Leader) -> None:
        left = self.open
        leader.revision = None if left is None else self.revision
        if left is not None and left.state is not CoordinatorState.IDLE:
            staged = next(
                (
                    one
                    for one in self.log
                    if isinstance(one, MigrationStaged)
                    and (one.worker_id, one.handover) == (left.worker_id, left.handover)
                ),
                None,
            )
            what = left_open("a", left, staged, None, MigrationConfig())
            leader.proceeding = taken_over(what, left, leader.token, PACE, self.now)
            self.tell(f"coordinator {leader.token} goes on with handover {left.handover}, {left.state}")
        elif self.whole and stray(told := self.survey(leader)):
            self._clear(leader, told)
        elif self.whole and self.faults:
            self._begin(leader, 0 if left is None else left.highest)

    def survey(self, leader: Leader) -> list[HandoverDescribed]:
        """Query the state of every rank; none accepts earlier coordinators afterwards."""
        if leader is self.leaders[-1] and leader.fenced != self.life:
            leader.token = max(leader.token, *(seat.protocol.protocol_state.token + 1 for seat in self.seats))
            leader.fenced = self.life
        for seat in self.seats:
            seat.protocol.status_requested(leader.token)
        return [seat.protocol.describe(self.now) for seat in self.seats]

    def _clear(self, leader: Leader, told: Sequence[HandoverDescribed]) -> None:
        """End handovers that are open on ranks although they are over."""
        found = stray(told)
        assert found is not None
        left = found_on_ranks(self.entry, *found, leader.token, self.open)
        if self.claim(left, leader.revision):
            leader.revision = self.revision
            leader.proceeding = taken_over(
                left_open("a", left, None, None, MigrationConfig()), left, leader.token, PACE, self.now
            )
            self.tell(f"coordinator {leader.token} clears handover {found[0]}: {found[1]}")

    def _begin(self, leader: Leader, last: int) -> None:
        """Start the next handover if every rank is free for it."""
        told = self.survey(leader)
        present = self.seats[0].protocol.placement
        if any(said.handover or said.served != present.epoch for said in told):
            return
        handover = max(last, *(said.concluded for said in told)) + 1
        placement, copies = self.another(present)
        what = HandoverSpec(
            engine="a",
            worker_id=self.life,
            ranks=RANKS,
            handover=handover,
            plan="p",
            number=handover,
            last=True,
            epoch=placement.epoch,
            placement=placement.record(),
            copies=copies,
            copied=len(copies),
            stage_seconds=STAGE_SECONDS,
        )
        if (self.life, handover) in self.decided and (self.life, handover) not in self.known:
            raise self.unsafe(f"the number {handover} is used for a second handover of life {self.life}")
        proceeding = begun(what, leader.token, PACE, self.now)
        if self.claim(proceeding.durable(CoordinatorState.PROPOSING, self.now), leader.revision):
            leader.proceeding, leader.revision, leader.recorded = proceeding, self.revision, 0
            self.tell(
                f"coordinator {leader.token} begins handover {handover} to epoch {placement.epoch}:"
                f" {placement.expert_of_slot.tolist()}"
            )

    def another(self, present: Placement) -> tuple[Placement, tuple[ExpertCopy, ...]]:
        """Return a placement in which a few slots changed, or the layer turned over, with the necessary
        copies."""
        if present.sharded or self.dice.random() < self.turning:
            return self._turned(present), ()
        table = present.expert_of_slot.copy()
        for _ in range(self.dice.randint(2, 6)):
            slot, expert = self.dice.randrange(table.size), self.dice.randrange(EXPERTS)
            rank = slot // SLOTS
            given_up = int(table[0, slot])
            if expert in table[0, rank * SLOTS : (rank + 1) * SLOTS] or (
                given_up != EMPTY and (table == given_up).sum() == 1
            ):
                continue
            table[0, slot] = expert
        copies = []
        for slot, expert in enumerate(table[0].tolist()):
            rank = slot // SLOTS
            if expert != present.expert_of_slot[0, slot] and expert not in present.on_rank(rank)[0]:
                source = self.dice.choice(np.flatnonzero(present.expert_of_slot[0] == expert).tolist())
                copies.append(ExpertCopy(layer=0, expert=expert, source=source, slot=slot))
        return Placement(table, experts=EXPERTS, ranks=RANKS, epoch=present.epoch + 1), tuple(copies)

    def _turned(self, present: Placement) -> Placement:
        """Return the placement in which the layer turned over; or the same, of a sharded layer."""
        row = (
            np.roll(FIRST.expert_of_slot[0], SLOTS * self.dice.randrange(RANKS)) if present.sharded else None
        )
        rows = {0: row} if self.dice.random() < 0.8 or row is None else {}
        return with_rows(present, rows, epoch=present.epoch + 1)

    # Ranks

    def deliver(self, leader: Leader, command: Command) -> None:
        """Deliver a command to its rank, if that incarnation still exists; its answer is then in transit."""
        seat = self.seats[command.rank]
        if command.worker_id != self.life or not seat.alive:
            return
        match command:
            case ProposeHandover():
                verdict = seat.protocol.propose(command, Placement.from_record(command.placement), self.now)
            case CommitHandover():
                verdict = seat.protocol.commit(command)
            case AbortHandover():
                verdict = seat.protocol.abort(command, self.now)
            case DescribeHandover():
                seat.protocol.status_requested(command.token)
                verdict = None
        if verdict is not None:
            self.tell(
                f"rank {seat.rank}: {type(command).__name__} {command.handover} of coordinator"
                f" {command.token}: {verdict}"
            )
        asked = (
            leader.proceeding is not None
            and getattr(command, "handover", 0) == leader.proceeding.what.handover
        )
        self.answers.append((leader, seat.protocol.describe(self.now, verdict if asked else None)))
        self.carry_out(seat)

    def hear(self, leader: Leader, answer: HandoverDescribed) -> None:
        """Process a rank's message. It counts as an answer to a command only during that handover; otherwise
        as a plain report.
        """
        if leader.proceeding is not None:
            leader.proceeding = leader.proceeding.reported(answer)

    def report(self, seat: Seat, report: Report) -> None:
        seat.protocol.take(report, self.now)
        self.carry_out(seat)

    def carry_out(self, seat: Seat) -> None:
        """Start the work that a rank's protocol requests."""
        for effect in seat.protocol.drain():
            self._begin_effect(seat, effect)
        seat.cell_table.check_integrity()

    def _begin_effect(self, seat: Seat, effect: Effect) -> None:
        match effect:
            case RequestLease():
                self.errands.append((seat, lambda: self._lease(seat, effect)))
            case ReadCells():
                self._begin_flow(seat, self.seats[effect.source], effect.batch, effect.reads)
            case CopyLocal():
                self._begin_flow(seat, seat, effect.batch, effect.reads)
            case StopReads():
                for flow in self.flows:
                    flow.late = flow.late or (flow.reader is seat and flow.batch == effect.batch)
            case VerifyCells():
                self.errands.append((seat, lambda: self._verify(seat, effect)))
            case ReleaseLease():
                seat.leases.pop(effect.batch, None)
                if effect.lease:
                    self.errands.append((seat, lambda: self._end_lease(effect)))
            case Prepare():
                self.errands.append((seat, lambda: self._prepare(seat, effect)))
            case Adopt():
                if seat.prepared is None or seat.prepared.handover != effect.handover:
                    raise self.unsafe(
                        f"rank {seat.rank} adopts handover {effect.handover}, which it has not prepared"
                    )
                seat.ready = seat.prepared
            case Forget():
                seat.prepared = None

    def _begin_flow(self, seat: Seat, source: Seat, batch: int, reads: tuple[CellRead, ...]) -> None:
        began_with = (
            tuple(source.content(one.source, one.source_piece) for one in reads) if source.alive else ()
        )
        self._check_landing(seat, reads)
        self.flows.append(Flow(seat, source, batch, reads, began_with))

    def _lease(self, seat: Seat, effect: RequestLease) -> None:
        source = self.seats[effect.source]
        if not source.alive or (self.faults and self.dice.random() < 0.1):
            return self.report(seat, LeaseDenied(effect.batch, "it does not answer"))
        try:
            answer = self._leased(seat, effect)
        except LeaseRefused as refusal:
            return self.report(seat, LeaseDenied(effect.batch, str(refusal)))
        seat.leases[effect.batch] = effect
        return self.report(seat, LeaseGranted(effect.batch, answer))

    def _leased(self, seat: Seat, effect: RequestLease) -> ExpertsLeased:
        source = self.seats[effect.source]
        wanted = [
            Requested(layer, slot - effect.source * SLOTS, expert, part)
            for layer, slot, expert, part in effect.experts
        ]
        lease = source.cell_table.lease(seat.rank, effect.handover, wanted, LEASE_SECONDS, self.now)
        return ExpertsLeased(
            worker_id=self.life,
            rank=effect.source,
            lease=lease.number,
            memory=MEMORY,
            cells=lease.cells,
            checksums=lease.checksums,
        )

    def _end_lease(self, effect: ReleaseLease) -> None:
        source = self.seats[effect.source]
        if source.alive:
            source.cell_table.end(effect.lease, self.now)

    def _verify(self, seat: Seat, effect: VerifyCells) -> None:
        wrong = tuple(
            "" if seat.content(read.cell, read.piece) == promised else "torn"
            for read, promised in zip(effect.reads, effect.checksums, strict=True)
        )
        self.report(seat, CellsVerified(effect.batch, wrong))

    def _prepare(self, seat: Seat, effect: Prepare) -> None:
        if self.faults and self.dice.random() < 0.05:
            seat.protocol.unprepared(effect.handover, "no memory", self.now)
        elif seat.protocol.prepared(effect.handover):
            seat.prepared = effect
        self.carry_out(seat)

    # Transfers

    def land(self, flow: Flow) -> None:
        """Complete a transfer, in time or late."""
        self.flows.remove(flow)
        seat, lost = flow.reader, not flow.source.alive
        if not lost:
            self._check_landing(seat, flow.reads)
            for read, before in zip(flow.reads, flow.began_with, strict=True):
                intact = flow.source.content(read.source, read.source_piece) == before
                seat.write(read.cell, read.piece, before if intact else (TORN,) * len(before))
        elif flow.late:
            for read in flow.reads:
                seat.write(read.cell, read.piece, (TORN,) * len(seat.content(read.cell, read.piece)))
        if flow.late:
            self.report(seat, ReadSettled(flow.batch))
        elif lost:
            self.report(seat, ReadBroken(flow.batch, "it is gone"))
        else:
            transfer = "local" if flow.is_local else "shared"
            self.report(seat, ReadLanded(flow.batch, transfer, 64, 0.1))

    def delay(self, flow: Flow) -> None:
        flow.late = True
        self.tell(
            f"rank {flow.reader.rank}: a read from rank {flow.source.rank} into"
            f" {[read.cell for read in flow.reads]} is late"
        )
        self.report(flow.reader, ReadLate(flow.batch, "it takes long"))

    def _check_landing(self, seat: Seat, reads: tuple[CellRead, ...]) -> None:
        for here in {read.cell for read in reads}:
            if seat.cell_table.use(here) not in (Cell.PULLING, Cell.QUARANTINED):
                raise self.unsafe(
                    f"bytes land in cell {here} of rank {seat.rank}, which is {seat.cell_table.use(here)}"
                )
            if any(
                flow.source is seat and not flow.is_local and here in [read.source for read in flow.reads]
                for flow in self.flows
            ):
                raise self.unsafe(
                    f"bytes land in cell {here} of rank {seat.rank}, while another rank reads it"
                )

    # The whole engine

    def step(self) -> None:
        """Run one step of all ranks: each decides from the same headers whether it flips."""
        if not self.whole:
            return
        going, before = self.going(), self.seats[0].served
        for seat in going:
            assert seat.ready is not None
            if CoordinatorState.COMMITTING not in self.decided[self.life, seat.ready.handover]:
                raise self.unsafe(
                    f"rank {seat.rank} flips to handover {seat.ready.handover}, which was not decided"
                )
            seat.served, seat.cells, seat.ready, seat.prepared = (
                seat.ready.placement,
                seat.ready.cells,
                None,
                None,
            )
            self.errands.append((seat, lambda seat=seat: self._adopted(seat)))  # type: ignore[misc]
        if going:
            self.flips += 1
            self.turns += before.sharded != going[0].served.sharded
            self.switches += before.attention != going[0].served.attention
            self.tell(f"the engine flips to epoch {going[0].served.epoch}")
        self.check_served()

    def going(self) -> list[Seat]:
        """Return the ranks that flip at this step."""
        headers = [seat.headers for seat in self.seats]
        return [
            seat
            for seat, (served, _) in zip(self.seats, headers, strict=True)
            if flips(served, tuple(ready for _, ready in headers))
        ]

    def _adopted(self, seat: Seat) -> None:
        seat.protocol.adopted(self.now)
        self.carry_out(seat)

    def check_served(self) -> None:
        """Check that the ranks serve one placement, from the cells they believe."""
        alive = [seat for seat in self.seats if seat.alive]
        if len({seat.served for seat in alive}) > 1:
            raise self.unsafe(f"ranks serve epochs {[seat.served.epoch for seat in alive]} in one step")
        for seat in alive:
            for expected, cell in zip(due(seat.served, seat.rank), seat.cells.flat, strict=True):
                found = seat.memory[cell]
                if any(piece not in (0, there) for piece, there in zip(expected, found, strict=True)):
                    raise self.unsafe(
                        f"rank {seat.rank} serves {expected} from cell {cell}, in which lies {found}"
                    )

    def wait(self, seconds: float) -> None:
        """Advance time: leases are renewed, deadlines pass."""
        self.now += seconds
        for seat in self.seats:
            if seat.alive:
                self._renew(seat)
        for seat in self.seats:
            if seat.alive:
                seat.protocol.tick(self.now)
                self.carry_out(seat)

    def _renew(self, seat: Seat) -> None:
        for batch, effect in tuple(seat.leases.items()):
            if self.seats[effect.source].alive:
                try:
                    self.report(seat, LeaseRenewed(batch, self._leased(seat, effect).lease))
                except LeaseRefused as refusal:
                    self.tell(f"rank {seat.rank} cannot renew its lease of rank {effect.source}: {refusal}")


def _same(record: Any, other: Any) -> bool:
    """Return True if two log entries are equal reports of the same handover."""
    if type(record) is not type(other):
        return False
    if isinstance(record, PlacementCommitted):
        return bool((record.worker_id, record.placement.epoch) == (other.worker_id, other.placement.epoch))
    return bool((record.worker_id, record.handover) == (other.worker_id, other.handover))
