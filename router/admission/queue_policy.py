"""Policy of the wait queue while every rank is saturated: the order of admission, and load shedding. Pure;
time is an argument.

Order, among the requests for one model:
1. Continuations of answers that have begun, and other choices of such a request.
2. By class, the most urgent first, and within a class by arrival.
3. No starvation: a request that has waited for half of the longest wait is aged. While a request is aged, at
   least one of any AGED_EVERY admissions other than continuations goes to the oldest request. So the k-th
   oldest aged request is overtaken by at most (AGED_EVERY - 1) * k later ones, while urgent classes keep the
   other admissions.

When the queue is full, a request may displace strictly less urgent ones, the least urgent first and of those
the youngest. Requests of its own class or a more urgent one are never shed for it, nor are continuations. If
that does not free enough room, the new request is refused and none is shed.
"""

import heapq
import math
import re
from bisect import insort
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from fleet.completions import ApiError

TIMEOUT_HEADER = "x-request-timeout-ms"
"""Header with the longest time that a client waits for a rank to take its request."""
AGED_EVERY = 4
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
_RATE_SECONDS = 10.0
_MIN_SEEN_SECONDS = 0.1
"""Time constant of a measured rate, and the shortest observation time of one."""
_INTEGER = re.compile(r"-?[0-9]{1,19}")
CONTINUES = -1
"""Urgency of a continuation of an answer that has begun; classes count from 0, the most urgent."""


class Saturated(ApiError):
    """No rank can take the request at present, but one may soon, so the request can wait."""


class QueueRefusal(StrEnum):
    """Reason for refusing a request that might have waited: the `code` of the response."""

    SATURATED = "saturated"
    """429: every rank and the queue are saturated"""
    SHED = "shed"
    """429: it waited, and a more urgent request displaced it"""
    QUEUE_TIMEOUT = "queue_timeout"
    """503: its deadline passed before a rank had room"""
    NO_ENGINE = "no_engine"
    """503: no engine of its model returned in time"""
    STOPPING = "not_ready"
    """503: the router stops"""

    @property
    def status(self) -> int:
        return 429 if self in (QueueRefusal.SATURATED, QueueRefusal.SHED) else 503


class QueueBounds(NamedTuple):
    """Limits of the queue, over all models."""

    requests: int
    bytes: int


class Waiter:
    """One waiting request, or one choice of it. It belongs to the `PriorityQueue` that holds it; compared by
    identity.
    """

    __slots__ = ("came", "model", "number", "size", "until", "urgency")

    def __init__(self, model: str, urgency: int, came: float, until: float, size: int) -> None:
        """urgency: index of its class, or CONTINUES; came: start of its wait; until: its deadline; size:
        bytes it holds.
        """
        self.model = model
        self.urgency = urgency
        self.came = came
        self.until = until
        self.size = size
        self.number = 0
        """sequence number, which orders simultaneous arrivals"""


Kind = TypeVar("Kind", bound=Waiter)


class Offer(NamedTuple, Generic[Kind]):
    """accepted: the request waits now; shed: requests removed in its favour."""

    accepted: bool
    shed: tuple[Kind, ...]


def _arrival(waiter: Waiter) -> tuple[float, int]:
    return waiter.came, waiter.number


