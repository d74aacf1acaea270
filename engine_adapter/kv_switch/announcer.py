"""Owner's side of a pre-copy: announced pages, their pins, and the readers that have not settled."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine_adapter.batching.kv_cache import KvCache, RegisteredBlock
from engine_adapter.kv_switch.kv_state import AheadRead
from engine_adapter.kv_switch.pre_copy_notes import AnnouncedRead, Announcement, SettledReads
from engine_adapter.kv_switch.target_pool import TargetPool


@dataclass(slots=True)
class _Offer:
    entry: RegisteredBlock
    announcement: Announcement
    pending: set[int]
    """Readers that have not settled."""
    copied: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    """Readers with overdue reads."""

    def units(self, reader: int) -> list[int]:
        """Units of the reader that the announcement names."""
        reads = self.announcement.reads
        return [one.unit for one in reads if one.reader == reader and one.unit is not None]


class Announcer:
    """Pages of one cache that other ranks read ahead. targets: the pool of the units that announcements name.
    None: readers take units of their own."""

    def __init__(self, cache: KvCache, targets: TargetPool | None) -> None:
        self._cache = cache
        self._targets = targets
        self._offers: dict[int, _Offer] = {}
        """By key."""
        self._withdrawn: dict[int, _Offer] = {}
        """Withdrawn ones with readers that have not settled, or with overdue reads."""
        self._next_key = 0
        self._announcements: list[Announcement] = []
        self._withdrawals: list[int] = []

    @property
    def keys(self) -> list[int]:
        """Keys of announcements whose pages still have the announced content."""
        return [key for key, one in self._offers.items() if self._stands(one)]

    @property
    def pending(self) -> bool:
        """True if a reader has not settled."""
        return any(one.pending for one in (*self._offers.values(), *self._withdrawn.values()))

    @property
    def announced(self) -> set[tuple[int, int]]:
        """Pages and the ranks that they were announced to."""
        return {
            (one.entry.page, read.reader) for one in self._offers.values() for read in one.announcement.reads
        }

    def announce(self, entry: RegisteredBlock, reads: tuple[AnnouncedRead, ...], *, held: bool) -> None:
        """Announce a page in the next note, and pin it until all readers have settled."""
        announcement = Announcement(self._next_key, entry.block.block_hash, held, reads)
        self._next_key += 1
        self._cache.pin(entry.page)
        self._offers[announcement.key] = _Offer(entry, announcement, {one.reader for one in reads})
        self._announcements.append(announcement)

    def settle(self, reader: int, note: SettledReads) -> None:
        """Record that a reader has settled, or that its overdue reads have ended."""
        offer = self._offers.get(note.key) or self._withdrawn[note.key]
        if note.outcome == "ended":
            offer.failed.remove(reader)
            self._give_back(offer, reader)
        else:
            offer.pending.remove(reader)
            if not offer.pending:
                self._cache.unpin(offer.entry.page)
            if note.outcome == "failed":
                offer.failed.add(reader)
            elif note.outcome == "copied" and note.key in self._offers:
                offer.copied.add(reader)
            else:
                self._give_back(offer, reader)
        if note.key in self._withdrawn and not (offer.pending or offer.failed):
            del self._withdrawn[note.key]

    def take(self) -> tuple[list[Announcement], list[int]]:
        """Return the announcements and the withdrawn keys since the last call."""
        for key, offer in list(self._offers.items()):
            if not self._stands(offer):
                self._withdraw(key)
        announcements, self._announcements = self._announcements, []
        withdrawals, self._withdrawals = self._withdrawals, []
        return announcements, withdrawals

    def drop_last(self) -> bool:
        """Give the targets of the last page back that all readers have settled. False if there is none."""
        for key in reversed(self._offers):
            if self._offers[key].copied and not self._offers[key].pending:
                self._withdraw(key)
                return True
        return False

    def copies(self, *, pending: bool = False) -> Iterator[tuple[int, AheadRead]]:
        """Iterate over the readers and their copies in named units. pending: also those that are not
        complete."""
        for key, offer in self._offers.items():
            readers = offer.copied | offer.pending if pending else offer.copied
            for one in offer.announcement.reads:
                if one.reader in readers and one.unit is not None:
                    yield one.reader, AheadRead(key, one.source_rank, one.source, one.unit)

    def quarantined(self) -> Iterator[tuple[int, int]]:
        """Iterate over the readers and named units whose reads have not settled, or are overdue."""
        for offer in (*self._offers.values(), *self._withdrawn.values()):
            for reader in offer.pending | offer.failed:
                for unit in offer.units(reader):
                    yield reader, unit

    def _stands(self, offer: _Offer) -> bool:
        return self._cache.registered_at(offer.entry.page) is offer.entry

    def _withdraw(self, key: int) -> None:
        offer = self._offers.pop(key)
        self._withdrawals.append(key)
        for reader in sorted(offer.copied):
            self._give_back(offer, reader)
        offer.copied.clear()
        if offer.pending or offer.failed:
            self._withdrawn[key] = offer

    def _give_back(self, offer: _Offer, reader: int) -> None:
        if self._targets is not None:
            for unit in offer.units(reader):
                self._targets.give(reader, unit)
