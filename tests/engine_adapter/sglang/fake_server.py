"""A small SGLang: its HTTP answers, its streams and its KV events in the formats of SGLang 0.5.23, read in
its source; no SGLang has made them. Its model is a function of the last few ids, and its cache a tree of
pages."""

import asyncio
import base64
import contextlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zmq
import zmq.asyncio
from aiohttp import web

from tests.conftest import free_port
from tests.engine_adapter.vllm.recorded_server import Publisher
from tests.web_server import served_web

FOLDER = Path(__file__).resolve().parents[3] / "deploy/demo_model/checkpoint"
CONFIG = json.loads((FOLDER / "config.json").read_text())
LAYERS, EXPERTS, TOP_K = (
    CONFIG[name] for name in ("num_hidden_layers", "num_local_experts", "num_experts_per_tok")
)
EOS = CONFIG["eos_token_id"]
PAGE, PAGES = 16, 48
_CONTEXT = 6
"""Ids that the next one depends on."""


def next_token(ids: Sequence[int]) -> int:
    """Return the token after these ids: a printable byte."""
    return 32 + xxhash.xxh3_64_intdigest(np.array(ids[-_CONTEXT:], "<i8").tobytes()) % 90


def continued(prompt: Sequence[int], count: int) -> list[int]:
    """Return the greedy answer."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def routed(ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the experts of each token: int32 [tokens, layers, k], distinct in a layer."""
    first = np.array(ids)[:, None] * 7 + np.arange(LAYERS)[None, :] * 3
    return ((first[:, :, None] + np.arange(TOP_K)) % EXPERTS).astype("<i4")


def event(name: str, **fields: Any) -> dict[str, Any]:
    """One KV event: a map in which `type` names it, without optional fields that are not set."""
    return {"type": name, **{key: value for key, value in fields.items() if value is not None}}


def batch(events: Sequence[dict[str, Any]], rank: int, at: float = 1.5) -> bytes:
    """A batch: an array of time, events, and the rank."""
    return msgspec.msgpack.encode([at, list(events), rank])


class PageCache:
    """KV cache of one rank: pages by SGLang's own hash, dropped from the ends of the least recent prompts."""

    def __init__(self, pages: int = PAGES) -> None:
        self.pages = pages
        self.children: dict[int, set[int]] = {}
        self.parent: OrderedDict[int, int | None] = OrderedDict()
        self.events: list[dict[str, Any]] = []

    def hashes(self, ids: Sequence[int], salt: str | None) -> list[int]:
        found: list[int] = []
        before = salt or ""
        for at in range(0, len(ids) - len(ids) % PAGE, PAGE):
            digest = xxhash.xxh3_64_intdigest(f"{before}/{list(ids[at : at + PAGE])}".encode())
            before = str(digest)
            found.append(digest - (1 << 63))
        return found

    def cached(self, ids: Sequence[int], salt: str | None) -> int:
        """Return the tokens that are found."""
        count = 0
        for one in self.hashes(ids, salt):
            if one not in self.parent:
                break
            count += PAGE
        return count

    def insert(self, ids: Sequence[int], salt: str | None) -> None:
        """Cache all full pages of a finished request."""
        before: int | None = None
        for number, one in enumerate(self.hashes(ids, salt)):
            if one not in self.parent:
                self._make_room({before})
                self.parent[one] = before
                self.children.setdefault(one, set())
                if before is not None:
                    self.children[before].add(one)
                self._stored(one, before, ids[number * PAGE : (number + 1) * PAGE], salt)
            self.parent.move_to_end(one)
            before = one

    def _stored(self, name: int, parent: int | None, ids: Sequence[int], salt: str | None) -> None:
        """Note a stored page: together with the one before, where they follow each other."""
        last = self.events[-1] if self.events else None
        if (
            last is not None
            and last["type"] == "BlockStored"
            and last["block_hashes"][-1] == parent
            and last.get("cache_salt") == salt
        ):
            last["block_hashes"].append(name)
            last["token_ids"].extend(ids)
            return
        stored = event(
            "BlockStored",
            block_hashes=[name],
            token_ids=list(ids),
            block_size=PAGE,
            medium="GPU",
            cache_salt=salt,
        )
        self.events.append({**stored, "parent_block_hash": parent, "lora_id": None})

    def _make_room(self, kept: set[int | None]) -> None:
        while len(self.parent) >= self.pages:
            gone = next(one for one in self.parent if not self.children[one] and one not in kept)
            parent = self.parent.pop(gone)
            del self.children[gone]
            if parent is not None:
                self.children[parent].discard(gone)
            self.events.append(event("BlockRemoved", block_hashes=[gone], medium="GPU"))

    def clear(self) -> None:
        self.parent.clear()
        self.children.clear()
        self.events.append(event("AllBlocksCleared"))

    def take(self) -> list[dict[str, Any]]:
        taken, self.events = self.events, []
        return taken


