"""What plans of the planner's own have copied lately, against their budget. Pure; bounded; the time is an argument."""

from collections import deque

MOST_ENTRIES = 1024
"""Handovers that are told apart; of more, the oldest count as one that ended with the younger of them."""


class ByteBudget:
    """Of one engine. A byte counts for as long as the budget's interval lasts after its handover was committed. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._spent: deque[tuple[float, int]] = deque()
        """(when, bytes), the oldest first"""

    def spend(self, at: float, copied: int) -> None:
        """A handover was committed. One that is told late counts from when the one before it did. ValueError for less than no bytes."""
        if copied < 0:
            raise ValueError(f"{copied} bytes were copied; they must not be negative")
        if not copied:
            return
        self._spent.append((max(at, self._spent[-1][0]) if self._spent else at, copied))
        if len(self._spent) > MOST_ENTRIES:
            _, oldest = self._spent.popleft()
            at, second = self._spent.popleft()
            self._spent.appendleft((at, oldest + second))

    def within(self, now: float, seconds: float) -> int:
        """Bytes of the last so many seconds."""
        return sum(copied for at, copied in self._spent if now - at < seconds)

    def left(self, now: float, budget_bytes: int, budget_seconds: float) -> int:
        """Bytes that may still be copied at this moment."""
        return max(budget_bytes - self.within(now, budget_seconds), 0)
