"""Ranks that read each other: processes of their own for the ways that there are, and in-process twins for
`transfer.memory`, under one face."""

import asyncio
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest

from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.checksums import checksums
from engine_adapter.transfer.in_process import MemoryFabric
from engine_adapter.transfer.mapped_memory import MappedCells
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import Overdue, TransferError
from tests.engine_adapter.transfer_process import addressed, digest, filled, pulls_of, tensors_of

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0
"""seconds that any answer may take on a busy machine"""
MIB = 1 << 20
Answer = dict[str, Any]
_numbers = count(1)


@dataclass(frozen=True)
class Way:
    """How ranks read each other in a test."""

    name: str
    transfer: str
    environment: dict[str, str] = field(default_factory=dict)
    hangs: bool = True
    """a stopped source holds its readers up, once they are connected"""
    lively: bool = True
    """a killed source's memory cannot be read any more"""

    def skip_unless_possible(self) -> None:
        if self.transfer == "nixl" and not any(
            importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13", "nixl")
        ):
            pytest.skip("NIXL is not installed: the extra `nixl`")


MEMORY = Way("memory", "memory")
SHARED = Way("shared", "shared", hangs=False, lively=False)
NIXL = Way("nixl", "nixl", hangs=False)
TCP = Way("nixl-tcp", "nixl", {"UCX_TLS": "tcp,self"})


class Rank(Protocol):
    """One rank: what a test may ask of it. Orders are those of transfer_process.py."""

    address: Answer

    def send(self, do: str, **order: Any) -> int: ...

    def answer(self, number: int, within: float = PATIENCE) -> Answer: ...

    def ask(self, do: str, **order: Any) -> Answer: ...

    def stop(self) -> None: ...

    def resume(self) -> None: ...

    def kill(self) -> None: ...


class ChildRank:
    """A rank that is a process."""

    def __init__(self, way: Way, *, cells: int, cell_bytes: int, agent: str, **config: Any) -> None:
        job = {"way": way.transfer, "cells": cells, "cell_bytes": cell_bytes, "agent": agent, **config}
        command = [sys.executable, "-m", "tests.engine_adapter.transfer_process", json.dumps(job)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **way.environment}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment
        )
        self._waiting: list[Answer] = []
        self._read = b""
        self._address: Answer | None = None

    @property
    def address(self) -> Answer:
        if self._address is None:
            self._address = self._until(lambda answer: "address" in answer, PATIENCE)["address"]
        return self._address

    def send(self, do: str, **order: Any) -> int:
        assert self.address
        assert self.process.stdin is not None
        number = next(_numbers)
        self.process.stdin.write(json.dumps({"id": number, "do": do, **order}).encode() + b"\n")
        self.process.stdin.flush()
        return number

    def answer(self, number: int, within: float = PATIENCE) -> Answer:
        return self._until(lambda answer: answer.get("id") == number, within)

    def ask(self, do: str, **order: Any) -> Answer:
        return self.answer(self.send(do, **order))

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        until = time.monotonic() + PATIENCE
        while not all(
            stat.read_text().rpartition(") ")[2].startswith("T")
            for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        ):  # the signal has been sent, but on a busy machine its threads may still run
            assert time.monotonic() < until, "the process does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _until(self, expected: Any, within: float) -> Answer:
        deadline = time.monotonic() + within
        while True:
            for answer in self._waiting:
                if expected(answer):
                    self._waiting.remove(answer)
                    return answer
            self._read_more(deadline)

    def _read_more(self, deadline: float) -> None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no answer in time; {self._waiting}"
        more = os.read(self.process.stdout.fileno(), 1 << 16)
        assert more, f"the rank ended with {self.process.wait(PATIENCE)}; {self._waiting}"
        *lines, self._read = (self._read + more).split(b"\n")
        self._waiting += [
            json.loads(line) for line in lines if line.startswith(b"{")
        ]  # UCX writes there too, when a connection is refused