class FakeSglang:
    """The server. Its answers may be changed at any time."""

    def __init__(self, ranks: int, publishers: list[Publisher], *, incremental: bool) -> None:
        self.url = ""
        self.up = True
        self.incremental = incremental
        self.publishers = publishers
        self.caches = [PageCache() for _ in range(ranks)]
        self.running = [0] * ranks
        self.steps = 0
        self.readings = 0
        self.requests: list[dict[str, Any]] = []
        """Bodies of /generate."""
        self.posted: list[str] = []
        """Paths of the recorder that were asked."""
        self.aborted = 0
        """Streams that the client left."""
        self.hold = asyncio.Event()
        """Streams wait for it after their first token."""
        self.hold.set()
        self.cut_after: int | None = None
        """Break each stream after this number of tokens."""
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.events_instead: list[bytes] | None = None
        """Data of a stream's events, instead of an answer."""
        self.recorder_folder: Path | None = None
        self.info: dict[str, Any] = {
            "model_path": str(FOLDER),
            "served_model_name": "small",
            "tokenizer_path": str(FOLDER),
            "version": "0.5.23",
            "page_size": PAGE,
            "context_length": 256,
            "max_total_num_tokens": PAGE * PAGES,
            "chunked_prefill_size": 256,
            "dp_size": ranks,
            "incremental_streaming_output": incremental,
            "enable_return_routed_experts": True,
            "enable_eplb": False,
            "expert_distribution_recorder_mode": None,
            "elastic_ep_backend": None,
            "disaggregation_mode": "null",
            "startup_time": {"load_weight": 1.25, "tokenizer_e2e": 2.5},
            "internal_states": [{}] * ranks,
            "kv_events": self._described(),
        }
        self.scaling: dict[str, Any] | None = None

    def _described(self) -> dict[str, Any] | None:
        if not self.publishers:
            return None
        first = self.publishers[0]
        return {
            "publisher": "zmq",
            "endpoint_host": "127.0.0.1",
            "endpoint_port_base": first.port,
            "topic": "",
            "block_size": PAGE,
            "dp_size": len(self.caches),
            "replay_endpoint_port_base": first.replay_port,
        }

    async def publish(self, rank: int) -> None:
        """Publish what the cache of a rank has noted."""
        events = self.caches[rank].take()
        if events and self.publishers:
            await self.publishers[rank].publish(batch(events, rank))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.up:
            return web.Response(status=503)
        match request.path:
            case "/generate":
                return await self._generate(request)
            case "/server_info":
                return web.json_response(self.info)
            case "/v1/models":
                card = {"id": "small", "root": "small", "max_model_len": 256}
                lora = {"id": "lora", "parent": "small", "max_model_len": None}
                return web.json_response({"object": "list", "data": [card, lora]})
            case "/v1/loads":
                self.readings += 1
                loads = [self._load(rank) for rank in range(len(self.caches))]
                return web.json_response({"timestamp": "x", "version": "0.5.23", "loads": loads})
            case "/is_scaling_elastic_ep" if self.scaling is not None:
                return web.json_response(self.scaling)
            case "/start_expert_distribution_record" | "/dump_expert_distribution_record":
                self.posted.append(request.path)
                if request.path.startswith("/dump") and self.recorder_folder is not None:
                    self.write_record(len(self.posted))
                return web.Response(text="ok\n")
        return web.json_response({"detail": "Not Found"}, status=404)

    def write_record(self, number: int) -> Path:
        """Write a file as the recorder does, by torch itself."""
        import torch

        assert self.recorder_folder is not None
        file = self.recorder_folder / f"expert_distribution_recorder_{number}.5.pt"
        counts = torch.ones((3, LAYERS, EXPERTS), dtype=torch.int32)
        torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}, file)
        return file

    def _load(self, rank: int) -> dict[str, Any]:
        running = self.running[rank]
        return {
            "timestamp": 1.0,
            "dp_rank": rank,
            "num_running_reqs": running,
            "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 40 * (running > 2),
            "num_used_tokens": min(running, PAGES // 4) * 3 * PAGE,
            "num_total_tokens": 0,
            "max_total_num_tokens": PAGE * PAGES,
            "max_running_requests": 64,
            "token_usage": 0.0,
            "decode_moments": [self.steps, 0.0, self.steps * 2000.0, 0.0, 0.0, 0.0] if self.steps else None,
        }

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.refusal is not None:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        rank = body.get("data_parallel_rank", 0)
        if not 0 <= rank < len(self.caches):
            return web.json_response(
                {"error": {"message": f"routed_dp_rank={rank} out of range"}}, status=400
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self.running[rank] += 1
        try:
            async for data in self._stream(body, rank):
                await response.write(b"data: " + data + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self.aborted += 1
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running[rank] -= 1
        return response

    async def _stream(self, body: dict[str, Any], rank: int) -> AsyncIterator[bytes]:
        if self.events_instead is not None:
            for one in self.events_instead:
                yield one
            return
        prompt, parameters, salt = body["input_ids"], body["sampling_params"], body.get("cache_salt")
        cached = self.caches[rank].cached(prompt[:-1], salt)
        answer: list[int] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            self.steps += 1
            token = next_token([*prompt, *answer])
            if not parameters["ignore_eos"] and token % 60 == 0:
                token, finish = EOS, {"type": "stop", "matched": EOS}
            answer.append(token)
            if finish is None and len(answer) == parameters["max_new_tokens"]:
                finish = {"type": "length", "length": len(answer)}
            if finish is not None:
                self.caches[rank].insert([*prompt, *answer[:-1]], salt)
                await self.publish(rank)
            yield json.dumps(self._event(body, prompt, answer, cached, finish)).encode()
            if self.cut_after is not None and len(answer) >= self.cut_after:
                raise ConnectionError
            await self.hold.wait()
            await asyncio.sleep(0)

    def _event(
        self,
        body: dict[str, Any],
        prompt: list[int],
        answer: list[int],
        cached: int,
        finish: dict[str, Any] | None,
    ) -> dict[str, Any]:
        about: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(answer),
            "cached_tokens": cached,
            "dp_rank": body.get("data_parallel_rank"),
        }
        first = len(answer) - 1 if self.incremental else 0
        if body.get("return_logprob"):
            about["output_token_logprobs"] = [[-0.5, token, None] for token in answer[first:]]
            count = body["top_logprobs_num"]
            about["output_top_logprobs"] = [
                [[-0.5 - at, (token + at) % 200, None] for at in range(count)] or None
                for token in answer[first:]
            ]
        if finish is not None and body.get("return_routed_experts"):
            table = routed([*prompt, *answer[:-1]])
            about["routed_experts"] = base64.b64encode(table.tobytes()).decode()
        return {"text": "unused", "output_ids": answer[first:], "meta_info": about}


@asynccontextmanager
async def fake_sglang(
    *, ranks: int = 2, incremental: bool = True, kv: bool = True
) -> AsyncIterator[FakeSglang]:
    """Serve while the context lasts. kv: publish KV events."""
    context = zmq.asyncio.Context()
    publishers = _adjacent(context, ranks) if kv else []
    server = FakeSglang(ranks, publishers, incremental=incremental)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    serving = [asyncio.create_task(one.serve(), name="replays of the fake SGLang") for one in publishers]
    try:
        async with served_web(app) as server.url:
            yield server
            server.hold.set()
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        context.destroy(linger=0)


def _adjacent(context: "zmq.asyncio.Context", ranks: int) -> list[Publisher]:
    """Publishers whose ports, and those of whose replays, follow each other."""
    for _ in range(50):
        events, replays = free_port(), free_port()
        found: list[Publisher] = []
        with contextlib.suppress(zmq.ZMQError):
            for rank in range(ranks):
                ports = (events + rank, replays + rank)
                found.append(Publisher(context, replay=True, buffer_steps=10_000, ports=ports))
            return found
    raise RuntimeError("no free ports follow each other")
