"""Copies of incoming experts of one rank: sources, retries, and reads that must settle. Pure.

The experts and parts that are read from one rank form a *batch* with one lease and one read. A batch goes
through waiting -> leasing -> reading -> verifying. A cell is staged once all its pieces are verified; in a
layer that turns over they come in several batches. Parts that the rank holds itself, in the layer's other
form, are a batch without a lease, copied within the memory and verified alike. Failures:

- The source refuses, the read fails, or checksums are wrong: no transfer is in flight, and the cells are
  free. The experts are retried from their next holders, a bounded number of times.
- The read is overdue: its cells are quarantined, which costs free cells. So it is retried only if another
  holder is left.
- A part cannot be copied: it has one source, and is never read into its cell again. No retry is left.
- The handover is aborted: reads in progress are stopped and their cells are quarantined. The batch stays on
  record until it has settled, even through later handovers.

Reports of events come in, and effects go out (`effects`). `CannotStage` means that no retry is left.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from engine_adapter.config import TransferConfig
from engine_adapter.handover.cell_table import (
    CellTable,
    Content,
    LeaseRefused,
    NoFreeCell,
    Requested,
)
from engine_adapter.handover.proposal_check import CannotStage, IncomingExperts, StagingFault
from fleet.experts import ExpertId
from fleet.facts.migrations import PullReport
from fleet.handover import Cell
from fleet.requests.handovers import ExpertsLeased, MemoryAddress
from fleet.sharding import ALL_PARTS, group_of

MAX_SOURCES = 2
"""Ranks that are read from concurrently. More would only share the same memory or link."""

# Effects


class RequestLease(NamedTuple):
    """Request a read lease for these experts and parts from a rank, and renew it periodically until
    `ReleaseLease`. Reported by LeaseGranted, LeaseRenewed or LeaseDenied."""

    batch: int
    source: int
    """Rank to read from."""
    handover: int
    experts: tuple[tuple[int, int, int, int], ...]
    """(layer, slot over all ranks, expert, part): `fleet.requests.handovers.LeaseExperts`."""
    until: float
    """Deadline. A later reply is useless."""


class CellRead(NamedTuple):
    """Copy into a cell: of a piece, from a cell of the layer's other form, or of a whole expert."""

    source: int
    """Cell to read, of the source rank."""
    source_piece: int
    """ALL_PARTS: a whole expert."""
    cell: int
    piece: int
    """ALL_PARTS: all pieces of the cell."""
    sharded: bool
    """The cell is for a sharded layer."""


class ReadCells(NamedTuple):
    """Read cells of another rank. Reported by ReadLanded, ReadBroken, or ReadLate and then ReadSettled."""

    batch: int
    source: int
    address: MemoryAddress
    reads: tuple[CellRead, ...]
    until: float
    """Deadline of the read."""


class CopyLocal(NamedTuple):
    """Copy cells within this rank's own memory. Reported by ReadLanded or ReadBroken. It cannot be
    stopped."""

    batch: int
    reads: tuple[CellRead, ...]


class StopReads(NamedTuple):
    """Cancel a read. Reported by ReadSettled once nothing can land."""

    batch: int


class VerifyCells(NamedTuple):
    """Compare what was received with its checksums. Reported by CellsVerified."""

    batch: int
    source: int
    reads: tuple[CellRead, ...]
    checksums: tuple[tuple[int, ...], ...]
    """Per read: one u64 per tensor of a piece, [tensors, parts] row by row of a whole expert."""


class ReleaseLease(NamedTuple):
    """Release a lease: nothing is read under it any more."""

    batch: int
    source: int
    lease: int
    """Lease number. 0: none was granted."""


Effect = RequestLease | ReadCells | CopyLocal | StopReads | VerifyCells | ReleaseLease

# Reports


class LeaseGranted(NamedTuple):
    """The source granted the lease."""

    batch: int
    answer: ExpertsLeased


class LeaseRenewed(NamedTuple):
    """The lease was renewed. The number differs if the source had forgotten the old lease."""

    batch: int
    lease: int


class LeaseDenied(NamedTuple):
    """The source refused or did not respond."""

    batch: int
    text: str


class ReadLanded(NamedTuple):
    """All bytes of the read have arrived."""

    batch: int
    transfer: str
    bytes: int
    seconds: float


class ReadBroken(NamedTuple):
    """The read failed, and no transfer is in flight."""

    batch: int
    text: str


class ReadLate(NamedTuple):
    """The read is past its deadline and still in flight."""

    batch: int
    text: str


class ReadSettled(NamedTuple):
    """Nothing of the read can land any more."""

    batch: int


class CellsVerified(NamedTuple):
    """Result of a checksum comparison. wrong: per read, a text that names the mismatch; empty where all
    match."""

    batch: int
    wrong: tuple[str, ...]


