"""Join of the two reports of one request, by decision id, in any order. Reports wait within limits of time
and bytes. Pure.
"""

from collections import OrderedDict
from typing import Any

OVERHEAD = 512
"""Bytes of a waiting part besides its own content."""
LONGEST_ID = 128
SIDES = 2
Part = tuple[Any, ...]
"""numbers and bytes"""


class ReportJoin:
    """Parts of side 0 and 1 that wait for each other, oldest first.

    seconds: longest wait. budget: bytes of all waiting parts. most: limit of waiting parts, and of remembered
    pairs, which identify duplicates. fields: number in a part of either side.
    """

    def __init__(self, budget: int, limit: int, seconds: float, fields: tuple[int, int]) -> None:
        self._budget = budget
        self._fields = fields
        self._limit = limit
        self._seconds = seconds
        self._waiting: OrderedDict[str, tuple[int, float, int, Part]] = OrderedDict()
        self._paired: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self.given_up = 0
        """parts whose other side did not arrive in time"""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        return self._bytes + len(self._paired) * LONGEST_ID

    def repeated(self, side: int, decision: str) -> bool:
        """Return True if this side of a request was offered before."""
        waiting = self._waiting.get(decision)
        return decision in self._paired or (waiting is not None and waiting[0] == side)

    def offer(self, side: int, decision: str, part: Part, now: float) -> Part | None:
        """Return the other side's part if it has arrived; otherwise this one waits. Not for duplicates."""
        self.expire(now)
        other = self._waiting.pop(decision, None)
        if other is not None:
            self._bytes -= other[2]
            self._remember(decision)
            return other[3]
        size = OVERHEAD + sum(len(field) for field in part if isinstance(field, bytes))
        self._waiting[decision] = (side, now, size, part)
        self._bytes += size
        while self._bytes > self._budget or len(self._waiting) > self._limit:
            self._give_up()
        return None

    def _remember(self, decision: str) -> None:
        self._paired[decision] = None
        while len(self._paired) > self._limit:
            self._paired.popitem(last=False)

    def _give_up(self) -> None:
        _, (_, _, size, _) = self._waiting.popitem(last=False)
        self._bytes -= size
        self.given_up += 1

    def expire(self, now: float) -> None:
        """Drop parts that have waited too long."""
        while self._waiting and now - next(iter(self._waiting.values()))[1] > self._seconds:
            self._give_up()

    def state(self) -> dict[str, Any]:
        """Return the complete state, for msgpack."""
        waiting = [
            (decision, side, at, list(part)) for decision, (side, at, _, part) in self._waiting.items()
        ]
        return {"waiting": waiting, "paired": list(self._paired), "given_up": self.given_up}

    def take_over(self, state: dict[str, Any], later: float = 0.0) -> None:
        """Restore a state on a clock that is ahead by `later` seconds. ValueError if it does not fit, without
        any change.
        """
        waiting: OrderedDict[str, tuple[int, float, int, Part]] = OrderedDict()
        for decision, side, at, part in state["waiting"]:
            if not isinstance(decision, str) or side not in range(SIDES) or len(part) != self._fields[side]:
                raise ValueError(f"pairing: decision {decision!r} of side {side!r} with {len(part)} fields")
            waiting[decision] = (
                side,
                at + later,
                OVERHEAD + sum(len(field) for field in part if isinstance(field, bytes)),
                tuple(part),
            )
        self._waiting, self._paired = waiting, OrderedDict.fromkeys(state["paired"])
        self._bytes, self.given_up = sum(size for _, _, size, _ in waiting.values()), int(state["given_up"])
