"""Answers a request with servers that speak text: the body goes there as it came, and the answer comes back as it is.

Another server is tried while the client has nothing yet; afterwards the answer ends with an error event.
"""

from contextlib import nullcontext

import msgspec

from fleet.completions import DECISION_HEADER, ApiError
from fleet.completions import Usage as CountedUsage
from router.bodies.passthrough import Asked
from router.course import Failure
from router.decision import Decision
from router.exchange import Exchange
from router.foreign_routings import Tap, Usage
from router.passthrough.events import EventStream
from router.passthrough.headers import to_client, to_server, value_of
from router.passthrough.located import Located, Place, object_id
from router.passthrough.unstreamed import Unstreamed
from router.picker import Need, Try
from router.prompt import TextPrompt
from router.proxy import Call, Refused, Sent, UpstreamFailed, api_error
from router.reply import Headers, Reply
from router.reservations import Booking
from router.roster import RankKey
from router.service import RouterService
from router.tenancy import with_salt
from router.tracing import AttemptTrace

_COUNTED_EVERY = 16
"""events, each taken for a token, after which the booking's remaining tokens are updated"""
_TAIL_BYTES = 4096
"""Kept of a stream, to read its usage from."""
_LAST_EVENTS = 4
"""Usage stands in the last event of a stream, or in the one before its end."""
_BUSY = frozenset({429, 529})
"""529 is Anthropic's."""
_RETRY_SECONDS = b"2"
"""For clients of a server that is busy or down and does not say when to come back."""
_BODILESS = frozenset({204, 304})
_DONE = b"[DONE]"


class _Counted(msgspec.Struct):
    usage: CountedUsage | None = None


_COUNTED: msgspec.json.Decoder[_Counted] = msgspec.json.Decoder(_Counted)


class Forwarded(msgspec.Struct, frozen=True):
    """A client's request as it will be sent on."""

    method: str
    target: str
    """path and query"""
    headers: Headers
    body: bytes
    asked: Asked
    output: int
    """tokens that are expected"""
    own_credentials: bool = True
    """this router asks its clients for no key: theirs are meant for the servers"""
    repeatable: bool = True
    """a server that fails without an answer may have done nothing, and another one may be asked"""
    creates: bool = False
    """the answer names an object that stays on its server"""
    only: RankKey | None = None
    """the server of what the request refers to"""

    @property
    def is_json(self) -> bool:
        """False for uploads."""
        return not value_of(self.headers, b"content-type").lower().startswith("multipart/")


