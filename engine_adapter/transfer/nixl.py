"""NIXL backend: reads the experts of other ranks, within a machine by the fastest path that UCX finds, and
between machines.

Properties of NIXL that its API does not document:

- An agent belongs to one thread (`reader_thread`), which also drives its progress. NIXL's own progress thread
  would occupy a whole core.
- A request has no deadline and cannot be cancelled. Releasing a request in flight neither stops it nor waits
  for it. So requests are released here only when they are done or have failed.
- Errors are raised, not returned. A failed peer stays failed until it is removed and added again.
- Registered memory must stay registered and mapped until the process ends. A peer's late request for freed
  memory kills the process that it is sent to.
- NIXL checks no addresses. Descriptors are built only from validated numbers.
"""

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import numpy as np

from engine_adapter.config import TransferConfig
from engine_adapter.engine import ExpertMemory
from engine_adapter.resident_memory import resident_memory
from engine_adapter.transfer.address_validation import check_read, own_address
from engine_adapter.transfer.nixl_loader import Nixl, NixlMissing, load_nixl
from engine_adapter.transfer.port import AddressRefused, Landed, PeerGone, Pull, Pulled, TransferError
from engine_adapter.transfer.rate_limit import RateLimit
from engine_adapter.transfer.reader_thread import ReaderThread
from fleet.requests.handovers import MemoryAddress

_GREETING_BYTES = 4096
_MAX_METADATA, _MAX_NAME = 1 << 16, 256
_KIND = "DRAM"
_KEPT_ALIVE: list[object] = []
"""Agents and their registered memory. Both must exist until the process ends."""
_log = logging.getLogger(__name__)


class NixlTransfer:
    """`Transfer` over NIXL. Its agent is created by `open` or at the first pull."""

    name = "nixl"

    def __init__(
        self, memory: ExpertMemory, config: TransferConfig, agent: str, limit: RateLimit | None = None
    ) -> None:
        """agent: a unique name (`nixl_loader.agent_name`). limit: as for `ReaderThread`."""
        self._own = own_address(memory)
        self._backend = _NixlBackend(memory, agent)
        self._worker = ReaderThread(self._backend, config, limit)

    async def open(self) -> None:
        """Make this rank reachable. Before that, `address` adds nothing. TransferError when NIXL is missing
        or finds no usable network transport."""
        await self._worker.open()

    @property
    def opened_bytes(self) -> int:
        return self._backend.opened_bytes

    def address(self, address: MemoryAddress) -> MemoryAddress:
        if not self._worker.opened:
            return address
        return msgspec.structs.replace(
            address, agent=self._backend.agent_name, metadata=self._backend.metadata, kind=_KIND, device=0
        )

    def reaches(self, address: MemoryAddress) -> bool:
        return bool(address.agent and address.metadata) and address.kind == _KIND

    async def pull(
        self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float, landed: Landed | None = None
    ) -> Pulled:
        """Read ranges of cells. An empty list only establishes the connection."""
        check_read(address, pulls, self._own)
        if not self.reaches(address):
            raise AddressRefused(
                f"agent {address.agent[:64]!r} with memory of kind {address.kind[:64]!r} cannot be read by"
                f" NIXL here; {_KIND} can"
            )
        if len(address.metadata) > _MAX_METADATA or len(address.agent) > _MAX_NAME or address.device != 0:
            raise AddressRefused(
                f"agent {address.agent[:64]!r}: {len(address.metadata)} bytes of metadata, device"
                f" {address.device}: not one of ours"
            )
        return await self._worker.read(address, pulls, seconds, landed)

    def forget(self, address: MemoryAddress) -> None:
        self._worker.forget(address)

    def busy(self, active: bool) -> None:
        self._worker.help(active)

    async def close(self) -> None:
        await self._worker.close()


