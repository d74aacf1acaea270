"""Static backend: an OpenAI-compatible server, given by URL, as an engine of one rank.

Such a server reports no KV events, no load, no experts and no token IDs. Its capabilities declare that, and
the router does without them. Responses may name the experts that were chosen. To use them, state the model's
shape in the settings. The only request made to the server is `GET /v1/models`, to find the served models and
to probe liveness.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Never

import aiohttp
import msgspec

from engine_adapter.config import checked_url
from engine_adapter.engine import EngineDescription, EngineFailed, RankFacts, RankLoad
from fleet.blocks import BLOCK_SIZE
from fleet.experts import ModelShape
from fleet.facts.engines import Capabilities
from fleet.placement import Placement
from fleet.settings import Positive, PositiveInt, check_bounds

MAX_BYTES = 1024 * 1024
"""Size limit of a list of models. A longer response is not a list of models."""
IDLE = RankLoad(running=0, waiting=0, prefill_tokens=0, decode_blocks=0, used_blocks=0)
"""Placeholder for the unknown load. It is never published because the load capability is off."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendAgentConfig:
    """Address and probe settings of the server. ValueError names the setting that is out of range."""

    url: str
    """Base URL, with or without /v1 at the end."""
    model: str | None = None
    """One of the served models. None: the first one listed."""
    api_key: str | None = field(default=None, repr=False)
    probe_seconds: Positive = 2.0
    answer_seconds: Positive = 2.0
    misses: PositiveInt = 3
    """Consecutive failed probes after which the server counts as gone."""
    max_context: PositiveInt = 131_072
    """Context length in tokens for servers that do not report one (vLLM does: max_model_len). The server
    itself rejects longer requests."""
    layers: int | None = None
    """MoE layers of the model. Together with experts and top_k, it enables learning from the experts that
    responses name (`routed_experts`)."""
    experts: int | None = None
    """Routed experts per layer."""
    top_k: int | None = None
    """Routed experts per token."""
    isolates_tenants: bool = False
    """The server supports `cache_salt` and reuses KV only among requests with the same salt, as vLLM does."""

    def __post_init__(self) -> None:
        check_bounds(self)
        checked_url(self.url, "static backend")
        given = [name for name in ("layers", "experts", "top_k") if getattr(self, name) is not None]
        if len(given) in (1, 2):
            raise ValueError(
                "static backend: layers, experts and top_k must be set together, not only"
                f" {' and '.join(given)}"
            )
        _ = self.shape

    @property
    def shape(self) -> ModelShape | None:
        """Shape of the model's experts, or None when the settings do not state it. ValueError when the values
        are invalid.

        The sizes of the weights are placeholders: the weights of such a server are neither moved nor priced.
        """
        if self.layers is None or self.experts is None or self.top_k is None:
            return None
        return ModelShape(
            layers=self.layers, experts=self.experts, top_k=self.top_k, hidden=1, expert_intermediate=1
        )

    @property
    def base(self) -> str:
        """URL prefix of the /v1/... paths."""
        return self.url.rstrip("/").removesuffix("/v1")


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class BackendAgent:
    """Agent of one server. `start` probes once; `run` probes until the server is gone."""

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
        """Query the served models. EngineFailed when the server does not respond, rejects the key, or lacks
        the model."""
        model = self._chosen(await self._models())
        self._description = EngineDescription(
            kind="openai",
            model=model.id,
            rank=0,
            ranks=1,
            block_size=BLOCK_SIZE,
            kv_blocks=0,
            max_context=model.max_model_len or self._config.max_context,
            max_batch_tokens=0,
            capabilities=Capabilities(
                kv_events=False,
                load=False,
                experts=False,
                token_ids=False,
                isolates_tenants=self._config.isolates_tenants,
            ),
            shape=self._config.shape,
        )

    async def wait_facts(self) -> Never:
        """Wait forever: this engine has no facts."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def take_facts(self) -> RankFacts:
        return RankFacts(kv=(), load=IDLE, activations=None)

    async def run(self) -> None:
        """Probe the server. EngineFailed after several consecutive failed probes."""
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

    def _chosen(self, models: tuple[_Model, ...], name: str | None = None) -> _Model:
        name = name or self._config.model
        if not models:
            raise EngineFailed(f"{self._config.base}/v1/models lists no model")
        for model in models:
            if name in (None, model.id):
                return model
        raise EngineFailed(
            f"{self._config.base} does not serve {name!r}, but"
            f" {', '.join(repr(model.id) for model in models)}; name one with --model"
        )

    async def _models(self) -> tuple[_Model, ...]:
        """Query once, on a new connection: an open keep-alive connection could hide a dead server."""
        url = f"{self._config.base}/v1/models"
        headers = {"Authorization": f"Bearer {self._config.api_key}"} if self._config.api_key else {}
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=self._config.answer_seconds)
                ) as session,
                session.get(url, headers=headers, allow_redirects=False) as answer,
            ):
                body = b""
                async for piece in answer.content.iter_chunked(65536):
                    body += piece
                    if len(body) > MAX_BYTES:
                        raise EngineFailed(f"{url} is no list of models: it is longer than {MAX_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(f"{url} does not answer: {error or 'timed out'}") from error
        if answer.status in (401, 403):
            raise EngineFailed(
                f"{url} refuses the key (HTTP {answer.status}); give the right one with --api-key-file"
            )
        if answer.status != 200:
            raise EngineFailed(f"{url} answers HTTP {answer.status}; is this an OpenAI-compatible server?")
        try:
            return msgspec.json.decode(body, type=_Models).data
        except msgspec.DecodeError as error:
            raise EngineFailed(f"{url} is no list of models: {error}") from error
