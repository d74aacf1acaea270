"""The first half of a request that a pair of workers serves: a prefill worker computes its prompt, and says
where the KV is. The worker that decodes is chosen afterwards, with what the prompt has activated.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from fleet.completions import DECISION_HEADER, ApiError
from router.attempt import RankAttempt
from router.dynamo.eligibility import barred
from router.dynamo.parts import DynamoParts
from router.dynamo.ports import CallContext
from router.dynamo.wire.malformed import Malformed
from router.dynamo.wire.pairs import KvHandle, decode_request, meeting, prefill_request, read_handle
from router.dynamo.wire.requests import DynamoRequest, Json, read_piece, worker_request
from router.dynamo.workers import RoutedWorker, prefill_model
from router.fleet_state.target_table import RankKey, TargetTable
from router.health.attempt_failures import AttemptFailure
from router.prefix_index.prompt import TokenPrompt
from router.scheduling.decision import Decision, RemotePrefill
from router.scheduling.routing_request import Attempt, RoutingRequest
from router.telemetry.request_log import RequestLog
from router.upstream.rank_client import UpstreamFailed

_SERVED_WITHOUT = frozenset({"no_engine", "upstream_failed", "draining"})
"""Refusals after which the other worker computes the prompt itself. A full queue is none of them: the prompts
would only be computed elsewhere, beside decoding.
"""
CLIENT_LEFT = "the client left during the prefill"
NONE_KNOWN = "no prefill worker is known"


class Prefilled(NamedTuple):
    """Outcome of the first half. handle, worker: None where no KV was handed over."""

    remote: RemotePrefill
    handle: KvHandle | None = None
    worker: RoutedWorker | None = None

    def decode_request(self, body: Json) -> Json:
        """Return a `worker_request` with what the decode worker needs to fetch the KV, if there is any."""
        if self.handle is None or self.worker is None:
            return body
        return decode_request(body, self.handle, self.worker.instance_id)


class _Handed(NamedTuple):
    decision: Decision
    worker: RoutedWorker
    handle: KvHandle


class PrefillStage:
    """An async context manager: on entering, a prefill worker computes the prompt, or says how its KV can be
    fetched meanwhile. A worker that still computes on leaving is cancelled, with its booking.

    Entering raises ApiError when the workers are saturated, or one calls the request invalid.
    """

    def __init__(
        self,
        parts: DynamoParts,
        request_log: RequestLog,
        context: CallContext,
        request: DynamoRequest,
        emitted: list[int],
        prompt: TokenPrompt,
        suffix: str,
    ) -> None:
        """emitted: tokens of an answer to be continued, which `prompt` contains. suffix: of the ids of the
        decisions.
        """
        self._service, self._config, self._follower, self._calls = parts
        self._log = request_log
        self._context = context
        self._request = request
        self._emitted = emitted
        self._prompt = prompt
        self._suffix = suffix
        self._decision: Decision | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Prefilled:
        try:
            return await self._prefilled()
        except BaseException:
            await self._end()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _prefilled(self) -> Prefilled:
        service, model = self._service, prefill_model(self._request.model)
        if not self._follower.roles(self._request.model).prefill:
            return self._failed(NONE_KNOWN)
        failures: list[tuple[RankKey, AttemptFailure]] = []
        number, replaces = 1, None
        while True:
            try:
                need = self._need(service.scheduler.target_table(model).sent_tokenizer, model)
                handed = await self._attempt(need, Attempt(number, replaces, tuple(failures)))
                return self._failed(CLIENT_LEFT) if handed is None else self._handed(handed)
            except UpstreamFailed as failed:
                if number >= service.config.max_attempts or self._decision is None:
                    return self._failed(str(failed))
                failures.append((self._decision.target.key, failed.how))
                number, replaces = number + 1, self._decision.id
                how = failed.how
            except ApiError as error:
                if error.code not in _SERVED_WITHOUT:
                    raise
                return self._failed(error.message)
            try:
                service.may_retry(how, begun=False)
            except ApiError as error:
                return self._failed(error.message)

    def _failed(self, reason: str) -> Prefilled:
        return Prefilled(RemotePrefill(decision=self._decision, failure=reason))

    def _handed(self, handed: _Handed) -> Prefilled:
        experts = handed.handle.experts
        remote = RemotePrefill(
            decision=handed.decision,
            token_s=self._config.kv_transfer_token_seconds,
            experts=None if experts is None else experts.counts.array(),
            tokens=0 if experts is None else experts.tokens,
        )
        return Prefilled(remote, handed.handle, handed.worker)

    def _need(self, tokenizer: str | None, model: str) -> RoutingRequest:
        """Return the request as far as it concerns prefill workers: prefix and queue, without any output."""
        return RoutingRequest(
            model=model,
            prompt=self._prompt,
            context=self._prompt.tokens + 1,
            output=0,
            tokenizer=tokenizer,
            request_id=self._log.request_id,
            owner=self._log.owner,
            barred=self._barred,
        )

    def _barred(self, table: TargetTable) -> Mapping[RankKey, str]:
        """Return the targets that must not compute this prompt, with reasons."""
        follower, hints = self._follower, self._request.hints
        named = None if hints.prefill_worker_id is None else follower.workers.get(hints.prefill_worker_id)
        pinned = named if named is not None and named.prefills else None
        wishes = msgspec.structs.replace(hints, dp_rank=hints.prefill_dp_rank)
        return barred(table, follower.serving, wishes, pinned, follower.elsewhere(table))

    async def _attempt(self, need: RoutingRequest, attempt: Attempt) -> _Handed | None:
        """Let one worker compute the prompt. UpstreamFailed or ApiError when it does not.

        Returns at its word of the KV. Unless both workers transfer it together, that is the end. None: the
        client has left, so that the worker stopped.
        """
        handed: asyncio.Future[_Handed] = asyncio.get_running_loop().create_future()
        self._task = task = asyncio.create_task(self._serve(need, attempt, handed), name="prefill")
        await asyncio.wait((task, handed), return_when=asyncio.FIRST_COMPLETED)
        if not handed.done():
            task.result()  # raises why there is none
            return None
        found = handed.result()
        if found.handle.bootstrap is None:
            await asyncio.wait((task,))
        return found

    async def _serve(self, need: RoutingRequest, attempt: Attempt, handed: "asyncio.Future[_Handed]") -> None:
        here = RankAttempt(self._service, self._log, need, attempt, suffix=self._suffix, begun=False)
        async with here:
            self._decision = here.decision
            worker = self._follower.serving.get(here.decision.target.key)
            if worker is None:
                raise UpstreamFailed(AttemptFailure.CONNECT, "the worker has left")
            for name, value in (self._log.pass_on if here.span is None else here.span.headers).items():
                self._context.metadata[name] = value
            self._context.metadata[DECISION_HEADER] = here.decision.id
            rank = worker.dp_rank(here.decision.target.rank)
            body = worker_request(self._request, worker.instance_id, rank, self._emitted, experts=False)
            number, handoff = self._service.draw_seed(), uuid4().bytes
            place = meeting(worker.card, here.decision.target.rank, number, handoff)
            items = await self._calls.call(
                worker, prefill_request(body, worker.instance_id, rank, place), self._context
            )
            if place is not None:
                handed.set_result(_Handed(here.decision, worker, KvHandle(place)))
            try:
                await self._read(items, here, worker, handed)
            except UpstreamFailed:
                if not self._context.is_stopped():
                    raise
            if self._context.is_stopped():
                return
            if not handed.done():
                raise UpstreamFailed(AttemptFailure.BROKEN, "the prefill worker named no KV")
            self._service.finished(here.decision, here.booking, need.prompt)
        if here.failed is not None:
            raise here.failed

    async def _read(
        self,
        items: AsyncIterator[Any],
        here: RankAttempt,
        worker: RoutedWorker,
        handed: "asyncio.Future[_Handed]",
    ) -> None:
        """Read an answer to its end. UpstreamFailed as `_handles`."""
        begun = False
        async for handle in self._handles(items):
            if not begun:
                begun = True
                self._service.first_token(here.booking)
                if here.span is not None:
                    here.span.first_token()
            if handle is not None and not handed.done():
                handed.set_result(_Handed(here.decision, worker, handle))

    async def _handles(self, items: AsyncIterator[Any]) -> AsyncIterator[KvHandle | None]:
        """Yield what each item of an answer says of the KV. UpstreamFailed when the worker fails, or is too
        long silent.
        """
        while True:
            try:
                async with asyncio.timeout(self._service.config.first_token_seconds):
                    item = await anext(items, None)
                if item is None:
                    return
                piece = read_piece(item, 0, self._prompt.tokens, wants_experts=True)
                handle = read_handle(item)
            except TimeoutError:
                raise UpstreamFailed(
                    AttemptFailure.FIRST_TOKEN_TIMEOUT, "the prefill worker is silent"
                ) from None
            except Malformed as error:
                raise UpstreamFailed(AttemptFailure.BROKEN, str(error)) from error
            if piece.failure is not None:
                raise UpstreamFailed(AttemptFailure.SERVER_ERROR, piece.failure)
            yield handle
