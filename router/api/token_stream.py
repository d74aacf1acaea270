"""Answer a request with ranks that speak token ids: decide and stream each choice, and continue it elsewhere
when its rank dies.

The pure part (next request, ranks to avoid, bytes to send) is in `completion_state`, `attempt_failures`,
`scheduler` and `response_format`; this module awaits I/O.
"""

import asyncio
from functools import partial

import msgspec

from fleet.completions import ApiError, Choice, Completion, PromptDetails, Usage, rank_body
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
from router.scheduling.scheduler import Attempt, RoutingRequest
from router.service import RouterService
from router.telemetry.request_log import RequestLog
from router.telemetry.tracing import AttemptTrace
from router.upstream.rank_client import Call, UpstreamFailed, api_error

_EMITTED_EVERY = 16
"""tokens between two updates of a booking's remaining work"""
_DONE = b"[DONE]"
_CHUNK: msgspec.json.Decoder[Completion] = msgspec.json.Decoder(Completion)


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
        if len(self._states) == 1:
            await self._follow(self._states[0])
            return
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
                whole_text = "" if tokenizer is None else tokenizer.decode(state.emitted)
                await self._emit(state, [state.finish_with(whole_text)])
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
        prompt = TokenPrompt(state.prompt + state.emitted if state.emitted else state.prompt, self._seed)
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
            Attempt(attempt, replaces, tuple(state.failures)),
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
        body = rank_body(state.request(decision.cache_salt), state.fields.values if passes else {})
        async with self._service.upstream.call(decision.target.url, TEXT_PATH, body, headers) as call:
            await self._stream(state, booking, call, span)
        self._service.finished(decision, booking, prompt)

    async def _stream(
        self, state: CompletionState, booking: Booking, call: Call, span: AttemptTrace | None
    ) -> None:
        """Forward a rank's stream to its end. After the finish reason only usage is missing, which is not
        worth a retry.
        """
        splitter = EventSplitter(self._service.config.max_event_bytes)
        waiting = True
        over = False
        counted = len(state.emitted)
        while not over:
            try:
                choices, over, failure = _taken(state, splitter, await call.read())
            except UpstreamFailed as failed:
                choices, over, failure = [], True, failed
            if waiting and choices:
                waiting = False
                self._first_token(booking, span)
            if len(state.emitted) - counted >= _EMITTED_EVERY:
                self._service.emitted(booking, len(state.emitted) - counted)
                counted = len(state.emitted)
            await self._emit(state, choices)  # before raising a failure: these tokens count as emitted
            if failure is not None and state.finish_reason is None:
                raise failure
        if state.finish_reason is None:
            raise UpstreamFailed(AttemptFailure.BROKEN, "the stream ended without a finish reason")
        call.whole()
        await self._finished(state)

    def _first_token(self, booking: Booking, span: AttemptTrace | None) -> None:
        self._request_log.first_token(self._service.clock())
        self._service.first_token(booking)
        if span is not None:
            span.first_token()

    async def _emit(self, state: CompletionState, choices: list[Choice]) -> None:
        data = b""
        for choice in choices:
            self._request_log.output_tokens += len(choice.token_ids or ())
            data += self._answer.add(state.index, choice)
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
