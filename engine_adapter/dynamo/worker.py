"""One worker of a Dynamo deployment: requests of its request plane, served by the ranks of one of our
engines."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from engine_adapter.batching.kv_cache import Block
from engine_adapter.batching.profile_signatures import pair_counts
from engine_adapter.batching.request_validation import decision_id
from engine_adapter.dynamo.answers import AnswerChunks
from engine_adapter.dynamo.experts import FIELD, encoded
from engine_adapter.dynamo.requests import (
    KV_SOURCE,
    DisaggregationMode,
    PreprocessedRequest,
    UnservableRequest,
    check_role,
    generation_request,
    handed_kv,
    parse,
    served_rank,
    token_stops,
)
from engine_adapter.engine import EngineFailed
from engine_adapter.serving.generation import AnswerStream
from engine_adapter.serving.http import RankTracing, ServedModelInfo
from fleet.completions import DECISION_HEADER
from fleet.popularity import PROMPT_EXPERTS, ExpertCounts, PromptExperts
from fleet.routings import UNKNOWN

log = logging.getLogger(__name__)


class WorkerRank(ServedModelInfo, Protocol):
    """A started rank of one of our engines, as a worker of Dynamo sees it."""

    def stored_block(self, block_hash: int) -> Block | None:
        """Return the cached block of a sequence hash, or None. Callable while the engine computes."""
        ...


class PropagatedMetadata(Protocol):
    """Text that travels with a request from process to process."""

    def get(self, key: str, default: str | None = None) -> str | None: ...


class RequestContext(Protocol):
    """Context of one request, as Dynamo's runtime provides it."""

    @property
    def metadata(self) -> PropagatedMetadata: ...

    def id(self) -> str: ...

    def trace_headers(self) -> dict[str, str] | None: ...

    def async_killed_or_stopped(self) -> Awaitable[bool]:
        """Wait until the client has gone or needs no further tokens."""
        ...


class DynamoWorker:
    """Handler of requests over the ranks that this process runs, by their numbers in the engine."""

    def __init__(
        self,
        ranks: Mapping[int, WorkerRank],
        tracings: Mapping[int, RankTracing],
        mode: DisaggregationMode = "agg",
    ) -> None:
        self._ranks = dict(ranks)
        self._mode = mode
        self._tracings = tracings
        self._open = Counter(dict.fromkeys(ranks, 0))
        self._idle = asyncio.Event()
        self._idle.set()
        self._answers: set[AnswerStream] = set()
        self._broken_off = False
        self.refused = 0
        """Requests that were malformed or asked for what the engine cannot do."""

    @property
    def open_requests(self) -> int:
        """Number of requests being served."""
        return self._open.total()

    async def idle(self) -> None:
        """Wait until no request is being served."""
        await self._idle.wait()

    async def generate(self, request: object, context: RequestContext) -> AsyncGenerator[dict[str, Any]]:
        """Serve one request: an iterator over the maps of its answer. UnservableRequest for a request that
        cannot be served, Overloaded for one too many, EngineFailed when the engine ends."""
        try:
            parsed = parse(request)
            check_role(parsed, self._mode)
            rank = self._rank_for(parsed)
            engine = self._ranks[rank]
            generation = generation_request(
                parsed,
                vocabulary=engine.vocabulary,
                max_context=engine.description.max_context,
                seed=engine.fresh_seed(),
                decision=decision_id(context.metadata.get(DECISION_HEADER)),
            )
            if self._mode == "prefill":
                generation = replace(generation, max_tokens=1, hands_over=True)
            else:
                generation = replace(generation, kv=handed_kv(parsed))
        except UnservableRequest as error:
            self.refused += 1
            log.info("request %s was refused: %s", context.id(), error)
            raise
        self._begin(rank)
        try:
            answer = await engine.submit(generation)
            self._answers.add(answer)
            try:
                async with aclosing(_chunks(parsed, engine, answer, context)) as chunks:
                    async for chunk in chunks:
                        if self._mode == "prefill" and chunk["finish_reason"] is not None:
                            chunk = _with_handle(chunk, engine, answer, len(parsed.token_ids))
                        yield chunk
                self._check_unbroken(answer)
            finally:
                self._answers.discard(answer)
                self._record(rank, context, answer)
        finally:
            self._end(rank)

    def break_off(self) -> None:
        """End all open requests with EngineFailed, so that routers continue them elsewhere."""
        self._broken_off = True
        for answer in tuple(self._answers):
            answer.cancel()

    def _check_unbroken(self, answer: AnswerStream) -> None:
        if self._broken_off and (answer.outcome is None or answer.outcome.reason == "cancelled"):
            raise EngineFailed("the worker is stopping, and its time for open requests is over")

    def _rank_for(self, request: PreprocessedRequest) -> int:
        """Return the rank that the router chose, else the one with the fewest open requests."""
        chosen = served_rank(request, tuple(self._ranks))
        return min(self._ranks, key=self._open.__getitem__) if chosen is None else chosen

    def _begin(self, rank: int) -> None:
        self._open[rank] += 1
        self._idle.clear()

    def _end(self, rank: int) -> None:
        self._open[rank] -= 1
        if not self.open_requests:
            self._idle.set()

    def _record(self, rank: int, context: RequestContext, answer: AnswerStream) -> None:
        tracing = self._tracings.get(rank)
        if tracing is not None:
            tracing.record(_traceparent(context), answer.outcome)


