"""Pre-copy: registered pages, which never change, are copied to where the next layout needs them while the
engine serves. See decision 0020.

In every step, each rank calls `note` after it has planned the step, the ranks exchange the notes, and each
calls `hear` with all of them. Then it starts the reads of `reader.take_starts`, and reports their ends to
`reader` between two steps. These objects live as long as a layout is served. `copies` is for the state of a
scheduler at the switch, after the notes of that step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_adapter.batching.kv_cache import KvCache, RegisteredBlock
from engine_adapter.kv_switch.ahead_reader import AheadReader
from engine_adapter.kv_switch.announcer import Announcer
from engine_adapter.kv_switch.kv_state import AheadRead, KvState, SwitchRefused, group_of_rank
from engine_adapter.kv_switch.pre_copy_notes import AnnouncedRead, PreCopyNote
from engine_adapter.kv_switch.scheduler_state import AheadCopies
from engine_adapter.kv_switch.splitting import RankLayout, destinations
from engine_adapter.kv_switch.target_pool import TargetPool


class PageChoice(NamedTuple):
    """A page to announce."""

    entry: RegisteredBlock
    held: bool
    reads: tuple[AnnouncedRead, ...]


class ReaderOnly:
    """Part in a pre-copy of a rank whose pages another rank owns."""

    def __init__(self, rank: int) -> None:
        self.reader = AheadReader(rank, None, lambda block_hash: False)

    def note(self) -> PreCopyNote:
        """Return what the owner has to know."""
        return PreCopyNote(settled=self.reader.take_settled())

    def hear(self, notes: Sequence[PreCopyNote]) -> None:
        """Apply the notes of all ranks, in the order of the ranks."""
        for rank, note in enumerate(notes):
            self.reader.hear(rank, note)


class _OwnerPreCopy(ABC):
    """Part in a pre-copy of a rank that owns pages: it announces them, and reserves pages for copies."""

    def __init__(
        self, rank: int, cache: KvCache, reader: AheadReader, announcer: Announcer, targets: TargetPool
    ) -> None:
        self.rank = rank
        self.reader = reader
        self._cache = cache
        self._announcer = announcer
        self._targets = targets
        self._started = False

    @property
    def idle(self) -> bool:
        """True if it was not started, or, after `stop`, all copies are dropped and all readers have settled.
        Overdue reads may be open: their targets remain quarantined."""
        copied = any(self.copies().ahead)
        return not (self._started or self._announcer.pending or copied) and self.reader.quiet

    @property
    def started(self) -> bool:
        return self._started

    def start(self) -> None:
        """Announce pages from the next note on."""
        self._started = True

    @property
    def settled(self) -> bool:
        """True if this rank neither reads nor is read, as far as it was told."""
        return self.reader.quiet and not self._announcer.pending

    def stop(self) -> None:
        """Announce nothing more and drop all copies, for a switch that does not come."""
        self._started = False

    def note(self, max_pages: int, lacking: int = 0) -> PreCopyNote:
        """Return what the other ranks have to know, with at most `max_pages` new announcements. Copies are
        dropped where pages are short. lacking: pages that requests wait for
        (`BatchScheduler.lacking_pages`)."""
        self._targets.reserve_less(lacking)
        while (not self._started or self._targets.short) and self._drop_copy():
            pass
        if self._started and not self._targets.short:
            for choice in islice(self._choose(), max_pages):
                self._announcer.announce(choice.entry, choice.reads, held=choice.held)
        announced, withdrawn = self._announcer.take()
        return PreCopyNote(announced, withdrawn, self.reader.take_settled())

    def hear(self, notes: Sequence[PreCopyNote]) -> None:
        """Apply the notes of all ranks, in the order of the ranks."""
        for rank, note in enumerate(notes):
            self.reader.hear(rank, note)
            for settled in note.settled:
                if settled.owner == self.rank:
                    self._announcer.settle(rank, settled)

    @abstractmethod
    def copies(self) -> AheadCopies:
        """Return the copies for the state of this rank's scheduler."""

    @abstractmethod
    def _drop_copy(self) -> bool:
        """Drop the last copy in reserved pages. False if there is none."""

    @abstractmethod
    def _choose(self) -> Iterator[PageChoice]:
        """Iterate over pages that are not announced yet."""

    def _entries(self) -> Iterator[tuple[RegisteredBlock, bool]]:
        """Iterate over registered blocks and whether a request holds them: held ones, parents first, then
        kept ones, the last in the order of eviction first."""
        kept = dict.fromkeys(reversed(self._cache.kept))
        for entry in self._cache.registered:
            if entry.page not in kept:
                yield entry, True
        for page in kept:
            entry_of_kept = self._cache.registered_at(page)
            if entry_of_kept is not None:
                yield entry_of_kept, False