Report = (
    LeaseGranted
    | LeaseRenewed
    | LeaseDenied
    | ReadLanded
    | ReadBroken
    | ReadLate
    | ReadSettled
    | CellsVerified
)


@dataclass(slots=True)
class _IncomingCopy:
    """One incoming expert, or part of one."""

    coming: IncomingExperts
    cell: int
    parts: int
    """Parts of an expert."""
    tries: int = 0
    failed: set[int] = field(default_factory=set)
    """Sources that failed since the last time all had failed."""

    @property
    def source(self) -> int:
        """Slot over all ranks that the expert is read from next."""
        return next(source for source in self.coming.sources if source not in self.failed)

    @property
    def is_part(self) -> bool:
        return self.coming.part != ALL_PARTS

    @property
    def piece(self) -> int:
        """Piece of its cell. ALL_PARTS: all of them."""
        return self._position if self.coming.sharded else self.coming.part

    @property
    def requested(self) -> tuple[int, int, int, int]:
        """(layer, slot over all ranks, expert, part), as in `RequestLease`."""
        return self.coming.layer, self.source, self.coming.expert, self.coming.part

    @property
    def name(self) -> str:
        name = f"expert {ExpertId(self.coming.layer, self.coming.expert)}"
        return f"part {self.coming.part} of {name}" if self.is_part else name

    def read_from(self, cell: int) -> CellRead:
        """Return the read of it from a cell of its source."""
        there = self._position if self.is_part and not self.coming.sharded else self.coming.part
        return CellRead(cell, there, self.cell, self.piece, self.coming.sharded)

    @property
    def _position(self) -> int:
        return group_of(self.coming.expert, self.parts)[1]

    def another(self, max_tries: int, *, same: bool) -> bool:
        """Record a failure of the current source. Return True if a retry is allowed. same: when all sources
        have failed, start again with the first."""
        self.tries += 1
        self.failed.add(self.source)
        left = len(self.failed) < len(self.coming.sources)
        if not left and same:
            self.failed.clear()
        return self.tries <= max_tries and (left or same)


class _Stage(StrEnum):
    WAITING = "waiting to read"
    LEASING = "leasing"
    READING = "reading"
    VERIFYING = "verifying"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class _Batch:
    number: int
    source: int
    """Rank to read from."""
    handover: int
    until: float
    copies: list[_IncomingCopy]
    """Empty once the batch is given up."""
    stage: _Stage = _Stage.WAITING
    lease: int = 0
    checksums: tuple[tuple[int, ...], ...] = ()
    reads: tuple[CellRead, ...] = ()
    """One per copy, once they are known."""
    settling: tuple[tuple[int, int], ...] = ()
    """(cell, piece) of the batch in quarantine."""


