"""Replication of bookings between routers: bookings of other routers, and the changes of our own that are to
be published. Pure; the time comes in as an argument.

Remote bookings count like our own, so that routers do not all fill the rank that looks empty to each of them.
Delivery is best effort: messages may be lost, duplicated or reordered. A router numbers its messages; a gap
means that its full list must be requested. Its bookings end when it falls silent. A single booking ends when
its router has not named it for a long time.

A booking also carries facts that only its router would know: the rank that got a session, and the blocks that
a rank without KV events will have. Nothing is published while there is no other router.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from fleet.facts.bookings import BookedLoad, ReservationsChanged
from fleet.membership import SILENT_SECONDS
from fleet.requests.routing import ReservationsDescribed
from router.fleet_state.reservations import BLOCKS, PREFILL, STEPS, Booking, Reservations
from router.fleet_state.target_table import RankKey

DOUBTFUL_SECONDS = 1.0
"""A router that is silent for this time is queried."""
MAX_ROUTERS = 256
MAX_BOOKINGS = 200_000
"""Most bookings of all other routers together, some 200 bytes each. Further ones do not count."""
MAX_ENDED = 20_000
"""Most ended bookings remembered while a router's full list is awaited."""
MAX_PER_MESSAGE = 1000
MAX_PREFIX_BLOCKS = 4096
"""Most blocks published of one prompt."""
MAX_ID_LENGTH = 128
"""Most characters of a decision id."""
_ABSURD = 2**40
"""Limit for one booking, which keeps sums far below what a load table can hold."""
_MIN_STEPS = 16
"""Progress by fewer tokens is not published."""


@dataclass(slots=True)
class _Foreign:
    """One booking of another router."""

    booking: Booking
    expires_at: float
    named_in: int
    """number of the last message that named it"""


@dataclass(slots=True)
class _Router:
    """Another router. `bookings`: by decision id, the one that expires next first."""

    publisher_id: int
    heard_at: float
    next: int = 0
    bookings: OrderedDict[str, _Foreign] = field(default_factory=OrderedDict)
    missed: int | None = None
    """messages with lower numbers were missed, and only the full list can replace them; None: none were"""
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """bookings that ended while messages are missing: an older list must not restore them"""
    doubtful: bool = False


class BookingMessage(NamedTuple):
    """Facts published with a new booking besides its load. session: hash, 0: none; prefix: sequence hashes of
    blocks that the rank will have.
    """

    session: int = 0
    prefix: Sequence[int] = ()


NOTHING = BookingMessage()
_Value = TypeVar("_Value")
Learnt = Callable[[RankKey, BookingMessage], None]


class ReplicaEffect(NamedTuple):
    """Effect of a message beyond the bookings."""

    newcomer: bool = False
    incomplete: bool = False
    """the full list of its router must be requested"""


