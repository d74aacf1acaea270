"""Execute the batches of `engine_adapter.handover.inbound_copies` for one rank: acquire leases, read, compare
checksums, and report the results.

No transfer has a timeout, so each read gets a deadline (`engine_adapter.handover.read_deadlines`). After the
deadline the read continues. Its cells stay quarantined until it has settled, however long that takes. A lease
is renewed while a read may still use it.

Checksums are computed as bytes land. A rank whose reads are limited (`transfer.rate_limit`) copies within its
own memory at the same rate. So all work of a handover is spread evenly over its time, and no step of the
engine competes with a burst of it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from bus import BusError, Message
from engine_adapter.config import TransferConfig
from engine_adapter.engine import ExpertMemory
from engine_adapter.handover.inbound_copies import (
    CellRead,
    CellsVerified,
    CopyLocal,
    Effect,
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
from engine_adapter.handover.read_deadlines import Deadlines
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.transfer.checksums import checksums, compare, piece_checksums
from engine_adapter.transfer.landed_checksums import LandedChecksums, ReadPart
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import Landed, Overdue, PeerGone, Pull, Transfer, TransferError
from engine_adapter.transfer.rate_limit import RateLimit
from engine_adapter.transfer.reader_thread import requests
from fleet.requests.handovers import EndLease as EndLeaseRequest
from fleet.requests.handovers import ExpertsLeased, LeaseExperts
from fleet.sharding import ALL_PARTS

ANSWER_SECONDS = 2.0
"""Reply timeout of another rank."""
RENEWALS = 3.0
"""Renewals of a lease within its duration."""

Attributes = dict[str, str | int]
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None] | None"]
"""Start a task with this name, which the owner ends. None: the agent is shutting down."""
log = logging.getLogger(__name__)


class CopyTracing(Protocol):
    """Implemented in `engine_adapter.tracing`."""

    def stage(self, traceparent: str, name: str, began: int, attributes: Attributes, failure: str) -> None:
        """Record a stage of staging that ended now. began: wall clock in nanoseconds. failure: empty on
        success."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Means by which a rank copies incoming experts."""

    transfers: tuple[Transfer, ...] = ()
    """Transfer backends for reading other ranks' memory, the best first. They belong to the caller, who
    closes them after the rank's agent has ended."""
    config: TransferConfig = field(default_factory=TransferConfig)
    tracing: CopyTracing | None = None
    executor: Executor | None = None
    """Executor that compares checksums and copies within the rank's memory. None: a thread of its own, at
    lower priority than the computing threads."""
    limit: RateLimit | None = None
    """Rate limit that the transfer backends use too. Its owner tells it of the engine's steps. None: one by
    the settings."""
    real_bytes: float = 1.0
    """Bytes that a byte of the rank's cells stands for: more than 1 in a simulated engine."""

    def trace(
        self, traceparent: str, name: str, began: int, attributes: Attributes, failure: str = ""
    ) -> None:
        """Record a stage that ended now, if its handover has a trace context."""
        if self.tracing is not None and traceparent:
            self.tracing.stage(traceparent, name, began, attributes, failure)


@dataclass(slots=True)
class _BatchTasks:
    """Tasks of one batch."""

    traceparent: str
    renewing: "asyncio.Task[None] | None" = None
    reading: "asyncio.Task[None] | None" = None


