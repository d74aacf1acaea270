"""Copies of incoming experts of one rank: sources, retries, and reads that must settle. Pure.

The experts that are read from one rank form a *batch* with one lease and one read. A batch goes through
waiting -> leasing -> reading -> verifying. Then its cells are staged. Failures:

- The source refuses, the read fails, or checksums are wrong: no transfer is in flight, and the cells are
  free. The experts are retried from their next holders, a bounded number of times.
- The read is overdue: its cells are quarantined, which costs free cells. So it is retried only if another
  holder is left.
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
from engine_adapter.handover.cell_table import CellTable, NoFreeCell
from engine_adapter.handover.proposal_check import CannotStage, IncomingExperts, StagingFault
from fleet.experts import ExpertId
from fleet.facts.migrations import PullReport
from fleet.handover import Cell
from fleet.requests.handovers import ExpertsLeased, MemoryAddress

MAX_SOURCES = 2
"""Ranks that are read from concurrently. More would only share the same memory or link."""

# Effects


class RequestLease(NamedTuple):
    """Request a read lease for these experts from a rank, and renew it periodically until `ReleaseLease`.
    Reported by LeaseGranted, LeaseRenewed or LeaseDenied."""

    batch: int
    source: int
    """Rank to read from."""
    handover: int
    experts: tuple[tuple[int, int, int], ...]
    """(layer, slot over all ranks, expert)."""
    until: float
    """Deadline. A later reply is useless."""


class ReadCells(NamedTuple):
    """Read whole cells. Reported by ReadLanded, ReadBroken, or ReadLate and then ReadSettled."""

    batch: int
    source: int
    address: MemoryAddress
    pulls: tuple[tuple[int, int], ...]
    """(remote cell, local cell)."""
    until: float
    """Deadline of the read."""


class StopReads(NamedTuple):
    """Cancel a read. Reported by ReadSettled once nothing can land."""

    batch: int


class VerifyCells(NamedTuple):
    """Compare the received cells with their checksums. Reported by CellsVerified."""

    batch: int
    source: int
    cells: tuple[int, ...]
    checksums: tuple[tuple[int, ...], ...]


class ReleaseLease(NamedTuple):
    """Release a lease: nothing is read under it any more."""

    batch: int
    source: int
    lease: int
    """Lease number. 0: none was granted."""


Effect = RequestLease | ReadCells | StopReads | VerifyCells | ReleaseLease

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
    """Result of a checksum comparison. wrong: per cell, a text that names the mismatch; empty where all
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
    """One incoming expert."""

    coming: IncomingExperts
    cell: int
    tries: int = 0
    failed: set[int] = field(default_factory=set)
    """Sources that failed since the last time all had failed."""

    @property
    def source(self) -> int:
        """Slot over all ranks that the expert is read from next."""
        return next(source for source in self.coming.sources if source not in self.failed)

    @property
    def name(self) -> ExpertId:
        return ExpertId(self.coming.layer, self.coming.expert)

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
    settling: tuple[int, ...] = ()
    """Cells of the batch in quarantine."""


