"""Units of one rank in a switch: those that stay, those that are filled by reads, and those that are left."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine_adapter.kv_switch.kv_state import UnitRead


class UnitCopy(NamedTuple):
    """A unit of a rank, as a copy of some content."""

    rank: int
    unit: int


class SourceChoice:
    """Choice of the copy to read where several ranks have one: that of the rank with the fewest reads."""

    def __init__(self, ranks: int) -> None:
        self._reads = [0] * ranks

    def choose(self, copies: Sequence[UnitCopy]) -> UnitCopy:
        """Return one of these copies and count a read of it."""
        copy = min(copies, key=lambda one: (self._reads[one.rank], one.rank))
        self._reads[copy.rank] += 1
        return copy


class UnitPlan:
    """Units that the pages of the next layout take on one rank, and the reads that fill them."""

    def __init__(self, units: Iterable[int], targets: Iterable[int], ahead: Mapping[UnitCopy, int]) -> None:
        """units: all of the rank, in any use. targets: those that neither stay nor are read by any rank.
        ahead: units that already have the content of a unit of another rank. They become targets when others
        run out, and the content is then read again."""
        self._left = set(units)
        self._targets = deque(sorted(targets))
        self._ahead = dict(ahead)
        self.reads: list[UnitRead] = []

    def keep(self, unit: int) -> int:
        """Leave a unit in place for a page of the next layout."""
        self._left.remove(unit)
        return unit

    def take(self) -> int:
        """Return a unit for a page that has no content yet."""
        return self.keep(self._targets.popleft() if self._targets else self._ahead.popitem()[1])

    def fill(self, copies: Sequence[UnitCopy], sources: SourceChoice) -> int:
        """Return a unit with the content of these copies on other ranks: copied ahead, or read now."""
        for copy in copies:
            if copy in self._ahead:
                return self.keep(self._ahead.pop(copy))
        source = sources.choose(copies)
        unit = self.take()
        self.reads.append(UnitRead(source.rank, source.unit, unit))
        return unit

    @property
    def free(self) -> list[int]:
        """Units that no page of the next layout has, in ascending order."""
        return sorted(self._left)
