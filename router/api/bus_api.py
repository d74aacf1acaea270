"""Bus interface of routers: decisions, releases of reservations, and queries of past decisions."""

import asyncio
import logging
from contextlib import AsyncExitStack

import msgspec

from bus import Bus, Message
from bus.protocol.subjects import Subjects
from fleet.completions import ApiError
from fleet.requests.refusal import RequestRefused
from fleet.requests.routing import (
    DecisionDescribed,
    DescribeDecision,
    RouteDecided,
    RouteReleased,
    RouteRequested,
)
from router.api.library import Decider
from router.scheduling.what_if import supposed

log = logging.getLogger(__name__)


class BusApi:
    """Serve the decider over the bus. A queue group delivers each request to one router; queries of a
    decision go to the router that made it.
    """

    def __init__(self, bus: Bus, subjects: Subjects, decider: Decider) -> None:
        self._bus = bus
        self._subjects = subjects
        self._decider = decider
        self.listening = asyncio.Event()
        """set once requests are answered"""

    async def run(self) -> None:
        """Answer until cancelled. Routing requests are answered only when the service is ready; until then a
        warm replica answers them.
        """
        subjects, service = self._subjects, self._decider.service
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._bus.serve(subjects.decision(service.tag), self._describe))
            await service.readiness.done.wait()
            await stack.enter_async_context(self._bus.serve(subjects.route, self._route))
            await stack.enter_async_context(self._bus.serve(subjects.release, self._release))
            self.listening.set()
            await asyncio.Event().wait()

    async def _route(self, message: Message) -> Message:
        if not isinstance(message, RouteRequested):
            return _refused(message, RouteRequested)
        try:
            decision = await self._decider.choose(
                message.body,
                reserve=message.reserve,
                wait=message.wait,
                session=message.session,
                tenant=message.tenant,
                priority=message.priority,
                request_id=message.request_id,
                traceparent=message.traceparent,
                supposed=supposed(message.without, message.gone),
                interface="nats",
            )
        except ApiError as error:
            return RequestRefused(reason=f"{error.status} {error.code or 'error'}: {error.message}")
        return RouteDecided(
            record=msgspec.json.encode(decision.record()),
            url=decision.target.url,
            expires_seconds=self._decider.service.external_reservations.seconds if message.reserve else None,
            cache_salt=decision.cache_salt or None,
        )

    async def _release(self, message: Message) -> Message:
        if not isinstance(message, RouteReleased):
            return _refused(message, RouteReleased)
        self._decider.release(message.id, first_token=message.first_token)
        return message

    async def _describe(self, message: Message) -> Message:
        if not isinstance(message, DescribeDecision):
            return _refused(message, DescribeDecision)
        kept = self._decider.service.kept(message.id, message.tenant)
        if kept is None:
            return RequestRefused(
                reason=(
                    f"it is not among the last {self._decider.service.config.kept_decisions} that router made"
                )
            )
        return DecisionDescribed(record=msgspec.json.encode(kept.record()))


def _refused(message: Message, expected: type) -> RequestRefused:
    return RequestRefused(
        reason=f"a {type(message).__name__} is no request for this subject; send a {expected.__name__}"
    )