class CopyRunner:
    """Reads of one rank. report: called with each result, on the event loop."""

    def __init__(
        self,
        context: RankContext,
        memory: ExpertMemory,
        staging: Staging,
        *,
        report: Callable[[Report], None],
        spawn: Spawn,
    ) -> None:
        self.traceparent = ""
        """Trace context of the open handover."""
        self.executor: Executor | None = None
        """Executor that compares checksums and copies within the memory."""
        self._context = context
        self._rank = context.rank
        self._memory = memory
        self._form = CellFormat.of(memory)
        self._staging = staging
        self._config = staging.config
        self._report = report
        self._spawn = spawn
        self._limit = RateLimit.of(staging.config) if staging.limit is None else staging.limit
        """Rate limit of copies within the memory."""
        self._deadlines = Deadlines(staging.config.min_seconds, self._limit.least)
        self._stops: set[asyncio.Event] = set()
        """Of copies within the memory that are spread over time."""
        self._batches: dict[int, _BatchTasks] = {}
        self._sums: dict[int, LandedChecksums] = {}
        """By batch that is read or copied: checksums of what has landed."""
        self._copying: set[asyncio.Task[None]] = set()
        """Tasks that copy within the memory."""
        self._ended = False

    def carry_out(self, effect: Effect) -> None:
        """Start executing an effect."""
        match effect:
            case RequestLease():
                self._batches[effect.batch] = _BatchTasks(self.traceparent)
                self._spawn(
                    self._lease(effect), f"rank {self._rank} requests a lease from rank {effect.source}"
                )
            case ReadCells():
                self._begin_read(effect)
            case CopyLocal():
                self._begin_copy(effect)
            case StopReads():
                tasks = self._batches.get(effect.batch)
                if tasks is not None and tasks.reading is not None:
                    tasks.reading.cancel()
            case VerifyCells():
                found = self._sums.get(effect.batch)
                self._spawn(self._verify(effect, found), f"rank {self._rank} compares checksums")
            case ReleaseLease():
                self._end_lease(effect)

    @property
    def reads(self) -> "list[asyncio.Task[None]]":
        """Read tasks in progress, and copies within the memory."""
        return [
            tasks.reading
            for tasks in self._batches.values()
            if tasks.reading is not None and not tasks.reading.done()
        ] + list(self._copying)

    def give_up(self) -> None:
        """Stop copies within the memory that are spread over time: their handover is given up."""
        for stop in self._stops:
            stop.set()

    def end(self) -> None:
        """Stop all reads without waiting for them. The process ends soon."""
        self._ended = True
        for task in self.reads:
            task.cancel()

    # leases

    async def _lease(self, effect: RequestLease) -> None:
        try:
            answer = await self._request_lease(effect, min(ANSWER_SECONDS, effect.until - _now()))
        except (BusError, TypeError) as error:
            self._report(
                LeaseDenied(
                    effect.batch, f"rank {effect.source} refuses a read lease to rank {self._rank}: {error}"
                )
            )
            return
        self._batches[effect.batch].renewing = self._spawn(
            self._renew(effect), f"rank {self._rank} keeps its lease of rank {effect.source}"
        )
        self._report(LeaseGranted(effect.batch, answer))

    async def _request_lease(self, effect: RequestLease, seconds: float) -> ExpertsLeased:
        request = LeaseExperts(
            worker_id=self._context.worker_id,
            rank=effect.source,
            reader=self._rank,
            handover=effect.handover,
            experts=effect.experts,
            seconds=self._config.lease_seconds,
        )
        answer = await self._request(effect.source, request, seconds)
        if not isinstance(answer, ExpertsLeased):
            raise TypeError(f"it answered with {type(answer).__name__}")
        return answer

    async def _renew(self, effect: RequestLease) -> None:
        while True:
            await asyncio.sleep(self._config.lease_seconds / RENEWALS)
            try:
                answer = await self._request_lease(
                    effect, min(ANSWER_SECONDS, self._config.lease_seconds / RENEWALS)
                )
                self._report(LeaseRenewed(effect.batch, answer.lease))
            except (BusError, TypeError) as error:
                log.info(
                    "rank %d continues to read from rank %d although its lease could not be renewed: %s",
                    self._rank,
                    effect.source,
                    error,
                )

    def _end_lease(self, effect: ReleaseLease) -> None:
        """Release a lease, because its reads have settled. The message may get lost: leases expire."""
        tasks = self._batches.pop(effect.batch, None)
        if tasks is not None and tasks.renewing is not None:
            tasks.renewing.cancel()
        if effect.lease:
            self._spawn(self._release_lease(effect), f"rank {self._rank} has read from rank {effect.source}")

    async def _release_lease(self, effect: ReleaseLease) -> None:
        request = EndLeaseRequest(worker_id=self._context.worker_id, rank=effect.source, lease=effect.lease)
        try:
            await self._request(effect.source, request, ANSWER_SECONDS)
        except BusError as error:
            log.info(
                "rank %d could not tell rank %d that it has read; the lease will run out: %s",
                self._rank,
                effect.source,
                error,
            )

    async def _request(self, source: int, request: Message, seconds: float) -> Message:
        context = self._context
        subject = context.subjects.leases(context.engine, context.worker_id, source)
        return await context.bus.request(subject, request, seconds)

    # reads

    def _begin_read(self, effect: ReadCells) -> None:
        reading = self._spawn(self._read(effect), f"rank {self._rank} reads from rank {effect.source}")
        if reading is not None:
            self._batches[effect.batch].reading = reading
            # Nothing lands after a cancellation; otherwise the read would be Overdue.
            reading.add_done_callback(
                lambda task: self._report(ReadSettled(effect.batch)) if task.cancelled() else None
            )

    async def _read(self, effect: ReadCells) -> None:
        began, now = time.time_ns(), _now()
        traceparent = self._batches[effect.batch].traceparent
        transfer = next((one for one in self._staging.transfers if one.reaches(effect.address)), None)
        if transfer is None:
            known = ", ".join(one.name for one in self._staging.transfers) or "none"
            self._report(
                ReadBroken(
                    effect.batch,
                    f"rank {self._rank} has no way to read the memory of rank {effect.source} (ways:"
                    f" {known}); set transfer.backend",
                )
            )
            return
        pulls = self._pulls(effect.reads)
        size = round(self._staging.real_bytes * sum(pull.bytes for pull in pulls))
        seconds = min(self._deadlines.allowed(effect.source, transfer.name, size), effect.until - now)
        attributes: Attributes = {
            "roost.source": effect.source,
            "roost.transfer": transfer.name,
            "roost.experts": len(effect.reads),
            "roost.bytes": size,
        }
        try:
            pulled = await transfer.pull(effect.address, pulls, max(seconds, 1e-3), self._comparing(effect))
        except TransferError as error:
            if isinstance(error, PeerGone):
                transfer.forget(effect.address)
            self._staging.trace(traceparent, "pull", began, attributes, str(error))
            self._report(
                ReadBroken(
                    effect.batch, f"rank {self._rank} could not read from rank {effect.source}: {error}"
                )
            )
        except Overdue as overdue:
            self._staging.trace(traceparent, "pull", began, attributes, str(overdue))
            await self._await_settled(effect, overdue)
        except Exception as error:
            log.exception(
                "rank %d cannot tell whether bytes from rank %d may still land: its cells stay quarantined",
                self._rank,
                effect.source,
            )
            self._staging.trace(traceparent, "pull", began, attributes, str(error))
            self._report(
                ReadLate(
                    effect.batch,
                    f"reading by {transfer.name} failed in a way it never should:"
                    f" {error or type(error).__name__}; see the log",
                )
            )
        else:
            self._deadlines.learn(effect.source, transfer.name, pulled.bytes, pulled.seconds)
            self._staging.trace(traceparent, "pull", began, attributes)
            self._report(ReadLanded(effect.batch, transfer.name, pulled.bytes, pulled.seconds))
        finally:
            self._sums.pop(effect.batch, None)

    def _comparing(self, effect: ReadCells) -> Landed:
        """Return a listener that has the checksums computed of what has landed."""
        found = self._sums[effect.batch] = self._checksums(effect.reads)

        def landed(size: int) -> None:
            if self._sums.get(effect.batch) is found and self.executor is not None:
                self.executor.submit(found.advance, size)

        return landed

    def _checksums(self, reads: Sequence[CellRead]) -> LandedChecksums:
        parts = (ReadPart(read.cell, read.piece, read.sharded) for read in reads)
        return LandedChecksums(self._memory, self._form, parts)

    async def _await_settled(self, effect: ReadCells, overdue: Overdue) -> None:
        """Keep the cells of a late read in quarantine until nothing can land in them."""
        log.warning("rank %d: %s; its cells are quarantined", self._rank, overdue)
        self._report(ReadLate(effect.batch, f"rank {self._rank} reads from rank {effect.source}: {overdue}"))
        if self._ended:
            return
        await asyncio.wait([overdue.settled])
        log.info("rank %d: the late read from rank %d has settled", self._rank, effect.source)
        self._report(ReadSettled(effect.batch))

    def _pulls(self, reads: Sequence[CellRead]) -> list[Pull]:
        return [
            pull
            for read in reads
            for pull in self._form.pulls(
                read.source, read.source_piece, read.cell, read.piece, sharded=read.sharded
            )
        ]

    # copies within the memory

    def _begin_copy(self, effect: CopyLocal) -> None:
        copying = self._spawn(self._copy(effect), f"rank {self._rank} copies parts of its experts")
        if copying is not None:
            self._copying.add(copying)
            copying.add_done_callback(self._copying.discard)

    async def _copy(self, effect: CopyLocal) -> None:
        began, traceparent = time.time_ns(), self.traceparent
        found = self._checksums(effect.reads)
        size = round(self._staging.real_bytes * found.bytes)
        attributes: Attributes = {
            "roost.source": self._rank,
            "roost.transfer": "local",
            "roost.experts": len(effect.reads),
            "roost.bytes": size,
        }
        seconds = await self._copy_slowly(self._pulls(effect.reads), found)
        self._staging.trace(traceparent, "pull", began, attributes)
        self._sums[effect.batch] = found
        self._report(ReadLanded(effect.batch, "local", size, seconds))
        self._sums.pop(effect.batch, None)

    async def _copy_slowly(self, pulls: Sequence[Pull], found: LandedChecksums) -> float:
        """Copy at the limited rate, unless the handover is given up, and return the seconds of copying.
        found: gets the checksums."""
        loop, stop, limit, seconds, copied = asyncio.get_running_loop(), asyncio.Event(), self._limit, 0.0, 0
        self._stops.add(stop)
        try:
            for pieces in requests(pulls, lambda: limit.piece_bytes(_now())):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit.wait(_now())):
                        await stop.wait()
                if stop.is_set():
                    return seconds  # Nothing of it will be used, and its cells are free the sooner.
                size = sum(piece.bytes for piece in pieces)
                copied += size
                limit.begin(round(self._staging.real_bytes * size), _now())
                seconds += await loop.run_in_executor(self.executor, self._copy_ranges, pieces, found, copied)
        finally:
            self._stops.discard(stop)
        return seconds

    def _size(self, reads: Sequence[CellRead]) -> int:
        """Return the bytes to read, of the cells' own size."""
        return sum(pull.bytes for pull in self._pulls(reads))

    def _copy_ranges(self, pulls: Sequence[Pull], found: LandedChecksums, copied: int) -> float:
        """Copy ranges between our own cells, and return the seconds that it took. Runs on a thread. found:
        gets the checksums of all that is copied, `copied` bytes."""
        began = time.perf_counter()
        for source, source_offset, cell, offset, size in pulls:
            self._memory.cell(cell)[offset : offset + size] = self._memory.cell(source)[
                source_offset : source_offset + size
            ]
        seconds = time.perf_counter() - began
        found.advance(copied)
        return seconds

    async def _verify(self, effect: VerifyCells, sums: LandedChecksums | None) -> None:
        """Compare a batch. sums: of the read that has just landed, if it is this batch's."""
        began = time.time_ns()
        wrong = await asyncio.get_running_loop().run_in_executor(self.executor, self._compare, effect, sums)
        found = next(filter(None, wrong), "")
        self._staging.trace(
            self.traceparent,
            "verify",
            began,
            {"roost.source": effect.source, "roost.experts": len(effect.reads)},
            found,
        )
        if found:
            log.warning("rank %d: data read from rank %d is damaged: %s", self._rank, effect.source, found)
        self._report(CellsVerified(effect.batch, wrong))

    def _compare(self, effect: VerifyCells, sums: LandedChecksums | None) -> tuple[str, ...]:
        """Return the mismatching tensors of each read. Runs on a thread."""
        if sums is not None:
            sums.advance(sums.bytes)
        return tuple(
            ", ".join(
                compare(
                    self._form.tensors,
                    expected,
                    (None if sums is None else sums.of(read.cell, read.piece)) or self._sums_of(read),
                    self._form.parts if read.piece == ALL_PARTS else 1,
                )
            )
            for read, expected in zip(effect.reads, effect.checksums, strict=True)
        )

    def _sums_of(self, read: CellRead) -> tuple[int, ...]:
        """Compute the checksums of what was read. Runs on a thread."""
        cell = self._memory.cell(read.cell)
        if read.piece == ALL_PARTS:
            return checksums(cell, self._form)
        return piece_checksums(cell, self._form, read.piece, sharded=read.sharded)


def _now() -> float:
    return asyncio.get_running_loop().time()
