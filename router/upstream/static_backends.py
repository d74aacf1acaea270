"""Static backends: OpenAI-compatible servers given by URL, without bus or agents. `GET /v1/models` tells what they serve.

Liveness: a refused connection takes a server away at once. Any other probe that fails (no answer in time, another status, no list of
models) is a miss, and MISSES in a row without a sign of life between them take it away. A served token or answer is a sign of life: API
servers answer slowest under load, which is when they must not be lost.
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
from fleet.events import Capabilities, EngineJoined, ServedModel
from fleet.timing import EngineSpeed
from router.config import BackendConfig, RouterConfig, base_url
from router.fleet_state.dispatch_cost import locality
from router.fleet_state.engine_state import EngineState
from router.fleet_state.view import FleetView
from router.upstream.rank_client import Upstream

log = logging.getLogger(__name__)

MISSES = 3
"""Failed probes in a row that take a server away."""
_LIST_BYTES = 1024 * 1024
_NOTHING = Capabilities(kv_events=False, load=False, experts=False, token_ids=False)
_ISOLATING = Capabilities(kv_events=False, load=False, experts=False, token_ids=False, isolates_tenants=True)
_UNKNOWN_CONTEXT = 2**31 - 1
_NO_EXPERTS = locality((0,), None, None, None, None)
_SEQUENCE_SHARE = 0.01
"""of a step: what each further stream adds, where nobody states it"""

Card = dict[str, Any]
"""A model's entry in a server's `GET /v1/models`, as it came."""


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """the base model of an adapter"""


class _Models(msgspec.Struct, frozen=True):
    data: tuple[Card, ...]


@dataclass(slots=True)
class _Server:
    """One server and what its probes found."""

    settings: BackendConfig
    url: str
    worker_id: int
    """the same each time, so that a server comes back as itself"""
    cards: tuple[Card, ...] = ()
    """of its models, as it listed them last"""
    misses: int = 0
    """failed probes since the last sign of life"""
    missing: bool = False
    """taken away for its misses: a sign of life brings it back"""
    reported: bool | None = None
    """whether the log last called it there; None: nothing was logged yet"""


class StaticBackends:
    """Each server becomes an engine of one rank that serves all of its models: they share its load, its limits and its breaker. A server
    that stops answering is left out until it answers again."""

    def __init__(
        self, config: RouterConfig, key: Callable[[str], str | None], view: FleetView, clock: Callable[[], float], forget: Callable[[int], None]
    ) -> None:
        """key: what the server of a base URL wants as `Authorization: Bearer` now; None: nothing."""
        urls = dict.fromkeys(base_url(url) for url in config.backends)
        settings = [*(BackendConfig(name=_name(url), url=url) for url in urls), *config.named_backends]
        self._servers = {server.worker_id: server for server in map(_server, settings)}
        self._block_size = config.backend_block_tokens
        self._key = key
        self._view = view
        self._clock = clock
        self._forget = forget

    def probes(self, worker_id: int) -> bool:
        """Whether an engine is one of these, whose liveness their probes decide."""
        return worker_id in self._servers

    def returns_ids(self, worker_id: int) -> bool:
        """Whether a server returns token ids when asked (`return_token_ids`), and takes ids as a prompt: as its settings say, else if it is a
        vLLM by its own list of models."""
        server = self._servers.get(worker_id)
        if server is None or server.settings.token_ids is not None:
            return server is not None and bool(server.settings.token_ids)
        return any(card.get("owned_by") == "vllm" for card in server.cards)

    def is_silent(self, worker_id: int) -> bool:
        """Whether a server is taken away because its probes went unanswered, rather than refused."""
        server = self._servers.get(worker_id)
        return server is not None and server.missing

    def known(self) -> Iterator[tuple[str, str, int, EngineState | None]]:
        """Name, URL, worker_id and state of each server, in the order of the settings; no state before its first answer."""
        for worker_id, server in self._servers.items():
            yield server.settings.name, server.url, worker_id, self._view.engine(worker_id)

    def card(self, model: str) -> Card | None:
        """A model's entry as the first live server that serves it listed it last; None: no server of these serves it."""
        for worker_id, server in self._servers.items():
            state = self._view.engine(worker_id)
            if state is not None and state.obstacle is None:
                for card in server.cards:
                    if card["id"] == model:
                        return card
        return None

    def served(self, worker_id: int) -> None:
        """Note a token or an answer of a server. It outweighs missed probes, but not a refused connection: a server that is stopping
        finishes its open streams while it refuses new ones."""
        server = self._servers.get(worker_id)
        if server is not None and (server.misses or server.missing):
            server.misses = 0
            if server.missing:
                server.missing = False
                self._view.heard(worker_id, self._clock())

    async def run(self, upstream: Upstream, probe_seconds: float, timeout_seconds: float) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers.values():
                tasks.create_task(self._watch(upstream, server, probe_seconds, timeout_seconds), name=f"probes {server.url}")

    async def _watch(self, upstream: Upstream, server: _Server, probe_seconds: float, timeout_seconds: float) -> None:
        while True:
            try:
                key = self._key(server.url)
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                body = await upstream.get(server.url, "/v1/models", headers, seconds=timeout_seconds, most_bytes=_LIST_BYTES)
                cards = msgspec.json.decode(body, type=_Models).data
                models = msgspec.convert(cards, tuple[_Model, ...])
            except (OSError, TimeoutError, ValueError, RecursionError, ApiError) as error:
                self._missed(server, error, timeout_seconds)
            else:
                self._answered(server, cards, models)
            await asyncio.sleep(probe_seconds)

    def _answered(self, server: _Server, cards: tuple[Card, ...], models: tuple[_Model, ...]) -> None:
        if not server.reported:
            log.info("backend %s serves %s", server.url, ", ".join(model.id for model in models) or "no model")
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
        self._view.heard(server.worker_id, self._clock())

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
    """Whether nothing listens there: a connection was refused, at every address where the name has several."""
    return isinstance(error, ConnectionRefusedError) or (isinstance(error, OSError) and f"[Errno {errno.ECONNREFUSED}]" in str(error))


