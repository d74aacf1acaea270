"""A proxy that asks an endpoint picker as Envoy does: a gRPC client that sends each phase of a request, forwards
it to the endpoint that it is told, and reports the answer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import grpc.aio

from router.gateway.messages import ProcessingRequest, ProcessingResponse
from router.gateway.picker import EndpointPicker
from router.gateway.protocol import DESTINATION, BodyMode
from router.gateway.server import EXT_PROC, GatewayServer
from router.service import RouterService

CHAT = "/v1/chat/completions"
LIMIT = 8 * 1024 * 1024


@contextlib.asynccontextmanager
async def picking(service: RouterService, **options: Any) -> AsyncIterator[str]:
    """The endpoint picker of a router on 127.0.0.1; yields its address."""
    server = await GatewayServer.open(EndpointPicker(service), "127.0.0.1:0", max_body_bytes=LIMIT, **options)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close(0)


@dataclass
class Picked:
    """What a picker has said about a request. refused: the status of its own answer; 0: it named an endpoint."""

    endpoint: str = ""
    metadata: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes = b""
    refused: int = 0
    text: bytes = b""
    phases: list[str] = field(default_factory=list)

    def take(self, answer: Any) -> str:
        """Apply an answer, as a proxy would; return the phase that it is about."""
        phase: str = answer.WhichOneof("response")
        self.phases.append(phase)
        if phase == "immediate_response":
            self.refused, self.text = answer.immediate_response.status.code, answer.immediate_response.body
            self.headers |= _set(answer.immediate_response.headers)
            return phase
        if phase.startswith("request_") and phase != "request_trailers":
            common = getattr(answer, phase).response
            self.headers |= _set(common.header_mutation)
            self.removed += common.header_mutation.remove_headers
            self.endpoint = self.headers.get(DESTINATION, "")
            if answer.HasField("dynamic_metadata"):
                self.metadata = answer.dynamic_metadata["envoy.lb"][DESTINATION]
            mutation = common.body_mutation
            if mutation.WhichOneof("mutation") == "streamed_response":
                self.body += mutation.streamed_response.body
            elif mutation.WhichOneof("mutation") == "body":
                self.body = mutation.body
        return phase


def _set(mutation: Any) -> dict[str, str]:
    assert all(option.append_action == 2 for option in mutation.set_headers)
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


class Exchange:
    """One request on its way through the proxy."""

    def __init__(self, call: Any, mode: BodyMode, answer_mode: BodyMode) -> None:
        self._call = call
        self._mode, self._answer_mode = mode, answer_mode
        self.picked = Picked()
        self._next: asyncio.Task[Any] | None = None
        """the next answer, listened for while this side still speaks"""

    async def say(self, message: Any) -> None:
        await self._call.write(message.SerializeToString())

    async def hear(self) -> Any:
        """The next answer; None at the end of the stream."""
        waited, self._next = self._next or self._listen(), None
        data = await waited
        return None if data is grpc.aio.EOF else ProcessingResponse.FromString(data)

    def _listen(self) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._call.read())

    async def ask(
        self,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        subset: Any = None,
        path: str = CHAT,
        pieces: int = 1,
        trailers: bool = False,
        config: bool = True,
    ) -> Picked:
        """Send head and body, and hear where to send the request."""
        await self.say(head(path, headers or {}, self._mode, self._answer_mode, subset, config=config))
        if self._mode is BodyMode.BUFFERED:
            assert self.picked.take(await self.hear()) == "request_headers"
        self._next = self._listen()
        size = -(-len(body) // pieces)
        cut = [body[at * size : (at + 1) * size] for at in range(pieces)]
        for number, piece in enumerate(cut, 1):
            message = ProcessingRequest()
            message.request_body.body = piece
            message.request_body.end_of_stream = number == pieces and not trailers
            try:
                await self.say(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # A refusal of the head ends the exchange, perhaps before the body is sent.
                assert self.picked.take(await self.hear())
                assert self.picked.refused
                return self.picked
        if trailers:
            message = ProcessingRequest()
            message.request_trailers.SetInParent()
            await self.say(message)
        last = "request_trailers" if trailers else "request_body"
        while not self.picked.refused:
            answer = await self.hear()
            assert answer is not None
            phase = self.picked.take(answer)
            streamed = self._mode is BodyMode.FULL_DUPLEX_STREAMED and phase == "request_body"
            if phase == last and (not streamed or _ends(answer)):
                break
        return self.picked

    async def report(
        self, status: int, content_type: str, pieces: Iterable[bytes], *, served: str = ""
    ) -> bytes:
        """Report the answer of the endpoint; return the body that the client gets."""
        message = ProcessingRequest()
        headers = {":status": str(status), "content-type": content_type}
        for name, value in headers.items():
            message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        if served:
            entry = message.metadata_context.filter_metadata.add(key="envoy.lb")
            entry.value.update({"x-gateway-destination-endpoint-served": served})
        await self.say(message)
        got = await self.hear()
        assert got.WhichOneof("response") == "response_headers"
        self.picked.headers |= _set(got.response_headers.response.header_mutation)
        body = b""
        pieces = list(pieces)
        for number, piece in enumerate(pieces, 1):
            message = ProcessingRequest()
            message.response_body.body = piece
            message.response_body.end_of_stream = number == len(pieces)
            await self.say(message)
            if self._answer_mode is BodyMode.FULL_DUPLEX_STREAMED:
                body += (await self.hear()).response_body.response.body_mutation.streamed_response.body
            else:
                assert (await self.hear()).WhichOneof("response") == "response_body"
                body += piece
        return body

    async def report_begun(self, pieces: Iterable[bytes]) -> None:
        """Report the head of a stream and some pieces of it."""
        message = ProcessingRequest()
        for name, value in {":status": "200", "content-type": "text/event-stream"}.items():
            message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        await self.say(message)
        await self.hear()
        for piece in pieces:
            message = ProcessingRequest()
            message.response_body.body = piece
            await self.say(message)
            await self.hear()

    def vanish(self) -> None:
        """Break off, as a proxy does whose client has left."""
        self._call.cancel()

    async def leave(self) -> None:
        """Close the stream in order before the answer is complete."""
        await self._call.done_writing()

    async def forward(self, http: aiohttp.ClientSession, path: str = CHAT) -> bytes:
        """Send the request to its endpoint, report the answer and return it."""
        headers = {**self.picked.headers, "content-type": "application/json"}
        url = f"http://{self.picked.endpoint}{path}"
        async with http.post(url, data=self.picked.body, headers=headers) as answer:
            data = await answer.read()
            return await self.report(answer.status, answer.content_type, [data])


def head(
    path: str,
    headers: Mapping[str, str],
    mode: BodyMode,
    answer_mode: BodyMode,
    subset: Any = None,
    *,
    method: str = "POST",
    ends: bool = False,
    config: bool = True,
) -> Any:
    """The first message about a request."""
    message = ProcessingRequest()
    for name, value in {":method": method, ":path": path, ":authority": "llm.example", **headers}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = ends
    if config:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = answer_mode
    if subset is not None:
        entry = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        entry.value.update({"x-gateway-destination-endpoint-subset": subset})
    return message


def _ends(answer: Any) -> bool:
    ends: bool = answer.request_body.response.body_mutation.streamed_response.end_of_stream
    return ends


class Proxy:
    """A gateway before one picker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._process = channel.stream_stream(f"/{EXT_PROC}/Process")

    def open(
        self,
        mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED,
        answer_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED,
    ) -> Exchange:
        """Begin a request."""
        return Exchange(self._process(), mode, answer_mode)

    async def ask_once(self, *messages: bytes) -> list[Any]:
        """Send these bytes on a stream of their own; return its answers, without the error that may end it."""
        call = self._process()
        answers = []
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while (data := await call.read()) is not grpc.aio.EOF:
                answers.append(ProcessingResponse.FromString(data))
        call.cancel()
        return answers


@contextlib.asynccontextmanager
async def gateway(service: RouterService, **options: Any) -> AsyncIterator[Proxy]:
    """A proxy whose picker is this router."""
    async with picking(service, **options) as address, grpc.aio.insecure_channel(address) as channel:
        yield Proxy(channel)