class Relay:
    """One request, from server to server until one answers."""

    def __init__(
        self, service: RouterService, exchange: Exchange, reply: Reply, headers: Headers, request: Forwarded, unstreamed: Unstreamed, located: Located
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._reply = reply
        self._headers = headers
        self._request = request
        self._unstreamed = unstreamed
        self._located = located
        self._prompt = TextPrompt(request.asked.prompt, exchange.model, exchange.block_seed, request.asked.prompt_bytes)
        self._failures: tuple[tuple[RankKey, Failure], ...] = ()
        self._reported = False
        """the answer named the experts that were chosen"""
        self._events: EventStream | None = None
        """of the present attempt, if its answer is a stream"""

    async def run(self) -> None:
        """ApiError when no server answers, or when the answer breaks off after it has begun (`Reply.status` tells)."""
        attempt, replaces = 1, None
        refused: Refused | None = None
        while True:
            try:
                decision, failed = await self._try(attempt, replaces)
            except ApiError:
                if refused is None or self._reply.status:
                    raise
                await self._refuse(refused)  # rather than the router's summary of what the servers said
                return
            if failed is None:
                return
            if self._reply.status:
                await self._broken(failed)
            refused = failed.refused or refused
            attempt, replaces = attempt + 1, decision.id
            if not await self._again(failed, attempt, refused):
                return

    async def _again(self, failed: UpstreamFailed, attempt: int, refused: Refused | None) -> bool:
        """Whether to ask another server. False: the client has got the last server's own answer instead."""
        try:
            if attempt > self._service.config.max_attempts or not (self._request.repeatable or failed.how is Failure.CONNECT):
                raise failed.refusal(attempt - 1)
            self._service.may_retry(failed.how, begun=False)
        except ApiError:
            if refused is None:
                raise
            await self._refuse(refused)
            return False
        return True

    async def _broken(self, failed: UpstreamFailed) -> None:
        """The answer has begun and cannot be finished: ApiError."""
        if self._events is not None and self._events.separator():
            await self._reply.write(self._events.separator())
        raise ApiError(502, f"the server broke off its answer ({failed.how.value}); ask again", code="upstream_failed") from failed

    async def _try(self, attempt: int, replaces: str | None) -> tuple[Decision, UpstreamFailed | None]:
        """One attempt at one server; its booking and its span end here, whatever happens."""
        about = self._exchange
        need = Need(about.model, self._prompt, 0, self._request.output, None, about.request_id, about.keys(), owner=about.owner, only=self._request.only)
        suffix = f"-a{attempt}" if attempt > 1 else ""
        decision, booking = await self._service.waiting.admit(self._exchange, need, suffix, Try(attempt, replaces, self._failures), begun=False)
        self._exchange.decision = decision
        span: AttemptTrace | None = None
        ended: str | None = "abandoned"
        try:
            span = None if self._exchange.trace is None else self._exchange.trace.attempt(decision)
            served = await self._attempt(decision, booking, span)
        except UpstreamFailed as failed:
            ended = failed.how.value
            self._service.attempt_failed(self._exchange, decision, booking, failed.how, str(failed))
            self._failures += ((decision.target.key, failed.how),)
            return decision, failed
        else:
            ended = None
            if served:
                self._service.finished(decision, booking, self._prompt, reported=self._reported)
            return decision, None
        finally:
            self._service.release(booking)
            if span is not None:
                span.end(ended)

    # One server

    async def _attempt(self, decision: Decision, booking: Booking, span: AttemptTrace | None) -> bool:
        """Whether the server served the request; False: it refused it, and the client knows."""
        request = self._request
        self._events = None
        salt = decision.cache_salt if request.is_json else ""
        body = with_salt(request.body, salt) if salt else request.body
        sent = Sent(request.method, decision.target.url, request.target, self._sent_headers(decision, span), body)
        call = self._service.upstream.forward(sent, stream=request.asked.stream)
        with nullcontext() if request.asked.stream else self._unstreamed.awaited(decision, booking, call):
            return await self._answered(decision, booking, call)

    async def _answered(self, decision: Decision, booking: Booking, call: Call) -> bool:
        async with call:
            if call.status >= 400:
                await self._judge(decision, call)
            if call.status < 400 and call.content_type.startswith("text/event-stream"):
                await self._stream(decision, booking, call)
            else:
                await self._whole(decision, booking, call)
            return call.status < 400

    def _sent_headers(self, decision: Decision, span: AttemptTrace | None) -> Headers:
        exchange, key = self._exchange, self._service.credentials.backend_key_of(decision.target.url)
        trace = exchange.pass_on if span is None else span.headers
        own = [(name.encode(), value.encode("latin-1", "replace")) for name, value in trace.items()]
        own += [(b"x-request-id", exchange.request_id.encode()), (DECISION_HEADER.encode(), decision.id.encode())]
        if key is not None:
            own.append((b"authorization", f"Bearer {key}".encode("latin-1", "replace")))
        return to_server(self._request.headers, own, credentials=self._own_key(decision))

    def _own_key(self, decision: Decision) -> bool:
        """Whether the chosen server judges the client's own key."""
        return self._request.own_credentials and self._service.credentials.backend_key_of(decision.target.url) is None

    async def _judge(self, decision: Decision, call: Call) -> None:
        """Of an error: UpstreamFailed where another server may do better. What is about the request, or about the client's own key, is the
        answer. So is any 403: what a server forbids to this router is a matter of policy, and no fault of its own."""
        busy, own_fault = call.status in _BUSY, call.status >= 500
        if call.status == 401 and not self._own_key(decision):
            detail = f"{decision.target.url}: HTTP 401: the server refused the router's key; set backend_key_file"
            raise UpstreamFailed(Failure.SERVER_ERROR, detail)
        if busy or (own_fault and self._request.repeatable):
            body = await call.error_body()
            refused = Refused(call.status, call.headers, body)
            message = api_error(call.status, body).message
            how = Failure.BUSY if busy else Failure.SERVER_ERROR
            raise UpstreamFailed(how, f"{decision.target.url}: HTTP {call.status}: {message}", refused)

    async def _refuse(self, refused: Refused) -> None:
        """Pass on an error of the last server as it came."""
        own: Headers = [(b"content-length", str(len(refused.body)).encode())]
        names = {name.lower() for name, _ in refused.headers}
        if refused.status in (429, 503) and b"retry-after" not in names:
            own.append((b"retry-after", _RETRY_SECONDS))
        self._exchange.detail = api_error(refused.status, refused.body).message
        await self._start(refused.status, refused.headers, own)
        await self._reply.end(refused.body)

    # Answers

    async def _stream(self, decision: Decision, booking: Booking, call: Call) -> None:
        stream = self._events = EventStream(self._service.config.max_event_bytes)
        tail, tap, events = b"", self._service.tap(decision), 0
        try:
            while data := await call.read():
                ready = stream.feed(data)
                if not ready:
                    continue
                if not self._reply.status:
                    self._first(booking)
                    self._locate(decision, ready)
                    await self._start(call.status, call.headers, [])
                await self._reply.write(ready)
                if tap is not None:
                    tap.feed(ready)
                tail = (tail + ready)[-_TAIL_BYTES:]
                events += ready.count(b"\n\n")
                if events >= _COUNTED_EVERY:
                    self._service.emitted(booking, events)
                    events = 0
        except UpstreamFailed:
            if not tail.rstrip().endswith(_DONE):  # else only the end of the connection was lost
                raise
        if not self._reply.status and not stream.rest:
            raise UpstreamFailed(Failure.BROKEN, "the stream ended before it began")
        if not self._reply.status:
            await self._start(call.status, call.headers, [])
        call.whole()
        self._count(tail.split(b"\n\n"))
        self._note(decision, tap)
        await self._reply.end(stream.rest)

    async def _whole(self, decision: Decision, booking: Booking, call: Call) -> None:
        """JSON is held back up to a bound until it is whole, so that a server that dies can be replaced; anything else passes as it comes."""
        most = self._service.config.max_event_bytes if call.content_type.startswith("application/json") else 0
        tap = self._service.tap(decision) if call.status < 400 else None
        body = b""
        while data := await call.read():
            if tap is not None:
                tap.feed(data)
            if self._reply.status:
                await self._reply.write(data)
                continue
            body += data
            if len(body) > most:
                await self._start(call.status, call.headers, _length(call.headers))
                await self._reply.write(body)
        call.whole()
        self._exchange.first_token(self._service.clock())  # for the log line alone: it came long before, unseen
        if call.status < 400:
            self._locate(decision, body)
            self._count([b"data: " + body])
            self._note(decision, tap)
        else:
            self._exchange.detail = api_error(call.status, body).message
        if self._reply.status:
            await self._reply.end()
            return
        await self._start(call.status, call.headers, [] if call.status in _BODILESS else [(b"content-length", str(len(body)).encode())])
        await self._reply.end(body)

    def _note(self, decision: Decision, tap: Tap | None) -> None:
        """Hand on the experts that the answer names, after its tokens were counted."""
        about = self._exchange
        usage = Usage(about.prompt_tokens, about.output_tokens, about.cached_tokens)
        self._reported = tap is not None and self._service.routed(decision, tap, usage)

    def _locate(self, decision: Decision, answer: bytes) -> None:
        """Remember where the object is that an answer made."""
        made = object_id(answer) if self._request.creates else None
        if made is not None:
            self._located.note(made, Place(decision.target.key, self._exchange.caller.tenant))

    def _first(self, booking: Booking) -> None:
        self._exchange.first_token(self._service.clock())
        self._service.first_token(booking)

    async def _start(self, status: int, server: Headers, own: Headers) -> None:
        decision = self._exchange.decision
        about = [] if decision is None else [(DECISION_HEADER.encode(), decision.id.encode())]
        await self._reply.start(status, to_client(server, [*self._headers, *about, *own]))

    def _count(self, events: list[bytes]) -> None:
        """Token counts for log and metrics, where the server gives any."""
        for event in reversed(events[-_LAST_EVENTS:]):
            if b'"usage"' not in event:
                continue
            try:
                usage = _COUNTED.decode(event.strip().removeprefix(b"data:")).usage
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if usage is not None:
                self._exchange.prompt_tokens = usage.prompt_tokens
                self._exchange.output_tokens = usage.completion_tokens
                self._exchange.cached_tokens = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
                return


def _length(server: Headers) -> Headers:
    """The server's own content-length, for an answer that passes as it comes."""
    return [(b"content-length", value) for name, value in server if name.lower() == b"content-length"]
