"""Expert reads from another rank, compared with the simplest loop over NIXL and with memcpy, alternating in
one run.

Source and reader are two processes; all memory was written before. `raw` is the faster of two simple loops
(benchmarks/rig/raw_nixl.py): the same requests of at most 16 MiB, the same polling, no thread, no deadline,
no quarantine. `ours` is one `Transfer.pull` of all cells, awaited on an event loop; `verified` adds the
checksums of every tensor, computed in another thread as bytes land. `memcpy` is a plain loop of NumPy copies
of the same bytes, out of a mapping of the same memory: copy speed varies by a tenth and more with the
location of the pages. A pull reads what a handover moves together: a layer's experts if they are small, one
if it is large. A separate thread reads, so that the event loop goes on. The floor of that is printed too: the
same loop, raw or memcpy, in a thread that the event loop wakes and waits for. A target is met beside either.
UCX is used with its defaults (within a machine: the kernel copies between processes) and with tcp alone,
which stands for a network.

    python -m benchmarks.transfer --quick
"""

import asyncio
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.rig.raw_nixl import RawLoop
from benchmarks.rig.report import AsJson, Check, Quick, Report, Target, median
from engine_adapter.config import TransferConfig
from engine_adapter.transfer.address_validation import own_address
from engine_adapter.transfer.landed_checksums import LandedChecksums, ReadPart
from engine_adapter.transfer.mapped_memory import MappedCells, laid_out
from engine_adapter.transfer.nixl import NixlTransfer
from engine_adapter.transfer.parts import CellFormat
from engine_adapter.transfer.port import Pull, Transfer
from engine_adapter.transfer.shared_memory import SharedTransfer
from fleet.requests.handovers import MemoryAddress
from fleet.sharding import ALL_PARTS

MIB = 1 << 20
SIZES = {1 * MIB: 64, 16 * MIB: 8, 176 * MIB: 1}
"""by bytes of a cell: cells read at once"""
MODES = {"default": {}, "tcp": {"UCX_TLS": "tcp,self"}}
ROUNDS = {"default": (61, 15), "tcp": (31, 5)}
"""rounds of a full run, and of a quick one"""
CONFIG = TransferConfig(niceness=0)
COPY, VERIFIED, SHARED = 0.9, 0.8, 0.9
"""least ratios to the raw loop, and to memcpy"""
PATIENCE = 60.0
Timed = dict[str, list[float]]


def memory_of(cell_bytes: int) -> MappedCells:
    scales = cell_bytes // 4096
    return MappedCells(
        laid_out([("weights", "uint8", (cell_bytes - scales,)), ("scales", "uint8", (scales,))]),
        SIZES[cell_bytes],
    )


