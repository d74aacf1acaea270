"""What other routers have promised to ranks, and what they are to be told of our own promises. Pure; time comes in as an argument.

Bookings of others are counted as ours are, so that routers do not all fill the rank that looks empty to each of them. Nothing of
it is promised: messages may be lost, doubled or overtaken. A router numbers its messages; a jump in the numbers says that its
whole list must be asked for. What it booked ends with it: when it falls silent, or when it has not named a booking for long.

With a booking comes what else its router alone would know: where a conversation went, and which blocks a rank that does not report
its KV cache will have. While there is no other router nothing is told.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from fleet.events import BookedLoad, ReservationsChanged, ReservationsDescribed
from router.fleet_state.reservations import BLOCKS, PREFILL, STEPS, Booking, Reservations
from router.fleet_state.target_table import RankKey

SILENT_SECONDS = 3.0
"""A router that says nothing for so long is gone, and its bookings with it."""
DOUBTFUL_SECONDS = 1.0
"""A router that says nothing for so long is asked."""
MOST_ROUTERS = 256
MOST_BOOKINGS = 200_000
"""of all other routers together; what exceeds them is not counted, and named bookings are some 200 bytes each"""
MOST_ENDED = 20_000
"""Endings remembered while a router's whole list is awaited."""
MOST_PER_MESSAGE = 1000
MOST_PREFIX_BLOCKS = 4096
"""told of one prompt"""
LONGEST_ID = 128
"""characters"""
_ABSURD = 2**40
"""of one booking; so many as are counted stay far from what a load table can hold"""
_FEWEST_STEPS = 16
"""Progress by fewer tokens is not told."""


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
    """messages with lower numbers were missed, and only the whole list can tell what was in them; None: none were"""
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """what ended while something is missed: a list made before must not bring it back"""
    doubtful: bool = False


class BookingMessage(NamedTuple):
    """What is told with a new booking, beyond its load. session: hash, 0: nobody said; prefix: sequence hashes of blocks that the rank will have."""

    session: int = 0
    prefix: Sequence[int] = ()


NOTHING = BookingMessage()
_Value = TypeVar("_Value")
Learnt = Callable[[RankKey, BookingMessage], None]


class ReplicaEffect(NamedTuple):
    """What a message changes beyond the bookings."""

    newcomer: bool = False
    incomplete: bool = False
    """its router must be asked for its whole list"""


