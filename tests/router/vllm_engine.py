"""A vLLM of several data-parallel ranks behind one URL, with its agent on the bus: takes the client's own body,
names ranks by header, returns ids when asked, reports KV events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from bus.memory import MemoryBus
from fleet.blocks import local_hashes, salted_seed, sequence_hashes
from fleet.facts.dynamo_kv import KvBlock, KvChange, KvEvent, KvStored, RoutedKvEvent
from fleet.facts.engines import Capabilities, EngineJoined
from fleet.requests.engines import KvSnapshot, KvSnapshotRequested
from tests.router.router_fixture import House, engine_joined, until
from tests.router.vllm_like import TOKENIZER, Asked, settled

RANK_HEADER = "X-data-parallel-rank"
BLOCK = 16
CAPABILITIES = Capabilities(kv_events=True, load=True, experts=False, token_ids=False, returns_ids=True)


@dataclass
class Taken:
    """One request as the server got it, and the prompt that it made of it."""

    path: str
    rank: int
    headers: dict[str, str]
    fields: dict[str, Any]
    prompt: list[int]
    cached_blocks: int


class RankCache:
    """KV cache of one rank, unlimited, and the events that it tells its agent."""

    def __init__(self, bus: MemoryBus, house: House, worker_id: int, rank: int) -> None:
        self._publisher = bus.publisher(house.subjects.kv_events)
        self._worker_id, self._rank = worker_id, rank
        self._events: list[KvEvent] = []
        self.blocks: set[int] = set()

    def cached(self, ids: Sequence[int], salt: str) -> int:
        """Leading full blocks of a prompt that are here."""
        chain = sequence_hashes(local_hashes(ids, BLOCK, salted_seed(salt)))
        return next((at for at, block in enumerate(chain) if block not in self.blocks), len(chain))

    async def compute(self, ids: Sequence[int], salt: str) -> None:
        """Hold the full blocks of a prompt, and tell of the new ones."""
        local = local_hashes(ids, BLOCK, salted_seed(salt))
        chain, known = sequence_hashes(local), self.cached(ids, salt)
        new = tuple(KvBlock(block, own) for block, own in zip(chain[known:], local[known:], strict=True))
        if not new:
            return
        self.blocks |= set(chain[known:])
        stored = KvStored(blocks=new, parent_hash=chain[known - 1] if known else None)
        event = KvEvent(event_id=len(self._events), dp_rank=self._rank, data=KvChange(stored=stored))
        self._events.append(event)
        await self._publisher.publish((RoutedKvEvent(worker_id=self._worker_id, event=event),))

    async def snapshot(self, request: Any) -> KvSnapshot:
        assert isinstance(request, KvSnapshotRequested)
        return KvSnapshot(
            worker_id=self._worker_id,
            rank=self._rank,
            publisher_id=self._publisher.publisher_id,
            sequence=self._publisher.sequence - 1,
            events=tuple(self._events),
        )


@dataclass
class VllmEngine:
    """One server of `ranks` ranks. die_after: events of a stream after which the server dies with all of its
    connections."""

    name: str
    ranks: int = 2
    sizes: Sequence[int] = (1,)
    template_adds: str = ""
    """text that its own chat template puts before each prompt, unknown to the router"""
    die_after: int | None = None
    taken: list[Taken] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """set: unstreamed answers are given; prompts are computed all the same"""
    caches: list[RankCache] = field(default_factory=list)
    joined: EngineJoined | None = None
    dead: bool = False
    refuses: tuple[int, dict[str, Any]] | None = None
    prompts: list[list[int]] = field(default_factory=list)
    """prompts that were asked, in common with servers that continue one another's answers"""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/v1/embeddings", self.embed)
        return app

    async def join(self, house: House, url: str, packed: bytes, **about: Any) -> EngineJoined:
        """Tell the fleet of this engine, as its agent does, and wait until the router uses it exactly."""
        digest = await house.bus.put_blob(packed)
        values: dict[str, Any] = {
            "capabilities": CAPABILITIES,
            "block_size": BLOCK,
            "shape": None,
            "placement": None,
            "speed": None,
            "rank_header": RANK_HEADER,
            "weights_digest": "demo weights",
            **about,
        }
        self.joined = engine_joined(self.name, (url,) * self.ranks, digest, **values)
        worker = self.joined.worker_id
        self.caches = [RankCache(house.bus, house, worker, rank) for rank in range(self.ranks)]
        await self._beat(house)
        return self.joined

    async def _beat(self, house: House) -> None:
        assert self.joined is not None
        joined, service = self.joined, house.service
        await house.bus.record(house.subjects.membership(self.name), joined)
        await house.beat(joined)

        def known() -> bool:
            state = service.view.engine(joined.worker_id)
            assert service.fleet_subscriber is not None
            kv = service.fleet_subscriber.kv
            in_step = all(kv.in_step((joined.worker_id, rank)) for rank in range(self.ranks))
            exact = in_step or not joined.capabilities.kv_events
            live = state is not None and state.obstacle is None
            return live and exact and service.tokenizer(joined.tokenizer) is not None

        await until(known)

    @contextlib.asynccontextmanager
    async def snapshots(self, house: House) -> AsyncIterator[None]:
        """Answer the router's requests for snapshots of the ranks."""
        worker = engine_joined(self.name, ("x",), None).worker_id
        async with contextlib.AsyncExitStack() as stack:
            for rank in range(self.ranks):
                subject = house.subjects.kv_snapshot(self.name, worker, rank)
                await stack.enter_async_context(house.bus.serve(subject, self._snapshot))
            yield

    async def _snapshot(self, request: Any) -> KvSnapshot:
        await until(lambda: len(self.caches) == self.ranks)
        return await self.caches[request.rank].snapshot(request)

    # The server

    async def detokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"prompt": TOKENIZER.decode((await http.json())["tokens"])})

    async def embed(self, http: web.Request) -> web.Response:
        rank = int(http.headers.get(RANK_HEADER, "-1"))
        self.taken.append(
            Taken(
                http.path,
                rank,
                {name.lower(): value for name, value in http.headers.items()},
                await http.json(),
                [],
                0,
            )
        )
        return web.json_response({"object": "list", "data": []})

    async def answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        if self.dead:
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        fields = json.loads(body)
        prompt = self._prompt_of(http.path, fields)
        rank, salt = int(http.headers[RANK_HEADER]) if self.ranks > 1 else 0, fields.get("cache_salt") or ""
        cached = self.caches[rank].cached(prompt, salt)
        self.taken.append(
            Taken(
                http.path,
                rank,
                {name.lower(): value for name, value in http.headers.items()},
                fields,
                prompt,
                cached,
            )
        )
        if self.refuses is not None:
            return web.json_response(self.refuses[1], status=self.refuses[0])
        first = next((known for known in self.prompts if prompt[: len(known)] == known), prompt)
        self.prompts.append(first)
        asked = Asked(http.path, body, first)
        await self.caches[rank].compute(prompt, salt)
        if not fields.get("stream"):
            await self.held.wait()
            return web.Response(body=_whole(asked, prompt), content_type="application/json")
        return await self._stream(http, asked)

    def _prompt_of(self, path: str, fields: dict[str, Any]) -> list[int]:
        if path.endswith("chat/completions"):
            if any(not isinstance(one["content"], str) for one in fields["messages"]):
                return TOKENIZER.encode_rendered("an image and a text")
            said = "".join(f"{one['role']}: {one['content']}\n" for one in fields["messages"])
            return TOKENIZER.encode_rendered(f"{self.template_adds}{said}assistant: ")
        prompt: str | list[int] = fields["prompt"]
        return TOKENIZER.encode_prompt(prompt) if isinstance(prompt, str) else prompt

    async def _stream(self, http: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        for number, event in enumerate(asked.events(self.sizes)):
            if number == self.die_after:
                self.dead = True
                assert http.transport is not None
                http.transport.abort()
                return response
            await response.write(event)
            await asyncio.sleep(0)
        return response


def _whole(asked: Asked, prompt: list[int]) -> bytes:
    """An unstreamed answer as vLLM 0.32 writes it (tests/compat)."""
    ids = asked.whole[len(asked.emitted) :]
    text = settled(asked.whole)[len(settled(asked.emitted)) :]
    said: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text, "refusal": None}} if asked.chat else {"text": text}
    )
    choice: dict[str, Any] = {"index": 0, **said, "logprobs": None, "finish_reason": "length"}
    shown = prompt if asked.ids else None
    choice |= {"stop_reason": None, "token_ids": ids if asked.ids else None}
    if not asked.chat:
        choice["prompt_token_ids"] = shown
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
    }
    whole = {"id": "x-1", "object": "chat.completion" if asked.chat else "text_completion", "created": 7}
    whole |= {"model": asked.fields.get("model"), "choices": [choice], "usage": usage}
    whole |= {"prompt_token_ids": shown, "prompt_text": None} if asked.chat else {}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
