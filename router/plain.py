"""Static backends: OpenAI-compatible servers given by URL, without bus or agents. `GET /v1/models` tells what they serve.

Liveness: a refused connection takes a server away at once. Any other probe that fails (no answer in time, another status, no list of
models) is a miss, and MISSES in a row without a sign of life between them take it away. A served token or answer is a sign of life: API
servers answer slowest under load, which is when they must not be lost.
"""

import asyncio
import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import xxhash

from fleet.completions import ApiError
from fleet.events import Capabilities, EngineJoined
from router.proxy import Upstream
from router.view import View

log = logging.getLogger(__name__)

MISSES = 3
"""Failed probes in a row that take a server away."""
_LIST_BYTES = 1024 * 1024
_NOTHING = Capabilities(kv_events=False, load=False, experts=False, token_ids=False)
_UNKNOWN_CONTEXT = 2**31 - 1
_BLOCK_SIZE = 64
"""Tokens, or 256 bytes of text: what is cached there is a guess from prompts sent, and finer blocks would cost more than they tell."""


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


@dataclass(slots=True)
class _Server:
    """One server and what its probes found."""

    url: str
    served: set[int] = field(default_factory=set)
    """worker_ids of its models"""
    misses: int = 0
    """failed probes since the last sign of life"""
    missing: bool = False
    """taken away for its misses: a sign of life brings it back"""
    reported: bool | None = None
    """whether the log last called it there; None: nothing was logged yet"""


class PlainBackends:
    """Each server's models become engines of one rank, one per model. A server that stops answering is left out until it answers again."""

    def __init__(self, urls: tuple[str, ...], key: Callable[[], str | None], view: View, clock: Callable[[], float], forget: Callable[[int], None]) -> None:
        unique = dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in urls)
        self._servers = [_Server(url) for url in unique]
        self._key = key
        self._view = view
        self._clock = clock
        self._forget = forget
        self._server_of: dict[int, _Server] = {}

    def probes(self, worker_id: int) -> bool:
        """Whether an engine is one of these, whose liveness their probes decide."""
        return worker_id in self._server_of

    def served(self, worker_id: int) -> None:
        """Note a token or an answer of a server. It outweighs missed probes, but not a refused connection: a server that is stopping
        finishes its open streams while it refuses new ones."""
        server = self._server_of.get(worker_id)
        if server is not None and (server.misses or server.missing):
            server.misses = 0
            if server.missing:
                server.missing = False
                self._alive(server)

    async def run(self, upstream: Upstream, probe_seconds: float, timeout_seconds: float) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers:
                tasks.create_task(self._watch(upstream, server, probe_seconds, timeout_seconds), name=f"probes {server.url}")

    async def _watch(self, upstream: Upstream, server: _Server, probe_seconds: float, timeout_seconds: float) -> None:
        while True:
            try:
                key = self._key()
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                body = await upstream.get(server.url, "/v1/models", headers, seconds=timeout_seconds, most_bytes=_LIST_BYTES)
                models = msgspec.json.decode(body, type=_Models)
            except (OSError, TimeoutError, ValueError, RecursionError, ApiError) as error:
                self._missed(server, error, timeout_seconds)
            else:
                self._answered(server, models)
            await asyncio.sleep(probe_seconds)

    def _answered(self, server: _Server, models: _Models) -> None:
        if not server.reported:
            log.info("backend %s serves %s", server.url, ", ".join(model.id for model in models.data) or "no model")
        server.misses, server.missing, server.reported = 0, False, True
        self._present(server, models)

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
        for worker_id in server.served:
            self._view.unreachable(worker_id)

    def _present(self, server: _Server, models: _Models) -> None:
        served: set[int] = set()
        for model in models.data:
            joined = _as_engine(server.url, model)
            known = self._view.engine(joined.worker_id)
            if known is None or known.joined != joined:
                self._view.join(joined, self._clock(), probed=True)
            served.add(joined.worker_id)
            self._server_of[joined.worker_id] = server
        for gone in server.served - served:
            del self._server_of[gone]
            self._forget(gone)
        server.served = served
        self._alive(server)

    def _alive(self, server: _Server) -> None:
        for worker_id in server.served:
            self._view.heard(worker_id, self._clock())


def _is_refusal(error: Exception) -> bool:
    """Whether nothing listens there: a connection was refused, at every address where the name has several."""
    return isinstance(error, ConnectionRefusedError) or (isinstance(error, OSError) and f"[Errno {errno.ECONNREFUSED}]" in str(error))


def _as_engine(url: str, model: _Model) -> EngineJoined:
    """A server's model as an engine that can report nothing. Its worker_id is the same each time, so that it comes back as itself."""
    name = f"{urlsplit(url).netloc}#{model.id}"
    return EngineJoined(
        engine=name,
        worker_id=xxhash.xxh3_64_intdigest(f"{url}#{model.id}".encode()),
        model=model.id,
        node=urlsplit(url).hostname or url,
        urls=(url,),
        block_size=_BLOCK_SIZE,
        kv_blocks=0,
        max_context=model.max_model_len or _UNKNOWN_CONTEXT,
        max_batch_tokens=_UNKNOWN_CONTEXT,
        capabilities=_NOTHING,
    )
