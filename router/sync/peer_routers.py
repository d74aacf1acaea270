"""Other routers: publish the bookings made here, replicate theirs, and request missed messages.

Every router publishes at least every half second and receives its own messages. So it also detects a bus that
delivers nothing.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack

from bus import Bus, BusError, BusTimeout, Message, Subscription
from bus.keyed_queue import RetryQueue
from fleet.facts.bookings import ReservationsChanged
from fleet.requests.routing import (
    DecisionDescribed,
    DescribeDecision,
    DescribeReservations,
    ReservationsDescribed,
)
from router.config import RouterConfig
from router.context import RouterContext
from router.fleet_state.booking_replication import (
    MAX_PREFIX_BLOCKS,
    MAX_ROUTERS,
    BookingMessage,
    Learnt,
    OwnBookings,
    RemoteBookings,
)
from router.fleet_state.reservations import Booking
from router.scheduling.booking_observer import BookedRequest, BookingObserver

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
ECHO_SECONDS = 1.5
"""Time without its own message after which a router considers the bus silent."""
_ANSWER_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
_COALESCE_SECONDS = 0.005
"""Minimum interval between two messages of bookings to other routers."""
MEMBERS_SECONDS = 2.0
"""Time after which the replication starts even if the ranks are not known yet."""
MEETING_SECONDS = 0.25
"""Time for existing routers to answer a new router's first message; later answers are not waited for."""

Passed = Callable[[str, bool, str | None], object]
"""Callback for a release of a local booking that reached another router. Arguments: decision id; true when
its prompt is computed (else it is over); and the tenant that released it (None: a caller who may release
any).
"""


