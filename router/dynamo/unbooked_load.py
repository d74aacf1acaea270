"""Load that routers elsewhere, or frontends, put on Dynamo's workers. Pure; the time comes in as an argument.

Workers report the KV blocks that their running requests hold (`kv_used_blocks` on `kv_metrics`), but no
requests. Blocks beyond the bookings that this router knows, its own and those of routers on its bus, are held
by requests of others. They are booked in one piece for each rank, as that many requests of usual size.

The estimate errs to the low side: requests with a common prefix share blocks, but are booked with all of
theirs.
"""

from typing import NamedTuple

from router.fleet_state.reservations import BLOCKS, SEQUENCES, Booking, Reservations
from router.fleet_state.target_table import RankKey


class UsualRequest(NamedTuple):
    """Size of a request of which only blocks are known."""

    tokens: int
    """prompt and answer together, unless requests of this router tell"""
    steps_left: int
    """tokens that it is still expected to emit"""
    at_most: int
    """of them on one rank: an estimate alone must not make a rank count as full"""


class _Report(NamedTuple):
    used_blocks: int
    at: float
    block_size: int


class UnbookedLoad:
    """State: the last report of each rank, and the booking made of it."""

    def __init__(self, reservations: Reservations, stale_seconds: float) -> None:
        """stale_seconds: a report counts this long. Ranks report changes, so a busy one reports often."""
        self._reservations = reservations
        self._stale = stale_seconds
        self._reports: dict[RankKey, _Report] = {}
        self._booked: dict[RankKey, Booking] = {}

    def reported(self, rank: RankKey, used_blocks: int, block_size: int, now: float) -> None:
        """Record a report. It counts from the next `refresh` on."""
        self._reports[rank] = _Report(used_blocks, now, block_size)

    def refresh(self, usual: UsualRequest, now: float) -> None:
        """Compare the reports with the bookings, and book the difference."""
        for rank, report in list(self._reports.items()):
            standing = self._booked.pop(rank, None)
            if standing is not None:
                self._reservations.release(standing)
            known = self._reservations.booked(rank)
            if known is None or now - report.at > self._stale:
                del self._reports[rank]
                continue
            blocks = report.used_blocks - known[BLOCKS]
            if known[SEQUENCES]:
                size = known[BLOCKS] / known[SEQUENCES]
            else:
                size = usual.tokens / report.block_size
            requests = min(round(blocks / max(size, 1.0)), usual.at_most)
            if requests > 0:
                amounts = 0, requests, blocks, requests * usual.steps_left
                self._booked[rank] = self._reservations.book(rank, amounts, now)
