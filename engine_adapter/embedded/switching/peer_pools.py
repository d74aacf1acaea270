"""KV memory of the other ranks of this engine, mapped so that their units can be read."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from engine_adapter.embedded.kv_pool import KvPool
from engine_adapter.embedded.step_sync import RankGroup
from engine_adapter.kv_switch.kv_state import UnitRead
from engine_adapter.transfer.port import TransferError
from engine_adapter.transfer.rate_limit import RateLimit, lower_priority
from engine_adapter.transfer.shared_memory import map_memory
from fleet.requests.handovers import MemoryAddress

PIECE_BYTES = 1 << 20
"""Bytes that are copied ahead without a pause."""
NICENESS = 10
"""Of the thread that copies ahead: computing goes first."""


class PeerPools:
    """KV pools of all ranks of an engine on one machine, by rank."""

    def __init__(self, own: KvPool, theirs: Sequence[NDArray[np.uint8]]) -> None:
        """theirs: uint8 [units, unit_bytes] of every rank. That of this rank is not read."""
        self._own = own
        self._theirs = theirs

    @classmethod
    def meet(cls, own: KvPool, group: RankGroup) -> "PeerPools":
        """Map the pools of all ranks. All ranks call it together. TransferError when a pool cannot be mapped,
        on every rank alike."""
        inode = os.fstat(own.descriptor).st_ino if own.descriptor >= 0 else 0
        here = own.descriptor, os.getpid(), inode
        found: list[NDArray[np.uint8]] = []
        failure: TransferError | None = None
        for number, address in enumerate(group.gather(here)):
            try:
                found.append(np.empty((0, 0), np.uint8) if number == group.rank else _mapped(own, *address))
            except TransferError as error:
                failure = error
        failed = [number for number, (code,) in enumerate(group.gather([failure is not None])) if code]
        if failed:
            raise TransferError(
                f"rank {failed[0]} cannot map the KV memory of the others: {failure or 'see its log'}"
            ) from failure
        return cls(own, found)

    @property
    def unit_bytes(self) -> int:
        return self._own.unit_bytes

    def read(self, reads: Sequence[UnitRead]) -> int:
        """Copy units of other ranks into own ones, and return the bytes. Thread-safe for different units."""
        for source_rank, source, unit in reads:
            self._own.unit(unit)[:] = self._theirs[source_rank][source]
        return len(reads) * self._own.unit_bytes


class UnitReader:
    """Thread that copies units ahead of a switch, at a limited rate. Its methods are for the step thread."""

    def __init__(
        self, pools: PeerPools, bytes_per_second: int | None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """on_end: called by the thread after the last of the ordered reads has ended."""
        self.bytes = 0
        """Ordered since the thread began."""
        self._pools = pools
        self._limit = RateLimit(bytes_per_second, PIECE_BYTES)
        self._on_end = on_end
        self._orders: SimpleQueue[tuple[int, UnitRead] | None] = SimpleQueue()
        self._ended: deque[int] = deque()
        self._hurried = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, number: int, read: UnitRead) -> None:
        """Copy a unit after those of earlier calls. `ended` returns the number once it is there."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="KV units are read ahead", daemon=True)
            self._thread.start()
        self._orders.put((number, read))
        self.bytes += self._pools.unit_bytes

    def ended(self) -> list[int]:
        """Return the numbers of reads that have ended since the last call, in order."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def hurry(self) -> None:
        """Copy what has been ordered without a limit: the switch waits for it."""
        self._hurried.set()

    def close(self) -> None:
        """End the thread behind what has been ordered, without a limit."""
        if self._thread is not None:
            self.hurry()
            self._orders.put(None)
            self._thread.join()
            self._thread = None
            self._hurried.clear()
        self._ended.clear()
        self.bytes = 0

    def _run(self) -> None:
        lower_priority(NICENESS)
        size = self._pools.unit_bytes
        # NumPy holds the GIL while it copies units of usual sizes, so pieces are short.
        at_once = max(1, self._limit.piece_bytes(time.monotonic()) // size)
        done = 0
        while (order := self._orders.get()) is not None:
            if done % at_once == 0:
                self._hurried.wait(self._limit.wait(time.monotonic()))
            self._limit.begin(size, time.monotonic())
            number, read = order
            self._pools.read([read])
            self._ended.append(number)
            done += 1
            if self._orders.empty():
                self._on_end()


def _mapped(own: KvPool, descriptor: int, pid: int, inode: int) -> NDArray[np.uint8]:
    address = MemoryAddress(
        cells=own.units,
        cell_bytes=own.unit_bytes,
        layout="",
        base=0,
        pid=pid,
        descriptor=descriptor,
        inode=inode,
    )
    return map_memory(address).reshape(own.units, own.unit_bytes)
