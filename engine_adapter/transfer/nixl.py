"""Reads the experts of other ranks over NIXL: within a machine by the fastest way that UCX finds, and between machines.

What NIXL needs, and its API does not say:

- An agent belongs to one thread (`worker`), which also makes its progress: its own progress thread would take a whole core.
- A request has no deadline and cannot be cancelled: releasing one that is under way neither stops it nor waits for it. Only a request that is done, or has
  failed, is released here.
- Errors are raised, not returned; a failed peer stays failed until it is removed and added again.
- Memory that was registered stays so, and mapped, until the process ends: a peer's late request for memory that is gone kills the process that it is sent to.
- It checks no address: descriptors are made of numbers that were checked, and of no others.
"""

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import numpy as np

from engine_adapter.config import TransferConfig
from engine_adapter.engine import ExpertMemory
from engine_adapter.transfer.nixl_loader import Nixl, NixlMissing, load_nixl
from engine_adapter.transfer.port import AddressRefused, PeerGone, Pull, Pulled, TransferError
from engine_adapter.transfer.read_validation import own_address, refuse
from engine_adapter.transfer.reader_thread import Part, ReaderThread
from fleet.events import MemoryAddress

_GREETING_BYTES = 4096
_MOST_METADATA, _MOST_NAME = 1 << 16, 256
_KIND = "DRAM"
_FOR_LIFE: list[object] = []
"""agents, and the memory that they registered: neither may go before the process does"""
_log = logging.getLogger(__name__)


class NixlTransfer:
    """The `Transfer` over NIXL. Its agent is made when it is opened, or at the first pull."""

    name = "nixl"

    def __init__(self, memory: ExpertMemory, config: TransferConfig, agent: str) -> None:
        """agent: a name that no other had (`agents.agent_name`)."""
        self._own = own_address(memory)
        self._way = _NixlWay(memory, agent)
        self._worker = ReaderThread(self._way, config, memory.cell_bytes)

    async def open(self) -> None:
        """Be reachable: until then `address` adds nothing. TransferError when NIXL is missing, or finds no way to speak."""
        await self._worker.open()

    def address(self, address: MemoryAddress) -> MemoryAddress:
        if not self._worker.opened:
            return address
        return msgspec.structs.replace(address, agent=self._way.agent_name, metadata=self._way.metadata, kind=_KIND, device=0)

    def reaches(self, address: MemoryAddress) -> bool:
        return bool(address.agent and address.metadata) and address.kind == _KIND

    async def pull(self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float) -> Pulled:
        """No cells at all: only the connection is made."""
        refuse(address, pulls, self._own)
        if not self.reaches(address):
            raise AddressRefused(f"agent {address.agent[:64]!r} with memory of kind {address.kind[:64]!r} cannot be read by NIXL here; {_KIND} can")
        if len(address.metadata) > _MOST_METADATA or len(address.agent) > _MOST_NAME or address.device != 0:
            raise AddressRefused(f"agent {address.agent[:64]!r}: {len(address.metadata)} bytes of metadata, device {address.device}: that is none of ours")
        return await self._worker.read(address, pulls, seconds)

    def forget(self, address: MemoryAddress) -> None:
        self._worker.forget(address)

    def busy(self, active: bool) -> None:
        self._worker.help(active)

    async def close(self) -> None:
        await self._worker.close()


