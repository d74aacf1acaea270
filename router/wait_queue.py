"""Where requests wait for a place, awaited: nobody waits while there is room, and those who do are woken together when there is room again.

Who comes next and who is refused is `admission`'s to say. Where each goes is a decision like any other, made in the order that `batch`
finds for those who get their places at once.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

from fleet.completions import ApiError
from router.admission.queue_policy import CONTINUES, PriorityQueue, QueueBounds, QueueRefusal, Rate, Saturated, Waiter, retry_after
from router.config import RouterConfig
from router.fleet_state.reservations import Booking
from router.fleet_state.target_table import TargetTable
from router.scheduling.decision import Decision
from router.scheduling.scheduler import FIRST_TRY, Attempt, RoutingRequest, Scheduler
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""While anybody waits, room is looked for at least so often, whether or not anything was heard of it; deadlines are kept as exactly."""
_MOST_AT_ONCE = 16
"""Places given between two turns of the event loop: some five milliseconds of deciding."""
_MOST_IN_VAIN = 32
"""So many are tried in vain before the others wait for the next occasion."""
_HELD_BYTES = 8192
"""A waiting request's task, connection and parsed body, beside what grows with its size."""
_TOKEN_BYTES = 40
"""One token id in a list of Python's."""
_GUESSED_SECONDS = 2.0
"""After which it is worth asking again, where nothing was measured."""

Admitted = tuple[Decision, Booking]


class QueueService(Protocol):
    """What the waiting room needs of the router's service."""

    config: RouterConfig
    picker: Scheduler
    metrics: RouterMetrics
    clock: Callable[[], float]

    def decide(self, need: RoutingRequest, decision_id: str, attempt: Attempt = ...) -> Decision:
        """`Saturated` when nobody can take the request at present; books nothing."""
        ...

    def book(self, exchange: RequestLog, need: RoutingRequest, suffix: str, attempt: Attempt) -> Admitted:
        """As `decide`, and the load is promised."""
        ...

    def release(self, booking: Booking) -> None: ...


class _Waiting(Waiter):
    """A waiter, what it asks for, and how it learns that it got it."""

    __slots__ = ("attempt", "done", "exchange", "need", "own_end", "suffix")

    def __init__(self, exchange: RequestLog, model: str, urgency: int, came: float, until: float, size: int) -> None:
        super().__init__(model, urgency, came, until, size)
        self.exchange = exchange
        self.own_end = until
        """as long as engines of its model live"""
        self.need: RoutingRequest | None = None
        """None: it waits for an engine to live, and will ask for a place afterwards"""
        self.suffix = ""
        self.attempt = FIRST_TRY
        self.done: asyncio.Future[Admitted | None] = asyncio.get_running_loop().create_future()

    @property
    def context(self) -> int:
        """Tokens that its rank must have room for."""
        return 0 if self.need is None else self.need.context


