"""Supervision of unstreamed answers. Nothing arrives before their end, so the router relies on expected times
and on probes.
"""

import asyncio
from heapq import heappop, heappush
from itertools import count

from router.fleet_state.engine_state import EngineStatus
from router.fleet_state.reservations import Booking
from router.fleet_state.target_table import RankKey
from router.prefix_index.prompt import Prompt
from router.scheduling.decision import Decision
from router.service import RouterService
from router.upstream.rank_client import Call

LOOK_SECONDS = 0.5
"""Interval of liveness checks of the servers of awaited answers."""
APART_SECONDS = 0.01
"""Least interval of wake-ups for prompts that should be computed. Answers that arrive sooner never need an
expectation, which would cost more than deciding about the request.
"""
EVENTS_LATE = 4.0
"""Multiple of the expected time after which KV events that should tell of a prompt are awaited no longer."""
MAX_PREFILL_SECONDS = 3600.0
"""Longest time after which a prompt counts as computed."""
SILENT = "its probes went unanswered while an answer was awaited"
NO_HEARTBEATS = "its heartbeats stopped while an answer was awaited"


class UnstreamedAnswers:
    """State: awaited calls; those that began a moment ago; a heap of the other bookings by the expected end
    of their prefill; and two timers.
    """

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._calls: dict[Call, tuple[Decision, Booking]] = {}
        self._new: dict[Call, tuple[float, Decision, Booking, float]] = {}
        self._due: list[tuple[float, int, Booking]] = []
        self._numbers = count()
        self._next: asyncio.Handle | None = None
        self._next_at = 0.0
        """due time of that timer, which uvloop's own handles cannot always report"""
        self._look: asyncio.TimerHandle | None = None

    def begin(self, decision: Decision, booking: Booking, call: Call, prompt: Prompt) -> None:
        """Supervise a call until `end`, that is until it was answered or failed. There is no first token to
        observe: its prompt counts as computed when KV events say so, or after the expected time if none will
        (if they are late, after a multiple of it). The call is cut when its server is found dead.
        """
        loop = call.loop
        now = loop.time()
        self._calls[call] = decision, booking
        times = EVENTS_LATE if self._service.await_prompt(decision, booking, prompt) else 1.0
        self._new[call] = now, decision, booking, times
        self._wake_at(now + APART_SECONDS, loop)
        if self._look is None:
            self._look = loop.call_later(LOOK_SECONDS, self._look_around, loop)

    def end(self, call: Call) -> None:
        """End the supervision of a call."""
        self._service.await_no_longer(*self._calls.pop(call))
        self._new.pop(call, None)

    def _wake_at(self, at: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._next is not None:
            if self._next_at <= at:
                return
            self._next.cancel()
        self._next, self._next_at = loop.call_at(at, self._compute_due, loop), at

    def _compute_due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = None
        for began, decision, booking, times in self._new.values():
            expected = min(times * self._service.expected_prefill_seconds(decision), MAX_PREFILL_SECONDS)
            heappush(self._due, (began + expected, next(self._numbers), booking))
        self._new.clear()
        while self._due and self._due[0][0] <= loop.time():
            booking = heappop(self._due)[2]
            if booking.rank is not None:  # its answer has not come yet
                self._service.prompt_computed(booking)
        if self._due:
            self._wake_at(max(self._due[0][0], loop.time() + APART_SECONDS), loop)

    def _look_around(self, loop: asyncio.AbstractEventLoop) -> None:
        for call, (decision, _) in list(self._calls.items()):
            why = self._why_dead(decision.target.key)
            if why is not None:
                call.cut(why)
        self._look = loop.call_later(LOOK_SECONDS, self._look_around, loop) if self._calls else None

    def _why_dead(self, key: RankKey) -> str | None:
        """Return why a server will not answer; None: it may. Its probes go unanswered, or its heartbeats
        stopped and came from its own process.

        The heartbeats of an engine without `token_ids` (vLLM, a static backend on the bus) come from an agent
        beside the server, which may end while the server computes on. If the server ends, its connections
        break; if its machine vanishes, TCP keepalive breaks them. A refused connection does not count: a
        server that is stopping refuses new requests but finishes open ones.
        """
        if self._service.backends.is_silent(key[0]):
            return SILENT
        state = self._service.view.engine(key[0])
        if state is None or state.status is not EngineStatus.DEAD or not state.joined.capabilities.token_ids:
            return None
        return NO_HEARTBEATS
