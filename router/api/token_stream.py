"""Answer a request with ranks that speak token ids: decide and stream each choice, and continue it elsewhere
when its rank dies.

The pure part (next request, ranks to avoid, bytes to send) is in `completion_state`, `attempt_failures`,
`scheduler` and `response_format`; this module awaits I/O.
"""

import asyncio
from functools import partial

import msgspec

from fleet.completions import ApiError, Choice, Completion, PromptDetails, Usage, rank_body
from fleet.completions.token_frames import PieceEnd, TokenPiece
from router.api.token_relay import TokenRelay
from router.attempt import make_attempt
from router.fleet_state.reservations import Booking
from router.foreign_api.headers import decision_header, own_headers
from router.health.attempt_failures import AttemptFailure
from router.http.asgi_response import AsgiResponse, Headers
from router.http.server_sent_events import EventSplitter
from router.openai_api.completion_state import CompletionState
from router.openai_api.request_schema import TEXT_PATH
from router.openai_api.response_format import ClientResponse
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Decision
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from router.telemetry.tracing import AttemptTrace
from router.upstream.rank_client import RankCall, UpstreamFailed, api_error

_DONE = b"[DONE]"
_CHUNK: msgspec.json.Decoder[Completion] = msgspec.json.Decoder(Completion)
_Taken = tuple[bytes, bool, UpstreamFailed | None]


class _ArrivingAnswer:
    """Answer of one attempt while it arrives."""

    __slots__ = ("booking", "call", "counted", "relay", "span", "splitter", "state", "waiting")

    splitter: EventSplitter
    """of an answer that comes in events"""

    def __init__(
        self, state: CompletionState, booking: Booking, call: RankCall, span: AttemptTrace | None
    ) -> None:
        self.call = call
        self.relay: TokenRelay | None = None
        """takes pieces before `TokenStream`, once the answer has begun"""
        self.state = state
        self.booking = booking
        self.span = span
        self.waiting = True
        """nothing has arrived yet"""
        self.counted = len(state.emitted)
        """tokens at the last update of the booking"""


