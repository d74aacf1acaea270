"""Transfers between ranks of one process, with fault injection. The test and simulation twin of the real
transfer backends.

A `MemoryFabric` connects the ranks. It can stop a rank (reads from it hang until it resumes, as with a
stopped process) or kill it (all reads fail, including hanging ones). A single pull can be given a
`PullFault`. All delays use the event loop's clock, which a test may speed up.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import msgspec

from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.address_validation import OpenRead, check_read, own_address
from engine_adapter.transfer.port import AddressRefused, Landed, PeerGone, Pull, Pulled, TransferError
from fleet.requests.handovers import MemoryAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFault:
    """Fault injected into one pull."""

    delay_seconds: float = 0.0
    """Delay until the bytes land. A delay beyond the deadline makes the pull overdue, and its bytes land
    late."""
    broken: bool = False
    """The connection breaks after half of the first range."""
    corrupt: int | None = None
    """Offset in each range, modulo its size, of a byte whose bits are all flipped."""


class _Rank:
    def __init__(self, memory: ExpertMemory) -> None:
        self.memory = memory
        self.running = asyncio.Event()
        self.running.set()
        self.killed = asyncio.Event()


class MemoryFabric:
    """Ranks of one process that can read each other, by agent name."""

    def __init__(self) -> None:
        self._names = count()
        self._ranks: dict[str, _Rank] = {}

    def join(self, memory: ExpertMemory) -> "MemoryTransfer":
        """Add a rank with this memory, and return its transfer backend."""
        name = f"memory.{next(self._names)}"
        self._ranks[name] = _Rank(memory)
        return MemoryTransfer(self, name, memory)

    def rank(self, name: str) -> _Rank | None:
        """Return a rank by agent name. None: it never joined."""
        return self._ranks.get(name)

    def stop(self, transfer: "MemoryTransfer") -> None:
        """Make reads from this rank hang."""
        self._ranks[transfer.agent].running.clear()

    def resume(self, transfer: "MemoryTransfer") -> None:
        """Resume reads from this rank, including abandoned ones."""
        self._ranks[transfer.agent].running.set()

    def kill(self, transfer: "MemoryTransfer") -> None:
        """Make every read from this rank fail, as if its process had died."""
        self._ranks[transfer.agent].killed.set()


class MemoryTransfer:
    """Transfer backend of one rank in a `MemoryFabric`."""

    name = "memory"
    opened_bytes = 0

    def __init__(self, fabric: MemoryFabric, agent: str, memory: ExpertMemory) -> None:
        self.agent = agent
        self.faults: deque[PullFault] = deque()
        """Faults of the next pulls, one each."""
        self.requested: list[tuple[str, tuple[Pull, ...]]] = []
        """All pulls so far: agent that was read from, and ranges."""
        self.forgotten: list[str] = []
        """Agents passed to `forget`."""
        self.is_busy = False
        """Last argument of `busy`."""
        self._fabric = fabric
        self._memory = memory
        self._own = own_address(memory)
        self._tasks: set[asyncio.Task[None]] = set()

    def address(self, address: MemoryAddress) -> MemoryAddress:
        return msgspec.structs.replace(address, agent=self.agent)

    def reaches(self, address: MemoryAddress) -> bool:
        return self._fabric.rank(address.agent) is not None

    async def pull(
        self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float, landed: Landed | None = None
    ) -> Pulled:
        check_read(address, pulls, self._own)
        peer = self._fabric.rank(address.agent)
        if peer is None:
            raise AddressRefused(f"agent {address.agent!r} is not of this process")
        self.requested.append((address.agent, tuple(pulls)))
        fault = self.faults.popleft() if self.faults else PullFault()
        reading = OpenRead()
        task = asyncio.create_task(
            self._carry_out(reading, peer, tuple(pulls), fault, landed),
            name=f"{self.agent} reads from {address.agent}",
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await reading.wait(seconds, f"reading {len(pulls)} ranges from {address.agent}")

    def forget(self, address: MemoryAddress) -> None:
        self.forgotten.append(address.agent)

    def busy(self, active: bool) -> None:
        self.is_busy = active

    async def close(self) -> None:
        """Cancel the pending reads. Nothing lands any more, and hanging reads never settle."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry_out(
        self,
        reading: OpenRead,
        peer: _Rank,
        pulls: tuple[Pull, ...],
        fault: PullFault,
        landed: Landed | None,
    ) -> None:
        began = asyncio.get_running_loop().time()
        try:
            await self._await_running(peer, fault.delay_seconds)
            self._land(peer, pulls, fault, landed)
        except TransferError as error:
            reading.end(error)
        else:
            total = sum(pull.bytes for pull in pulls)
            reading.end(Pulled(total, asyncio.get_running_loop().time() - began))

    async def _await_running(self, peer: _Rank, delay: float) -> None:
        killed = asyncio.create_task(peer.killed.wait(), name=f"{self.agent} waits for its peer to die")
        running = asyncio.create_task(peer.running.wait(), name=f"{self.agent} waits for its peer to resume")
        try:
            await asyncio.wait((killed,), timeout=delay)
            await asyncio.wait((killed, running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            killed.cancel()
            running.cancel()
        if peer.killed.is_set():
            raise PeerGone("the rank that was read from is dead: read another replica")

    def _land(self, peer: _Rank, pulls: tuple[Pull, ...], fault: PullFault, landed: Landed | None) -> None:
        if fault.broken and pulls:
            self._copy(peer, pulls[0]._replace(bytes=pulls[0].bytes // 2))
            raise PeerGone("the connection broke after half a range: read another replica")
        size = 0
        for pull in pulls:
            self._copy(peer, pull)
            if fault.corrupt is not None:
                self._memory.cell(pull.cell)[pull.offset + fault.corrupt % pull.bytes] ^= 0xFF
            size += pull.bytes
            if landed is not None:
                landed(size)

    def _copy(self, peer: _Rank, pull: Pull) -> None:
        theirs = peer.memory.cell(pull.source)[pull.source_offset : pull.source_offset + pull.bytes]
        self._memory.cell(pull.cell)[pull.offset : pull.offset + pull.bytes] = theirs
