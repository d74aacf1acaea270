"""One data-parallel rank of SGLang behind the Engine port and behind an HTTP server of ours: requests by ids
go to its native API, and their answers come back as deltas."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import aiohttp
import numpy as np

from engine_adapter.batching.detokenizer import TextStream
from engine_adapter.batching.kv_cache import identify
from engine_adapter.batching.request_validation import GenerationRequest
from engine_adapter.batching.routed_experts import RoutedTrace
from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.engine import Activations, EndedRequest, EngineDescription, EngineFailed
from engine_adapter.foreign.target import ServerTarget
from engine_adapter.serving.checkpoint_tokenizer import CheckpointTokenizer
from engine_adapter.serving.generation import (
    AnswerDelta,
    AnswerStream,
    Ending,
    GenerationOutcome,
    RequestTimes,
)
from engine_adapter.sglang.fields import sampling_fields, stop_ids
from engine_adapter.sglang.generate import (
    DONE,
    AnswerReader,
    Finish,
    GenerateEvent,
    StreamError,
    UnreadableAnswer,
    event_of,
    generate_body,
    routed_bytes,
    routed_table,
)
from engine_adapter.sglang.model_shape import SglangModel
from fleet.routings import count_pairs

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Longest event of a stream that is read."""
MAX_ROUTED_BYTES = 8 * 1024 * 1024
"""Requests whose experts would take more in the answer are not asked for them: decoding delays others."""
_BUSY = (429, 503)
_KEEPALIVE_SECONDS = 2.0
"""SGLang's server closes idle connections after five seconds."""
log = logging.getLogger(__name__)


class ServerBusy(Overloaded):
    """SGLang has too many requests."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class GenerateApi:
    """Address of the server's native API, and how its streams are read."""

    def __init__(
        self,
        base: str,
        api_key: str | None,
        *,
        incremental: bool,
        routed_share: float,
        connect_seconds: float,
    ) -> None:
        """routed_share: share of the requests that are asked for their experts."""
        self.url = f"{base}/generate"
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.incremental = incremental
        self.routed_share = routed_share
        self.timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds)


class _OpenRequest:
    """A request that SGLang serves, and the reading end of its answer."""

    def __init__(
        self, request: GenerationRequest, parameters: Mapping[str, Any], reader: AnswerReader
    ) -> None:
        self.request = request
        self.parameters = parameters
        self.reader = reader
        self.times = RequestTimes(submitted=time.time_ns())
        self.answer: AnswerStream
        self.task: asyncio.Task[None] | None = None

    def outcome(self, reason: Ending, failure: Exception | None = None) -> GenerationOutcome:
        self.times.finished = time.time_ns()
        return GenerationOutcome(
            reason=reason,
            prompt_tokens=len(self.request.prompt) - self.request.emitted,
            completion_tokens=len(self.reader.ids),
            cached_tokens=min(self.reader.cached_tokens, len(self.request.prompt) - self.request.emitted),
            preemptions=self.reader.preemptions,
            moments=self.times,
            failure=failure,
        )


