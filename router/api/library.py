"""The router as a library, for Python programs that forward requests on their own and ask Roost for the
target.
"""

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
from router.api.routes import RESERVE_PATH, ROUTE_PATH, HotRoutes, outcome_of
from router.config import RouterConfig
from router.scheduling.decision import NOTHING, Decision
from router.scheduling.decision_record import DecisionRecord, Supposed
from router.scheduling.external_reservations import ReleaseRecord, ReservedRecord, reserved
from router.scheduling.what_if import supposed
from router.service import RouterService
from router.telemetry.request_log import RequestEnd, RequestLog
from router.telemetry.tracing import Provider, RouteInterface, RouterTracing

_READY_SECONDS = 10.0
_LOOK_SECONDS = 0.02
Body = bytes | Mapping[str, Any]
"""A chat or completions request, as JSON bytes or as the object before encoding."""


class RequestIdentity(TypedDict, total=False):
    """Identity of the caller, as the headers of an HTTP request carry it; every field is optional."""

    session: str
    tenant: str
    priority: str
    """one of `classes`"""
    request_id: str
    traceparent: str
    """W3C trace context: the parent of the decision's span"""


class Decider:
    """Choose targets for requests as the router does for its own clients, with the same decision records.

    `decide` returns the present target of a request and books nothing. `reserve` also books the load, so that
    the next decisions of this router and its replicas take it into account. The program then forwards the
    request to the record's `url`. It calls `release` when the prompt is computed (first_token=True), and when
    the request is over. A reservation expires `reservation_seconds` after its last update. When every rank is
    saturated both raise ApiError 429 at once, unless `reserve` is called with wait=True.

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

    Decisions are traced like those of HTTP requests, with the process's own OpenTelemetry provider. Roost
    learns nothing from the experts that such requests activate, unless the engine itself reports them:
    outcomes exist for forwarded requests only. Use it on one event loop.
    """

    def __init__(
        self,
        service: RouterService,
        running: "asyncio.Task[None] | None" = None,
        *,
        tracer_provider: Provider | None = None,
    ) -> None:
        """Wrap a service that runs elsewhere. running: the task that runs it, to detect its end.

        tracer_provider: None means the process's own, as it is now.
        """
        self.service = service
        self._running = running
        self._edge = HotRoutes(service, None)
        self._tracing = RouterTracing.create(tracer_provider)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, bus: Bus | None, subjects: Subjects, config: RouterConfig | None = None
    ) -> AsyncIterator["Decider"]:
        """Run a service of its own while the context lasts, and yield its decider. bus: None probes
        `config.backends` only.

        If the service ends early (because the bus connection fails, for example), the next call of the
        decider raises the reason.
        """
        service = RouterService(bus, subjects, config or RouterConfig())
        task = asyncio.create_task(service.run(), name="keeps the decider's view fresh")
        try:
            yield cls(service, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ready(self, seconds: float = _READY_SECONDS) -> None:
        """Return once the initial state is complete and an engine is alive. TimeoutError names what is
        missing; RuntimeError when the service has ended.
        """
        try:
            async with asyncio.timeout(seconds):
                while not self.service.ready:
                    self._check()
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(
                f"not ready after {seconds:g} s for want of {'; '.join(self.service.missing)}"
            ) from error

    async def decide(
        self,
        body: Body,
        *,
        without: Sequence[str] = (),
        gone: Sequence[str] = (),
        **identity: Unpack[RequestIdentity],
    ) -> DecisionRecord:
        """Return the decision that this request would get now, without booking it.

        without: terms to leave out of the cost. gone: ranks ("engine/rank") or engines to treat as absent.
        ApiError with the statuses of the HTTP server: 400, 404, 429, 503.
        """
        return (await self.choose(body, supposed=supposed(without, gone), **identity)).record()

    async def reserve(
        self, body: Body, *, wait: bool = False, **identity: Unpack[RequestIdentity]
    ) -> ReservedRecord:
        """Decide and book the load of a request. wait: when every rank is saturated, wait in turn with the
        requests that this router forwards itself. ApiError as in `decide`.
        """
        decision = await self.choose(body, reserve=True, wait=wait, **identity)
        return reserved(
            decision.record(),
            decision.target.url,
            self.service.external_reservations.seconds,
            decision.cache_salt,
        )

    def release(self, decision_id: str, *, first_token: bool = False) -> ReleaseRecord:
        """End a reservation, or (first_token) report that its prompt is computed. Idempotent; an unknown id
        is no error.
        """
        return self.service.released(decision_id, first_token=first_token)

    async def choose(
        self,
        body: Body,
        *,
        reserve: bool = False,
        wait: bool = False,
        supposed: Supposed = NOTHING,
        interface: RouteInterface = "library",
        **identity: Unpack[RequestIdentity],
    ) -> Decision:
        """Return the decision itself; counted, logged and traced as a request of its own."""
        self._check()
        service, path = self.service, RESERVE_PATH if reserve else ROUTE_PATH
        request_log = RequestLog(
            identity.get("request_id") or service.new_request_id(),
            service.new_decision_id(),
            path,
            service.clock(),
        )
        request_log.session, request_log.tenant = (
            identity.get("session") or None,
            identity.get("tenant") or None,
        )
        request_log.priority_header = identity.get("priority") or None
        if service.credentials.clients is not None:  # the library and the bus are trusted to name tenants
            request_log.caller = Caller(request_log.tenant or "", None, ALL_RIGHTS)
        if self._tracing is not None:
            request_log.trace = self._tracing.route_request(
                interface, path, identity.get("traceparent") or "", time.time_ns()
            )
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        outcome = RequestEnd.FAILED
        try:
            decision = await self._edge.choose(
                request_log, data, reserve=reserve, wait=wait, supposed=supposed
            )
        except ApiError as error:
            request_log.status, request_log.detail = error.status, error.message
            outcome = outcome_of(error.status)
            raise
        else:
            request_log.status, outcome = 200, RequestEnd.ANSWERED
            return decision
        finally:
            request_log.finish(outcome, service.clock(), time.time_ns(), service.metrics)

    def _check(self) -> None:
        """RuntimeError when the service has ended, because its view is then out of date."""
        if self._running is not None and self._running.done():
            why = None if self._running.cancelled() else self._running.exception()
            raise RuntimeError(
                f"the decider's service has ended ({why or 'it was stopped'}); start another"
            ) from why
