"""One of several rank processes that turn all layers over, again and again, by different ways.

    python -m benchmarks.rig.turns.copying_rank JOB RANK

JOB is `CopyingJob` as JSON. The process prints its address, reads those of all ranks from standard input,
and prints a line once it is ready. Every further line of input is an `Order`; the answer is the moment at
which it was done, in seconds of the machine-wide clock. Ways:

- landed: the reads of a handover, as `CopyRunner` carries them out: its reader thread copies from the other
  ranks, and its executor within the rank.
- verified: the same, with the comparison of all checksums.
- plain: the same pieces, copied by two threads of the same priority with one NumPy assignment each, from
  mappings made before.
- gloo: `all_to_all_single` of torch.distributed layer by layer, packed and unpacked in buffers that are kept.

Each process has a core of its own, if there are enough.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.rig.turns.part_reads import Forms, PartRead, forms, part_reads
from benchmarks.rig.turns.random_model import expert_bytes
from benchmarks.transfer import plainly_mapped
from bus import Message
from bus.memory import MemoryBroker, MemoryBus
from bus.protocol.subjects import Subjects
from engine_adapter.agent.copy_runner import CopyRunner, Staging
from engine_adapter.config import TransferConfig
from engine_adapter.embedded.arena import Arena
from engine_adapter.engine import EngineDescription
from engine_adapter.handover.inbound_copies import (
    CellsVerified,
    CopyLocal,
    LeaseGranted,
    ReadCells,
    ReadLanded,
    Report,
    RequestLease,
    VerifyCells,
)
from engine_adapter.reporting.rank_context import RankContext
from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.checksums import piece_checksums
from engine_adapter.transfer.nixl_loader import agent_name
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import Pull
from engine_adapter.transfer.reader_thread import requests
from engine_adapter.transfer.selection import open_transfers
from engine_adapter.transfer.shared_memory import SharedTransfer
from fleet.experts import ModelShape
from fleet.facts.engines import Capabilities
from fleet.requests.handovers import ExpertsLeased, LeaseExperts, MemoryAddress

ENGINE, WORKER = "turning", 1
_DAMAGED = 0xFF
Bytes = NDArray[np.uint8]


class CopyingJob(msgspec.Struct, frozen=True):
    shape: ModelShape
    ranks: int
    piece_bytes: int
    backend: str
    folder: str
    """Meeting place of the ranks, an empty folder."""


class Order(msgspec.Struct, frozen=True):
    way: str
    """damage: overwrite what a turn fills."""
    to_sharded: bool
    at: float = 0.0
    """When to begin, in seconds of the machine-wide clock."""
    check: bool = False
    """Compare every byte with what it must be, afterwards."""


class Done(msgspec.Struct, frozen=True):
    ended: float


@dataclass(frozen=True)
class Batch:
    """Parts that a rank copies from one other rank, or within its own memory."""

    source: int
    parts: Sequence[PartRead]
    checksums: tuple[tuple[int, ...], ...]
    """Of each part: one per tensor."""

    @property
    def reads(self) -> tuple[Any, ...]:
        return tuple(one.read for one in self.parts)


class Product:
    """Copies as the agent of a rank makes them."""

    def __init__(
        self,
        runner: Callable[..., CopyRunner],
        rank: int,
        addresses: Sequence[MemoryAddress],
        batches: dict[bool, list[Batch]],
        staging: Staging,
    ) -> None:
        self._runner = runner(staging, report=self._take, spawn=self._spawn)
        self._executor = ThreadPoolExecutor(1, "checksums")
        self._runner.executor = self._executor
        self._rank = rank
        self._addresses = addresses
        self._batches = dict(enumerate(batches[False] + batches[True], 1))
        first = len(batches[False]) + 1
        self._numbers = {False: range(1, first), True: range(first, first + len(batches[True]))}
        self._verify = False
        self._left = 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def lease(self) -> None:
        """Take a lease for each batch of another rank, for good."""
        await self._run(
            [
                RequestLease(number, batch.source, 1, (), float("inf"))
                for number, batch in self._batches.items()
                if batch.source != self._rank
            ]
        )

    async def turn(self, to_sharded: bool, *, verify: bool) -> None:
        """Copy all parts; verify: and compare their checksums."""
        self._verify = verify
        await self._run(
            [
                CopyLocal(number, batch.reads)
                if batch.source == self._rank
                else ReadCells(number, batch.source, self._addresses[batch.source], batch.reads, float("inf"))
                for number, batch in ((number, self._batches[number]) for number in self._numbers[to_sharded])
            ]
        )

    async def _run(self, effects: Sequence[RequestLease | ReadCells | CopyLocal]) -> None:
        self._ended, self._left = asyncio.get_running_loop().create_future(), len(effects)
        for effect in effects:
            self._runner.carry_out(effect)
        await self._ended

    def close(self) -> None:
        self._runner.end()
        self._executor.shutdown()
        for task in self._tasks:
            task.cancel()

    def _take(self, report: Report) -> None:
        match report:
            case ReadLanded() if self._verify:
                batch = self._batches[report.batch]
                self._runner.carry_out(VerifyCells(report.batch, batch.source, batch.reads, batch.checksums))
                return
            case CellsVerified(_, wrong) if any(wrong):
                self._ended.set_exception(RuntimeError(f"a copy is damaged: {next(filter(None, wrong))}"))
                return
            case LeaseGranted() | ReadLanded() | CellsVerified():
                self._left -= 1
            case _:
                self._ended.set_exception(RuntimeError(f"a copy failed: {report}"))
                return
        if not self._left:
            self._ended.set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Plain:
    """The same pieces, copied by as many threads as the product uses."""

    def __init__(
        self, arena: Arena, peers: Sequence[Bytes | None], batches: dict[bool, list[Batch]], piece_bytes: int
    ) -> None:
        self._pairs = {
            to_sharded: [
                list(self._copies(arena, peers[batch.source], batch, piece_bytes)) for batch in found
            ]
            for to_sharded, found in batches.items()
        }
        self._threads = [ThreadPoolExecutor(1) for _ in batches[True]]

    def _copies(self, arena: Arena, peer: Bytes | None, batch: Batch, piece_bytes: int) -> Any:
        form, size = CellFormat.of(arena), arena.cell_bytes
        for pieces in requests(pulls_of(form, batch.parts), lambda: piece_bytes):
            for source, source_offset, cell, offset, count in pieces:
                at = source * size + source_offset
                theirs = (
                    arena.cell(source)[source_offset : source_offset + count]
                    if peer is None
                    else peer[at : at + count]
                )
                yield arena.cell(cell)[offset : offset + count], theirs

    async def turn(self, to_sharded: bool) -> None:
        """Copy all pieces."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(
                loop.run_in_executor(thread, _assign, pairs)
                for thread, pairs in zip(self._threads, self._pairs[to_sharded], strict=True)
            )
        )

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def _assign(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    for mine, theirs in pairs:
        mine[:] = theirs


class Gloo:
    """An all-to-all per layer, in buffers that are kept."""

    def __init__(self, arena: Arena, engine: Forms, rank: int) -> None:
        ranks = engine.whole.ranks
        self._outgoing: dict[bool, list[list[tuple[Bytes, Bytes]]]] = {}
        self._incoming: dict[bool, list[list[tuple[Bytes, Bytes]]]] = {}
        layer_bytes = arena.slots * arena.shape.expert_bytes
        self._send, self._receive = (torch.zeros(layer_bytes, dtype=torch.uint8) for _ in range(2))
        for to_sharded in (True, False):
            by_rank = [part_reads(engine, other, to_sharded=to_sharded) for other in range(ranks)]
            sent = [[one for one in parts if one.source == rank] for parts in by_rank]
            got = [[one for one in by_rank[rank] if one.source == other] for other in range(ranks)]
            layers = range(engine.whole.layers)
            self._outgoing[to_sharded] = [
                self._places(arena, self._send.numpy(), sent, layer, to_sharded, out=True) for layer in layers
            ]
            self._incoming[to_sharded] = [
                self._places(arena, self._receive.numpy(), got, layer, to_sharded, out=False)
                for layer in layers
            ]

    def _places(
        self,
        arena: Arena,
        buffer: Bytes,
        by_rank: Sequence[Sequence[PartRead]],
        layer: int,
        to_sharded: bool,
        *,
        out: bool,
    ) -> list[tuple[Bytes, Bytes]]:
        """Return (to, from) of each piece of a layer: into the buffer, or out of it."""
        form, found, at = CellFormat.of(arena), [], 0
        for parts in by_rank:
            for one in parts:
                if one.layer != layer:
                    continue
                read = one.read
                cell, piece, sharded = (
                    (read.source, read.source_piece, not to_sharded)
                    if out
                    else (read.cell, read.piece, to_sharded)
                )
                for offset, count in form.ranges(piece, sharded=sharded):
                    here, there = arena.cell(cell)[offset : offset + count], buffer[at : at + count]
                    found.append((there, here) if out else (here, there))
                    at += count
        return found

    async def turn(self, to_sharded: bool) -> None:
        """Pack, exchange and unpack layer by layer."""
        for outgoing, incoming in zip(self._outgoing[to_sharded], self._incoming[to_sharded], strict=True):
            _assign(outgoing)
            dist.all_to_all_single(self._receive, self._send)
            _assign(incoming)


def pulls_of(form: CellFormat, parts: Sequence[PartRead]) -> list[Pull]:
    """Return the ranges to copy."""
    return [
        pull
        for read in (one.read for one in parts)
        for pull in form.pulls(read.source, read.source_piece, read.cell, read.piece, sharded=read.sharded)
    ]


class Memory:
    """A rank's arena with both forms of all layers, and what they must hold."""

    def __init__(self, shape: ModelShape, engine: Forms, rank: int) -> None:
        whole = engine.whole
        self.arena = Arena(shape, whole.slots_per_rank, ranks=whole.ranks, spare_layers=shape.layers)
        self.form = CellFormat.of(self.arena)
        if self.arena.parts != whole.ranks:
            raise ValueError(f"experts of {shape} cannot be cut for {whole.ranks} ranks")
        for (layer, slot), expert in np.ndenumerate(whole.on_rank(rank)):
            cell = self.arena.cell(layer * whole.slots_per_rank + slot)
            cell[: shape.expert_bytes] = expert_bytes(shape, layer, int(expert))
        self._sums = {
            (layer, expert): [
                piece_checksums(weights, self.form, part, sharded=False) for part in range(whole.ranks)
            ]
            for layer in range(shape.layers)
            for expert in range(shape.experts)
            for weights in (expert_bytes(shape, layer, expert),)
        }
        self._cells = {
            to_sharded: sorted({one.read.cell for one in part_reads(engine, rank, to_sharded=to_sharded)})
            for to_sharded in (True, False)
        }
        self._parts = {
            to_sharded: part_reads(engine, rank, to_sharded=to_sharded) for to_sharded in (True, False)
        }

    def batches(self, to_sharded: bool) -> list[Batch]:
        """Return what is copied from each rank, in the order of their first parts."""
        by_source: dict[int, list[PartRead]] = {}
        for one in self._parts[to_sharded]:
            by_source.setdefault(one.source, []).append(one)
        return [
            Batch(source, parts, tuple(self._sums[one.layer, one.expert][one.part] for one in parts))
            for source, parts in by_source.items()
        ]

    def damage(self, to_sharded: bool) -> None:
        """Overwrite all cells that a turn fills."""
        for cell in self._cells[to_sharded]:
            self.arena.cell(cell)[:] = _DAMAGED

    def check(self, to_sharded: bool) -> None:
        """Compare what a turn has filled. RuntimeError names the first part that differs."""
        for one in self._parts[to_sharded]:
            cell = self.arena.cell(one.read.cell)
            found = piece_checksums(cell, self.form, one.read.piece, sharded=to_sharded)
            if found != self._sums[one.layer, one.expert][one.part]:
                raise RuntimeError(f"part {one.part} of expert {one.layer}/{one.expert} is not what was sent")


def _say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def _line() -> bytes:
    return await asyncio.to_thread(sys.stdin.buffer.readline)


async def serve(job: CopyingJob, rank: int) -> None:
    """Carry out orders until standard input ends."""
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    engine = forms(layers=job.shape.layers, experts=job.shape.experts, ranks=job.ranks)
    memory = Memory(job.shape, engine, rank)
    config = TransferConfig(
        backend=job.backend,  # type: ignore[arg-type]
        piece_bytes=job.piece_bytes,
        niceness=0,
        lease_seconds=1e6,
        min_seconds=600.0,
    )
    batches = {to_sharded: memory.batches(to_sharded) for to_sharded in (True, False)}
    async with AsyncExitStack() as stack:
        transfers = await open_transfers(config, memory.arena, agent_name(ENGINE, rank), one_machine=True)
        # A plain loop maps the memory, whichever backend the product uses.
        address = SharedTransfer(memory.arena, config).address(own_address(memory.arena))
        for one in transfers:
            stack.push_async_callback(one.close)
            one.busy(True)
            address = one.address(address)
        _say(address)
        addresses = msgspec.json.decode(await _line(), type=list[MemoryAddress])
        product = Product(
            partial(CopyRunner, await _context(stack, job, rank, addresses), memory.arena),
            rank,
            addresses,
            batches,
            Staging(transfers=transfers, config=config),
        )
        stack.callback(product.close)
        await product.lease()
        peers = [None if at == rank else plainly_mapped(one) for at, one in enumerate(addresses)]
        plain = Plain(memory.arena, peers, batches, job.piece_bytes)
        stack.callback(plain.close)
        ways: dict[str, Callable[[bool], Awaitable[None]]] = {
            "damage": lambda to_sharded: asyncio.to_thread(memory.damage, to_sharded),
            "landed": partial(product.turn, verify=False),
            "verified": partial(product.turn, verify=True),
            "plain": plain.turn,
            "plain again": plain.turn,
        }
        if job.backend == "shared":
            dist.init_process_group("gloo", f"file://{job.folder}/gloo", rank=rank, world_size=job.ranks)
            stack.callback(dist.destroy_process_group)
            ways["gloo"] = Gloo(memory.arena, engine, rank).turn
        _say(Done(time.monotonic()))
        while line := await _line():
            order = msgspec.json.decode(line, type=Order)
            while time.monotonic() < order.at:
                pass
            await ways[order.way](order.to_sharded)
            ended = time.monotonic()
            if order.check:
                memory.check(order.to_sharded)
            _say(Done(ended))


async def _context(
    stack: AsyncExitStack, job: CopyingJob, rank: int, addresses: Sequence[MemoryAddress]
) -> RankContext:
    """Return a context whose bus grants leases in place of the other ranks."""
    bus, subjects = MemoryBus(MemoryBroker()), Subjects()

    async def grant(request: Message) -> Message:
        assert isinstance(request, LeaseExperts)
        return ExpertsLeased(
            worker_id=WORKER,
            rank=request.rank,
            lease=1,
            memory=addresses[request.rank],
            cells=(),
            checksums=(),
        )

    for other in range(job.ranks):
        await stack.enter_async_context(bus.serve(subjects.leases(ENGINE, WORKER, other), grant))
    about = EngineDescription(
        model="random",
        rank=rank,
        ranks=job.ranks,
        block_size=16,
        kv_blocks=2,
        max_context=32,
        max_batch_tokens=32,
        capabilities=Capabilities(),
        shape=job.shape,
    )
    return RankContext(bus, subjects, ENGINE, WORKER, about)


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1].encode(), type=CopyingJob), int(sys.argv[2])))
