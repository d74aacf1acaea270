"""Dynamo's runtime: discovery, requests to workers, the router's own endpoint. The only module that imports
Dynamo.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from dynamo._core import (
    DistributedRuntime,
    InvalidArgument,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    WorkerUnavailable,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import HttpError

from fleet.completions import ApiError
from router.dynamo.ports import Handler
from router.dynamo.wire.discovery import DynamoCard, EndpointName
from router.dynamo.wire.requests import Json
from router.dynamo.workers import RoutedWorker
from router.health.attempt_failures import AttemptFailure
from router.upstream.rank_client import UpstreamFailed

log = logging.getLogger(__name__)

_CLIENT_SECONDS = 2.0
"""Time for a new client to learn of a worker that discovery has listed."""
_LOOK_SECONDS = 0.01
_NO_CONNECTION = ("tcp connection", "cannot connect", "connection refused", "instance not found", "not found")
_INVALID = ("invalid argument", "invalidargument")


class RuntimePlanes(NamedTuple):
    """Transports, by the names of Dynamo's variables DYN_DISCOVERY_BACKEND, DYN_REQUEST_PLANE and
    DYN_EVENT_PLANE. The runtime reads their addresses from further variables.
    """

    discovery: str
    requests: str
    events: str


class DynamoRuntime:
    """One member of a Dynamo deployment. State: clients and indexes by endpoint."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._clients: dict[str, Any] = {}
        self._indexes: dict[str, Any] = {}
        self._own: Any = None

    @classmethod
    async def open(cls, planes: RuntimePlanes) -> "DynamoRuntime":
        """Connect. OSError when discovery or an event server cannot be reached, or a plane does not exist."""
        loop = asyncio.get_running_loop()
        try:
            # it blocks while it connects: to etcd for up to two minutes
            runtime = await asyncio.to_thread(
                DistributedRuntime, loop, planes.discovery, planes.requests, event_plane=planes.events
            )
        except Exception as error:  # the runtime raises nothing more specific
            raise OSError(f"no connection to Dynamo ({planes}): {error}") from error
        return cls(runtime)

    async def call(self, worker: RoutedWorker, body: Json, context: Any) -> AsyncIterator[Any]:
        """See `router.dynamo.ports.WorkerCalls`."""
        client = self._clients.get(worker.endpoint.path) or await self._client(worker)
        try:
            items = await client.direct(body, worker.instance_id, annotated=False, context=context)
        except Exception as error:
            raise _failure(error, begun=False) from error
        return _WorkerItems(items)

    def refusal(self, error: ApiError) -> Exception:
        """See `router.dynamo.ports.WorkerCalls`.

        After WorkerUnavailable a frontend sends this router nothing for a while, which is right only while it
        starts or stops.
        """
        if error.code == "not_ready":
            return WorkerUnavailable(error.message)
        found: Exception = InvalidArgument(error.message)
        return found if error.status < 429 else HttpError(error.status, error.message)

    async def _client(self, worker: RoutedWorker) -> Any:
        path = worker.endpoint.path
        client: Any = await self._runtime.endpoint(path).client()
        deadline = asyncio.get_running_loop().time() + _CLIENT_SECONDS
        while worker.instance_id not in client.instance_ids():
            if asyncio.get_running_loop().time() > deadline:
                raise UpstreamFailed(AttemptFailure.CONNECT, f"Dynamo does not know {path} of this worker")
            await asyncio.sleep(_LOOK_SECONDS)
        self._clients[path] = client
        return client

    async def prepare(self, worker: RoutedWorker) -> None:
        """Create the client and the index of a worker's endpoint ahead of their use."""
        await self._client(worker)
        await self._index(worker)

    async def _index(self, worker: RoutedWorker) -> Any:
        path = worker.endpoint.path
        if path not in self._indexes:
            endpoint = self._runtime.endpoint(path)
            self._indexes[path] = await asyncio.to_thread(
                KvRouter, endpoint, worker.card.kv_cache_block_size, KvRouterConfig()
            )
        return self._indexes[path]

    async def dump(self, worker: RoutedWorker) -> str:
        """See `router.dynamo.ports.WorkerCalls`. The first dump of an endpoint waits until Dynamo's index has
        asked the workers for their blocks.
        """
        try:
            index = await self._index(worker)
            text = await index.dump_events()
        except Exception as error:
            raise OSError(str(error)) from error
        return str(text)

    async def serve(self, name: EndpointName, handler: Handler) -> None:
        """Serve the router's own endpoint until `shutdown`."""
        self._own = self._runtime.endpoint(name.path)
        await self._own.serve_endpoint(handler, graceful_shutdown=True)

    async def offer(self, name: EndpointName, card: DynamoCard, model: str, surfaces: Sequence[str]) -> None:
        """Register a model at the router's endpoint, so that frontends of that namespace offer it.

        card: of a worker: its files, context and block size. OSError when the files are not on this machine.
        """
        kinds = [kind for kind in (_surface(surface) for surface in surfaces) if kind is not None]
        kind = kinds[0] if kinds else ModelType.Chat | ModelType.Completions
        for other in kinds[1:]:
            kind = kind | other
        limits: Any = ModelRuntimeConfig()
        limits.context_length = card.context_length or None
        limits.kv_event_publishing_enabled = False
        endpoint = self._own if self._own is not None else self._runtime.endpoint(name.path)
        try:
            await register_model(
                ModelInput.Tokens,
                kind,
                endpoint,
                card.source_path,
                model,
                worker_type=WorkerType.Aggregated,
                kv_cache_block_size=card.kv_cache_block_size,
                runtime_config=limits,
                ignore_weights=True,
            )
        except Exception as error:
            raise OSError(
                f"the model {model!r} at {card.source_path!r} cannot be offered: {error}"
            ) from error

    async def withdraw(self) -> None:
        """Take the endpoint out of discovery, so that frontends send nothing more. The model stays: frontends
        break off the open requests of a model that nothing offers any longer.
        """
        await self._leave(self._own.unregister_endpoint_instance if self._own is not None else None)

    async def withdraw_model(self) -> None:
        """Take the model out of discovery, once no request is open."""
        await self._leave(None if self._own is None else partial(unregister_model, self._own))

    async def _leave(self, step: Callable[[], Awaitable[None]] | None) -> None:
        try:
            if step is not None:
                await step()
        except Exception as error:  # noqa: BLE001 Dynamo's errors have no common type
            log.warning("the router could not leave Dynamo's discovery: %s", error)

    def shutdown(self) -> None:
        """End the runtime: its tasks, its lease, its endpoint."""
        self._runtime.shutdown()


