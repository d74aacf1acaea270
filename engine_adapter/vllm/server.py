"""HTTP client of a vLLM server: what it is, its load, and short requests of the agent's own."""

import secrets
from typing import Any, TypeVar

import aiohttp
import msgspec

from engine_adapter.engine import EngineFailed
from engine_adapter.vllm.metrics_text import MetricsReading

MAX_BYTES = 16 * 1024 * 1024
"""Longest answer that is read."""
NUDGE = "roost-nudge-"
"""Beginning of the request ids of the agent's own requests."""
RANK_HEADER = "X-data-parallel-rank"
Answer = TypeVar("Answer")


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of /v1/models."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    parent: str | None = None
    """Base model of a LoRA adapter."""


class _Models(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


class KvSource(msgspec.Struct, frozen=True):
    """Publisher of one rank's KV events, as /kv_event_sources names it."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str = "zmq"
    enable_kv_cache_events: bool = True
    may_connect: bool = False
    """The endpoint names one address: vLLM's publisher binds only "*" and connects to any other, unless it
    chose the port itself. Not part of the answer."""


class VllmServer:
    """One base URL. Every question is asked on a new connection: an open one could hide a dead server.
    EngineFailed when the server does not answer, refuses the key, or answers what vLLM does not."""

    def __init__(self, base: str, api_key: str | None, seconds: float) -> None:
        """seconds: time limit of one request."""
        self.base = base
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=seconds)

    async def models(self) -> tuple[ModelCard, ...]:
        return self._decoded("/v1/models", await self._get("/v1/models"), _Models).data

    async def version(self) -> str:
        """Return vLLM's version. "": the server does not say."""
        answer = await self._get("/version", missing=b"{}")
        return str(self._decoded("/version", answer, dict[str, Any]).get("version", ""))

    async def kv_sources(self) -> dict[int, KvSource]:
        """Return the publishers of KV events by rank. Versions that do not say have none."""
        answer = await self._get("/kv_event_sources", missing=b"{}")
        found = self._decoded("/kv_event_sources", answer, dict[int, KvSource])
        return {
            rank: one for rank, one in found.items() if one.enable_kv_cache_events and one.publisher == "zmq"
        }

    async def metrics(self) -> MetricsReading:
        body = await self._get("/metrics")
        try:
            return MetricsReading(body.decode())
        except ValueError as error:
            raise EngineFailed(f"{self.base}/metrics is not vLLM's: {error}") from error

    async def nudge(self, model: str, rank: int | None, tokens: int) -> None:
        """Generate this number of tokens. The request is salted, so that it touches no block of a client, and
        marked in its id. rank: None for a server of one rank."""
        body = {
            "model": model,
            "prompt": "roost",
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": secrets.token_hex(16),
        }
        headers = {**self._headers, "X-Request-Id": f"{NUDGE}{secrets.token_hex(8)}"}
        if rank is not None:
            headers[RANK_HEADER] = str(rank)
        url = f"{self.base}/v1/completions"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.post(url, json=body, headers=headers, allow_redirects=False) as answer,
            ):
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{url} does not answer: {error or 'timed out'}") from error
        if answer.status != 200:
            raise EngineFailed(f"{url} answers HTTP {answer.status} to a request of the agent's own")

    def _decoded(self, path: str, body: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(body, type=kind, strict=False)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{self.base}{path} is not vLLM's: {error}") from error

    async def _get(self, path: str, *, missing: bytes | None = None) -> bytes:
        """Return the body of an answer. missing: the value for HTTP 404."""
        url = f"{self.base}{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.get(url, headers=self._headers, allow_redirects=False) as answer,
            ):
                body = await self._limited(answer, url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{url} does not answer: {error or 'timed out'}") from error
        if answer.status == 404 and missing is not None:
            return missing
        if answer.status in (401, 403):
            raise EngineFailed(
                f"{url} refuses the key (HTTP {answer.status}); give the right one with --api-key-file"
            )
        if answer.status != 200:
            raise EngineFailed(f"{url} answers HTTP {answer.status}; is this a vLLM server?")
        return body

    async def _limited(self, answer: aiohttp.ClientResponse, url: str) -> bytes:
        body = b""
        async for piece in answer.content.iter_chunked(65536):
            body += piece
            if len(body) > MAX_BYTES:
                raise EngineFailed(f"{url} is not vLLM's: it is longer than {MAX_BYTES} bytes")
        return body
