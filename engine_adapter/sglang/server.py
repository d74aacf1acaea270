"""HTTP client of an SGLang server, for all but generation: its properties, its load, its recorder and its
elastic state. Paths and fields are those of SGLang 0.5.23."""

from typing import Annotated

import aiohttp
import msgspec

from engine_adapter.engine import EngineFailed
from engine_adapter.foreign.client import ServerClient

Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class KvPublisher(msgspec.Struct, frozen=True):
    """Publisher of KV events, as /server_info describes it: the port of a rank is the base plus its
    number."""

    publisher: str
    endpoint_host: str
    endpoint_port_base: Port
    topic: str = ""
    block_size: int = 0
    replay_endpoint_port_base: Port | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """Part of /server_info. Other fields are ignored, and missing ones have SGLang's defaults."""

    model_path: str
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    version: str = ""
    page_size: int | None = None
    context_length: int | None = None
    max_total_num_tokens: int = 0
    """KV tokens of one rank"""
    max_prefill_tokens: int | None = None
    chunked_prefill_size: int | None = None
    speculative_algorithm: str | None = None
    disaggregation_mode: str | None = None
    incremental_streaming_output: bool = False
    enable_return_routed_experts: bool = False
    enable_eplb: bool = False
    expert_distribution_recorder_mode: str | None = None
    elastic_ep_backend: str | None = None
    kv_events: KvPublisher | None = None


class RankReading(msgspec.Struct, frozen=True):
    """Load of one data-parallel rank, an entry of /v1/loads."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int = 0
    """prompt tokens that wait to be computed"""
    num_used_tokens: int = 0
    """KV tokens of running requests"""
    max_total_num_tokens: int = 0
    decode_moments: tuple[float, ...] | None = None
    """totals over decode steps: their number, the sum of their batch sizes, of their microseconds, and
    further moments. None: no step yet, or an older version"""


class _Loads(msgspec.Struct, frozen=True):
    loads: tuple[RankReading, ...]


class ScalingState(msgspec.Struct, frozen=True):
    """Answer of /is_scaling_elastic_ep."""

    is_scaling_elastic_ep: bool = False
    effective_ep_size: int | None = None
    pending_ep_size: int | None = None
    scale_phase: str | None = None
    last_error: str | None = None


class SglangServer(ServerClient):
    """Client of SGLang's HTTP server."""

    kind = "SGLang"

    async def info(self) -> ServerInfo:
        """Return the server's properties. Versions without /server_info have /get_server_info."""
        path = "/server_info"
        body = await self._get(path, missing=b"")
        if not body:
            path = "/get_server_info"
            body = await self._get(path)
        return self._decoded(path, body, ServerInfo)

    async def loads(self) -> tuple[RankReading, ...]:
        """Return the load of each rank, ascending by number."""
        body = await self._get("/v1/loads?include=core")
        return tuple(sorted(self._decoded("/v1/loads", body, _Loads).loads, key=lambda one: one.dp_rank))

    async def scaling(self) -> ScalingState:
        """Return the state of elastic expert parallelism. A server without it is not scaling."""
        body = await self._get("/is_scaling_elastic_ep", missing=b"{}")
        return self._decoded("/is_scaling_elastic_ep", body, ScalingState)

    async def start_recorder(self) -> None:
        """Start the expert distribution recorder. It forgets what it has recorded."""
        await self._post("/start_expert_distribution_record")

    async def dump_recorder(self) -> None:
        """Have the recorder write its counts to a file on the server's disk, and begin anew."""
        await self._post("/dump_expert_distribution_record")

    async def _post(self, path: str) -> None:
        url = f"{self.base}{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.post(url, headers=self._headers, allow_redirects=False) as answer,
            ):
                await self._limited(answer, url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{url} does not answer: {error or 'timed out'}") from error
        if answer.status != 200:
            raise EngineFailed(f"{url} answers HTTP {answer.status}")
