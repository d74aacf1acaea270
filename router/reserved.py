"""Load that is held for requests which somebody else forwards, until it is released or its time is up. Pure; time comes in as an argument.

Only the decision's id is known of such a request from outside, so bookings are kept by it.
"""

from collections import OrderedDict
from typing import NamedTuple

from router.reservations import Booking


class _Held(NamedTuple):
    booking: Booking
    expires_at: float


class Reserved:
    """Bookings by decision id. `seconds`: how long one is held without a word."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.released = 0
        self.expired = 0
        """those that nobody released"""
        self._held: OrderedDict[str, _Held] = OrderedDict()
        """the one that expires next first"""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, decision_id: str, booking: Booking, now: float) -> None:
        self._held[decision_id] = _Held(booking, now + self.seconds)

    def heard(self, decision_id: str, now: float) -> Booking | None:
        """A word about one: it is held as long again from now on. None when it is unknown or over."""
        held = self._held.get(decision_id)
        if held is None:
            return None
        self._held[decision_id] = _Held(held.booking, now + self.seconds)
        self._held.move_to_end(decision_id)
        return held.booking

    def end(self, decision_id: str) -> Booking | None:
        """It is held no more. None when it is unknown or over."""
        held = self._held.pop(decision_id, None)
        self.released += held is not None
        return None if held is None else held.booking

    def due(self, now: float) -> list[Booking]:
        """Those whose time is up; they are held no more."""
        due = []
        while self._held and next(iter(self._held.values())).expires_at <= now:
            due.append(self._held.popitem(last=False)[1].booking)
        self.expired += len(due)
        return due
