"""The plain door: any OpenAI-compatible server, by URL, as an engine of one rank.

Such a server reports no KV events, no load, no experts and no token ids; that is declared in its capabilities, and the
router does without. Answers may name the experts that were chosen: whoever knows the model states its shape, so that they can
be read. All that is asked of the server is `GET /v1/models`: what it serves, and whether it is there.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Never

import aiohttp
import msgspec

from engine_adapter.engine import EngineDescription, EngineFailed, RankFacts, RankLoad
from fleet.blocks import BLOCK_SIZE
from fleet.events import Capabilities
from fleet.experts import ModelShape
from fleet.placement import Placement
from fleet.redaction import without_secrets

MOST_BYTES = 1024 * 1024
"""of a list of models; a longer answer is no list of models"""
IDLE = RankLoad(running=0, waiting=0, prefill_tokens=0, decode_blocks=0, used_blocks=0)
"""stands where nothing is known; never published, since the load capability is off"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendAgentConfig:
    """Where the server is and how patiently it is watched. ValueError names the setting that is out of range."""

    url: str
    """with or without /v1 at the end"""
    model: str | None = None
    """which of the served models; None: the first one listed"""
    api_key: str | None = field(default=None, repr=False)
    probe_seconds: float = 2.0
    answer_seconds: float = 2.0
    misses: int = 3
    """probes in a row without an answer that mean the server is gone"""
    max_context: int = 131_072
    """tokens, where the server does not say (vLLM does: max_model_len); the server itself refuses what is too long"""
    layers: int | None = None
    """MoE layers of the model; with experts and top_k, the experts that answers name (`routed_experts`) are learnt from"""
    experts: int | None = None
    """routed experts of one layer"""
    top_k: int | None = None
    """routed experts of one token"""
    isolates_tenants: bool = False
    """it takes `cache_salt` and reuses KV only among requests of the same one, as vLLM does"""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"plain engine: the URL {without_secrets(self.url)!r} must start with http:// or https://")
        if without_secrets(self.url) != self.url:  # it is part of the join, which everybody on the bus reads
            raise ValueError(f"plain engine: the URL {without_secrets(self.url)!r} names a user; put the server's key into a file (--api-key-file)")
        for name in ("probe_seconds", "answer_seconds", "misses", "max_context"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"plain engine: {name} must be above 0, not {getattr(self, name)}")
        told = [name for name in ("layers", "experts", "top_k") if getattr(self, name) is not None]
        if len(told) in (1, 2):
            raise ValueError(f"plain engine: {' and '.join(told)} say nothing alone; give layers, experts and top_k, all three")
        _ = self.shape

    @property
    def shape(self) -> ModelShape | None:
        """The model's experts, when they were told; ValueError when they cannot be so.

        Sizes of weights are not asked for: nothing of such a server is moved or priced by them.
        """
        if self.layers is None or self.experts is None or self.top_k is None:
            return None
        return ModelShape(layers=self.layers, experts=self.experts, top_k=self.top_k, hidden=1, expert_intermediate=1)

    @property
    def base(self) -> str:
        """The URL that /v1/... is appended to."""
        return self.url.rstrip("/").removesuffix("/v1")


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class BackendAgent:
    """One server. `start` looks once; `run` watches it until it stays away."""

    def __init__(self, config: BackendAgentConfig) -> None:
        self._config = config
        self._description: EngineDescription | None = None

    @property
    def description(self) -> EngineDescription:
        if self._description is None:
            raise RuntimeError("the engine has not been started")
        return self._description

    @property
    def placement(self) -> Placement | None:
        return None

    @property
    def handover_seconds(self) -> float:
        return 0.0

    @property
    def experts(self) -> None:
        return None

    async def start(self) -> None:
        """Learn what the server serves. EngineFailed when it does not answer, refuses the key, or lacks the model."""
        model = self._chosen(await self._models())
        self._description = EngineDescription(
            model=model.id,
            rank=0,
            ranks=1,
            block_size=BLOCK_SIZE,
            kv_blocks=0,
            max_context=model.max_model_len or self._config.max_context,
            max_batch_tokens=0,
            capabilities=Capabilities(kv_events=False, load=False, experts=False, token_ids=False, isolates_tenants=self._config.isolates_tenants),
            shape=self._config.shape,
        )

    async def wait_facts(self) -> Never:
        """There is never anything new to take."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def take_facts(self) -> RankFacts:
        return RankFacts(kv=(), load=IDLE, activations=None)

    async def run(self) -> None:
        """Watch the server; EngineFailed when it leaves several probes in a row unanswered."""
        misses = 0
        while True:
            await asyncio.sleep(self._config.probe_seconds)
            try:
                self._chosen(await self._models(), self.description.model)
                misses = 0
            except EngineFailed as error:
                misses += 1
                log.warning("probe %d of %d failed: %s", misses, self._config.misses, error)
                if misses >= self._config.misses:
                    raise

    def _chosen(self, models: tuple[_Model, ...], wanted: str | None = None) -> _Model:
        wanted = wanted or self._config.model
        if not models:
            raise EngineFailed(f"{self._config.base}/v1/models lists no model")
        for model in models:
            if wanted in (None, model.id):
                return model
        raise EngineFailed(f"{self._config.base} does not serve {wanted!r}, but {', '.join(repr(model.id) for model in models)}; name one with --model")

    async def _models(self) -> tuple[_Model, ...]:
        """Ask once, on a connection of its own: a probe must not be fooled by one that is kept open."""
        url = f"{self._config.base}/v1/models"
        headers = {"Authorization": f"Bearer {self._config.api_key}"} if self._config.api_key else {}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._config.answer_seconds)) as session,
                session.get(url, headers=headers, allow_redirects=False) as answer,
            ):
                body = b""
                async for piece in answer.content.iter_chunked(65536):
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise EngineFailed(f"{url} is no list of models: it is longer than {MOST_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{url} does not answer: {error or 'timed out'}") from error
        if answer.status in (401, 403):
            raise EngineFailed(f"{url} refuses the key (HTTP {answer.status}); give the right one with --api-key-file")
        if answer.status != 200:
            raise EngineFailed(f"{url} answers HTTP {answer.status}; is this an OpenAI-compatible server?")
        try:
            return msgspec.json.decode(body, type=_Models).data
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{url} is no list of models: {error}") from error
