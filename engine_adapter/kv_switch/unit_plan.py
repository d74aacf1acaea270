"""Units of one rank in a switch: those that stay, those that are filled by reads, and those that are left."""

from collections import deque
from collections.abc import Iterable, Sequence

from engine_adapter.kv_switch.kv_state import UnitRead


class UnitPlan:
    """Units that the pages of the next layout take on one rank, and the reads that fill them."""

    def __init__(self, units: Iterable[int], targets: Iterable[int]) -> None:
        """units: all of the rank. targets: those that neither stay nor are read by any rank."""
        self._left = set(units)
        self._targets = deque(sorted(targets))
        self.reads: list[UnitRead] = []

    def keep(self, unit: int) -> int:
        """Leave a unit in place for a page of the next layout."""
        self._left.remove(unit)
        return unit

    def take(self) -> int:
        """Return a unit for a page that has no content yet."""
        return self.keep(self._targets.popleft())

    def read(self, source_rank: int, source: int) -> int:
        """Return a unit that is filled from unit `source` of another rank."""
        unit = self.take()
        self.reads.append(UnitRead(source_rank, source, unit))
        return unit

    @property
    def free(self) -> list[int]:
        """Units that no page of the next layout has, in ascending order."""
        return sorted(self._left)


class SourceChoice:
    """Choice of the rank to read from where several have the same content: the one with the fewest reads."""

    def __init__(self, ranks: int) -> None:
        self._reads = [0] * ranks

    def choose(self, candidates: Sequence[int]) -> int:
        """Return one of these ranks and count a read of it."""
        rank = min(candidates, key=lambda one: (self._reads[one], one))
        self._reads[rank] += 1
        return rank