class _ModelQueue(Generic[Kind]):
    """Requests that wait for one model, by urgency, each list by arrival."""

    __slots__ = ("lists", "passed")

    def __init__(self) -> None:
        self.lists: dict[int, list[Kind]] = {}
        """keys ascending, no empty lists"""
        self.passed = 0
        """admissions of others since the oldest aged request was first passed over"""

    def add(self, waiter: Kind) -> None:
        if waiter.urgency not in self.lists:
            self.lists[waiter.urgency] = []
            self.lists = dict(sorted(self.lists.items()))
        insort(self.lists[waiter.urgency], waiter, key=_arrival)

    def remove(self, waiter: Kind) -> None:
        waiting = self.lists[waiter.urgency]
        waiting.remove(waiter)
        if not waiting:
            del self.lists[waiter.urgency]

    def placed(self, waiter: Kind, aged_before: float) -> None:
        """Remove an admitted request, and count whether it passed over an aged one."""
        oldest = min(
            (waiting[0] for urgency, waiting in self.lists.items() if urgency != CONTINUES),
            key=_arrival,
            default=None,
        )
        if waiter.urgency != CONTINUES:
            self.passed = (
                self.passed + 1
                if oldest is not None and oldest is not waiter and oldest.came <= aged_before
                else 0
            )
        self.remove(waiter)

    def in_order(self, aged_before: float) -> Iterator[Kind]:
        """Yield all requests in the order of their admission. aged_before: requests that arrived until then
        are aged.
        """
        yield from self.lists.get(CONTINUES, ())
        heads = [
            (waiting[0], iter(waiting[1:])) for urgency, waiting in self.lists.items() if urgency != CONTINUES
        ]
        passed = self.passed
        while heads:
            oldest = min(range(len(heads)), key=lambda at: _arrival(heads[at][0]))
            aged = heads[oldest][0].came <= aged_before
            chosen = oldest if aged and passed + 1 >= AGED_EVERY else 0
            passed = passed + 1 if aged and chosen != oldest else 0
            waiter, later = heads[chosen]
            yield waiter
            following = next(later, None)
            if following is None:
                del heads[chosen]
            else:
                heads[chosen] = following, later


class PriorityQueue(Generic[Kind]):
    """Wait queue of all models. State: queues by model, and the bytes they hold. Times are seconds on the
    caller's clock.
    """

    def __init__(self) -> None:
        self._queues: dict[str, _ModelQueue[Kind]] = {}
        self._numbers = 0
        self._held: set[Kind] = set()
        self._first_end = math.inf
        """earliest possible deadline in the queue"""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, waiter: Kind) -> bool:
        return waiter in self._held

    @property
    def models(self) -> list[str]:
        """Models that requests wait for."""
        return list(self._queues)

    def offer(self, waiter: Kind, room: QueueBounds) -> Offer[Kind]:
        """Queue a request, in place of less urgent ones if necessary."""
        shed = self._to_shed(waiter, room)
        if shed is None:
            return Offer(False, ())
        for one in shed:
            self.remove(one)
        self._numbers += 1
        waiter.number = self._numbers
        self._queues.setdefault(waiter.model, _ModelQueue()).add(waiter)
        self._held.add(waiter)
        self._first_end = min(self._first_end, waiter.until)
        self.bytes += waiter.size
        return Offer(True, shed)

    def end(self, waiter: Kind, until: float) -> None:
        """Change a request's deadline."""
        waiter.until = until
        self._first_end = min(self._first_end, until)

    def remove(self, waiter: Kind) -> bool:
        """Remove a request that was not admitted. False when it was not queued."""
        if waiter not in self._held:
            return False
        self._queues[waiter.model].remove(waiter)
        self._gone(waiter)
        return True

    def placed(self, waiter: Kind, aged_before: float) -> None:
        """Remove a request that was admitted. KeyError when it was not queued."""
        self._queues[waiter.model].placed(waiter, aged_before)
        self._gone(waiter)

    def in_order(self, model: str, aged_before: float) -> Iterator[Kind]:
        """Yield a model's requests in the order of admission. The iterator is invalid after a change of the
        queue.
        """
        queue = self._queues.get(model)
        return iter(()) if queue is None else queue.in_order(aged_before)

    def of(self, model: str) -> list[Kind]:
        """Return a model's requests in no particular order."""
        queue = self._queues.get(model)
        return [] if queue is None else [waiter for waiting in queue.lists.values() for waiter in waiting]

    def passes_over(self, model: str, urgency: int, aged_before: float) -> bool:
        """True when admitting a new request of this urgency now would pass over one that is as urgent or
        aged.
        """
        queue = self._queues.get(model)
        return queue is not None and any(
            other <= urgency or waiting[0].came <= aged_before for other, waiting in queue.lists.items()
        )

    def ahead(self, model: str, urgency: int) -> int:
        """Return the number of requests ahead of a new one of this urgency, without regard to ageing."""
        queue = self._queues.get(model)
        return (
            0
            if queue is None
            else sum(len(waiting) for other, waiting in queue.lists.items() if other <= urgency)
        )

    def ended(self, now: float) -> list[Kind]:
        """Remove and return the requests whose deadline has passed."""
        if now < self._first_end:
            return []
        over = sorted((waiter for waiter in self._held if waiter.until <= now), key=_arrival)
        for waiter in over:
            self.remove(waiter)
        self._first_end = min((waiter.until for waiter in self._held), default=math.inf)
        return over

    def _gone(self, waiter: Kind) -> None:
        self._held.discard(waiter)
        self.bytes -= waiter.size
        if not self._queues[waiter.model].lists:
            del self._queues[waiter.model]

    def _to_shed(self, waiter: Kind, room: QueueBounds) -> tuple[Kind, ...] | None:
        """Return the requests to shed for a new one; None when it cannot be queued."""
        requests, size = len(self._held) + 1 - room.requests, self.bytes + waiter.size - room.bytes
        if requests <= 0 and size <= 0:
            return ()
        if room.requests < 1 or waiter.size > room.bytes:
            return None
        shed: list[Kind] = []
        for one in self._by_urgency(waiter.urgency):
            shed.append(one)
            requests, size = requests - 1, size - one.size
            if requests <= 0 and size <= 0:
                return tuple(shed)
        return None

    def _by_urgency(self, than: int) -> Iterator[Kind]:
        """Yield the requests of less urgent classes: the least urgent first, of these the youngest."""
        for urgency in sorted(
            {one for queue in self._queues.values() for one in queue.lists if one > than}, reverse=True
        ):
            lists = [reversed(queue.lists.get(urgency, [])) for queue in self._queues.values()]
            yield from heapq.merge(*lists, key=_arrival, reverse=True)


