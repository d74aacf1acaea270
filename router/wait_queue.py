"""Asynchronous wait queue for requests that no rank can take yet.

A request does not wait while there is capacity. Waiting requests are woken together when capacity returns.
`admission` decides the order and the refusals. The rank of each is a decision like any other; requests
admitted together are decided in the order that `batch_assignment` finds.
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
from router.admission.queue_policy import (
    CONTINUES,
    PriorityQueue,
    QueueBounds,
    QueueRefusal,
    Rate,
    Saturated,
    Waiter,
    retry_after,
)
from router.config import RouterConfig
from router.fleet_state.reservations import Booking
from router.fleet_state.target_table import TargetTable
from router.scheduling.booking_observer import BookingObserver
from router.scheduling.decision import Decision
from router.scheduling.routing_request import FIRST_TRY, Attempt, RoutingRequest
from router.scheduling.scheduler import Scheduler
from router.telemetry.metrics import RouterMetrics
from router.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""Interval of checks for capacity while requests wait, in case no event reports it; also the precision of
deadlines.
"""
_MAX_AT_ONCE = 16
"""Requests admitted in one turn of the event loop: about five milliseconds of deciding."""
_MAX_IN_VAIN = 32
"""Failed placements after which the rest of the queue waits for the next check."""
_HELD_BYTES = 8192
"""Memory of a waiting request's task, connection and parsed body, without what grows with its size."""
_TOKEN_BYTES = 40
"""Memory of one token id in a Python list."""
_DEFAULT_RETRY_SECONDS = 2.0
"""Retry-After when no rate was measured."""

Admitted = tuple[Decision, Booking]


class QueueService(Protocol):
    """The part of the router's service that the queue uses."""

    config: RouterConfig
    scheduler: Scheduler
    metrics: RouterMetrics
    clock: Callable[[], float]

    def decide(self, need: RoutingRequest, decision_id: str, attempt: Attempt = ...) -> Decision:
        """Decide without booking. `Saturated` when no rank can take the request at present."""
        ...

    def book(self, request_log: RequestLog, need: RoutingRequest, suffix: str, attempt: Attempt) -> Admitted:
        """Decide and book the load."""
        ...

    def release(self, booking: Booking) -> None: ...


class _Waiting(Waiter):
    """A waiting request, its routing request, and the future that receives its admission."""

    __slots__ = ("attempt", "done", "need", "own_end", "request_log", "suffix")

    def __init__(
        self, request_log: RequestLog, model: str, urgency: int, came: float, until: float, size: int
    ) -> None:
        super().__init__(model, urgency, came, until, size)
        self.request_log = request_log
        self.own_end = until
        """deadline while engines of its model are alive"""
        self.need: RoutingRequest | None = None
        """None: it waits for a live engine first, and requests admission afterwards"""
        self.suffix = ""
        self.attempt = FIRST_TRY
        self.done: asyncio.Future[Admitted | None] = asyncio.get_running_loop().create_future()

    @property
    def context(self) -> int:
        """Return the tokens that its rank must have room for."""
        return 0 if self.need is None else self.need.context


