"""The other routers: tells them what is booked here, counts what they book, and asks them for what was missed.

Every router says something at least every half second, and hears itself: so it also knows whether the bus carries anything at all.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack

from bus import Bus, BusError, BusTimeout, Message, Subscription
from bus.protocol.subjects import Subjects
from fleet.events import DecisionDescribed, DescribeDecision, DescribeReservations, ReservationsChanged, ReservationsDescribed
from router.config import RouterConfig
from router.fleet_state.booking_replication import MOST_PREFIX_BLOCKS, MOST_ROUTERS, BookingMessage, Learnt, OwnBookings, RemoteBookings
from router.fleet_state.reservations import Booking, Reservations
from router.keyed_queue import KeyedQueue
from router.prefix_index.prompt import Prompt
from router.scheduling.decision import Decision
from router.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
ECHO_SECONDS = 1.5
"""Not to hear oneself for so long means that the bus carries nothing."""
_ANSWER_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
ACQUAINTED_SECONDS = 2.0
"""Then others are listened to although it is not known which ranks there are."""
MEETING_SECONDS = 0.25
"""A router that is there answers a newcomer's first word at once; whoever has not by then is not there."""

Passed = Callable[[str, bool, str | None], object]
"""Takes a release of a booking of ours that reached another router: decision id, whether its prompt is computed (else it is over), and the tenant
that released it (None: a caller who may release any)."""