class Rate:
    """Recent events per second: an exponentially decaying count, corrected for the time since its
    creation."""

    __slots__ = ("_at", "_began", "_count")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._count = 0.0

    def count(self, now: float) -> None:
        """Count one event."""
        self._count = self._decayed(now) + 1.0
        self._at = max(now, self._at)

    def per_second(self, now: float) -> float:
        seen = max(now - self._began, _MIN_SEEN_SECONDS)
        return self._decayed(now) / (_RATE_SECONDS * -math.expm1(-seen / _RATE_SECONDS))

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(min(0.0, (self._at - now) / _RATE_SECONDS))


def retry_after(ahead: int, per_second: float, otherwise: float) -> float:
    """Return the seconds after which a retry is worthwhile: the time to admit the requests ahead at the
    measured rate, within bounds.

    otherwise: used if no rate was measured.
    """
    seconds = (ahead + 1) / per_second if per_second > 0.0 else otherwise
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


def class_of(named: str | int | None, classes: Sequence[str], default: str) -> int:
    """Return the index of the class that a client named: by its name, or by an integer relative to the
    default class, lower being more urgent (as vLLM reads `priority`). ApiError 400 lists the classes.
    """
    if named is None or named == "":
        return classes.index(default)
    if isinstance(named, str) and named in classes:
        return classes.index(named)
    if isinstance(named, int) or _INTEGER.fullmatch(named):
        return min(max(classes.index(default) + int(named), 0), len(classes) - 1)
    allowed = f"{', '.join(classes)}, or an integer (0: {default}, lower is more urgent)"
    raise ApiError(
        400,
        f"priority {named[:64]!r} is no class of requests here; use {allowed}",
        param="priority",
        code="invalid_value",
    )
