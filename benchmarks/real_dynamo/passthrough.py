"""An empty router at the place of `roost router --dynamo`: each request goes to the next worker, and nothing
is decided. The least that a router in Python costs between a Dynamo frontend and its workers.

python -m benchmarks.real_dynamo.passthrough FOLDER: of the model. Dynamo's variables say the rest.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import uvloop
from dynamo._core import (
    DistributedRuntime,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)

WORKERS, OWN = "workers.backend.generate", "passthrough.router.generate"
MODEL, BLOCK = "tiny", 16


async def main(folder: str) -> None:
    """Serve until the runtime ends."""
    runtime: Any = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    client = await runtime.endpoint(WORKERS).client()
    await client.wait_for_instances()
    turns = count()

    async def handler(request: Any, context: Any) -> AsyncIterator[Any]:
        instances = client.instance_ids()
        chosen = instances[next(turns) % len(instances)]
        async for item in await client.direct(request, chosen, annotated=False, context=context):
            yield item

    own = runtime.endpoint(OWN)
    served = asyncio.ensure_future(own.serve_endpoint(handler, graceful_shutdown=True))
    limits: Any = ModelRuntimeConfig()
    limits.kv_event_publishing_enabled = False
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        own,
        folder,
        MODEL,
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK,
        runtime_config=limits,
        ignore_weights=True,
    )
    await served


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