class InboundCopies:
    """Batches of one rank. tensors: number of tensors of an expert, and so of checksums per part."""

    def __init__(
        self, cell_table: CellTable, *, tensors: int, slots_per_rank: int, config: TransferConfig
    ) -> None:
        self.effects: list[Effect] = []
        """Effects to execute. The caller clears the list."""
        self.pulls: list[PullReport] = []
        """Completed reads of the current or last handover."""
        self._cell_table = cell_table
        self._tensors = tensors
        self._slots = slots_per_rank
        self._config = config
        self._numbers = count(1)
        self._batches: dict[int, _Batch] = {}

    def expect(self, coming: tuple[IncomingExperts, ...], handover: int, until: float, now: float) -> None:
        """Start copying these experts and parts. CannotStage when too few cells are free."""
        cells: dict[Content, int] = dict.fromkeys(map(self._content, coming), -1)
        in_pieces = {self._content(one) for one in coming if one.part != ALL_PARTS}
        free = self._cell_table.count(Cell.FREE)
        if len(cells) > free:
            what = "experts" if len(cells) == len(coming) else "cells with parts of experts"
            raise CannotStage(
                StagingFault.ROOM,
                f"{len(cells)} {what} must be copied, but {free} cells are free"
                f" ({self._cell_table.summary()}): copy less per handover, or wait for cells",
            )
        for content in cells:
            cells[content] = self._cell_table.reserve(content, now, in_pieces=content in in_pieces)
        parts = self._cell_table.parts
        self._queue([_IncomingCopy(one, cells[self._content(one)], parts) for one in coming], handover, until)
        self._begin(now)

    def _content(self, coming: IncomingExperts) -> Content:
        """Return the content of the cell that an incoming expert or part belongs into."""
        number = group_of(coming.expert, self._cell_table.parts)[0] if coming.sharded else coming.expert
        return Content(coming.layer, coming.slot, number, coming.sharded)

    @property
    def all_staged(self) -> bool:
        """True when all expected experts are staged."""
        return not self._expected()

    @property
    def at_rest(self) -> bool:
        """True when no batch is in flight or settling."""
        return not self._batches

    @property
    def hindrance(self) -> str:
        """Format the batches that staging waits for."""
        return "; ".join(
            f"{batch.stage.value} {len(batch.copies)} experts from rank {batch.source}"
            for batch in self._expected()
        )

    def abort(self, now: float) -> None:
        """Abort the copies of the handover: drop staged cells and stop reads in progress. Idempotent."""
        for batch in self._expected():
            self._give_up(batch, now)
        self._cell_table.drop_staged(now)

    def take(self, report: Report, now: float) -> None:
        """Process a report about a batch. CannotStage when no retry is left; the caller then calls
        `abort`."""
        batch = self._batches.get(report.batch)
        if batch is None:
            return
        if isinstance(report, LeaseRenewed):
            batch.lease = report.lease
            return
        if batch.stage is _Stage.GIVEN_UP:
            self._conclude(batch, report, now)
            return
        match report:
            case LeaseGranted(_, answer):
                self._read(batch, answer, now)
            case LeaseDenied(_, text):
                self._retry_failed(batch, StagingFault.SOURCE, text, now)
            case ReadLanded():
                self._verify(batch, report, now)
            case ReadBroken(_, text):
                self._retry_failed(batch, StagingFault.TRANSFER, text, now)
            case ReadLate(_, text):
                self._retry_overdue(batch, text, now)
            case CellsVerified(_, wrong):
                self._stage(batch, wrong, now)
            case ReadSettled():  # A read that was not given up reports its result, so this one ended early.
                self._retry_failed(
                    batch,
                    StagingFault.TRANSFER,
                    f"the read from rank {batch.source} ended early; try again",
                    now,
                )
        self._begin(now)

    # Progress of a batch.

    def _expected(self) -> list[_Batch]:
        return [batch for batch in self._batches.values() if batch.stage is not _Stage.GIVEN_UP]

    def _queue(self, copies: Iterable[_IncomingCopy], handover: int, until: float) -> None:
        by_source: dict[int, list[_IncomingCopy]] = {}
        for copy in copies:
            by_source.setdefault(copy.source // self._slots, []).append(copy)
        for source, group in by_source.items():
            number = next(self._numbers)
            self._batches[number] = _Batch(number, source, handover, until, group)

    def _begin(self, now: float) -> None:
        """Request leases for waiting batches, up to the limit of concurrent sources, and start local
        copies."""
        own = self._cell_table.rank
        busy = {batch.source for batch in self._expected() if batch.stage in (_Stage.LEASING, _Stage.READING)}
        busy.discard(own)
        for batch in self._expected():
            if batch.stage is not _Stage.WAITING:
                continue
            if batch.source == own:
                self._copy(batch, now)
            elif batch.source not in busy and len(busy) < MAX_SOURCES:
                busy.add(batch.source)
                batch.stage = _Stage.LEASING
                requested = tuple(copy.requested for copy in batch.copies)
                self.effects.append(
                    RequestLease(batch.number, batch.source, batch.handover, requested, batch.until)
                )

    def _copy(self, batch: _Batch, now: float) -> None:
        """Start a local copy."""
        first = batch.source * self._slots
        try:
            found = [
                self._cell_table.find(Requested(layer, slot - first, expert, part))
                for layer, slot, expert, part in (copy.requested for copy in batch.copies)
            ]
        except LeaseRefused as refusal:
            self._retry_failed(batch, StagingFault.SOURCE, f"rank {batch.source}: {refusal}", now)
            return
        batch.stage, batch.checksums = _Stage.READING, tuple(checksums for _, checksums in found)
        cells = (cell for cell, _ in found)
        batch.reads = tuple(copy.read_from(cell) for copy, cell in zip(batch.copies, cells, strict=True))
        self._note_begun(batch)
        self.effects.append(CopyLocal(batch.number, batch.reads))

    def _read(self, batch: _Batch, answer: ExpertsLeased, now: float) -> None:
        batch.lease = answer.lease
        expected = [self._tensors * (1 if copy.is_part else copy.parts) for copy in batch.copies]
        found = [len(one) for one in answer.checksums]
        if len(answer.cells) != len(expected) or found != expected:
            self._release(batch, answer.lease)
            self._retry_failed(
                batch,
                StagingFault.SOURCE,
                f"rank {batch.source} leased {len(answer.cells)} cells with {found} checksums, not"
                f" {len(expected)} with {expected}: run one version on all ranks",
                now,
            )
            return
        batch.stage, batch.checksums = _Stage.READING, answer.checksums
        batch.reads = tuple(
            copy.read_from(cell) for copy, cell in zip(batch.copies, answer.cells, strict=True)
        )
        self._note_begun(batch)
        self.effects.append(ReadCells(batch.number, batch.source, answer.memory, batch.reads, batch.until))

    def _note_begun(self, batch: _Batch) -> None:
        for copy in batch.copies:
            self._cell_table.begun(copy.cell, copy.piece)

    def _release(self, batch: _Batch, lease: int) -> None:
        """Release the lease of a batch. A local copy has none."""
        if batch.source != self._cell_table.rank:
            self.effects.append(ReleaseLease(batch.number, batch.source, lease))

    def _verify(self, batch: _Batch, report: ReadLanded, now: float) -> None:
        pull = PullReport(
            source=batch.source,
            transfer=report.transfer,
            experts=len({(copy.coming.layer, copy.coming.expert) for copy in batch.copies}),
            bytes=report.bytes,
            seconds=report.seconds,
        )
        self.pulls.append(pull)
        for copy in batch.copies:
            self._cell_table.landed(copy.cell, now, copy.piece)
        batch.stage = _Stage.VERIFYING
        self._release(batch, batch.lease)
        self.effects.append(VerifyCells(batch.number, batch.source, batch.reads, batch.checksums))

    def _stage(self, batch: _Batch, wrong: tuple[str, ...], now: float) -> None:
        del self._batches[batch.number]
        bad: list[_IncomingCopy] = []
        for copy, checksums, text in zip(batch.copies, batch.checksums, wrong, strict=True):
            if text:
                self._cell_table.failed(copy.cell, now, copy.piece)
                bad.append(copy)
            else:
                self._cell_table.verified(copy.cell, checksums, now, copy.piece)
        if bad:
            what = (
                f"{bad[0].name}, as read from rank {batch.source}, does not match that rank's"
                f" checksums: {next(filter(None, wrong))}"
            )
            self._retry(
                batch,
                bad,
                StagingFault.CHECKSUM,
                f"{what}; check that rank's memory, or restart its engine",
                now,
            )

    # retries

    def _retry_failed(self, batch: _Batch, fault: StagingFault, text: str, now: float) -> None:
        """Retry each expert of a batch from its next source. No transfer of the batch is in flight."""
        del self._batches[batch.number]
        for copy in batch.copies:
            if batch.stage is _Stage.READING:
                self._cell_table.failed(copy.cell, now, copy.piece)
            else:
                self._cell_table.give_up(copy.cell, now)
        if batch.stage is _Stage.READING:
            self._release(batch, batch.lease)
        self._retry(batch, batch.copies, fault, text, now)

    def _retry_overdue(self, batch: _Batch, text: str, now: float) -> None:
        """Quarantine a batch whose read is overdue, and retry it from other sources."""
        copies = batch.copies
        self._quarantine(batch, now)
        self._retry(batch, copies, StagingFault.OVERDUE, text, now, same=False)

    def _retry(
        self,
        batch: _Batch,
        copies: list[_IncomingCopy],
        fault: StagingFault,
        text: str,
        now: float,
        *,
        same: bool = True,
    ) -> None:
        if any(copy.is_part for copy in copies) or not all(
            copy.another(self._config.retries, same=same) for copy in copies
        ):
            raise CannotStage(fault, text)
        reserved: list[int] = []
        try:
            for copy in copies:
                copy.cell = self._cell_table.reserve(self._content(copy.coming), now)
                reserved.append(copy.cell)
        except NoFreeCell as error:
            for cell in reserved:
                self._cell_table.give_up(cell, now)
            raise CannotStage(fault, f"{text}; and it cannot be read from elsewhere: {error}") from error
        self._queue(copies, batch.handover, batch.until)

    # aborts

    def _give_up(self, batch: _Batch, now: float) -> None:
        if batch.stage in (_Stage.READING, _Stage.VERIFYING):
            if batch.stage is _Stage.READING and batch.source != self._cell_table.rank:
                self.effects.append(StopReads(batch.number))
            self._quarantine(batch, now)
            return
        for copy in batch.copies:
            self._cell_table.give_up(copy.cell, now)
        if batch.stage is _Stage.WAITING:
            del self._batches[batch.number]
        # A lease request may still be granted. The lease is released then.
        batch.stage, batch.copies = _Stage.GIVEN_UP, []

    def _quarantine(self, batch: _Batch, now: float) -> None:
        batch.settling = tuple((copy.cell, copy.piece) for copy in batch.copies)
        for cell, _ in batch.settling:
            self._cell_table.give_up(cell, now)
        batch.stage, batch.copies = _Stage.GIVEN_UP, []

    def _conclude(self, batch: _Batch, report: Report, now: float) -> None:
        """Conclude a batch that was given up. Any report but ReadLate ends it."""
        if isinstance(report, ReadLate):
            return
        del self._batches[batch.number]
        for cell, piece in batch.settling:
            self._cell_table.settled(cell, now, piece)
        self._release(batch, report.answer.lease if isinstance(report, LeaseGranted) else batch.lease)
