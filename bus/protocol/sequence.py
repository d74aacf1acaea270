"""What a consumer has heard of each publisher: new ones, order, repetitions, gaps. Pure.

Core NATS neither stores nor repeats, so the sequence in the envelope is the only detector of loss. A publisher counts its
messages from 0; a new publisher_id is a restart. Per publisher the last WINDOW sequence numbers are remembered one by one:
what lies further back counts as a repetition.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

WINDOW = 4096
"""Messages behind the newest one for which "late" can be told from "duplicate"."""


class MessageOrder(StrEnum):
    """How a message stands to those heard before from its publisher."""

    NEW = "new"
    """the first of a publisher not known"""
    IN_ORDER = "in_order"
    DUPLICATE = "duplicate"
    """heard before, or too far back to tell; ignore it"""
    GAP = "gap"
    """messages before it are missing, at least for now"""
    LATE = "late"
    """one that was missing; newer ones were heard already"""


@dataclass(frozen=True, slots=True)
class SequenceVerdict:
    order: MessageOrder
    missing: int = 0
    """messages skipped right before this one (GAP), or sent before the first one heard (NEW)"""

    @property
    def fresh(self) -> bool:
        """Whether the message is heard for the first time."""
        return self.order is not MessageOrder.DUPLICATE


class _Heard:
    """One publisher. Bit i of `seen` stands for sequence `newest - i`."""

    __slots__ = ("newest", "seen")

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.seen = 1

    def advance(self, sequence: int) -> None:
        distance = sequence - self.newest
        self.seen = ((self.seen << distance) & _MASK) | 1 if distance < WINDOW else 1
        self.newest = sequence

    def fill(self, sequence: int) -> bool:
        """Mark an older message; False when it was marked before or cannot be told any more."""
        distance = self.newest - sequence
        if distance >= WINDOW or self.seen >> distance & 1:
            return False
        self.seen |= 1 << distance
        return True


_MASK = (1 << WINDOW) - 1


class Sequences:
    """The publishers a consumer listens to; bounded, the one silent for longest is forgotten first."""

    def __init__(self, limit: int = 4096) -> None:
        if limit < 1:
            raise ValueError(f"sequences: the number of publishers must be at least 1, not {limit}")
        self._limit = limit
        self._heard: OrderedDict[int, _Heard] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heard)

    def observe(self, publisher_id: int, sequence: int) -> SequenceVerdict:
        """Take note of a message; ValueError for a negative sequence."""
        if sequence < 0:
            raise ValueError(f"sequences: sequence numbers start at 0, not {sequence}")
        heard = self._heard.get(publisher_id)
        if heard is None:
            self._add(publisher_id, sequence)
            return SequenceVerdict(MessageOrder.NEW, missing=sequence)
        self._heard.move_to_end(publisher_id)
        skipped = sequence - heard.newest - 1
        if skipped < 0:
            return SequenceVerdict(MessageOrder.LATE if heard.fill(sequence) else MessageOrder.DUPLICATE)
        heard.advance(sequence)
        return SequenceVerdict(MessageOrder.GAP, missing=skipped) if skipped else SequenceVerdict(MessageOrder.IN_ORDER)

    def cover(self, publisher_id: int, sequence: int) -> None:
        """A snapshot holds everything up to `sequence` (-1: nothing was sent yet): those messages count as heard from now on."""
        heard = self._heard.get(publisher_id)
        if heard is None:
            self._add(publisher_id, sequence)
        elif sequence > heard.newest:
            heard.advance(sequence)
        heard = self._heard[publisher_id]
        heard.seen |= _MASK & ~((1 << (heard.newest - sequence)) - 1) if heard.newest - sequence < WINDOW else 0

    def newest(self, publisher_id: int) -> int | None:
        """The highest sequence heard or covered; None for a publisher not known."""
        heard = self._heard.get(publisher_id)
        return None if heard is None else heard.newest

    def forget(self, publisher_id: int) -> None:
        """Its next message is that of a new publisher. Forgetting one not known is no error."""
        self._heard.pop(publisher_id, None)

    def _add(self, publisher_id: int, newest: int) -> None:
        self._heard[publisher_id] = _Heard(newest)
        if len(self._heard) > self._limit:
            self._heard.popitem(last=False)
