"""Facts that routers share: booked load and released reservations."""

import msgspec

from fleet.event import Event


class BookedLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load that one router booked on one rank for one request."""

    id: str
    """id of the decision"""
    worker_id: int
    rank: int
    prefill_tokens: int
    """prompt tokens still to compute; 0 after the first token"""
    blocks: int
    steps: int
    """tokens still expected"""
    age_seconds: float
    """time since the booking"""
    session: int = 0
    """hash of the conversation, which is now on this rank; 0: not given"""
    prefix: bytes = b""
    """u64 little endian [n]: sequence hashes of the prompt's first blocks, which this rank will have cached.
    Sent once, and only for ranks that do not report their KV cache
    """
    external: bool = False
    """another data plane sends the request"""
    held: bool = False
    """external, before its first token: counted in addition to the load that its rank reports"""


class ReservationsChanged(Event, frozen=True, kw_only=True):
    """Bookings that one router made, updated or released since its last message. Best effort, coalesced, not
    stored. Readers expire bookings. They drop all bookings of a router that stops sending or returns as
    another `router`.
    """

    router: int
    """random u64 per router process. A message without changes is the router's heartbeat"""
    booked: tuple[BookedLoad, ...] = ()
    """new and changed bookings"""
    ended: tuple[str, ...] = ()
    """decision ids of finished bookings"""
    forgotten: tuple[str, ...] = ()
    """decision ids booked by another router that shall end them (this router received their `RouteReleased`)
    """
    computed: tuple[str, ...] = ()
    """decision ids booked by another router, whose prompts are computed"""
    released_by: dict[str, str] = msgspec.field(default_factory=dict)
    """by decision id, forgotten or computed: the tenant that released it. It ends only that tenant's own
    bookings. Ids not listed were released by a caller that may end any booking
    """