class RemoteBookings:
    """Bookings of other routers, entered into `reservations` until they end. `keep_seconds`: time for which a
    booking counts without being named again. `learnt` is called with the message of each new booking.
    """

    def __init__(self, reservations: Reservations, keep_seconds: float, learnt: Learnt) -> None:
        self._reservations = reservations
        self._learnt = learnt
        self._keep = keep_seconds
        self._routers: dict[int, _Router] = {}
        self.open = 0
        self.expired = 0
        """bookings that expired without an end"""
        self.refused = 0
        """bookings that were invalid, exceeded the limit, or named an unknown rank"""

    @property
    def routers(self) -> tuple[int, ...]:
        return tuple(self._routers)

    def incomplete(self, router: int) -> bool:
        """Return True if a message of this router was missed and its full list has not arrived since."""
        known = self._routers.get(router)
        return known is not None and known.missed is not None

    def booked(self, decision_id: str) -> int | None:
        """Return the router that made this booking, if it is known."""
        return next(
            (router for router, known in self._routers.items() if decision_id in known.bookings), None
        )

    def receive(
        self, publisher_id: int, sequence: int, change: ReservationsChanged, now: float
    ) -> ReplicaEffect:
        """Apply one message of another router. Duplicates have no effect. Neither have late messages, whose
        content is in the list that was requested because of them.
        """
        router = self._routers.get(change.router)
        if router is not None and router.publisher_id != publisher_id:
            self.forget(change.router)  # it restarted and numbers its messages anew
            router = None
        newcomer = router is None
        if router is None:
            if len(self._routers) >= MAX_ROUTERS:
                self.refused += len(change.booked)
                return ReplicaEffect()
            router = self._routers[change.router] = _Router(publisher_id, now)
        router.heard_at, router.doubtful = now, False
        if sequence < router.next:
            return ReplicaEffect()
        missed = sequence > router.next
        if missed:
            router.missed = sequence
        router.next = sequence + 1
        for load in change.booked:
            self._note(router, load, sequence, now)
        for decision_id in change.ended:
            self._end(router, decision_id)
        return ReplicaEffect(newcomer, missed)

    def replace(self, described: ReservationsDescribed, now: float) -> bool:
        """Apply the full list of a router. Return False if it is older than a missed message and must be
        requested again.
        """
        router = self._routers.get(described.router)
        if router is None or router.publisher_id != described.publisher_id:
            return router is None
        router.heard_at, router.doubtful = now, False
        named = {load.id for load in described.booked}
        for decision_id in [
            one
            for one, known in router.bookings.items()
            if one not in named and known.named_in <= described.sequence
        ]:
            self._end(router, decision_id)
        for load in described.booked:
            if load.id not in router.ended:
                self._note(router, load, described.sequence, now)
        router.next = max(router.next, described.sequence + 1)
        if router.missed is not None and described.sequence < router.missed - 1:
            return False
        router.missed = None
        router.ended.clear()
        return True

    def sweep(self, now: float) -> list[int]:
        """End bookings whose router is silent or whose time is over. Return the routers that should be
        queried.
        """
        for name in [
            name for name, router in self._routers.items() if now - router.heard_at > SILENT_SECONDS
        ]:
            self.forget(name)
        for router in self._routers.values():
            while router.bookings and next(iter(router.bookings.values())).expires_at < now:
                self._release(router.bookings.popitem(last=False)[1])
                self.expired += 1
        doubtful = [
            name
            for name, router in self._routers.items()
            if now - router.heard_at > DOUBTFUL_SECONDS and not router.doubtful
        ]
        for name in doubtful:
            router = self._routers[name]
            router.doubtful, router.missed = True, router.next if router.missed is None else router.missed
        return doubtful

    def forget(self, router: int) -> None:
        """End all bookings of a router that is gone."""
        known = self._routers.pop(router, None)
        for foreign in () if known is None else known.bookings.values():
            self._release(foreign)

    def _note(self, router: _Router, load: BookedLoad, sequence: int, now: float) -> None:
        """Record a new or changed booking. The remaining load of a known booking only decreases, since a
        message may be older than the last one.
        """
        foreign = router.bookings.get(load.id)
        if foreign is None:
            booking = self._book(load, now)
            if booking is None:
                self.refused += 1
                return
            router.bookings[load.id] = _Foreign(booking, now + self._keep, sequence)
            return
        if load.prefill_tokens == 0 and not load.held:
            self._reservations.first_token(foreign.booking)
        self._reservations.emitted(
            foreign.booking, max(foreign.booking.amounts[STEPS] - max(load.steps, 0), 0)
        )
        foreign.expires_at, foreign.named_in = now + self._keep, max(foreign.named_in, sequence)
        router.bookings.move_to_end(load.id)

    def _book(self, load: BookedLoad, now: float) -> Booking | None:
        amounts = (load.prefill_tokens, 1, load.blocks, load.steps)
        if (
            min(amounts) < 0
            or max(amounts) >= _ABSURD
            or not load.age_seconds >= 0
            or len(load.id) > MAX_ID_LENGTH
            or self.open >= MAX_BOOKINGS
        ):
            return None
        if not 0 <= load.session < 2**64 or len(load.prefix) % 8 or len(load.prefix) > 8 * MAX_PREFIX_BLOCKS:
            return None
        try:
            booking = self._reservations.book(
                (load.worker_id, load.rank), amounts, now - load.age_seconds, external=load.external
            )
        except KeyError:
            return None  # its engine has not joined here yet, or has left
        if load.external and not load.held:
            self._reservations.first_token(booking)
        self.open += 1
        if load.session or load.prefix:
            self._learnt(
                (load.worker_id, load.rank),
                BookingMessage(load.session, np.frombuffer(load.prefix, "<u8").tolist()),
            )
        return booking

    def _end(self, router: _Router, decision_id: str) -> None:
        foreign = router.bookings.pop(decision_id, None)
        if foreign is not None:
            self._release(foreign)
        if router.missed is not None:
            router.ended[decision_id] = None
            if len(router.ended) > MAX_ENDED:
                router.ended.popitem(last=False)

    def _release(self, foreign: _Foreign) -> None:
        self._reservations.release(foreign.booking)
        self.open -= 1


@dataclass(slots=True)
class _Own:
    """One booking of this router. `steps`: as last published."""

    id: str
    key: RankKey
    booking: Booking
    steps: int
    session: int
    prefix: Sequence[int]
    """kept until it is published"""
    over: bool = False
    """it ended before it was published, and is published for the facts that others should remember"""
    published_at: float | None = None
    """None: not yet"""


