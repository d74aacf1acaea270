"""Answer a request with servers that speak text: the body and the answer pass unchanged.

Another server is tried while the client has received nothing; afterwards a failed answer ends with an error
event.
"""

from functools import partial
from typing import NoReturn

from fleet.completions import ApiError
from router.attempt import make_attempt
from router.fleet_state.reservations import Booking
from router.fleet_state.target_table import RankKey
from router.foreign_api.continuation import Continuable, InexactContinuation
from router.foreign_api.event_stream import EventStream
from router.foreign_api.forwarded import ForwardedRequest
from router.foreign_api.headers import decision_header, length_of, own_headers, to_client, to_server
from router.foreign_api.object_locations import ObjectLocation, ObjectLocations, object_id
from router.foreign_api.returned_ids import IdsFilter, asking, prompt_of, without_ids
from router.foreign_api.routed_experts_parser import RoutedExpertsParser, TokenUsage
from router.foreign_api.usage import counted
from router.health.attempt_failures import AttemptFailure, BegunAnswer
from router.http.asgi_response import AsgiResponse, Headers
from router.openai_api.request_schema import CHAT_PATH, TEXT_PATH
from router.passthrough.event_relay import EventRelay
from router.passthrough.positions import find_position
from router.passthrough.unstreamed import UnstreamedAnswers
from router.prefix_index.prompt import Prompt, TextPrompt, TokenPrompt
from router.scheduling.decision import Decision
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from router.telemetry.tracing import AttemptTrace
from router.upstream.rank_client import Call, UpstreamFailed, UpstreamRefusal, UpstreamRequest, api_error

_TAIL_BYTES = 4096
"""End of a stream that is kept to read its usage from."""
_TAIL_PIECES = 5
"""Pieces of one or more events that are kept for that: more than `counted` looks at."""
_BUSY = frozenset({429, 529})
"""529 is Anthropic's status for overload."""
_RETRY_SECONDS = b"2"
"""Retry-After for clients of a busy or failed server that sends none."""
_BODILESS = frozenset({204, 304})
_DONE = b"[DONE]"


class _Ended(ApiError):
    """An answer that has begun cannot be finished; the text says why."""


class _PassedEvents:
    """Events of one attempt on their way to the client."""

    __slots__ = ("_ends", "events", "held", "nothing", "relay", "stream")

    def __init__(self, stream: EventStream, relay: EventRelay | None) -> None:
        """relay: passes events on, too, once the answer has begun; None: they all come here."""
        self.stream = stream
        self.relay = relay
        self.held = b""
        """events that the client does not have yet"""
        self.nothing = True
        """nothing was passed on yet"""
        self.events = 0
        """number of events since the last update of the booking"""
        self._ends: list[bytes] = []

    def add(self, ready: bytes) -> None:
        """Record events that were passed on here, and those that the relay passed on before."""
        if self.relay is not None and self.relay.events:
            self._ends.append(b"\n\n" * self.relay.events)  # none of them says anything of the end
            self.events += self.relay.events
            self.relay.events = 0
        if ready:
            self._ends.append(ready)
            del self._ends[:-_TAIL_PIECES]
        self.events += ready.count(b"\n\n")

    @property
    def tail(self) -> bytes:
        """End of what was passed on."""
        return b"".join(self._ends)[-_TAIL_BYTES:]

    @property
    def done(self) -> bool:
        return self.tail.rstrip().endswith(_DONE)