class WaitQueue:
    """Requests await `admit` and `live_roster`; whoever knows of room calls `wake`. Used on one event loop.

    State: the queue; of each model that somebody waits for, the rate at which places become free, and since when no engine of it lives,
    if so; and one timer.
    """

    def __init__(self, desk: QueueService) -> None:
        self._desk = desk
        self._queue: PriorityQueue[_Waiting] = PriorityQueue()
        self._rates: dict[str, Rate] = {}
        self._dead_since: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    async def admit(self, exchange: RequestLog, need: RoutingRequest, suffix: str, attempt: Attempt, *, begun: bool, wait: bool = True) -> Admitted:
        """Decide and book: at once where there is room and nobody waits that is as urgent or aged. begun: the client has part of its answer
        already; wait: False refuses the request where it would have to.

        ApiError as `Scheduler.decide` says, or with one of `QueueRefusal`'s codes when there is no place; those have Retry-After. Cancelled while
        it waits, a request leaves the queue at once and nothing stays booked for it.
        """
        urgency = CONTINUES if begun else exchange.urgency
        full: Saturated | None = None
        if not self._queue or not self._queue.passes_over(need.model, urgency, self._aged_before(self._desk.clock())):
            try:
                return self._desk.book(exchange, need, suffix, attempt)
            except Saturated as error:
                full = error
        waiting = self._newcomer(exchange, need.model, urgency, need.prompt.tokens)
        if not wait:
            raise self._unplaced(waiting, full)
        waiting.need, waiting.suffix, waiting.attempt = need, suffix, attempt
        found = await self._wait(waiting, full)
        assert found is not None
        return found

    async def live_roster(self, exchange: RequestLog, model: str) -> TargetTable:
        """The ranks that may serve a model, at once where there are any. ApiError 404 for an unknown model, also at once."""
        while True:
            try:
                return self._desk.picker.roster(model)
            except Saturated as error:
                await self._wait(self._newcomer(exchange, model, exchange.urgency, 0), error)

    def wake(self) -> None:
        """There may be room, or an engine to wait for no longer. Costs next to nothing while nobody waits; many calls are one look."""
        if self._queue and not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._look)

    def close(self) -> None:
        """The router stops: who waits is refused, and nobody waits any more."""
        self._closed = True
        for waiting in self._queue.ended(math.inf):
            self._refuse(waiting, QueueRefusal.STOPPING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _aged_before(self, now: float) -> float:
        """Who came until then is aged: it has waited for half of the longest wait."""
        return now - self._desk.config.queue_wait_seconds / 2

    # One request that waits

    def _newcomer(self, exchange: RequestLog, model: str, urgency: int, tokens: int) -> _Waiting:
        now = self._desk.clock()
        until = now + self._desk.config.queue_wait_seconds
        if urgency != CONTINUES:
            until = min(until, exchange.give_up_at)
        return _Waiting(exchange, model, urgency, now, until, _HELD_BYTES + exchange.body_bytes + _TOKEN_BYTES * tokens)

    async def _wait(self, waiting: _Waiting, full: Saturated | None) -> Admitted | None:
        """Until there is a place (or, without `need`, an engine). full: why there is none; None: that was not tried yet."""
        self._enter(waiting, full)
        exchange, began = waiting.exchange, time.time_ns()
        self._desk.metrics.queued(exchange.priority)
        refused: str | None = "failed"
        try:
            found = await waiting.done
        except ApiError as error:
            refused = error.code
            raise
        except asyncio.CancelledError:
            refused = "cancelled"
            self._forsake(waiting)
            raise
        else:
            refused = None
            return found
        finally:
            seconds = self._desk.clock() - waiting.came
            exchange.queued_seconds = max(exchange.queued_seconds, seconds)
            self._desk.metrics.dequeued(exchange.priority, seconds)
            if exchange.trace is not None:
                exchange.trace.queued(exchange.priority, began, time.time_ns(), refused)

    def _enter(self, waiting: _Waiting, full: Saturated | None) -> None:
        """ApiError when it may not wait."""
        config = self._desk.config
        if self._closed:
            raise self._refusal(waiting, QueueRefusal.STOPPING)
        accepted, shed = self._queue.offer(waiting, QueueBounds(config.queue_requests, config.queue_bytes))
        if not accepted:
            raise self._unplaced(waiting, full)
        self._rates.setdefault(waiting.model, Rate(waiting.came))
        for one in shed:
            self._refuse(one, QueueRefusal.SHED)
        if full is None:
            self.wake()
        elif full.code == QueueRefusal.NO_ENGINE:
            self._without_engine(waiting.model, waiting.came)
        self._look_later()

    def _forsake(self, waiting: _Waiting) -> None:
        """Nobody awaits it any more. What it was given in the same moment goes back."""
        self._queue.remove(waiting)
        if waiting.done.cancel() or waiting.done.cancelled() or waiting.done.exception() is not None:
            return
        given = waiting.done.result()
        if given is not None:
            self._desk.release(given[1])

    # All that wait

    def _look_later(self) -> None:
        if self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.wake()  # not at once: one look at a time keeps the event loop's turns short

    def _look(self) -> None:
        """Refuse those whose time is up, give out what places there are."""
        self._woken = False
        try:
            self._serve(self._desk.clock())
        finally:
            self._look_later()

    def _serve(self, now: float) -> None:
        for waiting in self._queue.ended(now):
            self._refuse(waiting, QueueRefusal.NO_ENGINE if waiting.model in self._dead_since else QueueRefusal.QUEUE_TIMEOUT)
        for model in self._queue.models:
            places = self._desk.picker.places(model, now)
            if places is None:
                self._without_engine(model, now)
                continue
            if self._dead_since.pop(model, None) is not None:
                self._with_engine(model)
            if places:
                self._give(model, places, now)
        waited_for = set(self._queue.models)
        self._dead_since = {model: since for model, since in self._dead_since.items() if model in waited_for}
        self._rates = {model: rate for model, rate in self._rates.items() if model in waited_for}

    def _without_engine(self, model: str, now: float) -> None:
        """Nobody serves the model now: that is waited for, but not for long."""
        since = self._dead_since.setdefault(model, now)
        for waiting in self._queue.of(model):
            self._queue.end(waiting, min(waiting.own_end, max(since, waiting.came) + self._desk.config.no_engine_wait_seconds))

    def _with_engine(self, model: str) -> None:
        """An engine of the model lives again."""
        for waiting in self._queue.of(model):
            self._queue.end(waiting, waiting.own_end)
            if waiting.need is None:
                self._queue.remove(waiting)
                if not waiting.done.done():
                    waiting.done.set_result(None)

    def _give(self, model: str, places: int, now: float) -> None:
        """Up to so many places, to those whose turn it is."""
        aged_before = self._aged_before(now)
        vain: set[_Waiting] = set()
        too_long = math.inf
        given = 0
        while places > 0 and given < _MOST_AT_ONCE and len(vain) < _MOST_IN_VAIN:
            order = (one for one in self._queue.in_order(model, aged_before) if one not in vain and one.context < too_long)
            turn = list(islice(order, min(places, _MOST_AT_ONCE - given)))
            if not turn:
                return
            for waiting in self._arranged(turn):
                if self._place(waiting, aged_before):
                    given, places = given + 1, places - 1
                else:
                    vain.add(waiting)
                    too_long = min(too_long, waiting.context if not waiting.attempt.failures else math.inf)
        if places > 0 and given:
            self.wake()

    def _arranged(self, turn: list[_Waiting]) -> Sequence[_Waiting]:
        """In the order in which to decide for them. Whom there would be no room for in that order comes last: it may be, after all."""
        if len(turn) < 2 or self._desk.config.policy != "cost":
            return turn
        alone: list[tuple[_Waiting, Decision]] = []
        for waiting in turn:
            assert waiting.need is not None
            with suppress(Exception):  # booking will say so again, to the request itself
                alone.append((waiting, self._desk.decide(waiting.need, waiting.exchange.decision_id, waiting.attempt)))
        if not alone:
            return turn
        order = [alone[at][0] for at in self._desk.picker.arranged([decision for _, decision in alone], self._desk.clock())]
        arranged = set(order)
        return [*order, *(waiting for waiting in turn if waiting not in arranged)]

    def _place(self, waiting: _Waiting, aged_before: float) -> bool:
        """Whether its waiting is over: with a place, or because deciding failed for another reason than want of room."""
        if waiting.done.done():  # cancelled, and not yet told
            self._queue.remove(waiting)
            return True
        assert waiting.need is not None
        exchange = waiting.exchange
        exchange.queued_seconds = max(exchange.queued_seconds, self._desk.clock() - waiting.came)  # known to whoever hears of the booking
        try:
            admitted = self._desk.book(waiting.exchange, waiting.need, waiting.suffix, waiting.attempt)
        except Saturated:
            return False
        except Exception as error:  # noqa: BLE001 whatever it is, it is about this request, and told to it
            self._queue.remove(waiting)
            waiting.done.set_exception(error)
            return True
        self._queue.placed(waiting, aged_before)
        self._rates[waiting.model].count(self._desk.clock())
        waiting.done.set_result(admitted)
        return True

    # Refusing

    def _refuse(self, waiting: _Waiting, why: QueueRefusal) -> None:
        """It has left the queue already."""
        if not waiting.done.done():
            waiting.done.set_exception(self._refusal(waiting, why))

    def _unplaced(self, waiting: _Waiting, full: Saturated | None) -> ApiError:
        """It may not even wait. full: why there is no place for it now; None: others are before it."""
        dead = full is not None and full.code == QueueRefusal.NO_ENGINE
        return self._refusal(waiting, QueueRefusal.NO_ENGINE if dead else QueueRefusal.SATURATED, full)

    def _refusal(self, waiting: _Waiting, why: QueueRefusal, full: Saturated | None = None) -> ApiError:
        now = self._desk.clock()
        self._desk.metrics.refused(waiting.exchange.priority, why.value)
        otherwise = _GUESSED_SECONDS if full is None or full.retry_after is None else full.retry_after
        rate = self._rates.get(waiting.model)
        seconds = retry_after(self._queue.ahead(waiting.model, waiting.urgency), 0.0 if rate is None else rate.per_second(now), otherwise)
        if why is QueueRefusal.NO_ENGINE:
            try:
                self._desk.picker.roster(waiting.model)
            except ApiError as error:
                return error
        return ApiError(why.status, self._said(waiting, why, now), code=why.value, retry_after=seconds)

    def _said(self, waiting: _Waiting, why: QueueRefusal, now: float) -> str:
        match why:
            case QueueRefusal.SATURATED:
                queue = f", and {len(self._queue)} requests wait already" if self._queue else ""
                return f"every rank that serves this model is saturated{queue}; try again later"
            case QueueRefusal.SHED:
                return f"every rank that serves this model is saturated, and requests more urgent than {waiting.exchange.priority!r} filled the queue"
            case QueueRefusal.QUEUE_TIMEOUT:
                return f"no rank that serves this model had room within {now - waiting.came:.1f} s; try again later"
            case QueueRefusal.NO_ENGINE:
                return "no rank that serves this model can take this request now"
            case QueueRefusal.STOPPING:
                return "the router stops; ask again"
