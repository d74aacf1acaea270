"""A process that is one rank of transfers; driven over stdin and stdout, a JSON object a line.

Its argument is a JSON object: {way: shared or nixl, cells, cell_bytes, agent, ...TransferConfig}. It says
{"address": MemoryAddress} and then obeys orders, each with an `id` that its answers repeat:

- pull {address, pulls, seconds}, each pull [remote cell, cell] or the fields of `Pull`: {"pulled": bytes, "seconds", "ticks": turns of the event loop meanwhile}; or
  {"failed": class, "detail"}; or {"overdue": detail}, and later {"settled": true}. With {"cancel": seconds}
  it is cancelled after so long: {"cancelled": true}, where nothing was landing.
- fill {cell, seed}; put {cell, offset, value}; sums {cell}: {"sums": checksums of its tensors}; zeros {cell}:
  {"zeros": share of its bytes that are zero}
- hash {cell}: {"hash": of its bytes}
- overwrite {address, cell, offset, value}: write into the memory of another, as anybody can who has its
  address and NIXL
- busy {active}; forget {address}; held: {"held": [descriptors, mappings of expert memory, threads]}; cpu
  {seconds}: {"cpu": share of a core}
- close: {"closed": true}
"""

import asyncio
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from engine_adapter.config import TransferConfig
from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.checksums import checksums
from engine_adapter.transfer.mapped_memory import MappedCells, laid_out
from engine_adapter.transfer.nixl import NixlTransfer
from engine_adapter.transfer.nixl_loader import load_nixl
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import Overdue, Pull, Transfer, TransferError
from engine_adapter.transfer.shared_memory import SharedTransfer
from fleet.requests.handovers import MemoryAddress


def tensors_of(cell_bytes: int) -> Any:
    """Weights, and scales that are 64 of the cell's bytes."""
    return laid_out([("weights", "uint8", (cell_bytes - 64,)), ("weights.scale", "float32", (16,))])


def pulls_of(pulls: list[list[int]], cell_bytes: int) -> list[Pull]:
    """Ranges as ordered; two numbers stand for a whole cell."""
    return [Pull(one[0], 0, one[1], 0, cell_bytes) if len(one) == 2 else Pull(*one) for one in pulls]


def filled(cell_bytes: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(1, 256, cell_bytes, np.uint8)


def digest(content: Any) -> int:
    return xxh3_64_intdigest(content.tobytes())


class RankUnderOrders:
    def __init__(self, job: dict[str, Any]) -> None:
        way, agent = job.pop("way"), job.pop("agent")
        self.memory = MappedCells(tensors_of(job["cell_bytes"]), job.pop("cells"))
        self.cell_bytes = job.pop("cell_bytes")
        config = TransferConfig(backend=way, **job)
        self.transfer: Transfer = (
            SharedTransfer(self.memory, config)
            if way == "shared"
            else NixlTransfer(self.memory, config, agent)
        )
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        if isinstance(self.transfer, NixlTransfer):
            await self.transfer.open()
        reply(address=msgspec.to_builtins(self.transfer.address(own_address(self.memory)), str_keys=True))

    def obey(self, order: dict[str, Any]) -> None:
        number = order.pop("id")
        task = asyncio.create_task(
            self._obey(number, getattr(self, order.pop("do")), order), name=f"order {number}"
        )
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _obey(self, number: int, what: Any, order: dict[str, Any]) -> None:
        try:
            answer = await what(**order)
        except TransferError as error:
            reply(id=number, failed=type(error).__name__, detail=str(error))
        except Overdue as error:
            reply(id=number, overdue=str(error))
            await error.settled
            reply(id=number, settled=True)
        else:
            reply(id=number, **(answer or {"done": True}))

    async def pull(
        self, address: dict[str, Any], pulls: list[list[int]], seconds: float, cancel: float | None = None
    ) -> dict[str, Any]:
        reading = asyncio.create_task(
            self.transfer.pull(addressed(address), pulls_of(pulls, self.memory.cell_bytes), seconds),
            name="a pull",
        )
        if cancel is not None:
            await asyncio.sleep(cancel)
            reading.cancel()
        ticks = 0
        while not reading.done():
            await asyncio.wait((reading,), timeout=0.001)
            ticks += 1
        if reading.cancelled():
            return {"cancelled": True}
        pulled = await reading
        return {"pulled": pulled.bytes, "seconds": pulled.seconds, "ticks": ticks}

    async def fill(self, cell: int, seed: int) -> None:
        self.memory.cell(cell)[:] = filled(self.memory.cell_bytes, seed) if seed else 0

    async def put(self, cell: int, offset: int, value: int) -> None:
        self.memory.cell(cell)[offset] = value

    async def sums(self, cell: int) -> dict[str, Any]:
        return {"sums": checksums(self.memory.cell(cell), CellFormat.of(self.memory))}

    async def hash(self, cell: int) -> dict[str, Any]:
        return {"hash": digest(self.memory.cell(cell))}

    async def opened(self) -> dict[str, Any]:
        return {"bytes": self.transfer.opened_bytes}

    async def zeros(self, cell: int) -> dict[str, Any]:
        return {"zeros": float(np.mean(self.memory.cell(cell) == 0))}

    async def overwrite(self, address: dict[str, Any], cell: int, offset: int, value: int) -> None:
        there, nixl = addressed(address), load_nixl()
        stranger = nixl.agent(f"stranger-{os.getpid()}", nixl.config(enable_prog_thread=False, backends=[]))
        stranger.create_backend("UCX", {})
        byte = np.full(4096, value, np.uint8)
        stranger.register_memory([(byte.ctypes.data, 4096, 0, "")], "DRAM", backends=["UCX"])
        stranger.add_remote_agent(there.metadata)
        rows = [[(byte.ctypes.data, 1, 0)], [(there.base + cell * there.cell_bytes + offset, 1, 0)]]
        here, target = (stranger.get_xfer_descs(np.array(row, np.uint64), "DRAM") for row in rows)
        request = stranger.initialize_xfer("WRITE", here, target, there.agent, backends=["UCX"])
        state = stranger.transfer(request)
        while state == "PROC":
            await asyncio.sleep(0.001)
            state = stranger.check_xfer_state(request)
        self.kept = (stranger, byte)

    async def busy(self, active: bool) -> None:
        self.transfer.busy(active)

    async def forget(self, address: dict[str, Any]) -> None:
        self.transfer.forget(addressed(address))

    async def held(self) -> dict[str, Any]:
        return {"held": held()}

    async def cpu(self, seconds: float) -> dict[str, Any]:
        began, used = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        return {"cpu": (time.process_time() - used) / (time.monotonic() - began)}

    async def close(self) -> dict[str, Any]:
        await self.transfer.close()
        return {"closed": True}


def held() -> list[int]:
    maps = sum("memfd:roost-experts" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return [len(os.listdir("/proc/self/fd")), maps, threading.active_count()]


def addressed(address: dict[str, Any]) -> MemoryAddress:
    return msgspec.convert(address, MemoryAddress)


def reply(**message: Any) -> None:
    sys.stdout.write(json.dumps(message, default=str) + "\n")
    sys.stdout.flush()


async def main() -> None:
    rank = RankUnderOrders(json.loads(sys.argv[1]))
    try:
        await rank.start()
    except TransferError as error:
        reply(failed=str(error))
        return
    orders = asyncio.StreamReader(2**20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    while line := await orders.readline():
        rank.obey(json.loads(line))
    for task in tuple(rank.tasks):
        task.cancel()
    with suppress(TransferError):
        await rank.transfer.close()


if __name__ == "__main__":
    asyncio.run(main())
