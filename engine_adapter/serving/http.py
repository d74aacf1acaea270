"""HTTP server of a rank: OpenAI's completions API in the form of `fleet.completions`, as a raw ASGI
application.

Routes: POST /v1/completions, GET /v1/models, GET /v1/token_frames, GET /health. The client is the router, but
any OpenAI client works.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from engine_adapter.batching.request_validation import (
    NO_FIELDS,
    GenerationRequest,
    check,
    decision_id,
    generation_request,
    parse,
    unread_fields,
)
from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.engine import EngineDescription, EngineFailed
from engine_adapter.serving.authentication import HEALTH_PATH, RouterAuthentication
from engine_adapter.serving.generation import AnswerDelta, AnswerStream, GenerationOutcome, ScoredToken
from engine_adapter.serving.token_frames import FramesConnection, TokenFrames, usage
from fleet.completions import (
    DECISION_HEADER,
    DONE,
    ApiError,
    Choice,
    Completion,
    Logprobs,
    RankRequest,
    Usage,
    sse,
)
from fleet.completions.token_frames import HEADER as FRAMES_HEADER
from fleet.completions.token_frames import PATH as FRAMES_PATH
from fleet.completions.token_frames import named

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
_Read = TypeVar("_Read")

MAX_BODY_BYTES = 8 * 1024 * 1024
LONG_TEXT = 4096
"""Prompts from this number of characters are tokenized off the event loop."""
STOPPING = "stopping"
"""Key of the ASGI server's state: an event that is set when the server stops. Optional."""
_RETRY_SECONDS = 1.0
_JSON = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Tokenizer(Protocol):
    """Encoder of text prompts, with names for token IDs."""

    def encode(self, text: str) -> list[int]: ...

    def piece(self, token: int) -> str: ...


