"""Dynamo's SelectionService as a peer for decisions: the same workers and the same blocks, published in
vLLM's form (ZMQ, a socket per rank)."""

import asyncio
import os
import struct
from typing import Any

import msgspec

from benchmarks.rig.decisions import BLOCK_SIZE, KV_BLOCKS, MODEL, RANKS, Held, Rank
from fleet.blocks import local_hashes, sequence_hashes

os.environ["DYN_LOG"] = "error"  # read when the module is loaded

from dynamo._core import SelectionService

try:
    import zmq
except ImportError as missing:
    raise SystemExit("this benchmark needs pyzmq: pip install -e '.[bench]'") from missing

_SETTLE_SECONDS = 20.0


class Selection:
    """Service with `ranks` schedulable ranks of workers. Use within one event loop."""

    def __init__(self, ranks: int) -> None:
        self.engines = ranks // RANKS
        self._service: Any = SelectionService()
        self._context = zmq.Context()
        self._sockets: dict[Rank, zmq.Socket[bytes]] = {}
        self._numbers: dict[Rank, int] = {}

    async def start(self) -> None:
        for engine in range(1, self.engines + 1):
            endpoints = {rank: self._publish((engine, rank)) for rank in range(RANKS)}
            worker = {
                "worker_id": engine,
                "model_name": MODEL,
                "endpoint": f"http://h{engine}:0",
                "block_size": BLOCK_SIZE,
                "kv_events_endpoints": endpoints,
                "data_parallel_start_rank": 0,
                "data_parallel_size": RANKS,
                "max_num_batched_tokens": 8192,
                "total_kv_blocks": KV_BLOCKS,
            }
            answer = await self._service.upsert_worker(worker)
            if answer["lifecycle"] != "schedulable":
                raise RuntimeError(f"SelectionService does not take worker {engine}: {answer}")

    def _publish(self, rank: Rank) -> str:
        socket = self._context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        self._sockets[rank], self._numbers[rank] = socket, 0
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def hold(self, held: Held) -> None:
        """Publish the ranks' cached blocks; `settled` waits until they are indexed."""
        ids = held.ids[: held.tokens]
        event = {
            "type": "BlockStored",
            "block_hashes": sequence_hashes(local_hashes(ids)),
            "parent_block_hash": None,
            "token_ids": ids,
        }
        event |= {"block_size": BLOCK_SIZE, "lora_id": None}
        for rank in held.ranks:
            payload = msgspec.msgpack.encode([0.0, [event], rank[1]])
            self._sockets[rank].send_multipart([b"", struct.pack(">Q", self._numbers[rank]), payload])
            self._numbers[rank] += 1

    async def overlap(self, ids: list[int]) -> dict[Rank, int]:
        """Return the blocks of a prompt that each rank holds."""
        scores = await self._service.overlap_scores({"model_name": MODEL, "token_ids": ids})
        return {
            (one["worker_id"], one["dp_rank"]): one["device_blocks"]
            for one in scores["workers"]
            if one["device_blocks"]
        }

    async def settled(self, ids: list[int], expected: dict[Rank, int]) -> bool:
        """Wait until the blocks of the last published prompt are indexed; return False if they do not
        arrive."""
        for _ in range(int(_SETTLE_SECONDS / 0.1)):
            if await self.overlap(ids) == expected:
                return True
            await asyncio.sleep(0.1)
        return False

    async def select(self, ids: list[int]) -> None:
        await self._service.select({"model_name": MODEL, "token_ids": ids})

    def close(self) -> None:
        self._context.destroy(linger=0)