class Relay:
    """One request, tried at one server after another until one answers."""

    def __init__(
        self,
        service: RouterService,
        request_log: RequestLog,
        reply: AsgiResponse,
        headers: Headers,
        request: ForwardedRequest,
        unstreamed: UnstreamedAnswers,
        located: ObjectLocations,
    ) -> None:
        self._service = service
        self._request_log = request_log
        self._reply = reply
        self._headers = headers
        self._request = request
        self._unstreamed = unstreamed
        self._located = located
        self._prompt = request.read.prompt
        self._failures: tuple[tuple[RankKey, AttemptFailure], ...] = ()
        self._reported = False
        """the answer contained its expert routing"""
        self._events: EventStream | None = None
        """stream of the present attempt, if its answer is a stream"""
        self._continuable: Continuable | None = None
        """state of an answer that another server may continue"""
        self._strips = False
        """the present server was asked for token ids that the client does not see"""
        self._begun: BegunAnswer | None = None

    async def run(self) -> None:
        """Answer the request. ApiError when no server answers, or when the answer breaks off after it has
        begun (see `AsgiResponse.status`).
        """
        attempt, fruitless, replaces = 1, 0, None
        refused: UpstreamRefusal | None = None
        while True:
            had = self._progress
            try:
                decision, failed = await self._try(attempt, replaces)
                if failed is None or await self._finish_if_only_end_missing(failed):
                    return
                refused = failed.refused or refused
                fruitless = 1 if self._progress > had else fruitless + 1
                self._check_retry(failed, fruitless)
            except _Ended:
                raise
            except ApiError as error:
                await self._give_up(error, refused)
                return
            attempt, replaces = attempt + 1, decision.id

    @property
    def _progress(self) -> int:
        """Tokens received, if they are counted."""
        return 0 if self._continuable is None else len(self._continuable.ids)

    async def _finish_if_only_end_missing(self, failed: UpstreamFailed) -> bool:
        """Send the end of an answer of which nothing else was missing, and return true. False: the answer has
        not begun, or another server can continue it; ApiError if none can.
        """
        if not self._reply.status:
            return False
        continuable = self._continuable
        why_not = (
            "this answer cannot be continued by another server"
            if continuable is None
            else continuable.why_not()
        )
        if why_not is not None:
            await self._broken(f"{failed.how.value}; {why_not}", failed)
        if continuable is None or not continuable.finished:
            return False
        await self._end_continued()
        return True

    def _check_retry(self, failed: UpstreamFailed, attempts: int) -> None:
        """Raise ApiError unless another server may be tried."""
        repeatable = self._request.repeatable or failed.how is AttemptFailure.CONNECT
        if attempts >= self._service.config.max_attempts or not repeatable:
            raise failed.refusal(attempts)
        self._service.may_retry(failed.how, begun=bool(self._reply.status))

    async def _give_up(self, error: ApiError, refused: UpstreamRefusal | None) -> None:
        """Answer with the last server's own error, which is more precise than the router's. Raise `error` if
        there is none, or as the end of an answer that has begun.
        """
        if self._reply.status:
            await self._broken(f"no other server could continue it: {error.message}", error)
        if refused is None:
            raise error
        await self._refuse(refused)

    async def _broken(self, why: str, cause: Exception) -> NoReturn:
        """Raise ApiError for an answer that has begun and cannot be finished."""
        if self._events is not None and self._events.separator():
            await self._reply.write(self._events.separator())
        raise _Ended(
            502, f"the server broke off its answer ({why}); ask again", code="upstream_failed"
        ) from cause

    async def _try(self, attempt: int, replaces: str | None) -> tuple[Decision, UpstreamFailed | None]:
        """Make one attempt at one server."""
        request_log, begun, continuable = self._request_log, bool(self._reply.status), self._continuable
        prompt, output = self._prompt, self._request.output
        if begun and continuable is not None:
            prompt = self._longer_prompt(continuable)
            output = min(output, continuable.remaining)
        need = RoutingRequest(
            request_log.model,
            prompt,
            0,
            output,
            None,
            request_log.request_id,
            request_log.keys(),
            owner=request_log.owner,
            only=self._request.only,
            begun=self._begun if begun else None,
            takes_ids=begun,
        )
        tried = Attempt(attempt, replaces, self._failures)
        decision, failed = await make_attempt(
            self._service, request_log, need, tried, self._attempt, begun=begun
        )
        if failed is not None:
            self._failures += ((decision.target.key, failed.how),)
        return decision, failed

    def _longer_prompt(self, continuable: Continuable) -> Prompt:
        """Return the prompt of a continuation, known in the same way as the client's."""
        if isinstance(self._prompt, TokenPrompt):
            return self._prompt.with_ids([*(continuable.prompt or ()), *continuable.ids])
        fields, request_log = self._request.fields, self._request_log
        text = continuable.text.encode("utf-8", "surrogatepass")
        if fields.prompt_bytes is not None:
            return TextPrompt(
                fields.prompt, request_log.model, request_log.block_seed, fields.prompt_bytes + len(text)
            )
        return TextPrompt(fields.prompt + text, request_log.model, request_log.block_seed)

    # One server

    async def _attempt(self, decision: Decision, booking: Booking, span: AttemptTrace | None) -> None:
        """Forward the request to one server. The client then has its answer, which may be a refusal."""
        self._request_log.decision = decision
        request, target, self._events = self._request, self._request.target, None
        if self._reply.status:
            rest = await self._continuation_body(decision)
            if rest is None:
                await self._end_continued()
                self._service.finished(decision, booking, self._prompt, reported=self._reported)
                return
            target, body = TEXT_PATH, rest
        else:
            body = self._first_body(decision)
        if decision.cache_salt and request.is_json:
            body = await self._service.bodies.with_salt(self._request_log.client, body, decision.cache_salt)
        sent = UpstreamRequest(
            request.method, decision.target.url, target, self._sent_headers(decision, span), body
        )
        call = self._service.upstream.forward(sent, stream=request.fields.stream)
        watched = not request.fields.stream
        if watched:
            self._unstreamed.begin(decision, booking, call, self._prompt)
        try:
            async with call:
                good = call.status < 400
                if not good:
                    await self._check_status(decision, call)
                if good and call.content_type.startswith("text/event-stream"):
                    await self._stream(decision, booking, call)
                else:
                    await self._whole(decision, call)
        finally:
            if watched:
                self._unstreamed.end(call)
        if good:
            self._service.finished(decision, booking, self._prompt, reported=self._reported)

    def _first_body(self, decision: Decision) -> bytes:
        """Return the client's body for a server that begins the answer, with a request for token ids if they
        are of use. What has no continuation is then stripped of them here.
        """
        request, continuable = self._request, self._new_continuable(decision)
        self._strips = False
        if continuable is not None:
            return continuable.body()
        self._strips = (
            request.read.asks
            and not request.fields.stream
            and decision.target.engine.capabilities.returns_ids
        )
        return asking(request.body) if self._strips else request.body

    def _new_continuable(self, decision: Decision) -> Continuable | None:
        """Return the state for a continuation by another server; None: the chosen server returns no ids, the
        answer is no stream of text, or the body is large and no other process has read its fields: that
        would block the event loop.
        """
        path, _, _ = self._request.target.partition("?")
        self._continuable = None
        if (
            self._request.fields.stream
            and path in (CHAT_PATH, TEXT_PATH)
            and (
                len(self._request.body) <= self._service.config.large_body_bytes
                or self._request.read.continuable
            )
            and decision.target.engine.capabilities.returns_ids
        ):
            at = decision.target_table.index[decision.target.key]
            context = int(decision.target_table.max_context[at])
            self._continuable = Continuable(
                path,
                self._request.body,
                context,
                asks=self._request.read.asks,
                fields=self._request.read.continuable,
            )
            self._begun = BegunAnswer(decision.target.engine.weights_digest)
        return self._continuable

    async def _continuation_body(self, decision: Decision) -> bytes | None:
        """Return the body for the server that continues; None: every token has arrived. ApiError when the
        continuation would not be exact.
        """
        continuable = self._continuable
        assert continuable is not None
        try:
            if continuable.positions():
                headers = self._sent_headers(decision, None)
                await find_position(
                    continuable, self._service.upstream, decision.target.url, headers, self._request_log.model
                )
            return continuable.request()
        except InexactContinuation as inexact:
            await self._broken(str(inexact), inexact)

    async def _end_continued(self) -> None:
        """Send the end of a stream of which only the end was missing."""
        assert self._continuable is not None
        await self._reply.end(self._continuable.ending())

    def _sent_headers(self, decision: Decision, span: AttemptTrace | None) -> Headers:
        request_log, key = self._request_log, self._service.credentials.backend_key_of(decision.target.url)
        context = request_log.pass_on if span is None else span.headers
        # An engine on the bus reports its requests by this id, so that each attempt needs one of its own.
        on_bus = not self._service.backends.probes(decision.target.key[0])
        own = own_headers(context, decision.id if on_bus else request_log.request_id, decision.id, key)
        own += decision.target.rank_header
        if request_log.caller.tenant:  # a server may trust this header, so it must name the tenant of the key
            own.append((self._service.config.tenant_header.encode(), request_log.caller.tenant.encode()))
        if self._reply.status:  # a continuation is a request of the router's own
            own.append((b"content-type", b"application/json"))
        return to_server(
            self._request.headers, own, credentials=key is None and self._request.own_credentials
        )

    async def _check_status(self, decision: Decision, call: Call) -> None:
        """Classify an error status. UpstreamFailed when another server may succeed.

        An error about the request, or about the client's own key, is the answer. So is any 403: a server that
        forbids something to this router applies a policy, and does not fail.
        """
        busy, own_fault = call.status in _BUSY, call.status >= 500 or bool(self._reply.status)
        key = self._service.credentials.backend_key_of(decision.target.url)
        checks_client = self._request.own_credentials and key is None
        if call.status == 401 and not checks_client:
            detail = (
                f"{decision.target.url}: HTTP 401: the server refused the router's key; set backend_key_file"
            )
            raise UpstreamFailed(AttemptFailure.SERVER_ERROR, detail)
        if busy or (own_fault and self._request.repeatable):
            body = await call.error_body()
            refused = UpstreamRefusal(call.status, call.headers, body)
            message = api_error(call.status, body).message
            how = AttemptFailure.BUSY if busy else AttemptFailure.SERVER_ERROR
            raise UpstreamFailed(how, f"{decision.target.url}: HTTP {call.status}: {message}", refused)

    async def _refuse(self, refused: UpstreamRefusal) -> None:
        """Pass on the last server's error unchanged."""
        own: Headers = [(b"content-length", str(len(refused.body)).encode())]
        names = {name.lower() for name, _ in refused.headers}
        if refused.status in (429, 503) and b"retry-after" not in names:
            own.append((b"retry-after", _RETRY_SECONDS))
        self._request_log.detail = api_error(refused.status, refused.body).message
        await self._start(refused.status, refused.headers, own)
        await self._reply.end(refused.body)

    # Answers

    async def _stream(self, decision: Decision, booking: Booking, call: Call) -> None:
        """Forward a stream of events to its end."""
        stream = self._events = EventStream(self._service.config.max_event_bytes)
        tap, continuable = self._service.tap(decision), self._continuable
        relay = EventRelay(self._reply.body) if tap is None and continuable is None else None
        passed, over = _PassedEvents(stream, relay), False
        take = partial(self._take, booking, call, passed, tap)
        try:
            while not over:
                ready, over = await call.through(take)
                if ready:
                    if not self._reply.status:
                        self._locate(decision, ready)
                        await self._start(call.status, call.headers, [])
                    await self._reply.write(ready)
                if continuable is not None and continuable.broken:
                    raise UpstreamFailed(AttemptFailure.BROKEN, continuable.broken)  # noqa: TRY301
        except UpstreamFailed:
            if not passed.done:  # after [DONE] only the end of the connection was lost
                raise
        rest = passed.held + stream.rest
        self._check_end(rest)
        if not self._reply.status:
            await self._start(call.status, call.headers, [])
        call.whole()
        if continuable is not None and continuable.prompt is not None:
            self._prompt_came(decision, continuable.prompt)
            self._request_log.output_tokens = len(continuable.ids) + continuable.other_ids
        passed.add(b"")
        self._count(passed.tail.split(b"\n\n"))
        self._note(decision, tap)
        await self._reply.end(rest)

    def _take(
        self,
        booking: Booking,
        call: Call,
        passed: _PassedEvents,
        tap: RoutedExpertsParser | None,
        data: bytes,
    ) -> tuple[bytes, bool] | None:
        """Pass on a server's bytes that no relay took. None: the client has what is complete. Otherwise the
        bytes that are left to send, and true when the stream is over.
        """
        call.relay(None)
        if not data:
            return b"", True
        ready = self._ready(passed.stream.feed(data), passed)
        if ready and passed.nothing:
            passed.nothing = False
            self._request_log.first_token(self._service.clock())
            self._service.first_token(booking)
        if self._continuable is not None and self._continuable.broken:
            return ready, False
        if tap is not None:
            tap.feed(ready)
        passed.add(ready)
        if passed.events >= booking.counted_every:
            self._service.emitted(booking, passed.events)
            passed.events = 0
        if ready and not self._reply.write_now(ready):
            return ready, False
        if passed.relay is not None and self._reply.status and passed.stream.between_events:
            passed.relay.until = booking.counted_every - 1 - passed.events
            call.relay(passed.relay)
        return None

    def _ready(self, events: bytes, passed: _PassedEvents) -> bytes:
        """Return the bytes for the client. Nothing until there is more than a role: up to there another
        server can start afresh.
        """
        continuable = self._continuable
        ready = passed.held + (events if continuable is None else continuable.take(events))
        if continuable is not None and not continuable.begun and not continuable.broken:
            passed.held = ready
            return b""
        passed.held = b""
        return ready

    def _check_end(self, rest: bytes) -> None:
        """Raise UpstreamFailed if a stream ended too early. rest: bytes that the client does not have yet."""
        if not self._reply.status and not rest:
            raise UpstreamFailed(AttemptFailure.BROKEN, "the stream ended before it began")
        continuable = self._continuable
        if continuable is not None and not continuable.finished and continuable.why_not() is None:
            raise UpstreamFailed(AttemptFailure.BROKEN, "the stream ended without a finish reason")

    async def _whole(self, decision: Decision, call: Call) -> None:
        """Forward an unstreamed answer. JSON is buffered up to a limit until it is complete, so that another
        server can replace one that dies; anything else is forwarded as it arrives.
        """
        tap = self._service.tap(decision) if call.status < 400 else None
        body = await self._buffered(call, tap)
        call.whole()
        self._request_log.arrived_whole(self._service.clock())
        if self._strips and call.status < 400 and not self._reply.status:
            self._prompt_came(decision, prompt_of(body))
            body = without_ids(body)
        if call.status < 400:
            self._locate(decision, body)
            self._count([body])
            self._note(decision, tap)
        else:
            self._request_log.detail = api_error(call.status, body).message
        if self._reply.status:
            await self._reply.end()
            return
        own: Headers = [] if call.status in _BODILESS else [(b"content-length", str(len(body)).encode())]
        await self._start(call.status, call.headers, own)
        await self._reply.end(body)

    async def _buffered(self, call: Call, tap: RoutedExpertsParser | None) -> bytes:
        """Read an answer to its end and return it. Beyond the limit it is forwarded, and only its beginning
        is returned.
        """
        is_json = call.content_type.startswith("application/json")
        limit = self._service.config.max_event_bytes if is_json else 0
        body, strips = b"", IdsFilter() if self._strips else None
        while data := await call.read():
            if tap is not None:
                tap.feed(data)
            if not self._reply.status:
                body += data
                if len(body) <= limit:
                    continue
                data = body
                length = length_of(call.headers) if strips is None else []
                await self._start(call.status, call.headers, length)
            await self._reply.write(data if strips is None else strips.feed(data))
        if strips is not None and strips.rest:
            await self._reply.write(strips.rest)
        return body

    def _prompt_came(self, decision: Decision, ids: list[int] | None) -> None:
        """Record the prompt's ids that a server states. They win over the router's own."""
        if not ids:
            return
        self._request_log.prompt_tokens = len(ids)
        if isinstance(self._prompt, TokenPrompt) and self._prompt.ids != ids:
            self._prompt = self._service.prompt_differs(decision, self._prompt, ids)

    def _note(self, decision: Decision, tap: RoutedExpertsParser | None) -> None:
        """Pass on the expert routing of the answer, after its tokens were counted."""
        self._reported = tap is not None and self._service.routed(decision, tap, self._usage())

    def _usage(self) -> TokenUsage:
        request_log = self._request_log
        return TokenUsage(request_log.prompt_tokens, request_log.output_tokens, request_log.cached_tokens)

    def _locate(self, decision: Decision, answer: bytes) -> None:
        """Remember the location of the object that an answer created."""
        made = object_id(answer) if self._request.creates else None
        if made is not None:
            self._located.note(made, ObjectLocation(decision.target.key, self._request_log.caller.tenant))

    async def _start(self, status: int, server: Headers, own: Headers) -> None:
        decision = self._request_log.decision
        id_header = [] if decision is None else [decision_header(decision.id)]
        await self._reply.start(status, to_client(server, [*self._headers, *id_header, *own]))

    def _count(self, events: list[bytes]) -> None:
        """Record the server's token counts, if any, for log and metrics."""
        usage = counted(events)
        if usage is not None:
            self._request_log.prompt_tokens = usage.prompt_tokens
            self._request_log.output_tokens = usage.completion_tokens
            self._request_log.cached_tokens = (
                usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
            )