class _NixlBackend:
    """A NIXL agent with its peers and requests. Used only by the reader thread, except where noted."""

    name = "NIXL"
    idle_seconds = 0.02

    def __init__(self, memory: ExpertMemory, agent: str) -> None:
        self.agent_name = agent
        self.metadata = b""
        """Metadata that peers need to reach the agent. Readable from any thread once the agent is open."""
        self.opened_bytes = 0
        """`Transfer.opened_bytes`. Readable from any thread."""
        self._memory = memory
        self._greeting = np.zeros(_GREETING_BYTES, np.uint8)
        self._nixl: Nixl
        self._agent: Any = None
        self._added: set[str] = set()
        """Names of connected peers."""
        self._trouble = ""

    def open(self) -> None:
        before = resident_memory().private
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
            raise TransferError(
                f"NIXL has no usable network transport here ({error}): UCX_TLS, if it is set, must name tcp"
                " or rc beside self"
            ) from error
        self._nixl, self._agent = nixl, agent
        self.opened_bytes = max(resident_memory().private - before, 0)
        _KEPT_ALIVE.append((agent, memory, self._greeting))
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
            raise AddressRefused(
                f"metadata of agent {address.agent!r} is not NIXL's ({error}): run one version of NIXL on all"
                " ranks"
            ) from error
        except self._nixl.errors as error:
            self.disconnect(address)
            raise PeerGone(
                f"agent {address.agent} cannot be connected ({error}): it is dead, or out of reach; read"
                " another replica"
            ) from error
        name = added.decode(errors="replace") if isinstance(added, bytes) else str(added)
        if name != address.agent:
            if name not in self._added:  # The agent of that name may be a peer that is being read from.
                self._agent.remove_remote_agent(name)
            raise AddressRefused(
                f"metadata of agent {address.agent!r} is of {name!r}: the rank that sent it is at fault"
            )
        self._added.add(name)
        return _Peer(self, address)

    def disconnect(self, address: MemoryAddress) -> None:
        self._added.discard(address.agent)
        try:
            self._agent.remove_remote_agent(address.agent)
        except self._nixl.errors as error:
            _log.warning("nixl: agent %s could not be removed: %s", address.agent, error)

    def help(self) -> None:
        """Drive progress. Peers that connect, or that read over TCP, depend on it."""
        try:
            self._agent.get_new_notifs()
        except self._nixl.errors as error:
            if str(error) != self._trouble:  # Log once, not thousands of times a second.
                _log.warning("nixl: agent %s makes no progress: %s", self.agent_name, error)
            self._trouble = str(error)

    def begin(
        self, agent: str, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]
    ) -> object | None:
        """Start reading remote (address, bytes, device) ranges of an agent into local ranges of the same
        sizes."""
        try:
            here, there = (
                self._agent.get_xfer_descs(np.array(rows, np.uint64), _KIND) for rows in (local, remote)
            )
            request = self._agent.initialize_xfer("READ", here, there, agent, backends=["UCX"])
        except self._nixl.errors as error:
            raise AddressRefused(
                f"agent {agent} has no memory at {remote[0][0]:#x} ({error}): the rank that sent the address"
                " is at fault"
            ) from error
        try:
            return None if self._done(agent, request, self._agent.transfer(request)) else request
        except self._nixl.errors as error:
            raise self._gone(agent, error) from error

    def check(self, agent: str, request: object) -> bool:
        """True once the request is done. It is released then."""
        try:
            return self._done(agent, request, self._agent.check_xfer_state(request))
        except self._nixl.errors as error:
            raise self._gone(agent, error) from error

    def own(self, part: Pull) -> tuple[int, int, int]:
        return self._memory.base + part.cell * self._memory.cell_bytes + part.offset, part.bytes, 0

    def greeting(self) -> list[tuple[int, int, int]]:
        return [(self._greeting.ctypes.data, min(_GREETING_BYTES, self._memory.cell_bytes), 0)]

    def _gone(self, agent: str, error: Exception) -> PeerGone:
        """Convert an error to PeerGone. Any error ends the connection, because after one failed request the
        peer cannot be trusted with the next."""
        if isinstance(error, self._nixl.gone):
            return PeerGone(f"agent {agent} has disappeared ({error}): read another replica")
        return PeerGone(
            f"agent {agent} cannot be read ({type(error).__name__}: {error}); the next read reconnects to it"
        )

    def _done(self, agent: str, request: Any, state: str) -> bool:
        if state == "PROC":
            return False
        request.release()
        if state != "DONE":
            raise PeerGone(f"NIXL reports {state!r} for a read from {agent}: read another replica")
        return True


class _Peer:
    """A connected remote agent."""

    def __init__(self, backend: _NixlBackend, address: MemoryAddress) -> None:
        self._backend = backend
        self._address = address

    def greet(self) -> object | None:
        """Start a small read that establishes the connection, so that later reads do not wait for it."""
        here = self._backend.greeting()
        return self._backend.begin(self._address.agent, here, [(self._address.base, here[0][1], 0)])

    def post(self, address: MemoryAddress, parts: Sequence[Pull]) -> object | None:
        there = [
            (
                address.base + part.source * address.cell_bytes + part.source_offset,
                part.bytes,
                address.device,
            )
            for part in parts
        ]
        return self._backend.begin(address.agent, [self._backend.own(part) for part in parts], there)

    def check(self, request: object) -> bool:
        return self._backend.check(self._address.agent, request)
