"""Load reserved for requests that another data plane forwards, until it is released or expires. Pure; the
time comes in as an argument.

Only the decision's id of such a request is known outside, so bookings are stored by decision id.
"""

from collections import OrderedDict
from typing import Literal, NamedTuple

import msgspec

from router.fleet_state.reservations import Booking
from router.scheduling.decision_record import DecisionRecord


class ReservedRecord(DecisionRecord, frozen=True, kw_only=True):
    """Answer of `POST /v1/route/reserve`: the decision, and its use."""

    url: str
    """base URL of the chosen rank"""
    expires_seconds: float
    """the reservation expires after this time without a message"""
    cache_salt: str | None = None
    """to be sent to that rank as `cache_salt`; None: send nothing"""


class ReleaseRequest(msgspec.Struct, frozen=True):
    """The body of `POST /v1/route/release`."""

    id: str
    """of the decision"""
    first_token: bool = False
    """true: the prompt is computed and the request continues; false: the request is over"""


class ReleaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a release."""

    id: str
    outcome: Literal["ended", "noted", "passed_on", "unknown"]
    """ended: the load is released; noted: the prompt has left the queue; passed_on: another router reserved
    the request (for a tenant's key: may have) and is notified; unknown: never reserved, already released or
    expired, which is no error
    """


def waits(query: bytes) -> bool | None:
    """Return True if a query string requests to wait for a place; None if it contains anything else."""
    return {b"": False, b"wait=false": False, b"wait=true": True}.get(query)


def reserved(record: DecisionRecord, url: str, expires_seconds: float, cache_salt: str) -> ReservedRecord:
    return ReservedRecord(
        **msgspec.structs.asdict(record),
        url=url,
        expires_seconds=expires_seconds,
        cache_salt=cache_salt or None,
    )


class _Held(NamedTuple):
    booking: Booking
    expires_at: float
    tenant: str

    def visible_to(self, tenant: str | None) -> bool:
        return tenant is None or self.tenant == tenant


class ExternalReservations:
    """Bookings by decision id. `seconds`: time until one expires without a message. A tenant (None: any)
    finds only its own.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.released = 0
        self.expired = 0
        """number of reservations that expired without a release"""
        self._held: OrderedDict[str, _Held] = OrderedDict()
        """the one that expires next comes first"""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, decision_id: str, booking: Booking, now: float, tenant: str = "") -> None:
        self._held[decision_id] = _Held(booking, now + self.seconds, tenant)

    def renew(self, decision_id: str, now: float, tenant: str | None = None) -> Booking | None:
        """Renew a reservation for the full time. Return None if it is unknown or over."""
        held = self._held.get(decision_id)
        if held is None or not held.visible_to(tenant):
            return None
        self._held[decision_id] = held._replace(expires_at=now + self.seconds)
        self._held.move_to_end(decision_id)
        return held.booking

    def end(self, decision_id: str, tenant: str | None = None) -> Booking | None:
        """Remove a reservation. Return None if it is unknown or over."""
        held = self._held.get(decision_id)
        if held is None or not held.visible_to(tenant):
            return None
        del self._held[decision_id]
        self.released += 1
        return held.booking

    def due(self, now: float) -> list[Booking]:
        """Remove and return the expired bookings."""
        due = []
        while self._held and next(iter(self._held.values())).expires_at <= now:
            due.append(self._held.popitem(last=False)[1].booking)
        self.expired += len(due)
        return due