class MergePreCopy(_OwnerPreCopy):
    """Pre-copy of one rank under data-parallel attention: every other rank reads its pages, and it reads
    theirs into units of its own."""

    def __init__(
        self,
        rank: int,
        cache: KvCache,
        units: NDArray[np.int32],
        *,
        ranks: int,
        groups: int,
        headroom: int,
        quarantined: Sequence[int] = (),
    ) -> None:
        """units: of each page, [pages, G]. headroom: pages that stay obtainable for requests. quarantined:
        own units since an earlier switch."""
        targets = TargetPool(cache, units, rank=rank, headroom=headroom)
        super().__init__(rank, cache, AheadReader(rank, targets, cache.has), Announcer(cache, None), targets)
        self._units = units
        self._quarantined = quarantined
        self._groups = [group_of_rank(one, ranks, groups) for one in range(ranks)]

    def copies(self) -> AheadCopies:
        quarantined = [*self._quarantined, *self.reader.quarantined]
        return AheadCopies(self._announcer.keys, [self.reader.copies], [quarantined])

    def _drop_copy(self) -> bool:
        return self.reader.drop_last()

    def _choose(self) -> Iterator[PageChoice]:
        announced = self._announcer.announced
        for entry, held in self._entries():
            row = self._units[entry.page].tolist()
            reads = tuple(
                AnnouncedRead(reader, self.rank, row[group], None)
                for reader, group in enumerate(self._groups)
                if reader != self.rank and (entry.page, reader) not in announced
            )
            if reads:
                yield PageChoice(entry, held, reads)


class SplitPreCopy(_OwnerPreCopy):
    """Pre-copy of rank 0 under tensor-parallel attention: it decides which rank reads which pages, and where
    to."""

    def __init__(
        self,
        cache: KvCache,
        units: NDArray[np.int32],
        state: Callable[[AheadCopies], KvState],
        layout: RankLayout,
        *,
        headroom: int,
        quarantined: Sequence[Sequence[int]] = (),
    ) -> None:
        """units: of each page, [pages, P]. state: returns the present state of the scheduler with these
        copies. headroom: pages that stay obtainable for requests. quarantined: units of each rank since an
        earlier switch."""
        targets = TargetPool(cache, units, rank=None, headroom=headroom)
        reader = AheadReader(0, None, cache.has)
        super().__init__(0, cache, reader, Announcer(cache, targets), targets)
        self._units = units
        self._quarantined = quarantined or [()] * layout.ranks
        self._state = state
        self._layout = layout

    def copies(self) -> AheadCopies:
        quarantined = [list(units) for units in self._quarantined]
        for reader, unit in self._announcer.quarantined():
            quarantined[reader].append(unit)
        return AheadCopies(self._announcer.keys, self._ahead(pending=False), quarantined)

    def _ahead(self, *, pending: bool) -> list[list[AheadRead]]:
        ahead: list[list[AheadRead]] = [[] for _ in range(self._layout.ranks)]
        for reader, copy in self._announcer.copies(pending=pending):
            ahead[reader].append(copy)
        return ahead

    def _drop_copy(self) -> bool:
        return self._announcer.drop_last()

    def _choose(self) -> Iterator[PageChoice]:
        """Announce pages where a split would place them now, if reads in progress were complete."""
        quarantined = [list(units) for units in self._quarantined]
        copies = AheadCopies(self._announcer.keys, self._ahead(pending=True), quarantined)
        try:
            placed = destinations(self._state(copies), self._layout)
        except SwitchRefused:
            return
        place = {entry.page: at for at, entry in enumerate(self._cache.registered)}
        announced = self._announcer.announced
        for entry, held in self._entries():
            for reader, pages in enumerate(placed):
                if place[entry.page] not in pages or (entry.page, reader) in announced:
                    continue
                if self._cache.registered_at(entry.page) is not entry:
                    continue  # evicted for a target
                reads = self._reads(entry.page, reader, held)
                if reads:
                    yield PageChoice(entry, held, reads)

    def _reads(self, page: int, reader: int, held: bool) -> tuple[AnnouncedRead, ...]:
        """Return the reads of the groups that the reader lacks. None if there are too few targets."""
        ranks, groups = self._layout.ranks, self._layout.groups
        row = self._units[page].tolist()
        reads: list[AnnouncedRead] = []
        for group in range(groups):
            if group == group_of_rank(reader, ranks, groups):
                continue
            source = group * (ranks // groups) + reader % (ranks // groups)
            unit = self._targets.take(reader, evict=held)
            if unit is None:
                for one in reads:
                    if one.unit is not None:
                        self._targets.give(reader, one.unit)
                return ()
            reads.append(AnnouncedRead(reader, source, row[source], unit))
        return tuple(reads)