class PeerRouters:
    """`run` tells and listens until it is cancelled; the rest is synchronous and does nothing that takes time.

    With `replicas` off nothing is told of bookings and none are counted; releases are still passed on.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        config: RouterConfig,
        reservations: Reservations,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        learnt: Learnt,
        passed: Passed,
        freed: Callable[[], None],
        acquainted: asyncio.Event,
    ) -> None:
        """learnt: told what comes with others' bookings. freed: called when something that others booked is over. acquainted: set once the
        ranks are known that bookings are about."""
        self.router = secrets.randbits(64)
        """identity of this process among routers"""
        self._bus = bus
        self._subjects = subjects
        self._replicas = config.replicas
        self._coalesce = config.coalesce_seconds
        self._metrics = metrics
        self._clock = clock
        self._passed = passed
        self._freed = freed
        self._acquainted = acquainted
        self._diary = OwnBookings(self.router, config.reservation_seconds / 2)
        self._ledger = RemoteBookings(reservations, config.reservation_seconds, learnt)
        self._voice = bus.publisher(subjects.reservations)
        self._due: KeyedQueue[int] = KeyedQueue(MOST_ROUTERS)
        self._news = asyncio.Event()
        self._news.set()  # the first word is that this router is there
        self._echo: float | None = None
        """when this router heard itself last, seconds on the loop's clock"""
        self.met = asyncio.Event()
        """set once every router that was there before has told what it booked, or had its time to"""

    # What happens here

    def booked(self, decision: Decision, booking: Booking, prompt: Prompt) -> None:
        if not self._replicas:
            return
        target = decision.target
        tell_prefix = bool(self._ledger.routers) and not target.engine.capabilities.kv_events
        prefix = prompt.chained(target.engine.block_size)[:MOST_PREFIX_BLOCKS] if tell_prefix else ()
        self._diary.booked(decision.id, target.key, booking, BookingMessage(decision.ask.keys.session, prefix))
        self._told()

    def first_token(self, booking: Booking) -> None:
        self._diary.first_token(booking)
        self._told()

    def emitted(self, booking: Booking) -> None:
        self._diary.emitted(booking)
        self._told()

    def ended(self, booking: Booking) -> None:
        self._diary.ended(booking)
        self._told()

    def booked_elsewhere(self, decision_id: str) -> bool:
        """Whether another router is known to have booked this."""
        return self._ledger.booked(decision_id) is not None

    def pass_on(self, decision_id: str, *, first_token: bool, tenant: str | None = None) -> None:
        """Tell whoever booked it: its prompt is computed, or it is over, as a tenant (None: one who may release any) says."""
        self._diary.pass_on(decision_id, first_token=first_token, tenant=tenant)
        self._told()

    def sweep(self) -> None:
        """End what has outlived its router or its time; to be called a few times a second."""
        for router in self._ledger.sweep(self._clock()):
            self._due.ask(router)
        self._metrics.peers(len(self._ledger.routers), self._ledger.open, self._ledger.expired, self._ledger.refused)

    @property
    def bus_silent(self) -> bool:
        """Whether nothing can be concluded from not hearing anybody: the bus does not carry even our own word."""
        if not self._bus.connected:
            return True
        return self._echo is None or asyncio.get_running_loop().time() - self._echo > ECHO_SECONDS

    async def decision(self, tag: str, decision_id: str, tenant: str | None = None) -> bytes:
        """A decision of the router whose ids begin with `tag`, of a tenant alone (None: of any), as JSON.
        BusError when it does not answer, or has it no more."""
        try:
            answer = await self._bus.request(self._subjects.decision(tag), DescribeDecision(id=decision_id, tenant=tenant), _ANSWER_SECONDS)
        except BusTimeout as error:
            raise BusError(f"it does not answer within {_ANSWER_SECONDS:g} s; it may be gone") from error
        if not isinstance(answer, DecisionDescribed):
            raise BusError(f"it answered with a {type(answer).__name__}")
        return answer.record

    # The background work

    async def run(self) -> None:
        """Tell and listen until cancelled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACQUAINTED_SECONDS):
                await self._acquainted.wait()
        subjects = self._subjects
        async with AsyncExitStack() as stack:
            said = await stack.enter_async_context(self._bus.subscribe(subjects.reservations))
            await stack.enter_async_context(self._bus.serve(subjects.describe_reservations(self.router), self._describe))
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(self._tell(), name="tells other routers what is booked here")
            tasks.create_task(self._listen(said), name="listens to other routers")
            tasks.create_task(self._meet(), name="waits for the routers that are there")
            tasks.create_task(self._ask(), name="asks routers for what was missed")

    async def _tell(self) -> None:
        """News at once, but never more often than once in `coalesce_seconds`; and a sign of life."""
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                pass  # nothing new: a sign of life is due
            self._news.clear()
            if self._alone:
                self._diary.hush(self._clock())
            try:
                await self._voice.publish(self._diary.take(self._clock()) or ReservationsChanged(router=self.router))
            except BusError as error:
                log.warning("what is booked here cannot be told: %s", error)
            if self._diary.has_news:
                self._news.set()
            await asyncio.sleep(self._coalesce)

    async def _listen(self, said: Subscription) -> None:
        async for received in said:
            message = received.message
            if not isinstance(message, ReservationsChanged):
                self._metrics.bus_refused.inc()
            elif message.router == self.router:
                self._echo = asyncio.get_running_loop().time()
            else:
                self._hear(received.publisher_id, received.sequence, message)

    def _hear(self, publisher_id: int, sequence: int, said: ReservationsChanged) -> None:
        for decision_id in said.computed:
            self._passed(decision_id, True, said.released_by.get(decision_id))
        for decision_id in said.forgotten:
            self._passed(decision_id, False, said.released_by.get(decision_id))
        if not self._replicas:
            return
        heard = self._ledger.hear(publisher_id, sequence, said, self._clock())
        if said.ended:
            self._freed()
        if heard.newcomer:
            self._diary.tell_all()  # it shall know at once who is there; and while we were alone, nothing was told
            self._news.set()
        if heard.incomplete:
            self._metrics.peer_gaps.inc()
            self._due.ask(said.router)

    async def _ask(self) -> None:
        while True:
            router = await self._due.next()
            try:
                answer = await self._bus.request(self._subjects.describe_reservations(router), DescribeReservations(router=self.router), _ANSWER_SECONDS)
            except BusError as error:
                log.debug("router %016x does not say what it booked: %s", router, error)
                complete = False
            else:
                complete = isinstance(answer, ReservationsDescribed) and answer.router == router and self._ledger.replace(answer, self._clock())
            if not complete and router in self._ledger.routers:
                asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._due.ask, router)

    async def _meet(self) -> None:
        await asyncio.sleep(MEETING_SECONDS)
        while any(self._ledger.incomplete(router) for router in self._ledger.routers):  # noqa: ASYNC110 ends with the answers, or with silence
            await asyncio.sleep(_PAUSE_SECONDS / 4)
        self.met.set()

    async def _describe(self, _: Message) -> Message:
        voice = self._voice
        return ReservationsDescribed(router=self.router, publisher_id=voice.publisher_id, sequence=voice.sequence - 1, booked=self._diary.all(self._clock()))

    @property
    def _alone(self) -> bool:
        """Nobody listens, as far as is known."""
        return self._replicas and not self._ledger.routers

    def _told(self) -> None:
        """Wake whoever tells, if there is something to tell, and somebody."""
        if self._diary.has_news and not self._alone:
            self._news.set()