def _name(url: str) -> str:
    """A server's name where no [backends.NAME] gives one: host, port and path; a name holds no slash."""
    parts = urlsplit(url)
    return f"{parts.hostname or ''}{'' if parts.port is None else f':{parts.port}'}{parts.path.replace('/', '~')}"


def _server(settings: BackendConfig) -> _Server:
    url = base_url(settings.url)
    return _Server(settings, url, xxhash.xxh3_64_intdigest(url.encode()))


def _as_engine(server: _Server, models: tuple[_Model, ...], block_size: int) -> EngineJoined:
    """A server as an engine that can report nothing. Its base model is the first that is no adapter."""
    contexts = {model.id: model.max_model_len or _UNKNOWN_CONTEXT for model in models}
    base = next((model.id for model in models if model.parent is None), models[0].id)
    return EngineJoined(
        engine=server.settings.name,
        worker_id=server.worker_id,
        model=base,
        models=tuple(ServedModel(name=name, max_context=context) for name, context in contexts.items()) if len(contexts) > 1 else (),
        node=urlsplit(server.url).hostname or server.url,
        urls=(server.url,),
        block_size=block_size,
        kv_blocks=0,
        max_context=contexts[base],
        max_batch_tokens=_UNKNOWN_CONTEXT,
        max_requests=server.settings.max_requests,
        speed=_stated_speed(server.settings),
        capabilities=_ISOLATING if server.settings.isolates_tenants else _NOTHING,
    )


def _stated_speed(settings: BackendConfig) -> EngineSpeed | None:
    """What the settings say of a server's speed; None: nothing, so that it is learnt."""
    if settings.prompt_tokens_per_second is None or settings.output_tokens_per_second is None:
        return None
    alone = 1.0 / settings.output_tokens_per_second
    sequence = _SEQUENCE_SHARE * alone if settings.sequence_ms is None else settings.sequence_ms / 1000.0
    step = max(alone - sequence, 0.0)
    return EngineSpeed(prefill_token=1.0 / settings.prompt_tokens_per_second, step=step, decode_sequence=sequence, decode_block=0.0)