class TwinRank:
    """A rank in this process."""

    def __init__(self, fabric: MemoryFabric, runner: asyncio.Runner, cells: int, cell_bytes: int) -> None:
        self.memory = MappedCells(tensors_of(cell_bytes), cells)
        self.fabric = fabric
        self.runner = runner
        self.transfer = fabric.join(self.memory)
        self.address = msgspec.to_builtins(self.transfer.address(own_address(self.memory)))
        self._tasks: dict[int, asyncio.Task[Answer]] = {}
        self._settling: dict[int, asyncio.Future[None]] = {}

    def send(self, do: str, **order: Any) -> int:
        number = next(_numbers)

        async def begin() -> None:
            self._tasks[number] = asyncio.create_task(
                getattr(self, f"_{do}")(number, **order), name=f"order {number}"
            )
            await asyncio.sleep(0)

        self.runner.run(begin())
        return number

    def answer(self, number: int, within: float = PATIENCE) -> Answer:
        async def ended() -> Answer:
            if number in self._settling:
                await asyncio.wait_for(asyncio.shield(self._settling.pop(number)), within)
                return {"settled": True}
            return await asyncio.wait_for(self._tasks.pop(number), within)

        return self.runner.run(ended())

    def ask(self, do: str, **order: Any) -> Answer:
        return self.answer(self.send(do, **order))

    def stop(self) -> None:
        self.fabric.stop(self.transfer)

    def resume(self) -> None:
        self.fabric.resume(self.transfer)

    def kill(self) -> None:
        self.fabric.kill(self.transfer)

    def end(self) -> None:
        self.runner.run(self.transfer.close())
        self.memory.close()

    async def _pull(
        self,
        number: int,
        address: Answer,
        pulls: list[list[int]],
        seconds: float,
        cancel: float | None = None,
    ) -> Answer:
        reading = asyncio.create_task(
            self.transfer.pull(addressed(address), pulls_of(pulls, self.memory.cell_bytes), seconds),
            name="a pull",
        )
        if cancel is not None:
            await asyncio.sleep(cancel)
            reading.cancel()
        try:
            return {"pulled": (await reading).bytes}
        except TransferError as error:
            return {"failed": type(error).__name__, "detail": str(error)}
        except Overdue as error:
            self._settling[number] = error.settled
            return {"overdue": str(error)}

    async def _fill(self, number: int, cell: int, seed: int) -> Answer:
        self.memory.cell(cell)[:] = filled(self.memory.cell_bytes, seed) if seed else 0
        return {}

    async def _put(self, number: int, cell: int, offset: int, value: int) -> Answer:
        self.memory.cell(cell)[offset] = value
        return {}

    async def _sums(self, number: int, cell: int) -> Answer:
        return {"sums": list(checksums(self.memory.cell(cell), CellFormat.of(self.memory)))}

    async def _hash(self, number: int, cell: int) -> Answer:
        return {"hash": digest(self.memory.cell(cell))}

    async def _opened(self, number: int) -> Answer:
        return {"bytes": self.transfer.opened_bytes}

    async def _zeros(self, number: int, cell: int) -> Answer:
        return {"zeros": float(np.mean(self.memory.cell(cell) == 0))}

    async def _busy(self, number: int, active: bool) -> Answer:
        self.transfer.busy(active)
        return {}

    async def _forget(self, number: int, address: Answer) -> Answer:
        self.transfer.forget(addressed(address))
        return {}


@dataclass
class Ranks:
    """Starts ranks of one way, and ends them."""

    way: Way
    fabric: MemoryFabric = field(default_factory=MemoryFabric)
    started: list[ChildRank | TwinRank] = field(default_factory=list)
    runner: asyncio.Runner | None = None

    def start(self, name: str, *, cells: int = 4, cell_bytes: int = MIB, **config: Any) -> Rank:
        """It may still be on its way when this returns, so that several start at once."""
        if self.way is MEMORY:
            self.runner = self.runner or asyncio.Runner()
            self.started.append(TwinRank(self.fabric, self.runner, cells, cell_bytes))
        else:
            self.started.append(ChildRank(self.way, cells=cells, cell_bytes=cell_bytes, agent=name, **config))
        return self.started[-1]

    def end(self) -> None:
        for rank in self.started:
            rank.end()
        if self.runner is not None:
            self.runner.close()


def ranks_of(way: Way) -> Iterator[Ranks]:
    """For fixtures."""
    way.skip_unless_possible()
    ranks = Ranks(way)
    yield ranks
    ranks.end()
