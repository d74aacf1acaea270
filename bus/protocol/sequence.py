"""Sequence tracking per publisher: new publishers, order, duplicates, gaps. Pure.

Core NATS neither stores nor repeats, so the sequence in the envelope is the only way to detect loss. A
publisher counts its messages from 0; a new publisher_id is a restart. The last WINDOW sequence numbers of
each publisher are remembered individually. Older ones count as duplicates.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

WINDOW = 4096
"""Messages behind the newest one for which "late" can be distinguished from "duplicate"."""


class MessageOrder(StrEnum):
    """Position of a message relative to earlier ones of its publisher."""

    NEW = "new"
    """the first message of an unknown publisher"""
    IN_ORDER = "in_order"
    DUPLICATE = "duplicate"
    """received before, or too old to tell; ignore it"""
    GAP = "gap"
    """messages before it are missing, at least for now"""
    LATE = "late"
    """a missing message that arrived after newer ones"""


@dataclass(frozen=True, slots=True)
class SequenceVerdict:
    order: MessageOrder
    missing: int = 0
    """messages skipped right before this one (GAP), or sent before the first one received (NEW)"""

    @property
    def fresh(self) -> bool:
        """True if the message is received for the first time."""
        return self.order is not MessageOrder.DUPLICATE


class _Window:
    """Sequence window of one publisher. Bit i of `seen` stands for sequence `newest - i`."""

    __slots__ = ("newest", "seen")

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.seen = 1

    def advance(self, sequence: int) -> None:
        distance = sequence - self.newest
        self.seen = ((self.seen << distance) & _MASK) | 1 if distance < WINDOW else 1
        self.newest = sequence

    def fill(self, sequence: int) -> bool:
        """Mark an older message. False if it was marked before or is too old to tell."""
        distance = self.newest - sequence
        if distance >= WINDOW or self.seen >> distance & 1:
            return False
        self.seen |= 1 << distance
        return True


_MASK = (1 << WINDOW) - 1


class Sequences:
    """Publishers that a consumer receives from. Bounded: the one silent for longest is forgotten first."""

    def __init__(self, limit: int = 4096) -> None:
        if limit < 1:
            raise ValueError(f"sequences: the number of publishers must be at least 1, not {limit}")
        self._limit = limit
        self._windows: OrderedDict[int, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def observe(self, publisher_id: int, sequence: int) -> SequenceVerdict:
        """Record a message. ValueError for a negative sequence."""
        if sequence < 0:
            raise ValueError(f"sequences: sequence numbers start at 0, not {sequence}")
        window = self._windows.get(publisher_id)
        if window is None:
            self._add(publisher_id, sequence)
            return SequenceVerdict(MessageOrder.NEW, missing=sequence)
        self._windows.move_to_end(publisher_id)
        skipped = sequence - window.newest - 1
        if skipped < 0:
            return SequenceVerdict(MessageOrder.LATE if window.fill(sequence) else MessageOrder.DUPLICATE)
        window.advance(sequence)
        return (
            SequenceVerdict(MessageOrder.GAP, missing=skipped)
            if skipped
            else SequenceVerdict(MessageOrder.IN_ORDER)
        )

    def cover(self, publisher_id: int, sequence: int) -> None:
        """Count all messages up to `sequence` (-1: none sent yet) as received, because a snapshot contains
        them.
        """
        window = self._windows.get(publisher_id)
        if window is None:
            self._add(publisher_id, sequence)
        elif sequence > window.newest:
            window.advance(sequence)
        window = self._windows[publisher_id]
        window.seen |= (
            _MASK & ~((1 << (window.newest - sequence)) - 1) if window.newest - sequence < WINDOW else 0
        )

    def newest(self, publisher_id: int) -> int | None:
        """Return the highest sequence received or covered; None for an unknown publisher."""
        window = self._windows.get(publisher_id)
        return None if window is None else window.newest

    def forget(self, publisher_id: int) -> None:
        """Treat its next message as that of a new publisher. Unknown publishers are ignored."""
        self._windows.pop(publisher_id, None)

    def _add(self, publisher_id: int, newest: int) -> None:
        self._windows[publisher_id] = _Window(newest)
        if len(self._windows) > self._limit:
            self._windows.popitem(last=False)
