"""Requests to a router: choose a rank, release a reservation, describe decisions and reservations."""

from fleet.event import Event
from fleet.facts.bookings import BookedLoad


class RouteRequested(Event, frozen=True, kw_only=True):
    """Request to one router: decide. For data planes that forward requests on their own. HTTP equivalent:
    `POST /v1/route[/reserve]`.
    """

    body: bytes
    """a chat or completions request as JSON"""
    request_id: str = ""
    session: str = ""
    tenant: str = ""
    priority: str = ""
    reserve: bool = False
    """book the load on the chosen rank until release or expiry"""
    wait: bool = False
    """with `reserve`: wait for a free place if every rank is saturated. The caller's request timeout must
    allow for the wait
    """
    without: tuple[str, ...] = ()
    """decide without these cost terms; only without `reserve`"""
    gone: tuple[str, ...] = ()
    """decide without these ranks ("engine/rank") or engines; only without `reserve`"""
    traceparent: str = ""
    """W3C trace context of the caller's span"""


class RouteDecided(Event, frozen=True, kw_only=True):
    """Answer to `RouteRequested`."""

    record: bytes
    """the decision as JSON, as returned by `GET /v1/decisions/{id}`"""
    url: str
    """base URL of the chosen rank"""
    expires_seconds: float | None = None
    """the reservation expires after this time; None: nothing was reserved"""
    cache_salt: str | None = None
    """`cache_salt` to send to that rank; None: send none"""


class RouteReleased(Event, frozen=True, kw_only=True):
    """Request to one router: a reserved request has computed its prompt (`first_token`) or has ended.
    Answered with the same event. An unknown or ended reservation is not an error.
    """

    id: str
    """id of the decision"""
    first_token: bool = False
    """True: the prompt is computed and the request continues; False: the request has ended"""


class DescribeReservations(Event, frozen=True, kw_only=True):
    """Request to one router for all its bookings."""

    router: int
    """router that requests"""


class ReservationsDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeReservations`: all bookings of one router, including message `sequence` of
    `publisher_id`.
    """

    router: int
    publisher_id: int
    sequence: int
    """last ReservationsChanged included; -1: none was sent yet"""
    booked: tuple[BookedLoad, ...]


class DescribeDecision(Event, frozen=True, kw_only=True):
    """Request to the router that made a decision: return it. `RequestRefused` if it is not among the last
    decisions.
    """

    id: str
    tenant: str | None = None
    """return only decisions of this tenant and refuse others as unknown; None: of any tenant"""


class DecisionDescribed(Event, frozen=True, kw_only=True):
    """Answer to `DescribeDecision`."""

    record: bytes
    """JSON"""
