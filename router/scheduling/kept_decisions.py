"""Recent booked decisions, for reading back. Pure."""

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from router.scheduling.decision import Decision


class BookedDecision(msgspec.Struct, frozen=True):
    """A decision that was booked. booked_at: seconds on the router's clock. nbytes: its memory."""

    decision: Decision
    booked_at: float
    nbytes: int


class KeptDecisions:
    """Booked decisions within limits of number and bytes: the oldest are evicted."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, BookedDecision] = OrderedDict()
        self._bytes = 0

    def reconfigure(self, most: int, most_bytes: int) -> None:
        """Apply these limits from the next decision on."""
        self._most, self._most_bytes = most, most_bytes

    def add(self, booked: BookedDecision) -> None:
        self._kept[booked.decision.id] = booked
        self._bytes += booked.nbytes
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes

    def get(self, decision_id: str) -> Decision | None:
        """Return a decision if it is among the recent ones."""
        kept = self._kept.get(decision_id)
        return None if kept is None else kept.decision

    def recent(self) -> Iterator[BookedDecision]:
        """Yield the decisions, the newest first."""
        return reversed(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)
