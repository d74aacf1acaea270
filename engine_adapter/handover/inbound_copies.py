"""Experts on their way into one rank: from whom they are read, what is tried again, and what must settle first. Pure.

Experts that are read from one rank are a *batch*, with one lease and one read. Its life: waiting -> leasing -> reading -> verifying, and then its cells are
staged. What becomes of it otherwise:

- The source refuses, or the read breaks, or checksums are wrong: nothing is under way, the cells are free, and the experts are tried from their next
  holders, a bounded number of times.
- The read is overdue: its cells are quarantined, and cost room. So it is tried again only where another holder is left.
- The handover is given up: what is being read is stopped, quarantined, and kept in the books until it has settled, through handovers that come after.

Reports of what happened come in, effects go out (`effects`); `CannotStage` means that no try is left.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from engine_adapter.config import TransferConfig
from engine_adapter.handover.cell_table import CellTable, NoFreeCell
from engine_adapter.handover.proposal_check import CannotStage, IncomingExperts, StagingFault
from fleet.events import ExpertsLeased, MemoryAddress, PullTold
from fleet.experts import ExpertId
from fleet.handover import Cell

MOST_SOURCES = 2
"""ranks that are read from at the same time; more would only share the same memory or link"""

# Effects


class RequestLease(NamedTuple):
    """Ask a rank to let these experts be read, and ask again from time to time (which renews it) until `ReleaseLease`. Reported: Leased, Unleased."""

    batch: int
    source: int
    """rank"""
    handover: int
    experts: tuple[tuple[int, int, int], ...]
    """(layer, slot over all ranks, expert)"""
    until: float
    """an answer that comes later is of no use"""


class ReadCells(NamedTuple):
    """Read whole cells. Reported: Landed, Broken, or Late and then Settled."""

    batch: int
    source: int
    address: MemoryAddress
    pulls: tuple[tuple[int, int], ...]
    """(cell over there, cell here)"""
    until: float
    """never longer than this"""


class StopReads(NamedTuple):
    """Nobody waits for this read any more. Reported: Settled, once nothing can land."""

    batch: int


class VerifyCells(NamedTuple):
    """Compare what landed with what was promised. Reported: Verified."""

    batch: int
    source: int
    cells: tuple[int, ...]
    promised: tuple[tuple[int, ...], ...]


class ReleaseLease(NamedTuple):
    """Nothing is read from there any more."""

    batch: int
    source: int
    lease: int
    """0: none was granted"""


Effect = RequestLease | ReadCells | StopReads | VerifyCells | ReleaseLease

# Reports


class LeaseGranted(NamedTuple):
    """The source lets us read."""

    batch: int
    answer: ExpertsLeased


class LeaseRenewed(NamedTuple):
    """It goes on; under this number, where it had forgotten the other."""

    batch: int
    lease: int


class LeaseDenied(NamedTuple):
    """It refused, or did not answer."""

    batch: int
    text: str


class ReadLanded(NamedTuple):
    """All bytes are there."""

    batch: int
    way: str
    bytes: int
    seconds: float


class ReadBroken(NamedTuple):
    """The read failed, and nothing is under way."""

    batch: int
    text: str


class ReadLate(NamedTuple):
    """The read took too long, and goes on."""

    batch: int
    text: str


class ReadSettled(NamedTuple):
    """Nothing of it can land any more."""

    batch: int


class CellsVerified(NamedTuple):
    """wrong: of each cell, what is not as it was promised, in words; empty where all is."""

    batch: int
    wrong: tuple[str, ...]


Report = LeaseGranted | LeaseRenewed | LeaseDenied | ReadLanded | ReadBroken | ReadLate | ReadSettled | CellsVerified


@dataclass(slots=True)
class _Want:
    """One expert that comes."""

    coming: IncomingExperts
    cell: int
    tries: int = 0
    failed: set[int] = field(default_factory=set)
    """sources that failed since all had"""

    @property
    def source(self) -> int:
        """Slot over all ranks that it is read from next."""
        return next(source for source in self.coming.sources if source not in self.failed)

    @property
    def name(self) -> ExpertId:
        return ExpertId(self.coming.layer, self.coming.expert)

    def another(self, most: int, *, same: bool) -> bool:
        """The present source failed; whether there is another try. same: when all sources have failed, the first may be tried once more."""
        self.tries += 1
        self.failed.add(self.source)
        left = len(self.failed) < len(self.coming.sources)
        if not left and same:
            self.failed.clear()
        return self.tries <= most and (left or same)


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
    """rank"""
    handover: int
    until: float
    wants: list[_Want]
    """none any more, once it is given up"""
    stage: _Stage = _Stage.WAITING
    lease: int = 0
    promised: tuple[tuple[int, ...], ...] = ()
    settling: tuple[int, ...] = ()
    """cells that are quarantined with it"""


class InboundCopies:
    """The batches of one rank. tensors: how many a cell holds, so how many checksums an expert has."""

    def __init__(self, residency: CellTable, *, tensors: int, slots_per_rank: int, config: TransferConfig) -> None:
        self.effects: list[Effect] = []
        """to be carried out; whoever does so empties it"""
        self.pulls: list[PullTold] = []
        """what was read for the present or last handover"""
        self._residency = residency
        self._tensors = tensors
        self._slots = slots_per_rank
        self._config = config
        self._numbers = count(1)
        self._batches: dict[int, _Batch] = {}

    def expect(self, coming: tuple[IncomingExperts, ...], handover: int, until: float, now: float) -> None:
        """Begin to bring these experts; CannotStage when there are not cells enough for them."""
        free = self._residency.count(Cell.FREE)
        if len(coming) > free:
            raise CannotStage(
                StagingFault.ROOM,
                f"{len(coming)} experts come, and {free} cells are free ({self._residency.told()}): copy less in one handover, or wait until cells settle",
            )
        self._queue([_Want(one, self._residency.reserve(one[:3], now)) for one in coming], handover, until)
        self._begin()

    @property
    def all_staged(self) -> bool:
        """Nothing that is expected is missing."""
        return not self._expected()

    @property
    def at_rest(self) -> bool:
        """Nothing is under way, and nothing has to settle."""
        return not self._batches

    @property
    def hindrance(self) -> str:
        """What is being waited for, in words."""
        return "; ".join(f"{batch.stage.value} {len(batch.wants)} experts from rank {batch.source}" for batch in self._expected())

    def let_go(self, now: float) -> None:
        """The handover is given up: drop what is staged, stop what is under way. Repeatable."""
        for batch in self._expected():
            self._give_up(batch, now)
        self._residency.drop_staged(now)

    def take(self, report: Report, now: float) -> None:
        """Something happened to a batch. CannotStage when no try is left; `let_go` is due then."""
        batch = self._batches.get(report.batch)
        if batch is None:
            return
        if isinstance(report, LeaseRenewed):
            batch.lease = report.lease
            return
        if batch.stage is _Stage.GIVEN_UP:
            self._heard_late(batch, report, now)
            return
        match report:
            case LeaseGranted(_, answer):
                self._read(batch, answer, now)
            case LeaseDenied(_, text):
                self._again(batch, StagingFault.SOURCE, text, now)
            case ReadLanded():
                self._verify(batch, report, now)
            case ReadBroken(_, text):
                self._again(batch, StagingFault.TRANSFER, text, now)
            case ReadLate(_, text):
                self._elsewhere(batch, text, now)
            case CellsVerified(_, wrong):
                self._stage(batch, wrong, now)
            case ReadSettled():  # a read that was not given up reports what became of it
                self._again(batch, StagingFault.TRANSFER, f"the read from rank {batch.source} ended before its time; try again", now)
        self._begin()

    # one batch after another

    def _expected(self) -> list[_Batch]:
        return [batch for batch in self._batches.values() if batch.stage is not _Stage.GIVEN_UP]

    def _queue(self, wants: Iterable[_Want], handover: int, until: float) -> None:
        by_source: dict[int, list[_Want]] = {}
        for want in wants:
            by_source.setdefault(want.source // self._slots, []).append(want)
        for source, group in by_source.items():
            number = next(self._numbers)
            self._batches[number] = _Batch(number, source, handover, until, group)

    def _begin(self) -> None:
        """Lease for as many of those that wait as may be under way."""
        busy = {batch.source for batch in self._expected() if batch.stage in (_Stage.LEASING, _Stage.READING)}
        for batch in self._expected():
            if batch.stage is _Stage.WAITING and batch.source not in busy and len(busy) < MOST_SOURCES:
                busy.add(batch.source)
                batch.stage = _Stage.LEASING
                experts = tuple((want.coming.layer, want.source, want.coming.expert) for want in batch.wants)
                self.effects.append(RequestLease(batch.number, batch.source, batch.handover, experts, batch.until))

    def _read(self, batch: _Batch, answer: ExpertsLeased, now: float) -> None:
        batch.lease = answer.lease
        asked, sums = len(batch.wants), {len(one) for one in answer.checksums}
        if (len(answer.cells), len(answer.checksums)) != (asked, asked) or sums != {self._tensors}:
            told = f"{len(answer.cells)} cells with checksums of {len(answer.checksums)} experts, {sorted(sums)} each"
            self.effects.append(ReleaseLease(batch.number, batch.source, batch.lease))
            self._again(
                batch, StagingFault.SOURCE, f"rank {batch.source} leased {told}; {asked} x {self._tensors} were asked for: run one version on all ranks", now
            )
            return
        batch.stage, batch.promised = _Stage.READING, answer.checksums
        pulls = tuple((source, want.cell) for source, want in zip(answer.cells, batch.wants, strict=True))
        self.effects.append(ReadCells(batch.number, batch.source, answer.memory, pulls, batch.until))

    def _verify(self, batch: _Batch, report: ReadLanded, now: float) -> None:
        told = PullTold(source=batch.source, transfer=report.way, experts=len(batch.wants), bytes=report.bytes, seconds=report.seconds)
        self.pulls.append(told)
        for want in batch.wants:
            self._residency.landed(want.cell, now)
        batch.stage = _Stage.VERIFYING
        self.effects.append(ReleaseLease(batch.number, batch.source, batch.lease))
        self.effects.append(VerifyCells(batch.number, batch.source, tuple(want.cell for want in batch.wants), batch.promised))

    def _stage(self, batch: _Batch, wrong: tuple[str, ...], now: float) -> None:
        del self._batches[batch.number]
        bad: list[_Want] = []
        for want, promised, text in zip(batch.wants, batch.promised, wrong, strict=True):
            if text:
                self._residency.refused(want.cell, now)
                bad.append(want)
            else:
                self._residency.verified(want.cell, promised, now)
        if bad:
            what = f"expert {bad[0].name}, as read from rank {batch.source}, is not what that rank promised: {next(filter(None, wrong))}"
            self._retry(batch, bad, StagingFault.CHECKSUM, f"{what}; look after that rank's memory, or restart its engine", now)

    # trying again

    def _again(self, batch: _Batch, fault: StagingFault, text: str, now: float) -> None:
        """Nothing of a batch is under way: each of its experts is tried from its next source."""
        del self._batches[batch.number]
        for want in batch.wants:
            self._residency.broken(want.cell, now)
        if batch.stage is _Stage.READING:
            self.effects.append(ReleaseLease(batch.number, batch.source, batch.lease))
        self._retry(batch, batch.wants, fault, text, now)

    def _elsewhere(self, batch: _Batch, text: str, now: float) -> None:
        """The read of a batch is overdue."""
        wants = batch.wants
        self._quarantine(batch, now)
        self._retry(batch, wants, StagingFault.OVERDUE, text, now, same=False)

    def _retry(self, batch: _Batch, wants: list[_Want], fault: StagingFault, text: str, now: float, *, same: bool = True) -> None:
        if not all(want.another(self._config.retries, same=same) for want in wants):
            raise CannotStage(fault, text)
        reserved: list[int] = []
        try:
            for want in wants:
                want.cell = self._residency.reserve(want.coming[:3], now)
                reserved.append(want.cell)
        except NoFreeCell as error:
            for cell in reserved:
                self._residency.broken(cell, now)
            raise CannotStage(fault, f"{text}; and it cannot be read from elsewhere: {error}") from error
        self._queue(wants, batch.handover, batch.until)

    # giving up

    def _give_up(self, batch: _Batch, now: float) -> None:
        if batch.stage in (_Stage.READING, _Stage.VERIFYING):
            if batch.stage is _Stage.READING:
                self.effects.append(StopReads(batch.number))
            self._quarantine(batch, now)
            return
        for want in batch.wants:
            self._residency.broken(want.cell, now)
        if batch.stage is _Stage.WAITING:
            del self._batches[batch.number]
        batch.stage, batch.wants = _Stage.GIVEN_UP, []  # a lease that is being asked for may yet be granted, and is ended then

    def _quarantine(self, batch: _Batch, now: float) -> None:
        batch.settling = tuple(want.cell for want in batch.wants)
        for cell in batch.settling:
            self._residency.overdue(cell, now)
        batch.stage, batch.wants = _Stage.GIVEN_UP, []

    def _heard_late(self, batch: _Batch, report: Report, now: float) -> None:
        """What was given up comes to its end, by whatever is heard of it but that it is late."""
        if isinstance(report, ReadLate):
            return
        del self._batches[batch.number]
        for cell in batch.settling:
            self._residency.settled(cell, now)
        lease = report.answer.lease if isinstance(report, LeaseGranted) else batch.lease
        self.effects.append(ReleaseLease(batch.number, batch.source, lease))