class RemoteBookings:
    """What others booked, entered into `reservations` until it ends. `keep_seconds`: for so long a booking counts unnamed. `learnt` is
    called with what is told of a new one."""

    def __init__(self, reservations: Reservations, keep_seconds: float, learnt: Learnt) -> None:
        self._reservations = reservations
        self._learnt = learnt
        self._keep = keep_seconds
        self._routers: dict[int, _Router] = {}
        self.open = 0
        self.expired = 0
        """bookings that nobody ended"""
        self.refused = 0
        """bookings that made no sense, or found no room or no such rank"""

    @property
    def routers(self) -> tuple[int, ...]:
        return tuple(self._routers)

    def incomplete(self, router: int) -> bool:
        """Whether something this router said was missed, and its whole list has not come since."""
        known = self._routers.get(router)
        return known is not None and known.missed is not None

    def booked(self, decision_id: str) -> int | None:
        """The router that booked this, as far as is known."""
        return next((router for router, known in self._routers.items() if decision_id in known.bookings), None)

    def hear(self, publisher_id: int, sequence: int, said: ReservationsChanged, now: float) -> ReplicaEffect:
        """One message of another router. Repeated ones change nothing; nor do late ones, whose content is in the list they made us ask for."""
        router = self._routers.get(said.router)
        if router is not None and router.publisher_id != publisher_id:
            self.forget(said.router)  # it counts anew
            router = None
        newcomer = router is None
        if router is None:
            if len(self._routers) >= MOST_ROUTERS:
                self.refused += len(said.booked)
                return ReplicaEffect()
            router = self._routers[said.router] = _Router(publisher_id, now)
        router.heard_at, router.doubtful = now, False
        if sequence < router.next:
            return ReplicaEffect()
        missed = sequence > router.next
        if missed:
            router.missed = sequence
        router.next = sequence + 1
        for load in said.booked:
            self._note(router, load, sequence, now)
        for decision_id in said.ended:
            self._end(router, decision_id)
        return ReplicaEffect(newcomer, missed)

    def replace(self, described: ReservationsDescribed, now: float) -> bool:
        """The whole list of a router. False when it is older than what was missed, and must be asked for again."""
        router = self._routers.get(described.router)
        if router is None or router.publisher_id != described.publisher_id:
            return router is None
        router.heard_at, router.doubtful = now, False
        named = {load.id for load in described.booked}
        for decision_id in [one for one, known in router.bookings.items() if one not in named and known.named_in <= described.sequence]:
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
        """End what has outlived its router or its time. Returns the routers that should be asked whether they are there."""
        for name in [name for name, router in self._routers.items() if now - router.heard_at > SILENT_SECONDS]:
            self.forget(name)
        for router in self._routers.values():
            while router.bookings and next(iter(router.bookings.values())).expires_at < now:
                self._release(router.bookings.popitem(last=False)[1])
                self.expired += 1
        doubtful = [name for name, router in self._routers.items() if now - router.heard_at > DOUBTFUL_SECONDS and not router.doubtful]
        for name in doubtful:
            router = self._routers[name]
            router.doubtful, router.missed = True, router.next if router.missed is None else router.missed
        return doubtful

    def forget(self, router: int) -> None:
        """A router is gone: all it booked ends."""
        known = self._routers.pop(router, None)
        for foreign in () if known is None else known.bookings.values():
            self._release(foreign)

    def _note(self, router: _Router, load: BookedLoad, sequence: int, now: float) -> None:
        """A booking, new or changed. What is known of it only ever gets less: a message may be older than what was heard since."""
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
        self._reservations.emitted(foreign.booking, max(foreign.booking.amounts[STEPS] - max(load.steps, 0), 0))
        foreign.expires_at, foreign.named_in = now + self._keep, max(foreign.named_in, sequence)
        router.bookings.move_to_end(load.id)

    def _book(self, load: BookedLoad, now: float) -> Booking | None:
        amounts = (load.prefill_tokens, 1, load.blocks, load.steps)
        if min(amounts) < 0 or max(amounts) >= _ABSURD or not load.age_seconds >= 0 or len(load.id) > LONGEST_ID or self.open >= MOST_BOOKINGS:
            return None
        if not 0 <= load.session < 2**64 or len(load.prefix) % 8 or len(load.prefix) > 8 * MOST_PREFIX_BLOCKS:
            return None
        try:
            booking = self._reservations.book((load.worker_id, load.rank), amounts, now - load.age_seconds, external=load.external)
        except KeyError:
            return None  # its engine has not introduced itself here yet, or has left
        if load.external and not load.held:
            self._reservations.first_token(booking)
        self.open += 1
        if load.session or load.prefix:
            self._learnt((load.worker_id, load.rank), BookingMessage(load.session, np.frombuffer(load.prefix, "<u8").tolist()))
        return booking

    def _end(self, router: _Router, decision_id: str) -> None:
        foreign = router.bookings.pop(decision_id, None)
        if foreign is not None:
            self._release(foreign)
        if router.missed is not None:
            router.ended[decision_id] = None
            if len(router.ended) > MOST_ENDED:
                router.ended.popitem(last=False)

    def _release(self, foreign: _Foreign) -> None:
        self._reservations.release(foreign.booking)
        self.open -= 1


@dataclass(slots=True)
class _Own:
    """One booking of this router. `steps`: as told last."""

    id: str
    key: RankKey
    booking: Booking
    steps: int
    session: int
    prefix: Sequence[int]
    """until it was told"""
    over: bool = False
    """it ended before it was told, and is told for what others should remember of it"""
    told_at: float | None = None
    """None: never yet"""