def _surface(name: str) -> Any:
    return {"chat": ModelType.Chat, "completions": ModelType.Completions}.get(name.strip().lower())


class _WorkerItems:
    """Items of a stream, with errors as UpstreamFailed. State: whether there was one. It is no generator,
    since every item passes through it.
    """

    __slots__ = ("_begun", "_items")

    def __init__(self, items: Any) -> None:
        self._items = items
        self._begun = False

    def __aiter__(self) -> "_WorkerItems":
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self._items.__anext__()
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise _failure(error, begun=self._begun) from error
        self._begun = True
        return item


def _failure(error: Exception, *, begun: bool) -> Exception:
    """Return the error of a failed call. ApiError 400 when the worker calls the request invalid."""
    text = str(error)
    lower = text.lower()
    if isinstance(error, InvalidArgument) or any(mark in lower for mark in _INVALID):
        return ApiError(400, text, code="invalid_value")
    if begun:
        return UpstreamFailed(AttemptFailure.BROKEN, text)
    if any(mark in lower for mark in _NO_CONNECTION):
        return UpstreamFailed(AttemptFailure.CONNECT, text)
    if "stream ended" in lower or "disconnected" in lower:
        return UpstreamFailed(AttemptFailure.DISCONNECTED, text)
    return UpstreamFailed(AttemptFailure.SERVER_ERROR, text)
