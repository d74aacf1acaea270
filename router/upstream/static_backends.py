"""Static backends: OpenAI-compatible servers given by URL, without message bus or agents. `GET /v1/models`
lists their models.

Liveness: a refused connection removes a server at once. Any other failed probe (no answer in time, another
status, no list of models) is a miss. MISSES misses in a row remove the server, unless it shows a sign of life
in between: a served token or answer. API servers answer slowest under load, exactly when they must not be
removed.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import xxhash

from fleet.completions import ApiError
from fleet.facts.engines import Capabilities, EngineJoined, ServedModel
from fleet.timing import EngineSpeed
from router.config import BackendConfig, RouterConfig, base_url
from router.fleet_state.dispatch_cost import locality
from router.fleet_state.engine_state import EngineState
from router.fleet_state.view import FleetView
from router.upstream.rank_client import Upstream

log = logging.getLogger(__name__)

MISSES = 3
"""Failed probes in a row that remove a server."""
_LIST_BYTES = 1024 * 1024
_UNKNOWN_CONTEXT = 2**31 - 1
_NO_EXPERTS = locality((0,), None, None, None, None)
_SEQUENCE_SHARE = 0.01
"""Share of a step that each further stream adds, if no setting states it."""

Card = dict[str, Any]
"""A model's entry in a server's `GET /v1/models`, unchanged."""


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """base model of an adapter"""


class _Models(msgspec.Struct, frozen=True):
    data: tuple[Card, ...]


@dataclass(slots=True)
class _Server:
    """One server and the results of its probes."""

    settings: BackendConfig
    url: str
    worker_id: int
    """stable, so that a returning server keeps its identity"""
    cards: tuple[Card, ...] = ()
    """latest list of its models"""
    misses: int = 0
    """failed probes since the last sign of life"""
    missing: bool = False
    """removed because of misses; a sign of life restores it"""
    reported: bool | None = None
    """last liveness written to the log; None: none yet"""


class StaticBackends:
    """Static backends as engines. Each server becomes an engine of one rank that serves all of its models,
    which share its load, its limits and its circuit breaker. A server that stops answering is left out until
    it answers again.
    """

    def __init__(
        self,
        config: RouterConfig,
        key: Callable[[str], str | None],
        view: FleetView,
        clock: Callable[[], float],
        forget: Callable[[int], None],
    ) -> None:
        """key: returns the current bearer token for the server of a base URL; None: none."""
        urls = dict.fromkeys(base_url(url) for url in config.backends)
        settings = [*(BackendConfig(name=_name(url), url=url) for url in urls), *config.named_backends]
        self._servers = {server.worker_id: server for server in map(_server, settings)}
        self._block_size = config.backend_block_tokens
        self._key = key
        self._view = view
        self._clock = clock
        self._forget = forget

    def probes(self, worker_id: int) -> bool:
        """Return True if an engine is a static backend, whose liveness depends on probes."""
        return worker_id in self._servers

    def is_silent(self, worker_id: int) -> bool:
        """Return True if a server was removed because its probes went unanswered, rather than refused."""
        server = self._servers.get(worker_id)
        return server is not None and server.missing

    def known(self) -> Iterator[tuple[str, str, int, EngineState | None]]:
        """Yield name, URL, worker_id and state of each server, in the order of the settings; no state before
        its first answer.
        """
        for worker_id, server in self._servers.items():
            yield server.settings.name, server.url, worker_id, self._view.engine(worker_id)

    def card(self, model: str) -> Card | None:
        """Return a model's latest entry at the first live server that serves it, or None."""
        for worker_id, server in self._servers.items():
            state = self._view.engine(worker_id)
            if state is not None and state.obstacle is None:
                for card in server.cards:
                    if card["id"] == model:
                        return card
        return None

    def served(self, worker_id: int) -> None:
        """Record a token or an answer of a server. This outweighs missed probes, but not a refused
        connection: a server that is shutting down finishes its open streams while it refuses new ones.
        """
        server = self._servers.get(worker_id)
        if server is not None and (server.misses or server.missing):
            server.misses = 0
            if server.missing:
                server.missing = False
                self._view.sign_of_life(worker_id, self._clock())

    async def run(self, upstream: Upstream, probe_seconds: float, timeout_seconds: float) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers.values():
                tasks.create_task(
                    self._watch(upstream, server, probe_seconds, timeout_seconds), name=f"probes {server.url}"
                )

    async def _watch(
        self, upstream: Upstream, server: _Server, probe_seconds: float, timeout_seconds: float
    ) -> None:
        while True:
            try:
                key = self._key(server.url)
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                body = await upstream.get(
                    server.url, "/v1/models", headers, seconds=timeout_seconds, max_bytes=_LIST_BYTES
                )
                cards = msgspec.json.decode(body, type=_Models).data
                models = msgspec.convert(cards, tuple[_Model, ...])
            except (OSError, TimeoutError, ValueError, RecursionError, ApiError) as error:
                self._missed(server, error, timeout_seconds)
            else:
                self._answered(server, cards, models)
            await asyncio.sleep(probe_seconds)

    def _answered(self, server: _Server, cards: tuple[Card, ...], models: tuple[_Model, ...]) -> None:
        if not server.reported:
            log.info(
                "backend %s serves %s", server.url, ", ".join(model.id for model in models) or "no model"
            )
        server.misses, server.missing, server.reported, server.cards = 0, False, True, cards
        known = self._view.engine(server.worker_id)
        if not models:
            if known is not None:
                self._forget(server.worker_id)
            return
        joined = _as_engine(server, models, self._block_size)
        if known is None or known.joined != joined:
            self._view.join(joined, self._clock(), probed=True)
            self._view.price(server.worker_id, None, _NO_EXPERTS)
        self._view.sign_of_life(server.worker_id, self._clock())

    def _missed(self, server: _Server, error: Exception, timeout_seconds: float) -> None:
        reason = str(error) or f"no answer within {timeout_seconds:g} s"
        refused = _is_refusal(error)
        server.misses += 1
        if not refused and server.misses < MISSES and server.reported:
            log.info("backend %s: probe %d of %d failed: %s", server.url, server.misses, MISSES, reason)
            return
        if server.reported is not False:
            log.warning("backend %s does not answer: %s", server.url, reason)
        server.reported, server.missing = False, not refused
        self._view.unreachable(server.worker_id)