class WaitQueue(BookingObserver):
    """Queue of requests that await `admit` or `live_target_table`; a caller that learns of capacity calls
    `wake`. Use it on one event loop.

    State: the queue; for each model with waiting requests the rate at which capacity is freed, and the time
    since which no engine of the model is alive; and one timer.
    """

    def __init__(self, service: QueueService) -> None:
        self._service = service
        self._queue: PriorityQueue[_Waiting] = PriorityQueue()
        self._rates: dict[str, Rate] = {}
        self._dead_since: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    async def admit(
        self,
        request_log: RequestLog,
        need: RoutingRequest,
        suffix: str,
        attempt: Attempt,
        *,
        begun: bool,
        wait: bool = True,
    ) -> Admitted:
        """Decide and book. Do so at once if there is capacity and no waiting request is as urgent or aged.

        begun: the client already has part of its answer. wait: False refuses the request instead of queueing
        it.

        ApiError as in `Scheduler.decide`, or with a code of `QueueRefusal` and a Retry-After when there is no
        capacity. A request cancelled while waiting leaves the queue at once, and nothing stays booked for it.
        """
        urgency = CONTINUES if begun else request_log.urgency
        full: Saturated | None = None
        if not self._queue or not self._queue.passes_over(
            need.model, urgency, self._aged_before(self._service.clock())
        ):
            try:
                return self._service.book(request_log, need, suffix, attempt)
            except Saturated as error:
                full = error
        waiting = self._newcomer(request_log, need.model, urgency, need.prompt.tokens)
        if not wait:
            raise self._unplaced(waiting, full)
        waiting.need, waiting.suffix, waiting.attempt = need, suffix, attempt
        found = await self._wait(waiting, full)
        assert found is not None
        return found

    async def live_target_table(self, request_log: RequestLog, model: str) -> TargetTable:
        """Return the ranks that may serve a model, at once if there are any. ApiError 404 for an unknown
        model, also at once.
        """
        while True:
            try:
                return self._service.scheduler.target_table(model)
            except Saturated as error:
                await self._wait(self._newcomer(request_log, model, request_log.urgency, 0), error)

    def wake(self) -> None:
        """Check for capacity or a returned engine soon. Nearly free while the queue is empty; calls in one
        turn share a check.
        """
        if self._queue and not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._look)

    def first_token(self, booking: Booking, now: float) -> None:
        self.wake()

    def prompt_computed(self, booking: Booking) -> None:
        self.wake()

    def released(self, booking: Booking) -> None:
        self.wake()

    def close(self) -> None:
        """Refuse all waiting requests, and all later ones: the router stops."""
        self._closed = True
        for waiting in self._queue.ended(math.inf):
            self._refuse(waiting, QueueRefusal.STOPPING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _aged_before(self, now: float) -> float:
        """Return the arrival time before which requests count as aged: they have waited half of the longest
        wait.
        """
        return now - self._service.config.queue_wait_seconds / 2

    # One request that waits

    def _newcomer(self, request_log: RequestLog, model: str, urgency: int, tokens: int) -> _Waiting:
        now = self._service.clock()
        until = now + self._service.config.queue_wait_seconds
        if urgency != CONTINUES:
            until = min(until, request_log.give_up_at)
        return _Waiting(
            request_log,
            model,
            urgency,
            now,
            until,
            _HELD_BYTES + request_log.body_bytes + _TOKEN_BYTES * tokens,
        )

    async def _wait(self, waiting: _Waiting, full: Saturated | None) -> Admitted | None:
        """Wait for admission (or, without `need`, for an engine). full: why there is no capacity; None: not
        tried yet.
        """
        self._enter(waiting, full)
        request_log, began = waiting.request_log, time.time_ns()
        self._service.metrics.queued(request_log.priority)
        refused: str | None = "failed"
        try:
            found = await waiting.done
        except ApiError as error:
            refused = error.code
            raise
        except asyncio.CancelledError:
            refused = "cancelled"
            self._withdraw(waiting)
            raise
        else:
            refused = None
            return found
        finally:
            seconds = self._service.clock() - waiting.came
            request_log.queued_seconds = max(request_log.queued_seconds, seconds)
            self._service.metrics.dequeued(request_log.priority, seconds)
            if request_log.trace is not None:
                request_log.trace.queued(request_log.priority, began, time.time_ns(), refused)

    def _enter(self, waiting: _Waiting, full: Saturated | None) -> None:
        """Queue a request. ApiError when it may not wait."""
        config = self._service.config
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

    def _withdraw(self, waiting: _Waiting) -> None:
        """Remove a cancelled request. Release a booking that it received in the same moment."""
        self._queue.remove(waiting)
        if waiting.done.cancel() or waiting.done.cancelled() or waiting.done.exception() is not None:
            return
        given = waiting.done.result()
        if given is not None:
            self._service.release(given[1])

    # All that wait

    def _look_later(self) -> None:
        if self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.wake()  # deferred: one check at a time keeps the event loop's turns short

    def _look(self) -> None:
        """Refuse requests past their deadline, and admit as many as there is capacity for."""
        self._woken = False
        try:
            self._serve(self._service.clock())
        finally:
            self._look_later()

    def _serve(self, now: float) -> None:
        for waiting in self._queue.ended(now):
            self._refuse(
                waiting,
                QueueRefusal.NO_ENGINE if waiting.model in self._dead_since else QueueRefusal.QUEUE_TIMEOUT,
            )
        for model in self._queue.models:
            places = self._service.scheduler.places(model, now)
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
        """Shorten the deadlines of a model's requests: no engine serves it now, and the wait for one is
        brief.
        """
        since = self._dead_since.setdefault(model, now)
        for waiting in self._queue.of(model):
            self._queue.end(
                waiting,
                min(waiting.own_end, max(since, waiting.came) + self._service.config.no_engine_wait_seconds),
            )

    def _with_engine(self, model: str) -> None:
        """Restore the deadlines of a model's requests: an engine serves it again."""
        for waiting in self._queue.of(model):
            self._queue.end(waiting, waiting.own_end)
            if waiting.need is None:
                self._queue.remove(waiting)
                if not waiting.done.done():
                    waiting.done.set_result(None)

    def _give(self, model: str, places: int, now: float) -> None:
        """Admit up to `places` requests of a model, in queue order."""
        aged_before = self._aged_before(now)
        vain: set[_Waiting] = set()
        too_long = math.inf
        given = 0
        while places > 0 and given < _MAX_AT_ONCE and len(vain) < _MAX_IN_VAIN:
            order = (
                one
                for one in self._queue.in_order(model, aged_before)
                if one not in vain and one.context < too_long
            )
            turn = list(islice(order, min(places, _MAX_AT_ONCE - given)))
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
        """Return the requests in the order in which to decide them. Requests that the batch assignment could
        not place come last: there may be capacity for them after all.
        """
        if len(turn) < 2 or self._service.config.policy != "cost":
            return turn
        alone: list[tuple[_Waiting, Decision]] = []
        for waiting in turn:
            assert waiting.need is not None
            with suppress(Exception):  # booking raises the error again, to the request itself
                alone.append(
                    (
                        waiting,
                        self._service.decide(waiting.need, waiting.request_log.decision_id, waiting.attempt),
                    )
                )
        if not alone:
            return turn
        order = [
            alone[at][0]
            for at in self._service.scheduler.arranged(
                [decision for _, decision in alone], self._service.clock()
            )
        ]
        arranged = set(order)
        return [*order, *(waiting for waiting in turn if waiting not in arranged)]

    def _place(self, waiting: _Waiting, aged_before: float) -> bool:
        """Try to admit a request. True when its wait is over: it was admitted, or deciding failed for another
        reason than capacity.
        """
        if waiting.done.done():  # cancelled, but its task has not run yet
            self._queue.remove(waiting)
            return True
        assert waiting.need is not None
        request_log = waiting.request_log
        request_log.queued_seconds = max(
            request_log.queued_seconds, self._service.clock() - waiting.came
        )  # observers of the booking read it
        try:
            admitted = self._service.book(waiting.request_log, waiting.need, waiting.suffix, waiting.attempt)
        except Saturated:
            return False
        except Exception as error:  # noqa: BLE001 any error concerns this request alone, and is raised in its task
            self._queue.remove(waiting)
            waiting.done.set_exception(error)
            return True
        self._queue.placed(waiting, aged_before)
        self._rates[waiting.model].count(self._service.clock())
        waiting.done.set_result(admitted)
        return True

    # Refusing

    def _refuse(self, waiting: _Waiting, why: QueueRefusal) -> None:
        """Refuse a request that has already left the queue."""
        if not waiting.done.done():
            waiting.done.set_exception(self._refusal(waiting, why))

    def _unplaced(self, waiting: _Waiting, full: Saturated | None) -> ApiError:
        """Return the refusal of a request that may not even wait. full: why there is no capacity; None:
        others are ahead of it.
        """
        if full is not None and full.code not in set(QueueRefusal):
            return full  # its ranks failed, and none is saturated
        dead = full is not None and full.code == QueueRefusal.NO_ENGINE
        return self._refusal(waiting, QueueRefusal.NO_ENGINE if dead else QueueRefusal.SATURATED, full)

    def _refusal(self, waiting: _Waiting, why: QueueRefusal, full: Saturated | None = None) -> ApiError:
        now = self._service.clock()
        self._service.metrics.refused(waiting.request_log.priority, why.value)
        otherwise = _DEFAULT_RETRY_SECONDS if full is None or full.retry_after is None else full.retry_after
        rate = self._rates.get(waiting.model)
        seconds = retry_after(
            self._queue.ahead(waiting.model, waiting.urgency),
            0.0 if rate is None else rate.per_second(now),
            otherwise,
        )
        if why is QueueRefusal.NO_ENGINE:
            try:
                self._service.scheduler.target_table(waiting.model)
            except ApiError as error:
                return error
        return ApiError(why.status, self._message(waiting, why, now), code=why.value, retry_after=seconds)

    def _message(self, waiting: _Waiting, why: QueueRefusal, now: float) -> str:
        match why:
            case QueueRefusal.SATURATED:
                queue = f", and {len(self._queue)} requests wait already" if self._queue else ""
                return f"every rank that serves this model is saturated{queue}; try again later"
            case QueueRefusal.SHED:
                return (
                    "every rank that serves this model is saturated, and requests more urgent than"
                    f" {waiting.request_log.priority!r} filled the queue"
                )
            case QueueRefusal.QUEUE_TIMEOUT if waiting.attempt.failures:
                return (
                    f"{len(waiting.attempt.failures)} attempts of this request failed, the last with"
                    f" {waiting.attempt.failures[-1][1].value}, and no other rank had room within"
                    f" {now - waiting.came:.1f} s; try again later"
                )
            case QueueRefusal.QUEUE_TIMEOUT:
                return (
                    f"no rank that serves this model had room within {now - waiting.came:.1f} s; try again"
                    " later"
                )
            case QueueRefusal.NO_ENGINE:
                return "no rank that serves this model can take this request now"
            case QueueRefusal.STOPPING:
                return "the router stops; ask again"
