"""Bytes copied recently by plans within the byte budget. Pure; bounded; time is an argument."""

from collections import deque
from collections.abc import Iterable
from math import inf

MAX_ENTRIES = 1024
"""Limit on stored handovers. Beyond it the two oldest are merged, at the time of the younger one."""


class ByteBudget:
    """Byte budget of one engine, over a sliding window. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._spent: deque[tuple[float, int]] = deque()
        """(time, bytes), oldest first"""

    def spend(self, at: float, copied: int) -> None:
        """Record a committed handover. One that is reported late counts from the time of the previous one.

        Raises ValueError for a negative number of bytes.
        """
        if copied < 0:
            raise ValueError(f"{copied} bytes were copied; they must not be negative")
        if not copied:
            return
        self._spent.append((max(at, self._spent[-1][0]) if self._spent else at, copied))
        if len(self._spent) > MAX_ENTRIES:
            _, oldest = self._spent.popleft()
            at, second = self._spent.popleft()
            self._spent.appendleft((at, oldest + second))

    def within(self, now: float, seconds: float) -> int:
        """Return the bytes copied in the last `seconds`."""
        return sum(copied for at, copied in self._spent if now - at < seconds)

    def left(self, now: float, budget_bytes: int, budget_seconds: float) -> int:
        """Return the bytes that may still be copied now."""
        return max(budget_bytes - self.within(now, budget_seconds), 0)

    def permits(self, now: float, size: int, budget_bytes: int, budget_seconds: float) -> bool:
        """Return True if a handover of this size may be carried out now. One larger than the whole budget may
        be once nothing was copied for `budget_seconds`; a budget of 0 permits none."""
        spent = self.within(now, budget_seconds)
        return budget_bytes > 0 and (not spent or spent + size <= budget_bytes)

    def wait(self, now: float, sizes: Iterable[int], budget_bytes: int, budget_seconds: float) -> float:
        """Return the seconds until the last of several handovers is permitted, if each is committed as soon
        as it is permitted, without taking time. Infinite for a budget of 0."""
        if budget_bytes <= 0:
            return inf
        spent = deque((at, copied) for at, copied in self._spent if now - at < budget_seconds)
        total, at = sum(copied for _, copied in spent), now
        for size in sizes:
            while total and total + size > budget_bytes:
                oldest, copied = spent.popleft()
                total -= copied
                at = oldest + budget_seconds
            spent.append((at, size))
            total += size
        return at - now
