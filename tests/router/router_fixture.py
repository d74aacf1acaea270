"""A whole router in one process: its service, its HTTP face under uvicorn, mock ranks, and engines that speak
on a MemoryBus."""

import asyncio
import contextlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from deploy.http.limits import Count
from deploy.http.server import HttpServer
from deploy.http.sockets import listen, url_of
from deploy.parts.router import http_limits
from fleet.blocks import sequence_hashes
from fleet.completions import Choice, Completion, Logprobs, PromptDetails, RankRequest, Usage
from fleet.completions.token_frames import HEADER as FRAMES_HEADER
from fleet.completions.token_frames import PieceEnd, TokenPiece, encode, named
from fleet.experts import ModelShape
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent
from fleet.facts.engines import Capabilities, EngineHeartbeat, EngineJoined
from fleet.layout import EP, Layout
from fleet.placement import linear
from fleet.timing import EngineSpeed
from router.config import RouterConfig
from router.service import RouterService
from router.telemetry.metrics import RouterMetrics
from router.tokenization.tokenizer import ModelTokenizer
from tests.layouts import stated

TEMPLATE = (
    "{%- for message in messages -%}{{ message['role'] + ': ' + message['content'] + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)
SCRIPT = "Das Blässhuhn 🐣 baut sein Nest — naïve façade, 東京タワー, and plain words in a row; "
WORKER = 2**64 - 3
"""The worker_id of KV events, unless told otherwise."""
SHAPE = ModelShape(layers=2, experts=4, top_k=2, hidden=8, expert_intermediate=8)


def archive(tokenizer: Tokenizer, settings: dict[str, Any]) -> bytes:
    """The zip that an engine puts into the blob store."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        files.writestr("tokenizer.json", tokenizer.to_str())
        files.writestr("tokenizer_config.json", json.dumps(settings))
    return packed.getvalue()


def bpe(vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer; 257 entries leave no merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SCRIPT * 3, "user: assistant: words words row"], trainer)
    return tokenizer


class MockRank:
    """Speaks `fleet.completions` as a rank does. The next id depends on prompt, seed and position alone, so
    any rank can continue."""

    def __init__(self, packed: bytes) -> None:
        self.tokenizer = ModelTokenizer.from_archive(packed)
        self.script = self.tokenizer.encode_rendered(SCRIPT)
        self.requests: list[RankRequest] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.left = asyncio.Event()
        """set when a client hangs up"""
        self.asked = asyncio.Event()
        self.die_after: int | None = None
        """abort the connection after so many chunks"""
        self.answer_status = 200
        self.hold_after: int | None = None
        """say nothing more after so many chunks, until the client hangs up"""
        self.garbage_after: int | None = None
        self.forget_finish = False
        self.hang_up_once = False
        """close one connection before saying anything"""
        self.leavers = 0
        self.peers: set[object] = set()
        self.transports: list[asyncio.BaseTransport] = []
        self.cached_tokens = 0
        self.url = ""
        self.carriers: dict[str, tuple[web.StreamResponse, web.Request]] = {}
        """token frames, by the name of their connection"""
        self.in_frames = 0
        """number of answers sent in token frames"""

    def ids(self, prompt: Sequence[int], seed: int, count: int) -> list[int]:
        """What an unbroken run emits."""
        start = (sum(prompt) + seed) % len(self.script)
        return [self.script[(start + at) % len(self.script)] for at in range(count)]

    def text(self, prompt: Sequence[int], seed: int, count: int) -> str:
        return self.tokenizer.decode(self.ids(prompt, seed, count))

    def break_off(self) -> None:
        """Abort the connection of the last request."""
        transport = self.transports[-1]
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

    async def token_frames(self, http: web.Request) -> web.StreamResponse:
        name = f"frames{len(self.carriers)}"
        response = web.StreamResponse(headers={FRAMES_HEADER: name})
        await response.prepare(http)
        self.carriers[name] = response, http
        try:
            await asyncio.Event().wait()
        finally:
            del self.carriers[name]
        return response

    def break_frames(self) -> None:
        """Abort the connections of token frames."""
        for _, http in self.carriers.values():
            assert http.transport is not None
            http.transport.abort()

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        request = msgspec.json.decode(body, type=RankRequest)
        self.bodies.append(body)
        assert http.transport is not None
        self.transports.append(http.transport)
        self.peers.add(http.transport.get_extra_info("peername"))
        if self.hang_up_once:
            self.hang_up_once = False
            http.transport.abort()
            return web.Response()
        self.requests.append(request)
        self.headers.append(dict(http.headers))
        self.asked.set()
        if self.answer_status != 200:
            return web.json_response(
                {"error": {"message": "mock says no", "type": "x", "param": "prompt", "code": "mock"}},
                status=self.answer_status,
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            found = named(http.headers.get(FRAMES_HEADER))
            if found is not None and found[0] in self.carriers:
                await self._stream_in_frames(request, response, http, *found)
            else:
                await self._stream(request, response, http)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            self.leavers += 1
            raise
        return response

    async def _stream(self, request: RankRequest, response: web.StreamResponse, http: web.Request) -> None:
        await response.prepare(http)
        number = 0
        for number, chunk in enumerate(self._chunks(request)):
            if number == self.die_after:
                assert http.transport is not None
                http.transport.abort()
                return
            if number == self.hold_after:
                await asyncio.Event().wait()
            if number == self.garbage_after:
                await response.write(b'data: {"error": {"message": "rank lost"}}\n\n')
                return
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")

    async def _stream_in_frames(
        self, request: RankRequest, response: web.StreamResponse, http: web.Request, name: str, number: int
    ) -> None:
        self.in_frames += 1
        hold_after, garbage_after = self.hold_after, self.garbage_after
        response.headers[FRAMES_HEADER] = str(number)
        await response.prepare(http)
        *chunks, last = self._chunks(request)
        for at, chunk in enumerate(chunks):
            if at == self.die_after:
                self.break_frames()
                assert http.transport is not None
                http.transport.abort()
                return
            if at == hold_after:
                await asyncio.Event().wait()
            choice, end = chunk.choices[0], None
            if at == len(chunks) - 1:
                end = PieceEnd(finish_reason=choice.finish_reason, usage=last.usage)
            if at == garbage_after:
                end = PieceEnd(error="rank lost")
            piece = TokenPiece(number, choice.token_ids or [], choice.text, end)
            await self.carriers[name][0].write(encode([piece]))
            await asyncio.sleep(0)
            if end is not None:
                return

    def _chunks(self, request: RankRequest) -> Iterator[Completion]:
        assert isinstance(request.prompt, list)
        prompt = request.prompt[: len(request.prompt) - request.emitted]
        total = request.emitted + request.max_tokens
        ids = self.ids(prompt, request.seed or 0, total)
        assert ids[: request.emitted] == request.prompt[len(prompt) :], (
            "continued with other ids than were emitted"
        )
        sent = _settled(self.tokenizer.decode(ids[: request.emitted]))
        for at in range(request.emitted, total):
            last = at == total - 1
            whole = self.tokenizer.decode(ids[: at + 1])
            text = whole if last else _settled(whole)
            finish = "length" if last and not self.forget_finish else None
            logprobs = None
            if request.logprobs is not None:
                logprobs = Logprobs(
                    tokens=[f"t{ids[at]}"],
                    token_logprobs=[-0.5],
                    top_logprobs=[{f"t{ids[at]}": -0.5, "é": -2.0}],
                    text_offset=[at],
                )
            yield self._completion(
                [Choice(text=text[len(sent) :], token_ids=[ids[at]], logprobs=logprobs, finish_reason=finish)]
            )
            sent = text
        usage = Usage(
            prompt_tokens=len(prompt),
            completion_tokens=request.max_tokens,
            total_tokens=0,
            prompt_tokens_details=PromptDetails(self.cached_tokens),
        )
        yield self._completion([], usage)

    def _completion(self, choices: list[Choice], usage: Usage | None = None) -> Completion:
        return Completion(id="cmpl-rank", model="rank's own name", created=1, choices=choices, usage=usage)


def chat(content: str = "hello there", **more: Any) -> dict[str, Any]:
    """A chat body."""
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "seed": 5,
        **more,
    }


def rendered(content: str) -> str:
    """What TEMPLATE makes of it."""
    return f"user: {content}\nassistant: "


def stored(
    local: Sequence[int], behind: Sequence[int] = (), worker: int = WORKER, rank: int = 0
) -> RoutedKvEvent:
    """Blocks with these local hashes, behind a prefix given by its local hashes."""
    chained = sequence_hashes([*behind, *local])
    blocks = tuple(KvBlock(block, own) for block, own in zip(chained[len(behind) :], local, strict=True))
    parent = chained[len(behind) - 1] if behind else None
    return RoutedKvEvent(
        worker_id=worker,
        event=KvEvent(
            event_id=1, dp_rank=rank, data=KvChange(stored=KvStored(blocks=blocks, parent_hash=parent))
        ),
    )


def _settled(text: str) -> str:
    """Text without the unfinished character at its end, which a rank holds back."""
    return text.rstrip("�")


Serve = Callable[[MockRank], Awaitable[MockRank]]


@contextlib.asynccontextmanager
async def served_app(
    app: FastAPI, config: RouterConfig | None = None, count: Count | None = None
) -> AsyncIterator[str]:
    """The router's application on 127.0.0.1, as it runs for real."""
    door = listen("127.0.0.1", 0)
    url = url_of(door)
    async with HttpServer(
        app, door, drain_seconds=1, limits=http_limits(config or RouterConfig()), count=count
    ):
        yield url


async def until(fact: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not fact():  # noqa: ASYNC110 facts of another component have no event
            await asyncio.sleep(0.002)


@dataclass
class House:
    """A running router and the bus it listens to."""

    service: RouterService
    url: str
    bus: MemoryBus
    broker: MemoryBroker
    subjects: Subjects
    http: aiohttp.ClientSession
    digests: dict[bytes, str] = field(default_factory=dict)

    async def join(
        self, engine: str, urls: Sequence[str], packed: bytes | None, **about: Any
    ) -> EngineJoined:
        """An engine joins, beats once, and is waited for."""
        joined = engine_joined(
            engine, urls, None if packed is None else await self.bus.put_blob(packed), **about
        )
        await self.bus.record(self.subjects.membership(engine), joined)
        await self.beat(joined)
        await until(
            lambda: (
                (state := self.service.view.engine(joined.worker_id)) is not None
                and state.obstacle is None
                and state.locality is not None
            )
        )
        return joined

    async def beat(self, joined: EngineJoined) -> None:
        await self.bus.publisher(self.subjects.heartbeats(joined.engine)).publish(
            EngineHeartbeat(engine=joined.engine, worker_id=joined.worker_id, epoch=0)
        )

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> "Answered":
        """A request, read to its end."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return Answered(
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                await response.read(),
            )

    async def get(self, path: str, headers: dict[str, str] | None = None) -> "Answered":
        async with self.http.get(self.url + path, headers=headers) as response:
            return Answered(
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                await response.read(),
            )


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Every event but the last, which is [DONE]."""
        events = [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n") if event]
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]


def engine_joined(
    engine: str, urls: Sequence[str], tokenizer: str | None, *, worker_id: int = 0, **about: Any
) -> EngineJoined:
    """What an engine says of itself; capabilities default to load and ids, without KV events."""
    layout: Layout = about.pop("layout", EP)
    values: dict[str, Any] = {
        "model": "demo",
        "block_size": 4,
        "kv_blocks": 1000,
        "max_context": 4096,
        "max_batch_tokens": 512,
        "layout": layout,
        "shape": SHAPE,
        "placement": linear(layers=SHAPE.layers, experts=SHAPE.experts, ranks=len(urls)).record(),
        "speed": EngineSpeed(),
        "capabilities": Capabilities(kv_events=False),
        **about,
    }
    return EngineJoined(
        engine=engine,
        worker_id=worker_id or 2**64 - 1 - sum(engine.encode()),
        node="here",
        urls=tuple(urls),
        tokenizer=tokenizer,
        **stated(values),
    )


@contextlib.asynccontextmanager
async def running(service: RouterService) -> AsyncIterator[RouterService]:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(service.run(), name="runs the router's service")
        if service.fleet_subscriber is not None:
            await service.fleet_subscriber.listening.wait()
        try:
            yield service
        finally:
            task.cancel()


OpenHouse = Callable[..., Awaitable[House]]


def metric(metrics: RouterMetrics, name: str, **labels: str) -> float:
    """Return the value of one series, or the sum of those with these labels; 0.0 when there is none."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    samples = (sample for family in families for sample in family.samples)
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"roost_router_{name}" and labels.items() <= sample.labels.items()
    )
