"""Serve a Dynamo frontend: decide for each preprocessed request, stream its worker's answer back, and
continue it at another worker when that one dies.

It is the counterpart of `router.api.token_stream` on Dynamo's request plane, with the same queue, scheduler,
retries and records.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, closing, nullcontext
from functools import partial
from typing import Any

from fleet.blocks import salted_seed
from fleet.completions import DECISION_HEADER, ApiError
from router.attempt import RankAttempt
from router.dynamo.eligibility import barred, unpaired
from router.dynamo.parts import DynamoParts
from router.dynamo.ports import CallContext
from router.dynamo.prefill import Prefilled, PrefillStage
from router.dynamo.wire.experts import as_answer
from router.dynamo.wire.malformed import Malformed
from router.dynamo.wire.requests import (
    AnswerPiece,
    DynamoRequest,
    Json,
    length_item,
    read_request,
    worker_request,
)
from router.dynamo.worker_stream import WorkerStream
from router.fleet_state.target_table import RankKey, TargetTable
from router.foreign_api.routed_experts_parser import RoutedExpertsParser, TokenUsage
from router.health.attempt_failures import AttemptFailure, BegunAnswer
from router.http.asgi_response import not_ready
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.telemetry.request_log import RequestEnd, RequestLog
from router.telemetry.tracing import RouterTracing
from router.upstream.rank_client import UpstreamFailed

log = logging.getLogger(__name__)

PATH = "/dynamo/generate"
"""Stands for Dynamo's request plane where records name an HTTP route."""
_EMITTED_EVERY = 16
"""tokens between two updates of a booking's remaining work"""
_SERVED_WHOLE: AbstractAsyncContextManager[None] = nullcontext()


class DynamoFrontDoor:
    """Handler of the router's endpoint. State: open requests, for draining."""

    def __init__(self, parts: DynamoParts) -> None:
        self._parts = parts
        self._service, self._config, _, self._calls = parts
        self._tracing = RouterTracing.create()
        self._chance = random.Random()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = 0

    async def drained(self) -> None:
        """Return when no request is open, and all are logged."""
        await self._idle.wait()
        self._service.bookkeeping.catch_up()

    async def handle(self, body: Any, context: CallContext) -> AsyncGenerator[Json, None]:
        """Serve one request. Raises the refusal of an ApiError (`WorkerCalls.refusal`) when it cannot be
        answered, or not to its end.
        """
        service = self._service
        request_log = RequestLog(context.id(), service.new_decision_id(), PATH, service.clock())
        headers = {**context.metadata, **(context.trace_headers() or {})}
        if self._tracing is not None:
            request_log.trace = self._tracing.request("text_completion", PATH, headers, time.time_ns())
        else:
            request_log.pass_on = {name: headers[name] for name in _TRACE_CONTEXT if name in headers}
        outcome, answer = RequestEnd.FAILED, None
        self._enter()
        try:
            if service.refusing:
                raise not_ready("the router is stopping; ask again")
            answer = _Answer(self._parts, request_log, _read(body), context)
            answer.experts = self._asks_for_experts()
            async with aclosing(answer.run()) as items:
                async for item in items:
                    yield item
            outcome = RequestEnd.CLIENT_GONE if answer.left else RequestEnd.ANSWERED
        except ApiError as error:
            request_log.status, request_log.detail = error.status, error.message
            outcome = _outcome_of(error.status, begun=answer is not None and bool(answer.emitted))
            raise self._calls.refusal(error) from error
        except (GeneratorExit, asyncio.CancelledError):
            outcome = RequestEnd.CLIENT_GONE if context.is_stopped() else RequestEnd.CANCELLED
            raise
        finally:
            self._leave()
            if outcome is RequestEnd.ANSWERED:
                request_log.status = 200
            service.ended(request_log, outcome)

    def _enter(self) -> None:
        self._open += 1
        self._service.metrics.in_flight += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._open -= 1
        self._service.metrics.in_flight -= 1
        if not self._open:
            self._idle.set()

    def _asks_for_experts(self) -> bool:
        share = self._config.routed_experts_share
        return share > 0 and self._chance.random() < share


_TRACE_CONTEXT = ("traceparent", "tracestate")


def _read(body: Any) -> DynamoRequest:
    try:
        return read_request(body)
    except Malformed as error:
        raise ApiError(400, str(error), code="invalid_value") from error


