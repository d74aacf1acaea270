"""Load that is held for requests which somebody else forwards, until it is released or its time is up. Pure; time comes in as an argument.

Only the decision's id is known of such a request from outside, so bookings are kept by it.
"""

from collections import OrderedDict
from typing import Literal, NamedTuple

import msgspec

from router.fleet_state.reservations import Booking
from router.scheduling.decision_record import DecisionRecord


class ReservedRecord(DecisionRecord, frozen=True, kw_only=True):
    """What `POST /v1/route/reserve` answers: the decision, and what to do with it."""

    url: str
    """base URL of the chosen rank"""
    expires_seconds: float
    """the reservation ends by itself after so long without a word"""
    cache_salt: str | None = None
    """to be sent to that rank as `cache_salt`; None: nothing is to be sent"""


class ReleaseRequest(msgspec.Struct, frozen=True):
    """The body of `POST /v1/route/release`."""

    id: str
    """of the decision"""
    first_token: bool = False
    """true: the prompt is computed and the request goes on; false: it is over"""


class ReleaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a release."""

    id: str
    outcome: Literal["ended", "noted", "passed_on", "unknown"]
    """ended: the load is free again; noted: its prompt waits no more; passed_on: another router reserved it (for a tenant's key: may
    have), and is told; unknown: never reserved, released before, or expired, which is no error"""


def waits(query: bytes) -> bool | None:
    """Whether a query string asks to wait for a place; None: it asks for something else."""
    return {b"": False, b"wait=false": False, b"wait=true": True}.get(query)


def reserved(record: DecisionRecord, url: str, expires_seconds: float, cache_salt: str) -> ReservedRecord:
    return ReservedRecord(**msgspec.structs.asdict(record), url=url, expires_seconds=expires_seconds, cache_salt=cache_salt or None)


class _Held(NamedTuple):
    booking: Booking
    expires_at: float
    tenant: str

    def visible_to(self, tenant: str | None) -> bool:
        return tenant is None or self.tenant == tenant


class ExternalReservations:
    """Bookings by decision id. `seconds`: how long one is held without a word. A tenant (None: any) finds its own alone."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.released = 0
        self.expired = 0
        """those that nobody released"""
        self._held: OrderedDict[str, _Held] = OrderedDict()
        """the one that expires next first"""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, decision_id: str, booking: Booking, now: float, tenant: str = "") -> None:
        self._held[decision_id] = _Held(booking, now + self.seconds, tenant)

    def heard(self, decision_id: str, now: float, tenant: str | None = None) -> Booking | None:
        """A word about one: it is held as long again from now on. None when it is unknown or over."""
        held = self._held.get(decision_id)
        if held is None or not held.visible_to(tenant):
            return None
        self._held[decision_id] = held._replace(expires_at=now + self.seconds)
        self._held.move_to_end(decision_id)
        return held.booking

    def end(self, decision_id: str, tenant: str | None = None) -> Booking | None:
        """It is held no more. None when it is unknown or over."""
        held = self._held.get(decision_id)
        if held is None or not held.visible_to(tenant):
            return None
        del self._held[decision_id]
        self.released += 1
        return held.booking

    def due(self, now: float) -> list[Booking]:
        """Those whose time is up; they are held no more."""
        due = []
        while self._held and next(iter(self._held.values())).expires_at <= now:
            due.append(self._held.popitem(last=False)[1].booking)
        self.expired += len(due)
        return due
