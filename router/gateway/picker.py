"""Picker of endpoints: serves the streams of a proxy, one for each HTTP request."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fleet.completions import ApiError
from router.api.routes import HotRoutes, outcome_of
from router.foreign_api.headers import decision_header
from router.gateway import protocol
from router.gateway.exchange import Exchange
from router.gateway.messages import Message
from router.gateway.protocol import ProtocolFault
from router.http.asgi_response import Scope, not_ready
from router.service import RouterService
from router.telemetry.request_log import RequestEnd, RequestLog
from router.telemetry.tracing import Provider, RouterTracing

log = logging.getLogger(__name__)


class EndpointPicker:
    """Decides for proxies as the router does for its own clients, with the same queue, bookings and
    records.
    """

    def __init__(self, service: RouterService, *, tracer_provider: Provider | None = None) -> None:
        """tracer_provider: None means the process's own, as it is now."""
        self._service = service
        self._routes = HotRoutes(service, RouterTracing.create(tracer_provider))

    @property
    def ready(self) -> bool:
        """True while requests are served."""
        return self._service.ready and not self._service.refusing

    async def process(self, messages: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """Serve one stream. ProtocolFault for a message that is against the protocol."""
        first = await anext(messages, None)
        if first is None:
            return
        head = protocol.read_head(first)
        service, routes = self._service, self._routes
        scope: Scope = {"headers": head.headers, "query_string": head.query, "client": (head.address, 0)}
        headers = routes.known_headers(scope)
        request_log = routes.begin(head.path, headers, scope)
        exchange = Exchange(service, routes, request_log, head, messages)
        outcome = RequestEnd.FAILED
        service.metrics.in_flight += 1
        try:
            if service.refusing:
                raise not_ready("the router is stopping; ask again")  # noqa: TRY301
            async with aclosing(exchange.run(headers)) as answers:
                async for answer in answers:
                    yield answer
            outcome = outcome_of(request_log.status) if exchange.complete else RequestEnd.CLIENT_GONE
        except ApiError as error:
            outcome = outcome_of(error.status)
            yield _refused(request_log, error)
        except (ConnectionResetError, GeneratorExit, asyncio.CancelledError) as error:
            outcome = RequestEnd.CLIENT_GONE
            if not isinstance(error, ConnectionResetError):
                raise
        except ProtocolFault as fault:
            request_log.detail = str(fault)
            raise
        except Exception:
            log.exception("request %s: a fault of the router", request_log.request_id)
            if exchange.answering:
                raise
            yield _refused(
                request_log, ApiError(500, "the router failed; its log says why", code="internal_error")
            )
        finally:
            service.metrics.in_flight -= 1
            service.ended(request_log, outcome)


def _refused(request_log: RequestLog, error: ApiError) -> Message:
    request_log.status, request_log.detail = error.status, error.message
    decision = request_log.decision
    return protocol.refusal(error, [] if decision is None else [decision_header(decision.id)])