def _outcome_of(status: int, *, begun: bool) -> RequestEnd:
    if begun:
        return RequestEnd.BROKEN
    if status == 429:
        return RequestEnd.SATURATED
    return RequestEnd.REFUSED if status < 500 else RequestEnd.UNAVAILABLE


class _Answer:
    """One answer, from worker to worker, until it is complete. `emitted`: its tokens so far."""

    def __init__(
        self,
        parts: DynamoParts,
        request_log: RequestLog,
        request: DynamoRequest,
        context: CallContext,
    ) -> None:
        self.emitted: list[int] = []
        self.experts = False
        """ask the worker for the experts of each token"""
        self._parts = parts
        self._service, _, self._follower, self._calls = parts
        self._log = request_log
        self._request = request
        self._context = context
        self._failures: list[tuple[RankKey, AttemptFailure]] = []
        self._begun: BegunAnswer | None = None
        self._before = self._counted = 0
        """tokens of the workers before the present one, and tokens that its booking knows of"""
        self._tap: RoutedExpertsParser | None = None
        """reads the experts that the present worker names; None: it was not asked"""
        self.left = False
        """the client went before the end"""
        self._seed = salted_seed(request.hints.cache_salt or "", request.hints.lora_name or "")
        self._note()

    def _note(self) -> None:
        request, config, request_log = self._request, self._service.config, self._log
        request_log.model = request.model
        request_log.stream = True
        request_log.salt = request.hints.cache_salt or ""
        request_log.prompt_tokens = len(request.token_ids)
        request_log.priority = config.default_class
        request_log.urgency = config.classes.index(config.default_class)
        if request_log.trace is not None:
            request_log.trace.decoded(request.model, {"max_tokens": request.max_tokens})

    async def run(self) -> AsyncGenerator[Json, None]:
        """Yield the items of the answer. ApiError when no worker can finish it. An attempt that produced
        tokens does not count against `max_attempts`, because it made progress.
        """
        number, fruitless, replaces = 1, 0, None
        while True:
            had = len(self.emitted)
            table = await self._service.wait_queue.live_target_table(self._log, self._request.model)
            attempt = Attempt(number, replaces, tuple(self._failures))
            async with self._prefill(number) as prefilled:
                if prefilled is not None and prefilled.handle is None and self._context.is_stopped():
                    self.left = True  # after a handover the decode worker is told, so that the KV is freed
                    return
                need = self._need(table, prefilled)
                here = RankAttempt(self._service, self._log, need, attempt, begun=bool(self.emitted))
                async with here:
                    stream = await self._send(here, prefilled)
                    with closing(stream):
                        while (piece := await stream.next()) is not None:
                            self._take(here, piece)
                            yield piece.item
                    self._end(here, need, stream)
            if self.left:
                return
            if self.emitted and self._begun is None:
                self._begun = BegunAnswer(here.decision.target.engine.weights_digest)
            if here.failed is None:
                return
            if self._exhausted:
                yield length_item()
                return
            self._failures.append((here.decision.target.key, here.failed.how))
            self._check_continuable(here.failed)
            fruitless = 1 if len(self.emitted) > had else fruitless + 1
            if fruitless >= self._service.config.max_attempts:
                raise here.failed.refusal(number) from here.failed
            self._service.may_retry(here.failed.how, begun=bool(self.emitted))
            number, replaces = number + 1, here.decision.id

    @property
    def _exhausted(self) -> bool:
        return self._request.max_tokens is not None and len(self.emitted) >= self._request.max_tokens

    def _check_continuable(self, failed: UpstreamFailed) -> None:
        """Raise ApiError when another worker could not continue the answer exactly."""
        if self.emitted and self._request.inexact:
            fields = ", ".join(self._request.inexact)
            message = (
                f"the worker broke off its answer ({failed.how.value}), and one with {fields} cannot be"
                " continued exactly; ask again"
            )
            raise ApiError(502, message, code="upstream_failed") from failed

    def _prompt(self) -> TokenPrompt:
        """Return the prompt of the next worker: the client's, and the tokens so far."""
        ids = self._request.token_ids
        return TokenPrompt([*ids, *self.emitted] if self.emitted else ids, self._seed)

    def _prefill(self, number: int) -> AbstractAsyncContextManager[Prefilled | None]:
        """Return the context in which a prefill worker has computed the prompt of an attempt; of None where
        the workers of the model serve whole requests.
        """
        request = self._request
        if request.prefilled or not self._follower.roles(request.model).decode:
            return _SERVED_WHOLE
        return PrefillStage(
            self._parts, self._log, self._context, request, self.emitted, self._prompt(), f"-p{number}"
        )

    def _need(self, table: TargetTable, prefilled: Prefilled | None) -> RoutingRequest:
        request, config, prompt = self._request, self._service.config, self._prompt()
        expected = request.hints.expected_output_tokens or config.expected_output_tokens
        missing = expected if request.max_tokens is None else max(1, request.max_tokens - len(self.emitted))
        # Frontends do not compare max_tokens with the context; workers end such answers themselves.
        tokens = prompt.tokens
        context = min(tokens + missing, max(table.largest_context, tokens + 1))
        return RoutingRequest(
            model=request.model,
            prompt=prompt,
            context=context,
            output=min(missing, expected),
            tokenizer=table.sent_tokenizer,
            request_id=self._log.request_id,
            keys=self._log.keys(),
            owner=self._log.owner,
            begun=self._begun,
            barred=partial(self._barred, prefilled),
            prefill=None if prefilled is None else prefilled.remote,
        )

    def _barred(self, prefilled: Prefilled | None, table: TargetTable) -> Mapping[RankKey, str]:
        """Return the targets that must not serve this request, with reasons."""
        follower, hints = self._follower, self._request.hints
        named = hints.backend_instance_id if hints.backend_instance_id is not None else hints.decode_worker_id
        pinned = None if named is None else follower.workers.get(named)
        found = barred(table, follower.serving, hints, pinned, follower.elsewhere(table))
        if prefilled is None:
            return found
        return {**unpaired(table, follower.serving, handed_over=prefilled.handle is not None), **found}

    async def _send(self, here: RankAttempt, prefilled: Prefilled | None) -> WorkerStream:
        """Let one worker produce the missing items, and return their stream. UpstreamFailed when it cannot be
        reached.
        """
        decision, service, request = here.decision, self._service, self._request
        self._log.decision = decision
        worker = self._follower.serving.get(decision.target.key)
        if worker is None:
            raise UpstreamFailed(AttemptFailure.CONNECT, "the worker has left")
        for name, value in (self._log.pass_on if here.span is None else here.span.headers).items():
            self._context.metadata[name] = value
        self._context.metadata[DECISION_HEADER] = decision.id
        self._tap = service.tap(decision) if self.experts and not self.emitted else None
        body = worker_request(
            request,
            worker.instance_id,
            worker.dp_rank(decision.target.rank),
            self.emitted,
            experts=self._tap is not None,
        )
        if prefilled is not None and worker.decodes:
            body = prefilled.decode_request(body)
        items = await self._calls.call(worker, body, self._context)
        self._before = self._counted = len(self.emitted)
        return WorkerStream(
            items, self._context, request, self._before, service.config, self._log.finish_reasons
        )

    def _take(self, here: RankAttempt, piece: AnswerPiece) -> None:
        """Count a piece of the present worker's stream."""
        if piece.token_ids:
            if len(self.emitted) == self._before:
                self._first_token(here)
            self.emitted += piece.token_ids
            self._log.output_tokens += len(piece.token_ids)
            if len(self.emitted) - self._counted >= _EMITTED_EVERY:
                self._service.emitted(here.booking, len(self.emitted) - self._counted)
                self._counted = len(self.emitted)
        if self._tap is not None and piece.experts is not None:
            _feed(self._tap, piece.experts)
        if piece.cached_tokens is not None and not self._before:
            self._log.cached_tokens = piece.cached_tokens

    def _end(self, here: RankAttempt, need: RoutingRequest, stream: WorkerStream) -> None:
        """Record the end of the present worker's stream."""
        self.left = stream.left
        if not self.left:
            decision, service, tap = here.decision, self._service, self._tap
            reported = tap is not None and service.routed(decision, tap, self._usage())
            service.finished(decision, here.booking, need.prompt, reported=reported)

    def _first_token(self, here: RankAttempt) -> None:
        self._log.first_token(self._service.clock())
        self._service.first_token(here.booking)
        if here.span is not None:
            here.span.first_token()

    def _usage(self) -> TokenUsage:
        return TokenUsage(len(self._request.token_ids), len(self.emitted), self._log.cached_tokens)


def _feed(tap: RoutedExpertsParser, experts: Any) -> None:
    try:
        tap.feed(as_answer(experts))
    except Malformed as error:
        log.warning("a worker's experts are not counted: %s", error)
