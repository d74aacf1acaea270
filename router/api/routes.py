"""Hot routes as raw ASGI: read the body once, validate it, decide, answer. Every request ends in exactly one
log line.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from fleet.completions import UNREADABLE, ApiError
from router.access.api_keys import ADMIN, INFER, ROUTE, TRACE
from router.admission.queue_policy import TIMEOUT_HEADER
from router.api.client_connection import ClientGone, ClientWatch, read_body
from router.api.request_reader import RequestReader
from router.api.token_stream import TokenStream
from router.bodies.tasks import Kind as BodyKind
from router.fleet_state.target_table import TargetTable
from router.foreign_api.event_stream import error_event
from router.foreign_api.forwarded import ForeignPrompt, ForwardedRequest
from router.foreign_api.headers import decision_header
from router.foreign_api.lenient_fields import LenientRequest
from router.foreign_api.object_locations import ObjectLocations
from router.foreign_api.routes import CHAT_ROUTE, ForeignRoute, RouteKind, route_of
from router.http.asgi_response import (
    BODY,
    ON_DISCONNECT,
    AsgiResponse,
    Headers,
    Receive,
    Scope,
    Send,
    not_ready,
)
from router.openai_api.request_schema import (
    CHAT_PATH,
    TEXT_PATH,
    ChatRequest,
)
from router.openai_api.response_format import ResponseHead, answer_for
from router.passthrough.direct import DirectRequests
from router.passthrough.relay import Relay
from router.passthrough.unstreamed import UnstreamedAnswers
from router.scheduling.decision import NOTHING, Decision
from router.scheduling.decision_record import DecisionRecord, Supposed
from router.scheduling.external_reservations import ReleaseRequest, reserved, waits
from router.scheduling.routing_request import FIRST_TRY
from router.scheduling.what_if import parsed_query
from router.service import RouterService
from router.telemetry.request_log import RequestEnd, RequestLog
from router.telemetry.tracing import RouterTracing
from router.upstream.rank_client import UpstreamRequest

log = logging.getLogger(__name__)

ROUTE_PATH = "/v1/route"
RESERVE_PATH = "/v1/route/reserve"
RELEASE_PATH = "/v1/route/release"

_MAX_RELEASE_BYTES = 64 * 1024

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_JSON = b"content-type", b"application/json"
_TRACE_CONTEXT = "traceparent", "tracestate"
SESSION, TENANT, PRIORITY = "session", "tenant", "priority"
"""Internal names of the configured headers that identify a conversation, a tenant and a priority class."""
_READ = {
    b"authorization": "authorization",
    b"traceparent": "traceparent",
    b"tracestate": "tracestate",
    b"x-request-id": "x-request-id",
} | {TIMEOUT_HEADER.encode(): TIMEOUT_HEADER}
Handler = Callable[[RequestLog, AsgiResponse, Headers, bytes], Awaitable[None]]
"""Answers a request whose body was read: its record, the response, its fixed headers, and the body."""


class HotRoutes:
    """Hot routes and their shared state. tracing: None makes no spans."""

    def __init__(self, service: RouterService, tracing: RouterTracing | None) -> None:
        self.service = service
        self.reader = RequestReader(service)
        self._tracing = tracing
        self._unstreamed, self._located = UnstreamedAnswers(service), ObjectLocations()
        self._direct = DirectRequests(service, self._located)
        config = service.config
        self._read = _READ | {
            config.session_header.encode(): SESSION,
            config.tenant_header.encode(): TENANT,
            config.priority_header.encode(): PRIORITY,
        }

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `POST /v1/chat/completions`."""
        await self._serve(scope, receive, send, CHAT_PATH, partial(self._answer, "chat"))

    async def text(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `POST /v1/completions`."""
        await self._serve(scope, receive, send, TEXT_PATH, partial(self._answer, "text"))

    async def route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `POST /v1/route`: decide and explain a chat or completions body. Nothing runs and nothing is
        booked. The query string may pose a what-if.
        """
        await self._serve(
            scope, receive, send, ROUTE_PATH, partial(self._explain, scope.get("query_string", b""))
        )

    async def reserve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `POST /v1/route/reserve`: as route, but book the load at the chosen rank until its release or
        its expiry. With ?wait=true it waits for capacity like a forwarded request.
        """
        wait = waits(scope.get("query_string", b""))
        await self._serve(scope, receive, send, RESERVE_PATH, partial(self._reserve, wait))

    async def release(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve `POST /v1/route/release`: a reserved request is over, or its prompt is computed."""
        await self._serve(scope, receive, send, RELEASE_PATH, self._release)

    def passes(self, method: str, path: str) -> ForeignRoute | None:
        """Return the passthrough route of a request that is none of Roost's own; None: it is not
        forwarded."""
        return (
            route_of(method, path, self.service.config.passthrough_admin)
            if self.reader.has_text_servers
            else None
        )

    async def pass_on(self, route: ForeignRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a passthrough route."""
        right = ADMIN if route.administers else INFER
        await self._serve(
            scope, receive, send, scope["path"], partial(self._answer_other, route, scope["method"]), right
        )

    # One request, from its first byte to its log line

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        path: str,
        answer: Handler,
        right: str | None = None,
    ) -> None:
        """Serve one request, from its first byte to its log line. right: required of the caller; None: the
        path's right.
        """
        service = self.service
        headers = self.known_headers(scope)
        request_log = self.begin(path, headers, scope)
        fixed: Headers = [(b"x-request-id", request_log.request_id.encode())]
        extensions = scope.get("extensions", {})
        watch = ClientWatch(extensions.get(ON_DISCONNECT))
        reply = AsgiResponse(send, watch.stop, extensions.get(BODY))
        outcome = RequestEnd.FAILED
        service.metrics.in_flight += 1
        try:
            if service.refusing:
                fixed.append((b"connection", b"close"))
                raise not_ready("the router is stopping; ask again, on another connection")  # noqa: TRY301
            self.admit(request_log, headers, right or (INFER if path in (CHAT_PATH, TEXT_PATH) else ROUTE))
            with service.body_budget.share(request_log.client) as share:
                body = await read_body(scope, receive, service.config.max_body_bytes, share)
                watch.start()
                answering = answer(request_log, reply, fixed, body)
                del body  # it may be large, and the answer take minutes
                await answering
            outcome = outcome_of(reply.status)
        except ApiError as error:
            outcome = await _refuse(request_log, reply, fixed, error)
        except ClientGone:
            outcome = RequestEnd.CLIENT_GONE
        except asyncio.CancelledError:
            if watch.client_disconnected():
                outcome = RequestEnd.CLIENT_GONE
            else:
                outcome = RequestEnd.CANCELLED
                await _break_off(request_log, reply, fixed)
        except Exception:
            log.exception("request %s: a fault of the router", request_log.request_id)
            fault = ApiError(500, "the router failed; its log says why", code="internal_error")
            await _refuse(request_log, reply, fixed, fault)
        finally:
            watch.stop()
            service.metrics.in_flight -= 1
            request_log.status = reply.status
            service.ended(request_log, outcome)

    def known_headers(self, scope: Scope) -> dict[str, str]:
        """Return the headers that the router reads, by its own names for them."""
        return {
            name: value.decode("latin-1")
            for raw, value in scope["headers"]
            if (name := self._read.get(raw)) is not None
        }

    def begin(self, path: str, headers: dict[str, str], scope: Scope) -> RequestLog:
        """Return the record of a request. headers: as `known_headers`."""
        given = headers.get("x-request-id", "")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else self.service.new_request_id()
        request_log = RequestLog(request_id, self.service.new_decision_id(), path, self.service.clock())
        request_log.client_headers, request_log.query = scope["headers"], scope.get("query_string", b"")
        request_log.address = _address(scope)
        request_log.session, request_log.tenant = headers.get(SESSION) or None, headers.get(TENANT) or None
        request_log.priority_header, request_log.timeout_header = (
            headers.get(PRIORITY),
            headers.get(TIMEOUT_HEADER),
        )
        trusted = "traceparent" not in headers or self._may_trace(headers)
        if self._tracing is not None:
            operation = {CHAT_PATH: "chat", TEXT_PATH: "text_completion"}.get(path, "route")
            request_log.trace = self._tracing.request(
                operation, path, headers, time.time_ns(), trusted=trusted
            )
        elif trusted:
            request_log.pass_on = {name: headers[name] for name in _TRACE_CONTEXT if name in headers}
        return request_log

    def _may_trace(self, headers: dict[str, str]) -> bool:
        """True when the client's trace context is trusted. An untrusted client could otherwise have all its
        requests sampled, here and in the servers behind.
        """
        try:
            return TRACE in self.service.credentials.caller(headers.get("authorization")).rights
        except ApiError:
            return False  # `admit` refuses the request next

    def admit(self, request_log: RequestLog, headers: dict[str, str], right: str) -> None:
        """Record the caller on the request log. ApiError 401 without a valid key, 403 for a key without the
        route's right.
        """
        caller = self.service.credentials.caller(headers.get("authorization"))
        caller.require(right)
        if request_log.tenant is not None:
            caller = caller.speaking_for(request_log.tenant)
        request_log.caller = caller
        if caller.tenant:  # else the header or the body may name the tenant
            request_log.tenant = caller.tenant

    # The routes

    async def _answer(
        self, kind: BodyKind, request_log: RequestLog, reply: AsgiResponse, headers: Headers, body: bytes
    ) -> None:
        """Answer chat or completions. Servers that speak text get the body unchanged and validate it."""
        request_log.body_bytes = len(body)
        fields = await self.reader.for_text_servers(request_log, body)
        table = None if fields is None else await self._text_table(request_log)
        if fields is not None and table is not None:
            read = await self.reader.foreign_prompt(request_log, fields, body, table, chat=kind == "chat")
            await self._relay(CHAT_ROUTE, request_log, reply, headers, body, fields, read)
        else:
            stream = await self._token_stream(kind, request_log, reply, headers, body)
            del body
            await stream.run()

    async def _text_table(self, request_log: RequestLog) -> TargetTable | None:
        """Return the servers of the request's model, once a live one is known; None if they take ids."""
        table = await self.service.wait_queue.live_target_table(request_log, request_log.model)
        return table if table.dialect == "text" else None

    async def _answer_other(
        self,
        route: ForeignRoute,
        method: str,
        request_log: RequestLog,
        reply: AsgiResponse,
        headers: Headers,
        body: bytes,
    ) -> None:
        """Forward a request that only servers that speak text understand."""
        if route.kind is not RouteKind.INFERENCE:
            await self._direct.run(
                route,
                request_log,
                reply,
                headers,
                UpstreamRequest(method, "", _target(request_log), [], body),
            )
            return
        request_log.body_bytes = len(body)
        fields = await self.reader.for_text_servers(request_log, body)
        if fields is None or await self._text_table(request_log) is None:
            message = (
                "the engines of this fleet serve chat and completions; no server behind this router takes"
                f" {request_log.path}"
            )
            raise ApiError(
                404,
                f"{message} for {request_log.model!r}" if request_log.model else message,
                code="route_not_found",
            )
        await self._relay(
            route, request_log, reply, headers, body, fields, self.reader.text_prompt(request_log, fields)
        )

    async def _relay(
        self,
        route: ForeignRoute,
        request_log: RequestLog,
        reply: AsgiResponse,
        headers: Headers,
        body: bytes,
        fields: LenientRequest,
        read: ForeignPrompt,
    ) -> None:
        request_log.stream = fields.stream and route.generates
        only = None
        if fields.refers_to is not None and route.creates:
            kind = "responses" if request_log.path == "/v1/responses" else "files"
            only = (
                await self._direct.find(fields.refers_to, f"/v1/{kind}/{fields.refers_to}", request_log)
            ).rank
        request = ForwardedRequest(
            "POST",
            _target(request_log),
            request_log.client_headers,
            body,
            (
                fields
                if fields.stream == request_log.stream
                else msgspec.structs.replace(fields, stream=request_log.stream)
            ),
            read,
            self.reader.expected(fields.max_tokens) if route.generates else 1,
            own_credentials=self.service.credentials.clients is None,
            repeatable=route.repeatable,
            creates=route.creates,
            only=only,
        )
        await Relay(self.service, request_log, reply, headers, request, self._unstreamed, self._located).run()

    async def _token_stream(
        self, kind: BodyKind, request_log: RequestLog, reply: AsgiResponse, headers: Headers, body: bytes
    ) -> TokenStream:
        """Decode a request for ranks that speak token ids. A frame of its own, so that the decoded body,
        which is large, is not kept while the answer lasts.
        """
        decoded = await self.reader.decoded(kind, request_log, body)
        request = decoded.request
        table = await self.service.wait_queue.live_target_table(request_log, request.model)
        other = self.service.other_runtime
        if other is not None and len(other.without_http(table)) == len(table.targets):
            raise ApiError(
                404,
                f"the model {request.model!r} is served by workers of another runtime: send the request to"
                f" its frontend; {ROUTE_PATH} here says which worker it should get",
                code="route_not_found",
            )
        settings, states = await self.reader.completion_states(request_log, decoded, table)
        request_log.prompt_tokens = sum(len(state.prompt) for state in states[:: settings.n])
        prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
        request_log.answer_id = f"{prefix}-{request_log.decision_id}"
        head = ResponseHead(id=request_log.answer_id, model=request.model, created=int(time.time()))
        answer = answer_for(request, head, len(states))
        return TokenStream(
            self.service, request_log, reply, headers, answer, states, settings.n, table.tokenizer
        )

    async def _explain(
        self, query: bytes, request_log: RequestLog, reply: AsgiResponse, headers: Headers, body: bytes
    ) -> None:
        decision = await self.choose(request_log, body, supposed=parsed_query(query))
        answer = msgspec.json.encode(self._record(decision))
        await reply.whole(200, [*headers, *_about(decision)], answer)

    async def _reserve(
        self, wait: bool | None, request_log: RequestLog, reply: AsgiResponse, headers: Headers, body: bytes
    ) -> None:
        if wait is None:
            raise ApiError(
                400, "what can be asked here is ?wait=true or ?wait=false", param="wait", code="invalid_value"
            )
        decision = await self.choose(request_log, body, reserve=True, wait=wait)
        answer = msgspec.json.encode(
            reserved(
                self._record(decision),
                decision.target.url,
                self.service.external_reservations.seconds,
                decision.cache_salt,
            )
        )
        await reply.whole(200, [*headers, *_about(decision)], answer)

    def _record(self, decision: Decision) -> DecisionRecord:
        """Return the record for a caller that sends the request itself."""
        record, other = decision.record(), self.service.other_runtime
        named = {} if other is None else other.headers(decision.target.key)
        return msgspec.structs.replace(record, headers={**record.headers, **named}) if named else record

    async def _release(
        self, request_log: RequestLog, reply: AsgiResponse, headers: Headers, body: bytes
    ) -> None:
        if len(body) > _MAX_RELEASE_BYTES:
            raise ApiError(413, f"a release is longer than {_MAX_RELEASE_BYTES} bytes", code="body_too_large")
        try:
            release = msgspec.json.decode(body, type=ReleaseRequest)
        except UNREADABLE as error:
            raise ApiError(
                400, f'the body must be {{"id": "...", "first_token": false}}: {error}', code="invalid_value"
            ) from error
        released = self.service.released(
            release.id, first_token=release.first_token, tenant=request_log.caller.sees
        )
        await reply.whole(200, [*headers, _JSON], msgspec.json.encode(released))

    async def choose(
        self,
        request_log: RequestLog,
        body: bytes,
        *,
        reserve: bool = False,
        wait: bool = False,
        supposed: Supposed = NOTHING,
    ) -> Decision:
        """Return the decision that the first prompt of a chat or completions body would get now, under the
        what-if `supposed`.

        reserve: book the load; wait: queue for capacity as well. ApiError 400 for an invalid request, 404 for
        an unknown model, 429 at once when every rank is saturated and wait is false, 503 when no engine is
        alive.
        """
        if reserve and supposed != NOTHING:
            raise ApiError(
                400,
                "a reservation is for what is, not for what is supposed: leave out `without` and `gone`",
                code="invalid_value",
            )
        need = msgspec.structs.replace(
            await self.reader.routing_request(request_log, body), supposed=supposed, external=reserve
        )
        if reserve:
            request_log.decision, booking = await self.service.wait_queue.admit(
                request_log, need, "", FIRST_TRY, begun=False, wait=wait
            )
            self.service.hold(request_log.decision, booking)
        else:
            request_log.decision = self.service.decide(need, request_log.decision_id)
        return request_log.decision


def _target(request_log: RequestLog) -> str:
    """Return path and query as they are sent to a server."""
    return request_log.path + (f"?{request_log.query.decode('latin-1')}" if request_log.query else "")


def _address(scope: Scope) -> str:
    """Return the client's address; "" if its connection has none (a Unix socket)."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _about(decision: Decision) -> Headers:
    return [_JSON, decision_header(decision.id)]


async def _break_off(request_log: RequestLog, reply: AsgiResponse, headers: Headers) -> None:
    """Answer a request whose task was cancelled because the grace period of a shutdown is over.

    The cancellation is taken back, because the client gets an answer; a second one breaks the connection.
    """
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
    refusal = not_ready("the router is stopping, and could not finish this answer in time; ask again")
    await _refuse(request_log, reply, headers, refusal)


async def _refuse(
    request_log: RequestLog, reply: AsgiResponse, headers: Headers, error: ApiError
) -> RequestEnd:
    """Report an error to the client: as a response, as an event of a begun stream, or by breaking the
    connection.
    """
    request_log.detail = error.message
    if reply.ended:
        return RequestEnd.BROKEN
    if reply.status:
        if reply.streams_events:
            await reply.end(error_event(request_log.path, error))
        else:
            reply.abandon()
        return RequestEnd.BROKEN
    if request_log.decision is not None:
        headers = [*headers, decision_header(request_log.decision.id)]
    await reply.error(error, headers)
    return outcome_of(error.status)


def outcome_of(status: int) -> RequestEnd:
    """Return the outcome of an answer that was completed."""
    if status < 400:
        return RequestEnd.ANSWERED
    if status == 429:
        return RequestEnd.SATURATED
    return RequestEnd.REFUSED if status < 500 else RequestEnd.UNAVAILABLE