def _is_refusal(error: Exception) -> bool:
    """Return True if no process listens there: the connection was refused at every address of the host
    name."""
    return isinstance(error, ConnectionRefusedError) or (
        isinstance(error, OSError) and f"[Errno {errno.ECONNREFUSED}]" in str(error)
    )


def _name(url: str) -> str:
    """Return the name of a server without a [backends.NAME]: host, port and path, without slashes."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.hostname or ''}{port}{parts.path.replace('/', '~')}"


def _server(settings: BackendConfig) -> _Server:
    url = base_url(settings.url)
    return _Server(settings, url, xxhash.xxh3_64_intdigest(url.encode()))


def _as_engine(server: _Server, models: tuple[_Model, ...], block_size: int) -> EngineJoined:
    """Describe a server as an engine without reports. Its base model is the first that is not an adapter."""
    contexts = {model.id: model.max_model_len or _UNKNOWN_CONTEXT for model in models}
    base = next((model.id for model in models if model.parent is None), models[0].id)
    return EngineJoined(
        engine_kind="openai",
        engine=server.settings.name,
        worker_id=server.worker_id,
        model=base,
        models=(
            tuple(ServedModel(name=name, max_context=context) for name, context in contexts.items())
            if len(contexts) > 1
            else ()
        ),
        node=urlsplit(server.url).hostname or server.url,
        urls=(server.url,),
        block_size=block_size,
        kv_blocks=0,
        max_context=contexts[base],
        max_batch_tokens=_UNKNOWN_CONTEXT,
        max_requests=server.settings.max_requests,
        speed=_stated_speed(server.settings),
        capabilities=Capabilities(
            kv_events=False,
            load=False,
            experts=False,
            token_ids=False,
            returns_ids=_returns_ids(server),
            isolates_tenants=server.settings.isolates_tenants,
        ),
    )


def _returns_ids(server: _Server) -> bool:
    """Return True if a server can return token ids (`return_token_ids`) and accepts ids as a prompt: as its
    settings state, else if its list of models identifies it as vLLM.
    """
    if server.settings.token_ids is not None:
        return server.settings.token_ids
    return any(card.get("owned_by") == "vllm" for card in server.cards)


def _stated_speed(settings: BackendConfig) -> EngineSpeed | None:
    """Return the speed stated in the settings; None if it is to be estimated."""
    if settings.prompt_tokens_per_second is None or settings.output_tokens_per_second is None:
        return None
    alone = 1.0 / settings.output_tokens_per_second
    sequence = _SEQUENCE_SHARE * alone if settings.sequence_ms is None else settings.sequence_ms / 1000.0
    step = max(alone - sequence, 0.0)
    return EngineSpeed(
        prefill_token=1.0 / settings.prompt_tokens_per_second,
        step=step,
        decode_sequence=sequence,
        decode_block=0.0,
    )