class PeerRouters(BookingObserver):
    """Replication between routers. `run` publishes and listens until cancelled; the other methods are
    synchronous and fast.

    With `replicas` off bookings are neither published nor counted; releases are still forwarded.
    """

    def __init__(
        self,
        bus: Bus,
        context: RouterContext,
        config: RouterConfig,
        learnt: Learnt,
        passed: Passed,
        freed: Callable[[], None],
        members_known: asyncio.Event,
    ) -> None:
        """learnt: called with session and prefix of others' bookings. freed: called when a booking of another
        router ends. members_known: set once the ranks that bookings refer to are known.
        """
        self.router = secrets.randbits(64)
        """identity of this process among routers"""
        self._bus = bus
        self._subjects = context.subjects
        self._replicas = config.replicate_bookings
        self._metrics = context.metrics
        self._clock = context.clock
        self._passed = passed
        self._freed = freed
        self._members_known = members_known
        self._own = OwnBookings(self.router, config.reservation_seconds / 2)
        self._remote = RemoteBookings(context.scheduler.reservations, config.reservation_seconds, learnt)
        self._publisher = bus.publisher(self._subjects.reservations)
        self._due: RetryQueue[int] = RetryQueue(self._ask, MAX_ROUTERS, _PAUSE_SECONDS, _PAUSE_SECONDS)
        self._news = asyncio.Event()
        self._news.set()  # the first message announces this router
        self._echo: float | None = None
        """time of the last own message received, seconds on the loop's clock"""
        self.synchronized = asyncio.Event()
        """set once every router found at the start has described its bookings, or the wait for it is over"""

    # Local events

    def booked(self, booked: BookedRequest) -> None:
        if not self._replicas:
            return
        decision, target = booked.decision, booked.decision.target
        send_prefix = bool(self._remote.routers) and not target.engine.capabilities.kv_events
        prefix = booked.prompt.chained(target.engine.block_size)[:MAX_PREFIX_BLOCKS] if send_prefix else ()
        message = BookingMessage(decision.ask.keys.session, prefix)
        self._own.booked(decision.id, target.key, booked.booking, message)
        self._changed()

    def first_token(self, booking: Booking, now: float) -> None:
        self.prompt_computed(booking)

    def prompt_computed(self, booking: Booking) -> None:
        self._own.first_token(booking)
        self._changed()

    def emitted(self, booking: Booking, tokens: int, now: float) -> None:
        self._own.emitted(booking)
        self._changed()

    def released(self, booking: Booking) -> None:
        self._own.ended(booking)
        self._changed()

    def booked_elsewhere(self, decision_id: str) -> bool:
        """True when another router is known to have made this booking."""
        return self._remote.booked(decision_id) is not None

    def pass_on(self, decision_id: str, *, first_token: bool, tenant: str | None = None) -> None:
        """Forward a release to the router that made the booking: its prompt is computed, or it is over.
        tenant: that released it (None: a caller who may release any).
        """
        self._own.pass_on(decision_id, first_token=first_token, tenant=tenant)
        self._changed()

    def sweep(self) -> None:
        """End bookings that have outlived their router or their time. Call it a few times a second."""
        for router in self._remote.sweep(self._clock()):
            self._due.ask(router)
        self._metrics.peers(
            len(self._remote.routers), self._remote.open, self._remote.expired, self._remote.refused
        )

    @property
    def bus_silent(self) -> bool:
        """True when the bus does not deliver even this router's own messages, so that silence of others
        proves nothing.
        """
        if not self._bus.connected:
            return True
        return self._echo is None or asyncio.get_running_loop().time() - self._echo > ECHO_SECONDS

    async def decision(self, tag: str, decision_id: str, tenant: str | None = None) -> bytes:
        """Return a decision of the router whose ids begin with `tag`, as JSON; tenant: only that tenant's
        (None: any). BusError when the router does not answer, or no longer keeps the decision.
        """
        try:
            answer = await self._bus.request(
                self._subjects.decision(tag), DescribeDecision(id=decision_id, tenant=tenant), _ANSWER_SECONDS
            )
        except BusTimeout as error:
            raise BusError(f"it does not answer within {_ANSWER_SECONDS:g} s; it may be gone") from error
        if not isinstance(answer, DecisionDescribed):
            raise BusError(f"it answered with a {type(answer).__name__}")
        return answer.record

    # The background work

    async def run(self) -> None:
        """Publish and listen until cancelled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEMBERS_SECONDS):
                await self._members_known.wait()
        subjects = self._subjects
        async with AsyncExitStack() as stack:
            changes = await stack.enter_async_context(self._bus.subscribe(subjects.reservations))
            await stack.enter_async_context(
                self._bus.serve(subjects.describe_reservations(self.router), self._describe)
            )
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(self._publish(), name="publishes the bookings made here")
            tasks.create_task(self._listen(changes), name="listens to other routers")
            tasks.create_task(self._wait_for_peers(), name="waits for the existing routers")
            tasks.create_task(self._due.run(), name="requests missed messages of routers")

    async def _publish(self) -> None:
        """Publish changes at once, but at most once per _COALESCE_SECONDS; without changes, publish a
        heartbeat.
        """
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                pass  # no changes: a heartbeat is due
            self._news.clear()
            if self._no_peers:
                self._own.discard_changes(self._clock())
            try:
                await self._publisher.publish(
                    self._own.take(self._clock()) or ReservationsChanged(router=self.router)
                )
            except BusError as error:
                log.warning("the bookings made here could not be published: %s", error)
            if self._own.has_changes:
                self._news.set()
            await asyncio.sleep(_COALESCE_SECONDS)

    async def _listen(self, changes: Subscription) -> None:
        async for received in changes:
            message = received.message
            if not isinstance(message, ReservationsChanged):
                self._metrics.bus_refused.inc()
            elif message.router == self.router:
                self._echo = asyncio.get_running_loop().time()
            else:
                self._apply(received.publisher_id, received.sequence, message)

    def _apply(self, publisher_id: int, sequence: int, change: ReservationsChanged) -> None:
        for decision_id in change.computed:
            self._passed(decision_id, True, change.released_by.get(decision_id))
        for decision_id in change.forgotten:
            self._passed(decision_id, False, change.released_by.get(decision_id))
        if not self._replicas:
            return
        outcome = self._remote.receive(publisher_id, sequence, change, self._clock())
        if change.ended:
            self._freed()
        if outcome.newcomer:
            # A new router needs the present state at once; without peers nothing was published.
            self._own.republish_all()
            self._news.set()
        if outcome.incomplete:
            self._metrics.peer_gaps.inc()
            self._due.ask(change.router)

    async def _ask(self, router: int) -> bool:
        """Request the bookings of a router. True when they are complete, or the router is gone."""
        try:
            answer = await self._bus.request(
                self._subjects.describe_reservations(router),
                DescribeReservations(router=self.router),
                _ANSWER_SECONDS,
            )
        except BusError as error:
            log.debug("router %016x does not describe its bookings: %s", router, error)
            complete = False
        else:
            complete = (
                isinstance(answer, ReservationsDescribed)
                and answer.router == router
                and self._remote.replace(answer, self._clock())
            )
        return complete or router not in self._remote.routers

    async def _wait_for_peers(self) -> None:
        await asyncio.sleep(MEETING_SECONDS)
        while any(self._remote.incomplete(router) for router in self._remote.routers):  # noqa: ASYNC110 ends with the answers, or when routers expire
            await asyncio.sleep(_PAUSE_SECONDS / 4)
        self.synchronized.set()

    async def _describe(self, _: Message) -> Message:
        own = self._publisher
        return ReservationsDescribed(
            router=self.router,
            publisher_id=own.publisher_id,
            sequence=own.sequence - 1,
            booked=self._own.all(self._clock()),
        )

    @property
    def _no_peers(self) -> bool:
        """True when no other router is known to listen."""
        return self._replicas and not self._remote.routers

    def _changed(self) -> None:
        """Wake the publisher if there are changes, and routers that listen."""
        if self._own.has_changes and not self._no_peers:
            self._news.set()