class TokenStream:
    """All choices of one request. `run` returns when the client has the complete answer."""

    def __init__(
        self,
        service: RouterService,
        request_log: RequestLog,
        reply: AsgiResponse,
        headers: Headers,
        answer: ClientResponse,
        states: list[CompletionState],
        choices: int,
        digest: str | None,
    ) -> None:
        """states: `choices` of the first prompt, then of the next. digest: identifies the tokenizer of their
        ids.
        """
        self._service = service
        self._request_log = request_log
        self._reply = reply
        self._headers = headers
        self._answer = answer
        self._states = states
        self._digest = digest
        self._open = len(states)
        self._seed = request_log.block_seed
        self._per_prompt = choices

    async def run(self) -> None:
        """Answer the request. ApiError when a choice cannot be finished, also after the answer has begun (see
        `AsgiResponse.status`).
        """
        try:
            if len(self._states) == 1:
                await self._follow(self._states[0])
            else:
                await self._follow_all()
        finally:
            self._request_log.output_tokens = sum(len(state.emitted) for state in self._states)

    async def _follow_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as choices:
                for state in self._states:
                    choices.create_task(
                        self._follow(state),
                        name=f"answers choice {state.index} of request {self._request_log.request_id}",
                    )
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _follow(self, state: CompletionState) -> None:
        """Run one choice, from rank to rank, until it is complete. An attempt that produced tokens does not
        count against `max_attempts`, because it made progress.
        """
        attempt, fruitless, replaces = 1, 0, None
        while True:
            had = len(state.emitted)
            decision, failed = await self._try(state, attempt, replaces)
            if failed is None:
                return
            if state.exhausted:
                tokenizer = self._service.tokenizer(self._digest)
                whole_text = "" if tokenizer is None else tokenizer.decode(state.emitted.tolist())
                await self._write(self._added(state, [state.finish_with(whole_text)]))
                await self._finished(state)
                return
            if state.emitted and state.fields.binding:
                inexact = f"one with {', '.join(state.fields.binding)} cannot be continued exactly"
                message = f"the rank broke off its answer ({failed.how.value}), and {inexact}; ask again"
                raise ApiError(502, message, code="upstream_failed") from failed
            fruitless = 1 if len(state.emitted) > had else fruitless + 1
            if fruitless >= self._service.config.max_attempts:
                raise failed.refusal(attempt) from failed
            self._service.may_retry(failed.how, begun=bool(state.emitted or self._reply.status))
            attempt, replaces = attempt + 1, decision.id

    async def _try(
        self, state: CompletionState, attempt: int, replaces: str | None
    ) -> tuple[Decision, UpstreamFailed | None]:
        """Make one attempt at one rank, for the tokens that are missing."""
        prompt = TokenPrompt([*state.prompt, *state.emitted] if state.emitted else state.prompt, self._seed)
        missing = state.max_tokens - len(state.emitted)
        other = self._service.other_runtime
        need = RoutingRequest(
            model=self._request_log.model,
            prompt=prompt,
            context=prompt.tokens + missing,
            output=min(missing, self._service.config.expected_output_tokens),
            tokenizer=self._digest,
            request_id=self._request_log.request_id,
            keys=self._request_log.keys(),
            owner=self._request_log.owner,
            passes_fields=bool(state.fields.binding),
            begun=state.begun,
            barred=None if other is None else other.without_http,
        )
        decision, failed = await make_attempt(
            self._service,
            self._request_log,
            need,
            Attempt(attempt, replaces, tuple(state.failures), waits=True),
            partial(self._attempt, state, prompt),
            suffix=f"-c{state.index}" if state.index else "",
            begun=bool(state.emitted or self._reply.status),
        )
        state.began(decision.target.engine.weights_digest)
        if failed is not None:
            state.failures.append((decision.target.key, failed.how))
        return decision, failed

    async def _attempt(
        self,
        state: CompletionState,
        prompt: TokenPrompt,
        decision: Decision,
        booking: Booking,
        span: AttemptTrace | None,
    ) -> None:
        """Let one rank produce the missing tokens."""
        if state.index == 0 or self._request_log.decision is None:
            self._request_log.decision = decision
        context = self._request_log.pass_on if span is None else span.headers
        headers = own_headers(context, self._request_log.request_id, decision.id)
        headers += self._service.credentials.for_ranks
        passes = decision.target.engine.capabilities.passes_fields
        fields = state.fields.values if passes else {}
        frames = state.logprobs is None and decision.target.engine.capabilities.token_frames
        opens = self._service.credentials.for_ranks if frames else None
        # the body is not kept: it is as long as the prompt, and the answer may take minutes
        async with self._service.upstream.call(
            decision.target.url,
            TEXT_PATH,
            rank_body(state.request(decision.cache_salt), fields),
            headers,
            opens,
        ) as call:
            await self._stream(state, booking, call, span)
        self._service.finished(decision, booking, prompt)

    async def _stream(
        self, state: CompletionState, booking: Booking, call: RankCall, span: AttemptTrace | None
    ) -> None:
        """Forward a rank's stream to its end. After the finish reason only usage is missing, which is not
        worth a retry.
        """
        arriving = _ArrivingAnswer(state, booking, call, span)
        if not call.framed:
            arriving.splitter = EventSplitter(self._service.config.max_event_bytes)
        over = False
        while not over:
            try:
                if call.framed:
                    data, over, failure = await call.pieces(partial(self._take_piece, arriving))
                else:
                    data, over, failure = await call.through(partial(self._take, arriving))
            except UpstreamFailed as failed:
                data, over, failure = b"", True, failed
            await self._write(data)  # before raising a failure: these tokens count as emitted
            if failure is not None and state.finish_reason is None:
                raise failure
        if state.finish_reason is None:
            raise UpstreamFailed(AttemptFailure.BROKEN, "the stream ended without a finish reason")
        call.whole()
        await self._finished(state)

    def _take(self, arriving: "_ArrivingAnswer", data: bytes) -> _Taken | None:
        """Pass on a rank's bytes. None: the client has what they say. Otherwise the bytes that are left to
        send, true when the stream is over, and the failure that ended it.
        """
        state = arriving.state
        choices, over, failure = _taken(state, arriving.splitter, data)
        if choices:
            self._count(arriving)
        ready = self._added(state, choices)
        if over or failure is not None or (ready and not self._reply.write_now(ready)):
            return ready, over, failure
        return None

    def _take_piece(self, arriving: "_ArrivingAnswer", piece: TokenPiece) -> _Taken | None:
        """Do the same as `_take` for a piece of a token frame that no relay took."""
        state, end, ids = arriving.state, piece.end, piece.token_ids
        if arriving.relay is not None:
            arriving.relay.until = -1
        try:
            if end is None:
                state.add(ids, piece.text)
                ready = self._answer.add_tokens(state.index, ids, piece.text)
            else:
                ready = self._added(state, _last_choices(state, piece, end))
        except ValueError as error:
            return b"", True, UpstreamFailed(AttemptFailure.BROKEN, str(error))
        if end is None or not end.error:
            self._count(arriving)
        if end is None:
            if ready and not self._reply.write_now(ready):
                return ready, False, None
            self._relay_next(arriving)
            return None
        failed = UpstreamFailed(AttemptFailure.BROKEN, f"the rank answered {end.error!r}")
        return ready, True, failed if end.error else None

    def _relay_next(self, arriving: "_ArrivingAnswer") -> None:
        """Let a relay take the next pieces, up to the next update of the booking."""
        state = arriving.state
        if arriving.relay is None:
            around = self._answer.around(state.index) if self._reply.status else None
            if around is None:
                return
            arriving.relay = TokenRelay(state, around, self._reply.body)
        arriving.call.relay_pieces(arriving.relay)
        arriving.relay.until = min(state.max_tokens, arriving.counted + arriving.booking.counted_every - 1)

    def _count(self, arriving: "_ArrivingAnswer") -> None:
        """Count new tokens in the booking, sometimes."""
        if arriving.waiting:
            arriving.waiting = False
            self._first_token(arriving.booking, arriving.span)
        new = len(arriving.state.emitted) - arriving.counted
        if new >= arriving.booking.counted_every:
            self._service.emitted(arriving.booking, new)
            arriving.counted += new

    def _first_token(self, booking: Booking, span: AttemptTrace | None) -> None:
        self._request_log.first_token(self._service.clock())
        self._service.first_token(booking)
        if span is not None:
            span.first_token()

    def _added(self, state: CompletionState, choices: list[Choice]) -> bytes:
        """Add pieces to the answer. Return the bytes for the client."""
        data = b""
        for choice in choices:
            data += self._answer.add(state.index, choice)
        return data

    async def _write(self, data: bytes) -> None:
        if data:
            if not self._reply.status:
                await self._start()
            await self._reply.write(data)

    async def _finished(self, state: CompletionState) -> None:
        """Count a finished choice. After the last one, end the answer; upstream's own end of stream is
        awaited only after that.
        """
        self._request_log.finish_reasons.append(state.finish_reason or "")
        self._open -= 1
        if self._open:
            return
        last = self._answer.end(self._usage())
        if not self._reply.status:
            await self._start(len(last))
        await self._reply.end(last)

    async def _start(self, length: int | None = None) -> None:
        decided = self._request_log.decision
        headers = [*self._headers, (b"content-type", self._answer.content_type)]
        if decided is not None:
            headers.append(decision_header(decided.id))
        headers.append(
            (b"cache-control", b"no-cache") if length is None else (b"content-length", str(length).encode())
        )
        await self._reply.start(200, headers)

    def _usage(self) -> Usage:
        """Return the usage of the client's own prompts; each prompt counts once, for any number of
        choices."""
        completion = sum(len(state.emitted) for state in self._states)
        prompt = self._request_log.prompt_tokens
        cached = self._request_log.cached_tokens = sum(
            state.cached_tokens for state in self._states[:: self._per_prompt]
        )
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )


def _last_choices(state: CompletionState, piece: TokenPiece, end: PieceEnd) -> list[Choice]:
    """Record the last piece of an answer. Return its additions. ValueError as of `CompletionState.take`."""
    choice = Choice(text=piece.text, token_ids=piece.token_ids, finish_reason=end.finish_reason)
    taken = state.take(Completion(id="", model="", choices=[choice], created=0, usage=end.usage))
    return [] if taken is None else [taken]


def _taken(
    state: CompletionState, splitter: EventSplitter, data: bytes
) -> tuple[list[Choice], bool, UpstreamFailed | None]:
    """Add new bytes to a choice. Return its new pieces, true when the stream is over, and the failure that
    ended it after them.
    """
    choices: list[Choice] = []
    event = b""
    try:
        for event in splitter.feed(data):
            if event == _DONE:
                return choices, True, None
            choice = state.take(_CHUNK.decode(event))
            if choice is not None:
                choices.append(choice)
    except msgspec.ValidationError:
        return (
            choices,
            True,
            UpstreamFailed(AttemptFailure.BROKEN, f"the rank answered {api_error(500, event).message!r}"),
        )
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        return choices, True, UpstreamFailed(AttemptFailure.BROKEN, str(error))
    return choices, not data, None
