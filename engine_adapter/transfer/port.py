"""The port for reading experts from another rank's memory. `shared_memory` and `nixl` implement it, and
`in_process` implements it for tests.

The receiver reads ("pulls"). So the process that owns the destination also owns the transfer, and it alone
knows when its cell is safe to reuse. No transfer can be cancelled: an abandoned one continues until it has
*settled*. Its cell must not be used before that.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fleet.requests.handovers import MemoryAddress

Landed = Callable[[int], None]
"""Called on the event loop with the bytes of a read that have landed so far, counted in the order of its
ranges."""


class Pull(NamedTuple):
    """Read request for a range of one cell."""

    source: int
    """Remote cell."""
    source_offset: int
    """Bytes from the start of the remote cell."""
    cell: int
    """Local cell. Reserved for this read."""
    offset: int
    """Bytes from the start of the local cell."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """Result of a completed read."""

    bytes: int
    seconds: float


class TransferError(Exception):
    """A transfer failed. The text names the cause and the remedy. Nothing is in flight."""


class PeerGone(TransferError):
    """The other process is dead or closed its connections."""


class AddressRefused(TransferError):
    """The address cannot be used: it has another layout, is out of range, or is not reachable by this
    backend. Nothing was read."""


class Overdue(Exception):
    """The deadline passed while bytes were in flight. `settled` completes once no bytes can land. Until then
    the cells stay in quarantine."""

    def __init__(self, detail: str, settled: "asyncio.Future[None]") -> None:
        super().__init__(detail)
        self.settled = settled


class Transfer(Protocol):
    """A transfer backend with which a rank reads other ranks' expert memory. All methods are called from one
    event loop and never block it."""

    name: str
    """Name of the backend: shared or nixl."""

    @property
    def opened_bytes(self) -> int:
        """Growth of the process's private memory while the backend was opened, in bytes. 0: it has none, or
        is not open yet."""
        ...

    def address(self, address: MemoryAddress) -> MemoryAddress:
        """Return our own address, extended with what readers need to reach us by this backend."""
        ...

    def reaches(self, address: MemoryAddress) -> bool:
        """True if this backend can read that memory, as far as the address shows."""
        ...

    async def pull(
        self, address: MemoryAddress, pulls: Sequence[Pull], seconds: float, landed: Landed | None = None
    ) -> Pulled:
        """Read ranges of cells, in order. TransferError: nothing is in flight. Overdue: `seconds` passed
        while bytes were in flight. A cancelled call also raises Overdue, in place of CancelledError, if bytes
        are still in flight. Data read before an error is unverified and must not be used. landed: told of
        progress, every few MiB at most, and possibly after the call has ended. A backend may leave it out.
        """
        ...

    def forget(self, address: MemoryAddress) -> None:
        """Drop all state kept for a rank that is gone. Reads in progress from it still settle."""
        ...

    def busy(self, active: bool) -> None:
        """Tell the backend whether other ranks read from us, or soon will. A backend that needs the source's
        help (NIXL over TCP) then provides it at short intervals."""
        ...

    async def close(self) -> None:
        """Close, within a bounded time. Wait for reads in progress. Reads that do not settle in time keep
        their memory until the process ends."""
        ...
