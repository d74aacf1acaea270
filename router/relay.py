"""Answers a request with servers that speak text only: the body goes there as it came, and the answer comes back as it is.

Such an answer cannot be continued by another server. So: another server before the first byte, an error event afterwards.
"""

import msgspec

from fleet.completions import DECISION_HEADER, ApiError
from fleet.completions import Usage as SaidUsage
from router.course import Failure
from router.decision import Decision
from router.exchange import Exchange
from router.foreign_routings import Tap, Usage
from router.picker import Need, Try
from router.prompt import TextPrompt
from router.proxy import Call, UpstreamFailed
from router.reply import Headers, Reply
from router.reservations import Booking
from router.roster import RankKey
from router.service import WHOLE_EVENTS, RouterService
from router.tenancy import with_salt
from router.tracing import AttemptTrace

_TOLD_EVERY = 16
"""events, each taken for a token, after which what is left of a booking is told"""
_TAIL_BYTES = 4096
"""Kept of a stream, to read its usage from."""


_LAST_EVENTS = 4
"""Usage stands in the last event of a stream, or in the one before its end is said."""


class _Counted(msgspec.Struct):
    usage: SaidUsage | None = None


_COUNTED: msgspec.json.Decoder[_Counted] = msgspec.json.Decoder(_Counted)


class Relay:
    """One request, from server to server until one answers."""

    def __init__(self, service: RouterService, exchange: Exchange, reply: Reply, headers: Headers, body: bytes, prompt: TextPrompt, output: int) -> None:
        self._service = service
        self._exchange = exchange
        self._reply = reply
        self._headers = headers
        self._body = body
        self._prompt = prompt
        self._output = output
        self._failures: tuple[tuple[RankKey, Failure], ...] = ()
        self._reported = False
        """the answer said which experts were chosen"""

    async def run(self) -> None:
        """ApiError when nobody answers, or when the answer breaks off after it has begun (`Reply.status` tells)."""
        attempt, replaces = 1, None
        while True:
            decision, failed = await self._try(attempt, replaces)
            if failed is None:
                return
            if self._reply.status:
                raise ApiError(502, f"the server broke off its answer ({failed.how.value}); ask again", code="upstream_failed") from failed
            if attempt >= self._service.config.max_attempts:
                raise failed.refusal(attempt) from failed
            self._service.may_retry(failed.how, begun=False)
            attempt, replaces = attempt + 1, decision.id

    async def _try(self, attempt: int, replaces: str | None) -> tuple[Decision, UpstreamFailed | None]:
        """One attempt at one server; its booking and its span end here, whatever happens."""
        need = Need(self._exchange.model, self._prompt, 0, self._output, None, self._exchange.request_id, self._exchange.keys(), owner=self._exchange.owner)
        suffix = f"-a{attempt}" if attempt > 1 else ""
        decision, booking = await self._service.waiting.admit(self._exchange, need, suffix, Try(attempt, replaces, self._failures), begun=False)
        self._exchange.decision = decision
        span: AttemptTrace | None = None
        ended: str | None = "abandoned"
        try:
            span = None if self._exchange.trace is None else self._exchange.trace.attempt(decision)
            await self._attempt(decision, booking, span)
        except UpstreamFailed as failed:
            ended = failed.how.value
            self._service.attempt_failed(self._exchange, decision, booking, failed.how, str(failed))
            self._failures += ((decision.target.key, failed.how),)
            return decision, failed
        else:
            ended = None
            self._service.finished(decision, booking, self._prompt, reported=self._reported)
            return decision, None
        finally:
            self._service.release(booking)
            if span is not None:
                span.end(ended)

    async def _attempt(self, decision: Decision, booking: Booking, span: AttemptTrace | None) -> None:
        headers = {**(self._exchange.pass_on if span is None else span.headers), "x-request-id": self._exchange.request_id}
        headers[DECISION_HEADER] = decision.id
        if (key := self._service.credentials.backend_key_of(decision.target.url)) is not None:
            headers["authorization"] = f"Bearer {key}"
        salted = self._exchange.salt and decision.target.engine.capabilities.isolates_tenants
        body = with_salt(self._body, self._exchange.salt) if salted else self._body
        async with self._service.upstream.call(decision.target.url, self._exchange.path, body, headers) as call:
            passing = self._stream if call.content_type.startswith("text/event-stream") else self._whole
            await passing(decision, booking, call)

    async def _stream(self, decision: Decision, booking: Booking, call: Call) -> None:
        tail, tap, events = b"", self._service.tap(decision), 0
        while data := await call.read():
            if not self._reply.status:
                self._first(booking)
                await self._start(decision, call, [(b"cache-control", b"no-cache")])
            await self._reply.write(data)
            if tap is not None:
                tap.feed(data)
            tail = (tail + data)[-_TAIL_BYTES:]
            events += data.count(b"\n\n")
            if events >= _TOLD_EVERY:
                self._service.emitted(booking, events)
                events = 0
        if not self._reply.status:
            raise UpstreamFailed(Failure.BROKEN, "the stream ended before it began")
        call.whole()
        self._count(tail.split(b"\n\n"))
        self._note(decision, tap)
        await self._reply.end()

    async def _whole(self, decision: Decision, booking: Booking, call: Call) -> None:
        parts: list[bytes] = []
        size = 0
        while data := await call.read():
            size += len(data)
            if size > WHOLE_EVENTS * self._service.config.max_event_bytes:
                raise UpstreamFailed(Failure.BROKEN, f"the answer exceeds {WHOLE_EVENTS * self._service.config.max_event_bytes} bytes")
            parts.append(data)
        call.whole()
        body = b"".join(parts)
        self._exchange.first_token(self._service.clock())  # for the log line alone: it came long before, unseen
        self._count([b"data: " + body])
        tap = self._service.tap(decision)
        if tap is not None:
            tap.feed(body)
        self._note(decision, tap)
        await self._start(decision, call, [(b"content-length", str(len(body)).encode())])
        await self._reply.end(body)

    def _note(self, decision: Decision, tap: Tap | None) -> None:
        """Hand on what the answer says of experts, after its tokens were counted."""
        about = self._exchange
        usage = Usage(about.prompt_tokens, about.output_tokens, about.cached_tokens)
        self._reported = tap is not None and self._service.routed(decision, tap, usage)

    def _first(self, booking: Booking) -> None:
        self._exchange.first_token(self._service.clock())
        self._service.first_token(booking)

    async def _start(self, decision: Decision, call: Call, more: Headers) -> None:
        kind = (b"content-type", call.content_type.encode("latin-1", "replace"))
        await self._reply.start(call.status, [*self._headers, kind, (DECISION_HEADER.encode(), decision.id.encode()), *more])

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
