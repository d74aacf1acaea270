"""Load of every rank: the rank's last report, plus the bookings of routers since then. Pure; the time comes
in as an argument.

A booking is counted once. Until a report can contain it, it is added to the report. A report that arrives at
least `settle_seconds` after the booking contains it. A report that arrives earlier may or may not contain it:
the larger of the two readings counts, never their sum. Without a fresh report only the bookings count.

An external booking is for a request that another data plane sends at an unknown time. It is added to every
report until its first token, which proves that the rank has the request. From then on the rank's reports
contain it. It is never subtracted from a report, because the first report that contains it is unknown.

The tokens that running requests have yet to emit (STEPS) are known exactly for bookings and only estimated by
reports. So bookings always count with their own value, and a report only for the sequences without a booking
here.
"""

from collections.abc import Hashable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from fleet.arrays import IntArray

PREFILL, SEQUENCES, BLOCKS, STEPS = 0, 1, 2, 3
"""Rows of a load table: prompt tokens not yet computed; sequences running or waiting; KV blocks they hold;
tokens they are still expected to emit.
"""
AMOUNTS = 4

_EMITTED_EVERY, _EMITTED_LATER_EVERY = 16, 64


class Booking:
    """Load reserved on one rank for one request. Changed only by its owner, `Reservations`."""

    __slots__ = ("amounts", "booked_at", "counted_in", "external", "rank")

    def __init__(self, rank: "_Rank", amounts: list[int], booked_at: float, external: bool) -> None:
        self.rank: _Rank | None = rank
        """None: the booking has ended"""
        self.amounts = amounts
        self.booked_at = booked_at
        self.counted_in: list[int] | None = rank.held if external else rank.since
        """sums that count this booking in addition to the report; None: the report contains it"""
        self.external = external
        """another data plane sends the request"""

    @property
    def counted_every(self) -> int:
        """Number of new tokens after which they are counted. Once all expected tokens are emitted, the load
        no longer changes by them, and they only tell the speed.
        """
        return _EMITTED_EVERY if self.amounts[STEPS] else _EMITTED_LATER_EVERY

    @property
    def held(self) -> bool:
        """True while the booking is added to every report: external, before its first token."""
        return self.rank is not None and self.counted_in is self.rank.held


class _Rank:
    """One rank's sums, each [AMOUNTS]."""

    __slots__ = (
        "beside",
        "held",
        "open",
        "others",
        "own",
        "reported",
        "reported_at",
        "row",
        "since",
        "stale_at",
        "watched",
        "young",
    )

    def __init__(self, row: int) -> None:
        self.row = row
        self.reported = [0] * AMOUNTS
        """STEPS: only of the sequences without a booking here"""
        self.reported_at = -inf
        self.others = 0
        """reported sequences without a booking here"""
        self.young = [0] * AMOUNTS
        """bookings that the last report may or may not contain"""
        self.since = [0] * AMOUNTS
        """bookings since the last report"""
        self.held = [0] * AMOUNTS
        """external bookings before their first token, regardless of reports"""
        self.own = [0] * AMOUNTS
        """all open bookings"""
        self.stale_at = -inf
        """time at which the last report stops counting; -inf: none counts"""
        self.watched = 0
        """number of the `watch` call before its last noted report"""
        self.open: set[Booking] = set()
        self.beside: set[Booking] = set()
        """those of them that are added to the report"""

    def steps_of_others(self, sequences: int, steps: int) -> int:
        """Return the steps left to the reported sequences without a booking here, as if all sequences were
        alike.
        """
        self.others = max(sequences - self.own[SEQUENCES] + self.held[SEQUENCES], 0)
        return self.others * steps // sequences if self.others else 0

    def count_late(self, booking: Booking, settle_seconds: float) -> None:
        """Count a booking that is older than the last report but was unknown then. Its sequence was taken for
        one without a booking.
        """
        booking.counted_in = None if self.reported_at - booking.booked_at >= settle_seconds else self.young
        if self.others:
            self.reported[STEPS] -= self.reported[STEPS] // self.others
            self.others -= 1