class _NixlWay:
    """An agent, its peers and requests. All of it is the worker's thread's, but for what says otherwise."""

    name = "NIXL"
    idle_seconds = 0.02

    def __init__(self, memory: ExpertMemory, agent: str) -> None:
        self.agent_name = agent
        self.metadata = b""
        """what peers need to reach the agent; for any thread, once it is open"""
        self._memory = memory
        self._greeting = np.zeros(_GREETING_BYTES, np.uint8)
        self._nixl: Nixl
        self._agent: Any = None
        self._added: set[str] = set()
        """names of peers"""
        self._trouble = ""

    def open(self) -> None:
        try:
            nixl = load_nixl()
        except NixlMissing as error:
            raise TransferError(str(error)) from error
        memory, size = self._memory, self._memory.cells * self._memory.cell_bytes
        try:
            agent = nixl.agent(self.agent_name, nixl.config(enable_prog_thread=False, backends=[]))
            agent.create_backend("UCX", {})
            for base, length in ((memory.base, size), (self._greeting.ctypes.data, _GREETING_BYTES)):
                agent.register_memory([(base, length, 0, "")], _KIND, backends=["UCX"])
            self.metadata = bytes(agent.get_agent_metadata())
        except nixl.errors as error:
            raise TransferError(f"NIXL cannot speak here ({error}): UCX_TLS, if it is set, must name tcp or rc beside self") from error
        self._nixl, self._agent = nixl, agent
        _FOR_LIFE.append((agent, memory, self._greeting))
        _log.info("nixl: agent %s of %s, %d MiB registered", self.agent_name, nixl.variant, size >> 20)

    def key(self, address: MemoryAddress) -> Hashable:
        return address.agent

    def incarnation(self, address: MemoryAddress) -> Hashable:
        return address.metadata

    def connect(self, address: MemoryAddress) -> "_Peer":
        if address.agent == self.agent_name:
            raise AddressRefused(f"agent {address.agent!r} is our own")
        try:
            added = self._agent.add_remote_agent(address.metadata)
        except self._nixl.unreadable as error:
            raise AddressRefused(f"metadata of agent {address.agent!r} is not NIXL's ({error}): run one version of NIXL on all ranks") from error
        except self._nixl.errors as error:
            self.disconnect(address)
            raise PeerGone(f"agent {address.agent} cannot be connected ({error}): it is dead, or out of reach; read another replica") from error
        name = added.decode(errors="replace") if isinstance(added, bytes) else str(added)
        if name != address.agent:
            if name not in self._added:  # the agent of that name may be a peer that is read from just now
                self._agent.remove_remote_agent(name)
            raise AddressRefused(f"metadata of agent {address.agent!r} is of {name!r}: the rank that said so is at fault")
        self._added.add(name)
        return _Peer(self, address)

    def disconnect(self, address: MemoryAddress) -> None:
        self._added.discard(address.agent)
        try:
            self._agent.remove_remote_agent(address.agent)
        except self._nixl.errors as error:
            _log.warning("nixl: agent %s could not be removed: %s", address.agent, error)

    def help(self) -> None:
        """Progress, which is what peers that connect, or read over tcp, wait for."""
        try:
            self._agent.get_new_notifs()
        except self._nixl.errors as error:
            if str(error) != self._trouble:  # once, and not some thousand times a second
                _log.warning("nixl: agent %s makes no progress: %s", self.agent_name, error)
            self._trouble = str(error)

    def begin(self, agent: str, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]) -> object | None:
        """Read (address, bytes, device) of an agent into the same numbers of bytes here."""
        try:
            here, there = (self._agent.get_xfer_descs(np.array(rows, np.uint64), _KIND) for rows in (local, remote))
            request = self._agent.initialize_xfer("READ", here, there, agent, backends=["UCX"])
        except self._nixl.errors as error:
            raise AddressRefused(f"agent {agent} has no memory at {remote[0][0]:#x} ({error}): the rank that said so is at fault") from error
        try:
            return None if self._done(agent, request, self._agent.transfer(request)) else request
        except self._nixl.errors as error:
            raise self._gone(agent, error) from error

    def check(self, agent: str, request: object) -> bool:
        """Whether it is done, and then it is released."""
        try:
            return self._done(agent, request, self._agent.check_xfer_state(request))
        except self._nixl.errors as error:
            raise self._gone(agent, error) from error

    def own(self, part: Part) -> tuple[int, int, int]:
        return self._memory.base + part.cell * self._memory.cell_bytes + part.offset, part.size, 0

    def greeting(self) -> list[tuple[int, int, int]]:
        return [(self._greeting.ctypes.data, min(_GREETING_BYTES, self._memory.cell_bytes), 0)]

    def _gone(self, agent: str, error: Exception) -> PeerGone:
        """Any error ends the connection: a peer of which one request failed is not to be trusted with the next."""
        if isinstance(error, self._nixl.gone):
            return PeerGone(f"agent {agent} is not there any more ({error}): read another replica")
        return PeerGone(f"agent {agent} cannot be read ({type(error).__name__}: {error}); it is connected anew when it is next asked for")

    def _done(self, agent: str, request: Any, state: str) -> bool:
        if state == "PROC":
            return False
        request.release()
        if state != "DONE":
            raise PeerGone(f"NIXL says {state!r} of a read from {agent}: read another replica")
        return True


class _Peer:
    """A remote agent that was added."""

    def __init__(self, way: _NixlWay, address: MemoryAddress) -> None:
        self._way = way
        self._address = address

    def greet(self) -> object | None:
        """A small read: it is what brings up the connection, and what follows is not held up by it."""
        here = self._way.greeting()
        return self._way.begin(self._address.agent, here, [(self._address.base, here[0][1], 0)])

    def post(self, address: MemoryAddress, parts: Sequence[Part]) -> object | None:
        there = [(address.base + part.source * address.cell_bytes + part.offset, part.size, address.device) for part in parts]
        return self._way.begin(address.agent, [self._way.own(part) for part in parts], there)

    def check(self, request: object) -> bool:
        return self._way.check(self._address.agent, request)
