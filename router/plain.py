"""Plain OpenAI-compatible servers given by URL: no bus, no agents. What they serve, and whether they are there, is asked of them."""

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
import xxhash

from fleet.completions import ApiError
from fleet.events import Capabilities, EngineJoined
from router.muster import Standing
from router.proxy import Upstream
from router.view import View

log = logging.getLogger(__name__)

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


class PlainBackends:
    """Each server's models become engines of one rank, one per model. A server that stops answering is left out until it answers again."""

    def __init__(self, urls: tuple[str, ...], key: str | None, view: View, clock: Callable[[], float], forget: Callable[[int], None]) -> None:
        self._urls = tuple(dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in urls))
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._view = view
        self._clock = clock
        self._forget = forget
        self._served: dict[str, set[int]] = {url: set() for url in self._urls}

    def probes(self, worker_id: int) -> bool:
        """Whether an engine is one of these, which are asked whether they are there."""
        return any(worker_id in served for served in self._served.values())

    async def run(self, upstream: Upstream, probe_seconds: float) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for url in self._urls:
                tasks.create_task(self._watch(upstream, url, probe_seconds), name=f"probes {url}")

    async def _watch(self, upstream: Upstream, url: str, probe_seconds: float) -> None:
        there: bool | None = None
        while True:
            try:
                models = await self._ask(upstream, url, probe_seconds)
            except (OSError, TimeoutError, ValueError, RecursionError, ApiError) as error:
                if there is not False:
                    log.warning("backend %s does not answer: %s", url, error)
                there = False
                self._missing(url)
            else:
                if not there:
                    log.info("backend %s serves %s", url, ", ".join(model.id for model in models.data) or "no model")
                there = True
                self._present(url, models)
            await asyncio.sleep(probe_seconds)

    async def _ask(self, upstream: Upstream, url: str, probe_seconds: float) -> _Models:
        body = await upstream.get(url, "/v1/models", self._headers, seconds=max(1.0, probe_seconds), most_bytes=_LIST_BYTES)
        return msgspec.json.decode(body, type=_Models)

    def _present(self, url: str, models: _Models) -> None:
        served: set[int] = set()
        for model in models.data:
            joined = _as_engine(url, model)
            known = self._view.engine(joined.worker_id)
            if known is None or known.joined != joined:
                self._view.join(joined, self._clock())
            self._view.heard(joined.worker_id, self._clock())
            served.add(joined.worker_id)
        for gone in self._served[url] - served:
            self._forget(gone)
        self._served[url] = served

    def _missing(self, url: str) -> None:
        for worker_id in self._served[url]:
            state = self._view.engine(worker_id)
            if state is not None and state.standing is Standing.LIVE:
                self._view.unreachable(worker_id)


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