class InboundCopies:
    """Batches of one rank. tensors: number of tensors in a cell, and so of checksums per expert."""

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
        """Start copying these experts. CannotStage when too few cells are free."""
        free = self._cell_table.count(Cell.FREE)
        if len(coming) > free:
            raise CannotStage(
                StagingFault.ROOM,
                f"{len(coming)} experts must be copied, but {free} cells are free"
                f" ({self._cell_table.summary()}): copy less per handover, or wait for cells",
            )
        self._queue(
            [_IncomingCopy(one, self._cell_table.reserve(one[:3], now)) for one in coming], handover, until
        )
        self._begin()

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
        self._begin()

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

    def _begin(self) -> None:
        """Request leases for waiting batches, up to the limit of concurrent sources."""
        busy = {batch.source for batch in self._expected() if batch.stage in (_Stage.LEASING, _Stage.READING)}
        for batch in self._expected():
            if batch.stage is _Stage.WAITING and batch.source not in busy and len(busy) < MAX_SOURCES:
                busy.add(batch.source)
                batch.stage = _Stage.LEASING
                experts = tuple((copy.coming.layer, copy.source, copy.coming.expert) for copy in batch.copies)
                self.effects.append(
                    RequestLease(batch.number, batch.source, batch.handover, experts, batch.until)
                )

    def _read(self, batch: _Batch, answer: ExpertsLeased, now: float) -> None:
        batch.lease = answer.lease
        expected, sums = len(batch.copies), {len(one) for one in answer.checksums}
        if (len(answer.cells), len(answer.checksums)) != (expected, expected) or sums != {self._tensors}:
            granted = (
                f"{len(answer.cells)} cells with checksums of {len(answer.checksums)} experts, {sorted(sums)}"
                " each"
            )
            self.effects.append(ReleaseLease(batch.number, batch.source, batch.lease))
            self._retry_failed(
                batch,
                StagingFault.SOURCE,
                f"rank {batch.source} leased {granted}, not {expected} x {self._tensors}: run one version on"
                " all ranks",
                now,
            )
            return
        batch.stage, batch.checksums = _Stage.READING, answer.checksums
        pulls = tuple((source, copy.cell) for source, copy in zip(answer.cells, batch.copies, strict=True))
        self.effects.append(ReadCells(batch.number, batch.source, answer.memory, pulls, batch.until))

    def _verify(self, batch: _Batch, report: ReadLanded, now: float) -> None:
        pull = PullReport(
            source=batch.source,
            transfer=report.transfer,
            experts=len(batch.copies),
            bytes=report.bytes,
            seconds=report.seconds,
        )
        self.pulls.append(pull)
        for copy in batch.copies:
            self._cell_table.landed(copy.cell, now)
        batch.stage = _Stage.VERIFYING
        self.effects.append(ReleaseLease(batch.number, batch.source, batch.lease))
        self.effects.append(
            VerifyCells(
                batch.number, batch.source, tuple(copy.cell for copy in batch.copies), batch.checksums
            )
        )

    def _stage(self, batch: _Batch, wrong: tuple[str, ...], now: float) -> None:
        del self._batches[batch.number]
        bad: list[_IncomingCopy] = []
        for copy, checksums, text in zip(batch.copies, batch.checksums, wrong, strict=True):
            if text:
                self._cell_table.refused(copy.cell, now)
                bad.append(copy)
            else:
                self._cell_table.verified(copy.cell, checksums, now)
        if bad:
            what = (
                f"expert {bad[0].name}, as read from rank {batch.source}, does not match that rank's"
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
            self._cell_table.broken(copy.cell, now)
        if batch.stage is _Stage.READING:
            self.effects.append(ReleaseLease(batch.number, batch.source, batch.lease))
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
        if not all(copy.another(self._config.retries, same=same) for copy in copies):
            raise CannotStage(fault, text)
        reserved: list[int] = []
        try:
            for copy in copies:
                copy.cell = self._cell_table.reserve(copy.coming[:3], now)
                reserved.append(copy.cell)
        except NoFreeCell as error:
            for cell in reserved:
                self._cell_table.broken(cell, now)
            raise CannotStage(fault, f"{text}; and it cannot be read from elsewhere: {error}") from error
        self._queue(copies, batch.handover, batch.until)

    # aborts

    def _give_up(self, batch: _Batch, now: float) -> None:
        if batch.stage in (_Stage.READING, _Stage.VERIFYING):
            if batch.stage is _Stage.READING:
                self.effects.append(StopReads(batch.number))
            self._quarantine(batch, now)
            return
        for copy in batch.copies:
            self._cell_table.broken(copy.cell, now)
        if batch.stage is _Stage.WAITING:
            del self._batches[batch.number]
        # A lease request may still be granted. The lease is released then.
        batch.stage, batch.copies = _Stage.GIVEN_UP, []

    def _quarantine(self, batch: _Batch, now: float) -> None:
        batch.settling = tuple(copy.cell for copy in batch.copies)
        for cell in batch.settling:
            self._cell_table.overdue(cell, now)
        batch.stage, batch.copies = _Stage.GIVEN_UP, []

    def _conclude(self, batch: _Batch, report: Report, now: float) -> None:
        """Conclude a batch that was given up. Any report but ReadLate ends it."""
        if isinstance(report, ReadLate):
            return
        del self._batches[batch.number]
        for cell in batch.settling:
            self._cell_table.settled(cell, now)
        lease = report.answer.lease if isinstance(report, LeaseGranted) else batch.lease
        self.effects.append(ReleaseLease(batch.number, batch.source, lease))
