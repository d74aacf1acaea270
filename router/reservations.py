"""The load of every rank: what it reported, and what this router has promised it since. Pure; time comes in as an argument.

A booking is counted once. Until a report can contain it, it is counted beside the report; a report that arrives
`settle_seconds` after the booking contains it and speaks for it. A report that arrives sooner may or may not contain it: of
the two readings the larger is taken, never their sum. Without a fresh report the router's own bookings speak alone.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

PREFILL, SEQUENCES, BLOCKS = 0, 1, 2
"""Rows of a load table: prompt tokens not yet computed; sequences running or waiting; KV blocks they hold."""
AMOUNTS = 3

Amounts = NDArray[np.int64]


class Booking:
    """Load promised to one rank for one request. Belongs to `Reservations`, which alone changes it."""

    __slots__ = ("amounts", "booked_at", "group", "row")

    def __init__(self, row: int, amounts: Amounts, booked_at: float, group: "NDArray[np.int64] | None") -> None:
        self.row = row
        self.amounts = amounts
        self.booked_at = booked_at
        self.group = group
        """the table that counts this booking beside the report; None: the report speaks for it"""


class Reservations:
    """State: one column per rank in each table [AMOUNTS, rows]; open bookings per row. Columns of ranks that left are used again."""

    def __init__(self, *, settle_seconds: float, stale_seconds: float) -> None:
        self._settle = settle_seconds
        self._stale = stale_seconds
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._open: list[set[Booking]] = []
        self._reported = np.zeros((AMOUNTS, 0), np.int64)
        self._young = np.zeros((AMOUNTS, 0), np.int64)
        """bookings that the last report may or may not contain"""
        self._since = np.zeros((AMOUNTS, 0), np.int64)
        """bookings since the last report"""
        self._own = np.zeros((AMOUNTS, 0), np.int64)
        """all open bookings"""
        self._load = np.zeros((AMOUNTS, 0), np.int64)
        """what the tables above amount to; kept with every change, so that a decision only reads it"""
        self._stale_at = np.zeros(0)
        """when the last report stops counting; -inf: there is none that counts"""
        self._first_stale = np.inf
        """the earliest of those to come"""

    def add_rank(self, rank: Hashable) -> int:
        """The column of a rank; the same one when it is known already."""
        if rank in self._rows:
            return self._rows[rank]
        if not self._free:
            self._grow()
        row = self._rows[rank] = self._free.pop()
        for table in self._tables:
            table[:, row] = 0
        self._stale_at[row] = -np.inf
        self._open[row] = set()
        return row

    def remove_rank(self, rank: Hashable) -> None:
        """Forget a rank; its open bookings end."""
        row = self._rows.pop(rank, None)
        if row is None:
            return
        for booking in self._open[row]:
            booking.row = -1
        self._open[row] = set()
        self._free.append(row)

    def report(self, rank: Hashable, amounts: Sequence[int], now: float) -> bool:
        """A rank's own word on its load ([AMOUNTS]); False when the rank is unknown."""
        row = self._rows.get(rank)
        if row is None:
            return False
        self._since[:, row] = 0
        self._young[:, row] = 0
        for booking in self._open[row]:
            if booking.group is not None:
                contained = now - booking.booked_at >= self._settle
                booking.group = None if contained else self._young
                if not contained:
                    self._young[:, row] += booking.amounts
        self._reported[:, row] = np.maximum(amounts, 0)
        self._stale_at[row] = now + self._stale
        self._first_stale = min(self._first_stale, now + self._stale)
        self._add_up(row)
        return True

    def book(self, row: int, amounts: Sequence[int], now: float) -> Booking:
        """Promise load ([AMOUNTS], none negative) to a rank from now on."""
        booking = Booking(row, np.array(amounts, np.int64), now, self._since)
        self._since[:, row] += booking.amounts
        self._own[:, row] += booking.amounts
        self._load[:, row] += booking.amounts
        self._open[row].add(booking)
        return booking

    def first_token(self, booking: Booking) -> None:
        """The prompt is computed: its tokens wait no more."""
        part = np.zeros(AMOUNTS, np.int64)
        part[PREFILL] = booking.amounts[PREFILL]
        self._subtract(booking, part)

    def release(self, booking: Booking) -> None:
        """The request is over, whichever way. Idempotent."""
        if booking.row >= 0:
            self._subtract(booking, booking.amounts.copy())
            self._open[booking.row].discard(booking)
            booking.row = -1

    def _subtract(self, booking: Booking, part: Amounts) -> None:
        row = booking.row
        if row < 0:
            return
        booking.amounts -= part
        self._own[:, row] -= part
        if booking.group is None:
            self._reported[:, row] = np.maximum(self._reported[:, row] - part, 0)
        else:
            booking.group[:, row] -= part
        self._add_up(row)

    def load(self, rows: NDArray[np.intp], now: float) -> Amounts:
        """int64 [AMOUNTS, len(rows)]: the load a request that came now would meet. A copy."""
        if now > self._first_stale:
            self._expire(now)
        return self._load.take(rows, axis=1)

    def _expire(self, now: float) -> None:
        """Reports that are too old stop counting."""
        counting = np.isfinite(self._stale_at)
        for row in np.flatnonzero(counting & (self._stale_at < now)):
            self._stale_at[row] = -np.inf
            self._add_up(int(row))
        self._first_stale = float(min(self._stale_at[np.isfinite(self._stale_at)], default=np.inf))

    def _add_up(self, row: int) -> None:
        if self._stale_at[row] == -np.inf:
            self._load[:, row] = self._own[:, row]
        else:
            self._load[:, row] = np.maximum(self._reported[:, row], self._young[:, row]) + self._since[:, row]

    @property
    def _tables(self) -> tuple[Amounts, ...]:
        return self._reported, self._young, self._since, self._own, self._load

    @property
    def open_bookings(self) -> int:
        return sum(len(bookings) for bookings in self._open)

    def _grow(self) -> None:
        """Double the columns. Bookings refer to tables, so the tables are replaced and the references moved."""
        old = self._reported.shape[1]
        more = max(8, old)
        tables = {id(table): np.pad(table, ((0, 0), (0, more))) for table in self._tables}
        for booking in (booking for bookings in self._open for booking in bookings):
            booking.group = None if booking.group is None else tables[id(booking.group)]
        self._reported, self._young, self._since, self._own, self._load = (tables[id(table)] for table in self._tables)
        self._stale_at = np.pad(self._stale_at, (0, more), constant_values=-np.inf)
        self._open += [set() for _ in range(more)]
        self._free += range(old + more - 1, old - 1, -1)
