"""HTTP client of a vLLM server: what it is, its load, and short requests of the agent's own."""

import secrets
from typing import Any

import aiohttp

from engine_adapter.engine import EngineFailed
from engine_adapter.foreign.client import ServerClient
from engine_adapter.foreign.kv_source import KvSource
from engine_adapter.vllm.metrics_text import MetricsReading

NUDGE = "roost-nudge-"
"""Beginning of the request ids of the agent's own requests."""
RANK_HEADER = "X-data-parallel-rank"


class VllmServer(ServerClient):
    """Client of vLLM's HTTP server."""

    kind = "vLLM"

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