class OwnBookings:
    """What this router has booked, and what of it others have not been told yet. A booking that ends untold is never told, unless there is
    something to remember of it."""

    def __init__(self, router: int, refresh_seconds: float) -> None:
        """refresh_seconds: an open booking is named again after so long, so that it does not expire elsewhere."""
        self.router = router
        self._refresh = refresh_seconds
        self._open: dict[Booking, _Own] = {}
        self._told: OrderedDict[Booking, _Own] = OrderedDict()
        """those that were told, longest ago first"""
        self._news: dict[Booking, _Own] = {}
        self._ended: dict[str, None] = {}
        self._forgotten: dict[str, str | None] = {}
        self._computed: dict[str, str | None] = {}
        """by decision id, the tenant that released it; None: a caller who may release any"""

    @property
    def has_news(self) -> bool:
        return bool(self._news or self._ended or self._forgotten or self._computed)

    def booked(self, decision_id: str, key: RankKey, booking: Booking, word: BookingMessage = NOTHING) -> None:
        own = _Own(decision_id, key, booking, booking.amounts[STEPS], word.session, word.prefix)
        self._open[booking] = self._news[booking] = own

    def first_token(self, booking: Booking) -> None:
        """Before or after `Reservations.first_token`; told with the next message."""
        own = self._open.get(booking)
        if own is not None:
            self._news[booking] = own

    def emitted(self, booking: Booking) -> None:
        """After `Reservations.emitted`; told when it has become much."""
        own = self._open.get(booking)
        if own is not None and own.steps - booking.amounts[STEPS] >= max(_FEWEST_STEPS, own.steps // 4):
            self._news[booking] = own

    def ended(self, booking: Booking) -> None:
        own = self._open.pop(booking, None)
        if own is None:
            return
        if self._told.pop(booking, None) is not None:
            self._news.pop(booking, None)
            self._ended[own.id] = None
        elif own.session or own.prefix:
            own.over = True
        else:
            self._news.pop(booking, None)

    def pass_on(self, decision_id: str, *, first_token: bool, tenant: str | None = None) -> None:
        """Something another router booked is over, or its prompt is computed: that router is to be told."""
        waiting = self._computed if first_token else self._forgotten
        if len(waiting) < MOST_ENDED:
            waiting[decision_id] = tenant

    def take(self, now: float) -> ReservationsChanged | None:
        """What is to be told now, if anything; the rest, when there is very much, with the next call."""
        while self._told and len(self._news) < MOST_PER_MESSAGE:
            booking, own = next(iter(self._told.items()))
            if own.told_at is not None and now - own.told_at < self._refresh:
                break
            self._told.move_to_end(booking)
            own.told_at, self._news[booking] = now, own
        if not self.has_news:
            return None
        booked = []
        for booking in [booking for booking, _ in zip(self._news, range(MOST_PER_MESSAGE), strict=False)]:
            own = self._news.pop(booking)
            booked.append(_load(own, now, own.prefix))
            self._note_told(own, now)
        forgotten, computed = _some(self._forgotten), _some(self._computed)
        return ReservationsChanged(
            router=self.router,
            booked=tuple(booked),
            ended=tuple(_some(self._ended)),
            forgotten=tuple(forgotten),
            computed=tuple(computed),
            released_by={one: tenant for one, tenant in (forgotten | computed).items() if tenant is not None},
        )

    def hush(self, now: float) -> None:
        """There is nobody to tell: what is new counts as told."""
        for own in self._news.values():
            self._note_told(own, now)
        for waiting in (self._news, self._ended, self._forgotten, self._computed):
            waiting.clear()

    def tell_all(self) -> None:
        """Somebody is there who may know nothing: every open booking is told again."""
        self._news |= self._open

    def all(self, now: float) -> tuple[BookedLoad, ...]:
        """Every open booking."""
        return tuple(_load(own, now) for own in self._open.values())

    def _note_told(self, own: _Own, now: float) -> None:
        if own.over:
            self._ended[own.id] = None
            return
        own.told_at, own.steps, own.prefix = now, own.booking.amounts[STEPS], ()
        self._told[own.booking] = own
        self._told.move_to_end(own.booking)


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
    """At most MOST_PER_MESSAGE of them, which are removed."""
    taken = [one for one, _ in zip(waiting, range(MOST_PER_MESSAGE), strict=False)]
    return {one: waiting.pop(one) for one in taken}
