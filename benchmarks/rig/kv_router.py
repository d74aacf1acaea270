"""Dynamo's KvRouter as a peer for decisions: its runtime over files, TCP and ZMQ on this machine, workers in
a separate process.

    python -m benchmarks.rig.kv_router 8    # the workers; they end with their standard input
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from typing import Any

PLANES = {
    "DYN_LOG": "error",
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SELF_HOST_METADATA": "0",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(PLANES)  # read when the module is loaded

from dynamo import _core  # noqa: E402

from benchmarks.rig.decisions import BLOCK_SIZE, KV_BLOCKS, MODEL, RANKS  # noqa: E402
from deploy.demo_model import checkpoint_path  # noqa: E402

_ENDPOINT = "roost.backend.generate"
_START_SECONDS = 60.0


def _runtime() -> Any:
    return _core.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", False, event_plane="zmq")


class KvRouter:
    """One router, and workers of RANKS ranks each. Use within one event loop."""

    def __init__(self, ranks: int) -> None:
        self._engines = ranks // RANKS
        self._folder = tempfile.TemporaryDirectory()
        self._workers: subprocess.Popen[bytes] | None = None
        self._router: Any = None
        self._runtime: Any = None

    async def start(self) -> None:
        """Start router and workers. Raises TimeoutError if its workers do not register."""
        os.environ["DYN_FILE_KV"] = self._folder.name
        command = [sys.executable, "-m", "benchmarks.rig.kv_router", str(self._engines)]
        self._workers = subprocess.Popen(  # noqa: ASYNC220 nobody else waits
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._runtime = _runtime()
        endpoint = self._runtime.endpoint(_ENDPOINT)
        client = await endpoint.client()
        async with asyncio.timeout(_START_SECONDS):
            while len(client.instance_ids()) < self._engines:  # noqa: ASYNC110 it tells nobody
                await asyncio.sleep(0.1)
        self._router = _core.KvRouter(endpoint, BLOCK_SIZE, _core.KvRouterConfig())
        await asyncio.sleep(2.0)

    async def best_worker(self, ids: list[int]) -> None:
        await self._router.best_worker(ids)

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.shutdown()
        if self._workers is not None and self._workers.stdin is not None:
            self._workers.stdin.close()
            try:
                self._workers.wait(10.0)
            except subprocess.TimeoutExpired:
                self._workers.kill()
                self._workers.wait()
        self._folder.cleanup()


async def _serve() -> None:
    runtime = _runtime()
    endpoint = runtime.endpoint(_ENDPOINT)
    about = _core.ModelRuntimeConfig()
    about.total_kv_blocks, about.max_num_seqs, about.max_num_batched_tokens = KV_BLOCKS, 512, 8192
    about.data_parallel_start_rank, about.data_parallel_size, about.enable_local_indexer = 0, RANKS, True
    kinds = _core.ModelType.Chat | _core.ModelType.Completions
    where = {
        "worker_type": _core.WorkerType.Aggregated,
        "kv_cache_block_size": BLOCK_SIZE,
        "runtime_config": about,
    }
    await _core.register_model(
        _core.ModelInput.Tokens, kinds, endpoint, str(checkpoint_path()), MODEL, **where
    )
    await asyncio.ensure_future(
        endpoint.serve_endpoint(_refuse, graceful_shutdown=True, metrics_labels=[("model", MODEL)])
    )


async def _refuse(request: Any, context: Any) -> Any:
    """Refuse: the benchmark sends no requests to workers."""
    yield {"token_ids": [], "finish_reason": "stop"}


async def _workers(count: int) -> None:
    """Run workers until standard input ends."""
    serving = [asyncio.ensure_future(_serve()) for _ in range(count)]
    await asyncio.to_thread(sys.stdin.read)
    for task in serving:
        task.cancel()
    os._exit(0)  # the runtimes' threads wait for each other


if __name__ == "__main__":
    asyncio.run(_workers(int(sys.argv[1])))
