"""One HTTP request of a proxy: its body is read, an endpoint is picked and booked, and the booking follows
the answer to its end.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import closing
from functools import partial
from typing import Any

import msgspec

from fleet.completions import ApiError
from router.access.api_keys import INFER
from router.api.model_record import model_list
from router.api.routes import HotRoutes
from router.attempt import RankAttempt
from router.foreign_api.headers import changes_for_server, decision_header, own_headers
from router.foreign_api.routes import RouteKind, route_of
from router.gateway import protocol
from router.gateway.answer import ReportedAnswer
from router.gateway.endpoints import barred, endpoint_of
from router.gateway.messages import Message
from router.gateway.protocol import BodyMode, ProtocolFault, RequestHead, kind_of
from router.http.asgi_response import Headers
from router.http.body_budget import BodyShare
from router.openai_api.request_schema import CHAT_PATH, TEXT_PATH
from router.scheduling.routing_request import FIRST_TRY
from router.service import RouterService
from router.telemetry.request_log import RequestLog

log = logging.getLogger(__name__)

_MODELS = "/v1/models"
_JSON = b"content-type", b"application/json"
_READABLE = frozenset({BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED})


class Exchange:
    """One request. `answering`: it was handed to an endpoint, so that it can no longer be refused.
    `complete`: its answer has ended.
    """

    def __init__(
        self,
        service: RouterService,
        routes: HotRoutes,
        request_log: RequestLog,
        head: RequestHead,
        messages: AsyncIterator[Message],
    ) -> None:
        self.answering = False
        self.complete = False
        self._service = service
        self._routes = routes
        self._log = request_log
        self._head = head
        self._messages = messages
        self._trailers = False
        """the request ended with trailers, which the proxy waits to send on"""

    async def run(self, headers: dict[str, str]) -> AsyncGenerator[Message, None]:
        """Yield the answers to the proxy. headers: as `HotRoutes.known_headers`. ApiError while the request
        can still be refused. ProtocolFault for a message out of turn.
        """
        self._routes.admit(self._log, headers, INFER)
        head = self._head
        if head.method == "GET" and head.path == _MODELS:
            self._log.status = 200
            self.complete = True
            yield protocol.immediate(200, msgspec.json.encode(model_list(self._service)), [_JSON])
            return
        self._check_inference()
        if head.ends:
            raise ApiError(400, "the request has no body", code="invalid_value")
        if head.request_mode is BodyMode.BUFFERED:
            yield protocol.proceed("request_headers")
        with self._service.body_budget.share(self._log.client) as share:
            body = await self._body(share)
            self._log.body_bytes = len(body)
            asked = await self._routes.reader.routing_request(self._log, body)
            need = msgspec.structs.replace(asked, barred=partial(barred, subset=head.subset))
            if need.tokenizer is not None:
                raise ApiError(
                    404,
                    f"the ranks of {need.model!r} take token ids, which a gateway does not send; route its"
                    " requests to the router itself",
                    code="route_not_found",
                )
            async with RankAttempt(self._service, self._log, need, FIRST_TRY, begun=False) as attempt:
                self._log.decision = attempt.decision
                for answer in await self._hand_over(attempt, body):
                    yield answer
                share.release()
                del body
                with closing(ReportedAnswer(self._service, self._log, attempt, need.prompt)) as reported:
                    async for answer in self._follow(attempt, reported):
                        yield answer

    def _check_inference(self) -> None:
        """Refuse a route that is not for inference: the gateway's rules may let more pass than the router
        does.
        """
        head = self._head
        route = route_of(head.method, head.path, ())
        known = head.method == "POST" and head.path in (CHAT_PATH, TEXT_PATH)
        if not known and (route is None or route.kind is not RouteKind.INFERENCE or route.creates):
            raise ApiError(
                404,
                f"{head.method[:16]} {head.path[:128]} does not pass through a gateway; ask the router",
                code="route_not_found",
            )

    async def _body(self, share: BodyShare) -> bytes:
        """Read the body. ApiError 413 or 503 when it is too long, 500 for a mode in which it does not come
        before the endpoint must be named.
        """
        mode, limit = self._head.request_mode, self._service.config.max_body_bytes
        if mode not in _READABLE:
            raise ApiError(
                500,
                f"the gateway sends bodies in mode {mode.name}, which names no prompt in time; set"
                " request_body_mode to FULL_DUPLEX_STREAMED (or BUFFERED)",
                code="gateway_misconfigured",
            )
        parts: list[bytes] = []
        async for message in self._messages:
            kind = kind_of(message)
            if kind == "request_trailers":
                self._trailers = True
                return b"".join(parts)
            if kind != "request_body":
                raise ProtocolFault(f"a request's body was expected, not {kind}")
            about = _content(message, kind)
            share.add(len(about.body))
            parts.append(about.body)
            if share.held > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")
            if about.end_of_stream or about.end_of_stream_without_message or mode is BodyMode.BUFFERED:
                return b"".join(parts)
        raise ConnectionResetError("the proxy left before the body was complete")

    async def _hand_over(self, attempt: RankAttempt, body: bytes) -> list[Message]:
        """Return the messages that send the request to its endpoint."""
        decision, mode = attempt.decision, self._head.request_mode
        endpoint = endpoint_of(decision.target.url)
        assert endpoint is not None  # others are barred
        own = self._own_headers(attempt)
        sent = body
        if decision.cache_salt:
            sent = await self._service.bodies.with_salt(self._log.client, body, decision.cache_salt)
            if mode is BodyMode.FULL_DUPLEX_STREAMED:
                own.append((b"content-length", str(len(sent)).encode()))
        key = self._service.credentials.backend_key_of(decision.target.url)
        credentials = key is None and self._service.credentials.clients is None
        changes, removed = changes_for_server(self._head.headers, own, credentials=credentials)
        self.answering = True
        if mode is BodyMode.BUFFERED:
            answer = protocol.picked("request_body", endpoint, changes, removed)
            if sent is not body:
                answer.request_body.response.body_mutation.body = sent
            return [answer, *self._trailing()]
        return [
            protocol.picked("request_headers", endpoint, changes, removed),
            *protocol.streamed("request_body", sent, ends=not self._trailers),
            *self._trailing(),
        ]

    def _trailing(self) -> list[Message]:
        return [protocol.proceed("request_trailers")] if self._trailers else []

    def _own_headers(self, attempt: RankAttempt) -> Headers:
        service, decision, request_log = self._service, attempt.decision, self._log
        context = request_log.pass_on if attempt.span is None else attempt.span.headers
        # An engine on the bus reports its requests by this id.
        on_bus = not service.backends.probes(decision.target.key[0])
        own = own_headers(
            context,
            decision.id if on_bus else request_log.request_id,
            decision.id,
            service.credentials.backend_key_of(decision.target.url),
        )
        own += decision.target.rank_header
        if request_log.caller.tenant:
            own.append((service.config.tenant_header.encode(), request_log.caller.tenant.encode()))
        return own

    async def _follow(self, attempt: RankAttempt, reported: ReportedAnswer) -> AsyncIterator[Message]:
        """Answer to the messages about the answer, until it is complete or the proxy leaves."""
        async for message in self._messages:
            kind = kind_of(message)
            ends = kind == "response_trailers"
            if kind == "response_headers":
                answered = protocol.read_answer_head(message)
                self._check_served(attempt, message)
                reported.begin(answered)
                ends = answered.ends or self._head.response_mode is BodyMode.NONE
                yield protocol.answer_named([decision_header(attempt.decision.id)])
            elif kind == "response_body":
                about = _content(message, kind)
                ends = about.end_of_stream
                reported.feed(about.body)
                for answer in self._passed_on(about.body, ends=ends):
                    yield answer
            elif kind in ("request_trailers", "response_trailers"):
                yield protocol.proceed(kind)
            else:
                raise ProtocolFault(f"an answer was expected, not {kind}")
            if ends:
                self.complete = True
                reported.end()
                return

    def _passed_on(self, body: bytes, *, ends: bool) -> list[Message]:
        if self._head.response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            return list(protocol.streamed("response_body", body, ends=ends))
        return [protocol.proceed("response_body")]

    def _check_served(self, attempt: RankAttempt, message: Message) -> None:
        """Log a proxy that has sent the request elsewhere: the booking is on a rank that has not got it."""
        served = protocol.served_by(message)
        if served is not None and served != endpoint_of(attempt.decision.target.url):
            log.warning(
                "request %s: the gateway sent it to %s instead of %s",
                self._log.request_id,
                served,
                attempt.decision.target.name,
            )


def _content(message: Any, kind: str) -> Any:
    return getattr(message, kind)
