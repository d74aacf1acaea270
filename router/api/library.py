"""The router as a library: for Python programs that forward requests by themselves and want to be told where to."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypedDict, Unpack

import msgspec

from bus import Bus
from bus.protocol.subjects import Subjects
from fleet.completions import ApiError
from router.access.api_keys import ALL_RIGHTS, Caller
from router.api.routes import RESERVE_PATH, ROUTE_PATH, HotRoutes
from router.config import RouterConfig
from router.scheduling.decision import NOTHING, Decision
from router.scheduling.decision_record import DecisionRecord, Supposed
from router.scheduling.external_reservations import ReleaseRecord, ReservedRecord, reserved
from router.scheduling.what_if import supposed
from router.service import RouterService
from router.telemetry.request_log import RequestEnd, RequestLog
from router.telemetry.tracing import AskedOver, Provider, RouterTracing

_READY_SECONDS = 10.0
_LOOK_SECONDS = 0.02
Body = bytes | Mapping[str, Any]
"""A chat or completions request, as JSON or as what JSON is made of."""


class RequestIdentity(TypedDict, total=False):
    """Who asks, as the headers of an HTTP request say it; all may be left out."""

    session: str
    tenant: str
    priority: str
    """one of `classes`"""
    request_id: str
    traceparent: str
    """W3C trace context that the decision's span belongs below"""


class Decider:
    """Where requests should go, decided as the router decides it for its own clients, and explained by the same record.

    `decide` says where a request would go now and books nothing. `reserve` also books the load, so that the next decision, of this
    router and of its replicas, knows of it; the program then forwards the request to the record's `url` and says with `release` that the
    prompt is computed (first_token=True), and that the request is over. A reservation ends by itself `reservation_seconds` after the last
    word about it. When every rank is saturated both raise ApiError 429 at once, unless `reserve` is told to wait.

        async def forwarded(bus, subjects, body, forward):
            async with Decider.running(bus, subjects, RouterConfig(policy="cost")) as decider:
                await decider.ready()
                chosen = await decider.reserve(body, session="conversation-17")
                try:
                    async for token in forward(chosen.url, body):
                        decider.release(chosen.id, first_token=True)
                finally:
                    decider.release(chosen.id)
                return chosen.candidates[0].terms_ms

    Decisions are traced as those of HTTP requests are, with the process's own OpenTelemetry provider.
    What such requests activate is not learnt from, unless the engine itself reports it: outcomes are those of forwarded requests.
    Used on one event loop.
    """

    def __init__(self, service: RouterService, running: "asyncio.Task[None] | None" = None, *, tracer_provider: Provider | None = None) -> None:
        """Over a service that is run elsewhere. running: the task in which it runs, if its end is to be noticed here.

        tracer_provider: None means the process's own, as it is now.
        """
        self.service = service
        self._running = running
        self._edge = HotRoutes(service, None)
        self._tracing = RouterTracing.create(tracer_provider)

    @classmethod
    @asynccontextmanager
    async def running(cls, bus: Bus | None, subjects: Subjects, config: RouterConfig | None = None) -> AsyncIterator["Decider"]:
        """A decider with a service of its own, which listens to the bus (None: only asks `config.backends`) while the context lasts.

        What ends the service before (the bus cannot be listened to, say) is raised by whatever is asked of the decider next.
        """
        service = RouterService(bus, subjects, config or RouterConfig())
        task = asyncio.create_task(service.run(), name="keeps the decider's view fresh")
        try:
            yield cls(service, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ready(self, seconds: float = _READY_SECONDS) -> None:
        """Return once all is known that should be and an engine lives. TimeoutError says what is missing, RuntimeError that nothing is heard
        any more."""
        try:
            async with asyncio.timeout(seconds):
                while not self.service.ready:
                    self._check()
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"not ready after {seconds:g} s for want of {'; '.join(self.service.missing)}") from error

    async def decide(self, body: Body, *, without: Sequence[str] = (), gone: Sequence[str] = (), **who: Unpack[RequestIdentity]) -> DecisionRecord:
        """Where this request would go now; as if the terms `without` did not count, and the ranks ("engine/rank") or engines `gone` were
        gone. ApiError as the HTTP face answers it: 400, 404, 429, 503."""
        return (await self.choose(body, supposed=supposed(without, gone), **who)).record()

    async def reserve(self, body: Body, *, wait: bool = False, **who: Unpack[RequestIdentity]) -> ReservedRecord:
        """Where this request shall go; its load is held there. wait: for a place, when every rank is saturated, in turn with the requests
        that this router forwards itself. ApiError as `decide`."""
        decision = await self.choose(body, reserve=True, wait=wait, **who)
        return reserved(decision.record(), decision.target.url, self.service.reserved.seconds, decision.cache_salt)

    def release(self, decision_id: str, *, first_token: bool = False) -> ReleaseRecord:
        """The request is over, or (first_token) its prompt is computed and it goes on. Idempotent; an unknown id is no error."""
        return self.service.released(decision_id, first_token=first_token)

    async def choose(
        self,
        body: Body,
        *,
        reserve: bool = False,
        wait: bool = False,
        supposed: Supposed = NOTHING,
        asked_over: AskedOver = "library",
        **who: Unpack[RequestIdentity],
    ) -> Decision:
        """The decision itself; counted, logged and traced as a request of its own."""
        self._check()
        service, path = self.service, RESERVE_PATH if reserve else ROUTE_PATH
        exchange = RequestLog(who.get("request_id") or service.new_request_id(), service.new_decision_id(), path, service.clock())
        exchange.session, exchange.tenant = who.get("session") or None, who.get("tenant") or None
        exchange.asked_priority = who.get("priority") or None
        if service.credentials.clients is not None:  # whoever decides by a program, or over the bus, is trusted to name tenants
            exchange.caller = Caller(exchange.tenant or "", None, ALL_RIGHTS)
        if self._tracing is not None:
            exchange.trace = self._tracing.asked_elsewhere(asked_over, path, who.get("traceparent") or "", time.time_ns())
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        outcome = RequestEnd.FAILED
        try:
            decision = await self._edge.choose(exchange, data, reserve=reserve, wait=wait, supposed=supposed)
        except ApiError as error:
            exchange.status, exchange.detail = error.status, error.message
            outcome = RequestEnd.SATURATED if error.status == 429 else RequestEnd.REFUSED if error.status < 500 else RequestEnd.UNAVAILABLE
            raise
        else:
            exchange.status, outcome = 200, RequestEnd.ANSWERED
            return decision
        finally:
            exchange.finish(outcome, service.clock(), service.metrics)

    def _check(self) -> None:
        """RuntimeError when the service has ended: its view grows old."""
        if self._running is not None and self._running.done():
            why = None if self._running.cancelled() else self._running.exception()
            raise RuntimeError(f"the decider's service has ended ({why or 'it was stopped'}); start another") from why
