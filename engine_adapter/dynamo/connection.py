"""Connection of a worker to Dynamo's own runtime, which does discovery and carries requests and events. The
only module that imports it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable
from dynamo.runtime import DistributedRuntime

from engine_adapter.batching.scheduler import Overloaded
from engine_adapter.dynamo.address import DynamoAddress
from engine_adapter.dynamo.card import ENGINE_DATA, WorkerCard
from engine_adapter.dynamo.membership import DynamoFailed, RequestHandler
from engine_adapter.dynamo.requests import DisaggregationMode, UnservableRequest
from engine_adapter.engine import EngineFailed, RankLoad

_PUBLIC = ModelType.Chat | ModelType.Completions
_ROLES: dict[DisaggregationMode, tuple[Any, Any, Any]] = {
    "agg": (WorkerType.Aggregated, _PUBLIC, None),
    "prefill": (WorkerType.Prefill, ModelType.Empty, [[WorkerType.Decode]]),
    "decode": (WorkerType.Decode, _PUBLIC, [[WorkerType.Prefill]]),
}
"""By mode: the type of the worker, its public surfaces, and the types that it needs beside it."""
_LOOK_SECONDS = 0.02
_SEEN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DynamoPlanes:
    """Choices that all processes of a Dynamo deployment share, as Dynamo's variables DYN_DISCOVERY_BACKEND,
    DYN_REQUEST_PLANE and DYN_EVENT_PLANE name them. Its runtime reads the addresses from further variables.
    """

    discovery: str = "etcd"
    requests: str = "tcp"
    events: str = "zmq"


class DynamoConnection:
    """One endpoint of a worker: an instance in discovery."""

    def __init__(self, runtime: Any, address: DynamoAddress) -> None:
        self._runtime = runtime
        self._endpoint = runtime.endpoint(address.endpoint)
        self._kv: dict[int, Any] = {}
        self._load = WorkerMetricsPublisher()
        self._serving: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, planes: DynamoPlanes, address: DynamoAddress) -> "DynamoConnection":
        """Connect. DynamoFailed when discovery or an event server cannot be reached, or a plane does not
        exist."""
        loop = asyncio.get_running_loop()
        try:
            # it blocks while it connects: to etcd for up to two minutes
            runtime = await asyncio.to_thread(
                DistributedRuntime, loop, planes.discovery, planes.requests, event_plane=planes.events
            )
            return cls(runtime, address)
        except Exception as error:  # the runtime raises nothing more specific
            raise DynamoFailed(f"no connection to Dynamo ({planes}): {error}") from error

    @property
    def instance_id(self) -> int:
        """u64 by which routers address this worker."""
        return int(self._endpoint.connection_id())

    async def open_publishers(self, ranks: range, block_size: int) -> None:
        """Get ready to publish events of these data-parallel ranks."""
        for rank in ranks:
            self._kv[rank] = KvEventPublisher(
                self._endpoint, kv_block_size=block_size, dp_rank=rank, enable_local_indexer=True
            )
        await self._load.create_endpoint(self._endpoint)

    def publish_kv(self, rank: int, events: list[dict[str, Any]]) -> None:
        """Publish KV events of a rank."""
        self._kv[rank].publish_batch(events)

    def publish_load(self, rank: int, load: RankLoad) -> None:
        """Publish the load of a rank as vLLM's workers do: the blocks that running requests hold. Those kept
        for reuse are free to readers, who would otherwise take a warm cache for a full one."""
        self._load.publish(rank, kv_used_blocks=load.decode_blocks)

    async def register(self, card: WorkerCard) -> None:
        """Put the model card into discovery."""
        config = ModelRuntimeConfig()
        config.total_kv_blocks = card.kv_blocks
        config.max_num_seqs = card.max_running
        config.max_num_batched_tokens = card.max_batch_tokens
        config.context_length = card.max_context
        config.data_parallel_start_rank = card.first_rank
        config.data_parallel_size = card.ranks
        config.enable_local_indexer = True
        config.kv_event_publishing_enabled = True
        config.set_engine_specific(ENGINE_DATA, card.engine_data)
        kind, surface, needs = _ROLES[card.mode]
        await register_model(
            ModelInput.Tokens,
            surface,
            self._endpoint,
            str(card.folder),
            card.model,
            worker_type=kind,
            needs=needs,
            kv_cache_block_size=card.block_size,
            runtime_config=config,
        )

    async def serve(self, handler: RequestHandler, model: str) -> None:
        """Serve requests, and return once discovery names this instance. DynamoFailed when it does not."""
        self._serving = asyncio.ensure_future(
            self._endpoint.serve_endpoint(
                _with_errors(handler), graceful_shutdown=True, metrics_labels=[("model", model)]
            )
        )
        client = await self._endpoint.client()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_SECONDS):
                while not self._serving.done():
                    if self.instance_id in client.instance_ids():
                        return
                    await asyncio.sleep(_LOOK_SECONDS)
        await self.ended()

    async def ended(self) -> None:
        """Wait until the runtime serves no longer, and raise DynamoFailed."""
        if self._serving is None:
            raise DynamoFailed("the endpoint is not served")
        try:
            await asyncio.shield(self._serving)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise DynamoFailed(f"Dynamo's runtime ended: {error}") from error
        raise DynamoFailed("Dynamo's runtime ended, e.g. because it lost its lease in discovery")

    async def withdraw(self) -> None:
        """Take this worker out of discovery. Requests that are open, or on their way, are still served."""
        await self._endpoint.unregister_endpoint_instance()
        await unregister_model(self._endpoint)

    async def close(self) -> None:
        """End the connection, with whatever is still open."""
        for publisher in self._kv.values():
            publisher.shutdown()
        self._runtime.shutdown()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)


def _with_errors(handler: RequestHandler) -> Callable[[Any, Any], AsyncGenerator[dict[str, Any]]]:
    """Return the handler with the errors that Dynamo's routers know: of the client, of a full worker, and of
    a worker that has failed, whose requests are continued elsewhere."""

    async def generate(request: Any, context: Any) -> AsyncGenerator[dict[str, Any]]:
        try:
            async with contextlib.aclosing(handler(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UnservableRequest as error:
            raise InvalidArgument(str(error)) from None  # the runtime prints its whole traceback
        except Overloaded as error:
            raise WorkerUnavailable(str(error)) from error
        except EngineFailed as error:
            raise EngineShutdown(str(error)) from error

    return generate