async def _chunks(
    request: PreprocessedRequest, engine: WorkerRank, answer: AnswerStream, context: RequestContext
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the maps of an answer. It is cancelled in the engine when the client has gone, and in every other
    case in which it is not read to its end."""
    stops = token_stops(request)
    scores = request.output_options.logprobs is not None
    chunks = AnswerChunks(stops, engine.tokenizer.piece, scores=scores)
    stopped = asyncio.ensure_future(context.async_killed_or_stopped())
    stopped.add_done_callback(lambda _: answer.cancel())
    try:
        async for delta in answer:
            end = stops.end_in(delta.token_ids)
            if end is not None:
                answer.cancel()
            chunk = chunks.chunk(delta, end, answer.outcome)
            if chunk["finish_reason"] is not None and request.wants_experts:
                chunk |= _experts(engine, answer, len(request.token_ids) + chunks.generated - 1)
            yield chunk
            if end is not None:
                return
    finally:
        answer.cancel()
        stopped.cancel()


def _with_handle(
    chunk: dict[str, Any], engine: WorkerRank, answer: AnswerStream, prompt: int
) -> dict[str, Any]:
    """Return the last map of a prefill, with the place of the KV and the experts that the prompt activated.
    prompt: its tokens."""
    data = dict(chunk.get("engine_data") or {})
    shape = engine.description.shape
    if shape is not None and answer.trace is not None:
        chosen = answer.trace.chosen()[:prompt]
        counts = ExpertCounts.of(pair_counts(chosen, shape.experts))
        tokens = int(np.count_nonzero(chosen[:, 0, 0] != UNKNOWN))
        data[PROMPT_EXPERTS] = msgspec.to_builtins(PromptExperts(tokens=tokens, counts=counts))
    params = {KV_SOURCE: msgspec.to_builtins(answer.kv)}
    return {**chunk, "disaggregated_params": params, "engine_data": data or None}


def _experts(engine: WorkerRank, answer: AnswerStream, positions: int) -> dict[str, Any]:
    """Return the field with the experts of a complete answer, in which no token follows the last position;
    empty when they are not known.
    """
    shape = engine.description.shape
    if shape is None or answer.trace is None:
        return {}
    found = encoded(answer.trace.chosen(), positions, shape.experts)
    return {} if found is None else {"engine_data": {FIELD: found}}


def _traceparent(context: RequestContext) -> str | None:
    """Return the trace context of a request. A router writes its own span into the metadata; the runtime's
    headers alone do not survive the way from a router in Python."""
    found = context.metadata.get("traceparent")
    return found if found is not None else (context.trace_headers() or {}).get("traceparent")