class Reservations:
    """State: ranks by key, and a table [AMOUNTS, rows] of their totals. The table is updated with every
    change, so that a decision only reads it. Columns of ranks that left are reused.
    """

    def __init__(self, *, settle_seconds: float, stale_seconds: float) -> None:
        self._settle = settle_seconds
        self._stale = stale_seconds
        self._ranks: dict[Hashable, _Rank] = {}
        self._free: list[int] = []
        self._load = np.zeros((AMOUNTS, 0), np.int64)
        self._cells = self._load.data
        """the same numbers, for writing one by one"""
        self._first_stale = inf
        """time at which the earliest report stops counting"""
        self._watched = 0
        """number of `watch` calls"""
        self._load_error = np.zeros((AMOUNTS, 0), np.int64)
        """change made by the first report since that call"""

    def reconfigure(self, *, settle_seconds: float, stale_seconds: float) -> None:
        """Apply other settings from the next report on."""
        self._settle, self._stale = settle_seconds, stale_seconds

    def add_rank(self, key: Hashable) -> int:
        """Return the column of a rank, new or existing."""
        known = self._ranks.get(key)
        if known is None:
            if not self._free:
                self._grow()
            known = self._ranks[key] = _Rank(self._free.pop())
            self._load[:, known.row] = self._load_error[:, known.row] = 0
        return known.row

    def remove_rank(self, key: Hashable) -> None:
        """Forget a rank. Its open bookings end."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            for booking in rank.open:
                booking.rank = None
            self._free.append(rank.row)

    def report(
        self, key: Hashable, amounts: Sequence[int], now: float, *, prefill_known: bool = True
    ) -> bool:
        """Apply a rank's report of its load ([AMOUNTS]; STEPS: an estimate for all of its sequences). False
        if the rank is unknown. prefill_known: False for ranks that cannot tell how much of their running
        prompts is left: these count until their first token, as booked.
        """
        rank = self._ranks.get(key)
        if rank is None:
            return False
        rank.since, rank.young = [0] * AMOUNTS, [0] * AMOUNTS
        for booking in list(rank.beside):
            if now - booking.booked_at < self._settle:
                booking.counted_in = rank.young
                _add(rank.young, booking.amounts)
            else:
                booking.counted_in = None
                rank.beside.remove(booking)
        reported = rank.reported = [max(amount, 0) for amount in amounts]
        if not prefill_known:
            booked = rank.own[PREFILL] - rank.young[PREFILL] - rank.held[PREFILL]
            reported[PREFILL] = max(reported[PREFILL], booked)
        reported[STEPS] = rank.steps_of_others(reported[SEQUENCES], reported[STEPS])
        rank.reported_at, rank.stale_at = now, now + self._stale
        self._first_stale = min(self._first_stale, rank.stale_at)
        if rank.watched == self._watched:
            self._write(rank)
        else:
            rank.watched = self._watched
            believed = self._load[:, rank.row].copy()
            self._write(rank)
            self._load_error[:, rank.row] = self._load[:, rank.row] - believed
        return True

    def watch(self) -> None:
        """From now on, record the difference between the first report of each rank and the load believed
        before.
        """
        self._watched += 1
        self._load_error[:] = 0

    def load_error(self, rows: NDArray[np.intp]) -> IntArray:
        """Return that difference, int64 [AMOUNTS, len(rows)]; 0 where no report came since."""
        return self._load_error.take(rows, axis=1)

    def book(self, key: Hashable, amounts: Sequence[int], now: float, *, external: bool = False) -> Booking:
        """Reserve load ([AMOUNTS], none negative) on a rank. now: earlier than the present for a late message
        about another router's booking. external: another data plane sends the request. KeyError if the rank
        is unknown.
        """
        rank = self._ranks[key]
        booking = Booking(rank, list(amounts), now, external)
        if now < rank.reported_at and not external:
            rank.count_late(booking, self._settle)
        if booking.counted_in is not None:
            _add(booking.counted_in, amounts)
            if not external:
                rank.beside.add(booking)
        _add(rank.own, amounts)
        rank.open.add(booking)
        self._write(rank)
        return booking

    def booked(self, key: Hashable) -> tuple[int, ...] | None:
        """Return the sum of a rank's open bookings ([AMOUNTS]), reports left aside. None if the rank is
        unknown.
        """
        rank = self._ranks.get(key)
        return None if rank is None else tuple(rank.own)

    def first_token(self, booking: Booking) -> None:
        """Record a first token: the prompt's tokens leave the queue, and the rank has the request."""
        rank, tokens = booking.rank, booking.amounts[PREFILL]
        if rank is None:
            return
        if tokens:
            self._subtract(booking, rank, (tokens, 0, 0, 0))
        if booking.counted_in is rank.held:
            self._settle_held(booking, rank)

    def emitted(self, booking: Booking, tokens: int) -> None:
        """Record `tokens` new tokens since the last call. A request that emits more than expected has none
        left.
        """
        rank = booking.rank
        tokens = min(tokens, booking.amounts[STEPS])
        if tokens and rank is not None:
            booking.amounts[STEPS] -= tokens
            rank.own[STEPS] -= tokens
            if booking.counted_in is not None:
                booking.counted_in[STEPS] -= tokens
            self._cells[STEPS, rank.row] -= tokens

    def release(self, booking: Booking) -> None:
        """End a booking, for any reason. Idempotent."""
        rank = booking.rank
        if rank is not None:
            rank.open.discard(booking)
            rank.beside.discard(booking)
            booking.rank = None
            self._subtract(booking, rank, tuple(booking.amounts))

    def load(self, rows: NDArray[np.intp], now: float) -> IntArray:
        """Return the load that a request would meet now, int64 [AMOUNTS, len(rows)]. A copy."""
        if now > self._first_stale:
            self._expire(now)
        return self._load.take(rows, axis=1)

    def is_stale(self, key: Hashable, now: float) -> bool:
        """Return True for a rank that has reported its load, but not lately, so that only bookings count."""
        rank = self._ranks.get(key)
        return rank is not None and rank.reported_at > -inf and rank.stale_at < now

    @property
    def open_bookings(self) -> int:
        return sum(len(rank.open) for rank in self._ranks.values())

    def _settle_held(self, booking: Booking, rank: _Rank) -> None:
        """Move an external booking after its first token: the last report may contain it, the next one
        does."""
        _add(rank.held, [-amount for amount in booking.amounts])
        _add(rank.young, booking.amounts)
        booking.counted_in = rank.young
        rank.beside.add(booking)
        self._write(rank)

    def _subtract(self, booking: Booking, rank: _Rank, part: Sequence[int]) -> None:
        prefill, sequences, blocks, steps = part
        less = -prefill, -sequences, -blocks, -steps
        _add(booking.amounts, less)
        _add(rank.own, less)
        if booking.counted_in is not None:
            _add(booking.counted_in, less)
        elif not booking.external:
            reported = rank.reported
            for at in (PREFILL, SEQUENCES, BLOCKS):
                left = reported[at] - part[at]
                reported[at] = left if left > 0 else 0
        self._write(rank)

    def _write(self, rank: _Rank) -> None:
        """Update a rank's column, cell by cell, which is cheaper than a numpy column."""
        cells, row, own = self._cells, rank.row, rank.own
        if rank.stale_at == -inf:
            cells[PREFILL, row], cells[SEQUENCES, row], cells[BLOCKS, row], cells[STEPS, row] = own
            return
        reported, young, since, held = rank.reported, rank.young, rank.since, rank.held
        for at in (PREFILL, SEQUENCES, BLOCKS):
            cells[at, row] = (reported[at] if reported[at] > young[at] else young[at]) + since[at] + held[at]
        cells[STEPS, row] = reported[STEPS] + own[STEPS]

    def _expire(self, now: float) -> None:
        """Drop reports that are too old."""
        for rank in self._ranks.values():
            if -inf < rank.stale_at < now:
                rank.stale_at = -inf
                self._write(rank)
        self._first_stale = min(
            (rank.stale_at for rank in self._ranks.values() if rank.stale_at > -inf), default=inf
        )

    def _grow(self) -> None:
        """Double the columns."""
        old = self._load.shape[1]
        more = max(8, old)
        self._load = np.pad(self._load, ((0, 0), (0, more)))
        self._load_error = np.pad(self._load_error, ((0, 0), (0, more)))
        self._cells = self._load.data
        self._free += range(old + more - 1, old - 1, -1)


def _add(sums: list[int], amounts: Sequence[int]) -> None:
    prefill, sequences, blocks, steps = amounts
    sums[PREFILL] += prefill
    sums[SEQUENCES] += sequences
    sums[BLOCKS] += blocks
    sums[STEPS] += steps