async def serve(cell_bytes: int) -> None:
    """Act as the source until standard input ends."""
    memory = memory_of(cell_bytes)
    for cell in range(memory.cells):
        memory.cell(cell)[:] = np.random.default_rng(cell).integers(0, 256, cell_bytes, np.uint8)
    over_network, shared = NixlTransfer(memory, CONFIG, "source"), SharedTransfer(memory, CONFIG)
    await over_network.open()
    over_network.busy(True)
    print(msgspec.json.encode(shared.address(over_network.address(own_address(memory)))).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await over_network.close()


def plainly_mapped(address: MemoryAddress) -> NDArray[np.uint8]:
    with open(f"/proc/{address.pid}/fd/{address.descriptor}", "rb") as file:
        return np.frombuffer(
            mmap.mmap(file.fileno(), address.cells * address.cell_bytes, prot=mmap.PROT_READ), np.uint8
        )


class Reader:
    """Time every method once per round, each round in another order."""

    def __init__(self, cell_bytes: int, address: MemoryAddress, with_shared: bool) -> None:
        self.memory = memory_of(cell_bytes)
        self._form = CellFormat.of(self.memory)
        self._address = address
        self._theirs = plainly_mapped(address)
        self._raw = RawLoop(self.memory, address, self.memory.cells, CONFIG.piece_bytes)
        self._nixl = NixlTransfer(self.memory, CONFIG, "reader")
        self._shared = SharedTransfer(self.memory, CONFIG)
        self._threads, self._reading = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.asked: dict[str, Callable[[], Awaitable[None]]] = {
            "raw": self._plain(self._raw.read),
            "raw prepared": self._plain(self._raw.read_prepared),
            "ours": lambda: self._pull(self._nixl, self.memory.cells),
            "verified": self._verified,
            "raw, one": self._plain(RawLoop(self.memory, address, 1, CONFIG.piece_bytes).read),
            "ours, one": lambda: self._pull(self._nixl, 1),
            "raw, thread": self._on_thread(self._raw.read),
        }
        if with_shared:
            self.asked |= {
                "memcpy": self._plain(self._memcpy),
                "memcpy, thread": self._on_thread(self._memcpy),
                "shared": lambda: self._pull(self._shared, self.memory.cells),
            }

    async def times(self, rounds: int) -> Timed:
        """Return seconds of each, by round; the first round, which makes the connections, does not count."""
        found: Timed = {name: [] for name in self.asked}
        for number in range(rounds + 1):
            names = list(self.asked)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                began = time.perf_counter()
                await self.asked[name]()
                if number:
                    found[name].append(time.perf_counter() - began)
        for transfer in (self._nixl, self._shared):
            await transfer.close()
        return found

    def _plain(self, read: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            read()

        return run

    def _on_thread(self, read: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        """The least that any transfer does: the event loop wakes a thread, and waits for it."""

        async def run() -> None:
            await asyncio.get_running_loop().run_in_executor(self._reading, read)

        return run

    async def _pull(self, transfer: Transfer, cells: int) -> None:
        await transfer.pull(self._address, self._whole(cells), PATIENCE)

    def _whole(self, cells: int) -> list[Pull]:
        """Return reads of the first cells, whole."""
        return [Pull(cell, 0, cell, 0, self.memory.cell_bytes) for cell in range(cells)]

    async def _verified(self) -> None:
        """Read with checksums, as `CopyRunner` does."""
        cells = range(self.memory.cells)
        parts = [ReadPart(cell, ALL_PARTS, sharded=False) for cell in cells]
        found, loop = LandedChecksums(self.memory, self._form, parts), asyncio.get_running_loop()
        await self._nixl.pull(
            self._address,
            self._whole(len(cells)),
            PATIENCE,
            lambda size: loop.run_in_executor(self._threads, found.advance, size),
        )
        await loop.run_in_executor(self._threads, found.advance, found.bytes)
        assert all(found.of(cell, ALL_PARTS) is not None for cell in cells)

    def _memcpy(self) -> None:
        size = self.memory.cell_bytes
        for cell in range(self.memory.cells):
            self.memory.cell(cell)[:] = self._theirs[cell * size : (cell + 1) * size]


def measure(cell_bytes: int, rounds: int, with_shared: bool) -> Timed:
    """Act as the reader, with a source process."""
    source = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transfer", "--serve", str(cell_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert source.stdin is not None
    assert source.stdout is not None
    try:
        address = msgspec.json.decode(source.stdout.readline(), type=MemoryAddress)
        return asyncio.run(Reader(cell_bytes, address, with_shared).times(rounds))
    finally:
        source.stdin.close()
        source.wait(PATIENCE)


def measured(cell_bytes: int, mode: str, rounds: int) -> Timed:
    """Return seconds of each method by round, in a separate process, since UCX reads its transports only
    once."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.transfer",
        "--read",
        f"{cell_bytes},{rounds},{int(mode == 'default')}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **MODES[mode]}
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    found: Timed = json.loads(next(line for line in said.splitlines() if line.startswith(b"{")))
    return found


def beside(other: list[float], ours: list[float]) -> float:
    """Return Roost's speed relative to another: the median over rounds, in each of which both ran within a
    moment."""
    return median([theirs / taken for theirs, taken in zip(other, ours, strict=True)])


Serve = typer.Option("", "--serve", hidden=True)
Read = typer.Option("", "--read", hidden=True)


def main(
    quick: bool = Quick, as_json: bool = AsJson, check: bool = Check, serve_: str = Serve, read: str = Read
) -> None:
    """Measure GB/s of expert reads from another process: Roost's transfers, a plain loop over NIXL, and
    memcpy."""
    if serve_:
        asyncio.run(serve(int(serve_)))
        return
    if read:
        cell_bytes, rounds, with_shared = (int(part) for part in read.split(","))
        print(json.dumps(measure(cell_bytes, rounds, bool(with_shared))))
        return
    report = Report(
        "reading experts from another process, GB/s (medians; ratios: of rounds)",
        [
            "UCX, experts x MiB",
            "raw",
            "ours",
            "verified",
            "memcpy",
            "shared",
            "ours / raw",
            "verified / raw",
            "shared / memcpy",
            "raw in a thread / raw",
            "memcpy in a thread / memcpy",
        ],
    )
    ratios: dict[str, list[tuple[float, str]]] = {"copy": [], "verified": [], "shared": []}
    for mode in MODES:
        for cell_bytes, cells in SIZES.items():
            _add(
                report,
                ratios,
                f"{mode}, {cells} x {cell_bytes // MIB}",
                cells * cell_bytes,
                measured(cell_bytes, mode, ROUNDS[mode][quick]),
            )
    report.notes.append(f"load average {os.getloadavg()[0]:.1f}")
    (shared, of_shared), (verified, of_verified), (copy, of_copy) = (
        min(ratios[name]) for name in ("shared", "verified", "copy")
    )
    report.targets += [
        Target(f"shared memory beside memcpy, or it in a thread, least ({of_shared})", shared, SHARED),
        Target(f"copy with verification beside the raw loop, least ({of_verified})", verified, VERIFIED),
        Target(f"copy beside the raw loop, or it in a thread, least ({of_copy})", copy, COPY),
    ]
    report.finish(as_json=as_json, check=check)


def _add(
    report: Report, ratios: dict[str, list[tuple[float, str]]], name: str, total: int, seconds: Timed
) -> None:
    raw = min(seconds["raw"], seconds["raw prepared"], key=median)
    floor = {"raw": beside(raw, seconds["raw, thread"])}
    found = {"copy": beside(raw, seconds["ours"]), "verified": beside(raw, seconds["verified"])}
    least = {**found, "copy": max(found["copy"], beside(seconds["raw, thread"], seconds["ours"]))}
    if "shared" in seconds:
        floor["memcpy"] = beside(seconds["memcpy"], seconds["memcpy, thread"])
        found["shared"] = beside(seconds["memcpy"], seconds["shared"])
        least["shared"] = max(found["shared"], beside(seconds["memcpy, thread"], seconds["shared"]))
    for kind, ratio in least.items():
        ratios[kind].append((ratio, name))
    taken = {"raw": raw, **{kind: seconds.get(kind, []) for kind in ("ours", "verified", "memcpy", "shared")}}
    rates = [total / median(each) / 1e9 if each else "" for each in taken.values()]
    report.add(
        name,
        *rates,
        *(found.get(kind, "") for kind in ("copy", "verified", "shared")),
        *(floor.get(kind, "") for kind in ("raw", "memcpy")),
    )
    alone = [1e3 * median(seconds[kind]) for kind in ("ours, one", "raw, one")]
    report.notes.append(
        f"{name}: one expert alone takes {alone[0]:.3f} ms, by the raw loop {alone[1]:.3f} ms"
    )


if __name__ == "__main__":
    typer.run(main)