class ServedModelInfo(Protocol):
    """A started rank of an engine, as its HTTP server sees it."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocabulary(self) -> int:
        """Upper bound (exclusive) of token IDs."""
        ...

    @property
    def failure(self) -> EngineFailed | None:
        """Reason why the engine has stopped serving. None while it is healthy."""
        ...

    def fresh_seed(self) -> int:
        """Draw a seed for a request without one."""
        ...

    async def submit(self, request: GenerationRequest) -> AnswerStream:
        """Submit a request. Overloaded when too many are open. EngineFailed when the engine is gone.
        ValueError for a request out of bounds."""
        ...


class RankTracing(Protocol):
    """Implemented in `engine_adapter.tracing`."""

    def record(self, traceparent: str | None, outcome: GenerationOutcome | None) -> None: ...


class ClientClosed(Exception):
    """The client closed the connection before its request was complete."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """Format of the responses to one request."""

    id: str
    model: str
    created: int
    request: RankRequest
    piece: Callable[[int], str]

    def completion(self, choices: list[Choice], usage: Usage | None = None) -> Completion:
        return Completion(id=self.id, model=self.model, choices=choices, created=self.created, usage=usage)

    def choice(self, delta: AnswerDelta) -> Choice:
        return Choice(
            text=delta.text,
            token_ids=delta.token_ids if self.request.return_token_ids else None,
            logprobs=None if self.request.logprobs is None else _logprobs(delta.scored, self.piece),
            finish_reason=None if delta.outcome is None else delta.outcome.reason,
        )

    def events(self, delta: AnswerDelta) -> Iterator[bytes]:
        """Format a delta as server-sent events. Yields nothing while there is nothing to show."""
        if delta.text or delta.outcome is not None or self.request.return_token_ids or delta.scored:
            yield sse(self.completion([self.choice(delta)]))
        if delta.outcome is not None:
            options = self.request.stream_options
            if options is not None and options.include_usage:
                yield sse(self.completion([], usage(delta.outcome)))
            yield DONE


class RankApp:
    """ASGI application of a started engine."""

    def __init__(
        self,
        engine: ServedModelInfo,
        tracing: RankTracing | None = None,
        admission: RouterAuthentication | None = None,
    ) -> None:
        """admission: None if the application in front of this one has already authenticated the client."""
        self._engine = engine
        self._admission = admission
        self._tracing = tracing
        self._started = int(time.time())
        self._frames = TokenFrames()
        self._routes: dict[str, tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]] = {
            "/v1/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._models),
            FRAMES_PATH: ("GET", self._serve_frames),
            HEALTH_PATH: ("GET", self._health),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            if self._admission is not None:
                self._admission.check(scope["path"], scope["headers"])
            await self._route(scope)(scope, receive, send)
        except ApiError as error:
            await refuse(send, error)
        except ClientClosed:
            return

    def _route(self, scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        method, handler = self._routes.get(scope["path"], ("", None))
        if handler is None:
            raise ApiError(404, f"there is no {scope['path']} here; known: {', '.join(self._routes)}")
        if scope["method"] != method and not (method == "GET" and scope["method"] == "HEAD"):
            raise ApiError(405, f"{scope['path']} takes {method}, not {scope['method']}")
        return handler

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._engine.failure is not None:
            raise ApiError(503, "the engine has failed; its log says why", code="engine_failed")
        await respond(send, 200, b'{"status":"ok"}')

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        about = self._engine.description
        model = {
            "id": about.model,
            "object": "model",
            "created": self._started,
            "owned_by": "roost",
            "max_model_len": about.max_context,
        }
        await respond(send, 200, msgspec.json.encode({"object": "list", "data": [model]}))

    async def _serve_frames(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._frames.serve(receive, send, scope.get("state", {}).get(STOPPING))

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        request = parse(body)
        model = self._engine.description.model
        check(request, model)
        fields = unread_fields(body) if self._engine.description.capabilities.passes_fields else NO_FIELDS
        answer = await self._submit(request, decision_id(_header(scope, DECISION_HEADER.encode())), fields)
        reply = _Reply(
            f"cmpl-{uuid.uuid4().hex}", model, int(time.time()), request, self._engine.tokenizer.piece
        )
        traceparent = _header(scope, b"traceparent")
        failure: ApiError | None = None
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(
                _cancel_when_gone(receive, answer), name=f"watches the client of {reply.id}"
            )
            try:
                if (found := self._carrier(scope, request)) is not None:
                    await self._stream_in_frames(*found, answer, send)
                else:
                    await (self._stream if request.stream else self._send_complete)(answer, reply, send)
            except ApiError as error:  # Kept out of the task group, which would wrap it.
                failure = error
            finally:
                answer.cancel()
                watch.cancel()
                if self._tracing is not None:
                    self._tracing.record(traceparent, answer.outcome)
        if failure is not None:
            raise failure

    async def _submit(self, request: RankRequest, decision: str, fields: Mapping[str, Any]) -> AnswerStream:
        engine = self._engine
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = (
                await asyncio.to_thread(engine.tokenizer.encode, prompt)
                if len(prompt) > LONG_TEXT
                else engine.tokenizer.encode(prompt)
            )
        limits = engine.description
        seed = engine.fresh_seed()
        generation = generation_request(
            request,
            prompt,
            vocabulary=engine.vocabulary,
            max_context=limits.max_context,
            seed=seed,
            decision=decision,
            fields=fields,
        )
        try:
            return await engine.submit(generation)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except (EngineFailed, Overloaded) as error:
            raise _unavailable(error) from error

    def _carrier(self, scope: Scope, request: RankRequest) -> tuple[FramesConnection, int] | None:
        """Return the frames connection that the request names, and its number there. None: it is answered by
        itself.
        """
        name = named(_header(scope, FRAMES_HEADER.encode()))
        if name is None or not (request.stream and request.return_token_ids and request.logprobs is None):
            return None
        connection = self._frames.of(name[0])
        return None if connection is None else (connection, name[1])

    async def _stream_in_frames(
        self, connection: FramesConnection, number: int, answer: AnswerStream, send: Send
    ) -> None:
        """Send the response over a frames connection. Its status is sent here with the first delta, and its
        end after the last one.
        """
        first = await _read(anext(answer, None))
        if first is None:
            return
        headers = [*_EVENTS, (FRAMES_HEADER.encode(), b"%d" % number)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        carried = connection.carry(number, answer, first)
        try:
            await _read(carried.over.wait())
        except ApiError as error:
            connection.fail(carried, error.message)
            await carried.over.wait()
        finally:
            connection.drop(carried)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_complete(self, answer: AnswerStream, reply: _Reply, send: Send) -> None:
        delta = await _read(answer.rest())
        if delta.outcome is not None:
            await respond(
                send, 200, msgspec.json.encode(reply.completion([reply.choice(delta)], usage(delta.outcome)))
            )

    async def _stream(self, answer: AnswerStream, reply: _Reply, send: Send) -> None:
        """Stream the response. The status is sent with the first delta. So an engine failure before it is a
        503, and a later one is an error event."""
        begun = False
        try:
            while (delta := await _read(anext(answer, None))) is not None:
                events = b"".join(reply.events(delta))
                if not events:
                    continue
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
                await send({"type": "http.response.body", "body": events, "more_body": delta.outcome is None})
        except ApiError as error:
            if not begun:
                raise
            await send(
                {"type": "http.response.body", "body": b"data: " + error.body() + b"\n\n", "more_body": False}
            )


async def _read(reading: Awaitable[_Read]) -> _Read:
    """Await the reading of an answer. Convert the error that ended the answer early to an ApiError."""
    try:
        return await reading
    except (EngineFailed, Overloaded) as error:
        raise _unavailable(error) from error
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    except asyncio.CancelledError:  # Cancelled by the server, at the end of the time for open requests.
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        raise ApiError(
            503, "the rank is stopping", code="engine_failed", retry_after=_RETRY_SECONDS
        ) from None


def _unavailable(error: EngineFailed | Overloaded) -> ApiError:
    code = "overloaded" if isinstance(error, Overloaded) else "engine_failed"
    return ApiError(503, str(error), code=code, retry_after=_RETRY_SECONDS)


async def _cancel_when_gone(receive: Receive, answer: AnswerStream) -> None:
    """Wait for the client to disconnect, then cancel its request. Everything it holds is free at the next
    step."""
    while (await receive())["type"] != "http.disconnect":
        continue
    answer.cancel()


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the whole body of a request. ApiError 413 when it is too large. ClientClosed when the client
    disconnects before its end."""
    announced = _header(scope, b"content-length")
    if announced is not None and announced.isdecimal():
        _check_size(int(announced))
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientClosed
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        _check_size(size)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"the body has {size} bytes or more; {MAX_BODY_BYTES} are allowed")


def _header(scope: Scope, name: bytes) -> str | None:
    found: bytes | None = next((value for key, value in scope["headers"] if key == name), None)
    return None if found is None else found.decode("latin-1")


async def respond(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Send a JSON response."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, error: ApiError) -> None:
    """Send an error response."""
    retry = (
        () if error.retry_after is None else ((b"retry-after", str(math.ceil(error.retry_after)).encode()),)
    )
    await respond(send, error.status, error.body(), retry)


def _logprobs(scored: Sequence[ScoredToken], piece: Callable[[int], str]) -> Logprobs:
    return Logprobs(
        tokens=[piece(one.token) for one in scored],
        token_logprobs=[one.logprobs.chosen for one in scored],
        top_logprobs=[{piece(token): value for token, value in one.logprobs.top} for one in scored],
        text_offset=[one.offset for one in scored],
    )


async def _lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge startup and shutdown. The composition root manages the engine's lifetime."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
