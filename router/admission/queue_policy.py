"""Requests that wait while every rank is saturated: who comes next, and who is refused to make room. Pure; time comes in as an argument.

Order, among the requests for one model:
1. Continuations of answers that have begun, and other choices of such a request.
2. By class, the most urgent first, and within a class by arrival.
3. Nobody starves: a request that has waited for half of the longest wait is aged, and of any AGED_EVERY places that go to others than
   continuations while somebody is aged, at least one goes to the one who came first. So the k-th oldest is passed by at most
   (AGED_EVERY - 1) * k later ones once they are aged, while urgent classes keep the other places.

When the queue is full, a request makes room for itself by shedding strictly less urgent ones, the least urgent first and of those the
youngest; requests of its own class or a more urgent one are never shed for it, nor are continuations. Where that is not enough, it is
refused itself and nobody is shed.
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
"""For how long a client will wait for a rank to take its request."""
AGED_EVERY = 4
LEAST_RETRY_SECONDS = 1.0
MOST_RETRY_SECONDS = 60.0
_RATE_SECONDS = 10.0
_LEAST_SEEN_SECONDS = 0.1
"""Time constant of a measured rate, and the shortest time it is over."""
_INTEGER = re.compile(r"-?[0-9]{1,19}")
CONTINUES = -1
"""The urgency of what continues an answer that has begun; classes count from 0, the most urgent."""


class Saturated(ApiError):
    """No rank can take the request at present, but one may soon: it can wait."""


class QueueRefusal(StrEnum):
    """Why a request that might have waited is refused: the `code` of the answer."""

    SATURATED = "saturated"
    """429: every rank is saturated, and so is the queue"""
    SHED = "shed"
    """429: it waited, and made room for a more urgent one"""
    QUEUE_TIMEOUT = "queue_timeout"
    """503: its time was up before a rank had room"""
    NO_ENGINE = "no_engine"
    """503: no rank of its model came back in time"""
    STOPPING = "not_ready"
    """503: the router stops"""

    @property
    def status(self) -> int:
        return 429 if self in (QueueRefusal.SATURATED, QueueRefusal.SHED) else 503


class QueueBounds(NamedTuple):
    """What may wait, over all models."""

    requests: int
    bytes: int


class Waiter:
    """One request, or one choice of it, that waits. Belongs to a `PriorityQueue` while it is in there; compared by identity."""

    __slots__ = ("came", "model", "number", "size", "until", "urgency")

    def __init__(self, model: str, urgency: int, came: float, until: float, size: int) -> None:
        """urgency: number of its class, or CONTINUES; came: when it began to wait; until: when it is refused; size: bytes it holds."""
        self.model = model
        self.urgency = urgency
        self.came = came
        self.until = until
        self.size = size
        self.number = 0
        """tells apart those that came at once"""


Kind = TypeVar("Kind", bound=Waiter)


class Offer(NamedTuple, Generic[Kind]):
    """accepted: the request waits now; shed: who was taken out for it."""

    accepted: bool
    shed: tuple[Kind, ...]


def _arrival(waiter: Waiter) -> tuple[float, int]:
    return waiter.came, waiter.number


class _Line(Generic[Kind]):
    """Who waits for one model, by urgency, each list by arrival."""

    __slots__ = ("lists", "passed")

    def __init__(self) -> None:
        self.lists: dict[int, list[Kind]] = {}
        """keys ascending, no empty lists"""
        self.passed = 0
        """places given to others since the oldest aged request was passed over first"""

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
        """Take out one that got a place, and note who was passed over."""
        oldest = min((waiting[0] for urgency, waiting in self.lists.items() if urgency != CONTINUES), key=_arrival, default=None)
        if waiter.urgency != CONTINUES:
            self.passed = self.passed + 1 if oldest is not None and oldest is not waiter and oldest.came <= aged_before else 0
        self.remove(waiter)

    def in_order(self, aged_before: float) -> Iterator[Kind]:
        """Everybody, as they shall come if each gets a place. aged_before: who came until then is aged."""
        yield from self.lists.get(CONTINUES, ())
        heads = [(waiting[0], iter(waiting[1:])) for urgency, waiting in self.lists.items() if urgency != CONTINUES]
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
    """State: lines by model, and what all of them hold. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line[Kind]] = {}
        self._numbers = 0
        self._held: set[Kind] = set()
        self._first_end = math.inf
        """nobody's time is up before"""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, waiter: Kind) -> bool:
        return waiter in self._held

    @property
    def models(self) -> list[str]:
        """Those that somebody waits for."""
        return list(self._lines)

    def offer(self, waiter: Kind, room: QueueBounds) -> Offer[Kind]:
        """Let a request wait, if need be in the place of less urgent ones."""
        shed = self._to_shed(waiter, room)
        if shed is None:
            return Offer(False, ())
        for one in shed:
            self.remove(one)
        self._numbers += 1
        waiter.number = self._numbers
        self._lines.setdefault(waiter.model, _Line()).add(waiter)
        self._held.add(waiter)
        self._first_end = min(self._first_end, waiter.until)
        self.bytes += waiter.size
        return Offer(True, shed)

    def end(self, waiter: Kind, until: float) -> None:
        """It is refused at another time."""
        waiter.until = until
        self._first_end = min(self._first_end, until)

    def remove(self, waiter: Kind) -> bool:
        """It waits no more, for whatever reason but a place. False when it did not wait."""
        if waiter not in self._held:
            return False
        self._lines[waiter.model].remove(waiter)
        self._gone(waiter)
        return True

    def placed(self, waiter: Kind, aged_before: float) -> None:
        """It got a place. KeyError when it did not wait."""
        self._lines[waiter.model].placed(waiter, aged_before)
        self._gone(waiter)

    def in_order(self, model: str, aged_before: float) -> Iterator[Kind]:
        """Who waits for a model, in the order they shall get places. Not to be used any more once somebody came or went."""
        line = self._lines.get(model)
        return iter(()) if line is None else line.in_order(aged_before)

    def of(self, model: str) -> list[Kind]:
        """Who waits for a model, in no order that matters."""
        line = self._lines.get(model)
        return [] if line is None else [waiter for waiting in line.lists.values() for waiter in waiting]

    def passes_over(self, model: str, urgency: int, aged_before: float) -> bool:
        """Whether a newcomer of this urgency, given a place now, would pass over one as urgent or aged."""
        line = self._lines.get(model)
        return line is not None and any(other <= urgency or waiting[0].came <= aged_before for other, waiting in line.lists.items())

    def ahead(self, model: str, urgency: int) -> int:
        """Requests that a newcomer of this urgency would have to let go first, ageing aside."""
        line = self._lines.get(model)
        return 0 if line is None else sum(len(waiting) for other, waiting in line.lists.items() if other <= urgency)

    def ended(self, now: float) -> list[Kind]:
        """Take out whose time is up."""
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
        if not self._lines[waiter.model].lists:
            del self._lines[waiter.model]

    def _to_shed(self, waiter: Kind, room: QueueBounds) -> tuple[Kind, ...] | None:
        """Who must go for a newcomer; None when it cannot be taken in."""
        requests, size = len(self._held) + 1 - room.requests, self.bytes + waiter.size - room.bytes
        if requests <= 0 and size <= 0:
            return ()
        if room.requests < 1 or waiter.size > room.bytes:
            return None
        shed: list[Kind] = []
        for one in self._least_urgent(waiter.urgency):
            shed.append(one)
            requests, size = requests - 1, size - one.size
            if requests <= 0 and size <= 0:
                return tuple(shed)
        return None

    def _least_urgent(self, than: int) -> Iterator[Kind]:
        """Those of lower classes: the least urgent first, of these the youngest."""
        for urgency in sorted({one for line in self._lines.values() for one in line.lists if one > than}, reverse=True):
            lists = [reversed(line.lists.get(urgency, [])) for line in self._lines.values()]
            yield from heapq.merge(*lists, key=_arrival, reverse=True)