class OwnBookings:
    """Bookings of this router, and their unpublished changes. A booking that ends unpublished is never
    published, unless it carries facts to remember.
    """

    def __init__(self, router: int, refresh_seconds: float) -> None:
        """refresh_seconds: interval after which an open booking is named again, so that it does not expire
        elsewhere.
        """
        self.router = router
        self._refresh = refresh_seconds
        self._open: dict[Booking, _Own] = {}
        self._published: OrderedDict[Booking, _Own] = OrderedDict()
        """published bookings, the one published longest ago first"""
        self._changes: dict[Booking, _Own] = {}
        self._ended: dict[str, None] = {}
        self._forgotten: dict[str, str | None] = {}
        self._computed: dict[str, str | None] = {}
        """by decision id, the tenant that released it; None: a caller who may release any"""

    @property
    def has_changes(self) -> bool:
        return bool(self._changes or self._ended or self._forgotten or self._computed)

    def booked(
        self, decision_id: str, key: RankKey, booking: Booking, message: BookingMessage = NOTHING
    ) -> None:
        own = _Own(decision_id, key, booking, booking.amounts[STEPS], message.session, message.prefix)
        self._open[booking] = self._changes[booking] = own

    def first_token(self, booking: Booking) -> None:
        """Record a first token, before or after `Reservations.first_token`. Published with the next
        message."""
        own = self._open.get(booking)
        if own is not None:
            self._changes[booking] = own

    def emitted(self, booking: Booking) -> None:
        """Record progress, after `Reservations.emitted`. Published once it is large enough."""
        own = self._open.get(booking)
        if own is not None and own.steps - booking.amounts[STEPS] >= max(_MIN_STEPS, own.steps // 4):
            self._changes[booking] = own

    def ended(self, booking: Booking) -> None:
        own = self._open.pop(booking, None)
        if own is None:
            return
        if self._published.pop(booking, None) is not None:
            self._changes.pop(booking, None)
            self._ended[own.id] = None
        elif own.session or own.prefix:
            own.over = True
        else:
            self._changes.pop(booking, None)

    def pass_on(self, decision_id: str, *, first_token: bool, tenant: str | None = None) -> None:
        """Notify another router that its booking is over, or that its prompt is computed."""
        waiting = self._computed if first_token else self._forgotten
        if len(waiting) < MAX_ENDED:
            waiting[decision_id] = tenant

    def take(self, now: float) -> ReservationsChanged | None:
        """Return the next message to publish, if any. A large backlog is split over several calls."""
        while self._published and len(self._changes) < MAX_PER_MESSAGE:
            booking, own = next(iter(self._published.items()))
            if own.published_at is not None and now - own.published_at < self._refresh:
                break
            self._published.move_to_end(booking)
            own.published_at, self._changes[booking] = now, own
        if not self.has_changes:
            return None
        booked = []
        for booking in [booking for booking, _ in zip(self._changes, range(MAX_PER_MESSAGE), strict=False)]:
            own = self._changes.pop(booking)
            booked.append(_load(own, now, own.prefix))
            self._note_published(own, now)
        forgotten, computed = _some(self._forgotten), _some(self._computed)
        return ReservationsChanged(
            router=self.router,
            booked=tuple(booked),
            ended=tuple(_some(self._ended)),
            forgotten=tuple(forgotten),
            computed=tuple(computed),
            released_by={one: tenant for one, tenant in (forgotten | computed).items() if tenant is not None},
        )

    def discard_changes(self, now: float) -> None:
        """Treat all changes as published, since there is no other router."""
        for own in self._changes.values():
            self._note_published(own, now)
        for waiting in (self._changes, self._ended, self._forgotten, self._computed):
            waiting.clear()

    def republish_all(self) -> None:
        """Publish every open booking again, for a router that may know nothing."""
        self._changes |= self._open

    def all(self, now: float) -> tuple[BookedLoad, ...]:
        """Return every open booking."""
        return tuple(_load(own, now) for own in self._open.values())

    def _note_published(self, own: _Own, now: float) -> None:
        if own.over:
            self._ended[own.id] = None
            return
        own.published_at, own.steps, own.prefix = now, own.booking.amounts[STEPS], ()
        self._published[own.booking] = own
        self._published.move_to_end(own.booking)


def _load(own: _Own, now: float, prefix: Sequence[int] = ()) -> BookedLoad:
    amounts, (worker_id, rank) = own.booking.amounts, own.key
    return BookedLoad(
        id=own.id,
        worker_id=worker_id,
        rank=rank,
        prefill_tokens=amounts[PREFILL],
        blocks=amounts[BLOCKS],
        steps=amounts[STEPS],
        age_seconds=max(now - own.booking.booked_at, 0.0),
        session=own.session,
        prefix=np.array(prefix, "<u8").tobytes(),
        external=own.booking.external,
        held=own.booking.held,
    )


def _some(waiting: dict[str, _Value]) -> dict[str, _Value]:
    """Remove and return at most MAX_PER_MESSAGE of them."""
    taken = [one for one, _ in zip(waiting, range(MAX_PER_MESSAGE), strict=False)]
    return {one: waiting.pop(one) for one in taken}