class SglangRank(ServerTarget):
    """One rank. The end of `run` ends its requests."""

    def __init__(
        self,
        description: EngineDescription,
        tokenizer: CheckpointTokenizer,
        api: GenerateApi,
        model: SglangModel | None,
        number: int | None,
        *,
        counts: bool = True,
    ) -> None:
        """model: None if its experts are not reported. counts: its requests that are asked for experts are
        the demand that is reported; otherwise the recorder tells it. number: of the data-parallel rank; None:
        the only one."""
        super().__init__(description, lambda: None)
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.vocabulary
        self.failure: EngineFailed | None = None
        self.unreadable = 0
        """Answers and parts of answers that could not be read."""
        self._api = api
        self._model = model
        self._number = number
        self._counts = counts
        self._session: aiohttp.ClientSession | None = None
        self._open: set[_OpenRequest] = set()

    def fresh_seed(self) -> int:
        return secrets.randbits(63)

    async def run(self) -> None:
        """Carry requests until cancelled. None is open afterwards."""
        try:
            await asyncio.Event().wait()
        finally:
            self.failure = self.failure or EngineFailed("the agent of SGLang is stopping")
            await self._end_all(self.failure)
            if self._session is not None:
                await self._session.close()

    async def submit(self, request: GenerationRequest) -> AnswerStream:
        """Submit a request. EngineFailed when the server is gone; ValueError for a request out of bounds."""
        if self.failure is not None:
            raise self.failure
        if self._session is None:
            # no limit: SGLang queues; idle connections end before the server would close them
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._api.timeout)
        request.check_bounds(max_context=self.description.max_context, vocabulary=self.vocabulary)
        text = TextStream(self.tokenizer.detokenizer(), request.stop)
        text.resume(request.prompt[len(request.prompt) - request.emitted :])
        parameters = sampling_fields(request.fields)
        ends = self.tokenizer.eos | stop_ids(parameters)
        reader = AnswerReader(request, text, ends, incremental=self._api.incremental)
        one = _OpenRequest(request, parameters, reader)
        one.answer = AnswerStream(partial(self._cancelled, one))
        if reader.is_over:
            one.answer.put(AnswerDelta(outcome=one.outcome("stop")))
            return one.answer
        self._open.add(one)
        one.task = asyncio.create_task(self._serve(self._session, one), name="a request to SGLang")
        return one.answer

    def _cancelled(self, one: _OpenRequest, answer: AnswerStream) -> GenerationOutcome:
        """Close the connection, at which SGLang aborts the request."""
        if one.task is not None:
            one.task.cancel()
        return one.outcome("cancelled")

    async def _end_all(self, failure: EngineFailed) -> None:
        tasks = [one.task for one in self._open if one.task is not None]
        for one in list(self._open):
            one.answer.fail(failure, one.outcome("failed", failure))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, session: aiohttp.ClientSession, one: _OpenRequest) -> None:
        try:
            await self._read(session, one)
        except (EngineFailed, Overloaded, ValueError) as error:
            if isinstance(error, UnreadableAnswer):
                error = self._not_read(error)
            one.answer.fail(error, one.outcome("failed", error))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failed = EngineFailed(f"{self._api.url} does not answer: {error or type(error).__name__}")
            one.answer.fail(failed, one.outcome("failed", failed))
        finally:
            self._open.discard(one)

    async def _read(self, session: aiohttp.ClientSession, one: _OpenRequest) -> None:
        """Send the request and pass on its answer. Raises the error that ends it early."""
        rid, routed = uuid.uuid4().hex, self._asks_for_experts(one.request)
        body = generate_body(one.request, one.parameters, rid=rid, rank=self._number, routed=routed)
        async with session.post(self._api.url, data=body, headers=self._api.headers) as response:
            if response.status != 200:
                raise refusal(response.status, await response.content.read(65536))
            async for event in _events(response):
                if event.error is not None:
                    error = event.error
                    raise error_of(error if isinstance(error, StreamError) else StreamError(error))
                if self._pass_on(one, event):
                    return
        raise EngineFailed(f"{self._api.url}: the stream ended before the answer did")

    def _pass_on(self, one: _OpenRequest, event: GenerateEvent) -> bool:
        """Hand an event to the reader of the answer. Return True if it was the last."""
        finish = event.meta_info.finish_reason
        if finish is not None and finish.type == "abort":
            raise aborted(finish)
        tokens, text, scored = one.reader.take(event)
        if tokens and not one.times.first_token:
            one.times.admitted = one.times.first_token = time.time_ns()
        reason = one.reader.reason
        if tokens or text or reason:
            outcome = None if reason is None else one.outcome(reason)
            one.answer.put(AnswerDelta(tokens, text, scored, outcome))
        if reason is not None:
            self._note_experts(one, event)
        return reason is not None

    def _asks_for_experts(self, request: GenerationRequest) -> bool:
        positions = len(request.prompt) + request.max_tokens
        if self._model is None or routed_bytes(self._model, positions) > MAX_ROUTED_BYTES:
            return False
        return secrets.randbelow(1 << 20) < self._api.routed_share * (1 << 20)

    def _note_experts(self, one: _OpenRequest, event: GenerateEvent) -> None:
        """Report the experts of an ended request, if the answer names them."""
        encoded = event.meta_info.routed_experts
        if encoded is None or self._model is None:
            return
        request, ids = one.request, one.reader.ids
        positions = len(request.prompt) + len(ids)
        try:
            chosen = routed_table(
                encoded, self._model, positions=positions, cached=event.meta_info.cached_tokens
            )
        except UnreadableAnswer as error:
            self._not_read(error)
            return
        if self._counts:
            cached = event.meta_info.cached_tokens
            pairs = count_pairs(chosen, self._model.shape.experts).astype(np.int64)
            self.activated(Activations(pairs, max(len(chosen) - cached, 0), cached))
        blocks = identify([*request.prompt, *ids], self.description.block_size, request.salt)
        own = len(request.prompt) - request.emitted
        self.ended(
            EndedRequest(request.decision, own, RoutedTrace.of(chosen), [block.identity for block in blocks])
        )

    def _not_read(self, error: UnreadableAnswer) -> EngineFailed:
        """Count an answer that cannot be read. Log the first, and each time their number has doubled."""
        self.unreadable += 1
        if self.unreadable & (self.unreadable - 1) == 0:
            log.warning("%s: unreadable answers (%d so far): %s", self._api.url, self.unreadable, error)
        return EngineFailed(f"{self._api.url}: {error}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[GenerateEvent]:
    """Yield the events of a stream up to its end. UnreadableAnswer for what is none."""
    line = bytearray()
    async for piece in response.content.iter_any():
        *ended, begun = piece.split(b"\n")
        for end in ended:
            line += end
            data = bytes(line[5:]).strip() if line.startswith(b"data:") else b""
            line.clear()
            if data == DONE:
                return
            if data:  # otherwise the empty line after an event, or a comment that keeps the connection open
                yield event_of(data)
        line += begun
        if len(line) > MAX_EVENT_BYTES:
            raise UnreadableAnswer(f"an event of more than {MAX_EVENT_BYTES} bytes")


def refusal(status: int, body: bytes) -> Exception:
    """Return the error for an answer with another status than 200."""
    text = body.decode(errors="replace")
    try:
        event = event_of(body)
    except UnreadableAnswer:
        event = GenerateEvent()
    if isinstance(event.error, StreamError):
        text = event.error.message
    elif event.error:
        text = event.error
    return error_of(StreamError(text, status))


def aborted(finish: Finish) -> Exception:
    """Return the error for an answer that SGLang aborted."""
    return error_of(StreamError(finish.message or "aborted", finish.status_code or 500))


def error_of(stated: StreamError) -> Exception:
    """Return an error as engines of Roost raise it: the client's own fault, too many requests, or a failure
    that another engine may not have."""
    code, message = stated.code or 500, f"SGLang: {stated.message or 'no reason given'}"
    if code in _BUSY:
        return ServerBusy(message)
    return ValueError(message) if 400 <= code < 500 and code not in (401, 403, 404) else EngineFailed(message)