class Rate:
    """How many a second, lately, since it was first asked for: an exponentially decaying count over as much time as it has seen."""

    __slots__ = ("_at", "_began", "_count")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._count = 0.0

    def count(self, now: float) -> None:
        """One more."""
        self._count = self._decayed(now) + 1.0
        self._at = max(now, self._at)

    def per_second(self, now: float) -> float:
        seen = max(now - self._began, _LEAST_SEEN_SECONDS)
        return self._decayed(now) / (_RATE_SECONDS * -math.expm1(-seen / _RATE_SECONDS))

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(min(0.0, (self._at - now) / _RATE_SECONDS))


def retry_after(ahead: int, per_second: float, otherwise: float) -> float:
    """Seconds after which asking again is worth it: when those ahead have got places at the measured rate, within bounds.

    otherwise: the guess where nothing was measured.
    """
    seconds = (ahead + 1) / per_second if per_second > 0.0 else otherwise
    return min(max(seconds, LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)


def class_of(said: str | int | None, classes: Sequence[str], default: str) -> int:
    """The number of the class that a client named: by its name, or by an integer counted from the default class, lower being more urgent
    (as vLLM reads `priority`). ApiError 400 naming the classes."""
    if said is None or said == "":
        return classes.index(default)
    if isinstance(said, str) and said in classes:
        return classes.index(said)
    if isinstance(said, int) or _INTEGER.fullmatch(said):
        return min(max(classes.index(default) + int(said), 0), len(classes) - 1)
    named = f"{', '.join(classes)}, or an integer (0: {default}, lower is more urgent)"
    raise ApiError(400, f"priority {said[:64]!r} is no class of requests here; use {named}", param="priority", code="invalid_value")
