"""Reader's side of a pre-copy: reads of announced units, finished copies, and overdue reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_adapter.kv_switch.kv_state import AheadRead, UnitRead
from engine_adapter.kv_switch.pre_copy_notes import Announcement, Outcome, PreCopyNote, SettledReads
from engine_adapter.kv_switch.target_pool import TargetPool


class StartedRead(NamedTuple):
    """A read to carry out. number: its name in `AheadReader.done` and `AheadReader.overdue`."""

    number: int
    read: UnitRead


@dataclass(slots=True)
class _Job:
    """The reads for one announcement."""

    owner: int
    key: int
    block_hash: int
    reads: list[UnitRead]
    open: set[int] = field(default_factory=set)
    """Numbers of reads that have not ended."""
    withdrawn: bool = False
    failed: bool = False


class AheadReader:
    """Reads of one rank. targets: the pool of its units. None: announcements name them, and their owner takes
    them back. has: tells whether the rank has a block of this hash, so that it needs no copy."""

    def __init__(self, rank: int, targets: TargetPool | None, has: Callable[[int], bool]) -> None:
        self.rank = rank
        self._targets = targets
        self._has = has
        self._jobs: dict[tuple[int, int], _Job] = {}
        """By owner and key: reads that have not ended, and copies in own targets."""
        self._by_number: dict[int, _Job] = {}
        self._next_number = 0
        self._starts: list[StartedRead] = []
        self._settled: list[SettledReads] = []

    @property
    def copies(self) -> list[AheadRead]:
        """Finished copies in own targets."""
        return [
            AheadRead(job.key, *read) for job in self._jobs.values() if not job.open for read in job.reads
        ]

    @property
    def quarantined(self) -> list[int]:
        """Own targets that a read may still write."""
        return [read.unit for job in self._jobs.values() if job.open for read in job.reads]

    @property
    def quiet(self) -> bool:
        """True if no read is open, overdue ones excepted."""
        return all(job.failed for job in self._by_number.values())

    def hear(self, owner: int, note: PreCopyNote) -> None:
        """Apply the note of one rank: take up its announcements, and drop copies of withdrawn pages."""
        for announcement in note.announced:
            if any(one.reader == self.rank for one in announcement.reads):
                self._take_up(owner, announcement)
        for key in note.withdrawn:
            job = self._jobs.get((owner, key))
            if job is not None:
                job.withdrawn = True
                self._drop_if_ended(job)

    def take_starts(self) -> list[StartedRead]:
        """Return the reads to start."""
        starts, self._starts = self._starts, []
        return starts

    def take_settled(self) -> list[SettledReads]:
        """Return what has settled since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def done(self, number: int) -> None:
        """Record that a read has ended, overdue or not."""
        job = self._by_number.pop(number)
        job.open.remove(number)
        if job.open:
            return
        self._settle(job, "ended" if job.failed else "copied")
        self._drop_if_ended(job)

    def overdue(self, number: int) -> None:
        """Record that a read takes too long. Its target is quarantined until it has ended."""
        job = self._by_number[number]
        if not job.failed:
            job.failed = True
            self._settle(job, "failed")

    def drop_last(self) -> bool:
        """Drop the last finished copy in own targets. False if there is none."""
        for job in reversed(self._jobs.values()):
            if not job.open:
                self._drop(job)
                return True
        return False

    def _take_up(self, owner: int, announcement: Announcement) -> None:
        reads = self._reads(announcement)
        job = _Job(owner, announcement.key, announcement.block_hash, reads)
        if not reads:
            self._settle(job, "declined")
            return
        self._jobs[owner, announcement.key] = job
        for read in job.reads:
            self._starts.append(StartedRead(self._next_number, read))
            job.open.add(self._next_number)
            self._by_number[self._next_number] = job
            self._next_number += 1

    def _reads(self, announcement: Announcement) -> list[UnitRead]:
        """Return the rank's reads with their targets. Empty if it needs none, or has no target."""
        if self._targets is not None and self._known(announcement.block_hash):
            return []
        reads: list[UnitRead] = []
        for one in announcement.reads:
            if one.reader == self.rank:
                unit = one.unit
                if self._targets is not None:
                    unit = self._targets.take(self.rank, evict=announcement.held)
                if unit is not None:
                    reads.append(UnitRead(one.source_rank, one.source, unit))
        return reads

    def _known(self, block_hash: int) -> bool:
        return self._has(block_hash) or any(
            job.block_hash == block_hash and not job.withdrawn for job in self._jobs.values()
        )

    def _settle(self, job: _Job, outcome: Outcome) -> None:
        self._settled.append(SettledReads(job.owner, job.key, outcome))

    def _drop_if_ended(self, job: _Job) -> None:
        if not job.open and (job.withdrawn or job.failed or self._targets is None):
            self._drop(job)

    def _drop(self, job: _Job) -> None:
        del self._jobs[job.owner, job.key]
        if self._targets is not None:
            for read in job.reads:
                self._targets.give(self.rank, read.unit)
